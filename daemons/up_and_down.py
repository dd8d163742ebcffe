"""A workspace goes up and down, and one daemon restarts: what `prl up`, `down` and `restart` do, and `prl-tui` too.

`choose_system` decides which workspace is meant, `start_workspace` starts it and waits until everything answers: here
with a supervisor (`supervisor_process`), or as a Slurm job (`submit`). They report progress through `say`; nothing here
prints.

`max_concurrent_runs = "auto"`, and vLLM's share of a GPU that the trainer uses too, are worked out when it is brought
up. The numbers stand in the saved system file as if they had been set there, and a later `prl up` takes them from
there, unless something that decides them has changed. `prime_rl.trainer.fit` answers, in a process of its own, as it
loads torch.
"""

from __future__ import annotations

import json
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from daemons import supervisor_process
from daemons.errors import ActionError, WrongUseError, need_daemons
from daemons.launchers.base import LaunchError
from daemons.pidfile import SupervisorInfo, SupervisorLock, read_info
from daemons.process import DEVICES_VARIABLE, python_module, run_child
from daemons.specs import (
    FIT_MODULE,
    SYSTEM,
    UP,
    find_model,
    save_folder,
    saved_devices,
    saved_folder,
    saved_system,
    settle_devices,
)
from daemons.submit import end_job, has_job, is_for_a_job, start_job
from daemons.supervisor_process import LOOK_EVERY_S, Look, Say, check_model, means_folder
from daemons.supervisor_process import waits as waits
from daemons.workspace import SUPERVISOR, Workspace
from daemons.workspace_reader import WorkspaceReader, read_workspace
from prime_rl.configs import EXAMPLES
from prime_rl.configs.base import ConfigError, build, load_config, load_toml, merge, read_argv, without_nulls
from prime_rl.configs.explain import check_kind
from prime_rl.configs.inference import WHOLE_GPU
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import WaitTimeout, wait_for, write_atomic
from prime_rl.contract.layout import RUN_PREFIX, OutputDir
from prime_rl.contract.status import STALLED
from prime_rl.utils.runtime import count_gpus
from prime_rl.utils.text import counted

# On top of the time in which a daemon may finish and save, and all of it may need the grace.
RESTART_MARGIN_S = 15.0
# Of the small workspace: all positions of its base model, so that it takes a run of one's own.
SMALL_SEQ_LEN = 512
SLOTS = "max_concurrent_runs"
# Arguments of vLLM with which it uses several GPUs.
_SEVERAL_GPUS = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
# The fields that decide how many slots fit, and what of a GPU is left for inference.
_DECIDES: dict[str, Any] = {
    "max_concurrent_runs": True,
    "trainer": {"model", "seq_len", "max_tokens_per_micro_batch", "device", "gpu_share"},
    "inference": {
        "engine": True,
        "model": True,
        "max_versions_per_run": True,
        "vllm": {"gpu_memory_utilization"},
        "embedded": {"gpu_share"},
    },
}


@dataclass(frozen=True)
class Wanted:
    """The request of `prl up`. `said` is kept for the next start; `is_small`: neither a file nor a model was given.

    `folder` is the one that relative names in it, and in the workspace's runs, mean.
    """

    system: SystemConfig
    said: Mapping[str, Any]
    is_small: bool
    folder: Path


def choose_system(
    args: Sequence[str], output_dir: Path | None, *, say: Say, default: Callable[[], Path] = Path.cwd
) -> Wanted:
    """The system config that a command line describes; `default()` is its workspace if none is given.

    Raises ConfigError.
    """
    data, source = read_argv(args)
    chosen = output_dir or os.environ.get("PRL_OUTPUT_DIR")
    check_kind("system", data, source)
    small, is_last = False, not any(arg.startswith("@") for arg in args) and "model" not in data
    if is_last:
        chosen = chosen or data.get("output_dir") or default()
        base, source, small = _without_a_file(Path(str(chosen)), data, say)
        source, data = f"{source} and the command line" if data else source, merge(base, data)
    if chosen:
        data = _placed(data, Path(str(chosen)))
    system, folder = build(SystemConfig, data, source), Path.cwd()
    name, saved = system.model.name, None if small else saved_folder(OutputDir(system.output_dir))
    if saved is not None and ((saved / name).is_dir() or not means_folder(name)):
        is_here = not is_last and Path(name).is_dir() and not Path(name).is_absolute()
        folder = folder if is_here else saved
    return Wanted(system, data, small, folder)


