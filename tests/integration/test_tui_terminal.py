"""The real program in a real pseudo-terminal: how it is left decides what its caller does next, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.process import EXIT_TERMINAL_GONE
from tests.budgets import in_full
from tests.patience import PATIENCE_S
from tests.tui_support import add_run

# As `prl demo` shows a workspace; the code says whether a person has ended it with Ctrl-C.
AS_A_CHILD = """\
import sys, time
from pathlib import Path
from daemons.demo import TuiChild
with TuiChild(Path(sys.argv[1])) as tui:
    while tui.lives():
        time.sleep(0.05)
sys.exit(tui.interrupted)
"""
# A demo whose runs are done at once.
AS_A_DEMO = """\
import sys
from pathlib import Path
from daemons.demo import Demo
from prime_rl.contract.layout import OutputDir
class Over(Demo):
    def look(self, workspace, *, quiet):
        pass
demo = Over(OutputDir(Path(sys.argv[1])), [], print, lambda: False)
print("watched", demo.watch(with_tui=True, stays=sys.argv[2] == "stays"))
"""


class Shown:
    """A program in a pseudo-terminal and all that it has written."""

    def __init__(self, command: Sequence[str]) -> None:
        self._ours, theirs = pty.openpty()
        self.child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self.output = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self.output.extend(os.read(self._ours, 65536))
            except OSError:  # the other end is closed
                return

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def wait(self) -> int:
        return self.child.wait(timeout=PATIENCE_S)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        self._reader.join()
        os.close(self._ours)

    def modes_left_changed(self) -> set[int]:
        """Modes of the terminal that are not as they were: each is as it was before the first change."""
        first: dict[int, bytes] = {}
        last: dict[int, bytes] = {}
        for mode, state in re.findall(rb"\x1b\[\?(\d+)([hl])", self.output):
            first.setdefault(int(mode), state)
            last[int(mode)] = state
        assert {7, 25, 1000, 1004, 1049, 2004} <= first.keys()
        return {mode for mode, state in last.items() if state == first[mode]}


@contextlib.contextmanager
def shown(*command: str) -> Iterator[Shown]:
    """Once its foot is drawn."""
    program = Shown([sys.executable, *command])
    try:
        wait_for(lambda: b"Quit" in program.output, "the footer to be drawn", timeout_s=PATIENCE_S)
        yield program
    finally:
        program.close()


@pytest.mark.parametrize(("left_by", "code"), [(b"q", 0), (signal.SIGTERM, 143), *in_full((b"\x03", 130))], ids=str)
def test_how_it_is_left_is_its_exit_code(tmp_path: Path, left_by: bytes | signal.Signals, code: int) -> None:
    with shown("-m", "tui", str(tmp_path)) as program:
        if isinstance(left_by, bytes):
            program.press(left_by)
        else:
            program.child.send_signal(left_by)
        assert program.wait() == code
    assert program.modes_left_changed() == set()


@pytest.mark.parametrize("sent", [signal.SIGKILL, *in_full(signal.SIGTERM)])
def test_the_terminal_is_as_before_when_a_child_that_shows_it_is_ended(tmp_path: Path, sent: signal.Signals) -> None:
    with shown("-c", AS_A_CHILD, str(tmp_path)) as program:
        (tui,) = psutil.Process(program.child.pid).children()
        tui.send_signal(sent)
        assert program.wait() == 0
    assert program.modes_left_changed() == set()


def test_a_demo_whose_runs_are_done_stays_until_it_is_left(tmp_path: Path) -> None:
    place = tmp_path / "demo"
    add_run(OutputDir(place), "run_done", step=6, max_steps=6, status={"state": "finished"})
    with shown("-c", AS_A_DEMO, str(place), "stays") as program:
        wait_for(lambda: b"q ends the demo" in program.output, "the header to say so", timeout_s=PATIENCE_S)
        program.press(b"q")
        assert program.wait() == 0
    assert b"watched True" in program.output and program.modes_left_changed() == set()


def test_it_ends_when_its_terminal_is_gone_though_nothing_sends_a_signal(tmp_path: Path) -> None:
    """Without a controlling terminal there is no SIGHUP; what reads the terminal would spin on it for ever."""
    add_run(OutputDir(tmp_path), "run_a")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tui", str(tmp_path)]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = b""
    while b"run_a" not in seen:
        seen += os.read(ours, 1 << 16)
    os.close(ours)
    try:
        assert child.wait(PATIENCE_S) == EXIT_TERMINAL_GONE
    finally:
        child.kill()
