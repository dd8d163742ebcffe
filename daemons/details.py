"""All facts about one run (`prl runs show`), its results, its versions on disk, and what differs between two runs.

Reads what `workspace_reader` need not read at every look. A file that is missing or damaged costs its own facts. Values
that look like API keys are hidden. All text is clean but `config`, which is data.

Of a result (rewards by step, evaluations by version, tokens, time) the last line of a step counts, since a run that
went back to an earlier step writes its steps again; what it wrote of later steps before that counts no more. Files are
read in chunks, and a figure of a step is all that is kept.

A version has been published for inference, saved as a checkpoint, or both; of both the older ones are removed in time.
Version 0 is on disk only for a run that started from an adapter (`[init]`). Names of files are enough for it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemons.errors import ActionError, one_line_errors
from daemons.machine import Use, disk_use
from daemons.trash import existing_run
from daemons.workspace import DaemonView, RunView
from prime_rl.configs.admitted import (
    MAX_CHANGE_CHARS,
    MAX_CHANGES,
    Effect,
    added_data,
    changed_data,
    changed_data_text,
    differing,
    flatten,
    hide_secret,
    hide_secrets,
    in_words,
    plain_text,
    read_effect,
    resolved,
    short,
)
from prime_rl.configs.base import ConfigError, parse_toml
from prime_rl.configs.jsonl import MAX_CODE_BYTES
from prime_rl.contract.files import read_file
from prime_rl.contract.layout import OutputDir, RunDir, list_steps, stable_marker
from prime_rl.contract.metrics import HELD_OUT_LOSS, REWARD, SUPERVISED_LOSS, bounded_mean, parse_metrics, series
from prime_rl.contract.notes import Change, digest_of, read_admitted
from prime_rl.contract.peft import CONFIG_FILE
from prime_rl.contract.served import adapter_name
from prime_rl.utils.tail import FileTail, whole_lines
from prime_rl.utils.text import CleanText, clean_strings, clean_text, one_line

NUM_ERRORS = 5
_TAIL_BYTES = 256 * 1024
_ERROR = re.compile(r"^\S+ (WARNING|ERROR|CRITICAL) |^[\w.]*(Error|Exception)\b.*:|^fatal\b", re.IGNORECASE)

# Errors of figures, and those about the evaluation itself.
_OF_TEXTS = (SUPERVISED_LOSS, HELD_OUT_LOSS)
_NOT_RESULTS = ("_se", "/truncated", "/num_failed")
NUM_RECENT = 10


@dataclass(frozen=True)
class CheckpointView:
    """One `checkpoints/step_N`. Without `stable` it is being written, or was left behind by a kill."""

    step: int
    num_bytes: int
    stable: bool
    saved_at: float | None


@dataclass(frozen=True)
class RunDetails:
    """The facts that are shown of one run.

    `config` is None unless it is valid TOML. `metrics`: the figures of the last step by writer. `disk`: bytes by
    folder. `data_changed`: files in `data/` that are no longer those with which it was added; `changes`: of its config.
    """

    run: RunView
    config: Mapping[str, Any] | None
    metrics: Mapping[str, Mapping[str, float]]
    errors: tuple[CleanText, ...]  # the newest warnings and errors of its log, oldest first
    checkpoints: tuple[CheckpointView, ...]
    disk: Mapping[CleanText, int]
    disk_complete: bool
    log_tail: tuple[CleanText, ...]
    data_changed: tuple[CleanText, ...] = ()
    changes: tuple[CleanText, ...] = ()


def read_details(paths: RunDir, run: RunView, daemon: DaemonView | None) -> RunDetails:
    """Read the run's folder. Raises nothing for what is in it."""
    uses = _folders(paths.path)
    lines = FileTail(paths.log, start_bytes=_TAIL_BYTES).read().lines
    texts = (clean_text(line.decode(errors="replace")) for line in lines)
    return RunDetails(
        run=run,
        config=_config(paths),
        metrics={
            name: figures
            for name, path in (("trainer", paths.trainer_metrics), ("orchestrator", paths.orchestrator_metrics))
            if (figures := last_figures(path))
        },
        errors=tuple([text for text in texts if _ERROR.search(text)][-NUM_ERRORS:]),
        checkpoints=tuple(_checkpoint(paths, step) for step in steps_of(paths.checkpoints)),
        disk={one_line(name, 40): use.num_bytes for name, use in uses.items()},
        disk_complete=all(use.complete for use in uses.values()),
        log_tail=daemon.log_tail if daemon else (),
        data_changed=tuple(changed_data_text(paths)),
        changes=change_texts(paths),
    )


