"""Models that people have: time and resident memory of a whole step, each in a process of its own.

    python -m benchmarks.trainer_real SIDE SHAPE ROWS TOKENS none|mlp|layers [PROMPT]

SIDE is ours, apart, peft, sequential, texts or peft_texts. The shapes of SmolLM2-135M and Qwen3-0.6B with random
weights, in float32; rank 16 on every linear layer, half of each row prompt. Ours trains eight runs; peft one adapter on
all the rows, or eight one after another ("sequential"). The fifth word is what backward computes again. With PROMPT the
rows are one group, the batch of one of the eight runs: so many tokens of prompt that all have in common, and answers of
TOKENS; "apart" computes the prompt for each. The rows of "texts" (ours) and "peft_texts" (one adapter after another)
are conversations to learn, of 64 to TOKENS tokens. A child prints the seconds of its quickest step, the most memory
that it ever held, interpreter and libraries included, and what it held before.
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
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.trainer_peft import PeftTexts, PeftTrainer
from benchmarks.trainer_step import MAX_TOKENS, Tenants, bench_sample, bench_text
from prime_rl.contract.types import SampleColumns
from prime_rl.trainer.memory import model_config
from prime_rl.utils.runtime import set_up_memory

NUM_RUNS, RANK, NUM_STEPS, NUM_PAIRS = 8, 16, 3, 3
SMOLLM2 = ("smollm2-135m", 16, 256)
# So large a vocabulary that its logits are most of the memory of a step.
QWEN3 = ("qwen3-0.6b", 2, 512)
# Rollouts, tokens of their prompt, tokens of each answer. All are in one pass; those of peft are smaller, or 24 GiB are
# too little for it.
GROUPS = ((16, 512, 128), (8, 128, 128), (16, 16, 128))
GROUP_TOKENS, PEFT_TOKENS = 16_384, 4096
# Four texts for each run: those of one, padded, are a pass of peft, and ours are as large.
TEXTS, TEXT_TOKENS = ("smollm2-135m", 4 * NUM_RUNS, 512), 2048
OURS = ("ours", "apart", "texts")


@dataclass(frozen=True)
class Cost:
    seconds: float
    num_bytes: float
    before: float


def groups() -> dict[str, float]:
    """Ratios of a pass in which the prompt of a group is computed once to one in which it is for each rollout."""
    figures = {}
    for rows, prompt, answer in GROUPS:
        shape, name = ("smollm2-135m", rows, answer), f"group_{rows}x{prompt}_{answer}"
        ours, apart = (_child(side, shape, "none", prompt) for side in ("ours", "apart"))
        figures[f"{name}_vs_unshared"] = ours.seconds / apart.seconds
        figures[f"{name}_memory_vs_unshared"] = (ours.num_bytes - ours.before) / (apart.num_bytes - apart.before)
        if prompt == GROUPS[0][1]:
            figures[f"{name}_vs_one_peft"] = ours.seconds / _child("peft", shape, "none", prompt).seconds
    return figures


def real_models() -> dict[str, float]:
    """Ratios of ours to peft, medians of pairs."""
    figures = {}
    figures["real_vs_one_peft"], figures["real_memory_vs_peft"] = _ratios(SMOLLM2, "none", "peft", "none")
    checkpointed = _ratios(SMOLLM2, "layers", "peft", "layers")
    figures["real_ckpt_vs_peft_ckpt"], figures["real_ckpt_memory_vs_peft_ckpt"] = checkpointed
    figures["real_vs_sequential_peft"], _ = _ratios(SMOLLM2, "none", "sequential", "none")
    figures["vocab_vs_one_peft"], figures["vocab_memory_vs_peft"] = _ratios(QWEN3, "mlp", "peft", "none")
    return figures


def texts() -> dict[str, float]:
    """Ratios of eight runs that learn texts to eight peft adapters that do so in turn."""
    ours, theirs = (_child(side, TEXTS, "none") for side in ("texts", "peft_texts"))
    return {"sft_vs_peft": ours.seconds / theirs.seconds, "sft_memory_vs_peft": ours.num_bytes / theirs.num_bytes}


def _ratios(shape: tuple[str, int, int], ours_again: str, other: str, again: str) -> tuple[float, float]:
    """Of seconds and of bytes; the last and `ours_again` are what backward computes again."""
    pairs = [(_child("ours", shape, ours_again), _child(other, shape, again)) for _ in range(NUM_PAIRS)]
    times = [ours.seconds / theirs.seconds for ours, theirs in pairs]
    sizes = [ours.num_bytes / theirs.num_bytes for ours, theirs in pairs]
    return statistics.median(times), statistics.median(sizes)


def _child(side: str, shape: tuple[str, int, int], again: str, prompt: int = 0) -> Cost:
    argv = [sys.executable, "-m", "benchmarks.trainer_real", side, *map(str, shape), again, str(prompt)]
    done = subprocess.run(argv, check=True, capture_output=True, encoding="utf-8")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def main(side: str, name: str, num_rows: str, num_tokens: str, again: str, num_prompt: str = "0") -> None:
    if side in OURS:
        set_up_memory()  # as the trainer does
    config = model_config(name)
    torch.manual_seed(0)
    base: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    rng = random.Random(0)
    prompt = [rng.randrange(config.vocab_size) for _ in range(int(num_prompt))]
    length = len(prompt) + int(num_tokens)
    shape = length, len(prompt) or length // 2, config.vocab_size, prompt
    made = (
        bench_text(rng, config.vocab_size, most=length) if "texts" in side else bench_sample(rng, *shape)
        for _ in range(int(num_rows))
    )
    rows = [sample.columns() for sample in made]
    num_runs = 1 if prompt else min(NUM_RUNS, len(rows))
    batches = [rows[number::num_runs] for number in range(num_runs)]
    with tempfile.TemporaryDirectory() as folder:
        group_tokens = PEFT_TOKENS if side == "peft" else GROUP_TOKENS
        max_tokens = group_tokens if prompt else TEXT_TOKENS if "texts" in side else MAX_TOKENS
        step = _step(side, Path(folder), base, batches, again, max_tokens)
        before = _most_held()
        seconds = min(_timed(step) for _ in range(NUM_STEPS))
    print(json.dumps({"seconds": seconds, "num_bytes": _most_held(), "before": before}))


def _most_held() -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (peak,) = [line for line in lines if line.startswith("VmHWM")]
    return 1024.0 * int(peak.split()[1])


def _step(
    side: str, folder: Path, base: PreTrainedModel, batches: list[list[SampleColumns]], again: str, max_tokens: int
) -> Callable[[], None]:
    if side in OURS:
        modes: dict[str, Any] = {"shares": side != "apart", "max_tokens": max_tokens}
        return Tenants(folder, NUM_RUNS, len(batches), base, RANK, again, **modes).step_of(batches)
    num_adapters = 1 if side == "peft" else len(batches)
    kind = PeftTexts if side == "peft_texts" else PeftTrainer
    peft = kind(num_adapters, base, RANK, again == "layers", max_tokens)
    step = peft.step_one if side == "peft" else peft.step_sequential
    return lambda: step(batches)


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
