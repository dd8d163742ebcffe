"""Neighbours have no effect on a tenant: together equals alone, whatever the neighbours are.

The real loop, real files, recorded batches. Three runs of different rank, alpha, optimizer, rate, schedule, clipping,
loss and batch size are trained alone first, then together in ways that have gone wrong elsewhere. Neighbours that do
harm are in `test_trainer_faults`.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from prime_rl.contract.layout import RunDir
from prime_rl.contract.types import read_batch
from prime_rl.trainer.runs import get_multi_run_manager
from tests.budgets import in_full, in_release
from tests.isolation_support import (
    NUM_SAMPLES,
    NUM_STEPS,
    RUNS,
    TOLERANCE,
    Adapter,
    all_done,
    beyond,
    check,
    has_gradients,
    in_the_middle_of_its_batch,
    put_run,
    put_runs,
)
from tests.trainer_support import (
    adapter,
    make_batch,
    published,
    put_batch,
    put_batches,
    relative_difference,
    train_until,
    trainer_config,
    write_run,
)

pytestmark = pytest.mark.budget


@pytest.mark.slow
def test_training_changes_the_adapters_and_every_step_matters(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path
) -> None:
    """Or all that follows would prove nothing."""
    for run_id in RUNS:
        run = put_run(tmp_path, tiny, run_id)
        put_batch(run, make_batch(run_id, NUM_STEPS // 2, num_samples=NUM_SAMPLES[run_id], seed=99))
    runs = [RunDir(tmp_path / run_id) for run_id in RUNS]
    train_until(trainer_config(tmp_path, tiny), all_done(runs))
    for run in runs:
        assert relative_difference(adapter(run, NUM_STEPS), alone[run.run_id]) > 10 * TOLERANCE


@pytest.mark.numeric
@pytest.mark.parametrize("max_tokens", [*in_full(24, 100, 4096), 256])
def test_together_equals_alone_however_batches_are_split(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path, max_tokens: int
) -> None:
    """From one row a pass to all runs' whole batches in one."""
    runs = put_runs(tmp_path, tiny)
    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=max_tokens), all_done(runs))
    check(runs, alone)


@pytest.mark.slow
def test_files_of_earlier_versions_train_the_same(alone: dict[str, Adapter], tiny: Path, tmp_path: Path) -> None:
    """Of three batches of each run one has version 1, and one version 2."""
    runs = put_runs(tmp_path, tiny)
    for run in runs:
        for step in range(1, NUM_STEPS + 1):
            path = run.rollout_file(step)
            batch = read_batch(path)
            assert batch.version == 1 and msgspec.msgpack.decode(path.read_bytes())["version"] == 3
            earlier = {1: batch, 2: msgspec.structs.replace(batch.columns(), version=2)}
            if step % 3 in earlier:
                path.write_bytes(msgspec.msgpack.encode(earlier[step % 3]))
    train_until(trainer_config(tmp_path, tiny), all_done(runs))
    check(runs, alone)


@pytest.mark.numeric
@pytest.mark.parametrize("max_tokens", [*in_release(24), *in_full(4096), 100])
def test_padded_rows_together_equal_padded_rows_alone(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path, max_tokens: int
) -> None:
    runs = put_runs(tmp_path, tiny)
    padded = trainer_config(tmp_path, tiny, model={"packed_rows": False}, max_tokens_per_micro_batch=max_tokens)
    train_until(padded, all_done(runs))
    check(runs, alone)


NEIGHBOURS = {
    "of the same kind": {"seed": 7},
    "with a large rate": {"optim": {"type": "sgd", "lr": 3.0, "max_norm": 1e9}},
    "of other rank and alpha": {"model": {"lora": {"rank": 1, "alpha": 500.0}}},
    "with a strict clip": {"optim": {"max_norm": 1e-6}},
    "with a loss of single tokens": {"loss": {"type": "aipo", "delta": 1e-3}},
    "with a loss of whole samples": {"loss": {"type": "mis", "low": 0.1, "high": 9.0}},
    "that asks for the base's logits": {"loss": {"type": "cispo", "kl_coef": 2.0}},
    "with weights in bfloat16": {"model": {"lora": {"dtype": "bfloat16"}}},
    "that is soon done": {"max_steps": 2},
    "with an advantage for each token": {},
    "with such advantages and a loss of the first run's kind": {"loss": RUNS["run_adamw"]["loss"]},
}


@pytest.mark.numeric
@pytest.mark.slow
def test_together_equals_alone_with_neighbours_of_every_kind(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path
) -> None:
    for number, (kind, changes) in enumerate(NEIGHBOURS.items()):
        other = write_run(tmp_path, f"run_{number}", tiny, **changes)
        by_token = "advantage" in kind
        many, group = 3 + 5 * number, 5 * (number % 2)
        put_batches(other, NUM_STEPS, num_samples=many, seed=number, by_token=by_token, group=group)
    runs = put_runs(tmp_path, tiny, reversed(RUNS))
    config = trainer_config(tmp_path, tiny, max_concurrent_runs=14, max_tokens_per_micro_batch=200)
    train_until(config, all_done(runs))
    check(runs, alone)


