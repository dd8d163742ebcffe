"""A sweep: one run for each point of a grid over a config file, tagged with the sweep's name.

All runs are checked, and all their folders filled, before the first appears; an error on the way takes back those
that did. The plan (`contract.notes`) is written last, so a sweep with a plan is complete; one that was killed before
that is completed by the same command.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from daemons.adding import (
    NewRun,
    checked,
    in_id,
    is_same,
    mode_like,
    put,
    staged,
    start_of,
    teachers_of,
    trainer_limits,
)
from daemons.errors import ActionError, WrongUseError, one_line_errors, record_act
from daemons.halving import rungs_of
from prime_rl.configs.base import ConfigError, ConfigProblem, load_toml, merge, nested, parse_override
from prime_rl.configs.jsonl import place_of
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import doubts
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.metrics import HELD_OUT, HELD_OUT_LOSS, LESS_IS_BETTER, REWARD, SUPERVISED_LOSS
from prime_rl.contract.notes import SweepPlan, SweepRun, check_sweep_name, read_plan

# A slot each would be far beyond any trainer; more is a mistake in a list of values.
MAX_RUNS = 1000
_MAX_ID_CHARS = 68  # "run_" and 64
_HASH_CHARS = 8
_MAX_NAME_CHARS = 40  # of a name that comes from a file's


@dataclass(frozen=True)
class Axis:
    """One swept key: its values, and how they were written."""

    key: str
    values: tuple[Any, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """`added`: the runs of the plan that were not there before; `doubts`: what of them is valid and rarely meant."""

    plan: SweepPlan
    added: list[str] = field(default_factory=list)
    doubts: list[ConfigProblem] = field(default_factory=list)


def parse_axis(item: str) -> Axis:
    """`optim.lr=1e-4,3e-4` -> its values; commas inside brackets and quotes do not count. Raises WrongUseError."""
    key, has_values, rest = item.partition("=")
    texts = tuple(text.strip() for text in _split(rest))
    if not key or not has_values or not all(texts):
        raise WrongUseError(f"invalid --set {item!r}: expected KEY=VALUE,VALUE,..., such as optim.lr=1e-4,3e-4")
    values = tuple(parse_override("value", text)["value"] for text in texts)
    if len(set(map(repr, values))) < len(values):
        raise WrongUseError(f"invalid --set {item!r}: a value occurs twice")
    return Axis(key, values, texts)


def sweep_runs(
    output_dir: Path,
    source: Path | str,
    axes: Sequence[str],
    *,
    name: str | None = None,
    halving: int | None = None,
    metric: str | None = None,
    dry_run: bool = False,
    reason: str = "",
) -> Sweep:
    """Add one run of `source` for each combination of the values of `axes` (see `parse_axis`), all or none.

    `name` defaults to the file's name. `metric` is what halving compares; it defaults to that of `[stop]`, else the
    reward, or the loss of texts. The same sweep a second time adds nothing. Raises ActionError.
    """
    output, source = OutputDir(Path(output_dir)), Path(source)
    with one_line_errors(f"sweeping {source}"):
        name = check_sweep_name(name or in_id(source.stem)[:_MAX_NAME_CHARS] or "sweep")
        points = grid([parse_axis(item) for item in axes], name)
        new = _checked(output, source, name, points)
        plan = _plan(source, name, points, next(iter(new.values())).config, halving, metric)
        _check_rungs(plan, [run.config for run in new.values()])
        missing = {run_id: run for run_id, run in new.items() if not is_same(output.run(run_id), run)}
        odd = next((run_id for run_id in missing if output.run(run_id).path.exists()), None)
        if output.sweep(name).exists():
            if odd is not None or read_plan(output, name) != plan:
                raise ActionError(f"sweep {name!r} exists with another grid or file: choose another name with --name")
            return Sweep(plan)
        if odd is not None:
            raise ActionError(f"nothing was added: run {odd!r} exists in {output.path}: choose another --name")
        if not dry_run:
            _add_all(output, missing)
            for run_id in missing:
                record_act(output, "add", run_id, reason=reason, detail=f"from {source}, sweep {name}")
            write_atomic(output.sweep(name), msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
            record_act(output, "sweep", None, reason=reason, detail=f"{name}: {source}, {' '.join(axes)}")
        limits = trainer_limits(output.path)
        found = {str(each): each for run in missing.values() for each in doubts(run.config, limits)}
        return Sweep(plan, list(missing), list(found.values()))


def grid(axes: Sequence[Axis], name: str) -> dict[str, dict[str, Any]]:
    """The points of the grid by run id, with the values of each. Raises WrongUseError.

    The id has the sweep's name and what differs; one that would be too long has a hash in its place.
    """
    keys = [axis.key for axis in axes]
    if double := next((key for key in keys if keys.count(key) > 1), None):
        raise WrongUseError(f"--set {double} is given twice: list all its values in one")
    num_runs = 1
    for axis in axes:
        num_runs *= len(axis.values)
    if not axes or num_runs > MAX_RUNS:
        raise WrongUseError(f"a sweep of {num_runs if axes else 'no'} runs: must be 1 to {MAX_RUNS}, from --set")
    # The last part of each dotted key, or all of it where two have the same.
    differ = [axis.key for axis in axes if len(axis.values) > 1]
    last = [key.rpartition(".")[2] for key in differ]
    words = {key: short if last.count(short) == 1 else key for key, short in zip(differ, last, strict=True)}
    points: dict[str, dict[str, Any]] = {}
    for choice in itertools.product(*(range(len(axis.values)) for axis in axes)):
        chosen = list(zip(axes, choice, strict=True))
        label = "".join(f"-{words[axis.key]}{axis.texts[at]}" for axis, at in chosen if axis.key in words)
        run_id = _run_id(name, label)
        if run_id in points:  # values that differ only in what an id cannot have
            run_id = _run_id(name, label, hashed=True)
        points[run_id] = {axis.key: axis.values[at] for axis, at in chosen}
    return points


def _run_id(name: str, label: str, *, hashed: bool = False) -> str:
    plain = f"run_{in_id(name)}{in_id(label)}"
    if len(plain) <= _MAX_ID_CHARS and not hashed:
        return plain
    digest = hashlib.sha256(label.encode()).hexdigest()[:_HASH_CHARS]
    return f"{plain[: _MAX_ID_CHARS - _HASH_CHARS - 1].rstrip('-.')}-{digest}"


def _split(text: str) -> list[str]:
    """At the commas that are outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "[{") - (char in "]}")
        if char == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _checked(output: OutputDir, source: Path, name: str, points: Mapping[str, Mapping[str, Any]]) -> dict[str, NewRun]:
    """Every run of the sweep, checked. Raises ActionError with the first that would be invalid."""
    data, mode, place, new = load_toml(source), mode_like(source), place_of(source), dict[str, NewRun]()
    for run_id, values in points.items():
        output.run(run_id)
        changed: dict[str, Any] = dict(data)
        for key, value in values.items():
            changed = merge(changed, nested(key, value))
        tags = changed.get("tags", [])
        if isinstance(tags, list):  # anything else is reported by the check
            changed["tags"] = [*(tag for tag in tags if tag != name), name]
        try:
            config = checked(output.path, changed, str(source), None, place)
        except ConfigError as error:
            what = ", ".join(f"{key}={value}" for key, value in values.items())
            raise WrongUseError(f"nothing was added: with {what}: {error}") from error
        start, teachers = start_of(output, config), teachers_of(output, config)
        new[run_id] = NewRun(tomli_w.dumps(changed), config, place, mode, start, teachers)
    return new


