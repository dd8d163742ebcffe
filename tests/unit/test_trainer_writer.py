"""The background writer: order, faults of one run, waiting, and what the main thread learns."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from prime_rl.contract.files import WaitTimeout, wait_for
from prime_rl.trainer import writer as writer_module
from prime_rl.trainer.writer import BackgroundWriter, FolderGone, WriteError, WriteJob
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


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk(BackgroundWriter())
    yield disk
    disk.is_free.set()
    disk.writer.close()


def test_work_is_done_in_order_and_reported_in_order(disk: Disk) -> None:
    for run_id, step in [("run_a", 1), ("run_b", 1), ("run_a", 2)]:
        disk.put(run_id, step)
    assert disk.writer.take_results() == []
    disk.is_free.set()
    disk.writer.finish()
    assert disk.taken == ["run_a/1", "run_b/1", "run_a/2"]
    assert [(result.job.what, result.problem) for result in disk.writer.take_results()] == [
        ("version 1 of run_a", None),
        ("version 1 of run_b", None),
        ("version 2 of run_a", None),
    ]
    assert disk.writer.take_results() == []


def test_a_fault_drops_what_the_run_still_wants_and_nothing_of_others(disk: Disk) -> None:
    disk.put("run_a", 1, WriteError("publishing version 1 failed: no room"))
    disk.put("run_a", 2)
    disk.put("run_b", 1, OSError(28, "No space left on device"))
    disk.is_free.set()
    disk.writer.finish()
    disk.put("run_a", 3)
    disk.writer.finish()
    assert disk.taken == ["run_a/1", "run_b/1"]
    assert [result.problem for result in disk.writer.take_results()] == [
        "publishing version 1 failed: no room",
        "version 1 of run_b: [Errno 28] No space left on device",
    ]
    disk.writer.forget("run_a")
    disk.put("run_a", 4)
    disk.writer.finish("run_a")
    assert disk.taken[-1] == "run_a/4", "a run that comes back is written again"


def test_a_folder_that_is_gone_is_no_fault(disk: Disk) -> None:
    disk.put("run_a", 1, FolderGone("run_a"))
    disk.put("run_a", 2)
    disk.is_free.set()
    disk.writer.finish()
    assert disk.taken == ["run_a/1"] and [result.problem for result in disk.writer.take_results()] == [""]


def test_a_run_waits_for_its_own_work_alone(disk: Disk) -> None:
    disk.put("run_a", 1)
    disk.put("run_b", 1)
    said: list[str] = []

    def idle(what: str) -> None:
        said.append(what)
        disk.is_free.set()

    disk.writer.finish("run_b", idle)
    assert "run_b/1" in disk.taken and said[0] == "the disk to take version 1 of run_b"
    disk.writer.finish("run_c")


def test_the_queue_of_each_run_is_bounded_and_says_what_is_waited_for(disk: Disk) -> None:
    assert disk.writer.full() == {}
    disk.put("run_a", 1)
    wait_for(disk.has_begun.is_set, "the first job to begin", timeout_s=PATIENCE_S)
    disk.put("run_b", 1)
    assert disk.writer.full() == {}, "one job of each run"
    disk.put("run_b", 2)
    assert disk.writer.full() == {"run_b": "the disk to take version 1 of run_a"}, "run_a may hand over one more"
    disk.is_free.set()
    disk.writer.finish()
    assert disk.writer.full() == {}
    disk.writer.wait(600.0)  # nothing is under way: no reason to wait


def test_a_disk_that_takes_nothing_is_waited_for_only_so_long(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "DISK_TIMEOUT_S", 0.2)
    disk.put("run_a", 1)
    wait_for(disk.has_begun.is_set, "the first job to begin", timeout_s=PATIENCE_S)
    disk.put("run_a", 2)
    with pytest.raises(WaitTimeout, match="the disk to take what run_a made"):
        disk.writer.finish("run_a")
    disk.is_free.set()
    disk.writer.finish()
    assert disk.taken == ["run_a/1"], "what had not begun is never written"


def test_closing_finishes_the_queue() -> None:
    writer = BackgroundWriter()
    taken: list[int] = []
    for step in range(5):
        writer.submit(WriteJob("run_a", f"version {step}", lambda step=step: taken.append(step), lambda: None))  # type: ignore[misc]
    writer.close()
    assert taken == [0, 1, 2, 3, 4]
