"""Logs of any size, and what files do: pieces and searches against a plain reading, growth, rotation, absurd lines."""

from __future__ import annotations

import os
import random
import string
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.contract.layout import RunDir
from tests.budgets import examples
from tui.messages import LogFound
from tui.readers import log_reader
from tui.readers.log_reader import (
    LEVELS,
    NUM_AROUND,
    Found,
    LogData,
    LogRequest,
    LogSearch,
    LogTabReader,
    lines_after,
    lines_before,
    open_log,
    rank,
    rank_at,
)

ResultT = TypeVar("ResultT")
WORDS = (
    "INFO    a: x",
    "ERROR   a: boom",
    "WARNING b: hm",
    "DEBUG c: y",
    "  more of it",
    "",
    "Traceback (most",
    "é" * 9,
)
LINES = st.lists(st.sampled_from(WORDS), max_size=60)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The places where blocks meet are where reading breaks."""
    monkeypatch.setattr(log_reader, "BLOCK_BYTES", 64)
    monkeypatch.setattr(log_reader, "BLOCK_BYTES", 64)


def done(steps: Generator[None, None, ResultT]) -> ResultT:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: ResultT = end.value
            return result


@contextmanager
def file_of(data: bytes) -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.fileno()


def plain(lines: list[str], level: int) -> list[tuple[int, bytes]]:
    """(offset, bytes) of the lines of records of at least `level`; what precedes any record counts as info."""
    found, offset, loud = [], 0, level <= 1
    for line in lines:
        raw = line.encode()
        said = rank(raw)
        loud = loud if said is None else said >= level
        if not level or loud:
            found.append((offset, raw))
        offset += len(raw) + 1
    return found


@settings(max_examples=examples(150))
@given(lines=LINES, num=st.integers(1, 80), level=st.integers(0, 3), share=st.floats(0, 1), ends=st.booleans())
def test_a_piece_is_what_a_plain_reading_finds(
    lines: list[str], num: int, level: int, share: float, ends: bool
) -> None:
    data = "".join(line + "\n" for line in lines).encode()
    if not ends and not data.endswith(b"\n\n"):
        data = data.removesuffix(b"\n")
    offsets = [0, *(offset for offset, _ in plain(lines, 0)[1:])]
    anchor = offsets[int(share * (len(offsets) - 1))]
    wanted = plain(lines, level) if data else []
    with file_of(data) as fd:
        before, is_first = done(lines_before(fd, anchor, num, level))
        after, is_last = done(lines_after(fd, anchor, num, level))
    assert before == [line for line in wanted if line[0] < anchor][-num:]
    expected = [line for line in wanted if line[0] >= anchor]
    assert after == expected[:num]
    if is_first:
        assert len([line for line in wanted if line[0] < anchor]) <= num
    assert is_first or len(before) == num
    assert is_last or len(after) == num


@settings(max_examples=examples(100))
@given(lines=LINES, words=st.sampled_from(["boom", "a: x", "INFO", "é", "nowhere"]), share=st.floats(0, 1),
       forwards=st.booleans(), level=st.integers(0, 3))  # fmt: skip
def test_a_search_finds_the_nearest_line_and_goes_round(
    lines: list[str], words: str, share: float, forwards: bool, level: int
) -> None:
    data = "".join(line + "\n" for line in lines).encode()
    offset = int(share * len(data))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(data)
        got: list[Found] = []
        LogSearch(path, words, offset, forwards=forwards, level=level, serial=3, post=got.append).run()
        fd = open_log(path)
        try:
            matches = []
            for start, raw in plain(lines, 0):
                place = raw.find(words.encode())
                while place >= 0:
                    if rank_at(fd, start) >= level:
                        matches.append((start + place, start))
                    place = raw.find(words.encode(), place + 1)
        finally:
            os.close(fd)
    found = got[-1]
    assert found.is_done and found.serial == 3 and not any(each.is_done for each in got[:-1])
    ahead = [start for place, start in matches if (place >= offset if forwards else place < offset)]
    behind = [start for place, start in matches if (place < offset if forwards else place >= offset)]
    chosen = ahead or behind
    assert found.start == ((chosen[0] if forwards else chosen[-1]) if chosen else None)
    assert found.is_around == (not ahead and bool(behind))


def test_capitals_count_when_there_are_some_and_a_search_can_be_stopped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("Boom\nboom\n" + "x\n" * 100)
    got: list[Found] = []
    LogSearch(path, "boom", 0, forwards=True, level=0, serial=1, post=got.append).run()
    assert got[-1].start == 0
    LogSearch(path, "Boom", 1, forwards=True, level=0, serial=1, post=got.append).run()
    assert (got[-1].start, got[-1].is_around) == (0, True)
    search = LogSearch(path, "nowhere", 0, forwards=True, level=0, serial=1, post=lambda found: search.stop())
    search.run()
    LogSearch(tmp_path / "none", "x", 0, forwards=True, level=0, serial=9, post=got.append).run()
    assert got[-1] == Found(9, 1.0, True)


class Log:
    """A run's log and the reader of its tab."""

    def __init__(self, folder: Path) -> None:
        self.path = RunDir(folder / "run_a").log
        self.path.parent.mkdir(parents=True)
        self.reader = LogTabReader(folder, "run_a")
        self.request = LogRequest()
        self.last = LogData("run_a")

    def look(self) -> LogData | None:
        data, more = self.reader.read(self.request)
        assert not more
        self.last = data or self.last
        return data

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.last.slice.lines]


