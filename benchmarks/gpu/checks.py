"""Whether what only a card has works, and a pass is right: kernels, packed rows, a run and its neighbours."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.stage import RANK, Batches, Stage, differ, matmul_rate, one_pass, planned
from benchmarks.selfcheck import Progress, check
from benchmarks.selfcheck_replay import find_recording
from benchmarks.trainer_step import VOCAB, Tenants, world
from benchmarks.trainer_workspace import write_run
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.layout import list_steps
from prime_rl.contract.types import MicroBatch
from prime_rl.lora.linear import GroupedPlan, LoopedPlan, Plan, Tables, TokenGroup
from prime_rl.trainer.model import PackedRows, Segments, packed_attention, varlen_kernel
from prime_rl.trainer.step import split
from prime_rl.trainer.train import train

# Tokens of rows and of groups: few ends are a multiple of eight.
LENGTHS = (3, 128, 77, 1, 300)
# Of a few layers, with some rows of 128 tokens in the mean.
NUM_LAYERS, NUM_UPDATES, SIZES = 6, 3, (8, 16, 1024)
NUM_RUNS, NUM_ROWS, _ = SIZES
LR = 1e-3  # so large that noise in the sign of a small gradient shows
ALONE = (0, 5)
# Runs of a workspace that is replayed.
NUM_RECORDED = 2


def run_env(stage: Stage) -> None:
    """What is there, and whether it works."""
    stage.measure("varlen", varlen, stage)
    for rank in (8, 16, 64):
        stage.measure(f"grouped_rank_{rank}", products, stage, rank)
    stage.measure("matmul", matmul_rate, stage)


def varlen(stage: Stage) -> dict[str, object]:
    """Packed attention and its gradients against torch's own in float32, row by row."""
    shapes = [(1, heads, sum(LENGTHS), 64) for heads in (8, 2, 2)]
    ours = [torch.randn(shape, device=stage.device, dtype=stage.dtype, requires_grad=True) for shape in shapes]
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    theirs = [each.detach().float().requires_grad_() for each in ours]
    segments = Segments.of(PackedRows(LENGTHS, (0,) * len(LENGTHS)), torch.device(stage.device))
    out, _ = packed_attention(nn.Identity(), ours[0], ours[1], ours[2], None, segments=segments)
    rows = zip(*(torch.split(each, [*LENGTHS], dim=2) for each in theirs), strict=True)
    attention = nn.functional.scaled_dot_product_attention
    wanted = torch.cat([attention(*row, **options) for row in rows], dim=2).transpose(1, 2)
    grads = torch.autograd.grad(out.float().square().sum(), ours)
    wanted_grads = torch.autograd.grad(wanted.square().sum(), theirs)
    found: dict[str, object] = {"kernel": "stretches" if stage.tiny else varlen_kernel().__name__}
    names = ("difference", "grad_query", "grad_key", "grad_value")
    pairs = zip(names, (out.detach(), *grads), (wanted.detach(), *wanted_grads), strict=True)
    return found | {name: differ(one, other) for name, one, other in pairs}


def products(stage: Stage, rank: int) -> dict[str, float]:
    """Each product of uneven groups of two layers by its kernel, `torch._grouped_mm`, against a loop over them."""
    num_in, num_out = (64, 128) if stage.tiny else (1024, 3072)
    num_tokens, num_groups = sum(LENGTHS), len(LENGTHS)
    shapes = [(num_tokens, num_in), (num_tokens, num_out), (num_groups, rank, num_in), (num_groups, num_out, rank)]
    x_NI, grad_NO, A_GKI, B_GOK = (torch.randn(shape, device=stage.device).bfloat16() / 8 for shape in shapes)
    starts = [sum(LENGTHS[:idx]) for idx in range(num_groups)]
    groups = [TokenGroup(idx, at, at + LENGTHS[idx], 1.5) for idx, at in enumerate(starts)]

    def by(plan: Plan) -> dict[str, Tensor]:
        leaves = Tables([A_KI for A_KI in A_GKI.unbind() for _ in range(2)], 2 * B_GOK.unbind())
        (tables,) = plan.tables([leaves], x_NI.dtype)
        h_NK = plan.project(x_NI, tables.A)
        outs, grad_x_NI = [torch.zeros_like(grad_NO) for _ in range(2)], torch.zeros_like(x_NI)
        plan.add(outs, h_NK, tables.B)
        grads = plan.differentiate([grad_NO, -grad_NO / 2], grad_x_NI, x_NI, h_NK, tables)
        of_A, of_B = torch.stack(grads[: 2 * num_groups]), torch.stack(grads[2 * num_groups :])
        return {"h": h_NK, "out": torch.stack(outs), "grad_x": grad_x_NI, "grad_A": of_A, "grad_B": of_B}

    kernel, loop = by(GroupedPlan(groups)), by(LoopedPlan(groups))
    return {name: differ(kernel[name], loop[name]) for name in kernel}


def run_correct(stage: Stage) -> None:
    """Adapters and their gradients."""
    world(stage.device)
    stage.measure("isolation_float32", isolation, stage, torch.float32, "highest")
    stage.measure("packed_float32", packed, stage, torch.float32)
    stage.measure("packed_bfloat16", packed, stage, torch.bfloat16)
    stage.measure("grouped_bfloat16", grouped_and_twice, stage)
    stage.measure("isolation_tf32", isolation, stage, torch.float32, "high")
    stage.measure("isolation_bfloat16", isolation, stage, torch.bfloat16, "high")


