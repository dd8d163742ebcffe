"""Learning rates, clipping, Muon, and an optimizer's state on the run's own rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from prime_rl.configs.orchestrator import OptimConfig, SchedulerConfig
from prime_rl.configs.validate import TrainerLimits
from prime_rl.lora.linear import AdapterRouting, MultiLoRALinear
from prime_rl.trainer.optim import NEEDS_MATRICES, Muon, RunOptimizer, lr_factor, make_optimizer, orthogonalized
from prime_rl.trainer.runs import MultiLoRAOptimizer, MultiLoRAScheduler, MultiRunManager
from tests.trainer_support import solo_world, write_run

BASE = Path("some/model")
TYPES = get_args(OptimConfig.model_fields["type"].annotation)
Parts = tuple[MultiRunManager, MultiLoRAOptimizer, MultiLoRAScheduler]


def with_runs(workspace: Path, *runs: dict[str, Any]) -> tuple[MultiRunManager, list[RunOptimizer]]:
    manager = with_views(workspace, *runs)[0]
    return manager, [run.training for run in manager.used]


def with_views(workspace: Path, *runs: dict[str, Any]) -> Parts:
    """A manager with one adapted layer of 6 inputs and 4 outputs in slots of rank 8; the runs take slots 0, 1, ..."""
    manager = MultiRunManager(workspace, 4, limits=TrainerLimits(str(BASE), 64, 8, 16.0))
    MultiLoRALinear(nn.Linear(6, 4), 8, 4, AdapterRouting(4)).register_with_runs(manager, "layer")
    optimizer = MultiLoRAOptimizer(manager, solo_world())
    scheduler = MultiLoRAScheduler(manager)
    optimizer.register_post_creation_callback(scheduler.scheduler_creation_hook)
    for number, changes in enumerate(runs):
        write_run(workspace, f"run_{number}", BASE, **changes)
    manager.discover_runs()
    manager.synchronize_state()
    assert len(manager.used_idxs) == len(runs)
    return manager, optimizer, scheduler


def set_gradients(manager: MultiRunManager, run_idx: int, rank: int, scale: float = 1.0) -> None:
    """Gradients as backward leaves them: zero outside the run's own rank."""
    for name, leaf in manager.get_named_parameters_for_run(run_idx):
        leaf.grad = torch.zeros_like(leaf)
        own = leaf.grad[:rank] if name.endswith("A") else leaf.grad[:, :rank]
        own.copy_(torch.randn(own.shape, generator=torch.Generator().manual_seed(3)) * scale)


@pytest.mark.parametrize("rank", [8, 4])
def test_gradients_of_many_passes_are_held_once(tmp_path: Path, rank: int) -> None:
    """In a slot of rank 8: a smaller adapter is a part of its slot, whose gradients are as large as the slot."""
    manager, (run,) = with_runs(tmp_path, {"model": {"lora": {"rank": rank}}})
    set_gradients(manager, 0, rank)
    leaves = [leaf for _, leaf in manager.get_named_parameters_for_run(0)]
    once = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    run.weights.keep_gradients()
    places = {leaf.grad.untyped_storage().data_ptr() for leaf in leaves if leaf.grad is not None}
    held = run.weights.vectors[0].grad
    assert held is not None and (places == {held.untyped_storage().data_ptr()}) is (rank == 8)
    for leaf, gradient in zip(leaves, once, strict=True):
        assert leaf.grad is not None
        leaf.grad += gradient  # as the next pass does
    run.weights.keep_gradients()
    assert run.reduce_gradients() == pytest.approx(2 * math.sqrt(sum(float(each.square().sum()) for each in once)))
    assert run.step(1.0) is None and all(leaf.grad is None for leaf in leaves)


@pytest.mark.parametrize("kind", TYPES)
def test_a_rate_that_float32_does_not_hold_is_its_own_runs_trouble(tmp_path: Path, kind: str) -> None:
    manager, (run,) = with_runs(tmp_path, {"optim": {"type": kind, "lr": 1e300}})
    set_gradients(manager, 0, 8)
    assert run.step(run.reduce_gradients()) == "the weights after it"


