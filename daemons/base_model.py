"""The small base model of the demo and of a workspace without a system file, built by a child process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from daemons import launch
from daemons.process import python_module, run_child
from daemons.specs import MAKE_BASE_MODULE


def make_base_model(name: str, stop: Callable[[], bool], say: launch.Say, *, is_quiet: bool = False) -> None:
    """Build the small base model when its folder is not there yet; its progress is printed unless `is_quiet`.

    Raises LaunchError.
    """
    if not launch.means_folder(name) or (Path(name) / "config.json").exists():
        return
    say(f"building a small base model in {name} (once; takes one to three minutes)")
    out = subprocess.DEVNULL if is_quiet else None
    argv = python_module(MAKE_BASE_MODULE, "--out", name)
    exit_code = run_child(argv, stop, stdout=out, stderr=out)
    if exit_code:
        raise launch.LaunchError(
            f"building the base model failed: prl make-base --out {name} exited with code {exit_code}"
        )
