"""The real program in a real pseudo-terminal: how it is left decides what its caller does next."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from prime_rl.contract.files import wait_for

TIMEOUT_S = 60.0


@pytest.mark.parametrize(("key", "code"), [(b"\x03", 130), (b"q", 0)])
def test_how_it_is_left_is_its_exit_code(tmp_path: Path, key: bytes, code: int) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tui", str(tmp_path)]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the other end is closed
                return
            shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_for(lambda: b"Quit" in shown, "the footer to be drawn", timeout_s=TIMEOUT_S)
        os.write(ours, key)
        assert child.wait(timeout=TIMEOUT_S) == code
    finally:
        child.kill()
        child.wait()
        reader.join()
        os.close(ours)