def run_selfcheck(stage: Stage) -> None:
    """The record of the real trainer, replayed."""
    for dtype in ("float32", *["bfloat16"] * (not stage.tiny)):
        stage.measure(dtype, replayed, stage, dtype)


def replayed(stage: Stage, dtype: str) -> dict[str, float]:
    """The worst that `benchmarks.selfcheck` finds of a workspace that this trainer has just recorded."""
    vocab_size = min(VOCAB, stage.shape["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        model, workspace = Path(folder) / "model", Path(folder) / "workspace"
        stage.base(getattr(torch, dtype), NUM_LAYERS, peak=4.0, vocab_size=vocab_size).save_pretrained(model)
        of_model = {"name": str(model), "dtype": dtype, "lora": {"rank": RANK}}
        given = {"output_dir": workspace, "model": of_model, "device": stage.device, "seq_len": 64}
        slots = {"max_concurrent_runs": NUM_RECORDED, "max_tokens_per_micro_batch": 1024}
        config, num_steps = TrainerConfig.model_validate({**given, **slots}), 2 if stage.tiny else NUM_UPDATES
        runs = [
            write_run(workspace, f"run_{number}", model, num_steps, keeps=True, vocab_size=vocab_size)
            for number in range(NUM_RECORDED)
        ]
        here = world(stage.device)
        train(config, here, lambda: all(num_steps in list_steps(run.broadcast, stable_only=True) for run in runs))
        verdicts = check(config, here, [find_recording(run) for run in runs], 1e-4, Progress(0))
    reached = [each.reached.difference for each in verdicts if each.reached.difference is not None]
    return {"difference": max(each.difference for each in verdicts), "reached": max(reached), "runs": len(reached)}


@contextmanager
def small(stage: Stage, dtype: torch.dtype, num_runs: int = NUM_RUNS) -> Iterator[Tenants]:
    """Runs on a few layers; B is not zero, since A would have no gradient."""
    base, generator = stage.base(dtype, NUM_LAYERS, peak=4.0), torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        made = Tenants(Path(folder), num_runs, num_runs, base, RANK, "layers", device=stage.device, packs=True, lr=LR)
        for layer in made.model.layers.values():
            values_OK = torch.randn(layer.base_layer.out_features, RANK, generator=generator) / 50
            for idx in range(num_runs):
                layer.parameters_of(idx)[1].data.copy_(values_OK)
        yield made


def vectors(tenants: Tenants, of: Callable[[Tensor], Tensor | None]) -> list[Tensor]:
    """For each run all that `of` takes from the leaves of its adapter."""
    every = [tenants.manager.get_named_parameters_for_run(idx) for idx in sorted(tenants.manager.used_idxs)]
    parts = [[part for _, leaf in leaves if (part := of(leaf)) is not None] for leaves in every]
    return [torch.cat([part.detach().double().cpu().flatten() for part in each]) for each in parts]


def gradients(tenants: Tenants, passes: Sequence[MicroBatch]) -> list[Tensor]:
    tenants.drop_gradients()
    for batch in passes:
        tenants.train_pass(batch)
    return vectors(tenants, lambda leaf: leaf.grad)


def worst(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(differ(one, other) for one, other in zip(ours, theirs, strict=True))


def packed(stage: Stage, dtype: torch.dtype) -> dict[str, float]:
    """Gradients of all rows in one pass, against each row in a pass of its own; float32 without TF32."""
    torch.set_float32_matmul_precision("highest")
    with small(stage, dtype) as tenants:
        whole = one_pass(stage.rows(*SIZES))
        single = [split(whole, slice(row, row + 1)) for row in range(NUM_ROWS)]
        return {"difference": worst(gradients(tenants, [whole]), gradients(tenants, single))}


def grouped_and_twice(stage: Stage) -> dict[str, float]:
    """Gradients by one kernel for all groups, against a loop over them; and the same pass twice."""
    found = []
    with small(stage, torch.bfloat16) as tenants:
        for plan in (GroupedPlan, GroupedPlan, LoopedPlan):
            with planned(plan):
                found.append(gradients(tenants, [one_pass(stage.rows(*SIZES))]))
    return {"difference": worst(found[0], found[2]), "twice_difference": worst(found[1], found[0])}


def isolation(stage: Stage, dtype: torch.dtype, precision: str) -> dict[str, float]:
    """Adapters after some updates, trained with all neighbours, against trained alone."""
    torch.set_float32_matmul_precision(precision)
    updates = [stage.rows(*SIZES, seed=seed) for seed in range(NUM_UPDATES)]

    def trained(updates: Sequence[Batches]) -> list[Tensor]:
        with small(stage, dtype, len(updates[0])) as tenants:
            for batches in updates:
                tenants.train(batches, one_pass(batches))
            return vectors(tenants, lambda leaf: leaf)

    together = trained(updates)
    alone = [trained([[batches[idx]] for batches in updates])[0] for idx in ALONE]
    return {"difference": worst([together[idx] for idx in ALONE], alone)}
