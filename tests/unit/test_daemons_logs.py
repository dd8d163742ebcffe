"""Logs that are put aside under a writer and a reader that know nothing of it."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from daemons import logs
from daemons.logs import LogRelay, last_lines, node_log, old_log, rotate
from prime_rl.contract import files
from prime_rl.contract.files import wait_for
from prime_rl.utils.tail import CHUNK_BYTES, FileTail, TailRead
from tests.patience import PATIENCE_S

# Each part is more than a log may have; the next one comes when the log was put aside.
NUM_PARTS, MAX_BYTES = 10, 3_000
WRITER = f"""
import sys
for part in range({NUM_PARTS}):
    for number in range(400):
        print(f"line {{part}} {{number}}", flush=True)
    sys.stdin.readline()
print("end", flush=True)
"""


def lines_of(tail: FileTail) -> list[bytes]:
    found: list[bytes] = []
    more = True
    while more:
        read = tail.read()
        assert not read.reset, "a log that is put aside goes on"
        found, more = found + read.lines, read.more
    return found


def test_a_log_is_put_aside_while_it_is_written_and_a_reader_misses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    tail, followed, num_rotations = FileTail(log), [], 0
    with (
        log.open("ab") as output,
        subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=output, bufsize=0) as writer,
    ):
        assert writer.stdin is not None
        while writer.poll() is None:
            if num_rotations < NUM_PARTS and rotate(log, MAX_BYTES, 100):
                num_rotations += 1
                with contextlib.suppress(BrokenPipeError):
                    writer.stdin.write(b"\n")
            followed += lines_of(tail)
    followed += lines_of(tail)
    kept = [old_log(log, number) for number in range(100, 0, -1)]
    stored = b"".join(path.read_bytes() for path in [*kept, log] if path.exists()).splitlines()
    # A cut may take the end of a line with it: then the next one, here the last, goes on in its place.
    assert num_rotations >= NUM_PARTS and stored[-1].endswith(b"end")
    assert followed == stored
    # A cut takes what is written in that very moment: next to nothing, more when this process has no core just then.
    assert len(stored) >= 400 * NUM_PARTS / 2
    assert len(set(stored)) == len(stored)


@pytest.mark.parametrize("num_rotations", [1, 2, 3])
@pytest.mark.parametrize("read_first", ["", "before\n", "in the mid"])
def test_no_line_is_lost_when_a_log_is_put_aside_again_before_the_reader_looks(
    tmp_path: Path, num_rotations: int, read_first: str
) -> None:
    """Also after an empty log was seen, of which nothing can be known again."""
    log = tmp_path / "daemon.log"
    log.write_text("of an earlier time\n")
    tail = FileTail(log)
    lines_of(tail)
    assert rotate(log, 10, 5) and lines_of(tail) == []
    written = read_first
    with log.open("a") as file:
        file.write(read_first)
    followed = lines_of(tail)
    for turn in range(num_rotations):
        text = f"dle {turn}\nwhole {turn}\ncut in the mid"
        with log.open("a") as file:
            file.write(text)
        assert rotate(log, 10, 5)
        written += text
    with log.open("a") as file:
        file.write("dle, the last\n")
    assert followed + lines_of(tail) == (written + "dle, the last\n").encode().splitlines()
    assert lines_of(tail) == []


@pytest.mark.parametrize("first", ["", "read\n"])
def test_nothing_is_lost_while_there_is_an_old_log_and_no_new_one_yet(tmp_path: Path, first: str) -> None:
    """As when another program rotates it, by two calls."""
    log = tmp_path / "daemon.log"
    log.write_text(first)
    tail = FileTail(log)
    lines_of(tail)
    with log.open("a") as file:
        file.write("the last\n")
    log.rename(old_log(log, 1))
    assert tail.read() == TailRead([])
    log.write_text("the first\n")
    assert lines_of(tail) == [b"the last", b"the first"]
    log.unlink()
    assert tail.read() == TailRead([], reset=True), "it was deleted"


def test_a_log_that_is_copied_but_not_cut_yet_is_read_once(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    log.touch()
    tail = FileTail(log)
    lines_of(tail)
    log.write_text("one\ntwo\n")
    old_log(log, 1).write_bytes(log.read_bytes())
    assert lines_of(tail) == [b"one", b"two"]
    log.write_text("")
    assert lines_of(tail) == []


@pytest.mark.parametrize("first", [b"", b"read\n"])
def test_more_than_a_look_takes_is_given_up_and_said(tmp_path: Path, first: bytes) -> None:
    log = tmp_path / "daemon.log"
    log.write_bytes(first)
    tail = FileTail(log, chunk_bytes=100)
    lines_of(tail)
    with log.open("ab") as file:
        file.write(b"too much\n" * 12)
    assert rotate(log, 10, 2)
    log.write_bytes(b"goes on\n")
    read = tail.read()
    assert (read.lines, read.reset, read.more) == ([b"goes on"], True, False)


def test_no_more_old_logs_are_looked_at_than_are_ever_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, opened, num_opened = tmp_path / "daemon.log", files.open_file, 0
    log.write_bytes(b"one\n")
    tail = FileTail(log)
    lines_of(tail)
    for number in range(1, 1001):
        old_log(log, number).touch()

    def counted(path: Path) -> int:
        nonlocal num_opened
        num_opened += 1
        return opened(path)

    monkeypatch.setattr("prime_rl.utils.tail.open_file", counted)
    monkeypatch.setattr(logs, "open_file", counted)
    log.unlink()
    log.write_bytes(b"two\n")
    assert tail.read() == TailRead([b"two"], reset=True) and last_lines(log, 5) == ["two"]
    assert num_opened < 300


def test_only_so_many_old_logs_are_kept_and_small_ones_are_left(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    assert not rotate(log, 10, 2)
    for number in range(4):
        log.write_bytes(b"%d" % number * 20)
        assert rotate(log, 10, 2)
        assert not rotate(log, 10, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["daemon.log", "daemon.log.1", "daemon.log.2"]
    assert old_log(log, 1).read_bytes() == b"3" * 20
    assert old_log(log, 2).read_bytes() == b"2" * 20
    assert log.read_bytes() == b""


def test_a_rotation_that_was_killed_before_its_cut_repeats_lines_and_loses_none(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    log.write_bytes(b"a" * 20)
    old_log(log, 1).write_bytes(log.read_bytes())  # where it was killed
    assert rotate(log, 10, 3)
    assert old_log(log, 1).read_bytes() == old_log(log, 2).read_bytes() == b"a" * 20


def test_a_log_that_grows_faster_than_it_is_copied_is_cut_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole costs its writer nothing, and its copy takes up the disk."""
    log, limit, read, num_reads = tmp_path / "daemon.log", 1 << 20, os.read, 0
    monkeypatch.setattr(logs, "_MIN_KEPT_BYTES", limit)
    log.touch()
    os.truncate(log, 1 << 30)

    def grows(fd: int, num: int) -> bytes:
        nonlocal num_reads
        num_reads += 1
        if num_reads < 50:  # then it rests, or the copy would never end
            os.truncate(log, log.stat().st_size + 2 * num)
        return read(fd, num)

    monkeypatch.setattr(os, "read", grows)
    assert rotate(log, 10, 3)
    assert limit <= old_log(log, 1).stat().st_size <= 2 * limit and log.stat().st_size == 0


