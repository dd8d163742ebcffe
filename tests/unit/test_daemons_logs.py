"""Logs that are put aside under a writer and a reader that know nothing of it."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

from daemons.relay import LogRelay
from daemons.rotation import old_log, rotate
from prime_rl.contract.files import wait_for
from prime_rl.utils.tail import FileTail
from tests.patience import PATIENCE_S

WRITER = """
import sys, time
for number in range(2000):
    sys.stdout.write(f"line {number}\\n")
    sys.stdout.flush()
    if number % 100 == 99:
        time.sleep(0.002)
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
        subprocess.Popen([sys.executable, "-u", "-c", WRITER], stdout=output) as writer,
    ):
        while writer.poll() is None or rotate(log, 3_000, 100):
            num_rotations += rotate(log, 3_000, 100)
            followed += lines_of(tail)
    followed += lines_of(tail)
    kept = [old_log(log, number) for number in range(100, 0, -1)]
    stored = b"".join(path.read_bytes() for path in [*kept, log] if path.exists()).splitlines()
    assert num_rotations >= 2 and stored[-1] == b"end"
    assert followed == stored
    # A cut takes what is written in that very moment: next to nothing, more when this process has no core just then.
    assert len(stored) >= 1500
    assert len(set(stored)) == len(stored)


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


def test_a_flag_that_is_set_wakes_all_who_wait() -> None:
    import threading

    from prime_rl.utils.signals import StopFlag

    stop = StopFlag()
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(stop.wait(PATIENCE_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not stop.wait(0.0) and not stop()
    stop.set()
    wait_for(lambda: woken == [True] * 3, "all three to be woken", timeout_s=PATIENCE_S)
    assert stop() and stop.wait(PATIENCE_S)
