"""A workspace as a Slurm job of its own: `prl up` outside an allocation submits it, `prl down` ends it.

The job's script becomes `prl up --foreground` on the first node, with the settings that were saved here; from there
on all is as inside an allocation. The job's comment is the path of its workspace: by that it is found again.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from daemons.base_model import check_model
from daemons.keys import all_keys
from daemons.launchers.base import LaunchError
from daemons.launchers.placement import nodes_needed
from daemons.launchers.slurm import PATIENT_TIMEOUT_S, Allocation, run_slurm
from daemons.logs import JOB_LOG
from daemons.specs import UP, service_specs
from daemons.starting import Look, Say, check_writable, is_ready, refuse_removed, waits, with_log
from daemons.stopping import down_timeout_s
from daemons.workspace_reader import WorkspaceReader, read_workspace
from prime_rl.configs.deployment import SlurmConfig
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import make_folder, write_atomic
from prime_rl.contract.layout import OutputDir

# Between Slurm's warning of the time limit and its SIGKILL, beside what the daemons may take. The warning comes early
# rather than late.
_MARGIN_S = 60.0
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Job:
    """`state`: as Slurm has it (PENDING, RUNNING, COMPLETING). `reason`: why it waits, or its nodes."""

    job: str
    state: str
    reason: str

    def __str__(self) -> str:
        return f"job {self.job} ({self.state}{f', {self.reason}' if self.reason else ''})"


def is_for_a_job(system: SystemConfig) -> bool:
    """Whether `prl up` has to submit a job: the engine is Slurm, and this process is in no allocation."""
    return system.deployment.engine == "slurm" and Allocation.of() is None


def submission(system: SystemConfig, output: OutputDir) -> list[str]:
    """argv of sbatch. Raises LaunchError when no number of nodes has enough GPUs."""
    table = system.deployment.slurm or SlurmConfig()
    specs = service_specs(output, system)
    num_nodes = table.nodes or nodes_needed(specs, table.gpus_per_node)
    gpus = table.gpus_per_node or max(spec.gpus for spec in specs)
    limits = system.supervisor
    warning_s = 2 * limits.drain_s + 5 * limits.grace_s + _MARGIN_S
    given = {"partition": table.partition, "account": table.account, "time": table.time, "constraint": table.constraint}
    return [
        *("sbatch", "--parsable", f"--job-name=prl {output.path.name}", f"--comment={output.path.resolve()}"),
        *(f"--nodes={num_nodes}", "--ntasks-per-node=1", "--exclusive", "--no-kill", "--requeue"),
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *(f"--signal=B:TERM@{warning_s:.0f}", "--open-mode=append", f"--output={output.log(JOB_LOG).resolve()}"),
        *(f"--{name}={value}" for name, value in given.items() if value),
        *table.extra_args,
        str(script_file(output)),
    ]


def script_file(output: OutputDir) -> Path:
    """The absolute path of the batch script."""
    return output.component_config("job").with_suffix(".sh").resolve()


def script(output: OutputDir) -> str:
    """The batch script. Slurm's signals go to it, so it becomes the supervisor."""
    command = [sys.executable, "-m", "daemons.cli", "up", "--foreground", "--output-dir", str(output.path.resolve())]
    return f"#!/bin/sh\ncd {shlex.quote(os.getcwd())} || exit 1\nexec {shlex.join(command)}\n"


def start_job(
    system: SystemConfig,
    said: Mapping[str, Any],
    output: OutputDir,
    *,
    stop: Callable[[], bool],
    say: Say,
    on_look: Look,
) -> bool:
    """Submit a workspace's job and wait until all daemons answer; if `stop()` comes first, end it and return false.

    Raises LaunchError.
    """
    if (workspace := read_workspace(output.path)).supervisor_alive:
        raise LaunchError(f"already running: {workspace.output_dir}; stop it with prl down")
    refuse_removed(os.environ)
    check_writable(output)
    check_model(system.model.name)
    job = submit(system, said, output)
    say(f"submitted job {job}; its log: {output.log(JOB_LOG)}")
    return _wait(system, job, output, stop=stop, say=say, on_look=on_look)


