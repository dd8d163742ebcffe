"""What differs between two runs, in config and in result: `prl runs diff`. Reads their folders, changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemons.details import hide_secrets
from daemons.errors import one_line_errors
from daemons.results import RunResult, read_config, read_result
from daemons.trash import existing_run
from prime_rl.configs.values import differing
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.text import CleanText, clean_strings, one_line


@dataclass(frozen=True)
class Difference:
    """One key of the config, or one figure of the result, with the value of each run; null where there is none."""

    name: CleanText
    values: tuple[Any, Any]


@dataclass(frozen=True)
class RunDifference:
    """`config` has the keys that differ, by what counts: a default equals the same value in the file.

    `result` has every figure that one of the two has.
    """

    run_ids: tuple[str, str]
    config: tuple[Difference, ...]
    result: tuple[Difference, ...]


def diff_runs(output_dir: Path, one: str, other: str) -> RunDifference:
    """Compare two runs of a workspace. Raises ActionError."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"comparing {one} and {other}"):
        runs = [existing_run(output, run_id) for run_id in (one, other)]
        configs = [read_config(run) for run in runs]
        results = [figures_of(read_result(run)) for run in runs]
    names = dict.fromkeys(name for result in results for name in result)
    figures = tuple(Difference(name, (results[0].get(name), results[1].get(name))) for name in names)
    return RunDifference((one, other), config_differences(*configs), figures)


def config_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Of two configs as their files have them; values that look like keys are hidden."""
    return tuple(
        Difference(one_line(key), (clean_strings(mine, one_line), clean_strings(theirs, one_line)))
        for key, mine, theirs in differing(hide_secrets(one), hide_secrets(other))
    )


def figures_of(result: RunResult) -> dict[CleanText, float]:
    """What people compare runs by."""
    figures: list[tuple[str, float | None]] = [
        ("step", float(result.steps)),
        ("reward", result.reward),
        ("tokens", float(result.tokens)),
        ("hours", result.hours),
        *result.last_evaluation.items(),
    ]
    return {one_line(name): value for name, value in figures if value is not None}
