"""The stack of a process that hangs, kept beside the logs, by py-spy where it is installed."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.extras import install_command

logger = logging.getLogger("alerts")

TIMEOUT_S = 30.0
MAX_BYTES = 1_000_000


def keep_stack(output: OutputDir) -> Callable[[str, int], threading.Thread]:
    """What keeps the stacks of daemon `name` with process `pid` in `logs/stacks/NAME.txt`, in a thread of its own."""

    def keep(name: str, pid: int) -> threading.Thread:
        thread = threading.Thread(target=_keep, args=(output.logs / "stacks" / f"{name}.txt", name, pid), daemon=True)
        thread.start()
        return thread

    return keep


def _keep(path: Path, name: str, pid: int) -> None:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        logger.info("%s: no stack is kept: py-spy not found; %s", name, install_command("alerts"))
        return
    try:
        command = [program, "dump", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip().splitlines()
            logger.warning("%s: no stack is kept: py-spy: %s", name, why[-1] if why else done.returncode)
            return
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, done.stdout[:MAX_BYTES])
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s: no stack is kept: %s", name, error)
        return
    logger.warning("%s: its stack is in %s", name, path)
