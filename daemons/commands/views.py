"""How a `Workspace` is printed: tables for people, plain data for `--json`. Reads no file."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from daemons.commands.common import FittingTable, cell, number, short_time
from daemons.disk import DiskView
from daemons.pidfile import SupervisorInfo
from daemons.workspace import DaemonView, RunView, Workspace
from prime_rl.configs.base import ConfigError, ConfigProblem, load_toml, merge
from prime_rl.configs.validate import key_of
from prime_rl.contract.condition import STALLED
from prime_rl.contract.status import InferenceStatus, RunState
from prime_rl.utils.text import one_line, size_text

_STYLES = {
    RunState.ACTIVE: "green",
    RunState.WAITING: "yellow",
    RunState.FINISHED: "cyan",
    RunState.FAILED: "red",
    RunState.INVALID: "red",
    RunState.EVICTED: "magenta",
    RunState.PAUSED: "blue",
    RunState.STOPPED: "dim",
}
NO_RUNS = "no runs yet: add one with prl runs add FILE.toml"
_DAEMON_STYLES = {"running": "green", "done": "cyan", "failed": "red", "lost": "red", "stalled": "yellow"}


def run_json(run: RunView) -> dict[str, Any]:
    """One run in every --json: all fields of its view, its state as text."""
    return {**asdict(run), "state": str(run.state)}


def problem_json(file: Path, problem: ConfigProblem, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """One problem of a run's config: `found` is the value in the file (with the overrides), null when it is missing."""
    key = key_of(problem)
    try:
        found: Any = merge(load_toml(file), overrides or {})
    except ConfigError:
        found = None
    for part in key.split("."):
        try:
            found = found[int(part)] if isinstance(found, list) else found[part] if isinstance(found, dict) else None
        except (KeyError, IndexError, ValueError):
            found = None
    words = problem.message.removeprefix(f"{key.rpartition('.')[2]}: ").removeprefix(f"{key}: ")
    allowed = re.sub(r"^found .*?[:,] (?=\S)", "", words, count=1) if words.startswith("found ") else words
    return {
        "file": str(file),
        "line": problem.line,
        "key": key or None,
        "found": found if key else None,
        "allowed": allowed,
        "message": str(problem),
    }


def state_text(run: RunView) -> str:
    """The run's state as people read it: one whose orchestrator is stalled is not active."""
    return str(run.state) if run.stalled_since is None else STALLED


def workspace_json(workspace: Workspace, disk: DiskView | None) -> dict[str, Any]:
    """The payload of `prl status --json`."""
    return {
        "output_dir": str(workspace.output_dir),
        "supervisor_alive": workspace.supervisor_alive,
        "daemons": [asdict(daemon) for daemon in workspace.daemons],
        "slots": slots(workspace),
        "runs": [run_json(run) for run in workspace.runs],
        "refused": [asdict(each) for each in workspace.refused],
        "disk": disk_json(disk) if disk else None,
        "bottleneck": workspace.bottleneck,
        "inference": [replica_json(number, status) for number, status in workspace.replicas],
    }


def replica_json(number: int, status: InferenceStatus) -> dict[str, Any]:
    """One inference server that lives."""
    return {
        "replica": number,
        "state": one_line(status.state),
        "base_url": one_line(status.base_url),
        "num_running": status.num_running,
        "num_waiting": status.num_waiting,
        "tokens_per_s": status.tokens_per_s,
        "kv_use": status.kv_use,
        "adapters": [one_line(name) for name in status.adapters],
    }


def disk_json(disk: DiskView) -> dict[str, Any]:
    """`house_*` are the names of the previous version."""
    return {**asdict(disk), "house_bytes": disk.workspace_bytes, "house_complete": disk.workspace_complete}


