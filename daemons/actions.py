"""Actions on runs, for `prl` and the TUI: evict, readmit, pause, continue, roll back, set keys, apply, restore.

Others are in `trash`.

Every action works on files alone, so it works with the daemons down; doing it twice does no more than doing it once;
each is appended to `logs/audit.jsonl`. A run is checked with the trainer's own rules (`configs.validate`). Failure is
an `ActionError` of one line. Actions start and end no process: the supervisor does that.

A rollback sets `ckpt.resume_step` in the run's `orch.toml`; the trainer does the rest (docs/durability.md). A run in
use is evicted first and readmitted afterwards. While a run has a slot only `LIVE_KEYS` can be set, which trainer and
orchestrator read again; otherwise any key. The file is replaced in one step and keeps its comments where possible.
What a person edits in it by hand is not in effect before it is applied (`configs.admitted`).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from daemons.adding import add_run, check_doubts, check_file, trainer_limits, validate_file
from daemons.errors import ActionError, WrongUseError, printable, record_act
from daemons.trash import Progress, acting_on, delete_run, list_trash, undelete_run, users, wait_until_released
from daemons.workspace import IDLE, RunView, why_idle
from daemons.workspace_reader import WorkspaceReader, edit_text
from prime_rl.configs.admitted import (
    Edit,
    apply,
    config_in_effect,
    hidden,
    in_words,
    read_effect,
    request,
    restore,
)
from prime_rl.configs.base import MAX_TOML_BYTES, ConfigError, build, load_toml, merge, parse_set, parse_toml
from prime_rl.configs.distill import TeacherConfig
from prime_rl.configs.orchestrator import LIVE_KEYS, OrchestratorConfig
from prime_rl.configs.validate import find_problems
from prime_rl.contract.files import read_end, read_text, remove, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, list_steps, stable_marker, step_name
from prime_rl.contract.metrics import OF_TEXTS, EarlyStop, series
from prime_rl.contract.notes import pending_request
from prime_rl.contract.status import DaemonStatus, RunState, RunStatus, read_status
from prime_rl.contract.usage import budget_reason, used_in_life

# Passed on from the modules that have them.
__all__ = ["ActionError", "add_run", "check_doubts", "check_file", "delete_run", "list_trash", "undelete_run"]
__all__ += ["validate_file"]

# The end of the metrics file that the stop rule is judged by; an orchestrator reads as much.
MAX_HISTORY_BYTES = 64_000_000
# Tables that the weights of a run depend on: they cannot change once it has made a step.
_FIXED = ("model", "init")

_TABLE = re.compile(r"^[ \t]*\[.*$", re.MULTILINE)
_NULL = "null"


def evict_run(output_dir: Path, run_id: str, reason: str, *, actor: str | None = None) -> bool:
    """Evict a run from training; false when it is evicted already (its first reason stays), or finished and released.

    `actor`: a person by default.
    """
    with acting_on(output_dir, run_id, "evicting") as (output, run):
        if os.path.lexists(run.evicted):
            return False
        view = WorkspaceReader(output.path).read().run(run_id)  # None: its config is gone, which protects nothing
        # Neither does what only its own files tell, while it is in use.
        if view and view.state is RunState.FINISHED and not users(output, run, claimed=False):
            return False
        write_atomic(run.evicted, printable(reason).strip() or "no reason was given")
        record_act(output, "evict", run_id, reason=reason, actor=actor)
        return True


def readmit_run(output_dir: Path, run_id: str, *, reason: str = "") -> bool:
    """Continue a run that is evicted, has failed or was ended early; false when it is none of these.

    One that would end again at once, by its budget or its stop rule, is refused.
    """
    with acting_on(output_dir, run_id, "readmitting") as (output, run):
        view = view_of_run(output, run_id)
        if view.state is RunState.INVALID:
            raise ActionError(f"{run_id} is invalid: fix its orch.toml instead ({view.reason})")
        ended = os.path.lexists(run.finished)
        if view.state not in (RunState.EVICTED, RunState.FAILED) and not ended:
            return False
        if ended and (why := ends_again(output, run)):
            raise ActionError(f"{run_id} would end again at once: {why}")
        remove(run.evicted)
        remove(run.finished)
        status = read_status(run.status, RunStatus)
        if status is not None and status.state == "failed":
            remove(run.status)
        daemon = read_status(output.daemon_status(run_id), DaemonStatus)
        if daemon is not None and daemon.state == "failed":
            output.daemon_status(run_id).unlink(missing_ok=True)
        if output.daemons.exists():
            write_atomic(output.start_request(run_id), "readmit")
        record_act(output, "readmit", run_id, reason=reason)
        return True


def pause_run(output_dir: Path, run_id: str, *, reason: str = "") -> bool:
    """Pause a run that trains or waits; false when it is paused already (its first reason stays).

    The trainer saves the run and frees its slot, the orchestrator unloads its adapters and ends, and the supervisor
    starts none until the run has a slot again.
    """
    with acting_on(output_dir, run_id, "pausing") as (output, run):
        view = view_of_run(output, run_id)
        if why := why_idle("pause", view):
            raise ActionError(f"{run_id}: {why}")
        if os.path.lexists(run.paused):
            return False
        write_atomic(run.paused, printable(reason).strip())
        record_act(output, "pause", run_id, reason=reason)
        return True


def continue_run(output_dir: Path, run_id: str, *, reason: str = "") -> bool:
    """Let a paused run go on when a slot is free; false when it is not paused."""
    with acting_on(output_dir, run_id, "continuing") as (output, run):
        if not os.path.lexists(run.paused):
            return False
        remove(run.paused)
        record_act(output, "continue", run_id, reason=reason)
        return True


@dataclass(frozen=True)
class Act:
    """An act on one run, and what is said of it: it was done, or nothing was; `{state}` is the run's state then.

    `starts`: the run goes on after it, so an edit that is not in effect is named too.
    """

    do: Callable[..., bool]
    done: str
    idle: str
    starts: bool = False

    def __call__(self, output_dir: Path, run_id: str, **options: str) -> str:
        """Act on the run; returns the sentence. Raises ActionError."""
        if self.do(output_dir, run_id, **options):
            words = f"{run_id}: {self.done}"
        else:
            state = view_of_run(OutputDir(output_dir), run_id).state if "{state}" in self.idle else ""
            words = f"{run_id}: {self.idle.format(state=state)}"
        with suppress(ConfigError):
            if self.starts and (edited := _edit_text(OutputDir(Path(output_dir)).run(run_id))):
                words += f"; {edited}"
        return words


EVICT = Act(evict_run, "evicted", IDLE["evict"])
READMIT = Act(readmit_run, "readmitted", IDLE["readmit"], starts=True)
PAUSE = Act(pause_run, "paused", IDLE["pause again"])
CONTINUE = Act(continue_run, "continues", IDLE["continue"], starts=True)
UNDELETE = Act(undelete_run, "restored", "not deleted, nothing to do")


def view_of_run(output: OutputDir, run_id: str) -> RunView:
    """Return the view of one run. Raises ActionError when it is not a run."""
    workspace = WorkspaceReader(output.path).read()
    if (view := workspace.run(run_id)) is not None:
        return view
    reason = next((each.reason for each in workspace.refused if each.name == run_id), "its folder is gone")
    raise ActionError(f"{run_id} is not a run: {reason}")


def end_run(output: OutputDir, run: RunDir, action: str, reason: str, detail: str = "") -> bool:
    """End a run after a checkpoint; false when it has ended already (its first reason stays). Raises OSError."""
    try:
        write_atomic(run.finished, printable(reason), exclusive=True)
    except FileExistsError:
        return False
    record_act(output, action, run.run_id, reason=reason, detail=detail)
    return True


def ends_again(output: OutputDir, run: RunDir) -> str | None:
    """Why a run would end at once if it went on: its budget is used up, or its stop rule holds. Raises OSError."""
    try:
        config = config_in_effect(run)
    except ConfigError:  # the trainer reports that
        return None
    if stopped := _stopped(run, config):
        return f"{stopped}: change or remove [stop] in its orch.toml, then prl runs apply {run.run_id}"
    life = read_text(run.life) or ""
    tokens, hours = used_in_life(output.run_usage(run.run_id), life)
    budget = config.budget
    used_up = budget_reason(tokens, hours, max_tokens=budget.max_tokens, max_hours=budget.max_hours)
    return f"{used_up}: raise [budget] in its orch.toml first" if used_up else None


def _stopped(run: RunDir, config: OrchestratorConfig) -> str | None:
    if config.stop is None:
        return None
    rule = EarlyStop(**config.stop.model_dump())
    published = max(list_steps(run.broadcast, stable_only=True), default=0)
    path = run.trainer_metrics if rule.metric.startswith(OF_TEXTS) else run.orchestrator_metrics
    lines = read_end(path, MAX_HISTORY_BYTES).splitlines()
    for step, value in series(lines, rule.metric, at_most=published):
        rule.feed(step, value)
    return rule.reason


def rollback_run(
    output_dir: Path,
    run_id: str,
    step: int,
    *,
    wait_s: float = 60.0,
    on_progress: Progress = lambda message: None,
    reason: str = "",
) -> None:
    """Roll a run back to its checkpoint of `step`; 0 starts over. Raises ActionError when that checkpoint is missing.

    Waits up to `wait_s` seconds until trainer and orchestrator release the run; after that the run stays evicted and
    ActionError is raised.
    """
    with acting_on(output_dir, run_id, "rolling back") as (output, run):
        _check_unedited(run)
        _check_step(run, step)
        text, _ = _read_config(run)
        # With a note: the trainer carries out each text once.
        note = f"requested at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
        text = edited(text, {"ckpt": {"resume_step": step}}, note)
        if problems := find_problems(parse_toml(text, "orch.toml"), "orch.toml", trainer_limits(output.path)):
            raise ActionError(f"{run_id} would be invalid: {problems[0]}")
        if users(output, run):
            with _kept(run, step):
                if not os.path.lexists(run.evicted):
                    write_atomic(run.evicted, f"rolls back to step {step}")
                wait_until_released(output, run, "was not rolled back", wait_s, on_progress)
        request(run, text)
        record_act(output, "rollback", run_id, reason=reason, detail=f"to step {step}")
        if not readmit_run(output.path, run_id, reason=f"rolled back to step {step}") and output.daemons.exists():
            write_atomic(output.start_request(run_id), "rollback")


def _check_step(run: RunDir, step: int) -> None:
    complete = list_steps(run.checkpoints, stable_only=True)
    if step and step not in complete:
        known = ", ".join(map(str, complete)) or "none"
        raise ActionError(f"{run.run_id} has no complete checkpoint of step {step}; complete ones: {known}")


@contextmanager
def _kept(run: RunDir, step: int) -> Iterator[None]:
    """Keep that checkpoint: a run trains on until it is released, and its older checkpoints are removed meanwhile."""
    if not step:
        yield
        return
    folder, aside = run.checkpoint_dir(step), run.checkpoints / f".{step_name(step)}.rollback"
    remove(aside)
    try:
        with suppress(FileNotFoundError, shutil.Error):  # removed meanwhile: the check reports it
            shutil.copytree(folder, aside, copy_function=_link, symlinks=True)
        _check_step(run, step)  # the marker goes first, so what was copied while it stood is whole
        yield
    finally:
        if not stable_marker(folder).exists() and stable_marker(aside).exists():
            remove(folder)
            aside.rename(folder)
        with suppress(OSError):
            remove(aside)


def _link(source: str, target: str) -> None:
    """Hard-link where the disk supports it, since files of a complete checkpoint never change; else copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _read_config(run: RunDir) -> tuple[str, dict[str, Any]]:
    """The text of a run's `orch.toml`, and what it says. Raises ConfigError, and ActionError when it changes now."""
    data = load_toml(run.orch_toml)  # reports problems of size, encoding and syntax
    text = read_text(run.orch_toml, limit=MAX_TOML_BYTES) or ""
    if parse_toml(text, str(run.orch_toml)) != data:
        raise ActionError(f"{run.orch_toml} changed while it was read: try again")
    return text, data


