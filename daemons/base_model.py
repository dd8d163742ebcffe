"""The small base model of the demo and of a workspace without a system file, built by a child process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from daemons import launch
from daemons.specs import MAKE_BASE_MODULE

LOOK_EVERY_S = 0.25


def make_base_model(name: str, stop: Callable[[], bool], say: launch.Say, *, is_quiet: bool = False) -> None:
    """Build the small base model when its folder is not there yet; its progress is printed unless `is_quiet`.

    Raises LaunchError.
    """
    if not launch.means_folder(name) or (Path(name) / "config.json").exists():
        return
    say(f"building a small base model in {name} (once; takes one to three minutes)")
    out = subprocess.DEVNULL if is_quiet else None
    argv = [sys.executable, "-m", MAKE_BASE_MODULE, "--out", name]
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        while child.poll() is None and not stop():
            time.sleep(LOOK_EVERY_S)
    finally:
        if child.poll() is None:
            child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=10.0)
        if child.poll() is None:
            child.kill()
            child.wait()
    if not stop() and child.returncode:
        raise launch.LaunchError(
            f"building the base model failed: prl make-base --out {name} exited with code {child.returncode}"
        )