def start_workspace(
    wanted: Wanted, *, stop: Callable[[], bool], say: Say, on_look: Look, is_quiet: bool = False
) -> Workspace | None:
    """Start the daemons and wait until all of them answer; if `stop()` comes first, end them and return None.

    A workspace that runs with these very settings is left as it is. `is_quiet`: children print no progress on our
    terminal. Raises LaunchError and ActionError.
    """
    output = OutputDir(wanted.system.output_dir)
    if holder := _holder_with(wanted, output):
        _check_key(wanted, output, holder)
        say(f"already running with these settings: {holder}; environment variables are those of that start")
        model = Path(find_model(wanted.system.model.name, wanted.folder))
        files = model.iterdir() if model.is_dir() else ()
        if any(file.stat().st_mtime > holder.started_at for file in files if file.exists()):
            say(f"files of {model} have changed since then: prl down, then prl up takes them")
        if not supervisor_process.wait_until_ready(wanted.system, output, None, stop=stop, on_look=on_look):
            return None
        _check_key(wanted, output, holder)  # of one that did not answer before
        return read_workspace(output.path)
    if is_for_a_job(wanted.system):
        need_daemons(wanted.system)
        check_model(wanted.system, wanted.folder)
        is_up = start_job(wanted.system, wanted.said, output, stop=stop, say=say, on_look=on_look)
        return read_workspace(output.path) if is_up else None
    ready = make_ready(wanted, output, stop=stop, say=say, is_quiet=is_quiet)
    if ready is None:
        return None
    child = supervisor_process.start_supervisor(output, take_workspace(ready, output, say))
    try:
        answers = supervisor_process.wait_until_ready(ready.system, output, child, stop=stop, on_look=on_look)
    except LaunchError:
        supervisor_process.down(output, timeout_s=None, say=say, supervisor=child)
        raise
    if not answers:
        supervisor_process.down(output, timeout_s=None, say=say, supervisor=child)
        return None
    # The supervisor outlives us; if it ends first, it must not stay behind as a zombie.
    threading.Thread(target=child.wait, name="reap the supervisor", daemon=True).start()
    return read_workspace(output.path)


def _holder_with(wanted: Wanted, output: OutputDir) -> SupervisorInfo | None:
    """The supervisor of this machine that runs the workspace with the settings `wanted`; None where there is none."""
    info = read_info(output)
    if info is None or info.host != socket.gethostname() or not read_workspace(output.path).supervisor_alive:
        return None
    try:
        said = _placed(load_toml(output.component_config(UP)), wanted.system.output_dir)
        before = saved_devices(output)
        found = build(SystemConfig, said, UP), saved_folder(output), settle_devices(before, os.environ)
        return info if found == (wanted.system, wanted.folder, before) else None
    except ConfigError:
        return None


def _check_key(wanted: Wanted, output: OutputDir, holder: SupervisorInfo) -> None:
    """Raises LaunchError when the workspace runs with another API key than is given here."""
    if supervisor_process.has_another_key(wanted.system, output, or_none=False):
        variable = wanted.system.inference.api_key_var
        message = f"already running: {holder}, with another API key than {variable} has here"
        raise LaunchError(f"{message}; stop it with prl down, then prl up takes that one")


def _placed(data: Mapping[str, Any], output_dir: Path) -> dict[str, Any]:
    place = {"output_dir": str(output_dir)}
    return merge(data, {**place, "trainer": place, "inference": place})


def make_ready(
    wanted: Wanted, output: OutputDir, *, stop: Callable[[], bool], say: Say, is_quiet: bool
) -> Wanted | None:
    """Make the small workspace's base model when it is missing, and settle its slots; None when `stop()` came first.

    Raises LaunchError, before anything is made where a port or the model is at fault, and ActionError without what the
    daemons need.
    """
    need_daemons(wanted.system)
    now = read_workspace(output.path)
    if now.inference is None and not now.supervisor_alive:  # else its own servers have the ports
        supervisor_process.check_ports(wanted.system)
    check_model(wanted.system, wanted.folder, SMALL_SEQ_LEN if wanted.is_small else None)
    if wanted.is_small:
        _make_model(wanted.system.model.name, output, stop, say, is_quiet)
        if stop():
            return None
    system = settle_slots(wanted.system, output, wanted.folder, stop=stop, say=say)
    return replace(wanted, system=system) if system else None


def take_workspace(wanted: Wanted, output: OutputDir, say: Say) -> SupervisorLock:
    """Check and prepare the workspace and save its settings; returns its lock. Raises LaunchError."""
    lock = supervisor_process.prepare(wanted.system, output, say)
    write_atomic(output.component_config(UP), tomli_w.dumps(wanted.said))
    save_folder(output, wanted.folder)
    return lock