def changes_of(run: RunDir, effect: Effect | None = None) -> list[Change]:
    """The changes of a run's config since its first step, oldest first.

    The last may be applied and not admitted yet; the step of a live one is the trainer's to tell. A change from before
    the run went back holds from where it went on.
    """
    with contextlib.suppress(ConfigError):
        effect = effect or read_effect(run)
    if (known := effect.admitted if effect else read_admitted(run)) is None:
        return []
    history = known.history[-MAX_CHANGES:]
    with contextlib.suppress(ConfigError, OSError):
        if effect and effect.sha256 != known.sha256:
            newest = max(list_steps(run.broadcast, stable_only=True), default=0)
            keys = short(differing(parse_toml(known.text, str(run.admitted)), effect.data))
            history = [*history, Change(0.0, newest, keys)]
    steps = [min(each.step for each in history[at:]) for at in range(len(history))]
    return [Change(each.at, step, each.keys) for each, step in zip(history, steps, strict=True) if step and each.keys]


def change_texts(run: RunDir) -> tuple[CleanText, ...]:
    """`changes_of` in words, such as "after step 86: optim.lr 0.0015 -> 0.01"."""
    texts = (f"after step {change.step}: {in_words(change.keys)}" for change in changes_of(run))
    return tuple(one_line(text, MAX_CHANGE_CHARS) for text in texts)


def told_config(run: RunDir, effect: Effect) -> dict[str, Any]:
    """All values of the config in effect by dotted key, secrets too. Raises ConfigError when it is invalid.

    A value that changed since the first step is a text with all that it was: "0.001 -> 0.002".
    """
    told = dict(flatten(resolved(effect.data)))
    for change in reversed(changes_of(run, effect)):
        for key, before, _ in (each for each in change.keys if each[0] in told or "." in each[0]):
            after = plain_text(hide_secret(key, told.get(key, "unset")))
            told[key] = one_line(f"{before} -> {after}", MAX_CHANGE_CHARS)
    return told


def last_figures(path: Path) -> dict[str, float]:
    """All figures of the last step of a metrics file, with `step`; {} without one."""
    found: dict[str, float] = {}
    for line in FileTail(path, start_bytes=_TAIL_BYTES).read().lines:
        parsed = parse_metrics(line)
        if parsed is not None:
            step, figures = parsed
            found = {**(found if found.get("step") == step else {}), **figures, "step": float(step)}
    return {one_line(name): value for name, value in found.items()}


def _config(run: RunDir) -> Mapping[str, Any] | None:
    try:
        return dict(hide_secrets(read_effect(run).data))
    except ConfigError:
        return None


def steps_of(folder: Path) -> list[int]:
    """The steps in a folder; none when it cannot be listed."""
    try:
        return list_steps(folder)
    except OSError:
        return []


def _checkpoint(paths: RunDir, step: int) -> CheckpointView:
    folder = paths.checkpoint_dir(step)
    try:
        saved_at = stable_marker(folder).stat().st_mtime
    except OSError:
        saved_at = None
    return CheckpointView(step, sum(checkpoint_parts(paths, step).values()), saved_at is not None, saved_at)


def checkpoint_parts(paths: RunDir, step: int) -> dict[str, int]:
    """The bytes in each finished folder of a checkpoint; the temporary ones of a write, or of a kill, do not count."""
    folders = (paths.orchestrator_checkpoint(step), paths.trainer_checkpoint(step))
    return {
        folder.name: disk_use(folder, as_stored=False).num_bytes
        for folder in folders
        if folder.is_dir() and not folder.is_symlink()
    }


def _folders(run: Path) -> dict[str, Use]:
    """By folder of the run, largest first."""
    try:
        names = [entry.name for entry in run.iterdir() if entry.is_dir() and not entry.is_symlink()]
    except OSError:
        return {}
    uses = {name: disk_use(run / name) for name in names}
    return dict(sorted(uses.items(), key=lambda item: -item[1].num_bytes))