def _plan(
    source: Path,
    name: str,
    points: Mapping[str, Mapping[str, Any]],
    config: OrchestratorConfig,
    halving: int | None,
    metric: str | None,
) -> SweepPlan:
    stop, usual = config.stop, REWARD
    if config.kind == "sft":
        usual = SUPERVISED_LOSS if all(source.num_held_out == 0 for source in config.data) else HELD_OUT_LOSS
    chosen = metric or (stop.metric if stop else usual)
    return SweepPlan(
        name=name,
        base=str(source),
        runs=[SweepRun(run_id, dict(values)) for run_id, values in points.items()],
        seed=config.seed,
        halving=halving,
        metric=chosen,
        mode=stop.mode if stop and chosen == stop.metric else "min" if chosen in LESS_IS_BETTER else "max",
        min_steps=stop.min_steps if stop else 0,
    )


def _check_rungs(plan: SweepPlan, configs: Sequence[OrchestratorConfig]) -> None:
    """Raises WrongUseError when a rung is before the first measurement of what was learned."""
    rungs = rungs_of(plan, min(config.max_steps for config in configs))
    interval = max(config.sft.held_out_interval for config in configs)
    if plan.metric.startswith(HELD_OUT) and rungs and rungs[0].step <= interval:
        first = f"the first rung is step {rungs[0].step}, {plan.metric} is measured at steps 1, {interval + 1}, ..."
        below = f"set sft.held_out_interval below {rungs[0].step}" if rungs[0].step > 1 else "raise max_steps"
        raise WrongUseError(f"--halving {plan.halving}: {first}, and at step 1 nothing was learned: {below}")


def _add_all(output: OutputDir, new: Mapping[str, NewRun]) -> None:
    """Fill all folders, then rename all; those that were renamed are removed again when one cannot be."""
    output.path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folders = {run_id: stack.enter_context(staged(output, run)) for run_id, run in new.items()}
        done: list[RunDir] = []
        try:
            for run_id, folder in folders.items():
                done.append(put(output, folder, [run_id]))
        except BaseException:
            for run in done:
                shutil.rmtree(run.path, ignore_errors=True)
            raise
