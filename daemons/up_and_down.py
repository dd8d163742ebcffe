"""A workspace goes up and down, and one daemon restarts: what `prl up`, `down` and `restart` do, and `prl-tui` too.

`choose_system` decides which workspace is meant, `start_workspace` starts it and waits until everything answers: here
with a supervisor process (`starting`), or as a Slurm job (`submit`). They report progress through `say`; nothing here
prints.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from daemons import starting, stopping
from daemons.auto_limits import settle_slots
from daemons.errors import ActionError, WrongUseError
from daemons.extras import need_daemons
from daemons.launchers.base import LaunchError
from daemons.pidfile import SupervisorLock
from daemons.specs import UP, saved_system
from daemons.starting import LOOK_EVERY_S, Look, Say
from daemons.starting import waits as waits
from daemons.submit import end_job, has_job, is_for_a_job, start_job
from daemons.workspace import SUPERVISOR, Workspace
from daemons.workspace_reader import WorkspaceReader, read_workspace
from prime_rl.configs import EXAMPLES
from prime_rl.configs.base import build, load_toml, merge, read_argv
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.condition import STALLED
from prime_rl.contract.files import WaitTimeout, wait_for, write_atomic
from prime_rl.contract.layout import RUN_PREFIX, OutputDir

# On top of the time in which a daemon may finish and save, and all of it may need the grace.
RESTART_MARGIN_S = 15.0


@dataclass(frozen=True)
class Wanted:
    """The request of `prl up`. `said` is kept for the next start; `is_small`: neither a file nor a model was given."""

    system: SystemConfig
    said: Mapping[str, Any]
    is_small: bool


def choose_system(
    args: Sequence[str], output_dir: Path | None, *, say: Say, default: Callable[[], Path] = Path.cwd
) -> Wanted:
    """The system config that a command line describes; `default()` is its workspace if none is given.

    Raises ConfigError.
    """
    data, source = read_argv(args)
    chosen = output_dir or os.environ.get("PRL_OUTPUT_DIR")
    small = False
    if not any(arg.startswith("@") for arg in args) and "model" not in data:
        chosen = chosen or data.get("output_dir") or default()
        base, source, small = _without_a_file(Path(str(chosen)), say)
        data = merge(base, data)
    if chosen:
        place = {"output_dir": str(chosen)}
        data = merge(data, {**place, "trainer": place, "inference": place})
    return Wanted(build(SystemConfig, data, source), data, small)


def start_workspace(
    wanted: Wanted, *, stop: Callable[[], bool], say: Say, on_look: Look, is_quiet: bool = False
) -> Workspace | None:
    """Start the daemons and wait until all of them answer; if `stop()` comes first, end them and return None.

    `is_quiet`: children print no progress on our terminal. Raises LaunchError and ActionError.
    """
    output = OutputDir(wanted.system.output_dir)
    if is_for_a_job(wanted.system):
        need_daemons(wanted.system)
        is_up = start_job(wanted.system, wanted.said, output, stop=stop, say=say, on_look=on_look)
        return read_workspace(output.path) if is_up else None
    ready = make_ready(wanted, output, stop=stop, say=say, is_quiet=is_quiet)
    if ready is None:
        return None
    child = starting.start_supervisor(output, take_workspace(ready, output, say))
    try:
        answers = starting.wait_until_ready(ready.system, output, child, stop=stop, on_look=on_look)
    except LaunchError:
        stopping.down(output, timeout_s=None, say=say, supervisor=child)
        raise
    if not answers:
        stopping.down(output, timeout_s=None, say=say, supervisor=child)
        return None
    _reap(child)
    return read_workspace(output.path)


def make_ready(
    wanted: Wanted, output: OutputDir, *, stop: Callable[[], bool], say: Say, is_quiet: bool
) -> Wanted | None:
    """Make the small workspace's base model when it is missing, and settle its slots; None when `stop()` came first.

    Raises LaunchError, and ActionError without what the daemons need.
    """
    need_daemons(wanted.system)
    if wanted.is_small:
        _make_model(wanted.system.model.name, output, stop, say, is_quiet)
        if stop():
            return None
    system = settle_slots(wanted.system, output, stop=stop, say=say)
    return replace(wanted, system=system) if system else None


def take_workspace(wanted: Wanted, output: OutputDir, say: Say) -> SupervisorLock:
    """Check and prepare the workspace and save its settings; returns its lock. Raises LaunchError."""
    lock = starting.prepare(wanted.system, output, say)
    write_atomic(output.component_config(UP), tomli_w.dumps(wanted.said))
    return lock


def stop_workspace(output_dir: Path, *, timeout_s: float | None = None, say: Say) -> bool:
    """Stop all daemons and check that none is left; false when nothing was running. Raises LaunchError."""
    output = OutputDir(output_dir)
    limit_s = stopping.down_timeout_s(saved_system(output).supervisor) if timeout_s is None else timeout_s
    had_job = has_job(output) and end_job(output, limit_s, say)
    return stopping.down(output, timeout_s=timeout_s, say=say) or had_job


def restart_daemon(
    output_dir: Path,
    name: str,
    *,
    say: Say,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Restart one daemon and wait until it has started. Raises ActionError."""
    output = OutputDir(output_dir)
    reader = WorkspaceReader(output.path)
    workspace = reader.read()
    daemon = workspace.daemon(name)
    if not workspace.supervisor_alive:
        raise ActionError(f"nothing is running in {output.path}: start the workspace with prl up")
    supervisor = workspace.daemon(SUPERVISOR)
    if supervisor is not None and supervisor.state == STALLED:
        raise ActionError(
            f"the supervisor is stalled: {supervisor.reason}; end it with prl down, then start with prl up"
        )
    if daemon is None or name == SUPERVISOR:
        known = ", ".join(each.name for each in workspace.daemons if each.name != SUPERVISOR)
        raise WrongUseError(f"daemon {name!r} not found; running here: {known}")
    if daemon.state == "done":
        remedy = f": continue it with prl runs readmit {name}" if name.startswith(RUN_PREFIX) else ""
        raise ActionError(f"{name} has ended ({daemon.reason}){remedy}")
    write_atomic(output.start_request(name), "restart")
    limits = saved_system(output).supervisor
    say(f"waiting for {name} to restart; first it may finish and save, for up to {limits.drain_s:g} s")

    def new() -> bool:
        now = reader.read().daemon(name)
        return now is not None and now.pid not in (None, daemon.pid) and now.state in ("starting", "running")

    try:
        timeout_s = limits.drain_s + limits.grace_s + RESTART_MARGIN_S
        wait_for(new, f"{name} to restart", timeout_s=timeout_s, poll_s=LOOK_EVERY_S, clock=clock, sleep=sleep)
    except WaitTimeout as error:
        raise ActionError(
            f"{error} (supervisor.drain_s = {limits.drain_s:g} to finish, grace_s = {limits.grace_s:g} to end); "
            "prl status shows what it waits for"
        ) from error


