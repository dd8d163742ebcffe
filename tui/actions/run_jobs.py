"""The jobs of single acts on runs, as `prl runs` does them: pause, continue, set, fork, export, sweep. No widgets.

The `check_` functions are the dry runs: what would be done, in words, or a `FieldError` at what is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemons.actions import CONTINUE, PAUSE, parse_changes, set_run_keys
from daemons.adding import fork_run
from daemons.errors import ActionError, expand_home, in_one_line
from daemons.exports import export_run
from daemons.sweeps import Sweep, parse_axis, sweep_runs
from prime_rl.configs.base import ConfigError, build, parse_set
from prime_rl.configs.lifetime import RunLifetime
from prime_rl.contract.files import read_text
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.sweeps import check_sweep_name
from prime_rl.contract.usage import used_in_life
from prime_rl.utils.text import one_line, size_text
from tui import fmt
from tui.actions.jobs import NUM_AT_ONCE, Job, Progress, Work, each, prl_command


class FieldError(ActionError):
    """An invalid form: which field, and why."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(in_one_line(why))
        self.field = field


@contextlib.contextmanager
def at_field(field: str, others: Mapping[str, str] = {}) -> Iterator[None]:
    """Errors belong to `field`, or to the first of `others` (field by a word) whose word is in the message."""
    try:
        yield
    except FieldError:
        raise
    except (ActionError, ConfigError, OSError, ValueError) as error:
        why = str(error)
        raise FieldError(next((other for word, other in others.items() if word in why), field), why) from error


def pause_job(output_dir: Path, run_ids: Sequence[str], reason: str = "") -> Job:
    """Pause runs; `reason` is kept in `paused.txt`."""

    def act(run_id: str, progress: Progress) -> str:
        return PAUSE(output_dir, run_id, reason=reason)

    words = ["--reason", reason] if reason else []
    return Job(prl_command(output_dir, "runs", "pause", *run_ids, *words), each(run_ids, "paused", act))


def continue_job(output_dir: Path, run_ids: Sequence[str]) -> Job:
    """End the pause of runs."""

    def act(run_id: str, progress: Progress) -> str:
        return CONTINUE(output_dir, run_id)

    return Job(prl_command(output_dir, "runs", "continue", *run_ids), each(run_ids, "continue", act))


def set_job(output_dir: Path, run_ids: Sequence[str], items: Sequence[str]) -> Job:
    """Set keys of several runs. Raises ActionError for an item that is not KEY=VALUE."""
    changes = parse_changes(items)

    def act(run_id: str, progress: Progress) -> str:
        done = set_run_keys(output_dir, run_id, changes)
        return f"{run_id}: {'set ' + ' '.join(items) if done else 'has these values already'}"

    commands = [prl_command(output_dir, "runs", "set", run_id, *items) for run_id in run_ids]
    return Job(one_line("; ".join(commands), 4000), each(run_ids, f"set {' '.join(items)}", act))


def check_live(items: Sequence[str], field: str) -> None:
    """Check values of keys that are read while a run trains. Raises FieldError."""
    with at_field(field):
        try:
            build(RunLifetime, _without_nulls(parse_changes(items)), "")
        except ConfigError as error:
            raise FieldError(field, error.problems[0].message) from error


def check_budget(output_dir: Path, run_ids: Sequence[str], tokens: str, hours: str) -> str:
    """What has been used, and which runs would end at once. Raises FieldError."""
    check_live([f"budget.max_tokens={tokens or 'null'}"], "tokens")
    check_live([f"budget.max_hours={hours or 'null'}"], "hours")
    max_tokens, max_hours = (float(tokens) if tokens else None), (float(hours) if hours else None)
    total_tokens, total_hours, ended = 0, 0.0, []
    for run_id in run_ids:
        run = OutputDir(output_dir).run(run_id)
        used = used_in_life(OutputDir(output_dir).run_usage(run_id), read_text(run.life) or "")
        total_tokens, total_hours = total_tokens + used[0], total_hours + used[1]
        if (max_tokens and used[0] >= max_tokens) or (max_hours and used[1] >= max_hours):
            ended.append(run_id)
    words = f"used so far: {fmt.count(total_tokens)} tokens, {total_hours:.2f} hours"
    return f"{words}\n▲ used up already, so it would end at once: {', '.join(ended)}" if ended else words


