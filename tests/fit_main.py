"""A real pass of the trainer in a process of its own, and the most memory that it took.

    python -m tests.fit_main SHAPE SEQ_LEN TOKENS RUNS CHECKPOINTS

Prints the bytes, without those of the interpreter and the libraries.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from prime_rl.configs.losses import AipoLossConfig
from prime_rl.configs.shared import LoRAConfig
from prime_rl.trainer.fit.predict import MOMENTS, Setting, micro_batch
from prime_rl.trainer.fit.shapes import model_config
from prime_rl.trainer.model import adapt_model
from prime_rl.trainer.passes import forward_backward
from prime_rl.utils.allocator import give_back_large_blocks

PROC = Path("/proc/self")


def memory(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", (PROC / "status").read_text(), re.M)
    assert found, name
    return 1024 * int(found.group(1))


def warm_up() -> None:
    """What the libraries take once, whatever the size of the model: threads and their workspaces."""
    layer = torch.nn.Linear(64, 64)
    layer(torch.ones(64, 64)).sum().backward()


def main(name: str, seq_len: str, tokens: str, runs: str, checkpoints: str) -> None:
    config, lora = model_config(name), LoRAConfig()
    setting = Setting(config, torch.float32, lora, int(runs), int(seq_len), int(tokens), checkpoints == "True")
    give_back_large_blocks()  # as the trainer does
    warm_up()
    before = memory("VmRSS")
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = adapt_model(base, lora, setting.num_runs, checkpoints=setting.checkpoints)
    moments = []
    for leaf in model.adapters():
        torch.nn.init.uniform_(leaf.data)
        leaf.grad = torch.ones_like(leaf)  # zeros would take no memory before they are written
        moments += [torch.ones_like(leaf) for _ in range(MOMENTS)]
    (PROC / "clear_refs").write_text("5")  # the peak counts from here
    batch = micro_batch(setting)
    forward_backward(model, batch, [AipoLossConfig()] * len(batch.run_idxs), torch.device("cpu"))
    print(memory("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
