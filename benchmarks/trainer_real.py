"""Models that people have: time and resident memory of a whole step, each in a process of its own.

    python -m benchmarks.trainer_real ours|peft|sequential SHAPE ROWS TOKENS none|mlp|layers

The shapes of SmolLM2-135M and Qwen3-0.6B with random weights, in float32; rank 16 on every linear layer, half of each
row prompt. Ours trains eight runs; peft one adapter on all the rows, or eight one after another. The last word is what
backward computes again. A child prints the seconds of its quickest step and the most memory that it ever held,
interpreter and libraries included.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.trainer_peft import PeftTrainer
from benchmarks.trainer_step import Tenants, bench_sample
from prime_rl.contract.types import SampleColumns
from prime_rl.trainer.memory import model_config
from prime_rl.utils.runtime import set_up_memory

NUM_RUNS, RANK, NUM_STEPS, NUM_PAIRS = 8, 16, 3, 3
SMOLLM2 = ("smollm2-135m", 16, 256)
# So large a vocabulary that its logits are most of the memory of a step.
QWEN3 = ("qwen3-0.6b", 2, 512)


@dataclass(frozen=True)
class Cost:
    seconds: float
    num_bytes: float


def real_models() -> dict[str, float]:
    """Ratios of ours to peft, medians of pairs."""
    figures = {}
    figures["real_vs_one_peft"], figures["real_memory_vs_peft"] = _ratios(SMOLLM2, "none", "peft", "none")
    checkpointed = _ratios(SMOLLM2, "layers", "peft", "layers")
    figures["real_ckpt_vs_peft_ckpt"], figures["real_ckpt_memory_vs_peft_ckpt"] = checkpointed
    figures["real_vs_sequential_peft"], _ = _ratios(SMOLLM2, "none", "sequential", "none")
    figures["vocab_vs_one_peft"], figures["vocab_memory_vs_peft"] = _ratios(QWEN3, "mlp", "peft", "none")
    return figures


def _ratios(shape: tuple[str, int, int], ours_again: str, other: str, again: str) -> tuple[float, float]:
    """Of seconds and of bytes; the last and `ours_again` are what backward computes again."""
    pairs = [(_child("ours", shape, ours_again), _child(other, shape, again)) for _ in range(NUM_PAIRS)]
    times = [ours.seconds / theirs.seconds for ours, theirs in pairs]
    sizes = [ours.num_bytes / theirs.num_bytes for ours, theirs in pairs]
    return statistics.median(times), statistics.median(sizes)


def _child(side: str, shape: tuple[str, int, int], again: str) -> Cost:
    argv = [sys.executable, "-m", "benchmarks.trainer_real", side, *map(str, shape), again]
    done = subprocess.run(argv, check=True, capture_output=True, encoding="utf-8")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def main(side: str, name: str, num_rows: str, num_tokens: str, again: str) -> None:
    if side == "ours":
        set_up_memory()  # as the trainer does
    config = model_config(name)
    torch.manual_seed(0)
    base: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    rng = random.Random(0)
    shape = int(num_tokens), int(num_tokens) // 2, config.vocab_size
    rows = [bench_sample(rng, *shape).columns() for _ in range(int(num_rows))]
    num_runs = min(NUM_RUNS, len(rows))
    batches = [rows[number::num_runs] for number in range(num_runs)]
    with tempfile.TemporaryDirectory() as folder:
        step = _step(side, Path(folder), base, batches, again)
        seconds = min(_timed(step) for _ in range(NUM_STEPS))
    (peak,) = [
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM")
    ]
    print(json.dumps({"seconds": seconds, "num_bytes": 1024.0 * int(peak.split()[1])}))


def _step(
    side: str, folder: Path, base: PreTrainedModel, batches: list[list[SampleColumns]], again: str
) -> Callable[[], None]:
    if side == "ours":
        tenants = Tenants(folder, len(batches), len(batches), base, RANK, again)
        return tenants.step_of(batches)
    peft = PeftTrainer(len(batches) if side == "sequential" else 1, base, RANK, again == "layers")
    step = peft.step_sequential if side == "sequential" else peft.step_one
    return lambda: step(batches)


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
