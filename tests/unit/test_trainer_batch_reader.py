"""The thread that reads batches: what it holds up, what it keeps, whose turn it is, and what a run that left gets."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prime_rl.contract.files import wait_for
from prime_rl.contract.notes import Item, Work, WorkNote, read_work
from prime_rl.contract.types import BatchColumns, write_batch
from prime_rl.trainer import batches
from prime_rl.trainer.batches import BatchLimits, BatchReader, noting, take_batch
from tests.patience import PATIENCE_S
from tests.trainer_support import VOCAB, make_batch

FAULTS = {
    "a bug": ZeroDivisionError("by zero"),
    "memory": MemoryError("too large"),
    "the disk": OSError(5, "I/O error"),
}


class Disk:
    """The real one, which answers only while it is free. `reads` are the files that were read, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_free = threading.Event()
        self.is_free.set()
        self.is_asked = threading.Event()
        self.reads: list[str] = []
        self.error: Exception | None = None
        self.reader = BatchReader(self.read)

    def read(self, path: Path, limits: BatchLimits) -> BatchColumns | None:
        batch, error = None, self.error
        try:
            batch = take_batch(path, limits)
        except ValueError as bad:
            error = bad
        self.is_asked.set()
        assert self.is_free.wait(PATIENCE_S)
        self.reads.append(path.name)
        if error is not None:
            raise error
        return batch

    def put(self, run_id: str, step: int = 1, *, seed: int = 0) -> BatchColumns:
        batch = make_batch(run_id, step, seed=seed)
        self.path(run_id, step).unlink(missing_ok=True)
        write_batch(self.path(run_id, step), batch)
        return msgspec.structs.replace(batch.columns(), sampler_state={})  # which the trainer does not read

    def path(self, run_id: str, step: int = 1) -> Path:
        return self.folder / f"{run_id}_{step}"

    def want(self, run_id: str, step: int = 1, *, due: bool = True, seq_len: int = 32) -> None:
        limits = BatchLimits(run_id, step, seq_len=seq_len, vocab_size=VOCAB, max_async_level=2)
        self.reader.want(self.path(run_id, step), limits, due=due)

    def take(self) -> dict[str, BatchColumns | str]:
        """All whose turn it is, once they were read."""
        return self.reader.take(PATIENCE_S)

    def stop(self) -> None:
        """From now on it does not answer; it was asked for a file already."""
        self.is_free.clear()
        self.is_asked.clear()

    def has_read(self, *names: str) -> None:
        wait_for(lambda: self.reads == list(names), f"{names} to be read", timeout_s=PATIENCE_S)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.is_free.set()
    disk.reader.close()


def test_a_batch_is_given_once_and_a_missing_one_when_it_came(disk: Disk) -> None:
    batch = disk.put("run_a")
    disk.want("run_a")
    disk.want("run_b")
    assert disk.take() == {"run_a": batch}
    assert disk.take() == {}
    late = disk.put("run_b")
    disk.want("run_b")
    assert disk.take() == {"run_b": late}


def test_a_disk_that_does_not_answer_holds_up_no_caller(disk: Disk) -> None:
    """Each call returns although the file is never read before the last line: else the test does not end."""
    batch = disk.put("run_a")
    disk.stop()
    disk.want("run_a")
    assert disk.is_asked.wait(PATIENCE_S)
    for _ in range(3):
        disk.want("run_a")
        disk.want("run_b")
        assert disk.reader.take() == {} and disk.reader.take(0.001) == {}
    disk.reader.forget("run_b")
    assert disk.reads == []
    disk.is_free.set()
    assert disk.take() == {"run_a": batch}
    disk.has_read("run_a_1")


def test_a_pipe_in_the_place_of_a_file_is_a_value_and_holds_up_nothing(disk: Disk) -> None:
    os.mkfifo(disk.path("run_a"))
    batch = disk.put("run_b")
    disk.reader.close()
    disk.reader = BatchReader()
    disk.want("run_a")
    disk.want("run_b")
    found = disk.take()
    assert found.pop("run_b") == batch
    assert found == {"run_a": f"{disk.path('run_a')} is a named pipe: must be a regular file"}