def submit(
    system: SystemConfig, said: Mapping[str, Any], output: OutputDir, environ: Mapping[str, str] = os.environ
) -> str:
    """Submit the job of a workspace, with the settings `said`; returns its number. Raises LaunchError."""
    if found := find_job(output):
        raise LaunchError(f"already submitted: {found}; end it with prl down")
    key = system.inference.api_key_var
    if environ.get(key):
        raise LaunchError(
            f"{key} is set: Slurm would keep the key with the job. Write it to a file of mode 0600 that all nodes see, "
            f"set {key}_FILE to its path, and unset {key}"
        )
    command = submission(system, output)
    make_folder(output.logs)
    script_file(output).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output.component_config(UP), tomli_w.dumps(dict(said)))
    write_atomic(script_file(output), script(output))
    keys = {*all_keys(output), key}
    clean = {name: value for name, value in environ.items() if name not in keys and not value.startswith("/dev/fd/")}
    done = subprocess.run(command, capture_output=True, text=True, env=clean, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        complaint = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise LaunchError(f"Slurm refuses the job: {complaint[-1]}")
    return done.stdout.strip().partition(";")[0]


def _wait(
    system: SystemConfig, number: str, output: OutputDir, *, stop: Callable[[], bool], say: Say, on_look: Look
) -> bool:
    reader, last, deadline = WorkspaceReader(output.path), "", None
    limits = system.supervisor
    while not stop():
        job = find_job(output)
        if job is None:
            raise LaunchError(with_log(f"job {number} ended before the workspace was ready", output, JOB_LOG))
        if str(job) != last:
            say(str(job))
        last = str(job)
        workspace = reader.read()
        if job.state == "RUNNING":
            deadline = deadline or time.monotonic() + limits.start_timeout_s + limits.grace_s + _MARGIN_S
            on_look(workspace)
            if is_ready(workspace):
                return True
        if deadline is not None and time.monotonic() > deadline:
            raise LaunchError(f"{job} is not ready in time; {' '.join(waits(workspace))}: see prl logs, and prl down")
        time.sleep(_LOOK_EVERY_S)
    end_job(output, down_timeout_s(limits), say)
    return False


def has_job(output: OutputDir) -> bool:
    """Whether the workspace was ever submitted, and this process is in no allocation."""
    return Allocation.of() is None and script_file(output).exists()


def find_job(output: OutputDir) -> Job | None:
    """The job of a workspace that waits, runs or ends. Raises LaunchError when Slurm does not answer."""
    wanted = str(output.path.resolve())
    listed = run_slurm("squeue", "-h", "--me", "-o", "%A|%T|%R|%k", timeout_s=PATIENT_TIMEOUT_S)
    for line in listed.splitlines():
        job, state, reason, comment = line.split("|", 3)
        if comment == wanted:
            return Job(job, state, "" if reason == "(None)" else reason.strip("()"))
    return None


def end_job(output: OutputDir, timeout_s: float, say: Say, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Have a workspace's job drain and end, and prove it; false without one. Raises LaunchError."""
    job = find_job(output)
    if job is None:
        return False
    say(f"ending {job}")
    is_running = job.state == "RUNNING"
    cancel = ("scancel", "--batch", "--signal=TERM") if is_running else ("scancel",)
    run_slurm(*cancel, job.job, timeout_s=PATIENT_TIMEOUT_S)
    deadline = time.monotonic() + timeout_s
    while (job := find_job(output)) is not None:
        if time.monotonic() > deadline:
            if not is_running:
                raise LaunchError(f"{job} does not end: Slurm still has it")
            say(f"{job} did not stop within {timeout_s:g} s: cancelled")
            run_slurm("scancel", job.job, timeout_s=PATIENT_TIMEOUT_S)
            is_running, deadline = False, time.monotonic() + timeout_s
        sleep(_LOOK_EVERY_S)
    return True