def test_a_link_in_the_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "precious"
    elsewhere.write_bytes(b"x" * 100)
    log = tmp_path / "daemon.log"
    log.symlink_to(elsewhere)
    with contextlib.suppress(OSError):
        rotate(log, 10, 3)
    assert elsewhere.read_bytes() == b"x" * 100


def test_a_relay_names_the_daemon_of_each_new_line_and_cleans_it(tmp_path: Path) -> None:
    log, other, out = tmp_path / "a.log", tmp_path / "b.log", io.StringIO()
    log.write_text("of an earlier start\n")
    relay = LogRelay(out)
    relay.follow("trainer", log)
    relay.follow("run_a", other)
    with log.open("a") as file:
        file.write("one\nunfin")
    other.write_text("\x1b[31mred\n")
    relay.pump()
    with log.open("a") as file:
        file.write("ished\n")
    relay.pump()
    assert out.getvalue() == "trainer | one\nrun_a | red\ntrainer | unfinished\n"


def test_a_log_that_grows_while_it_is_printed_holds_nothing_up(tmp_path: Path) -> None:
    log, other = tmp_path / "a.log", tmp_path / "b.log"

    class Grows(io.StringIO):
        """As quick as what is printed, for some times what one look takes."""

        def write(self, text: str) -> int:
            if "flood" in text and self.tell() < 8 * CHUNK_BYTES:
                with log.open("ab") as file:
                    file.write(flood)
            return super().write(text)

    flood, out = b"flood".ljust(60_000) + b"\n", Grows()
    relay = LogRelay(out)
    relay.follow("run_a", log)
    relay.follow("run_b", other)
    log.write_bytes(flood * 20)
    other.write_text("short\n")
    relay.pump()
    assert out.getvalue().endswith("run_b | short\n") and out.tell() <= 2 * CHUNK_BYTES
    while out.getvalue().count("flood") < log.stat().st_size // len(flood):
        before = out.tell()
        relay.pump()
        assert out.tell() > before, "what is left comes with the next looks"


def test_the_stream_has_every_node_of_a_daemon(tmp_path: Path) -> None:
    log, out = tmp_path / "trainer.log", io.StringIO()
    relay = LogRelay(out)
    relay.follow("trainer", log, 2)
    node_log(log, 1).write_text("rank 1\n")
    relay.pump()
    log.write_text("rank 0\n")
    relay.pump()
    relay.follow("trainer", log, 2)  # it is started again
    relay.pump()
    assert out.getvalue() == "trainer-node1 | rank 1\ntrainer | rank 0\n"


def test_a_flag_that_is_set_wakes_all_who_wait() -> None:
    import threading

    from prime_rl.utils.process import StopFlag

    stop = StopFlag()
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(stop.wait(PATIENCE_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not stop.wait(0.0) and not stop()
    stop.set()
    wait_for(lambda: woken == [True] * 3, "all three to be woken", timeout_s=PATIENCE_S)
    assert stop() and stop.wait(PATIENCE_S)
