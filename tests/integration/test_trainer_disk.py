"""The disk is slow, full or taken away: one run feels it, what was reported holds, and nothing deleted comes back."""

from __future__ import annotations

import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.contract.status import TrainerStatus, read_status
from prime_rl.trainer import publish as publish_module
from prime_rl.trainer.checkpoint import RunSnapshot
from prime_rl.trainer.publish import FileSystemWeightBroadcast
from prime_rl.trainer.runs import get_multi_run_manager
from tests.budgets import in_full
from tests.fork_runner import Runner
from tests.isolation_support import TOLERANCE
from tests.patience import PATIENCE_S
from tests.trainer_support import (
    adapter,
    published,
    put_batches,
    relative_difference,
    train_until,
    trainer_config,
    write_run,
)

NUM_STEPS = 4
CHANGES: dict[str, Any] = {
    "max_steps": NUM_STEPS,
    "ckpt": {"interval": 2, "keep_last": 9},
    "model": {"lora": {"rank": 4}},
}
# Between the adapter files of the tiny model: 12 kB at rank 2, 70 kB at rank 16.
MAX_FILE_BYTES = 40_000


def put_run(workspace: Path, base: Path, run_id: str, num_batches: int = NUM_STEPS, **changes: Any) -> RunDir:
    run = write_run(workspace, run_id, base, **{**CHANGES, **changes})
    put_batches(run, num_batches)
    return run


class SlowDisk:
    """Holds up the version `step` of every run until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        self.has_begun = threading.Event()
        self.is_free = threading.Event()
        real = FileSystemWeightBroadcast.publish

        def publish(broadcast: FileSystemWeightBroadcast, snapshot: RunSnapshot) -> Path:
            if snapshot.progress.step == step:
                self.has_begun.set()
                assert self.is_free.wait(PATIENCE_S)
            return real(broadcast, snapshot)

        monkeypatch.setattr(FileSystemWeightBroadcast, "publish", publish)


def test_training_goes_on_while_the_disk_is_slow_and_the_status_says_what_is_on_disk(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = put_run(tmp_path, model, "run_a")
    disk = SlowDisk(monkeypatch, step=2)
    told: list[tuple[int, int]] = []

    def done() -> bool:
        status = read_status(tmp_path / "trainer" / "status.json", TrainerStatus)
        if status is not None and status.waiting_on == "the disk to take version 2 of run_a" and not told:
            told.append((status.runs["run_a"].step, get_multi_run_manager().progress[0].step))
            assert published(run) == 1
            disk.is_free.set()
        return published(run) == NUM_STEPS

    train_until(trainer_config(tmp_path, model), done)
    assert told == [(1, 3)], "version 2 is being written, 3 waits, and neither is reported"
    assert run.trainer_metrics.read_text().count("\n") == NUM_STEPS


def test_a_run_that_waits_for_the_disk_keeps_no_other_from_training(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates of run_a are on their way; run_b, whose first batch comes only then, trains."""
    first, second = put_run(tmp_path, model, "run_a"), put_run(tmp_path, model, "run_b", num_batches=0)
    disk = SlowDisk(monkeypatch, step=2)
    seen: list[int] = []

    def done() -> bool:
        manager = get_multi_run_manager()
        if manager.id_2_idx.keys() >= {"run_a", "run_b"}:
            steps = {run_id: manager.progress[run_idx].step for run_id, run_idx in manager.id_2_idx.items()}
            if steps["run_a"] == 3 and steps["run_b"] == 0 and not second.rollout_dir(1).exists():
                put_batches(second, NUM_STEPS)
            if steps["run_b"] and not seen:
                seen.append(steps["run_a"])
                disk.is_free.set()
        return published(first) == published(second) == NUM_STEPS

    train_until(trainer_config(tmp_path, model, max_concurrent_runs=2), done)
    assert seen == [3], "run_a did not go on, run_b did"


