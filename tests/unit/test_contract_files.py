from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from prime_rl.contract import files
from prime_rl.contract.files import (
    FileRefused,
    WaitStopped,
    WaitTimeout,
    append_line,
    mark_stable,
    read_end,
    read_file,
    read_text,
    remove,
    remove_file,
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


def only_here(patched: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """`patched` in this thread; those that other tests have left, such as heartbeats, do as ever."""
    here = threading.get_ident()
    return lambda *args, **options: (patched if threading.get_ident() == here else real)(*args, **options)


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

    monkeypatch.setattr(os, "fsync", only_here(full, os.fsync))
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

    def watched_rename(source: Path, target: Path, **at: Any) -> None:
        calls.append("rename")
        rename(source, target, **at)

    monkeypatch.setattr(os, "fsync", only_here(watched_sync, os.fsync))
    monkeypatch.setattr(os, "rename", only_here(watched_rename, os.rename))
    with staged_dir(tmp_path / "step_1") as staged:
        (staged / "weights").write_text("w")
        (staged / "inner").mkdir()
        (staged / "inner" / "state").write_text("s")
        mark_stable(staged, sync=False)
    assert sorted(calls[:2]) == ["state", "weights"]
    assert calls[2:] == [staged.name, "rename", tmp_path.name]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """The checkpoints of a run and those of another one, each with a marker and a checkpoint of the same name."""
    made = tmp_path / "run_a" / "checkpoints", tmp_path / "run_b" / "checkpoints"
    for checkpoints in made:
        (checkpoints / "step_1").mkdir(parents=True)
        for name in ("note.txt", "step_1/state"):
            (checkpoints / name).write_text("kept")
    return made


def give_way(folder: Path, others: Path) -> None:
    """A link to `others` comes in the place of `folder`."""
    folder.rename(folder.with_name("aside"))
    folder.symlink_to(others)


@pytest.mark.parametrize(("call", "name"), [("unlink", "note.txt"), ("rmdir", "step_1")])
def test_a_folder_that_gives_way_to_a_link_while_something_in_it_is_removed_costs_others_nothing(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, call: str, name: str
) -> None:
    ours, others = runs
    module, function = (os, "unlink") if call == "unlink" else (files, "_remove_tree")
    real = getattr(module, function)

    def swapped(*args: Any, **at: Any) -> None:
        monkeypatch.undo()
        give_way(ours, others)
        real(*args, **at)

    monkeypatch.setattr(module, function, swapped)
    remove(ours / name)
    assert not (ours.with_name("aside") / name).exists()
    assert sorted(os.listdir(others)) == ["note.txt", "step_1"] and (others / "step_1" / "state").read_text() == "kept"
    with pytest.raises(FileRefused, match=r"run_a/checkpoints is a symbolic link: must be a regular folder; remove it"):
        remove(ours / name)
    assert sorted(os.listdir(others)) == ["note.txt", "step_1"]


@pytest.mark.parametrize("above", [False, True], ids=["it", "its parent"])
def test_a_staged_folder_that_gives_way_to_a_link_costs_others_nothing(runs: tuple[Path, Path], above: bool) -> None:
    ours, others = runs
    refused = pytest.raises(FileRefused, match="run_a/checkpoints is a symbolic link")
    with refused if above else contextlib.nullcontext(), staged_dir(ours / "step_1") as staged:
        (left,) = ours.glob(".step_1.*.tmp")
        give_way(ours if above else left, others if above else others / "step_1")
        (staged / "state").write_text("ours")
    assert sorted(os.listdir(others)) == ["note.txt", "step_1"] and (others / "step_1" / "state").read_text() == "kept"


def deep(folder: Path, levels: int) -> Path:
    """A new folder with so many others in one another, each with a file."""
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.close(os.open("file", os.O_CREAT, dir_fd=fd))
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    return folder


def test_a_folder_of_any_depth_is_removed_with_few_descriptors_and_calls(tmp_path: Path) -> None:
    """Else its owner brings the one who removes it to the end of either, and all others with it."""
    folder, ours = deep(tmp_path / "deep", 2 * sys.getrecursionlimit()), threading.get_ident()
    (folder / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    held, most = set[int](), list[int]()
    before, after = os.open, os.close

    def opened(*args: Any, **options: Any) -> int:
        fd = before(*args, **options)
        if threading.get_ident() == ours:  # threads that other tests have left open and close files too
            held.add(fd)
            most.append(len(held))
        return fd

    def closed(fd: int) -> None:
        if threading.get_ident() == ours:
            held.discard(fd)
        after(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", opened)
        patch.setattr(os, "close", closed)
        remove(folder)
    assert os.listdir(tmp_path) == ["kept"] and len(most) > sys.getrecursionlimit()
    assert max(most) <= 4 and not held


def test_a_folder_of_folders_without_end_is_a_trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LEVELS", 10)
    remove(deep(tmp_path / "ten", 10))
    with pytest.raises(OSError, match="is more than 10 folders deep"):
        remove(deep(tmp_path / "eleven", 12))


def test_an_empty_folder_that_lets_nobody_in_is_removed(tmp_path: Path) -> None:
    (tmp_path / "run_a" / "closed").mkdir(parents=True)
    (tmp_path / "run_a" / "closed").chmod(0)
    opened = list[object]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_exchanged", opened.append)
        remove(tmp_path / "run_a")
    assert not opened and os.listdir(tmp_path) == []


def test_a_folder_that_is_moved_away_while_it_is_removed_takes_nobody_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others = tmp_path / "run_a" / "broadcast", tmp_path / "run_b" / "broadcast"
    (ours / "step_1" / "inner").mkdir(parents=True), others.mkdir(parents=True)
    (ours / "step_1" / "inner" / "file").touch(), (others / "inner").mkdir()
    unlink = os.unlink

    def moved(name: str, *, dir_fd: int) -> None:
        (ours / "step_1" / "inner").rename(others / "moved")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", only_here(moved, os.unlink))
    with pytest.raises(OSError, match="was moved while it was removed"):
        remove(ours / "step_1")
    assert sorted(os.listdir(others)) == ["inner", "moved"]


def test_what_others_remove_at_the_same_time_ends_no_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        (tmp_path / "run_a" / f"full_{number}" / "inner").mkdir(parents=True)
        (tmp_path / "run_a" / f"file_{number}").touch()
    unlink = os.unlink

    def by_two(name: str, *, dir_fd: int) -> None:
        monkeypatch.setattr(os, "unlink", unlink)
        for other in (tmp_path / "run_a").glob("*_[0123]"):
            shutil.rmtree(other) if other.is_dir() else other.unlink()
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", only_here(by_two, os.unlink))
    remove(tmp_path / "run_a")
    assert os.listdir(tmp_path) == []


def test_only_a_file_is_removed_as_one(tmp_path: Path) -> None:
    """What has a folder where a file of ours would be must not have the one who looks remove all in it."""
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("folder", "file", "link", "missing"):
        remove_file(tmp_path / name)
    assert os.listdir(tmp_path) == ["folder"] and (tmp_path / "folder" / "inner").is_dir()


def test_what_a_failed_write_left_is_removed_with_the_next_in_its_folder_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To remove it may be dear: that is for its own run to pay."""
    ours, others = tmp_path / "run_a" / "control", tmp_path / "run_b" / "control"
    ours.mkdir(parents=True), others.mkdir(parents=True)

    def no_more(*args: Any, **at: Any) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", only_here(no_more, os.rename))
        patch.setattr(os, "unlink", only_here(no_more, os.unlink))
        with pytest.raises(OSError, match="Read-only"):
            write_atomic(ours / "paused.txt", "x")
    (left,) = os.listdir(ours)
    write_atomic(others / "paused.txt", "x")
    assert os.listdir(ours) == [left]
    write_atomic(ours / "paused.txt", "x")
    assert os.listdir(ours) == ["paused.txt"]


@pytest.mark.parametrize("how", ["with a link in it", "of another owner"])
def test_a_staging_folder_that_others_may_write_into_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """They could put links there, and have what is published written over what is a neighbour's."""
    mkdir = os.mkdir

    def replaced(name: str, mode: int = 0o777, *, dir_fd: int) -> None:
        assert mode == 0o700
        mkdir(name, mode, dir_fd=dir_fd)
        path = tmp_path / "broadcast" / name
        (path / "weights").symlink_to(path) if how == "with a link in it" else os.chown(path, 4711, -1)

    if how == "of another owner" and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    (tmp_path / "broadcast").mkdir()
    monkeypatch.setattr(os, "mkdir", only_here(replaced, os.mkdir))
    with pytest.raises(FileRefused, match="was replaced while it was made"), staged_dir(tmp_path / "broadcast/step_1"):
        raise AssertionError("nothing may be written there")
    assert os.listdir(tmp_path / "broadcast") == []


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, stat = tmp_path / "orch.toml", os.fstat
    path.write_bytes(b"x" * 8)
    assert read_file(path, limit=10) == b"x" * 8

    def grows(fd: int) -> os.stat_result:
        found = stat(fd)
        with path.open("ab") as file:
            file.write(b"y" * 2)
        return found

    monkeypatch.setattr(os, "fstat", only_here(grows, os.fstat))
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
