from __future__ import annotations

import gc
import os
import resource
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from prime_rl.contract.files import (
    FileRefused,
    WaitStopped,
    WaitTimeout,
    append_line,
    mark_stable,
    read_end,
    read_file,
    read_text,
    staged_dir,
    wait_for,
    write_atomic,
)
from prime_rl.contract.types import (
    BadBatchError,
    BatchColumns,
    TrainingBatch,
    TrainingSample,
    read_batch,
    read_columns,
    write_batch,
)
from tests.patience import PATIENCE_S

T = TypeVar("T")


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    contents = {b"a" * 200_000, b"b" * 300_000}
    write_atomic(path, min(contents))
    seen: set[bytes] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: bool(seen), "the first read", timeout_s=PATIENCE_S)
    for _ in range(30):
        for content in contents:
            write_atomic(path, content)
    stop.set()
    reader.join()
    assert seen and seen <= contents


def test_a_failed_write_keeps_the_old_content_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_writes_do_not_bring_back_a_deleted_folder(tmp_path: Path) -> None:
    gone = tmp_path / "run_a"
    with pytest.raises(FileNotFoundError):
        write_atomic(gone / "control" / "evicted.txt", "x")
    with pytest.raises(FileNotFoundError):
        append_line(gone / "metrics" / "trainer.jsonl", "{}")
    with pytest.raises(FileNotFoundError), staged_dir(gone / "broadcast" / "step_1"):
        pass
    assert not gone.exists()


def test_staged_dir_appears_whole_and_replaces_a_leftover(tmp_path: Path) -> None:
    final = tmp_path / "step_1"
    final.mkdir()
    (final / "half").touch()
    with staged_dir(final) as tmp:
        (tmp / "weights").write_text("w")
        mark_stable(tmp)
        assert not (final / "weights").exists()
    assert sorted(os.listdir(final)) == ["STABLE", "weights"]
    assert os.listdir(tmp_path) == ["step_1"]


