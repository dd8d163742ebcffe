"""Change keys of a run's `orch.toml`: `prl runs set`, and the same in the TUI.

While a run has a slot only `LIVE_KEYS` can be set, which trainer and orchestrator read again; otherwise any key. The
file is replaced in one step and keeps its comments where possible, and its time: a run that waits keeps its age.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from daemons import audit
from daemons.actions import trainer_limits, view_of_run
from daemons.errors import ActionError, WrongUseError, in_one_line, one_line_errors
from daemons.in_use import users
from daemons.trash import existing_run
from prime_rl.configs.base import MAX_TOML_BYTES, ConfigError, load_toml, merge, parse_set, parse_toml
from prime_rl.configs.lifetime import LIVE_KEYS
from prime_rl.configs.validate import find_problems
from prime_rl.contract.files import read_text, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.resume import pending_request
from prime_rl.contract.status import RunState

_TABLE = re.compile(r"^[ \t]*\[.*$", re.MULTILINE)
_NULL = "null"


def parse_changes(items: Sequence[str]) -> dict[str, Any]:
    """["weight=2", "tags=a,b", "budget.max_hours=null"] -> a nested mapping; null removes a key. Raises WrongUseError.

    A number without a fraction becomes an integer, so 1e6 is one.
    """
    try:
        return {key: _tidy(key, value) for key, value in parse_set(items).items()}
    except ConfigError as error:
        raise WrongUseError(in_one_line(str(error)).replace("--set: ", "")) from error


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
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"setting keys of {run_id}"):
        run = existing_run(output, run_id)
        _check_live(output, run, changes)
        try:
            before = load_toml(run.orch_toml)
            text = read_text(run.orch_toml, limit=MAX_TOML_BYTES) or ""
            if parse_toml(text, str(run.orch_toml)) != before:
                raise ActionError(f"{run.orch_toml} changed while it was read: try again")
            wanted = _without_nulls(merge(before, changes))
            if wanted == _without_nulls(before):
                return False
            if problems := find_problems(wanted, str(run.orch_toml), trainer_limits(output.path)):
                raise ConfigError(str(run.orch_toml), problems)
        except ConfigError as error:
            raise ActionError(in_one_line(str(error))) from error
        if _is_rolled_back(run, wanted):  # the trainer carries out each text once, and this is another one
            changes = merge(changes, {"ckpt": {"resume_step": None}})
        info = run.orch_toml.stat()
        write_atomic(
            run.orch_toml, edited(text, changes), mode=stat.S_IMODE(info.st_mode), modified_ns=info.st_mtime_ns
        )
        audit.record(output, "set", run_id, reason=reason, detail=" ".join(_pairs(changes)))
        return True


def _check_live(output: OutputDir, run: RunDir, changes: Mapping[str, Any]) -> None:
    others = [name for name in changes if name not in LIVE_KEYS]
    if not others:
        return
    state, used_by = view_of_run(output, run.run_id).state, users(output, run)
    if state is RunState.ACTIVE or used_by:
        raise ActionError(
            f"{run.run_id} is in use: only {', '.join(LIVE_KEYS)} can be set, not {', '.join(others)}; "
            f"pause it first (prl runs pause {run.run_id})"
        )


def _is_rolled_back(run: RunDir, data: Mapping[str, Any]) -> bool:
    """Whether the config asks for a checkpoint to go back to, and the trainer has done that."""
    ckpt = data.get("ckpt")
    step = ckpt.get("resume_step", -1) if isinstance(ckpt, Mapping) else -1
    return isinstance(step, int) and step >= 0 and pending_request(run, step) is None


def edited(text: str, changes: Mapping[str, Any]) -> str:
    """The text of a TOML file with `changes`, everything else unchanged where possible; else without its comments."""
    wanted = _without_nulls(merge(parse_toml(text, "orch.toml"), changes))
    changed = text
    for table, key, value in _leaves(changes):
        changed = _edit(changed, table, key, value)
    try:
        if _without_nulls(parse_toml(changed, "orch.toml")) == wanted:
            return changed
    except ConfigError:  # a value over several lines, an inline table
        pass
    return tomli_w.dumps(wanted)


def _edit(text: str, table: str, key: str, value: Any) -> str:
    """Replace, add or remove (null) the line of one key."""
    line = "" if value is None else f"{key} = {_toml(value)}"
    start, stop = _section(text, table)
    if start < 0:
        return f"{text.rstrip()}\n\n[{table}]\n{line}\n" if line else text
    body = text[start:stop]
    found = re.search(rf"^[ \t]*{re.escape(key)}[ \t]*=(.*)\n?", body, re.MULTILINE)
    if found:
        old, _, comment = found[1].partition("#")
        kept = f"  #{comment}" if comment and not old.count('"') % 2 else ""
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
    found = {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in data.items()
        if value is not None
    }
    return {key: value for key, value in found.items() if value != {}}
