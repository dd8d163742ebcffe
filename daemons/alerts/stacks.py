"""The stacks of the processes of a daemon that hangs, kept beside the logs, by py-spy where it is installed.

A daemon that has an API key is sealed, also from py-spy: it writes its stacks to its log when it is asked by a signal.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from daemons.launchers.agent import log_of
from prime_rl.contract.files import open_file, wait_for, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.extras import install_command
from prime_rl.utils.process import ProcessId
from prime_rl.utils.secrets import STACKS_SIGNAL

logger = logging.getLogger("alerts")

# For all processes of a daemon.
TIMEOUT_S = 30.0
MAX_BYTES = 1_000_000
# Of what Python writes about the stack of each thread; the last is that of the thread that got the signal.
_FIRST_LINE = b"(most recent call first):"


def keep_stack(output: OutputDir) -> Callable[[str, ProcessId], threading.Thread]:
    """Return a call that keeps the stacks of a daemon and what it started in `logs/stacks/NAME.txt`, in its own thread.

    The ranks of a trainer are children of torchrun, the engines of vLLM those of its front.
    """

    def keep(name: str, process: ProcessId) -> threading.Thread:
        path = output.logs / "stacks" / f"{name}.txt"
        log = log_of(output, name)
        thread = threading.Thread(target=_keep, args=(path, name, process, log), daemon=True)
        thread.start()
        return thread

    return keep


def _keep(path: Path, name: str, process: ProcessId, log: Path) -> None:
    if process.is_of_another_boot():
        logger.info("%s: no stack is kept: its process %d is on another machine", name, process.pid)
        return
    try:
        dumps = [_told_by_itself(process, log)] if _catches(process.pid, STACKS_SIGNAL) else []
        program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
        if program is None and not dumps:
            logger.info("%s: no stack is kept: py-spy not found; %s", name, install_command("alerts"))
            return
        seen, why = _dumps(program, process.pid, is_sealed=bool(dumps)) if program else ([], "")
        dumps += seen
        if not dumps:
            logger.warning("%s: no stack is kept: %s", name, why)
            return
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, b"\n".join(dumps)[:MAX_BYTES])
    except (OSError, psutil.Error, subprocess.SubprocessError) as error:
        logger.warning("%s: no stack is kept: %s", name, error)
        return
    logger.warning("%s: its stack is in %s", name, path)


def _catches(pid: int, signum: signal.Signals) -> bool:
    """True when a signal would be handled; any other ends the process."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


def _told_by_itself(process: ProcessId, log: Path) -> bytes:
    """The lines that a sealed process adds to its log when asked for its stacks. Raises OSError, WaitTimeout too."""
    with os.fdopen(open_file(log), "rb") as file:
        file.seek(0, os.SEEK_END)
        told = b""
        process.send(STACKS_SIGNAL)

        def is_complete() -> bool:
            nonlocal told
            before, told = told, told + file.read(MAX_BYTES - len(told))
            return _FIRST_LINE in told and told == before

        wait_for(is_complete, f"the stacks of process {process.pid} in {log}", timeout_s=TIMEOUT_S)
    return told


def _dumps(program: str, pid: int, *, is_sealed: bool) -> tuple[list[bytes], str]:
    """A dump of each Python process from `pid` downwards, without `pid` where it is sealed, and the last error.

    One call for each: with --subprocesses py-spy ends at the first that is not Python, without those after it.
    """
    dumps: list[bytes] = []
    why, deadline = "", time.monotonic() + TIMEOUT_S
    root = psutil.Process(pid)
    for each in [*([] if is_sealed else [root]), *root.children(recursive=True)]:
        left_s = max(0.0, deadline - time.monotonic())
        command = [program, "dump", "--pid", str(each.pid)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=left_s, stdin=subprocess.DEVNULL, check=False)
        except subprocess.TimeoutExpired as error:
            return dumps, str(error)
        if done.returncode == 0:
            dumps.append(done.stdout)
        else:
            why = f"py-spy: {done.stderr.decode(errors='replace').partition(chr(10))[0] or done.returncode}"
    return dumps, why
