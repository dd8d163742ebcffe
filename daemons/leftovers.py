"""Daemons that a dead supervisor left running: found by its records and by their marks, then kept or ended.

The launcher tells which recorded daemons live. One that lives, and would be started today with the same command and the
same config, is kept: the next supervisor adopts it, so that weeks of training do not end because their supervisor did.
All others are ended before anything new is started, so a workspace never has twins. Needs the workspace's lock; starts
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from daemons.daemon import Daemon, State
from daemons.launchers.base import Handle, Launcher
from daemons.specs import (
    INFERENCE,
    MONITORS,
    OPTIONAL,
    TRAINER,
    DaemonSpec,
    component_texts,
    kind_of,
    monitors_spec,
    orchestrator_spec,
    service_specs,
)
from daemons.workspace import SUPERVISOR
from prime_rl.configs.system import SupervisorConfig, SystemConfig
from prime_rl.contract.files import read_text, write_atomic
from prime_rl.contract.layout import LayoutError, OutputDir
from prime_rl.contract.status import Crash, DaemonStatus, read_status
from prime_rl.utils.process import ProcessId

_ADOPTED_AS = {"starting": State.STARTING, "running": State.RUNNING, "stalled": State.RUNNING}


@dataclass(frozen=True)
class Past:
    """An earlier supervisor's record of a daemon."""

    crashes: tuple[Crash, ...]
    log_tail: list[str]


def recorded(output: OutputDir) -> dict[str, DaemonStatus]:
    """The daemons as the last supervisor recorded them, by name."""
    found = {}
    for path in sorted(output.daemons.glob("*.json")):
        status = read_status(path, DaemonStatus)
        if status is not None and path.stem == status.name and status.name != SUPERVISOR:
            found[status.name] = status
    return found


def living(output: OutputDir, launcher: Launcher) -> dict[str, Handle]:
    """The daemons that live, by name."""
    return {name: handle for name, status in recorded(output).items() if (handle := launcher.adopt(status))}


def adoptable(
    output: OutputDir,
    launcher: Launcher,
    system: SystemConfig,
    moved: Collection[str] = (),
) -> set[str]:
    """Daemons that live and would be started today just as they were; not those that `moved` to other devices."""
    texts = component_texts(system, output)
    configs = {*texts, *OPTIONAL}  # also of what the system file no longer asks for
    changed = {*moved, *(name for name in configs if read_text(output.component_config(name)) != texts.get(name))}
    statuses = recorded(output)
    return {
        name
        for name in living(output, launcher)
        if kind_of(name) not in changed
        and statuses[name].state in _ADOPTED_AS
        and (spec := _spec(output, name, system)) is not None
        and list(spec.argv) == statuses[name].argv
    }


def adopt(output: OutputDir, launcher: Launcher) -> tuple[dict[str, Daemon], dict[str, Past]]:
    """For a new supervisor: the daemons that live, and what is remembered of all."""
    daemons, pasts = {}, {}
    for name, status in recorded(output).items():
        pasts[name] = Past(tuple(status.crashes), status.log_tail)
        handle, spec = launcher.adopt(status), _spec(output, name)
        if handle is not None and spec is not None and status.state in _ADOPTED_AS:
            daemons[name] = Daemon(
                spec,
                _ADOPTED_AS[status.state],
                handle,
                status.child,
                started_at=handle.create_time or status.started_at or 0.0,
                num_restarts=status.num_restarts,
                crashes=tuple(status.crashes),
            )
    return daemons, pasts


def end_leftovers(
    output: OutputDir,
    launcher: Launcher,
    limits: SupervisorConfig,
    say: Callable[[str], None],
    keep: Collection[str] = (),
) -> list[int]:
    """End all daemons but those to `keep`, in order; returns the pids that could not be ended."""
    left: set[ProcessId] = set()
    alive = {name: handle for name, handle in living(output, launcher).items() if name not in keep}
    services = (TRAINER, MONITORS, INFERENCE)
    kinds = {name: kind_of(name) for name in alive}
    for group in (set(kinds.values()) - set(services), {TRAINER}, {MONITORS}, {INFERENCE}):
        handles = [alive[name] for name in sorted(alive) if kinds[name] in group]
        if handles:
            say("ending " + ", ".join(f"{each.name} ({each.ref})" for each in handles))
            drain_s = limits.grace_s if group == {INFERENCE} else limits.drain_s
            left |= launcher.end(handles, limits.grace_s, drain_s, _nothing)
    strays = launcher.strays(keep)
    if strays:
        say(f"ending processes {sorted(each.pid for each in strays)} that outlived their daemons")
        left |= launcher.kill(strays, _nothing)
    _write_stopped(output, recorded(output), keep)
    return sorted(each.pid for each in left)


def _nothing() -> None:
    """While daemons end here, there is nothing else to do."""


def is_anything_left(output: OutputDir, launcher: Launcher) -> bool:
    """Whether a daemon of the workspace lives, or a process that outlived its daemon."""
    return bool(living(output, launcher) or launcher.strays())


def _write_stopped(output: OutputDir, statuses: Mapping[str, DaemonStatus], keep: Collection[str]) -> None:
    """Record, in place of the dead supervisor, that its daemons have ended and are no longer supervised."""
    supervisor = read_status(output.daemon_status(SUPERVISOR), DaemonStatus)
    everybody = [*statuses.values(), *([supervisor] if supervisor else [])]
    for status in everybody:
        if status.name not in keep and status.state not in ("stopped", "failed", "done"):
            status.state, status.child, status.handle, status.waiting_on = "stopped", None, None, None
            status.updated_at = time.time()
            write_atomic(output.daemon_status(status.name), msgspec.json.encode(status))


def forget_endings(output: OutputDir, keep: Collection[str]) -> None:
    """Before a start: failed and finished daemons may start again; the records of their crashes stay."""
    for path in output.daemons.glob("*.json"):
        status = read_status(path, DaemonStatus)
        if path.stem in keep:
            continue
        if status is None or status.name == SUPERVISOR or _spec(output, status.name) is None or not status.crashes:
            path.unlink(missing_ok=True)
        else:
            status.state, status.reason = "stopped", None
            write_atomic(path, msgspec.json.encode(status))


def _spec(output: OutputDir, name: str, system: SystemConfig | None = None) -> DaemonSpec | None:
    """How the daemon is started, or None if it is not a daemon (any more). Default: by the system of the last start."""
    if name == MONITORS:
        return monitors_spec(output, system)
    for spec in service_specs(output, system):
        if spec.name == name:
            return spec
    try:
        run = output.run(name)
    except LayoutError:
        return None
    return orchestrator_spec(run, system) if run.path.is_dir() else None