def last_start(output_dir: Path) -> Path | None:
    """The file with the workspace's last settings; None when it was never started."""
    path = OutputDir(output_dir).component_config(UP)
    return path if path.is_file() else None


def _without_a_file(output_dir: Path, say: Say) -> tuple[dict[str, Any], str, bool]:
    """(values, their source, whether it is the small workspace)."""
    last = last_start(output_dir)
    if last is not None:
        say(f"no system file given: starting {output_dir} with its last settings ({last})")
        return load_toml(last), str(last), False
    small = EXAMPLES / "demo" / "system.toml"
    say(f"no system file given: starting a small workspace on this machine's CPU, as in {_short(small)}")
    return load_toml(small), str(small), True


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _make_model(name: str, output: OutputDir, stop: Callable[[], bool], say: Say, is_quiet: bool) -> None:
    """Under the workspace's lock, so that `prl status` and `prl down` find who is at work here.

    Not in the console (`is_quiet`), which `prl down` would end. Where another process has the lock nothing is made, and
    `starting.prepare` names it. Raises LaunchError.
    """
    from daemons.base_model import make_base_model

    starting.check_writable(output)
    if (lock := SupervisorLock.acquire(output)) is None:
        return
    try:
        stopping.refuse_rival(output)
        if not is_quiet:
            lock.write_info(time.time())
            make_base_model(name, stop, say, is_quiet=False)
    finally:
        lock.release()
    if is_quiet:
        make_base_model(name, stop, say, is_quiet=True)


def _reap(child: subprocess.Popen[bytes]) -> None:
    """The supervisor outlives us; if it ends first, it must not stay behind as a zombie."""
    threading.Thread(target=child.wait, name="reap the supervisor", daemon=True).start()