def stop_workspace(output_dir: Path, *, timeout_s: float | None = None, say: Say) -> bool:
    """Stop all daemons and check that none is left; false when nothing was running. Raises LaunchError."""
    output = OutputDir(output_dir)
    limit_s = supervisor_process.down_timeout_s(saved_system(output).supervisor) if timeout_s is None else timeout_s
    had_job = has_job(output) and end_job(output, limit_s, say)
    return supervisor_process.down(output, timeout_s=timeout_s, say=say) or had_job


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


def _without_a_file(output_dir: Path, given: Mapping[str, Any], say: Say) -> tuple[dict[str, Any], str, bool]:
    """(values, their source, whether it is the small workspace)."""
    last = last_start(output_dir)
    if last is not None:
        more = f", and with {', '.join(given)} as given here" if given else ""
        say(f"no system file given: {output_dir} with its last settings ({last}){more}")
        return load_toml(last), str(last), False
    small, here = EXAMPLES / "demo" / "system.toml", Path.cwd()
    shown = small.relative_to(here) if small.is_relative_to(here) else small
    said = f"as in {shown}, with seq_len = {SMALL_SEQ_LEN}"
    say(f"no system file given: starting a small workspace on this machine's CPU, {said}")
    return {**load_toml(small), "seq_len": SMALL_SEQ_LEN}, str(small), True


def _make_model(name: str, output: OutputDir, stop: Callable[[], bool], say: Say, is_quiet: bool) -> None:
    """Under the workspace's lock, so that `prl status` and `prl down` find who is at work here.

    Not in the console (`is_quiet`), which `prl down` would end. Where another process has the lock nothing is made, and
    `supervisor_process.prepare` names it. Raises LaunchError.
    """
    supervisor_process.check_writable(output)
    if (lock := SupervisorLock.acquire(output)) is None:
        return
    try:
        supervisor_process.refuse_rival(output)
        if not is_quiet:
            lock.write_info(time.time())
            supervisor_process.make_base_model(name, stop, say, is_quiet=False)
    finally:
        lock.release()
    if is_quiet:
        supervisor_process.make_base_model(name, stop, say, is_quiet=True)


def settle_slots(
    system: SystemConfig, output: OutputDir, folder: Path = Path(), *, stop: Callable[[], bool], say: Say
) -> SystemConfig | None:
    """`system` with numbers for what is to be worked out; None when `stop()` came first. Raises LaunchError."""
    before = saved_devices(output)
    now = settle_devices(before, os.environ)
    share = system.inference.share_key if share_a_gpu(system, now) else None
    wanted = [SLOTS] * (system.max_concurrent_runs == "auto") + ([share] if share else [])
    servers = system.deployment.inference.servers_on_a_gpu
    if not wanted:
        return _divided(system, now, say)
    earlier = _earlier(output, wanted)
    if earlier is not None and _question(earlier[0], before) == _question(system, now):
        found, source = earlier[1], ", as counted before"
    else:
        say(f"{' and '.join(wanted)} = 'auto': counting what fits into memory (takes a few seconds)")
        answer = _ask(system, now, folder, stop, wanted)
        if answer is None:
            return None
        found, source = _numbers(answer, share, servers), ""
    if SLOTS in wanted:
        system = system.with_slots(int(found[SLOTS]))
        say(f"{SLOTS} = 'auto': {counted(int(found[SLOTS]), 'slot')}{source}")
    if not share:
        return _divided(system, now, say)
    each = f", for each of {servers} servers" if servers > 1 else ""
    say(f"{share} = 'auto': {found[share]:g} of the GPU that trainer and inference share{each}{source}")
    return system.with_gpu_share(found[share])


def _divided(system: SystemConfig, devices: str | None, say: Say) -> SystemConfig:
    """`system` with a share for each of the servers that have a GPU between them, and no trainer on it."""
    inference, servers = system.inference, system.deployment.inference.servers_on_a_gpu
    if servers == 1 or not have_one_gpu(system, devices):
        return system
    if inference.share == "auto":
        share = _each_of(servers)
        say(f"{inference.share_key} = 'auto': {share:g} of a GPU for each of {servers} servers")
        return system.with_server_share(share)
    check_shares(system, servers)
    return system


def have_one_gpu(system: SystemConfig, devices: str | None = None) -> bool:
    """True when all servers of inference use the same GPU of this machine."""
    deployment = system.deployment
    has_none = deployment.engine != "local" or system.inference.device == "cpu" or deployment.inference.gpus_each
    return not has_none and bool(count_gpus(_with_devices(devices)))


def _each_of(servers: int) -> float:
    return math.floor(100 * WHOLE_GPU / servers) / 100


def check_shares(system: SystemConfig, servers: int, beside: float = 0.0) -> None:
    """Raises LaunchError when so many servers, and what has the part `beside`, would take more than their GPU."""
    key, share = system.inference.share_key, system.inference.gpu_share
    if servers * share + beside > 1:
        raise LaunchError(
            f"{servers} servers on one GPU, each with {key} = {share:g}, take more than is left of it: "
            "set that lower, or to auto, and start with prl up, or give each its own in deployment.inference.gpus"
        )


