"""The stacks of the processes of a daemon that hangs, kept beside the logs, by py-spy where it is installed."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.extras import install_command
from prime_rl.utils.process import ProcessId

logger = logging.getLogger("alerts")

# For all processes of a daemon.
TIMEOUT_S = 30.0
MAX_BYTES = 1_000_000


def keep_stack(output: OutputDir) -> Callable[[str, ProcessId], threading.Thread]:
    """What keeps the stacks of a daemon and of all that it started in `logs/stacks/NAME.txt`, in a thread of its own.

    The ranks of a trainer are children of torchrun, the engines of vLLM those of its front.
    """

    def keep(name: str, process: ProcessId) -> threading.Thread:
        path = output.logs / "stacks" / f"{name}.txt"
        thread = threading.Thread(target=_keep, args=(path, name, process), daemon=True)
        thread.start()
        return thread

    return keep


def _keep(path: Path, name: str, process: ProcessId) -> None:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        logger.info("%s: no stack is kept: py-spy not found; %s", name, install_command("alerts"))
        return
    if process.is_of_another_boot():
        logger.info("%s: no stack is kept: its process %d is on another machine", name, process.pid)
        return
    try:
        dumps, why = _dumps(program, process.pid)
        if not dumps:
            logger.warning("%s: no stack is kept: %s", name, why)
            return
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, b"\n".join(dumps)[:MAX_BYTES])
    except (OSError, psutil.Error, subprocess.SubprocessError) as error:
        logger.warning("%s: no stack is kept: %s", name, error)
        return
    logger.warning("%s: its stack is in %s", name, path)


def _dumps(program: str, pid: int) -> tuple[list[bytes], str]:
    """A dump of each Python process from `pid` downwards, and the last error.

    One call for each: with --subprocesses py-spy ends at the first that is not Python, without those after it.
    """
    dumps: list[bytes] = []
    why, deadline = "", time.monotonic() + TIMEOUT_S
    root = psutil.Process(pid)
    for each in [root, *root.children(recursive=True)]:
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