OPERATIONS = st.lists(
    st.sampled_from(["append", "partial", "cut", "rotate", "remove", "empty", "folder", "rewrite"]), max_size=12
)


@settings(max_examples=examples(60))
@given(operations=OPERATIONS, seed=st.integers(0, 1000))
def test_whatever_a_file_does_the_end_is_shown_as_it_is(operations: list[str], seed: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder))
        for number, operation in enumerate(operations):
            _do(operation, log.path, number, rng)
            if log.path.is_file():  # two changes in one tick of the file system's clock look alike
                os.utime(log.path, (number, number))
            before = log.last.generation
            log.look()
            is_file = log.path.is_file()
            data = log.path.read_bytes() if is_file else b""
            assert log.texts == data.decode().removesuffix("\n").split("\n") * bool(data)
            assert log.last.size == len(data)
            assert log.last.generation >= before
            assert log.look() is None, "nothing changed"


def _do(operation: str, path: Path, number: int, rng: random.Random) -> None:
    if path.is_dir():
        path.rmdir()
    line = f"line {number} " + "".join(rng.choices(string.ascii_letters, k=rng.randrange(90)))
    if operation in ("append", "partial"):
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n" * (operation == "append"))
    elif operation == "cut" and path.exists():
        os.truncate(path, path.stat().st_size // 2)
    elif operation == "rotate" and path.exists():
        os.replace(path, path.with_suffix(".1"))
        path.write_text(line + "\n", encoding="utf-8")
    elif operation == "rewrite":
        path.write_text((line + "\n") * 3, encoding="utf-8")
    elif operation == "empty":
        path.write_bytes(b"")
    elif operation in ("remove", "folder"):
        path.unlink(missing_ok=True)
        if operation == "folder":
            path.mkdir()


def test_another_file_is_another_generation(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.look()
    log.path.write_text("one\n")
    log.look()
    assert log.last.generation == 0
    log.path.write_text("two, longer than before\n")  # cut and grown past the old size: same inode
    log.look()
    assert (log.texts, log.last.generation) == (["two, longer than before"], 1)
    other = log.path.with_name("other")
    other.write_text("two, longer than before\nthree\n")
    os.replace(other, log.path)
    log.look()
    assert (len(log.texts), log.last.generation) == (2, 2)
    log.path.unlink()
    log.look()
    assert (log.texts, log.last.generation) == ([], 3)


def test_around_a_place_and_back_to_the_end(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.path.write_bytes(b"".join(b"%05d INFO x\n" % number for number in range(5_000)))
    log.look()
    assert log.texts[-1] == "04999 INFO x" and len(log.texts) == 2 * NUM_AROUND
    assert (log.last.slice.is_first, log.last.slice.is_last) == (False, True)
    log.request = LogRequest(2_000 * 13)
    log.look()
    assert log.texts[NUM_AROUND] == "02000 INFO x" and len(log.texts) == 2 * NUM_AROUND
    assert (log.last.slice.is_first, log.last.slice.is_last) == (False, False)
    log.request = LogRequest(0)
    log.look()
    assert log.texts[0] == "00000 INFO x" and log.last.slice.is_first
    log.request = LogRequest(10**9)
    log.look()
    assert log.texts[-1] == "04999 INFO x"
    with log.path.open("a") as file:
        file.write("05000 INFO y\n")
    log.request = LogRequest()
    log.look()
    assert log.texts[-1] == "05000 INFO y"


def test_rare_levels_are_found_far_away_and_a_new_wish_ends_the_search(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.path.write_text("ERROR boom\n  at x\n" + "INFO x\n" * 20_000)
    log.request = LogRequest(None, LEVELS.index("error"))
    log.look()
    assert log.texts == ["ERROR boom", "  at x"] and log.last.slice.is_first
    log.request = LogRequest(None, LEVELS.index("warning"))
    assert log.reader.read(log.request, lambda: False) == (None, True), "nothing waits for it"
    log.look()
    assert log.texts == ["ERROR boom", "  at x"]


def test_two_gigabytes_of_nothing_and_lines_of_a_megabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "BLOCK_BYTES", 1 << 18)
    log = Log(tmp_path)
    read = 0
    real = os.pread

    def counted(fd: int, num: int, offset: int) -> bytes:
        nonlocal read
        data = real(fd, num, offset)
        read += len(data)
        return data

    monkeypatch.setattr(log_reader.os, "pread", counted)
    with log.path.open("wb") as file:
        file.truncate(2 << 30)
    log.look()
    assert log.last.size == 2 << 30 and set(log.texts) <= {""}
    assert read < 8 << 20, "most of it is never read"
    log.path.write_bytes((b"\x1b]2;x\x07" + b"y" * (1 << 20) + b"\n") * 3 + b"end\n")
    log.look()
    assert log.texts[-1] == "end" and max(map(len, log.texts)) == log_reader.MAX_LINE_CHARS
    assert not any("\x1b" in text for text in log.texts)
    log.path.write_bytes(b"")
    log.look()
    assert log.texts == [] and log.last.size == 0


def test_a_pipe_in_the_place_of_a_log_holds_nothing_up(tmp_path: Path) -> None:
    log = Log(tmp_path)
    os.mkfifo(log.path)
    log.look()
    assert log.texts == []


def test_a_search_that_was_stopped_does_not_replace_what_a_later_one_found() -> None:
    stopped, found = LogFound(Found(1, 0.5)), LogFound(Found(2, 1.0, is_done=True, start=7))
    assert not found.can_replace(stopped), "Textual asks the older message about the next in the queue"
    assert stopped.can_replace(found) and stopped.can_replace(LogFound(Found(1, 0.6)))
