"""What a run chooses for itself works, and touches no other run; and how the real loop shares its time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from prime_rl.configs.base import merge
from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.lora.adapter_state import load_peft
from prime_rl.trainer import publish
from prime_rl.trainer.batches import BatchReader
from prime_rl.trainer.checkpoint import RunSnapshot
from prime_rl.trainer.publish import FileSystemWeightBroadcast
from prime_rl.trainer.runs import get_multi_run_manager
from tests.isolation_support import TOLERANCE, Adapter
from tests.patience import PATIENCE_S
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

NUM_STEPS = 4
# An optimizer in which everything counts: AdamW, for one, does not feel the size of a gradient.
PLAIN: dict[str, Any] = {"optim": {"type": "sgd", "lr": 0.05, "max_norm": 1e9}, "model": {"lora": {"rank": 8}}}
CHOICES: dict[str, dict[str, Any]] = {
    "clip norm": {"optim": {"max_norm": 1e-3}},
    "optimizer": {"optim": {"type": "adamw", "lr": 1e-3}},
    "rate": {"optim": {"lr": 0.5}},
    "momentum": {"optim": {"betas": [0.0, 0.0]}},
    "decay": {"optim": {"weight_decay": 1.0}},
    "schedule": {"scheduler": {"type": "linear"}},
    "warm-up": {"scheduler": {"warmup_steps": 3}},
    "alpha": {"model": {"lora": {"alpha": 1.0}}},
    "rank": {"model": {"lora": {"rank": 2}}},
    "loss": {"loss": {"type": "gspo", "clip_low": 0.9, "clip_high": 9.0}},
    "constant of the loss": {"loss": {"delta": 0.5}},
    "seed": {"seed": 5},
}


def merged(changes: dict[str, Any]) -> dict[str, Any]:
    return merge(PLAIN, changes)


@pytest.fixture(scope="module")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """What a run without choices reaches alone."""
    workspace = tmp_path_factory.mktemp("plain")
    run = write_run(workspace, "run_plain", tiny, max_steps=NUM_STEPS, **PLAIN)
    put_batches(run, NUM_STEPS)
    train_until(trainer_config(workspace, tiny), lambda: published(run) == NUM_STEPS)
    return adapter(run, NUM_STEPS)


def test_every_choice_changes_its_own_run_and_no_other(plain: Adapter, tiny: Path, tmp_path: Path) -> None:
    """All runs train on the same batches side by side; they differ in one choice each."""
    unmoved = write_run(tmp_path, "run_plain", tiny, max_steps=NUM_STEPS, **PLAIN)
    chosen = {
        name: write_run(tmp_path, f"run_{number}", tiny, max_steps=NUM_STEPS, **merged(changes))
        for number, (name, changes) in enumerate(CHOICES.items())
    }
    for run in (unmoved, *chosen.values()):
        put_batches(run, NUM_STEPS)
    config = trainer_config(tmp_path, tiny, max_concurrent_runs=16, max_tokens_per_micro_batch=1024)
    train_until(config, lambda: all(published(run) == NUM_STEPS for run in (unmoved, *chosen.values())))
    assert relative_difference(adapter(unmoved, NUM_STEPS), plain) <= TOLERANCE
    for name, run in chosen.items():
        reached = adapter(run, NUM_STEPS)
        if name == "rank":
            assert {min(tensor.shape) for tensor in reached.values()} == {2}
        elif name != "alpha":  # which scales what an adapter does
            assert relative_difference(reached, plain) > 10 * TOLERANCE, name
    alphas = {name: load_peft(chosen[name].broadcast_dir(NUM_STEPS))[1].alpha for name in ("alpha", "rank")}
    assert alphas == {"alpha": 1.0, "rank": 32.0}


@pytest.mark.parametrize("packed", [False, True])
def test_what_was_cut_and_is_masked_trains_nothing_also_when_it_is_all_there_is(
    tiny: Path, tmp_path: Path, packed: bool
) -> None:
    """With a KL to the base, which acts on any loss token. The second batch has masked samples, the third no others."""
    plain = merged({"optim": {"betas": [0.0, 0.0]}, "loss": {"kl_coef": 2.0}, "max_steps": 3})
    masks = {"advantage": {"mask_truncated": True}}
    masked, without, unmasked = (
        write_run(tmp_path, f"run_{name}", tiny, **merge(plain, changes))
        for name, changes in (("masked", masks), ("without", masks), ("unmasked", {}))
    )
    for run in (masked, without, unmasked):
        first, second, third = (make_batch(run.run_id, step) for step in (1, 2, 3))
        kept, cut = second.samples[::2], [replace(each, advantage=0.0) for each in second.samples[1::2]]
        hidden = [replace(each, loss_mask=[False] * len(each.loss_mask)) for each in [*cut, *third.samples]]
        beside = {masked: hidden[: len(cut)], without: [], unmasked: cut}[run]
        put_batch(run, first)
        put_batch(run, replace(second, samples=[*kept, *beside]))
        put_batch(run, replace(third, samples=hidden[len(cut) :]))
    config = trainer_config(tmp_path, tiny, model={"packed_rows": packed})

    def done() -> bool:
        return published(masked) == published(without) == 3 and unmasked.evicted.exists()

    train_until(config, done)
    assert "loss_mask is false everywhere" in unmasked.evicted.read_text()
    assert relative_difference(adapter(masked, 2), adapter(without, 2)) <= TOLERANCE
    assert relative_difference(adapter(unmasked, 2), adapter(without, 2)) > 10 * TOLERANCE
    assert relative_difference(adapter(masked, 3), adapter(masked, 2)) == 0.0
    assert relative_difference(adapter(masked, 2), adapter(masked, 1)) > 10 * TOLERANCE
    lines = [json.loads(line) for line in masked.trainer_metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert (lines[2]["loss"], lines[2]["grad_norm"]) == (0.0, 0.0)


def test_steps_checkpoints_and_versions_are_kept_as_each_run_asks(plain: Adapter, tiny: Path, tmp_path: Path) -> None:
    asked: dict[str, tuple[int, dict[str, Any], list[int]]] = {
        "run_often": (9, {"ckpt": {"interval": 1, "keep_last": 3}}, [7, 8, 9]),
        "run_seldom": (9, {"ckpt": {"interval": 5, "keep_last": 9}}, [5, 9]),
        "run_some": (9, {"ckpt": {"interval": 2, "keep_last": 1, "keep_interval": 4}}, [4, 8, 9]),
        "run_short": (2, {"ckpt": {"interval": 100}}, [2]),
    }
    for run_id, (max_steps, changes, _) in asked.items():
        run = write_run(tmp_path, run_id, tiny, max_steps=max_steps, max_async_level=1, **merged(changes))
        put_batches(run, 9)
    unmoved = write_run(tmp_path, "run_plain", tiny, max_steps=NUM_STEPS, **PLAIN)
    put_batches(unmoved, NUM_STEPS)
    runs = [RunDir(tmp_path / run_id) for run_id in asked]
    config = trainer_config(tmp_path, tiny, max_concurrent_runs=8)
    train_until(config, lambda: [published(run) for run in [*runs, unmoved]] == [9, 9, 9, 2, NUM_STEPS])
    for run in runs:
        assert list_steps(run.checkpoints, stable_only=True) == asked[run.run_id][2], run.run_id
        last = asked[run.run_id][0]
        assert list_steps(run.broadcast) == list(range(max(1, last - 3), last + 1))
    assert relative_difference(adapter(unmoved, NUM_STEPS), plain) <= TOLERANCE


@pytest.mark.slow
def test_the_real_loop_shares_its_time_by_tokens(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose batches are 20x larger and always there: between two of its updates each other run has its 20.

    Counted in updates of runs that send equal batches, so in tokens; no clock is looked at, and no disk decides.
    """
    monkeypatch.setattr(publish, "MAX_WAITING_PER_RUN", 1_000)
    take = BatchReader.take
    monkeypatch.setattr(BatchReader, "take", lambda self, timeout_s=0.0: take(self, PATIENCE_S))
    hog = write_run(tmp_path, "run_hog", tiny, batch_size=120, max_async_level=16)
    small = [write_run(tmp_path, f"run_small_{number}", tiny, max_async_level=16) for number in range(2)]
    put_batches(hog, 4, num_samples=120)
    for number, run in enumerate(small):
        put_batches(run, 100, num_samples=6, seed=number + 1)
    at_update: dict[int, list[int]] = {}

    def done() -> bool:
        manager = get_multi_run_manager()
        steps = {run_id: manager.progress[run_idx].step for run_id, run_idx in manager.id_2_idx.items()}
        if steps.get("run_hog"):
            at_update.setdefault(steps["run_hog"], [steps[run.run_id] for run in small])
        return len(at_update) == 3

    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=512), done)
    for number in range(2):
        between = [at_update[step + 1][number] - at_update[step][number] for step in (1, 2)]
        assert all(0.8 * 20 <= updates <= 20 / 0.8 for updates in between), at_update


def test_a_finished_run_has_its_last_checkpoint(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last version, which makes it finished, is published after it, the others before theirs."""
    run = write_run(tmp_path, "run_a", tiny, max_steps=3, ckpt={"interval": 1})
    put_batches(run, 3)
    saved: list[tuple[int, bool]] = []
    publish = FileSystemWeightBroadcast.publish

    def noted(self: FileSystemWeightBroadcast, snapshot: RunSnapshot) -> Path:
        step = snapshot.progress.step
        saved.append((step, run.trainer_checkpoint(step).exists()))
        return publish(self, snapshot)

    monkeypatch.setattr(FileSystemWeightBroadcast, "publish", noted)
    train_until(trainer_config(tmp_path, tiny), lambda: published(run) == 3)
    assert saved == [(1, False), (2, False), (3, True)]
