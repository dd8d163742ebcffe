"""A real pass of the trainer in a process that did nothing yet, and the most memory that it took.

    python -m tests.fit_main MODEL SEQ_LEN TOKENS RUNS CHECKPOINTS [HOST_COPIES]

RUNS 0 trains the whole model. Prints the bytes, without those of the interpreter and the libraries.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.losses import AipoLossConfig
from prime_rl.configs.orchestrator import OptimConfig
from prime_rl.trainer.checkpoint import copy_to_cpu
from prime_rl.trainer.memory import MOMENTS, Setting, micro_batch, model_config
from prime_rl.trainer.model import PolicyModel, adapt_model, mesh_of, train_whole
from prime_rl.trainer.optim import make_optimizer
from prime_rl.trainer.step import forward_backward
from prime_rl.trainer.whole_model import ShardedWeights, WholeModel
from prime_rl.trainer.world import setup_world
from prime_rl.utils.runtime import set_up_memory
from tests.patience import PATIENCE_S

PROC = Path("/proc/self")


def memory(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", (PROC / "status").read_text(), re.M)
    assert found, name
    return 1024 * int(found.group(1))


def warm_up() -> None:
    """What the libraries take once, whatever the size of the model: threads and their workspaces."""
    layer = torch.nn.Linear(64, 64)
    layer(torch.ones(64, 64)).sum().backward()


def with_adapters(setting: Setting, base: nn.Module) -> tuple[PolicyModel, object]:
    """The model, and what else its trainer keeps."""
    assert setting.lora is not None
    model = adapt_model(base, setting.lora, setting.num_runs, checkpoints=setting.checkpoints)
    kept = []
    for leaf in model.adapters():
        torch.nn.init.uniform_(leaf.data)
        # Gradients of the passes before and moments; zeros would take no memory before they are written.
        kept += [torch.ones_like(leaf) for _ in range(1 + MOMENTS)]
    return model, kept


def as_a_whole(setting: Setting, base: nn.Module) -> tuple[PolicyModel, object]:
    """The same, with optimizer, base copy, snapshot and saved moments of the trainer itself, after an update."""
    world = setup_world("cpu", PATIENCE_S)
    model = train_whole(base, mesh_of(world), torch.float32, checkpoints=setting.checkpoints)
    named = list(base.named_parameters())
    kept: list[object] = []
    if setting.host_copies:
        whole = WholeModel(base, keeps=True)
        kept += [whole, whole.gather(torch.float32, torch.device("cpu"))]
    weights = ShardedWeights(named)
    optimizer = make_optimizer(OptimConfig(), weights.vectors)
    for _, leaf in named:
        leaf.grad = torch.ones_like(leaf)
    weights.begin(world)
    optimizer.step()
    if setting.host_copies:
        kept.append(copy_to_cpu(optimizer.state_dict()))
    return model, [*kept, optimizer, weights, world]


def main(argv: Sequence[str]) -> None:
    name, seq_len, tokens, runs, checkpoints, host_copies = [*argv, "0"][:6]
    config, lora = model_config(name), LoRAConfig() if int(runs) else None
    sizes = {"num_runs": int(runs), "seq_len": int(seq_len), "tokens": int(tokens), "host_copies": int(host_copies)}
    setting = Setting(config, torch.float32, lora, checkpoints=checkpoints == "True", **sizes)
    set_up_memory()  # as the trainer does
    warm_up()
    before = memory("VmRSS")
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model, kept = with_adapters(setting, base) if lora else as_a_whole(setting, base)
    (PROC / "clear_refs").write_text("5")  # the peak counts from here
    batch = micro_batch(setting)
    forward_backward(model, batch, [AipoLossConfig()] * len(batch.run_idxs), torch.device("cpu"))
    print(memory("VmHWM") - before)
    del kept


if __name__ == "__main__":
    main(sys.argv[1:])
