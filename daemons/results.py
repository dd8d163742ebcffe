"""What a run has reached (rewards by step, evaluations by version, tokens, time), and what differs between two runs.

Reads config and metrics files alone. The last line of a step counts, since a run that went back to an earlier step
writes its steps again; what it wrote of later steps before that counts no more. Files are read in chunks, and a figure
of a step is all that is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemons.details import hide_secrets
from daemons.errors import one_line_errors
from daemons.trash import existing_run
from prime_rl.configs.base import load_toml
from prime_rl.configs.values import differing
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.metrics import parse_metrics
from prime_rl.utils.tail import FileTail
from prime_rl.utils.text import CleanText, clean_strings, one_line

REWARD = "reward/mean"
# Errors of figures, and those about the evaluation itself.
_NOT_RESULTS = ("_se", "/truncated", "/num_failed")
NUM_RECENT = 10


@dataclass(frozen=True)
class RunResult:
    """What a run has reached by a step.

    Attributes:
        rewards: mean reward of the batch, by step.
        evaluations: figures by evaluated version, such as {20: {"eval/sums/pass@1": 0.5}}.
        tokens: of all batches that it was trained on, prompts included.
        hours: between its first and its last batch, pauses included.
    """

    rewards: Mapping[int, float]
    evaluations: Mapping[int, Mapping[CleanText, float]]
    tokens: int
    hours: float

    @property
    def steps(self) -> int:
        """The newest step that has a reward; 0 without one."""
        return max(self.rewards, default=0)

    @property
    def reward(self) -> float | None:
        """Mean over the last steps: one batch alone is noise."""
        recent = [self.rewards[step] for step in sorted(self.rewards)[-NUM_RECENT:]]
        return sum(recent) / len(recent) if recent else None

    @property
    def last_evaluation(self) -> Mapping[CleanText, float]:
        """The figures of the newest version that was evaluated; {} without one."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else {}


def read_result(run: RunDir, *, until: int | None = None) -> RunResult:
    """What the run has reached by step `until` (None: by now). Raises nothing for what is in its files."""
    rewards: dict[int, float] = {}
    evaluations: dict[int, dict[CleanText, float]] = {}
    times: dict[int, float] = {}
    for step, figures in _lines(run.orchestrator_metrics):
        results = {
            one_line(name): value
            for name, value in figures.items()
            if name.startswith("eval/") and not name.endswith(_NOT_RESULTS)
        }
        if results:
            evaluations[step] = results
        if REWARD in figures:
            _forget_later(rewards, step)
            rewards[step] = figures[REWARD]
            times[step] = figures.get("time", 0.0)
    tokens: dict[int, float] = {}
    for step, figures in _lines(run.trainer_metrics):
        _forget_later(tokens, step)
        tokens[step] = figures.get("tokens", 0.0)
    kept = [step for step in rewards if until is None or step <= until]
    spent = [times[step] for step in kept if times[step]]
    last = until if until is not None else max(kept, default=0)
    return RunResult(
        rewards={step: rewards[step] for step in kept},
        evaluations={step: evaluations[step] for step in sorted(evaluations) if step <= last},
        tokens=int(sum(value for step, value in tokens.items() if until is None or step <= until)),
        hours=(max(spent) - min(spent)) / 3600 if spent else 0.0,
    )


def _forget_later(by_step: dict[int, float], step: int) -> None:
    """A step that is written again was gone back to."""
    if step in by_step:
        for later in [each for each in by_step if each > step]:
            del by_step[later]


def _lines(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    tail = FileTail(path)
    while True:
        found = tail.read()
        yield from (parsed for line in found.lines if (parsed := parse_metrics(line)) is not None)
        if not found.more:
            return


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
        configs = [load_toml(run.orch_toml) for run in runs]
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