@pytest.mark.parametrize("kind", FAULTS)
def test_any_fault_is_a_value_and_the_next_file_is_read(disk: Disk, kind: str) -> None:
    disk.error = FAULTS[kind]
    disk.want("run_a")
    assert disk.take() == {"run_a": batches.error_text(FAULTS[kind])}
    disk.error = None
    batch = disk.put("run_a")
    disk.want("run_a")
    assert disk.take() == {"run_a": batch}


def test_a_batch_that_was_read_before_its_turn_is_the_batch_whatever_becomes_of_the_file(disk: Disk) -> None:
    batch = disk.put("run_a")
    disk.want("run_a", due=False)
    disk.has_read("run_a_1")
    disk.put("run_a", seed=1)
    disk.want("run_a", due=False)
    assert disk.take() == {}, "its turn has not come"
    disk.path("run_a").unlink()
    disk.want("run_a")
    assert disk.take() == {"run_a": batch}
    disk.has_read("run_a_1")


def test_a_fault_before_the_turn_does_not_count_and_costs_one_read(disk: Disk) -> None:
    disk.path("run_a").write_bytes(b"half of a ba")
    disk.want("run_a", due=False)
    disk.has_read("run_a_1")
    for _ in range(5):
        disk.want("run_a", due=False)
    disk.want("run_b", due=False)  # read after all that was asked for before
    disk.has_read("run_a_1", "run_b_1")
    batch = disk.put("run_a")
    disk.want("run_a")
    assert disk.take() == {"run_a": batch}


def test_a_fault_at_the_turn_counts(disk: Disk) -> None:
    disk.path("run_a").write_bytes(b"half of a ba")
    disk.want("run_a", due=False)
    disk.has_read("run_a_1")
    disk.want("run_a")
    assert "not a batch file" in str(disk.take()["run_a"])
    disk.has_read("run_a_1", "run_a_1")


def test_a_fault_that_was_found_while_the_turn_came_is_looked_at_again(disk: Disk) -> None:
    disk.path("run_a").write_bytes(b"half of a ba")
    disk.stop()
    disk.want("run_a", due=False)
    assert disk.is_asked.wait(PATIENCE_S)
    disk.want("run_a")
    batch = disk.put("run_a")
    disk.is_free.set()
    assert disk.take() == {"run_a": batch}
    disk.has_read("run_a_1", "run_a_1")


def test_what_has_its_turn_is_read_first(disk: Disk) -> None:
    disk.stop()
    disk.want("run_a", due=False)
    assert disk.is_asked.wait(PATIENCE_S)
    disk.want("run_b", due=False)
    disk.want("run_c", due=False)
    disk.want("run_d", due=True)
    disk.want("run_c", due=True)
    disk.is_free.set()
    disk.has_read("run_a_1", "run_d_1", "run_c_1", "run_b_1")


def test_a_run_that_left_gets_nothing_and_reads_again_when_it_comes_back(disk: Disk) -> None:
    old = disk.put("run_a")
    disk.stop()
    disk.want("run_a")
    assert disk.is_asked.wait(PATIENCE_S)
    disk.reader.forget("run_a")
    new = disk.put("run_a", seed=1)
    disk.want("run_a", due=False)
    disk.is_free.set()
    disk.has_read("run_a_1", "run_a_1")
    disk.want("run_a")
    assert disk.take() == {"run_a": new} != {"run_a": old}
    disk.want("run_a")
    disk.has_read("run_a_1", "run_a_1", "run_a_1")
    disk.reader.forget("run_a")
    assert disk.take() == {}


def test_a_run_that_went_back_gets_no_batch_of_a_later_step(disk: Disk) -> None:
    disk.put("run_a", 3)
    earlier = disk.put("run_a", 2)
    disk.want("run_a", 3, due=False)
    disk.has_read("run_a_3")
    disk.want("run_a", 2)
    assert disk.take() == {"run_a": earlier}
    disk.want("run_a", 3)
    assert msgspec.structs.asdict(disk.take()["run_a"])["step"] == 3  # type: ignore[arg-type]
    disk.has_read("run_a_3", "run_a_2", "run_a_3")