def _without_nulls(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in changes.items()
        if value is not None
    }


@dataclass(frozen=True)
class ForkForm:
    """What a person fills in to fork each of `run_ids`; "" is the default of each. A `new_id` is for one run alone."""

    run_ids: tuple[str, ...]
    version: str = ""
    new_id: str = ""
    settings: str = ""
    with_optimizer: bool = False

    def words(self, run_id: str) -> list[str]:
        """For `prl runs fork`."""
        found = [run_id, *_option("--step", self.version), *_option("--id", self.new_id)]
        for item in self.settings.split():
            found += ["--set", item]
        return [*found, "--with-optimizer"] if self.with_optimizer else found


# A word of a refusal -> the field that it is about.
_FORK_FIELDS = {"with-optimizer": "optimizer", "run id": "new-id", "already exists": "new-id", "of step": "version"}


def check_fork(output_dir: Path, form: ForkForm) -> str:
    """What the forks would be, one a line. Raises FieldError."""
    return "\n".join(_fork(output_dir, form, run_id, dry_run=True) for run_id in form.run_ids)


def fork_job(output_dir: Path, form: ForkForm) -> Job:
    """Fork each run of `form`."""

    def act(run_id: str, progress: Progress) -> str:
        return _fork(output_dir, form, run_id)

    return _job(output_dir, "fork", form, each(form.run_ids, "forked", act))


def _fork(output_dir: Path, form: ForkForm, run_id: str, *, dry_run: bool = False) -> str:
    step = _number(form.version, "version")
    with at_field("settings"):
        overrides = parse_set(form.settings.split())
    with at_field("settings", _FORK_FIELDS):
        made = fork_run(
            output_dir,
            run_id,
            step=step,
            new_id=form.new_id or None,
            overrides=overrides,
            with_optimizer=form.with_optimizer,
            dry_run=dry_run,
        )
    optimizer = " with its optimizer" if made.with_optimizer else ""
    if dry_run:
        return f"{made.run_id} would start from {made.source}{optimizer}"
    done = "starts" if made.added else "is there already, starts"
    return f"{made.run_id} {done} from {made.source}{optimizer}"


@dataclass(frozen=True)
class ExportForm:
    """What a person fills in to export each of `run_ids`; the newest version without a `version`.

    `out` is the new folder of one run; of several, the folder with a new one for each.
    """

    run_ids: tuple[str, ...]
    out: str
    version: str = ""
    merge: bool = False

    def folder(self, run_id: str) -> str:
        """The new folder of one run: `out` itself for a single run, else a folder in it; a `~` is not expanded."""
        return self.out if len(self.run_ids) == 1 else str(Path(self.out, export_name(run_id)))

    def words(self, run_id: str) -> list[str]:
        """For `prl runs export`."""
        found = [run_id, *_option("--step", self.version), *(["--merge"] if self.merge else [])]
        return [*found, "--out", self.folder(run_id)]


_EXPORT_FIELDS = {"of step": "version", "does not have": "version", "not on disk": "version"}


def export_name(run_id: str) -> str:
    """The usual name of the folder."""
    return run_id.removeprefix("run_")


def check_export(output_dir: Path, form: ExportForm) -> str:
    """What would be written, one folder a line. Raises FieldError."""
    return "\n".join(_export(output_dir, form, run_id, dry_run=True) for run_id in form.run_ids)


