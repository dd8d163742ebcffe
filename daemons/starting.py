"""A workspace starts on this machine: checks first, one supervisor process, and a wait until everything answers.

A supervisor that was killed leaves its daemons running; `leftovers` decides which of them the next one may keep. What
people ask for, and a Slurm job's supervisor, is `up_and_down`; the end is `stopping`.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence

from daemons.base_model import check_model
from daemons.keys import all_keys
from daemons.launchers import launcher_of
from daemons.launchers.base import LaunchError
from daemons.leftovers import adoptable, end_leftovers, forget_endings
from daemons.pidfile import SupervisorLock, read_info
from daemons.process import log_tail, python_module, spawn
from daemons.specs import (
    INFERENCE,
    MONITORS,
    MOVED_BY_DEVICES,
    REMOVED_VARIABLES,
    TRAINER,
    save_devices,
    saved_devices,
    saved_system,
    settle_devices,
    write_component_configs,
)
from daemons.stopping import refuse_rival
from daemons.workspace import SUPERVISOR, Workspace, replica_name
from daemons.workspace_reader import WorkspaceReader
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.network import bound_socket

Say = Callable[[str], None]
Look = Callable[[Workspace], None]

NUM_LOG_LINES = 20
LOOK_EVERY_S = 0.25
_HEALTH_TIMEOUT_S = 2.0


def prepare(system: SystemConfig, output: OutputDir, say: Say) -> SupervisorLock:
    """Check that the workspace can start, end what an earlier supervisor left, write the configs; returns the lock.

    Raises LaunchError.
    """
    check_writable(output)
    refuse_removed(os.environ)
    output = OutputDir(output.path.resolve())  # as in the command lines of what runs
    lock = SupervisorLock.acquire(output)
    if lock is None:
        info = read_info(output)
        holder = info or f"another process holds {output.supervisor_lock}"
        raise LaunchError(f"already running: {holder}; stop it with prl down")
    try:
        refuse_rival(output)
        lock.write_info(time.time())
        check_model(system.model.name)
        _check_alerts(system)
        before = saved_devices(output)
        devices = settle_devices(before, os.environ, say)
        last = saved_system(output).deployment
        launcher = launcher_of(last, output)
        is_same = last.engine == system.deployment.engine
        keep = (
            adoptable(output, launcher, system, MOVED_BY_DEVICES if devices != before else ())
            if is_same
            else set[str]()
        )
        left = end_leftovers(output, launcher, system.supervisor, say, keep)
        if left:
            raise LaunchError(f"cannot end processes {left} of an earlier start: end them, then try again")
        if keep:
            say(f"keeping {', '.join(sorted(keep))}: already running with the same config")
        for number in range(system.deployment.inference.replicas):
            name, port = replica_name(number), system.inference.port
            if name not in keep:
                _check_port(name, "--inference.port", system.inference.host, port + number if port else 0)
        if MONITORS not in keep and system.monitors.prometheus is not None:
            _check_port(MONITORS, "--monitors.prometheus.port", "127.0.0.1", system.monitors.prometheus.port)
        forget_endings(output, keep)
        write_component_configs(system, output)
        save_devices(output, devices)
        output.logs.mkdir(exist_ok=True)
    except BaseException:
        lock.release()
        raise
    return lock


def refuse_removed(environ: Mapping[str, str]) -> None:
    """A variable of an earlier version would be ignored, and daemons started in another place. Raises LaunchError."""
    for name, place in REMOVED_VARIABLES.items():
        if environ.get(name):
            raise LaunchError(
                f"{name} is not read any more: set {place} in the system file (docs/deploy.md), and unset it"
            )


def _check_alerts(system: SystemConfig) -> None:
    """A target that cannot be used is known before anything runs."""
    if system.alerts is None:
        return
    from daemons.alerts.targets import TargetError, dead_man, message_targets

    try:
        message_targets(system.alerts, os.environ)
        dead_man(system.alerts, os.environ)
    except TargetError as error:
        raise LaunchError(f"[alerts]: {error}") from error


def start_supervisor(output: OutputDir, lock: SupervisorLock) -> subprocess.Popen[bytes]:
    """Start the supervisor in its own session and give it the lock."""
    argv = python_module("daemons.supervisor", str(output.path.resolve()), str(lock.fd))
    try:
        log, keys = output.log(SUPERVISOR), all_keys(output)
        child = spawn(argv, log, output.path, SUPERVISOR, pass_fds=[lock.fd], keys=keys)
    finally:
        lock.hand_over()
    return child


def wait_until_ready(
    system: SystemConfig,
    output: OutputDir,
    supervisor: subprocess.Popen[bytes],
    *,
    stop: Callable[[], bool],
    on_look: Look,
) -> bool:
    """Wait until inference answers and the trainer waits or trains; false when `stop()` came first.

    Raises LaunchError with the log's last lines when a daemon or the supervisor fails.
    """
    reader = WorkspaceReader(output.path)
    limits = system.supervisor
    deadline = time.monotonic() + limits.start_timeout_s + limits.grace_s + 30.0
    while not stop():
        workspace = reader.read()
        on_look(workspace)
        if supervisor.poll() is not None:
            raise LaunchError(with_log(f"the supervisor ended with code {supervisor.returncode}", output, SUPERVISOR))
        for name in (INFERENCE, TRAINER):
            daemon = workspace.daemon(name)
            if daemon is not None and daemon.state in ("backoff", "failed"):
                raise LaunchError(with_log(f"{name} did not start: {daemon.reason}", output, name, daemon.log_tail))
        if is_ready(workspace):
            return True
        if time.monotonic() > deadline:
            raise LaunchError(
                f"not ready in time; {' '.join(waits(workspace))}: see prl logs trainer and prl logs inference"
            )
        time.sleep(LOOK_EVERY_S)
    return False


def is_ready(workspace: Workspace) -> bool:
    """Whether the supervisor watches and has recorded both, the trainer waits or trains, inference really answers."""
    return (
        workspace.supervisor_alive
        and all(workspace.daemon(name) is not None for name in (INFERENCE, TRAINER))
        and workspace.trainer is not None
        and workspace.trainer.state in ("waiting", "training")
        and workspace.inference is not None
        and workspace.inference.state == "serving"
        and answers(workspace.inference.base_url)
    )


def answers(base_url: str) -> bool:
    """Whether the server's `/health` returns 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(base_url.removesuffix("/v1") + "/health", timeout=_HEALTH_TIMEOUT_S) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False