def test_the_rate_follows_the_schedule() -> None:
    constant = SchedulerConfig(warmup_steps=3)
    assert [lr_factor(constant, 10, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = SchedulerConfig(type="linear", min_lr_ratio=0.2)
    assert [lr_factor(linear, 4, step) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    cosine = SchedulerConfig(type="cosine", warmup_steps=2)
    assert [lr_factor(cosine, 10, step) for step in (2, 6, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert lr_factor(SchedulerConfig(type="cosine", warmup_steps=10), 10, 10) == 1.0


def test_each_run_has_its_own_rate(tmp_path: Path) -> None:
    _, runs = with_runs(tmp_path, {"optim": {"lr": 0.1}, "scheduler": {"warmup_steps": 1}}, {"optim": {"lr": 0.3}})
    assert [run.lr for run in runs] == pytest.approx([0.05, 0.3])
    update(runs[0])
    assert [run.lr for run in runs] == pytest.approx([0.1, 0.3])


def update(run: RunOptimizer) -> None:
    assert run.step(run.reduce_gradients()) is None
    run.next_rate()


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_schedule_that_goes_on_from_its_state_has_the_rates_of_one_without_a_break(tmp_path: Path, kind: str) -> None:
    changes = {"max_steps": 12, "scheduler": {"type": kind, "warmup_steps": 3, "min_lr_ratio": 0.1}}
    _, (one, other) = with_runs(tmp_path, changes, changes)
    for step in range(12):
        other.load_state_dict(one.state_dict())
        assert other.state_dict()["scheduler"] == {"step": step}
        for run in (one, other):
            update(run)
        assert one.lr == other.lr
    with pytest.raises(ValueError, match="at step -1"):
        one.load_state_dict({**one.state_dict(), "scheduler": {"step": -1}})


def test_a_run_that_is_admitted_at_a_step_starts_with_the_rate_of_that_step(tmp_path: Path) -> None:
    manager, _, _ = with_views(tmp_path)
    manager.register_discovered_hook(lambda idx, run_id, config: setattr(manager.progress[idx], "step", 5))
    write_run(tmp_path, "run_a", BASE, optim={"lr": 0.5}, max_steps=10, scheduler={"type": "linear"})
    manager.discover_runs()
    manager.synchronize_state()
    run = manager.run(0).training
    assert run.lr == pytest.approx(0.25) and run.state_dict()["scheduler"] == {"step": 5}


def test_a_step_without_arguments_is_that_of_the_ready_runs(tmp_path: Path) -> None:
    """Slots without a run have neither optimizer nor scheduler; other runs keep weights, gradients and rate."""
    linear = {"max_steps": 10, "scheduler": {"type": "linear"}, "optim": {"lr": 0.1}}
    manager, optimizer, scheduler = with_views(tmp_path, linear, linear)
    assert [made is not None for made in optimizer.optimizers] == [True, True, False, False]
    assert [made is not None for made in scheduler.schedulers] == [True, True, False, False]
    before = [manager.get_state_dict_for_run(idx) for idx in (0, 1)]
    for idx in (0, 1):
        set_gradients(manager, idx, rank=8)
    manager.ready_to_update[1] = True
    optimizer.step()
    scheduler.step()
    same = [
        all(torch.equal(tensor, old[name]) for name, tensor in manager.get_state_dict_for_run(idx).items())
        for idx, old in enumerate(before)
    ]
    assert same == [True, False] and [run.training.lr for run in manager.used] == pytest.approx([0.1, 0.09])
    has_grads = [manager.get_named_parameters_for_run(idx)[0][1].grad is not None for idx in (0, 1)]
    assert has_grads == [True, False]
    manager.evict_run(1, "test")
    manager.discover_runs()
    manager.synchronize_state()
    assert optimizer.optimizers[1] is None and scheduler.schedulers[1] is None


def test_a_gradient_is_clipped_by_the_limit_of_its_own_run(tmp_path: Path) -> None:
    sgd = {"type": "sgd", "lr": 1.0, "betas": [0.0, 0.0]}
    manager, runs = with_runs(tmp_path, {"optim": {**sgd, "max_norm": 0.5}}, {"optim": {**sgd, "max_norm": 0}})
    moved = []
    for idx in (0, 1):
        set_gradients(manager, idx, rank=8, scale=5.0)
        before = manager.get_state_dict_for_run(idx)
        norm = runs[idx].reduce_gradients()
        expected = math.sqrt(sum(float(p.grad.square().sum()) for _, p in manager.get_named_parameters_for_run(idx)))
        assert norm == pytest.approx(expected)
        assert runs[idx].step(norm) is None
        after = manager.get_state_dict_for_run(idx)
        moved.append(math.sqrt(sum(float((after[k] - before[k]).square().sum()) for k in before)))
        assert all(p.grad is None for _, p in manager.get_named_parameters_for_run(idx))
    assert moved == pytest.approx([0.5, norm], rel=1e-5)


@pytest.mark.parametrize("kind", TYPES)
def test_weight_decay_is_decoupled(tmp_path: Path, kind: str) -> None:
    """With a zero gradient, weights shrink by exactly lr x weight_decay."""
    manager, [run] = with_runs(tmp_path, {"optim": {"type": kind, "lr": 0.1, "weight_decay": 0.5}})
    before = manager.get_state_dict_for_run(0)
    update(run)
    for name, tensor in manager.get_state_dict_for_run(0).items():
        torch.testing.assert_close(tensor, before[name] * 0.95)


@pytest.mark.parametrize("kind", TYPES)
def test_a_run_of_lower_rank_touches_only_its_part_and_keeps_only_its_state(tmp_path: Path, kind: str) -> None:
    manager, [run] = with_runs(tmp_path, {"optim": {"type": kind, "lr": 0.1}, "model": {"lora": {"rank": 2}}})
    for _ in range(3):
        set_gradients(manager, 0, rank=2)
        update(run)
    (_, lora_A), (_, lora_B) = manager.get_named_parameters_for_run(0)
    assert lora_A[:2].all() and not lora_A[2:].any() and lora_B[:, :2].all() and not lora_B[:, 2:].any()
    shapes = {tuple(t.shape) for s in run.state_dict()["optimizer"]["state"].values() for t in s.values() if t.dim()}
    assert shapes == ({(2, 6), (4, 2)} if kind in NEEDS_MATRICES else {(2 * 6 + 4 * 2,)})


@pytest.mark.parametrize("kind", TYPES)
def test_a_state_that_no_update_leaves_is_refused(tmp_path: Path, kind: str) -> None:
    """torch takes it, and the next update would raise: in the pass that all runs share."""
    manager, [run] = with_runs(tmp_path, {"optim": {"type": kind, "lr": 0.1, "betas": [0.9, 0.9]}})
    set_gradients(manager, 0, rank=8)
    update(run)
    saved = run.state_dict()
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda part: part[None] if part.dim() else part,
        lambda part: part[..., None] if part.dim() else part,
        *((lambda part, count=count: part if part.dim() else part + count) for count in (-1e30, 1e30, math.nan)),
    ]
    num_refused = 0
    for change in changes:
        state = {
            at: {key: change(part) for key, part in each.items()} for at, each in saved["optimizer"]["state"].items()
        }
        with contextlib.suppress(ValueError):
            run.load_moments({**saved["optimizer"], "state": state})
            num_refused -= 1
        num_refused += 1
    has_counts = any(not part.dim() for each in saved["optimizer"]["state"].values() for part in each.values())
    assert num_refused == (5 if has_counts else 2)
    with pytest.raises(ValueError, match="the saved scheduler is at step"):
        run.load_state_dict({**saved, "scheduler": {"step": 2**1000}})
    run.load_state_dict(saved)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", TYPES)
def test_a_saved_state_goes_on_to_the_last_bit(tmp_path: Path, kind: str, dtype: str) -> None:
    changes = {"optim": {"type": kind, "lr": 0.1}, "model": {"lora": {"rank": 2, "dtype": dtype}}}
    manager, runs = with_runs(tmp_path, changes, changes)
    set_gradients(manager, 0, rank=2)
    update(runs[0])
    saved = tmp_path / "state.pt"
    torch.save(runs[0].state_dict(), saved)
    manager.load_state_dict_for_run(1, manager.get_state_dict_for_run(0))
    runs[1].load_state_dict(torch.load(saved, weights_only=True))
    for idx in (0, 1):
        set_gradients(manager, idx, rank=2, scale=0.3)
        update(runs[idx])
    one, other = manager.get_state_dict_for_run(0), manager.get_state_dict_for_run(1)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_weights_in_bfloat16_are_rounded_after_every_update_and_the_moments_are_not(tmp_path: Path) -> None:
    changes = {"optim": {"lr": 0.1}, "model": {"lora": {"rank": 2, "dtype": "bfloat16"}}}
    manager, runs = with_runs(tmp_path, changes, {**changes, "model": {"lora": {"rank": 2}}})
    for idx in (0, 1):
        rounded = []
        for number in range(3):
            leaves = [leaf for _, leaf in manager.get_named_parameters_for_run(idx)]
            rounded.append(all(torch.equal(leaf, leaf.bfloat16().float()) for leaf in leaves))
            set_gradients(manager, idx, rank=2, scale=0.3 + number)
            update(runs[idx])
        assert rounded == [idx == 0] * 3, "the start values too"
    exported = manager.get_state_dict_for_run(0)
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in manager.get_state_dict_for_run(1).values()} == {torch.float32}
    for state in runs[0].state_dict()["optimizer"]["state"].values():
        assert all(
            t.dtype == torch.float32 and not torch.equal(t, t.bfloat16().float()) for t in state.values() if t.dim()
        )
    # A float32 adapter that is loaded into such a run is rounded too.
    manager.load_state_dict_for_run(0, manager.get_state_dict_for_run(1))
    pairs = zip(*(manager.get_named_parameters_for_run(idx) for idx in (0, 1)), strict=True)
    assert all(torch.equal(rounded, exact.bfloat16().float()) for (_, rounded), (_, exact) in pairs)


def test_a_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    _, (sgd, adamw) = with_runs(tmp_path, {"optim": {"type": "sgd"}}, {"optim": {"type": "adamw"}})
    with pytest.raises(ValueError, match=r"state of 'sgd', the config asks for optim.type = 'adamw'"):
        adamw.load_state_dict(sgd.state_dict())


def test_a_neighbour_of_a_deleted_run_keeps_its_gradients(tmp_path: Path) -> None:
    manager, _ = with_runs(tmp_path, {}, {})
    for idx in (0, 1):
        set_gradients(manager, idx, rank=8)
    manager.evict_run(0, "test")
    manager.discover_runs()
    manager.synchronize_state()
    (_, mine), (_, neighbours) = (manager.get_named_parameters_for_run(idx)[0] for idx in (0, 1))
    assert mine.grad is None and neighbours.grad is not None and neighbours.grad.any()


def test_muon_takes_the_steps_of_torchs_own_but_in_full_precision() -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(12, 5), [torch.randn(12, 5) for _ in range(3)]
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    config = OptimConfig(type="muon", lr=0.1, betas=(0.9, 0.999), weight_decay=0.2)
    mine = make_optimizer(config, [ours])
    reference = torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.2)
    for grad in grads:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        mine.step()
        reference.step()
    assert isinstance(mine, Muon)
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.03 * moved, "torch rounds to bfloat16, which has less than three digits"


@pytest.mark.parametrize("shape", [(4, 20), (20, 4), (6, 6)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalized(torch.randn(shape) * 100))
    assert values.min() > 0.3 and values.max() < 1.3
    assert not orthogonalized(torch.zeros(shape)).any()