def test_a_missing_file_that_is_not_wanted_any_more_takes_no_other_with_it(disk: Disk) -> None:
    batch = disk.put("run_a", 2)
    disk.stop()
    disk.want("run_a", 3)
    assert disk.is_asked.wait(PATIENCE_S)
    disk.want("run_a", 2)
    disk.is_free.set()
    disk.has_read("run_a_3", "run_a_2")
    assert disk.take() == {"run_a": batch}


def test_a_batch_that_was_checked_against_other_limits_is_read_again(disk: Disk) -> None:
    """As when the config that allowed it was changed meanwhile."""
    batch = disk.put("run_a")
    disk.want("run_a", due=False, seq_len=4)
    disk.has_read("run_a_1")
    disk.want("run_a", due=False)
    disk.has_read("run_a_1", "run_a_1")
    disk.want("run_a", seq_len=4)
    disk.has_read("run_a_1", "run_a_1", "run_a_1")
    assert "expected 2 to seq_len = 4" in str(disk.take()["run_a"])
    disk.want("run_a")
    assert disk.take() == {"run_a": batch}


def test_no_more_than_one_batch_of_a_run_is_kept() -> None:
    """By the references to each batch that was read."""
    batches = [make_batch("run_a", step).columns() for step in range(1, 6)]
    alone = sys.getrefcount(batches[0])
    asked: list[int] = []

    def read(path: Path, limits: BatchLimits) -> BatchColumns:
        asked.append(limits.step)
        return batches[limits.step - 1]

    def is_kept(step: int) -> bool:
        return sys.getrefcount(batches[step - 1]) > alone

    reader = BatchReader(read)
    for step in range(1, 6):
        reader.want(Path(f"step_{step}"), BatchLimits("run_a", step, 32, VOCAB, 2), due=False)
        wait_for(lambda step=step: is_kept(step), f"batch {step} to be read", timeout_s=PATIENCE_S)  # type: ignore[misc]
    wait_for(lambda: not any(map(is_kept, range(1, 5))), "all batches but the last to be dropped", timeout_s=PATIENCE_S)
    assert is_kept(5) and asked == [1, 2, 3, 4, 5]
    reader.forget("run_a")
    wait_for(lambda: not is_kept(5), "the last batch to be dropped", timeout_s=PATIENCE_S)
    reader.close()


def test_closing_waits_for_no_disk(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "CLOSE_TIMEOUT_S", 0.01)
    disk.put("run_a")
    disk.stop()
    disk.want("run_a")
    assert disk.is_asked.wait(PATIENCE_S)
    disk.reader.close()
    assert disk.reads == []


def test_closing_ends_the_thread_that_has_nothing_to_read(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    reader = BatchReader()
    (thread,) = set(threading.enumerate()) - others
    reader.want(tmp_path / "none", BatchLimits("run_a", 1, 32, VOCAB, 2), due=True)
    assert reader.take(PATIENCE_S) == {}, "it waits for the next order"
    reader.close()
    assert not thread.is_alive()


def test_the_file_that_is_read_is_noted_and_no_file_that_is_not_there(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "run_a" / "rollouts" / "step_1" / "rollouts.msgpack"
    place.parent.mkdir(parents=True)
    path = tmp_path / "work.json"
    seen: list[Work | None] = []

    def look(path_: Path, limits: BatchLimits) -> BatchColumns | None:
        seen.append(read_work(path))
        return take_batch(path_, limits)

    monkeypatch.setattr(batches, "take_batch", look)
    path.write_bytes(msgspec.json.encode(Work(items=[Item("run_a", "read it"), Item("run_b", "read it")])))
    take = noting(WorkNote(path))
    limits = BatchLimits("run_a", 1, 64, VOCAB, 1)
    assert take(place, limits) is None and seen == []
    write_batch(place, make_batch("run_a", 1))
    assert take(place, limits) is not None
    (noted,) = filter(None, seen)
    assert noted.items == [Item("run_a", "read run_a/rollouts/step_1/rollouts.msgpack")]
    assert noted.suspects == {"run_a": 1, "run_b": 1} and noted.writer.is_running()
    after = read_work(path)
    assert after is not None and (after.items, after.suspects) == ([], {"run_b": 1})
    place.write_bytes(b"no batch")
    with pytest.raises(ValueError, match="msgpack"):
        take(place, limits)
    after = read_work(path)
    assert after is not None and after.items == [], "a file that is refused has ended nothing"
