"""What a supervisor costs while nothing happens: the real one, over daemons that only sleep and beat.

The daemons are `sleep` under the supervisor's own command lines; their status files are renewed from here each
heartbeat, as the real daemons do. So the figure is the supervisor's alone: looking, judging, and writing its own files.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

from daemons.pidfile import SupervisorLock
from daemons.specs import write_component_configs
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import wait_for, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import (
    HEARTBEAT_S,
    DaemonStatus,
    InferenceStatus,
    RunStatus,
    Status,
    TrainerRunStatus,
    TrainerStatus,
    read_status,
)
from prime_rl.utils.process import ProcessId

RUN_TOML = 'batch_size = 8\nrollouts_per_example = 4\n[model]\nname = "m"\n[[env]]\nid = "reverse-text"\n'
# Starts each daemon as a sleeper: the supervisor takes the interpreter's name for its daemons from here.
START = "import sys; sys.executable = sys.argv.pop(1); from daemons.supervisor import main; main()"
PATIENCE_S = 120.0


class Sleepers:
    """A workspace of `num_runs` runs, `num_active` of them in slots, whose daemons sleep."""

    def __init__(self, folder: Path, num_runs: int, num_active: int) -> None:
        self.output = OutputDir(folder / "workspace")
        self.active = [f"run_{number:03}" for number in range(num_active)]
        self.waiting = [f"run_{number:03}" for number in range(num_active, num_runs)]
        self.sleeper = folder / "sleeper"
        self.sleeper.write_text("#!/bin/sh\nexec sleep 100000\n", encoding="utf-8")
        self.sleeper.chmod(0o755)
        for run_id in self.active + self.waiting:
            run = self.output.run(run_id)
            run.control.mkdir(parents=True)
            run.orch_toml.write_text(RUN_TOML, encoding="utf-8")
        write_component_configs(SystemConfig.model_validate({"supervisor": {"max_starting": 1000}}), self.output)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the supervisor; its output goes to `supervisor.out` in the workspace."""
        lock = SupervisorLock.acquire(self.output)
        assert lock is not None
        command = [sys.executable, "-c", START, str(self.sleeper), str(self.output.path), str(lock.fd)]
        log = self.output.path / "supervisor.out"
        with log.open("wb") as out:
            child = subprocess.Popen(command, pass_fds=[lock.fd], stdout=out, stderr=subprocess.STDOUT)
        lock.hand_over()
        return child

    def beat(self) -> bool:
        """Renew the status file of each daemon that is there; whether all are."""
        daemons = {name: self._daemon(name) for name in ("trainer", "inference", *self.active)}
        now = time.time()
        for name, daemon in daemons.items():
            if daemon is None or daemon.child is None:
                continue
            path, status = self._status(name)
            status.sign(daemon.child)
            status.updated_at = now
            write_atomic(path, msgspec.json.encode(status), durable=False)
        return all(daemon is not None and daemon.state == "running" for daemon in daemons.values())

    def _status(self, name: str) -> tuple[Path, Status]:
        """The path of the daemon's status file, and the status."""
        if name == "trainer":
            runs = {run_id: TrainerRunStatus(run_idx=idx) for idx, run_id in enumerate(self.active)}
            status = TrainerStatus(state="waiting", waiting_on="rollouts", runs=runs, waiting=self.waiting)
            return self.output.trainer_status, status
        if name == "inference":
            return self.output.inference_status, InferenceStatus(state="serving")
        return self.output.run(name).status, RunStatus(run_id=name, state="running", waiting_on="inference")

    def _daemon(self, name: str) -> DaemonStatus | None:
        return read_status(self.output.daemon_status(name), DaemonStatus)


def idle_cpu(num_runs: int = 200, num_active: int = 8, seconds: float = 30.0) -> float:
    """Share of one core that the supervisor takes, measured over `seconds` of quiet."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Sleepers(Path(folder), num_runs, num_active)
        with workspace.start() as child:
            try:
                wait_for(workspace.beat, "all daemons to run", timeout_s=PATIENCE_S, poll_s=0.5)
                return _cpu_share(child.pid, workspace, seconds)
            finally:
                child.terminate()


def _cpu_share(pid: int, workspace: Sleepers, seconds: float) -> float:
    process = psutil.Process(pid)
    assert ProcessId.of(pid).is_running()
    began, before = time.monotonic(), process.cpu_times()
    while time.monotonic() - began < seconds:
        workspace.beat()
        time.sleep(min(HEARTBEAT_S, max(0.0, seconds - (time.monotonic() - began))))
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - began)


if __name__ == "__main__":
    for active in (8, 200):
        print(f"200 runs, {active} in slots: {100 * idle_cpu(num_active=active):.2f} % of a core")