def test_staged_dir_leaves_nothing_when_the_body_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staged_dir(tmp_path / "step_1") as tmp:  # noqa: PT012 (the body is what fails)
        (tmp / "weights").write_text("w")
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_staged_dir_appears_when_the_disk_has_every_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that a power cut tests: content, names, then the rename, then the name of the folder itself."""
    calls: list[str] = []
    sync, rename = os.fsync, os.rename

    def watched_sync(fd: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    def watched_rename(source: Path, target: Path) -> None:
        calls.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "rename", watched_rename)
    with staged_dir(tmp_path / "step_1") as staged:
        (staged / "weights").write_text("w")
        (staged / "inner").mkdir()
        (staged / "inner" / "state").write_text("s")
        mark_stable(staged, sync=False)
    assert sorted(calls[:2]) == ["state", "weights"]
    assert calls[2:] == [staged.name, "rename", tmp_path.name]


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, stat = tmp_path / "orch.toml", os.fstat
    path.write_bytes(b"x" * 8)
    assert read_file(path, limit=10) == b"x" * 8

    def grows(fd: int) -> os.stat_result:
        found = stat(fd)
        with path.open("ab") as file:
            file.write(b"y" * 2)
        return found

    monkeypatch.setattr(os, "fstat", grows)
    with pytest.raises(FileRefused, match="has 11 bytes, expected at most 10"):
        read_file(path, limit=10)


def test_read_text_of_odd_files(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert read_text(path) is None
    path.write_bytes(b"ab\xff" + b"c" * 10)
    assert read_text(path, limit=4) == "ab\ufffdc"
    assert read_text(path / "below") is None


def test_a_torn_line_is_ended_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "trainer.jsonl"
    append_line(path, "one")
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    append_line(path, "two")
    append_line(path, "three")
    assert path.read_text().splitlines() == ["one", '{"step": 2, "lo', "two", "three"]


def test_a_line_that_finds_no_room_is_an_error(tmp_path: Path) -> None:
    """A limit of the kernel stands for the end of the disk: it takes a part of the line, and reports it afterwards."""
    path = tmp_path / "trainer.jsonl"
    append_line(path, "one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_line(path, "a line that is too long")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_line(path, "two")
    assert path.read_text().splitlines() == ["one", "two"]


def test_wait_for_names_what_is_missing() -> None:
    now = [0.0]
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        now[0] += seconds

    with pytest.raises(WaitTimeout, match=r"timed out after 1 s waiting for run_a to be released"):
        wait_for(lambda: False, "run_a to be released", timeout_s=1, clock=lambda: now[0], sleep=sleep)
    assert now[0] == pytest.approx(1.0, abs=0.06)
    with pytest.raises(WaitStopped, match="run_a"):
        wait_for(lambda: False, "run_a", stop=lambda: True, sleep=sleep)
    wait_for(lambda: now[0] > 1.5, "time", clock=lambda: now[0], sleep=sleep)


def sample() -> TrainingSample:
    return TrainingSample([1, 2, 3], [False, True, True], [0.0, -0.5, -1.5], 0.25, 1.0, 1.0, 4, "reverse-text/17")


def test_batches_round_trip(tmp_path: Path) -> None:
    batch = TrainingBatch("run_a", 5, [sample(), sample()], {"next_index": 9})
    write_batch(tmp_path / "rollouts.msgpack", batch)
    assert read_batch(tmp_path / "rollouts.msgpack") == batch
    assert read_columns(tmp_path / "rollouts.msgpack") == msgspec.structs.replace(batch.columns(), sampler_state={})
    (tmp_path / "lists").write_bytes(msgspec.msgpack.encode(batch))
    assert read_batch(tmp_path / "lists") == batch, "version 1"


def test_a_file_is_in_memory_once(tmp_path: Path) -> None:
    """A sparse one, which takes no room on the disk."""
    path, size = tmp_path / "sparse", 64 << 20
    with path.open("wb") as file:
        file.truncate(size)
    data, peak = traced(lambda: read_file(path, limit=size))
    assert data == bytes(size) and peak < 1.1 * size
    with pytest.raises(FileRefused, match=f"has {size} bytes, expected at most {size - 1}"):
        read_file(path, limit=size - 1)
    assert len(read_end(path, 3)) == 3 and traced(lambda: read_end(path, 3))[1] < 1 << 20


def test_a_file_that_grows_while_it_is_read_is_read_to_its_end_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "grows", os.read
    path.write_bytes(b"a" * 10)

    def read(fd: int, size: int) -> bytes:
        data = real(fd, size)
        if path.stat().st_size == 10:
            with path.open("ab") as file:
                file.write(b"b" * 10)
        return data

    monkeypatch.setattr(os, "read", read)
    assert read_file(path, limit=20) == b"a" * 10 + b"b" * 10
    path.write_bytes(b"a" * 10)
    with pytest.raises(FileRefused, match="has 20 bytes, expected at most 19"):
        read_file(path, limit=19)


def test_a_batch_takes_no_more_memory_than_its_samples_do(tmp_path: Path) -> None:
    """A list without anything in it is one byte of the file."""
    path, size = tmp_path / "rollouts.msgpack", 1 << 20
    batch = BatchColumns("run_a", 5, [sample().columns()], {"x": [[]] * size})
    path.write_bytes(msgspec.msgpack.encode(batch))
    found, peak = traced(lambda: read_columns(path))
    assert found.samples == batch.samples and peak < 3 * path.stat().st_size


def traced(call: Callable[[], T]) -> tuple[T, int]:
    """What `call` returns, and the most bytes that were allocated meanwhile."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_columns_are_little_endian_arrays() -> None:
    columns = sample().columns()
    assert columns.token_ids == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])
    assert columns.loss_mask == bytes([0, 1, 1])
    assert columns.logprobs == bytes([0, 0, 0, 0, 0, 0, 0, 0xBF, 0, 0, 0xC0, 0xBF])
    assert columns.lists() == sample()


@pytest.mark.parametrize("field", ["token_ids", "logprobs"])
def test_bytes_that_are_not_whole_numbers_are_named(tmp_path: Path, field: str) -> None:
    good = sample().columns()
    bad = msgspec.structs.replace(good, **{field: b"\0" * 11})
    path = tmp_path / "rollouts.msgpack"
    path.write_bytes(msgspec.msgpack.encode(BatchColumns("run_a", 5, [good, bad], {})))
    with pytest.raises(BadBatchError, match=rf"rollouts\.msgpack: sample 1: {field} has 11 bytes, expected 4 for each"):
        read_batch(path)


@pytest.mark.parametrize("data", [b"", b"\x80", b"not msgpack", b"\x81\xa1a\x01"])
def test_a_damaged_batch_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "rollouts.msgpack"
    path.write_bytes(data)
    with pytest.raises(BadBatchError, match=r"rollouts\.msgpack: not a batch file"):
        read_batch(path)


def test_a_batch_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.msgpack"
    path.write_bytes(msgspec.msgpack.encode(TrainingBatch("run_a", 5, [], {}, version=99)))
    with pytest.raises(BadBatchError, match="format version 99"):
        read_batch(path)


@pytest.mark.parametrize("name", ["control/evicted.txt", "metrics/trainer.jsonl"], ids=["file", "folder"])
def test_what_is_not_there_keeps_nothing_in_memory(tmp_path: Path, name: str) -> None:
    (tmp_path / "run_a" / "control").mkdir(parents=True)

    class Held:
        """A caller's own."""

    def look() -> weakref.ref[Held]:
        held = Held()
        assert read_text(tmp_path / "run_a" / name) is None
        return weakref.ref(held)

    gc.disable()
    try:
        assert look()() is None, "an error that is its own cause keeps the frames of all callers"
    finally:
        gc.enable()