def slots(workspace: Workspace) -> list[dict[str, Any]]:
    """One entry per slot, also for empty ones."""
    held = {slot.run_idx: run_id for run_id, slot in (workspace.trainer.runs if workspace.trainer else {}).items()}
    return [{"run_idx": run_idx, "run_id": held.get(run_idx)} for run_idx in range(workspace.max_runs)]


def runs_table(runs: Sequence[RunView], now: float | None = None, *, none: str = NO_RUNS) -> RenderableType:
    """A line per run; without runs the words `none`. `now` in Unix seconds; None: the time of the call."""
    now = time.time() if now is None else now
    if not runs:
        return cell(none, 1_000)
    rows = [
        [
            cell(run.run_id, 70),
            Text(state_text(run), style=_STYLES[run.state] if run.stalled_since is None else "yellow"),
            _place(run),
            f"{run.step}/{run.max_steps if run.max_steps is not None else '?'}",
            number(run.reward),
            number(run.tokens_per_s, 0),
            "" if run.async_level is None else run.async_level,
            short_time(None if run.added_at is None else now - run.added_at),
            cell(run.why),
        ]
        for run in runs
    ]
    columns = ["run", "state", "slot", "step", "reward", "tokens/s", "lag", "age", "why"]
    return FittingTable(columns, rows, ("lag", "age", "tokens/s", "slot", "reward", "why"))


def _place(run: RunView) -> str:
    if run.run_idx is not None:
        return str(run.run_idx)
    return f"queue {run.queue_position}" if run.queue_position is not None else ""


def daemons_table(daemons: Sequence[DaemonView]) -> RenderableType:
    """A line per daemon; the last column has the reason of its state, or what it waits for."""
    rows = [
        [
            cell(daemon.name, 70),
            Text(daemon.state, style=_DAEMON_STYLES.get(daemon.state, "")),
            daemon.pid or "",
            daemon.num_restarts or "",
            cell(daemon.reason or (f"waits for {daemon.waiting_on}" if daemon.waiting_on else None)),
        ]
        for daemon in daemons
    ]
    return FittingTable(["daemon", "state", "pid", "restarts", "why"], rows, ("restarts", "pid", "why"))


def disk_text(disk: DiskView) -> str:
    """Such as "the workspace takes 1.2 GiB, 30.0 GiB of 80.0 GiB free (ext4)"."""
    least = "" if disk.workspace_complete else "at least "
    free = f"{size_text(disk.free_bytes)} of {size_text(disk.total_bytes)} free"
    words = f"the workspace takes {least}{size_text(disk.workspace_bytes)}, {free}"
    words += f" ({disk.file_system})" if disk.file_system else ""
    return words + (f", full in {short_time(disk.full_in_s)} at this rate" if disk.full_in_s else "")


def workspace_view(workspace: Workspace, disk: DiskView | None, holder: SupervisorInfo | None = None) -> RenderableType:
    """What `prl status` prints. `holder`: who has the workspace's lock, by the pid file."""
    parts: list[RenderableType] = []
    if workspace.daemons:
        parts += [daemons_table(workspace.daemons), Text("")]
    elif holder is not None and holder.lives_here():
        words = f"prl up is preparing ({holder}): it may have to build a base model, then it starts the daemons"
        parts.append(cell(words, 1_000))
    else:
        parts.append(Text("nothing is running: start the workspace with prl up"))
    used = (
        f"{workspace.num_used} of {workspace.max_runs} slots in use"
        if workspace.max_runs
        else "slots unknown: the trainer is not running"
    )
    parts += [cell(f"{workspace.output_dir}: {used}", 1_000), runs_table(workspace.runs)]
    parts += [Text(f"refused: {each.name}: ").append_text(cell(each.reason, 300)) for each in workspace.refused]
    if disk is not None:
        parts.append(Text(f"disk: {disk_text(disk)}"))
    if workspace.bottleneck:
        parts.append(Text("bottleneck: ").append_text(cell(workspace.bottleneck, 300)))
    return Group(*parts)
