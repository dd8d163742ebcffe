"""What each rank of a trainer of the whole model holds at most, on one rank and on two.

    python -m tests.memory_main FOLDER

Writes `FOLDER/SIZE_RANK`: bytes beyond those of the interpreter and the libraries, from before the model is loaded. On
rank 0 until the second version is published, with the copy that inference gets: on a CPU it is in the same memory. On
the others until the end, where rank 0 puts the moments together.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from prime_rl.contract.layout import RunDir
from prime_rl.trainer import train as trainer
from prime_rl.trainer.world import setup_world
from tests.fit_main import PROC, memory, warm_up
from tests.patience import PATIENCE_S
from tests.ranks_main import Ranks
from tests.trainer_support import VOCAB, make_batch, published, put_batch, put_batches, whole_config, write_run

NUM_STEPS = 2
SIZES = (1, 2)
WEIGHTS_FILE = "model.safetensors"


def write_model(folder: Path) -> None:
    """Twelve layers of 2.7 million weights each and nothing else that counts."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def train(folder: Path, size: int) -> int:
    world = setup_world("cpu", PATIENCE_S, num_threads=1)
    run, model = RunDir(folder / str(size) / "run_a"), folder / "model"
    if world.is_master:
        write_run(run.path.parent, run.run_id, model)
        put_batches(run, 1)
    warm_up()
    before, peaks = memory("VmRSS"), []
    (PROC / "clear_refs").write_text("5")  # the peak counts from here

    def done() -> bool:
        if published(run) == 1 and not run.rollout_file(2).exists():
            put_batch(run, make_batch(run.run_id, 2))  # version 1 is written: of two copies for inference there is one
        if published(run) < NUM_STEPS:
            return False
        peaks.append(memory("VmHWM"))  # what is saved at the end does not count
        return True

    trainer.train(whole_config(run.path.parent, model), world, done)
    peak = peaks[0] if world.is_master else memory("VmHWM")
    (folder / f"{size}_{world.rank}").write_text(str(peak - before))
    world.close()
    return 0


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    write_model(folder / "model")
    for size in SIZES:
        (folder / str(size)).mkdir()
        if any(Ranks(size, folder / f"log_{size}", lambda size=size: train(folder, size)).wait()):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