def parse_changes(items: Sequence[str]) -> dict[str, Any]:
    """["weight=2", "tags=a,b", "budget.max_hours=null"] -> a nested mapping; null removes a key. Raises WrongUseError.

    A number without a fraction becomes an integer, so 1e6 is one.
    """
    try:
        return {key: _tidy(key, value) for key, value in parse_set(items).items()}
    except ConfigError as error:
        raise WrongUseError(str(error).replace("--set: ", "")) from error


def _tidy(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {inner: _tidy(f"{key}.{inner}", each) for inner, each in value.items()}
    if key == "tags" and not isinstance(value, list):
        return [tag.strip() for tag in str(value).split(",") if tag.strip()]
    if value == _NULL:
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def set_run_keys(output_dir: Path, run_id: str, changes: Mapping[str, Any], *, reason: str = "") -> bool:
    """Set the keys of `changes` (nested; null removes one); false when they have these values already.

    Raises ActionError for a key that cannot be changed now, and for a value that makes the config invalid.
    """
    with acting_on(output_dir, run_id, "setting keys of") as (output, run):
        _check_live(output, run, changes)
        is_live = all(name in LIVE_KEYS for name in changes)
        if not is_live:
            _check_unedited(run)
        text, before = _read_config(run)
        wanted = _without_nulls(merge(before, changes))
        if wanted == _without_nulls(before):
            return False
        if problems := find_problems(wanted, str(run.orch_toml), trainer_limits(output.path)):
            raise ConfigError(str(run.orch_toml), problems)
        if not is_live:
            _check_teachers(run, wanted)
        if not (is_live and run.admitted.exists()) and _is_rolled_back(run, wanted):
            # The trainer carries out each text once, and this is another one.
            changes = merge(changes, {"ckpt": {"resume_step": None}})
        info = run.orch_toml.stat()
        text = edited(text, changes)
        write_atomic(run.orch_toml, text, mode=stat.S_IMODE(info.st_mode), modified_ns=info.st_mtime_ns)
        if not is_live:
            _apply(output, run, text)
        record_act(output, "set", run_id, reason=reason, detail=" ".join(_pairs(changes)))
        return True


def apply_edit(output_dir: Path, run_id: str, *, reason: str = "") -> str:
    """Put the edit of a run's `orch.toml` into effect; returns what was applied, in words.

    Raises ActionError for an invalid file, and for keys that cannot change now, when the others were applied.
    """
    with acting_on(output_dir, run_id, "applying the edit of") as (output, run):
        if (edit := read_effect(run).edit) is None:
            return f"{run_id}: nothing to apply, its orch.toml is in effect"
        if edit.problem is not None:
            raise WrongUseError(f"{run_id}: orch.toml is invalid ({edit.problem}): correct it first")
        refused = _refused(output, run, edit)
        text, data = _read_config(run)
        if refused:
            before = read_effect(run).data
            kept = {key.partition(".")[0] for key in refused}
            data = {key: value for key, value in data.items() if key not in kept}
            data |= {key: before[key] for key in kept if key in before}
            text = tomli_w.dumps(data)
        taken = [each for each in edit.keys if each[0].partition(".")[0] not in {k.partition(".")[0] for k in refused}]
        done = f"applied {in_words(hidden(taken))}" if taken else ""
        if taken:
            if problems := find_problems(data, str(run.orch_toml), trainer_limits(output.path)):
                raise ConfigError(str(run.orch_toml), problems)
            _check_teachers(run, data)
            _apply(output, run, text)
            record_act(output, "apply", run_id, reason=reason, detail=in_words(hidden(taken)))
        if refused:
            words = "; ".join(f"{key}: {why}" for key, why in refused.items())
            raise ActionError(f"{run_id}: {f'{done}; ' if done else ''}not applied: {words}")
        return f"{run_id}: {done}"


def _check_teachers(run: RunDir, data: Mapping[str, Any]) -> None:
    """Raise ActionError for an adapter as teacher that the run has no copy of: it would fail as soon as it starts."""
    for number, name in enumerate(build(OrchestratorConfig, data, str(run.orch_toml)).teacher_adapters):
        if not TeacherConfig(model=name).follows and read_text(run.teacher_source(number)) != name:
            rule = f"it is copied when a run is added: prl runs fork {run.run_id} --set teacher=..."
            raise ActionError(f"teacher: {run.run_id} has no copy of {name}, {rule}")


def _refused(output: OutputDir, run: RunDir, edit: Edit) -> dict[str, str]:
    """The keys of an edit that cannot change now, with why."""
    view, run_id = view_of_run(output, run.run_id), run.run_id
    in_use = view.state is RunState.ACTIVE or bool(users(output, run))
    has_begun = view.step > 0
    refused = {}
    for key, _, _ in edit.keys:
        if has_begun and key.partition(".")[0] in _FIXED:
            refused[key] = f"fixed since its first step; prl runs fork {run_id} --set {key}=..."
        elif in_use:
            refused[key] = f"not while it is in its slot; prl runs pause {run_id}, apply, prl runs continue {run_id}"
    return refused


def restore_config(output_dir: Path, run_id: str, *, reason: str = "") -> str:
    """Write the config in effect back into a run's `orch.toml`; returns what was done. Raises ActionError."""
    with acting_on(output_dir, run_id, "restoring the config of") as (output, run):
        if (edit := read_effect(run).edit) is None:
            return f"{run_id}: nothing to restore, its orch.toml is in effect"
        what = edit.problem or in_words(hidden([(key, after, before) for key, before, after in edit.keys]))
        restore(run)
        record_act(output, "restore", run_id, reason=reason, detail=what)
        return f"{run_id}: orch.toml restored to what is in effect"


def _check_unedited(run: RunDir) -> None:
    if words := _edit_text(run):
        raise ActionError(f"{run.run_id}: {words} first")


def _edit_text(run: RunDir) -> str | None:
    return edit_text(run, read_effect(run).edit)


def _apply(output: OutputDir, run: RunDir, text: str) -> None:
    """`apply` for a run that has no slot. Raises ActionError when it got one meanwhile, with its config as it was."""
    apply(run, text)
    if users(output, run) and os.path.lexists(run.applied):
        remove(run.applied)
        raise ActionError(f"{run.run_id} took a slot meanwhile: pause it first (prl runs pause {run.run_id})")


def _check_live(output: OutputDir, run: RunDir, changes: Mapping[str, Any]) -> None:
    others = [name for name in changes if name not in LIVE_KEYS]
    if not others:
        return
    state, used_by = view_of_run(output, run.run_id).state, users(output, run)
    if state is RunState.FINISHED and used_by:
        held_by = " and ".join(used_by)
        raise ActionError(f"{run.run_id} has finished, but {held_by} did not release it yet: try again in a moment")
    if state is RunState.ACTIVE or used_by:
        raise ActionError(
            f"{run.run_id} is in use: only {', '.join(LIVE_KEYS)} can be set, not {', '.join(others)}; "
            f"pause it first (prl runs pause {run.run_id})"
        )


def _is_rolled_back(run: RunDir, data: Mapping[str, Any]) -> bool:
    """True when the config asks for a checkpoint to go back to, and the trainer has done that."""
    ckpt = data.get("ckpt")
    step = ckpt.get("resume_step", -1) if isinstance(ckpt, Mapping) else -1
    return isinstance(step, int) and step >= 0 and pending_request(run, step) is None


def edited(text: str, changes: Mapping[str, Any], note: str = "") -> str:
    """The text of a TOML file with `changes`, everything else unchanged where possible; else without its comments.

    `note` becomes the comment of what is changed.
    """
    wanted = _without_nulls(merge(parse_toml(text, "orch.toml"), changes))
    changed = text
    for table, key, value in _leaves(changes):
        changed = _edit(changed, table, key, value, note)
    try:
        if _without_nulls(parse_toml(changed, "orch.toml")) == wanted:
            return changed
    except ConfigError:  # a value over several lines, an inline table
        pass
    return tomli_w.dumps(wanted) + (f"# {note}\n" if note else "")


def _edit(text: str, table: str, key: str, value: Any, note: str) -> str:
    """Replace, add or remove (null) the line of one key."""
    line = "" if value is None else f"{key} = {_toml(value)}" + (f"  # {note}" if note else "")
    start, stop = _section(text, table)
    if start < 0:
        return f"{text.rstrip()}\n\n[{table}]\n{line}\n" if line else text
    body = text[start:stop]
    found = re.search(rf"^[ \t]*{re.escape(key)}[ \t]*=(.*)\n?", body, re.MULTILINE)
    if found:
        old, _, comment = found[1].partition("#")
        kept = f"  #{comment}" if comment and not note and not old.count('"') % 2 else ""
        body = body[: found.start()] + (f"{line}{kept}\n" if line else "") + body[found.end() :]
    elif line:
        body = f"\n{line}{body or chr(10)}" if table else f"{line}\n{body}"
    return text[:start] + body + text[stop:]


def _section(text: str, table: str) -> tuple[int, int]:
    """Where the lines of a table are ("": those before all tables); (-1, -1) when there is no such table."""
    headers = list(_TABLE.finditer(text))
    starts = [0] + [header.end() for header in headers]
    stops = [header.start() for header in headers] + [len(text)]
    names = [""] + [header[0].partition("#")[0].strip() for header in headers]
    wanted = f"[{table}]" if table else ""
    places = zip(names, starts, stops, strict=True)
    return next(((start, stop) for name, start, stop in places if name.replace(" ", "") == wanted), (-1, -1))


def _leaves(changes: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, str, Any]]:
    """(table, key, value) of each value."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{table}.{key}".lstrip("."))
        else:
            yield table, key, value


def _pairs(changes: Mapping[str, Any]) -> list[str]:
    return [
        f"{table}.{key}={_NULL if value is None else _toml(value)}".lstrip(".")
        for table, key, value in _leaves(changes)
    ]


def _toml(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def _without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    """Also without tables that are empty then: they say the same as none."""

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(each) for each in value]
        return _without_nulls(value) if isinstance(value, Mapping) else value

    found = {key: clean(value) for key, value in data.items() if value is not None}
    return {key: value for key, value in found.items() if value != {}}
