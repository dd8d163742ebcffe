"""A pass of the trainer: tokens/s, memory beside `prl fit`, what is inside, and the peft library on the same tokens.

A step is forward, backward, clipping and AdamW of every run by the trainer's own `TrainStep`, all rows in one pass.
Rows are half prompt; every second one is longer, so that groups are uneven, as in life; peft's have one length.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.stage import RANK, Stage, kernels, matmul_rate, one_pass, peaks, planned, timed, waits
from benchmarks.trainer_step import Tenants
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.lora.linear import LoopedPlan, TokenGroup
from prime_rl.trainer.memory import predict, setting_of
from prime_rl.trainer.step import forward_backward

# Runs, rows, tokens of a row, and what backward computes again; the default of a GPU is layers.
FIRST = {"runs_8": (8, 32, 512, "layers"), "one_row": (1, 1, 16_384, "layers")}
FIRST |= {"runs_64": (64, 64, 256, "layers"), "runs_8_of_64_rows": (8, 64, 256, "layers")}
LATER = {"runs_1": (1, 32, 512, "layers"), "rows_2048": (8, 8, 2048, "layers")}
LATER |= {"runs_8_none": (8, 32, 512, "none"), "runs_8_mlp": (8, 32, 512, "mlp")}
FITTED = ("runs_8", "one_row", "runs_8_none", "runs_8_mlp")
CHECKPOINTING: dict[str, bool | str] = {"layers": True, "mlp": "mlp", "none": False}
# The seconds of one entry over those of another.
RATIOS = {"vs_one_peft": ("runs_8", "peft_one"), "vs_peft_in_turn": ("runs_8", "peft_in_turn")}
RATIOS |= {"runs_64_vs_8": ("runs_64", "runs_8_of_64_rows")}


def run_pass(stage: Stage) -> None:
    """One of the models."""
    stage.measure("matmul", matmul_rate, stage)
    for name, shape in FIRST.items():
        stage.measure(name, step, stage, *shape)
    stage.measure("inside", inside, stage)
    stage.measure("peft_one", peft, stage, 1)
    stage.measure("peft_in_turn", peft, stage, 8)
    seconds = {name: found["step_s"] for name, found in stage.entries.items() if "step_s" in found}
    pairs = {name: pair for name, pair in RATIOS.items() if seconds.keys() >= {*pair}}
    stage.measure("ratios", lambda: {name: seconds[one] / seconds[other] for name, (one, other) in pairs.items()})
    stage.measure("fit_runs_8", fit, stage, "runs_8")
    for name, shape in LATER.items():
        stage.measure(name, step, stage, *shape)
    for name in () if stage.tiny else FITTED[1:]:
        stage.measure(f"fit_{name}", fit, stage, name)


@contextmanager
def tenants_of(stage: Stage, num_runs: int, again: str) -> Iterator[Tenants]:
    """So many runs on the whole model."""
    with tempfile.TemporaryDirectory() as folder:
        yield Tenants(Path(folder), num_runs, num_runs, stage.base(), RANK, again, device=stage.device, packs=True)


def step(stage: Stage, num_runs: int, num_rows: int, num_tokens: int, again: str) -> dict[str, float]:
    """A pass of all rows, and the updates of all runs."""
    batches = stage.rows(num_runs, num_rows, num_tokens)
    batch = one_pass(batches)
    lengths = [len(mask) for mask in batch.loss_mask]
    with tenants_of(stage, num_runs, again) as tenants:
        seconds = timed(stage, lambda: tenants.train(batches, batch))
        share = flops(stage, tenants, lengths) / 1e12 / seconds / stage.entries["matmul"]["tflops"]
        return {"step_s": seconds, "tokens_per_s": sum(lengths) / seconds, "matmul_share": share, **peaks()}


def fit(stage: Stage, name: str) -> dict[str, float]:
    """The peak that `prl fit` predicts for a card, and what was reserved over it."""
    num_runs, num_rows, num_tokens, again = (FIRST | LATER)[name]
    model = {"name": stage.shape_name, "lora": {"rank": RANK}, "activation_checkpointing": CHECKPOINTING[again]}
    settings = {"model": model, "max_concurrent_runs": num_runs, "seq_len": num_tokens}
    config = TrainerConfig.model_validate({**settings, "max_tokens_per_micro_batch": num_rows * num_tokens})
    gib = predict(replace(setting_of(config, "cuda", 1), shares=False)).peak / 2**30
    reserved = stage.entries[name].get("peak_reserved_gib")
    return {"predicted_gib": gib} | ({"reserved_vs_fit": reserved / gib} if reserved else {})


def flops(stage: Stage, tenants: Tenants, lengths: Sequence[int]) -> float:
    """Products of a pass: forward, and the gradients that it needs; what is computed again does not count."""
    shapes, of = [layer.base_layer.weight.shape for layer in tenants.model.layers.values()], stage.shape
    frozen, adapters = sum(shape.numel() for shape in shapes), sum(RANK * sum(shape) for shape in shapes)
    head = of["hidden_size"] * of["vocab_size"] / 2  # half of the tokens have loss
    attention = of["num_hidden_layers"] * of["num_attention_heads"] * of["head_dim"] * sum(each**2 for each in lengths)
    return float(sum(lengths) * (4 * (frozen + head) + 6 * adapters) + 6 * attention)


def inside(stage: Stage) -> dict[str, Any]:
    """A pass without its updates: the adapters' share, launches, the dearest kernels, waits of the host."""
    num_runs, num_rows, num_tokens, again = FIRST["runs_8"]
    batch = one_pass(stage.rows(num_runs, num_rows, num_tokens))
    with tenants_of(stage, num_runs, again) as tenants:

        def one() -> None:
            tenants.train_pass(batch)
            tenants.drop_gradients()

        found: dict[str, Any] = {"pass_s": timed(stage, one)}
        # The adapter of the first token alone.
        with planned(lambda groups: LoopedPlan([TokenGroup(groups[0].adapter, 0, 1, 1.0)])):
            found["adapters_share"] = 1 - timed(stage, one) / found["pass_s"]
        found |= kernels(one, stage.shape["num_hidden_layers"])
        if stage.device == "cuda":
            losses = [tenants.manager.run(idx).config.loss for idx in batch.run_idxs]
            tenants.model.routing.set_rows([None])
            lines = waits(lambda: forward_backward(tenants.model, batch, losses, torch.device("cuda", 0)))
            # Around a pass is the one copy of its reports.
            found |= {"host_waits": sum(lines.values()), "host_waits_lines": lines, "host_waits_around": waits(one)}
        return found


def peft(stage: Stage, num_adapters: int) -> dict[str, float]:
    """The peft library, one adapter after another, with layers checkpointed as ours."""
    from benchmarks.trainer_peft import PeftTrainer  # on machines with GPUs it may not be installed

    _, num_rows, num_tokens, _ = FIRST["runs_8"]
    rows, most = stage.rows(num_adapters, num_rows, num_tokens, even=True), num_rows * stage.tokens(num_tokens)
    trainer = PeftTrainer(num_adapters, stage.base(), RANK, checkpoints=True, max_tokens=most)
    seconds = timed(stage, lambda: trainer.step_sequential(rows))
    return {"step_s": seconds, "tokens_per_s": most / seconds, **peaks()}
