"""The trainer's step for eight runs against what one would take instead: the peft library.

The same 6 M-parameter Qwen3, the same tokens, rank 8 on every linear layer, the same loss and reports, float32 on the
CPU. Once against one peft adapter that is trained on all the tokens (what sharing costs), once against eight peft
adapters that are trained one after another over one base (what sharing saves). A step is forward, backward, clipping
and the AdamW update of every adapter. Memory and the share of publishing are measured on the real trainer, in
`trainer_workspace`.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.frame import paired_ratio
from benchmarks.trainer_peft import PeftTrainer
from benchmarks.trainer_real import groups, real_models, texts
from benchmarks.trainer_step import Tenants, bench_sample
from benchmarks.trainer_workspace import memory_8_vs_1, publish_shares
from prime_rl.contract.types import SampleColumns

NUM_RUNS = 8
EVEN = (2,) * NUM_RUNS
# The last run has 128 times the rows of the first.
UNEVEN = tuple(2**n for n in range(NUM_RUNS))


def run() -> dict[str, float]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        tenants = Tenants(Path(folder) / "eight", num_slots=NUM_RUNS, num_runs=NUM_RUNS)
        peft = PeftTrainer(NUM_RUNS)
        figures = {
            "multi_vs_one_peft_128": _ratio(tenants, peft.step_one, EVEN, 128),
            "multi_vs_sequential_peft_128": _ratio(tenants, peft.step_sequential, EVEN, 128),
            "multi_vs_sequential_peft_32": _ratio(tenants, peft.step_sequential, EVEN, 32),
            "unequal_vs_one_peft_128": _ratio(tenants, peft.step_one, UNEVEN, 128, num_pairs=5),
            "slots_64_vs_2": _slots_64_vs_2(Path(folder)),
        }
    return {**figures, "memory_8_vs_1": memory_8_vs_1(), **publish_shares(), **real_models(), **groups(), **texts()}


def _ratio(
    tenants: Tenants,
    other: Callable[[Sequence[Sequence[SampleColumns]]], None],
    rows_by_run: Sequence[int],
    num_tokens: int,
    num_pairs: int = 21,
) -> float:
    batches = _batches(rows_by_run, num_tokens)
    step = tenants.step_of(batches)
    return paired_ratio(step, lambda: other(batches), num_pairs=num_pairs)


def _slots_64_vs_2(folder: Path) -> float:
    """Two active runs in a trainer of 64 slots against the same two in a trainer of two."""
    batches = _batches((8, 8), 128)
    many, few = (Tenants(folder / f"slots_{slots}", num_slots=slots, num_runs=2).step_of(batches) for slots in (64, 2))
    return paired_ratio(many, few, num_pairs=21)


def _batches(rows_by_run: Sequence[int], num_tokens: int) -> list[list[SampleColumns]]:
    rng = random.Random(0)
    return [[bench_sample(rng, num_tokens).columns() for _ in range(num_rows)] for num_rows in rows_by_run]
