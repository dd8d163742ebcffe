"""The background writers: order, faults of one run, waiting, and what the main thread learns."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from prime_rl.contract.files import WaitTimeout, wait_for
from prime_rl.trainer import publish
from prime_rl.trainer.publish import BackgroundWriter, FolderGone, WriteError, WriteJob
from tests.patience import PATIENCE_S


class Disk:
    """Takes a job only when it is let; notes what it took."""

    def __init__(self, writer: BackgroundWriter) -> None:
        self.writer = writer
        self.taken: list[str] = []
        self.is_free = threading.Event()
        self.has_begun = threading.Event()

    def put(self, run_id: str, step: int, error: Exception | None = None) -> None:
        def job() -> None:
            self.has_begun.set()
            assert self.is_free.wait(PATIENCE_S)
            self.taken.append(f"{run_id}/{step}")
            if error is not None:
                raise error

        self.writer.submit(WriteJob(run_id, f"version {step} of {run_id}", job, lambda: None))

    def finish(self) -> None:
        for run_id in ("run_a", "run_b"):
            self.writer.finish(run_id)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk(BackgroundWriter())
    yield disk
    disk.is_free.set()
    disk.finish()


def test_the_work_of_a_run_is_done_in_order_and_reported_in_order(disk: Disk) -> None:
    for run_id, step in [("run_a", 1), ("run_b", 1), ("run_a", 2), ("run_a", 3)]:
        disk.put(run_id, step)
    assert disk.writer.take_results() == []
    disk.is_free.set()
    disk.finish()
    assert [each for each in disk.taken if each != "run_b/1"] == ["run_a/1", "run_a/2", "run_a/3"]
    results = [(result.job.what, result.problem) for result in disk.writer.take_results()]
    assert [what for what, _ in results if what.endswith("run_a")] == [f"version {n} of run_a" for n in (1, 2, 3)]
    assert {problem for _, problem in results} == {None} and len(results) == 4
    assert disk.writer.take_results() == []


def test_a_disk_that_hangs_for_one_run_takes_the_work_of_another(disk: Disk) -> None:
    disk.put("run_a", 1)
    wait_for(disk.has_begun.is_set, "the first job to begin", timeout_s=PATIENCE_S)
    taken: list[str] = []
    disk.writer.submit(WriteJob("run_b", "version 1 of run_b", lambda: taken.append("run_b"), lambda: None))
    wait_for(lambda: disk.writer.waits_for("run_b") is None, "run_b to be written", timeout_s=PATIENCE_S)
    assert taken == ["run_b"] and disk.taken == []
    assert disk.writer.waits_for("run_a") == "the disk to take version 1 of run_a"


def test_a_fault_drops_what_the_run_still_wants_and_nothing_of_others(disk: Disk) -> None:
    disk.put("run_a", 1, WriteError("publishing version 1 failed: no room"))
    disk.put("run_a", 2)
    disk.put("run_b", 1, OSError(28, "No space left on device"))
    disk.is_free.set()
    disk.finish()
    disk.put("run_a", 3)
    disk.finish()
    assert sorted(disk.taken) == ["run_a/1", "run_b/1"]
    assert {result.problem for result in disk.writer.take_results()} == {
        "publishing version 1 failed: no room",
        "version 1 of run_b: [Errno 28] No space left on device",
    }
    disk.writer.forget("run_a")
    disk.put("run_a", 4)
    disk.finish()
    assert disk.taken[-1] == "run_a/4", "a run that comes back is written again"


def test_a_folder_that_is_gone_is_no_fault(disk: Disk) -> None:
    disk.put("run_a", 1, FolderGone("run_a"))
    disk.put("run_a", 2)
    disk.is_free.set()
    disk.finish()
    assert disk.taken == ["run_a/1"] and [result.problem for result in disk.writer.take_results()] == [""]


def test_the_queue_of_each_run_is_bounded_and_names_what_is_waited_for(disk: Disk) -> None:
    assert disk.writer.full() == {}
    disk.put("run_a", 1)
    disk.put("run_b", 1)
    assert disk.writer.full() == {}, "one job of each run"
    disk.put("run_b", 2)
    assert disk.writer.full() == {"run_b": "the disk to take version 1 of run_b"}, "run_a may hand over one more"
    disk.is_free.set()
    disk.finish()
    assert disk.writer.full() == {}
    disk.writer.wait(600.0)  # nothing is under way: no reason to wait


def test_what_is_waited_for_is_reported_meanwhile(disk: Disk) -> None:
    disk.put("run_a", 1)
    reported: list[str] = []

    def idle(what: str) -> None:
        reported.append(what)
        disk.is_free.set()

    disk.writer.finish("run_a", idle)
    assert disk.taken == ["run_a/1"] and reported[0] == "the disk to take version 1 of run_a"


def test_a_disk_that_takes_nothing_is_waited_for_only_so_long(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "DISK_TIMEOUT_S", 0.2)
    disk.put("run_a", 1)
    wait_for(disk.has_begun.is_set, "the first job to begin", timeout_s=PATIENCE_S)
    disk.put("run_a", 2)
    with pytest.raises(WaitTimeout, match="the disk to take what run_a made"):
        disk.writer.finish("run_a")
    disk.is_free.set()
    monkeypatch.undo()  # its end is waited for, however long it takes
    disk.finish()
    assert disk.taken == ["run_a/1"], "what had not begun is never written"
