"""Runs, or groups of them, ranked by a metric at equal steps: for `prl runs best` and for the star of Compare.

The result of a run is the mean of its newest values of the metric up to one step, which is the same for all runs of an
environment: the largest that each of them has, or one that is asked for, and then runs that are not there yet are not
ranked. A group (the seeds of a setting) has the mean of its runs' results and its standard error. Runs with different
environments are never ranked together, since their rewards measure different things, nor runs that learn other texts.

`rank` is pure; `read_contestants` reads what it needs of a workspace.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from daemons.details import codes_of, told_config
from daemons.workspace import RunView
from prime_rl.configs.admitted import hide_secret, plain_text, read_effect
from prime_rl.configs.base import ConfigError
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.metrics import (
    HELD_OUT_LOSS,
    LESS_IS_BETTER,
    OF_TEXTS,
    REWARD,
    SUPERVISED_LOSS,
    bounded_mean,
    series,
)
from prime_rl.contract.notes import digest_of
from prime_rl.contract.status import RunState
from prime_rl.utils.tail import whole_lines
from prime_rl.utils.text import CleanText, one_line

RUN, TAG = "run", "tag"
NO_TAG, NO_VALUE, NO_ENVIRONMENT = "no tag", "-", "unknown environment"
# One batch is noise; an evaluation is the mean over many examples already.
NUM_LAST, NUM_LAST_EVAL = 10, 1
# So many of the keys in which the runs of one group differ are named.
MAX_MIXED = 5
# A run that will not go on holds no other back.
FAILED_STATES = (RunState.FAILED, RunState.EVICTED, RunState.INVALID)
# What decides what a reward means. The prompt is not among it: which one is better is a fair question.
_OF_TEXTS = re.compile(r"data\.\d+\.(path|num_held_out)")
_OF_ENVIRONMENT = re.compile(r"env\.(\d+)\.(id|args|args\..+|reward_range|weight)")


class Contestant(Protocol):
    """A run that is ranked: its config by dotted key, {} for an invalid one, and its values of one metric by step."""

    @property
    def run_id(self) -> str: ...  # noqa: D102
    @property
    def tags(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def config(self) -> Mapping[str, str]: ...  # noqa: D102
    @property
    def has_failed(self) -> bool: ...  # noqa: D102
    @property
    def steps(self) -> Sequence[float]: ...  # noqa: D102
    @property
    def values(self) -> Sequence[float]: ...  # noqa: D102


RunT = TypeVar("RunT", bound=Contestant)


@dataclass(frozen=True)
class RunValues:
    """A contestant as it is read from its files; ascending `steps`."""

    run_id: str
    tags: tuple[str, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    has_failed: bool = False


@dataclass(frozen=True)
class Standing(Generic[RunT]):
    """One line of a ranking: a run or a group of one environment.

    Attributes:
        place: from 1; None without a result, and then it stands last.
        step: up to which the values count.
        runs: the best first; `results` has the result of each, None for one that is not there yet.
        value: mean of the results; `se` is its standard error, None for a single one.
    """

    environment: CleanText
    name: str
    place: int | None
    step: int
    runs: tuple[RunT, ...]
    results: tuple[float | None, ...]
    value: float | None
    se: float | None

    @property
    def num(self) -> int:
        """Runs with a result."""
        return sum(result is not None for result in self.results)


def num_last(metric: str) -> int:
    """Of how many of its newest values the mean counts, unless someone asks for another number."""
    return NUM_LAST_EVAL if metric.startswith(("eval/", "held_out/")) else NUM_LAST


def rank(
    runs: Sequence[RunT], metric: str, *, by: str = RUN, last: int | None = None, step: int | None = None
) -> tuple[Standing[RunT], ...]:
    """The standings of each environment, by its name, the best first. A run with several tags is in several groups.

    Args:
        by: RUN, TAG or a dotted config key.
        last: so many of the newest values count; None: NUM_LAST, of an evaluation NUM_LAST_EVAL.
        step: up to which values count; None: the largest that all runs of the environment with any value have. One that
            has failed holds no other back.
    """
    last = last or num_last(metric)
    of: dict[CleanText, list[RunT]] = {}
    for run in runs:
        of.setdefault(environment_of(run.config), []).append(run)
    found: list[Standing[RunT]] = []
    for environment, members in sorted(of.items()):
        there = [run for run in members if run.steps]
        ends = [run.steps[-1] for run in there if not run.has_failed] or [run.steps[-1] for run in there]
        at = step if step is not None else int(min(ends, default=0))
        groups: dict[str, list[RunT]] = {}
        for run in members:
            for name in _names(run, by):
                groups.setdefault(name, []).append(run)
        standings = [_standing(environment, name, group, metric, at, last) for name, group in groups.items()]
        standings.sort(key=lambda each: (_order(each.value, metric), each.name))
        for place, each in enumerate(standings, start=1):
            found.append(each if each.value is None else replace(each, place=place))
    return tuple(found)


def notes(standings: Sequence[Standing[RunT]], metric: str, step: str = "--step") -> tuple[CleanText, ...]:
    """In words what keeps the ranking from being a plain one: environments, runs behind, or not ranked. `step` asks."""
    found: list[str] = []
    environments = dict.fromkeys(each.environment for each in standings)
    lacking, words = _of_two_kinds([run for each in standings for run in each.runs], metric)
    found += [words] if words else []
    if len(environments) > 1:
        found.append(f"{len(environments)} environments, each ranked by itself: their rewards are not comparable")
    for environment in environments:
        own = [each for each in standings if each.environment == environment]
        runs = {run.run_id: run for each in own for run in each.runs}
        where, at = (f" ({environment})" if len(environments) > 1 else ""), own[0].step
        newest = {run_id: int(run.steps[-1]) for run_id, run in runs.items() if run.steps}
        late = [run_id for run_id in runs if newest.get(run_id, -1) < at or run_id not in newest]
        late = [run_id for run_id in late if run_id not in lacking]
        there = {run_id: newest[run_id] for run_id in runs if run_id not in late and run_id in newest}
        ahead, slowest = max(there.values(), default=at), min(there, key=there.__getitem__, default=None)
        if slowest is not None and there[slowest] == at < ahead:
            further = f"another is at {ahead}: {step} {ahead} ranks only the runs that are there"
            found.append(f"compared at step {at}, the newest of {slowest}; {further}{where}")
        if late:
            found.append(f"not ranked: {', '.join(late)}, no {metric} at step {at} yet{where}")
        for group in own:
            mixed = [key for key in differing(group.runs) if not key.endswith("seed")]
            if mixed and group.name not in (NO_TAG, NO_VALUE):
                more = f" and {len(mixed) - MAX_MIXED} more" if len(mixed) > MAX_MIXED else ""
                keys = ", ".join(mixed[:MAX_MIXED])
                found.append(f"the runs of {group.name!r} differ not only in their seed: {keys}{more}")
    return tuple(one_line(each, 1000) for each in found)


def _of_two_kinds(runs: Sequence[RunT], metric: str) -> tuple[Sequence[str], str]:
    """The runs that never have `metric`, beside runs of the other kind; and what the two kinds mean for it, or ""."""
    texts = list(dict.fromkeys(run.run_id for run in runs if learns_texts(run.config)))
    others = list(dict.fromkeys(run.run_id for run in runs if run.config and not learns_texts(run.config)))
    if not texts or not others:
        return (), ""
    if metric.startswith("reward/"):
        return texts, f"{', '.join(texts)}: learn texts, so without {metric}"
    with_values = {run.run_id for run in runs if run.steps}
    if metric.startswith(OF_TEXTS) and (lacking := [each for each in others if each not in with_values]):
        return lacking, f"{', '.join(lacking)}: learn from rollouts, so without {metric}"
    return (), f"{', '.join(texts)}: learn texts, the others from rollouts: {metric} does not compare them"


def learns_texts(config: Mapping[str, str]) -> bool:
    """True for the config of a run that learns texts alone."""
    return config.get("kind", "").strip('"') == "sft"


def differing(runs: Sequence[Contestant]) -> dict[str, set[str | None]]:
    """The config keys that are not the same in all runs with a valid config, with their values; not the tags."""
    configs = [run.config for run in runs if run.config]
    found = {key: {config.get(key) for config in configs} for key in dict.fromkeys(chain(*configs))}
    return {key: values for key, values in found.items() if len(values) > 1 and key != "tags"}


def winners(standings: Sequence[Standing[RunT]]) -> tuple[Standing[RunT], ...]:
    """The first of each environment, where it has a result."""
    return tuple(each for each in standings if each.place == 1)


def environment_of(config: Mapping[str, str]) -> CleanText:
    """The environments of a run with what decides their rewards, such as "reverse-text max_len=8 + arithmetic".

    Of one that learns texts the files, and how many texts of each are held out.
    """
    if learns_texts(config):
        found = [(match[1], text.strip('"')) for key, text in config.items() if (match := _OF_TEXTS.fullmatch(key))]
        texts = [text if key == "path" else f"{key}={text}" for key, text in found if text != "null"]
        return one_line(f"texts {' '.join(texts)}", 300)
    parts: dict[str, dict[str, str]] = {}
    for key, text in config.items():
        if (match := _OF_ENVIRONMENT.fullmatch(key)) is not None:
            shown = str(hide_secret(key, text)).strip('"')
            parts.setdefault(match[1], {})[match[2].removeprefix("args.")] = shown
    usual = {"args": ("{}",), "weight": ("1.0", "1"), "reward_range": ("[0.0, 1.0]", "(0.0, 1.0)")}
    words = [
        " ".join(
            [
                part.pop("id", "?"),
                *(f"{key}={text}" for key, text in sorted(part.items()) if text not in usual.get(key, ())),
            ]
        )
        for part in parts.values()
    ]
    return one_line(" + ".join(words) or NO_ENVIRONMENT, 300)


def read_usual(output_dir: Path, runs: Sequence[RunView]) -> dict[str, list[RunValues]]:
    """The runs by the metric that tells most of their kind: the reward; of texts their held-out loss, or the loss."""
    texts = [run for run in runs if run.kind == "sft"]
    others = [run for run in runs if run.kind != "sft"]
    found = {REWARD: read_contestants(output_dir, others, REWARD)} if others or not texts else {}
    if texts:
        held_out, learned = (read_contestants(output_dir, texts, name) for name in (HELD_OUT_LOSS, SUPERVISED_LOSS))
        begun = [run for run, its in zip(held_out, learned, strict=True) if its.steps or run.steps]
        is_held = all(run.steps or run.has_failed for run in begun) and any(run.steps for run in begun)
        found[HELD_OUT_LOSS if is_held else SUPERVISED_LOSS] = held_out if is_held else learned
    return found


def read_contestants(output_dir: Path, runs: Sequence[RunView], metric: str) -> list[RunValues]:
    """The runs with their configs and all values of `metric`. What cannot be read of a run is left out."""
    found = []
    for view in runs:
        run = OutputDir(output_dir).run(view.run_id)
        files = (run.orchestrator_metrics, run.trainer_metrics)
        found_in = (series(whole_lines(path), metric, at_most=view.step or None) for path in files)
        pairs = next(filter(None, found_in), [])
        steps, results = tuple(float(step) for step, _ in pairs), tuple(value for _, value in pairs)
        has_failed = view.state in FAILED_STATES
        found.append(RunValues(view.run_id, tuple(view.tags), compared_config(run), steps, results, has_failed))
    return found


def compared_config(run: RunDir) -> dict[str, str]:
    """The values a run is compared by, as text, of a reward in a file also its code; {} for an invalid config."""
    try:
        effect = read_effect(run)
        config: dict[str, str] = {one_line(key): _shown(key, value) for key, value in told_config(run, effect).items()}
        codes = codes_of(run, effect.data)
    except ConfigError:
        return {}
    return config | {key: one_line(f"{config[key]}@{code}") for key, code in codes.items() if key in config}


def _shown(key: str, value: object) -> CleanText:
    """A value as text; one with the name of a secret is hidden, and still differs from another."""
    text, shown = _text(value), hide_secret(key, value)
    return text if shown is value or shown == value else one_line(f"{_text(shown)} {digest_of(text.encode())[:4]}")


def _text(value: object) -> CleanText:
    return one_line(plain_text(value) if isinstance(value, str | float) else json.dumps(value))


def _names(run: Contestant, by: str) -> Sequence[str]:
    if by == RUN:
        return (run.run_id,)
    return (run.tags or (NO_TAG,)) if by == TAG else (run.config.get(by, NO_VALUE),)


def _standing(
    environment: CleanText, name: str, runs: Sequence[RunT], metric: str, at: int, last: int
) -> Standing[RunT]:
    results = {run.run_id: _result(run, at, last) for run in runs}
    ordered = tuple(sorted(runs, key=lambda run: (_order(results[run.run_id], metric), run.run_id)))
    known = [result for result in results.values() if result is not None]
    mean = bounded_mean(known) if known else None
    return Standing(
        environment, name, None, at, ordered, tuple(results[run.run_id] for run in ordered), mean, standard_error(known)
    )


def _result(run: Contestant, at: int, last: int) -> float | None:
    """None for a run that has not come to step `at`."""
    if not run.steps or run.steps[-1] < at:
        return None
    end = bisect_right(run.steps, at)
    newest = run.values[max(end - last, 0) : end]
    return bounded_mean(newest) if newest else None


def standard_error(values: Sequence[float]) -> float | None:
    """Of their mean, from the deviation of the sample; None for less than two."""
    if len(values) < 2:
        return None
    mean = bounded_mean(values)
    found = math.sqrt(sum((value - mean) * (value - mean) for value in values) / (len(values) - 1) / len(values))
    return found if math.isfinite(found) else None


def _order(result: float | None, metric: str) -> float:
    """Smaller is better; without a result last."""
    if result is None:
        return math.inf
    return result if metric in LESS_IS_BETTER else -result
