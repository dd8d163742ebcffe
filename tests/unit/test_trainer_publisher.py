"""What becomes of an update: its version, its report, its slot. With real files and the real background writer."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from prime_rl.configs.orchestrator import InitConfig
from prime_rl.contract.files import WaitTimeout, mark_stable, wait_for
from prime_rl.contract.layout import list_steps
from prime_rl.trainer import checkpoint
from prime_rl.trainer import publish as publish_module
from prime_rl.trainer.checkpoint import RunSnapshot, trainer_steps
from prime_rl.trainer.loss import LossSums
from prime_rl.trainer.metrics import PhaseTimer
from prime_rl.trainer.publish import BackgroundWriter, FileSystemWeightBroadcast, Publisher, WriteJob, write_version
from prime_rl.trainer.runs.run import Leaving
from prime_rl.trainer.runs.sync import Channel, ReadyRun
from prime_rl.trainer.step import UpdateReport
from tests.patience import PATIENCE_S
from tests.runs_support import add
from tests.unit.test_trainer_snapshot import Trainer


class Disk(FileSystemWeightBroadcast):
    """Takes versions only while it `is_free`, and none while it is `broken`."""

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.is_free.set()
        self.is_broken = False

    def publish(self, snapshot: RunSnapshot) -> Path:
        assert self.is_free.wait(PATIENCE_S)
        if self.is_broken:
            raise OSError(13, "Permission denied")  # of the run alone: a full disk is waited for
        return super().publish(snapshot)


class Life:
    """A run of two steps, and what follows its updates. `told` are the steps that were reported."""

    def __init__(self, workspace: Path) -> None:
        self.dir = add(workspace, "run_a", max_steps=2, ckpt={"interval": 100})
        self.trainer, self.disk, self.writer = Trainer(workspace), Disk(), BackgroundWriter()
        self.run, self.told = self.trainer.run, list[int]()
        self.waited_for = threading.Event()
        self.status: Any = SimpleNamespace(
            published=lambda run, progress: self.told.append(progress.step),
            waiting=lambda what: self.waited_for.set(),
            close=lambda: None,
        )
        metrics: Any = SimpleNamespace(write=lambda *args: None)
        parts = (self.trainer.snapshots, self.disk, self.trainer.checkpoints, metrics, self.status, self.writer)
        self.publisher = Publisher(self.trainer.manager, *parts)

    def update(self, problem: str | None = None) -> None:
        self.trainer.update()
        report = UpdateReport(self.run.progress.step, LossSums(), 1.0, 1e-2, 0.0, 0.0, problem)
        self.publisher.after_update(self.run, ReadyRun(0, 100, 8), report, PhaseTimer())

    def written(self) -> None:
        """When the writer is done, what it did is taken in."""
        self.writer.finish("run_a")
        self.publisher.collect()

    @property
    def versions(self) -> list[int]:
        return list_steps(self.dir.broadcast, stable_only=True)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    life = Life(tmp_path)
    yield life
    life.disk.is_free.set()
    life.writer.finish("run_a")


def test_a_run_leaves_after_its_last_update_and_not_before(life: Life) -> None:
    life.update()
    assert not life.run.is_leaving
    life.update()
    assert life.run.leaving is Leaving.FINISHED
    life.written()
    assert life.versions == life.told == [1, 2] and not life.dir.evicted.exists()


def test_an_update_that_was_not_done_evicts_its_run_and_publishes_nothing(life: Life) -> None:
    life.update(problem="its loss is NaN")
    life.written()
    assert (life.run.reason, life.dir.evicted.read_text()) == ("its loss is NaN", "its loss is NaN")
    assert life.versions == life.told == []


def test_a_run_that_resumes_has_its_version_and_one_that_is_there_is_not_written_again(life: Life) -> None:
    life.publisher.resume(life.run)
    assert life.versions == [], "version 0 is the base model"
    life.update()
    life.written()
    before = (life.dir.broadcast_dir(1) / "adapter_model.safetensors").stat()
    life.publisher.resume(life.run)
    life.written()
    after = (life.dir.broadcast_dir(1) / "adapter_model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    shutil.rmtree(life.dir.broadcast_dir(1))
    life.publisher.resume(life.run)
    life.written()
    assert life.versions == [1] and not life.run.is_leaving
    assert life.told == [0, 1, 1, 1]
    life.run.progress.step = 2
    life.publisher.resume(life.run)
    assert life.run.leaving is Leaving.FINISHED, "nothing is left to do"


def test_a_run_that_starts_from_an_adapter_has_that_as_version_0(life: Life) -> None:
    life.run.config = life.run.config.model_copy(update={"init": InitConfig.model_validate({"from": "run_b@v3"})})
    life.publisher.resume(life.run)
    life.written()
    assert life.versions == life.told == [0]


@pytest.mark.parametrize(
    ("leaving", "is_evicted"),
    [(Leaving.NO, True), (Leaving.FINISHED, True), (Leaving.SAVED, True), (Leaving.AT_ONCE, False)],
)
def test_a_version_that_the_disk_does_not_take_evicts_its_run_unless_it_left_unsaved(
    life: Life, leaving: Leaving, is_evicted: bool
) -> None:
    """One that was evicted keeps its first reason."""
    life.disk.is_broken = True
    life.update()
    life.run.leave(leaving)
    life.written()
    assert life.told == [] and life.dir.evicted.exists() is is_evicted
    if is_evicted:
        assert life.dir.evicted.read_text().startswith("publishing version 1 failed: ")


def test_a_run_keeps_its_slot_until_the_disk_has_what_it_made_or_had_its_time(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert life.publisher.may_leave(life.run)
    life.disk.is_free.clear()
    life.update()
    assert not life.publisher.may_leave(life.run) and not life.publisher.may_leave(life.run)
    assert life.publisher.full() == {}, "it may train on meanwhile, unless it is to leave"
    life.run.leave(Leaving.SAVED, "it is paused")
    assert life.publisher.full() == {"run_a": "the disk to take version 1 of run_a"}
    with pytest.raises(ValueError, match="it was here before and still waits for the disk to take version 1 of run_a"):
        life.publisher.admitted(life.run)
    with monkeypatch.context() as patch:
        patch.setattr(publish_module, "DISK_TIMEOUT_S", 0.0)
        assert life.publisher.may_leave(life.run)
    life.disk.is_free.set()
    wait_for(lambda: life.publisher.may_leave(life.run), "the disk to take the version", timeout_s=PATIENCE_S)
    life.publisher.admitted(life.run)
    assert life.told == [1]


def test_what_was_not_begun_for_a_run_that_lost_its_slot_is_never_written(life: Life) -> None:
    """As when the disk had its time, and answers later."""
    life.disk.is_free.clear()
    for _ in range(2):
        life.update()
    life.publisher.forgotten(life.run)
    life.disk.is_free.set()
    life.written()
    assert life.versions == [1]


def test_nothing_is_written_for_a_run_into_another_that_has_its_name_now(life: Life) -> None:
    life.dir.path.rename(life.dir.path.with_name("moved"))
    add(life.dir.path.parent, "run_a")
    life.update()
    life.written()
    assert life.versions == life.told == [] and not life.dir.evicted.exists()


def test_a_stop_ends_when_the_last_checkpoint_of_each_run_is_there(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    save = life.trainer.checkpoints.save

    def slow_save(snapshot: RunSnapshot) -> None:
        assert life.waited_for.wait(PATIENCE_S)
        save(snapshot)

    monkeypatch.setattr(life.trainer.checkpoints, "save", slow_save)
    life.update()
    life.publisher.before_exit()
    saved = trainer_steps(life.dir)
    life.waited_for.set()
    assert saved == [1]


def test_the_other_ranks_hear_from_rank_0_while_a_stop_waits_for_the_disk(life: Life) -> None:
    """Else they end with an error, as they do when rank 0 has died."""
    store = HashStore()
    life.trainer.manager.channel = Channel(store, rank=0, size=2)
    job = WriteJob("run_a", "a version", lambda: life.waited_for.wait(PATIENCE_S) and None, lambda: None)
    life.writer.submit(job)
    life.publisher.before_exit()
    assert life.waited_for.is_set() and store.add("beat", 0) > 0


def test_a_version_is_marked_when_its_files_are_there(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def save(folder: Path) -> None:
        (folder / "weights").touch()
        seen.append([each.name for each in folder.iterdir()])

    write_version(tmp_path / "broadcast" / "step_1", save)
    assert seen == [["weights"]]
    assert {each.name for each in (tmp_path / "broadcast" / "step_1").iterdir()} == {"weights", "STABLE"}


def test_a_disk_that_hangs_for_one_run_costs_no_other_its_last_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, release = add(tmp_path, "run_0"), threading.Event()
    life = Life(tmp_path)
    run = life.trainer.manager.run_of("run_a")
    assert run is not None and life.run.run_id == "run_0" and life.run.run_idx < run.run_idx
    run.progress.step = 5
    life.writer.submit(WriteJob("run_0", "version 9 of run_0", lambda: release.wait(PATIENCE_S) and None, lambda: None))
    monkeypatch.setattr(publish_module, "DISK_TIMEOUT_S", 0.3)
    saved: dict[str, list[int]] = {}
    life.status.waiting = lambda what: saved.setdefault(what, trainer_steps(run.dir))
    with pytest.raises(WaitTimeout, match="waiting for the disk to take what run_0 made"):
        life.publisher.before_exit()
    release.set()
    life.writer.finish("run_0")
    assert trainer_steps(run.dir) == [5] and trainer_steps(stuck) == []
    assert saved["the disk to take version 9 of run_0"] == [5], "the run that waits for the disk is the last"


def test_a_checkpoint_is_marked_when_its_files_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orchestrator goes on from the newest that is marked, so a kill before leaves no such one."""
    run, trainer, seen = add(tmp_path, "run_a"), Trainer(tmp_path), list[list[str]]()

    def mark(folder: Path) -> None:
        seen.append(sorted(each.name for each in run.trainer_checkpoint(1).glob("*")))
        mark_stable(folder)

    monkeypatch.setattr(checkpoint, "mark_stable", mark)
    trainer.update()
    trainer.checkpoints.save(trainer.snapshots.whole(trainer.run))
    (found,) = seen
    assert found == sorted(each.name for each in run.trainer_checkpoint(1).iterdir())
    assert {checkpoint.PROGRESS_FILE, checkpoint.STATE_FILE} < set(found) and trainer_steps(run) == [1]