@pytest.mark.slow
def test_in_whatever_slot_a_run_sits(alone: dict[str, Adapter], tiny: Path, tmp_path: Path) -> None:
    """The slots are dealt in the order in which the configs landed: here the other way round."""
    runs = put_runs(tmp_path, tiny)
    for number, run in enumerate(runs):
        os.utime(run.orch_toml, (1000 - number, 1000 - number))
    slots: dict[str, int] = {}

    def done() -> bool:
        slots.update(get_multi_run_manager().id_2_idx)
        return all_done(runs)()

    train_until(trainer_config(tmp_path, tiny), done)
    assert [slots[run.run_id] for run in runs] == [2, 1, 0]
    check(runs, alone)


def test_what_a_run_of_lower_rank_does_not_use_of_its_slot_stays_exactly_zero(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path
) -> None:
    """Weights and gradients, at every look between two passes; the export has the run's own rank."""
    runs = put_runs(tmp_path, tiny)
    num_seen = dict.fromkeys(RUNS, 0)

    def done() -> bool:
        manager = get_multi_run_manager()
        for run_id, run_idx in manager.id_2_idx.items():
            rank = manager.rank_of(run_idx)
            for name, parameter in manager.get_named_parameters_for_run(run_idx):
                assert not beyond(name, parameter, rank).any(), (run_id, name)
                assert parameter.grad is None or not beyond(name, parameter.grad, rank).any(), (run_id, name)
            num_seen[run_id] += manager.progress[run_idx].step > 0 and has_gradients(manager, run_idx)
        return all_done(runs)()

    config = trainer_config(tmp_path, tiny, model={"lora": {"rank": 24}}, max_tokens_per_micro_batch=64)
    train_until(config, done)
    assert min(num_seen.values()) >= NUM_STEPS // 2, "seen while they trained"
    for run in runs:
        for name, tensor in adapter(run, NUM_STEPS).items():
            assert tensor.shape[0 if "lora_A" in name else 1] == RUNS[run.run_id]["model"]["lora"]["rank"]
    check(runs, alone)


def test_a_smaller_adapter_is_the_same_in_larger_slots(tiny: Path, tmp_path: Path) -> None:
    """Also for Muon, whose step depends on the shape of the matrix."""
    small, large = tmp_path / "small", tmp_path / "large"
    for place, rank in ((small, 4), (large, 16)):
        place.mkdir()
        run = write_run(place, "run_m", tiny, max_steps=3, optim={"type": "muon"}, model={"lora": {"rank": 4}})
        put_batches(run, 3)
        train_until(trainer_config(place, tiny, model={"lora": {"rank": rank}}), lambda run=run: published(run) == 3)
    one, other = (adapter(RunDir(place / "run_m"), 3) for place in (small, large))
    assert relative_difference(one, other) <= TOLERANCE


@pytest.mark.parametrize("late", ["run_muon", *in_full("run_adamw"), *in_release("run_sgd")])
def test_a_neighbour_evicted_in_the_middle_of_its_batch_and_its_slot_used_again(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path, late: str
) -> None:
    """Its gradients (which are NaN by then), moments and weights must not reach the run that gets its slot."""
    first = write_run(tmp_path, "run_0", tiny, optim={"lr": 1.0}, seed=9)
    for step in range(1, 5):
        put_batch(first, make_batch("run_0", step, num_samples=24, seed=5, advantage=3e38 if step == 3 else None))
    runs = put_runs(tmp_path, tiny, [run_id for run_id in RUNS if run_id != late])
    os.utime(first.orch_toml, (1, 1))
    slots: dict[str, int] = {}

    def done() -> bool:
        manager = get_multi_run_manager()
        slots.update(manager.id_2_idx)
        if len(runs) == 2 and in_the_middle_of_its_batch(first, after_step=2):
            manager.evict_run(0, "enough")
            runs.append(put_run(tmp_path, tiny, late))
        return len(runs) == 3 and all_done(runs)()

    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=48, max_concurrent_runs=3), done)
    check(runs, alone)
    assert first.evicted.read_text().strip() == "enough" and published(first) == 2
    assert slots[late] == slots["run_0"] == 0


@pytest.mark.slow
def test_neighbours_that_come_late_and_one_that_comes_back(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path
) -> None:
    """One run trains from the start, one comes later, and one is evicted in between and readmitted."""
    runs = [put_run(tmp_path, tiny, "run_adamw")]
    script: list[str] = []

    def done() -> bool:
        if not script and published(runs[0]) >= 5:
            script.append("late")
            runs.append(put_run(tmp_path, tiny, "run_sgd"))
            runs.append(put_run(tmp_path, tiny, "run_muon"))
        if script == ["late"] and published(runs[1]) >= 4 and in_the_middle_of_its_batch(runs[1]):
            script.append("evicted")
            runs[1].evicted.write_text("a break")
        if script[-1:] == ["evicted"] and "run_sgd" not in get_multi_run_manager().id_2_idx:
            script.append("back")
            runs[1].evicted.unlink()
        return len(script) == 3 and all_done(runs)()

    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=100), done)
    check(runs, alone)
