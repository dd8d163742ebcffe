"""The supervisor's look waits for nothing, and what goes wrong with one daemon costs the others nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from daemons.decide import Daemon, State
from daemons.launchers.base import Alive, Ended, Handle
from daemons.launchers.local import Local, find_members, kill_all
from daemons.logs import old_log
from daemons.observe import Observer
from daemons.pidfile import SupervisorLock
from daemons.process import KILL_WAIT_S, spawn
from daemons.specs import DaemonSpec, write_component_configs
from daemons.supervisor import Supervisor
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import wait_for, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.notes import Item, Work
from prime_rl.contract.status import DaemonStatus, InferenceStatus, read_status
from prime_rl.utils.process import ProcessId, StopFlag
from tests.daemons_support import PATIENCE_S, RUN_TOML, fake_workspace


class Workspace:
    """A supervisor whose looks and clock are ours, over small real daemons."""

    def __init__(self, output: OutputDir, system: SystemConfig, lock: SupervisorLock) -> None:
        self.output = output
        self.now = time.time()
        self.launcher = Local(output)
        self.supervisor = Supervisor(output, system.supervisor, self.launcher, lock, StopFlag(), clock=lambda: self.now)

    def tell(self, name: str) -> DaemonStatus:
        status = read_status(self.output.daemon_status(name), DaemonStatus)
        assert status is not None, name
        return status

    def look_until(self, what: str, is_so: Callable[[], bool]) -> None:
        def look() -> bool:
            self.supervisor.tick()
            return is_so()

        wait_for(look, what, timeout_s=PATIENCE_S)

    def end(self) -> None:
        """Kill what runs, until a look starts nothing more: it also reaps what was killed."""
        while members := find_members(self.output.path, [], None):
            kill_all(members)
            with contextlib.suppress(OSError):
                self.supervisor.tick()
        # Killed is not yet ended: what nobody has waited for is a warning wherever the garbage is collected.
        children = list(self.launcher._children.values())
        wait_for(lambda: not any(child.lives() for child in children), "every child to end", timeout_s=PATIENCE_S)

    def all_run(self) -> bool:
        return all(self.tell(name).state == "running" for name in ("trainer", "inference"))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    prl = fake_workspace(tmp_path)
    monkeypatch.setenv("PYTHONPATH", prl.env["PYTHONPATH"])
    output = OutputDir(prl.output_dir)
    output.logs.mkdir(parents=True)
    data: dict[str, Any] = {"output_dir": str(output.path), "model": {"name": str(prl.model)}, "inference": {"port": 0}}
    data["deployment"] = {"modules": prl.modules}
    system = SystemConfig.model_validate({**data, "supervisor": {"drain_s": 1.0, "grace_s": 1.0}})
    write_component_configs(system, output)
    lock = SupervisorLock.acquire(output)
    assert lock is not None
    found = Workspace(output, system, lock)
    yield found
    found.end()
    lock.release()


def test_a_look_goes_on_beside_what_cannot_be_killed(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    (workspace.output.path / "stubborn_inference").touch()
    workspace.supervisor.tick()
    workspace.look_until("both to run", workspace.all_run)
    inference = workspace.tell("inference").child
    assert inference is not None
    send = ProcessId.send

    def hang(process: ProcessId, signum: signal.Signals) -> None:
        """As of a process that hangs in the kernel: SIGKILL does nothing."""
        if signum is not signal.SIGKILL:
            send(process, signum)

    def wait(*args: object, **options: object) -> None:
        raise AssertionError("a look waits")

    monkeypatch.setattr(ProcessId, "send", hang)
    monkeypatch.setattr("daemons.launchers.local.wait_for", wait)
    write_atomic(workspace.output.start_request("inference"), "restart")
    workspace.supervisor.tick()
    workspace.now += 1.0
    workspace.supervisor.tick()
    assert workspace.tell("inference").state == "running", "it was sent SIGKILL, and is looked at again"
    workspace.now += KILL_WAIT_S
    workspace.supervisor.tick()
    told = workspace.tell("inference")
    assert told.state == "stalled" and told.reason == (
        f"process {inference.pid} cannot be ended: it hangs in the kernel, SIGKILL was sent"
    )
    assert workspace.tell("trainer").state == "running"

    os.kill(inference.pid, signal.SIGKILL)  # it comes out of the kernel, and its worker does not
    worker = ProcessId.of(int((workspace.output.path / "worker.pid").read_text()))
    left = f"processes {worker.pid} of its last start to end"
    workspace.look_until("what is left to be told", lambda: workspace.tell("inference").waiting_on == left)
    workspace.now += KILL_WAIT_S
    workspace.supervisor.tick()
    told = workspace.tell("inference")
    assert (told.state, told.child_pid) == ("backoff", None), "it is not started beside its last start"
    assert told.waiting_on == f"{left} (it hangs in the kernel, SIGKILL was sent)"
    monkeypatch.setattr(ProcessId, "send", send)
    monkeypatch.setattr("daemons.launchers.local.wait_for", wait_for)
    os.kill(worker.pid, signal.SIGKILL)
    workspace.look_until("it to run again", workspace.all_run)


def test_a_daemon_that_cannot_be_started_for_whatever_reason_keeps_no_other_from_starting(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(
        argv: Sequence[str], log: Path, output_dir: Path, name: str, *, keys: Collection[str] = ()
    ) -> subprocess.Popen[bytes]:
        if name == "inference":
            raise RuntimeError("a fault of inference")
        return spawn(argv, log, output_dir, name, keys=keys)

    monkeypatch.setattr("daemons.launchers.local.spawn", fail)
    with pytest.raises(RuntimeError, match="a fault of inference"):
        workspace.supervisor.tick()
    assert workspace.tell("trainer").state == "starting"
    monkeypatch.setattr("daemons.launchers.local.spawn", spawn)
    workspace.supervisor.tick()
    workspace.look_until("both to run", workspace.all_run)


def test_a_file_that_cannot_be_written_costs_the_other_daemons_nothing(workspace: Workspace) -> None:
    workspace.output.daemon_status("inference").mkdir(parents=True)  # it is written first
    with pytest.raises(OSError, match="inference"):
        workspace.supervisor.tick()
    assert workspace.tell("trainer").state == "starting"


def test_after_a_long_look_it_rests_as_long_whatever_has_happened(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.look_until("both to run", workspace.all_run)
    now_s, look = 1000.0, Local.look

    def slow_look(launcher: Local, handle: Handle) -> Alive | Ended:
        nonlocal now_s
        now_s += 3.0
        return look(launcher, handle)

    monkeypatch.setattr(Local, "look", slow_look)
    monkeypatch.setattr("daemons.supervisor.time", SimpleNamespace(monotonic=lambda: now_s, time=time.time))
    workspace.supervisor.tick()
    request = workspace.output.start_request("inference")
    write_atomic(request, "restart")
    now_s += 5.9
    assert not workspace.supervisor.is_due(), "two daemons took 6 s"
    now_s += 0.2
    assert workspace.supervisor.is_due()
    request.unlink()


def test_the_logs_of_all_nodes_are_rotated_and_the_last_lines_are_those_of_the_node_that_failed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node of the trainer is only a log here."""
    table = {"engine": "slurm", "trainer": {"nodes": 2}}
    write_component_configs(SystemConfig.model_validate({"deployment": table}), workspace.output)
    log = workspace.output.log("trainer-node1")
    start, look = Local.start, Local.look

    def start_trainer(launcher: Local, spec: DaemonSpec) -> Handle:
        argv = (sys.executable, "-c", "import time; print('fine', flush=True); time.sleep(600)")
        return start(launcher, replace(spec, argv=argv))

    def look_at_second(launcher: Local, handle: Handle) -> Alive | Ended:
        seen = look(launcher, handle)
        return replace(seen, node=1) if isinstance(seen, Ended) else seen

    monkeypatch.setattr(Local, "start", start_trainer)
    monkeypatch.setattr(Local, "look", look_at_second)
    workspace.supervisor.tick()
    size = workspace.supervisor.config.max_log_bytes
    with open(log, "wb") as file:
        file.truncate(size + 1)
    workspace.supervisor.look_at_logs()
    assert log.stat().st_size == 0 and old_log(log, 1).exists()

    log.write_text("out of memory\n")
    trainer = workspace.tell("trainer").child
    assert trainer is not None
    os.kill(trainer.pid, signal.SIGKILL)
    workspace.look_until("the end of the trainer to be seen", lambda: workspace.tell("trainer").crashes != [])
    assert workspace.tell("trainer").log_tail == ["==> trainer-node1.log <==", "out of memory"]


