"""Extras: the parts of the installation that not every machine has (`pyproject.toml` lists what is in each)."""

from __future__ import annotations

from importlib.util import find_spec

# Modules without which no daemon of a workspace starts.
CPU = ("torch", "transformers", "tokenizers", "httpx", "starlette")


def install_command(extra: str) -> str:
    """The shell command that installs this project with an extra."""
    return f'pip install "prl-multirun[{extra}]"'


def missing(extra: str, *modules: str) -> str | None:
    """The `modules` that are not installed, and the command that installs them; None if all are. Imports nothing."""
    absent = [module for module in modules if find_spec(module) is None]
    return f"not installed: {', '.join(absent)}; {install_command(extra)}" if absent else None
