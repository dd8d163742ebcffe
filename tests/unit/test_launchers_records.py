"""What the launchers on Slurm and Ray make of the records of agents, without either. Over real ones: `test_slurm`,
`test_ray`."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from daemons.launchers import agent as agents
from daemons.launchers import ray, slurm
from daemons.launchers.agent import (
    FIRST_BEAT_S,
    ORPHANED,
    Agent,
    AgentRecord,
    Beats,
    kill_strays,
    strays_of,
)
from daemons.launchers.base import Alive, Ended, Handle, Place
from daemons.launchers.ray import LAST_RESORT_S, RayLauncher
from daemons.launchers.slurm import NODES_KNOWN_S, SETTLE_S, Allocation, Slurm, Start
from daemons.process import DEVICES_VARIABLE, visible_devices
from daemons.specs import DaemonSpec
from prime_rl.contract.files import wait_for, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.process import ProcessId
from tests.patience import PATIENCE_S

NODES = ("node1", "node2")
START = "5a"


@pytest.fixture
def output(tmp_path: Path) -> OutputDir:
    workspace = OutputDir(tmp_path / "workspace")
    workspace.starts.mkdir(parents=True)
    return workspace


def record(output: OutputDir, node: int = 0, start_id: str = START, **fields: Any) -> AgentRecord:
    made = AgentRecord(name="trainer", start_id=start_id, node=node, **fields)
    write_atomic(output.agent_record("trainer", start_id, node), msgspec.json.encode(made))
    return made


class Job(Allocation):
    """A job with two nodes whose steps last until the test ends them."""

    def usable_nodes(self, timeout_s: float | None = None) -> list[str]:
        return list(NODES)

    def address(self, node: str) -> str:
        return node

    def start_step(self, *args: Any) -> Any:
        return SimpleNamespace(returncode=None, poll=lambda: None)


def handle_of(start_id: str = START, job: str = "7", restart: str = "0", nodes: tuple[str, ...] = NODES) -> Handle:
    return Handle(engine="slurm", name="trainer", start_id=start_id, ref=str(Start(job, restart, Place(nodes))))


@pytest.mark.parametrize(("job", "restart", "lives"), [("7", "1", True), ("7", "0", False), ("8", "1", False)])
def test_a_start_ends_with_its_job_also_when_that_is_queued_again(
    output: OutputDir, job: str, restart: str, lives: bool
) -> None:
    seen = Slurm(output, Job("7", "1")).look(handle_of(job=job, restart=restart))
    assert seen == (Alive(None) if lives else Ended(None, "the Slurm job that it ran in is over"))


def test_a_start_has_ended_when_all_its_nodes_have_or_one_has_failed(output: OutputDir) -> None:
    launcher = Slurm(output, Job("7", "0"))
    record(output, 0, state="ended", exit_code=0)
    record(output, 1, pid=os.getpid())
    assert launcher.look(handle_of()) == Alive(None)
    record(output, 1, state="ended", exit_code=0)
    assert launcher.look(handle_of()) == Ended(0)
    record(output, 1, start_id="5b", state="ended", exit_code=-9, reason="too little memory")
    assert launcher.look(handle_of("5b")) == Ended(-9, "too little memory", node=1)


def test_a_node_whose_engine_is_gone_is_not_chosen_again_while_there_is_another(output: OutputDir) -> None:
    launcher, spec = Slurm(output, Job("7", "0")), DaemonSpec("inference", ("true",), output.log("inference"))
    assert Start.parse(launcher.start(spec).ref) == Start("7", "0", Place(("node1",)))
    record(output, state="ended", exit_code=-15, reason=ORPHANED)
    launcher.look(handle_of(nodes=("node1",)))
    assert Start.parse(launcher.start(spec).ref) == Start("7", "0", Place(("node2",)))
    record(output, state="ended", exit_code=-15, reason=ORPHANED)
    launcher.look(handle_of(nodes=("node2",)))
    assert Start.parse(launcher.start(spec).ref) == Start("7", "0", Place(("node1",))), "none is left: any may do"


def test_a_node_whose_agent_is_silent_is_lost_and_not_chosen_again(output: OutputDir) -> None:
    now = [0.0]
    launcher, spec = Slurm(output, Job("7", "0")), DaemonSpec("inference", ("true",), output.log("inference"))
    launcher._beats = Beats(lambda: now[0])
    handle = launcher.start(spec)
    assert launcher.look(handle) == Alive(None)
    now[0] = FIRST_BEAT_S + 1.0
    assert launcher.look(handle) == Ended(None, "node node1 is lost: its agent is silent", node=0)
    assert Start.parse(launcher.start(spec).ref) == Start("7", "0", Place(("node2",)))


def test_daemons_that_start_together_ask_for_the_nodes_once(output: OutputDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked_at = [100.0], list[float]()
    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Asked(Job):
        def usable_nodes(self, timeout_s: float | None = None) -> list[str]:
            asked_at.append(now[0])
            return super().usable_nodes(timeout_s)

    launcher, spec = Slurm(output, Asked("7", "0")), DaemonSpec("inference", ("true",), output.log("inference"))
    for passed_s in (0.0, NODES_KNOWN_S, 0.1):
        now[0] += passed_s
        launcher.start(spec)
    assert asked_at == [100.0, now[0]]


def test_what_an_agent_wrote_last_is_waited_for_after_the_end_of_its_step(
    output: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=lambda: now[0]))
    launcher = Slurm(output, Job("7", "0"))
    launcher._sruns[START] = SimpleNamespace(returncode=1, poll=lambda: 1)
    record(output, 0, state="ended", exit_code=0)
    assert launcher.look(handle_of()) == Alive(None)
    now[0] += SETTLE_S
    assert launcher.look(handle_of()) == Alive(None)
    now[0] += 0.1
    seen = launcher.look(handle_of())
    assert isinstance(seen, Ended) and seen.node == 1
    assert (seen.reason or "").startswith(
        "its step on node2 ended, and its agent left no final record: srun exit code 1"
    )


def test_a_step_is_cancelled_once_and_only_when_there_is_no_grace_left(
    output: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, is_over = [], threading.Event()

    def cancel(self: Slurm, handle: Handle) -> None:
        cancelled.append(handle.name)
        is_over.wait(PATIENCE_S)

    monkeypatch.setattr(Slurm, "_cancel_later", cancel)
    launcher = Slurm(output, Job("7", "0"))
    for grace_s in (5.0, 0.0, 0.0):
        launcher.stop(handle_of(), grace_s)
        assert output.stop_request("trainer", START).read_text() == f"{grace_s:g}\n"
    wait_for(lambda: bool(cancelled), "the last resort", timeout_s=PATIENCE_S)
    is_over.set()
    for thread in launcher._last_resorts.values():
        thread.join()
    assert cancelled == ["trainer"]


def test_a_stray_whose_agent_is_silent_is_gone_with_it(output: OutputDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "LOST_AFTER_S", 0.0)
    monkeypatch.setattr(agents, "KILLED_WITHIN_S", 1.0)
    record(output, pid=4711, create_time=1.0)
    record(output, start_id="5b", pid=4712, create_time=1.0)
    stray = ProcessId(4711, 1.0)
    assert len(strays_of(output)) == 2
    assert kill_strays(output, {stray}, lambda: None) == set()
    assert output.stop_request("trainer", START).exists() and not output.stop_request("trainer", "5b").exists()
    assert {each.pid for each in strays_of(output)} == {4712}, "what was not meant is left alone"


@pytest.mark.parametrize(
    ("visible", "devices", "seen"),
    [("", [0, 2], "0,2"), ("4,5,6", [0, 2], "4,6"), ("GPU-a,GPU-b", [1], "GPU-b"), ("4,5", [1, 3], "5,3")],
)
def test_the_devices_of_a_daemon_are_counted_among_those_that_its_agent_sees(
    visible: str, devices: list[int], seen: str
) -> None:
    assert visible_devices(visible, devices) == seen


def test_a_daemon_is_asked_once_and_the_shortest_grace_counts(output: OutputDir) -> None:
    agent, sent = Agent(output, "trainer", START, 0), list[int]()
    agent._child = SimpleNamespace(send_signal=sent.append)  # type: ignore[assignment]
    for grace_s in (500.0, 50.0, 5000.0):
        agent.end(None, grace_s)
    assert agent._deadline is not None and 0.0 < agent._deadline - time.monotonic() <= 50.0
    assert sent == [signal.SIGTERM]


class NoRay:
    """In the place of the thread that speaks to Ray: the test says what it reports."""

    def __init__(self, output: OutputDir, address: str) -> None:
        self.starts: list[Any] = []

    def add(self, start: Any) -> None:
        self.starts.append(start)

    def keep_signals(self) -> None:
        """There are none."""


@pytest.fixture
def launcher(output: OutputDir, monkeypatch: pytest.MonkeyPatch) -> RayLauncher:
    monkeypatch.setattr(ray, "RayCluster", NoRay)
    return RayLauncher(output, resources={"big": 1.0})


def started(launcher: RayLauncher, **reported: Any) -> tuple[Handle, Any]:
    handle = launcher.start(DaemonSpec("trainer", ("true",), launcher.output.log("trainer"), num_nodes=2, gpus=4))
    (*_, start) = launcher._cluster.starts  # type: ignore[attr-defined]
    start.node_ids, start.names, start.is_launched = ["a", "b"], list(NODES), True
    for name, value in reported.items():
        setattr(start, name, value)
    return handle, start


def test_an_actor_that_has_died_is_the_reason_and_not_what_its_agent_wrote(launcher: RayLauncher) -> None:
    for dead, seen in (
        ({1}, Ended(None, "its actor on node node2 has died", node=1)),
        ({0}, Ended(-15, ORPHANED, node=1)),
    ):
        handle, start = started(launcher, dead=dead)
        record(launcher.output, 1, start.start_id, state="ended", exit_code=-15, reason=ORPHANED)
        assert launcher.has_news() is False and launcher.look(handle) == seen
    handle, start = started(launcher, trouble="the cluster is gone")
    assert launcher.has_news() and launcher.look(handle) == Ended(None, "the cluster is gone")
    assert launcher.has_news() is False, "it is settled"


def test_a_start_of_an_earlier_supervisor_is_looked_after_from_the_first_look(launcher: RayLauncher) -> None:
    handle = Handle(engine="ray", name="trainer", start_id=START, ref=f"trainer-{START}")
    assert [launcher.look(handle) for _ in range(2)] == [Alive(None)] * 2
    (start,) = launcher._cluster.starts  # type: ignore[attr-defined]
    assert start.ref == handle.ref
    start.trouble = "its placement group is missing"
    assert launcher.has_news() and launcher.look(handle) == Ended(None, start.trouble)


def test_what_a_start_has_in_the_cluster_is_released_after_the_shortest_grace(launcher: RayLauncher) -> None:
    handle, start = started(launcher)
    for grace_s in (500.0, 50.0, 5000.0):
        launcher.stop(handle, grace_s)
    assert 0.0 < start.release_at - time.monotonic() <= 50.0 + LAST_RESORT_S


def test_a_daemon_gets_its_place_and_nothing_that_belongs_to_this_machine_or_to_ray(
    launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv(DEVICES_VARIABLE, "3")
    monkeypatch.setenv("HF_HOME", "/models")
    _, start = started(launcher)
    assert start.bundle == {"CPU": 1.0, "GPU": 4.0, "big": 1.0} and start.num_nodes == 2
    assert start.environ["HF_HOME"] == "/models"
    assert [name for name in start.environ if name.startswith("RAY_") or name == DEVICES_VARIABLE] == []