def share_a_gpu(system: SystemConfig, devices: str | None) -> bool:
    """True when the share of inference of its GPU is to be worked out: it is "auto", and the trainer uses that GPU too.

    `devices`: CUDA_VISIBLE_DEVICES. One process takes the first GPU that it sees, ranks the first ones. What several
    GPUs of one vLLM hold is left to the person who set that up.
    """
    inference = system.inference
    if inference.share != "auto" or (inference.engine == "vllm" and _SEVERAL_GPUS & inference.vllm.extra_args.keys()):
        return False
    if "cpu" in (system.trainer.device, inference.device) or not count_gpus(_with_devices(devices)):
        return False
    trainer, server = system.deployment.trainer, system.deployment.inference
    if system.deployment.engine != "local":
        return not (trainer.gpus_per_node or server.gpus_per_replica)
    return not {*(trainer.gpus or range(trainer.ranks))}.isdisjoint(server.gpus or [0])


def _with_devices(devices: str | None) -> dict[str, str]:
    return {**os.environ, **({} if devices is None else {DEVICES_VARIABLE: devices})}


def _earlier(output: OutputDir, wanted: Sequence[str]) -> tuple[SystemConfig, dict[str, Any]] | None:
    """The wish of the last `prl up`, and the `wanted` numbers that it ran with; None where one is missing."""
    try:
        asked = load_config(SystemConfig, output.component_config(UP))
        held = load_config(SystemConfig, output.component_config(SYSTEM))
    except ConfigError:  # never started, or of another version
        return None
    numbers = {SLOTS: held.max_concurrent_runs, held.inference.share_key: held.inference.share}
    return None if {"auto", None} & {*map(numbers.get, wanted)} else (asked, numbers)


def _question(system: SystemConfig, devices: str | None) -> dict[str, Any]:
    trainer = system.deployment.trainer
    return {
        **system.model_dump(mode="json", include=_DECIDES),
        "devices": devices,
        "gpus": trainer.gpus,
        "ranks": trainer.ranks * trainer.nodes,
        "servers": system.deployment.inference.replicas if have_one_gpu(system, devices) else 1,
    }


def _numbers(answer: Mapping[str, Any], share_key: str | None, servers: int = 1) -> dict[str, float]:
    """The slots and, where a GPU is shared, the share of each server of inference, from what `prl fit` answered.

    Raises LaunchError when trainer and inference do not fit onto one GPU.
    """
    share = answer["gpu_memory_utilization"]
    if share_key and share is None:
        raise LaunchError(
            f"trainer and inference do not fit onto one GPU: a pass of {answer['tokens']} tokens with {answer['runs']} "
            f"slots takes {answer['peak_gib']:.1f} of {answer['usable_gib']:.1f} GiB, and the rest is too small for "
            f"inference with its own {answer['weights_gib']:.1f} GiB of weights: lower "
            f"trainer.max_tokens_per_micro_batch, seq_len or {SLOTS}, or give each its own GPU (docs/deploy.md)"
        )
    return {SLOTS: answer["runs"], **({share_key: min(share, _each_of(servers))} if share_key else {})}


def _ask(
    system: SystemConfig, devices: str | None, folder: Path, stop: Callable[[], bool], wanted: Sequence[str]
) -> dict[str, Any] | None:
    """The answer of `prl fit`; None when `stop()` came first. Raises LaunchError."""
    with tempfile.TemporaryDirectory() as name:
        file, out, errors = (Path(name) / each for each in ("system.toml", "out", "errors"))
        # What was left to defaults stays so: inference gets its number of slots only now.
        file.write_text(
            tomli_w.dumps(without_nulls(system.model_dump(mode="json", exclude_unset=True))), encoding="utf-8"
        )
        trainer = system.deployment.trainer
        ranks = str(trainer.ranks * trainer.nodes)
        argv = python_module(FIT_MODULE, "@", str(file), "--gpus", ranks, "--json")
        # A model of the hub may be asked for its config.json, which the trainer will load anyway.
        env = {"HF_HUB_OFFLINE": "0", **_with_devices(devices)}
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            exit_code = run_child(argv, stop, env=env, stdout=stdout, stderr=stderr, cwd=folder)
        if exit_code is None:
            return None
        if exit_code:
            said = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [
                f"prl fit exited with code {exit_code}"
            ]
            raise LaunchError(f"{said[-1].removeprefix('prl fit: ')}; or set {' and '.join(wanted)} to a number")
        answer: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return answer