def test_logs_are_kept_small_while_daemons_end(workspace: Workspace) -> None:
    workspace.look_until("both to run", workspace.all_run)
    log, size = workspace.output.log("trainer"), workspace.supervisor.config.max_log_bytes
    workspace.supervisor._end_all(lambda: os.truncate(log, size + 1) if not old_log(log, 1).exists() else None)
    assert old_log(log, 1).exists() and log.stat().st_size < size


def test_a_run_that_ends_as_it_is_looked_at_has_not_crashed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, run = workspace.output, workspace.output.run("run_a")
    goes_on = output.path / "pause_run_a"
    goes_on.touch()
    run.control.mkdir(parents=True)
    run.orch_toml.write_text(RUN_TOML.format(max_steps=2, model=output.path.parent / "models" / "base"))

    def told() -> str:
        status = read_status(output.daemon_status("run_a"), DaemonStatus)
        return status.state if status is not None else ""

    workspace.look_until("the run's orchestrator to run", lambda: told() == "running" and run.status.exists())
    look = workspace.launcher.look

    def look_as_it_ends(handle: Handle) -> Alive | Ended:
        if handle.name == "run_a":
            goes_on.unlink(missing_ok=True)
            wait_for(lambda: isinstance(look(handle), Ended), "the orchestrator to end", timeout_s=PATIENCE_S)
        return look(handle)

    monkeypatch.setattr(workspace.launcher, "look", look_as_it_ends)
    workspace.supervisor.tick()
    status = read_status(output.daemon_status("run_a"), DaemonStatus)
    assert status is not None and (status.state, status.crashes) == ("done", [])


