"""`daemons/<name>.json`: the supervisor's records of its daemons, read by all; what the next supervisor makes of them.

Written at every change and every heartbeat; an unchanged file is renewed without waiting for the disk. The supervisor
itself has its own status file.

Daemons that a dead supervisor left running are found by its records and by their marks. One that lives, and would be
started today with the same command and the same config, is kept: the next supervisor adopts it, so that weeks of
training do not end because their supervisor did. All others are ended before anything new is started, so a workspace
never has twins. That needs the workspace's lock; nothing here starts a daemon.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from daemons.decide import LIVE, Daemon, State
from daemons.launchers.base import Handle, Launcher
from daemons.specs import (
    GATEWAY,
    INFERENCE,
    MONITORS,
    OPTIONAL,
    TRAINER,
    WHERE_NEEDED,
    DaemonSpec,
    component_texts,
    gateway_spec,
    kind_of,
    monitors_spec,
    orchestrator_spec,
    service_specs,
)
from daemons.workspace import SUPERVISOR
from prime_rl.configs.system import SupervisorConfig, SystemConfig
from prime_rl.contract.files import read_text, write_atomic
from prime_rl.contract.layout import LayoutError, OutputDir
from prime_rl.contract.status import HEARTBEAT_S, DaemonStatus, read_status
from prime_rl.utils.process import ProcessId, boot_id

_ADOPTED_AS = {"starting": State.STARTING, "running": State.RUNNING, "stalled": State.RUNNING}


class Records:
    """Writes the records of one supervisor, each when it has changed or its heartbeat is due.

    Args:
        clock: seconds that never jump.
    """

    def __init__(self, output: OutputDir, clock: Callable[[], float]) -> None:
        self._output = output
        self._clock = clock
        self._tails: dict[str, list[str]] = {}
        self._written: dict[str, tuple[float, Daemon]] = {}
        self._writer = ProcessId.of(os.getpid())
        self._host, self._boot_id = socket.gethostname(), boot_id()

    def keep_tail(self, name: str, lines: list[str]) -> None:
        """The last lines of a daemon's log before it ended."""
        self._tails[name] = lines

    def forget(self, name: str) -> None:
        """Remove the record of a daemon, with its file if there is one."""
        self._tails.pop(name, None)
        self._written.pop(name, None)
        self._output.daemon_status(name).unlink(missing_ok=True)

    def write(self, daemons: Mapping[str, Daemon], *, stopped: bool = False) -> None:
        """Write one file per daemon. `stopped`: they are no longer supervised.

        Tries all of them, then raises the first OSError.
        """
        now = self._clock()
        trouble: OSError | None = None
        for name, daemon in daemons.items():
            last = self._written.get(name)
            changed = stopped or last is None or last[1] != daemon
            if not changed and last is not None and now - last[0] < HEARTBEAT_S:
                continue
            status = self._status(daemon)
            if stopped and (daemon.state in LIVE or daemon.state is State.BACKOFF):
                status.state, status.child, status.handle = "stopped", None, None
                status.waiting_on, status.reason = None, None
            try:
                write_atomic(self._output.daemon_status(name), msgspec.json.encode(status), durable=changed)
                self._written[name] = (now, daemon)
            except OSError as error:  # a file that cannot be written costs the others nothing
                trouble = error
        if trouble is not None:
            raise trouble

    def _status(self, daemon: Daemon) -> DaemonStatus:
        state = daemon.state
        if state is State.STOPPING:  # for readers it still runs, or is still stalled
            state = State.RUNNING if daemon.stalled_since is None else State.STALLED
        status = DaemonStatus(
            name=daemon.spec.name,
            state=str(state),
            updated_at=time.time(),  # readers compare it with their clock
            waiting_on=daemon.waiting_on,
            argv=list(daemon.spec.argv),
            num_restarts=daemon.num_restarts,
            exit_code=daemon.exit_code,
            reason=daemon.reason,
            log_tail=self._tails.get(daemon.spec.name, []),
            started_at=daemon.started_at,
            stalled_since=daemon.stalled_since,
            crashes=list(daemon.crashes),
            host=self._host,
            boot_id=self._boot_id,
        )
        status.sign(self._writer)
        status.child = daemon.process
        status.handle = daemon.handle if daemon.state in LIVE else None
        return status


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


def adopt(output: OutputDir, launcher: Launcher) -> tuple[dict[str, Daemon], dict[str, DaemonStatus]]:
    """For a new supervisor: the daemons that live, and the records of all."""
    daemons, pasts = {}, recorded(output)
    for name, status in pasts.items():
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
    services = (TRAINER, MONITORS, GATEWAY, INFERENCE)
    kinds = {name: kind_of(name) for name in alive}
    for group in (set(kinds.values()) - set(services), *({name} for name in services)):
        handles = [alive[name] for name in sorted(alive) if kinds[name] in group]
        if handles:
            say("ending " + ", ".join(f"{each.name} ({each.ref})" for each in handles))
            drain_s = limits.grace_s if group == {INFERENCE} else limits.drain_s
            left |= launcher.end(handles, limits.grace_s, drain_s, lambda: None)
    strays = launcher.strays(keep)
    if strays:
        say(f"ending processes {sorted(each.pid for each in strays)} that outlived their daemons")
        left |= launcher.kill(strays, lambda: None)
    try:
        _write_stopped(output, recorded(output), keep)
    except OSError as error:  # a full disk: they have ended nevertheless
        say(f"cannot record in {output.daemons} that they have ended: {error.strerror}")
    return sorted(each.pid for each in left)


def is_anything_left(output: OutputDir, launcher: Launcher) -> bool:
    """True when a daemon of the workspace lives, or a process that outlived its daemon."""
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
    """The spec of the daemon, or None if it is not a daemon (any more). Default: by the system of the last start."""
    if name in WHERE_NEEDED:
        return (monitors_spec if name == MONITORS else gateway_spec)(output, system)
    for spec in service_specs(output, system):
        if spec.name == name:
            return spec
    try:
        run = output.run(name)
    except LayoutError:
        return None
    return orchestrator_spec(run, system) if run.path.is_dir() else None