def test_a_slot_is_given_away_when_its_run_is_on_disk(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted while version 2 and its checkpoint are on their way; taken back, it goes on from there."""
    run, other = put_run(tmp_path, model, "run_a", num_batches=2), put_run(tmp_path, model, "run_b", num_batches=0)
    disk = SlowDisk(monkeypatch, step=2)
    seen: list[str] = []

    def note(what: str) -> None:
        seen.append(f"{what} with version {published(run)}")

    def done() -> bool:
        in_slots = get_multi_run_manager().id_2_idx
        if disk.has_begun.is_set() and not seen and not run.evicted.exists():
            run.evicted.write_text("a break")
            put_batches(other, 1)
        elif len(seen) == 0 and run.evicted.exists() and published(other) == 1:
            assert "run_a" in in_slots, "it keeps its slot until it is on disk, and run_b trains meanwhile"
            note("waits")
            disk.is_free.set()
        elif len(seen) == 1 and "run_a" not in in_slots:
            note(f"left, checkpoints {list_steps(run.checkpoints, stable_only=True)},")
            put_batches(run, NUM_STEPS)
            run.evicted.unlink()
        return published(run) == NUM_STEPS

    train_until(trainer_config(tmp_path, model, max_concurrent_runs=2), done)
    assert seen == ["waits with version 1", "left, checkpoints [2], with version 2"]


def test_a_disk_that_hangs_for_a_run_costs_its_slot_only_so_long(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run leaves, is refused as long as the old write hangs, and is taken back when it has ended."""
    monkeypatch.setattr(publish_module, "DISK_TIMEOUT_S", 0.2)
    run = put_run(tmp_path, model, "run_a", num_batches=2)
    disk = SlowDisk(monkeypatch, step=2)
    seen: list[str] = []

    def done() -> bool:
        in_slots = get_multi_run_manager().id_2_idx
        if disk.has_begun.is_set() and not seen and not run.evicted.exists():
            seen.append("evicted")
            run.evicted.write_text("a break")
        elif seen == ["evicted"] and "run_a" not in in_slots:
            seen.append("left")
            run.evicted.unlink()
        elif seen == ["evicted", "left"] and run.evicted.exists():
            seen.append(run.evicted.read_text())
            monkeypatch.setattr(publish_module, "DISK_TIMEOUT_S", PATIENCE_S)  # from here the disk has all the time
            disk.is_free.set()
        elif len(seen) == 3 and published(run) == 2 and run.evicted.exists():
            put_batches(run, NUM_STEPS)
            run.evicted.unlink()
        return published(run) == NUM_STEPS

    train_until(trainer_config(tmp_path, model), done)
    assert "it was here before and still waits for the disk to take version 2 of run_a" in seen[2]


def test_a_last_version_that_cannot_be_written_evicts_instead_of_finishing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the run would leave, come back for its last step, and so on forever."""
    run = put_run(tmp_path, model, "run_a")
    real = FileSystemWeightBroadcast.publish

    def publish(broadcast: FileSystemWeightBroadcast, snapshot: RunSnapshot) -> Path:
        if snapshot.progress.step == NUM_STEPS:
            raise OSError(27, "File too large")
        return real(broadcast, snapshot)

    monkeypatch.setattr(FileSystemWeightBroadcast, "publish", publish)
    train_until(trainer_config(tmp_path, model), run.evicted.exists, timeout_s=PATIENCE_S)
    assert f"publishing version {NUM_STEPS} failed: {run.broadcast_dir(NUM_STEPS)}" in run.evicted.read_text()


VERSION, CHECKPOINT = "broadcast/.step_2.*/adapter_model.safetensors", "checkpoints/step_2/.trainer.*/state.safetensors"


@pytest.mark.parametrize(
    ("file", "how"),
    [
        (VERSION, "moved to the trash"),
        (VERSION, "replaced"),
        (CHECKPOINT, "deleted"),
        *in_full((VERSION, "deleted"), (CHECKPOINT, "moved to the trash"), (CHECKPOINT, "replaced")),
    ],
)
def test_a_run_that_goes_away_while_it_is_written_stays_away(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, how: str
) -> None:
    run, other = put_run(tmp_path, model, "run_a"), put_run(tmp_path, model, "run_b")
    trash = tmp_path / ".trash" / "run_a.20260101T000000Z"
    trash.parent.mkdir()
    real = Path.write_bytes
    was_there: list[Path] = []

    def write_bytes(path: Path, data: bytes) -> int:
        if path.resolve().match(f"run_a/{file}") and not was_there:
            was_there.append(path)
            real(path, data[: len(data) // 2])
            if how == "deleted":
                shutil.rmtree(run.path)
            else:
                run.path.rename(trash)
            if how == "replaced":
                put_run(tmp_path, model, "run_a")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    runs = [run, other] if how == "replaced" else [other]
    train_until(trainer_config(tmp_path, model), lambda: all(published(run) == NUM_STEPS for run in runs))
    assert was_there
    if how == "replaced":
        assert not run.evicted.exists() and not list(run.path.rglob("*.tmp"))
        assert relative_difference(adapter(run, NUM_STEPS), adapter(other, NUM_STEPS)) <= TOLERANCE
        assert run.trainer_metrics.read_text().count("\n") == NUM_STEPS
    else:
        assert not run.path.exists()
    if how != "deleted":
        gone = RunDir(trash)
        assert not gone.evicted.exists()
        assert list_steps(gone.checkpoints, stable_only=True) == [], "nothing half written counts"
        assert list_steps(gone.broadcast, stable_only=True) == ([1] if file.startswith("broadcast") else [1, 2])


def test_a_full_disk_evicts_the_run_that_found_it_full(lives: Runner, model: Path, tmp_path: Path) -> None:
    """A limit of the kernel on the size of files stands for the end of the disk: the larger adapter meets it."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    small = put_run(workspace, model, "run_small", model={"lora": {"rank": 2}})
    large = put_run(workspace, model, "run_large", model={"lora": {"rank": 16}})
    config = trainer_config(workspace, model).model_dump(mode="json")
    answer = lives.run(
        config=config,
        until={"run_small": NUM_STEPS},
        evicted=["run_large"],
        max_file_bytes=MAX_FILE_BYTES,
        log=str(tmp_path / "log"),
    )
    assert answer["exits"] == [0], (tmp_path / "log").read_text()
    reason = large.evicted.read_text()
    assert "publishing version 1 failed" in reason and str(large.broadcast_dir(1)) in reason
    assert "File too large" in reason
    assert not list(large.path.rglob("*.tmp")) and not large.broadcast_dir(1).exists()
    assert list_steps(small.checkpoints, stable_only=True) == [2, 4]


@pytest.mark.slow
def test_a_reason_that_finds_no_room_is_written_when_there_is_some(lives: Runner, model: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    run = put_run(workspace, model, "run_a", num_batches=1)
    run.rollout_file(1).rename(later(run))
    answer = lives.run(
        config=trainer_config(workspace, model).model_dump(mode="json"),
        done="tests.integration.test_trainer_disk:no_room_until_the_run_has_left",
        log=str(tmp_path / "log"),
    )
    assert answer["exits"] == [0], (tmp_path / "log").read_text()
    assert "publishing version 1 failed" in run.evicted.read_text() and "File too large" in run.evicted.read_text()
    assert not list(run.control.glob(".*.tmp"))


def later(run: RunDir) -> Path:
    """The first batch, before its time."""
    return run.rollout_file(1).with_suffix(".later")


def no_room_until_the_run_has_left(workspace: Path) -> Callable[[], bool]:
    """In the child: once the run has a slot no file may grow, until it has lost the slot."""
    run = RunDir(workspace / "run_a")
    phases = ["there is room"]

    def allow(num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    def done() -> bool:
        if phases[-1] == "there is room" and get_multi_run_manager().used_idxs:
            allow(0)
            later(run).rename(run.rollout_file(1))
            phases.append("there is none")
        elif phases[-1] == "there is none" and not get_multi_run_manager().used_idxs:
            assert not run.evicted.exists() and get_multi_run_manager().needs_discovery
            allow(resource.RLIM_INFINITY)
            phases.append("there is room again")
        return phases[-1] == "there is room again" and run.evicted.exists()

    return done


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_four(lives: Runner, model: Path, tmp_path: Path) -> None:
    """Real ranks over gloo. The adapters agree with those of one rank that was never stopped."""

    def live(workspace: Path, num_ranks: int, step: int) -> RunDir:
        answer = lives.run(
            config=trainer_config(workspace, model, max_tokens_per_micro_batch=64).model_dump(mode="json"),
            until={"run_a": step},
            num_ranks=num_ranks,
            log=str(tmp_path / f"log_{workspace.name}"),
        )
        assert answer["exits"] == [0] * num_ranks, (tmp_path / f"log_{workspace.name}").read_text()
        return RunDir(workspace / "run_a")

    whole, two = tmp_path / "whole", tmp_path / "two"
    for workspace in (whole, two):
        workspace.mkdir()
        put_run(workspace, model, "run_a")
    later = {step: RunDir(two / "run_a").rollout_file(step) for step in (3, 4)}
    for path in later.values():
        path.rename(path.with_suffix(".later"))
    assert published(live(two, 2, 2)) == 2
    for path in later.values():
        path.with_suffix(".later").rename(path)
    reference = adapter(live(whole, 1, NUM_STEPS), NUM_STEPS)
    for num_ranks in (1, 4):
        workspace = shutil.copytree(two, tmp_path / f"on_{num_ranks}")
        assert list_steps(RunDir(workspace / "run_a").checkpoints, stable_only=True) == [2]
        assert relative_difference(adapter(live(workspace, num_ranks, NUM_STEPS), NUM_STEPS), reference) <= TOLERANCE
