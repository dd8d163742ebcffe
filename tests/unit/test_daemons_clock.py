"""A supervisor whose machine's clock is set while its daemons work: nothing is ended, started or forgotten for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from daemons.launchers.local import Local
from daemons.pidfile import SupervisorLock
from daemons.specs import service_specs, write_component_configs
from daemons.supervisor import Supervisor
from daemons.trash import users_of_run
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import wait_for, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import (
    HEARTBEAT_S,
    DaemonStatus,
    InferenceStatus,
    Status,
    TrainerRunStatus,
    TrainerStatus,
    is_alive,
    read_status,
)
from prime_rl.utils.process import ProcessId, StopFlag
from tests.daemons_support import handle_of, step_clock
from tests.patience import PATIENCE_S

# Each of these ends a daemon at once when an hour seems to have passed.
LIMITS = {
    "start_timeout_s": 60.0,
    "grace_s": 1.0,
    "stall": {name: {"limit_s": 60.0, "restart": True} for name in ("trainer", "inference", "orchestrator")},
}
SYSTEM = SystemConfig.model_validate({"supervisor": LIMITS})


class Workspace:
    """A trainer that works and an inference server that starts, as processes that only sleep, and their supervisor."""

    def __init__(self, path: Path, trainer: ProcessId, inference: ProcessId) -> None:
        self.output = OutputDir(path)
        self.lock: SupervisorLock | None = None
        self.output.daemons.mkdir(parents=True)
        write_component_configs(SYSTEM, self.output)
        self.processes = {"trainer": trainer, "inference": inference}
        for spec in service_specs(self.output):
            status = DaemonStatus(
                name=spec.name,
                state="running" if spec.name == "trainer" else "starting",
                argv=list(spec.argv),
                started_at=time.time(),
                handle=handle_of(spec.name, self.processes[spec.name]),
            )
            status.child = self.processes[spec.name]
            self.write(self.output.daemon_status(spec.name), status)
        runs = {"run_a": TrainerRunStatus(run_idx=0)}
        trainer_word = TrainerStatus(state="training", runs=runs, progress=7, updated_at=time.time())
        trainer_word.sign(trainer)
        self.write(self.output.trainer_status, trainer_word)
        inference_word = InferenceStatus(state="starting", updated_at=time.time())
        inference_word.sign(inference)
        self.write(self.output.inference_status, inference_word)

    def write(self, path: Path, status: Status) -> None:
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, msgspec.json.encode(status))

    def supervisor(self) -> Supervisor:
        self.lock = SupervisorLock.acquire(self.output)
        assert self.lock is not None
        found = Supervisor(self.output, SYSTEM.supervisor, Local(self.output), self.lock, StopFlag())
        found.adopt()
        return found

    def states(self) -> dict[str, str]:
        """What the supervisor wrote, as long as it is fresh by the clock of now."""
        statuses = [read_status(self.output.daemon_status(name), DaemonStatus) for name in self.processes]
        return {each.name: each.state for each in statuses if each is not None and is_alive(each, time.time())}


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
    workspace = Workspace(tmp_path / "workspace", *(ProcessId.of(child.pid) for child in children))
    yield workspace
    if workspace.lock is not None:
        workspace.lock.release()
    for child in children:
        child.kill()
        child.wait()


def set_clock(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    step_clock(monkeypatch, step_s)


def let_pass(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real, monotonic = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: real() + seconds)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + seconds)


WELL = {"trainer": "running", "inference": "starting"}
steps = pytest.mark.parametrize("step_s", [3600.0, -3600.0])


@steps
def test_nothing_follows_when_the_clock_is_set_under_a_supervisor(
    workspace: Workspace, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = workspace.supervisor()
    supervisor.tick()
    assert workspace.states() == WELL
    set_clock(monkeypatch, step_s)
    supervisor.tick()
    let_pass(monkeypatch, HEARTBEAT_S)
    supervisor.tick()
    assert all(process.is_running() for process in workspace.processes.values())
    assert workspace.states() == WELL, "and by the next heartbeat its files say so in the new time"
    assert users_of_run(workspace.output.path, "run_a") == ["the trainer (slot 0)"], "so it cannot be moved away"


@steps
def test_daemons_are_adopted_when_the_clock_was_set_since_their_supervisor_died(
    workspace: Workspace, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, step_s)
    workspace.supervisor().tick()
    assert all(process.is_running() for process in workspace.processes.values())
    assert workspace.states() == WELL


def test_a_daemon_that_falls_silent_is_still_noticed(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = workspace.supervisor()
    supervisor.tick()
    let_pass(monkeypatch, 61.0)
    supervisor.tick()
    trainer = workspace.processes["trainer"]
    wait_for(lambda: not trainer.is_running(), "the silent trainer to be ended", timeout_s=PATIENCE_S)