def test_a_run_that_ended_inference_twice_is_evicted_and_its_neighbours_are_not(workspace: Workspace) -> None:
    output, path = workspace.output, workspace.output.replica_work(0)
    for run_id in ("run_a", "run_bad"):
        output.run(run_id).control.mkdir(parents=True)
    path.parent.mkdir(parents=True)
    served = [Item(run_id, f"served {run_id}@v3") for run_id in ("run_a", "run_bad")]

    def die(items: list[Item], suspects: dict[str, int], num_crashes: int) -> str:
        workspace.look_until("both to run", workspace.all_run)
        child = workspace.tell("inference").child
        assert child is not None
        path.write_bytes(msgspec.json.encode(Work(writer=child, items=items, suspects=suspects)))
        os.kill(child.pid, signal.SIGKILL)
        workspace.look_until("its end", lambda: len(workspace.tell("inference").crashes) == num_crashes)
        workspace.now += 1000.0
        return workspace.tell("inference").crashes[-1].reason

    assert die(served, {}, 1) == "killed by signal 9 while it served run_a@v3 and served run_bad@v3"
    die(served[1:], {"run_a": 1, "run_bad": 1}, 2)
    told = output.run("run_bad").evicted.read_text()
    assert told == "inference ended twice while it served run_bad@v3, last: killed by signal 9"
    assert not output.run("run_a").evicted.exists()
    (line,) = map(json.loads, output.audit.read_text().splitlines())
    assert (line["who"], line["action"], line["run_id"], line["reason"]) == ("supervisor", "evict", "run_bad", told)


def test_a_death_on_a_full_disk_leaves_no_suspects(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workspace.output.replica_work(0)
    path.parent.mkdir(parents=True)
    workspace.look_until("both to run", workspace.all_run)
    child = workspace.tell("inference").child
    assert child is not None
    path.write_bytes(msgspec.json.encode(Work(writer=child, items=[Item("run_a", "served run_a@v3")])))
    for module in ("daemons.supervisor", "daemons.observe"):
        monkeypatch.setattr(f"{module}.find_trouble", lambda workspace: "no space left", raising=False)
    os.kill(child.pid, signal.SIGKILL)
    workspace.look_until("its end", lambda: not path.exists())
    assert workspace.tell("inference").state != "failed"


def test_the_note_is_that_of_the_process_which_has_ended_and_its_suspects_can_be_evicted(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    for run_id in ("run_a", "run_out"):
        output.run(run_id).control.mkdir(parents=True)
    output.run("run_out").evicted.touch()
    ran = ProcessId.of(os.getpid())
    daemon = Daemon(DaemonSpec("inference", ("i",), tmp_path / "i.log"), State.RUNNING, process=ran)
    items = [Item("run_out", "served run_out@v3")]
    suspects = {"run_a": 1, "run_out": 1, "run_gone": 1, "": 1, "../run_a": 1}
    path = output.replica_work(0)
    path.parent.mkdir(parents=True)

    def seen(writer: ProcessId) -> Work | None:
        path.write_bytes(msgspec.json.encode(Work(writer=writer, items=items, suspects=suspects)))
        assert Observer(output).see(daemon, Alive(ran), None, 0.0).work is None
        lost = Ended(None, reason="its node was lost")
        assert Observer(output).see(daemon, lost, None, 0.0).work is None, "no run is suspected of that"
        return Observer(output).see(daemon, Ended(None), None, 0.0).work

    boot, _, ticks = ran.start.partition("/")
    for writer in (ran, replace(ran, pid=1, start=f"{boot}/{int(ticks) + 1}")):  # the first rank is a child
        assert seen(writer) == Work(writer=writer, items=items, suspects={"run_a": 1})
    for writer in (replace(ran, start=f"{boot}/{int(ticks) - 1}"), ProcessId(0), ProcessId(1, 1.0, "other/9")):
        assert seen(writer) is None


@pytest.mark.parametrize("running", [0, 1])
def test_requests_that_all_wait_are_work_that_stands_still_and_a_full_disk_is_no_part_of_that(
    tmp_path: Path, running: int
) -> None:
    output, ran = OutputDir(tmp_path), ProcessId.of(os.getpid())
    daemon = Daemon(DaemonSpec("inference", ("i",), tmp_path / "i.log"), State.RUNNING, process=ran)
    observer = Observer(output)
    output.inference_status.parent.mkdir(parents=True)

    def still_s(now: float, num_waiting: int) -> float | None:
        told = InferenceStatus(state="serving", progress=7, num_running=running, num_waiting=num_waiting)
        told.sign(ran)
        write_atomic(output.inference_status, msgspec.json.encode(told))
        return observer.see(daemon, Alive(ran), None, now).still_s

    assert still_s(0.0, 3) == 0.0
    assert still_s(100.0, 3) == 100.0
    observer.excuse()
    assert still_s(200.0, 3) == 0.0
    assert still_s(250.0, 3) == 50.0
    assert still_s(300.0, 0) == (100.0 if running else None)