def export_job(output_dir: Path, form: ExportForm) -> Job:
    """Export each run of `form`."""

    def act(run_id: str, progress: Progress) -> str:
        return _export(output_dir, form, run_id, progress)

    # A merge holds the whole base model.
    return _job(
        output_dir, "export", form, each(form.run_ids, "exported", act, at_once=1 if form.merge else NUM_AT_ONCE)
    )


def _export(
    output_dir: Path, form: ExportForm, run_id: str, progress: Progress = lambda words: None, dry_run: bool = False
) -> str:
    step = _number(form.version, "version")
    if not form.out:
        raise FieldError("out", "folder missing: type the path of a new one")
    with at_field("out", _EXPORT_FIELDS):
        done = export_run(
            output_dir,
            run_id,
            expand_home(Path(form.folder(run_id))),
            step=step,
            merge=form.merge,
            dry_run=dry_run,
            on_progress=progress,
        )
    what = f"version {done.step} of {done.run_id} ({done.kind})"
    return f"{what} would be written to {done.out}" if dry_run else f"{what}: {size_text(done.num_bytes)} in {done.out}"


def _job(output_dir: Path, verb: str, form: ForkForm | ExportForm, work: Work) -> Job:
    """`prl runs VERB` for each run of `form`."""
    commands = [prl_command(output_dir, "runs", verb, *form.words(run_id)) for run_id in form.run_ids]
    return Job(one_line("; ".join(commands), 4000), work)


@dataclass(frozen=True)
class SweepForm:
    """What a person fills in to sweep over a config file; `axes` has one `key=v1,v2` a line."""

    file: str
    axes: str
    name: str = ""
    halving: str = ""

    @property
    def items(self) -> list[str]:
        """The lines of `axes` that are not empty, without blanks around them."""
        return [line.strip() for line in self.axes.splitlines() if line.strip()]

    def words(self) -> list[str]:
        """For `prl runs sweep`."""
        found = [self.file]
        for item in self.items:
            found += ["--set", item]
        return [*found, *_option("--name", self.name), *_option("--halving", self.halving)]


_SWEEP_FIELDS = {"--name": "name", "sweep name": "name"}


def check_sweep(output_dir: Path, form: SweepForm) -> Sweep:
    """The grid. Raises FieldError."""
    return _sweep(output_dir, form, dry_run=True)


def sweep_job(output_dir: Path, form: SweepForm) -> Job:
    """Add the runs of the sweep in `form`."""

    def work(progress: Progress) -> str:
        made = _sweep(output_dir, form)
        return f"sweep {made.plan.name}: {fmt.counted(len(made.added), 'run')} added"

    return Job(prl_command(output_dir, "runs", "sweep", *form.words()), work)


def _sweep(output_dir: Path, form: SweepForm, *, dry_run: bool = False) -> Sweep:
    eta = _number(form.halving, "halving", at_least=2)
    if not form.file:
        raise FieldError("file", "config missing: type the path of a run's config")
    with at_field("file"):
        source = expand_home(Path(form.file))
    if not source.is_file():
        raise FieldError("file", f"{source} not found: type the path of a run's config")
    with at_field("name"):
        name = check_sweep_name(form.name) if form.name else None
    if not form.items:
        raise FieldError("axes", "values missing: type a key and its values, such as seed=1,2,3, one key a line")
    with at_field("axes"):
        for item in form.items:
            parse_axis(item)
    with at_field("axes", {str(source): "file"} | _SWEEP_FIELDS):
        return sweep_runs(output_dir, source, form.items, name=name, halving=eta, dry_run=dry_run)


def _number(text: str, field: str, at_least: int = 0) -> int | None:
    """A whole number, None for "". Raises FieldError."""
    if not text:
        return None
    if not text.isdecimal() or int(text) < at_least:
        raise FieldError(field, f"invalid {field} {text!r}: must be a whole number of at least {at_least}")
    return int(text)


def _option(name: str, value: str) -> list[str]:
    return [name, value] if value else []
