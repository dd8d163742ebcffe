"""Roll a run back to one of its checkpoints: `prl runs rollback`, and the same in the TUI.

It sets `ckpt.resume_step` in the run's `orch.toml`; the trainer does the rest (docs/durability.md). A run in use is
evicted first and readmitted afterwards; the trainer, not this module, removes what was made after the step.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w

from daemons import audit
from daemons.actions import readmit_run, trainer_limits
from daemons.errors import ActionError, in_one_line, one_line_errors
from daemons.in_use import Progress, users, wait_until_released
from daemons.trash import existing_run
from prime_rl.configs.base import MAX_TOML_BYTES, ConfigError, load_toml, merge, parse_toml
from prime_rl.configs.validate import find_problems
from prime_rl.contract.files import read_text, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, list_steps, stable_marker, step_name

_TABLE = re.compile(r"^\s*\[\s*ckpt\s*\]\s*(?:#.*)?$", re.MULTILINE)
_KEY = re.compile(r"^[ \t]*resume_step[ \t]*=.*$", re.MULTILINE)
_NEXT_TABLE = re.compile(r"^\s*\[", re.MULTILINE)


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
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"rolling back {run_id}"):
        run = existing_run(output, run_id)
        _check_step(run, step)
        text = _checked_text(output, run, step)
        if users(output, run):
            with _kept(run, step):
                if not run.evicted.exists():
                    write_atomic(run.evicted, f"rolls back to step {step}")
                wait_until_released(output, run, "was not rolled back", wait_s, on_progress)
        path = run.orch_toml
        write_atomic(path, text, mode=stat.S_IMODE(path.stat().st_mode))
        audit.record(output, "rollback", run_id, reason=reason, detail=f"to step {step}")
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
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with suppress(FileNotFoundError, shutil.Error):  # removed meanwhile: the check reports it
            shutil.copytree(folder, aside, copy_function=_link, symlinks=True)
        _check_step(run, step)  # the marker goes first, so what was copied while it stood is whole
        yield
    finally:
        if not stable_marker(folder).exists() and stable_marker(aside).exists():
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Hard-link where the disk supports it, since files of a complete checkpoint never change; else copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def set_resume_step(text: str, step: int, note: str) -> str:
    """The text of an `orch.toml` with `ckpt.resume_step = step`, everything else unchanged where possible.

    `note` is appended as a comment: the trainer carries out each text once, so two requests must differ.
    """
    wanted = merge(parse_toml(text, "orch.toml"), {"ckpt": {"resume_step": step}})
    changed = _edited(text, f"resume_step = {step}  # {note}")
    if _parsed(changed) == wanted:
        return changed
    return tomli_w.dumps(wanted) + f"# {note}\n"


def _edited(text: str, line: str) -> str:
    table = _TABLE.search(text)
    if table is None:
        return f"{text.rstrip()}\n\n[ckpt]\n{line}\n"
    end = _NEXT_TABLE.search(text, table.end())
    stop = end.start() if end else len(text)
    body = text[table.end() : stop]
    if _KEY.search(body):
        return text[: table.end()] + _KEY.sub(lambda _: line, body, count=1) + text[stop:]
    return f"{text[: table.end()]}\n{line}{body}{text[stop:]}"


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return parse_toml(text, "orch.toml")
    except ConfigError:
        return None


def _checked_text(output: OutputDir, run: RunDir, step: int) -> str:
    try:
        load_toml(run.orch_toml)  # reports problems of size, encoding and syntax
        note = f"requested at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
        text = set_resume_step((read_text(run.orch_toml, limit=MAX_TOML_BYTES) or ""), step, note)
        problems = find_problems(parse_toml(text, "orch.toml"), "orch.toml", trainer_limits(output.path))
    except ConfigError as error:
        raise ActionError(in_one_line(str(error))) from error
    if problems:
        raise ActionError(in_one_line(f"{run.run_id} would be invalid: {problems[0]}"))
    return text