@dataclass(frozen=True)
class RunResult:
    """The figures that a run has reached by a step.

    Attributes:
        rewards: mean reward of the batch, by step.
        evaluations: figures by evaluated version, such as {20: {"eval/sums/pass@1": 0.5}}.
        updates: the step of the newest update; rewards may be of later batches.
        tokens: of all batches that it was trained on, prompts included.
        hours: between its first and its last batch, pauses included.
        texts: the newest losses of texts that it learned, and that were held out.
    """

    rewards: Mapping[int, float]
    evaluations: Mapping[int, Mapping[CleanText, float]]
    updates: int
    tokens: int
    hours: float
    texts: Mapping[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> float | None:
        """Mean over the last steps: one batch alone is noise."""
        recent = [self.rewards[step] for step in sorted(self.rewards)[-NUM_RECENT:]]
        return bounded_mean(recent) if recent else None

    @property
    def last_evaluation(self) -> Mapping[CleanText, float]:
        """The figures of the newest version that was evaluated; {} without one."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else {}


def read_result(run: RunDir, *, until: int | None = None) -> RunResult:
    """Return what the run has reached by step `until` (None: by now). Raises nothing for what is in its files."""
    rewards = dict(series(whole_lines(run.orchestrator_metrics), REWARD, at_most=until))
    tokens = dict(series(whole_lines(run.trainer_metrics), "tokens", at_most=until))
    evaluations: dict[int, dict[CleanText, float]] = {}
    times: dict[int, float] = {}
    for step, figures in metrics_lines(run.orchestrator_metrics):
        results = {
            one_line(name): value
            for name, value in figures.items()
            if name.startswith("eval/") and not name.endswith(_NOT_RESULTS)
        }
        if results:
            evaluations[step] = results
        if REWARD in figures or "epoch" in figures:
            times[step] = figures.get("time", 0.0)
    steps = rewards or dict(series(whole_lines(run.orchestrator_metrics), "epoch", at_most=until))
    spent = [times[step] for step in steps if times[step]]
    last = until if until is not None else max(steps, default=0)
    losses = {name: series(whole_lines(run.trainer_metrics), name, at_most=until) for name in _OF_TEXTS}
    return RunResult(
        rewards=rewards,
        evaluations={step: evaluations[step] for step in sorted(evaluations) if step <= last},
        updates=max(tokens, default=0),
        tokens=sum(map(int, tokens.values())),  # as whole numbers: they have no end
        hours=(max(spent) - min(spent)) / 3600 if spent else 0.0,
        texts={name: values[-1][1] for name, values in losses.items() if values},
    )


def metrics_lines(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, figures) of each whole line of a metrics file, as they were written; invalid ones are left out."""
    return filter(None, map(parse_metrics, whole_lines(path)))


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
        results = [figures_of(read_result(run)) for run in runs]
        config = diff_configs(*runs)
        files = [changed_data(run) for run in runs]
    config += tuple(
        Difference(one_line(f"data/{name}"), (files[0].get(name), files[1].get(name))) for name in files[0] | files[1]
    )
    names = dict.fromkeys(name for result in results for name in result)
    figures = tuple(Difference(name, (results[0].get(name), results[1].get(name))) for name in names)
    return RunDifference((one, other), config, figures)


def diff_configs(*runs: RunDir) -> tuple[Difference, ...]:
    """Differences of the configs of two runs, with all that they were, and of their code. Raises ConfigError."""
    effects = [read_effect(run) for run in runs]
    configs: list[Mapping[str, Any]] = [effect.data for effect in effects]
    codes = [codes_of(run, config) for run, config in zip(runs, configs, strict=True)]
    with contextlib.suppress(ConfigError):
        told = [told_config(run, effect) for run, effect in zip(runs, effects, strict=True)]
        configs = [{key: hide_secret(key, value) for key, value in each.items()} for each in told]
    keys = [key for key in codes[0] if codes[1].get(key, codes[0][key]) != codes[0][key]]
    changed = tuple(Difference(one_line(f"{key} (code)"), (codes[0][key], codes[1][key])) for key in keys)
    return config_differences(*configs) + changed


def codes_of(run: RunDir, config: Mapping[str, Any]) -> dict[str, str]:
    """What the code of each reward in a file is, by key: files of one name may differ. What cannot be read is left out.

    Such as {"env.0.args.reward": "3f2a91c0"}: the beginning of its SHA-256 when the run was added; a file that has
    changed since has both: "3f2a91c0->77ab0e12".
    """
    found: dict[str, str] = {}
    files = {key: each for key, each in flatten(config) if _OF_REWARD.fullmatch(key) and isinstance(each, str)}
    added = added_data(run) if files else {}
    for key, value in files.items():
        with contextlib.suppress(OSError):
            path = run.data_file(value.rpartition(":")[0])
            now = digest_of(read_file(path, limit=MAX_CODE_BYTES))[:8]
            found[key] = now if (first := added.get(path.name, now)[:8]) == now else f"{first}->{now}"
    return found


def config_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Of two configs; values that look like keys are hidden."""
    return tuple(
        Difference(one_line(key), (clean_strings(mine, one_line), clean_strings(theirs, one_line)))
        for key, mine, theirs in differing(hide_secrets(one), hide_secrets(other))
    )


def figures_of(result: RunResult) -> dict[CleanText, float]:
    """The figures that people compare runs by."""
    figures: list[tuple[str, float | None]] = [
        ("step", float(result.updates)),
        ("reward", result.reward),
        ("tokens", float(result.tokens)),
        ("hours", result.hours),
        *result.texts.items(),
        *result.last_evaluation.items(),
    ]
    return {one_line(name): value for name, value in figures if value is not None}


_OF_REWARD = re.compile(r"env\.\d+\.args\.reward")
_SOURCE = re.compile(r"(run_[A-Za-z0-9._-]{1,64})(?:@v(0|[1-9][0-9]{0,9}))?")
MAX_LISTED = 12


@dataclass(frozen=True)
class Version:
    """One version of a run. `published` and `checkpoint` are folders with its weights, None where there is none."""

    run: RunDir
    step: int
    published: Path | None
    checkpoint: Path | None

    @property
    def name(self) -> str:
        """The name under which inference serves it: `run_id@vN`."""
        return adapter_name(self.run.run_id, self.step)

    @property
    def adapter(self) -> Path | None:
        """A folder with its adapter in PEFT format; None for a version of the whole model."""
        folders = [folder for folder in (self.published, self.checkpoint) if folder is not None]
        return next((folder for folder in folders if os.path.lexists(folder / CONFIG_FILE)), None)


def versions_of(run: RunDir) -> list[Version]:
    """The complete versions of a run, oldest first."""
    published = set(list_steps(run.broadcast, stable_only=True))
    saved = set(list_steps(run.checkpoints, stable_only=True))
    return [
        Version(
            run,
            step,
            run.broadcast_dir(step) if step in published else None,
            run.trainer_checkpoint(step) if step in saved else None,
        )
        for step in sorted(published | saved)
    ]


def find_version(run: RunDir, step: int | None = None, *, saved: bool = False) -> Version:
    """The version of `step`, by default the newest; `saved`: of those with a checkpoint. Raises ActionError."""
    found = [version for version in versions_of(run) if version.checkpoint or not saved]
    wanted = [version for version in found if step is None or version.step == step]
    if wanted:
        return wanted[-1]
    what, kind = ("a checkpoint", "checkpoints") if saved else ("a version", "versions")
    if not found:
        raise ActionError(
            f"{run.run_id} does not have {what} yet: wait for its first, or add its orch.toml as a new run"
        )
    steps = ", ".join(str(version.step) for version in found[-MAX_LISTED:])
    more = "..., " if len(found) > MAX_LISTED else ""
    raise ActionError(f"{run.run_id} does not have {what} of step {step}; its {kind}: {more}{steps}")


def parse_version(text: str) -> tuple[str, int | None] | None:
    """`run_a@v20` -> ("run_a", 20), `run_a` -> ("run_a", None); anything else -> None."""
    match = _SOURCE.fullmatch(text)
    return (match[1], None if match[2] is None else int(match[2])) if match else None