def waits(workspace: Workspace) -> list[str]:
    """One sentence for each service: its state and what it waits for."""
    words = []
    for name in (INFERENCE, TRAINER):
        daemon = workspace.daemon(name)
        state = daemon.state if daemon else "not started yet"
        what = (f"waits for {daemon.waiting_on}" if daemon.waiting_on else daemon.reason) if daemon else None
        words.append(f"{name}: {state}" + (f" ({what})" if what else ""))
    return words


def with_log(message: str, output: OutputDir, name: str, kept: Sequence[str] = ()) -> str:
    """`kept` are the last lines of a start that ended; the log itself may be that of the next one by now."""
    if kept:
        return "\n".join([f"{message}; last lines of its log, in {output.logs}:", *kept])
    where, tail = output.log(name), log_tail(output.log(name), NUM_LOG_LINES)
    return "\n".join([f"{message}; last lines of {where}:", *tail]) if tail else f"{message}; {where} is empty"


def check_writable(output: OutputDir) -> None:
    """Make the folder of the workspace and try to write there. Raises LaunchError."""
    try:
        output.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.path):
            pass
    except OSError as error:
        raise LaunchError(
            f"cannot write to workspace {output.path}: {error.strerror}; choose another with --output-dir"
        ) from error


def _check_port(daemon: str, flag: str, host: str, port: int) -> None:
    if port == 0:
        return
    try:
        bound_socket(host, port).close()
    except OSError as error:
        raise LaunchError(
            f"{daemon} cannot listen on {host}:{port}: {error.strerror}; choose another port with {flag} N "
            "(0 takes a free one)"
        ) from error
