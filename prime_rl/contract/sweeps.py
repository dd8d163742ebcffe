"""The plan of a sweep: `sweeps/<name>.json`, written once, when all of its runs are there. Never changed afterwards."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from prime_rl.contract.files import FileRefused, read_file
from prime_rl.contract.layout import LayoutError, OutputDir

SWEEP_VERSION = 1
MAX_PLAN_BYTES = 4 << 20
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,47}")


class SweepRun(msgspec.Struct, frozen=True):
    """One run of a sweep. `set`: its values of the swept keys, by dotted key."""

    run_id: str
    set: dict[str, Any] = {}


class SweepPlan(msgspec.Struct, frozen=True):
    """The definition of a sweep.

    Attributes:
        base: the file that the runs were made from.
        seed: breaks ties, so that the same numbers give the same winners.
        halving: of how many runs one goes on at each rung; None: all runs go on to their end.
        metric, mode: what is compared, and whether "max" or "min" of it is best.
        min_steps: no run is ended before this step.
    """

    name: str
    base: str
    runs: list[SweepRun]
    seed: int = 0
    halving: int | None = None
    metric: str = "reward/mean"
    mode: Literal["max", "min"] = "max"
    min_steps: int = 0
    version: int = SWEEP_VERSION


def check_sweep_name(name: str) -> str:
    """Return `name` when it can name a sweep, its file, its tag and its runs; else raise LayoutError."""
    if not _NAME.fullmatch(name):
        raise LayoutError(
            f"invalid sweep name {name!r}: must be 1 to 48 letters, digits, '.', '_' or '-', and not begin with '.'"
        )
    return name


def read_plan(output: OutputDir, name: str) -> SweepPlan | None:
    """The plan of a sweep; None when it is missing or damaged, or of another version."""
    try:
        data = read_file(output.sweep(check_sweep_name(name)), limit=MAX_PLAN_BYTES)
        plan = msgspec.json.decode(data, type=SweepPlan)
    except (FileNotFoundError, NotADirectoryError, FileRefused, msgspec.MsgspecError, LayoutError):
        return None
    return plan if plan.version == SWEEP_VERSION else None


def list_sweeps(output: OutputDir) -> list[str]:
    """The names of all sweeps that have a plan."""
    folder = output.sweep("x").parent
    names = [path.stem for path in folder.glob("*.json")] if folder.is_dir() else []
    return sorted(name for name in names if _NAME.fullmatch(name))
