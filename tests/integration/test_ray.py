"""Daemons on a real Ray cluster: a head and three nodes, all on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import psutil
import pytest

from daemons.launchers.agent import START_MARK, AgentRecord, log_of, read_starts
from daemons.launchers.base import Alive, Ended, Handle
from daemons.launchers.ray import RayLauncher
from daemons.specs import TRAINER, DaemonSpec
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus
from tests.patience import PATIENCE_S, until_seen
from tests.ray_support import MARKS, Cluster, groups, ray_cluster

pytestmark = MARKS
WAITS = "import time; print('ready', flush=True); time.sleep(600)"
POLITE = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); {WAITS}"
STUBBORN = (
    "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'\n"
    f"subprocess.Popen([sys.executable, '-c', code], start_new_session=True); {WAITS}"
)
# Two ranks that meet, and add their numbers up.
RANKS = (
    "import os, torch; import torch.distributed as dist; dist.init_process_group('gloo')\n"
    "one = torch.tensor([dist.get_rank() + 1.0]); dist.all_reduce(one)\n"
    "print('sum', one.item(), 'of', dist.get_world_size(), 'at rank', dist.get_rank(), flush=True)\n"
    "dist.destroy_process_group()"
)
# A supervisor in one line: it starts a daemon, tells its handle, and waits to be killed.
SUPERVISOR = """
import sys, time, msgspec
from pathlib import Path
from daemons.launchers.ray import RayLauncher
from daemons.specs import DaemonSpec
from prime_rl.contract.layout import OutputDir
output = OutputDir(Path(sys.argv[1]))
handle = RayLauncher(output, sys.argv[2]).start(DaemonSpec("trainer", tuple(sys.argv[3:]), output.log("trainer")))
print(msgspec.json.encode(handle).decode(), flush=True)
time.sleep(600)
"""
# Another, whose cluster is not there.
STRANGER = """
import sys, time
from pathlib import Path
from daemons.launchers.base import Ended
from daemons.launchers.ray import RayLauncher
from daemons.specs import DaemonSpec
from prime_rl.contract.layout import OutputDir
output = OutputDir(Path(sys.argv[1]))
launcher = RayLauncher(output, "127.0.0.1:1")
handle = launcher.start(DaemonSpec("trainer", ("true",), output.log("trainer")))
while not isinstance(seen := launcher.look(handle), Ended):
    time.sleep(0.1)
print(seen.reason)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def output(tmp_path: Path) -> Iterator[OutputDir]:
    output = OutputDir(tmp_path)
    output.daemons.mkdir()
    yield output
    assert members(output) == [], "processes are left"


@pytest.fixture
def launcher(cluster: Cluster, output: OutputDir) -> RayLauncher:
    return RayLauncher(output, cluster.address)


def spec(output: OutputDir, code: str, *, num_nodes: int = 1, min_nodes: int = 1) -> DaemonSpec:
    argv = (sys.executable, "-c", code)
    return DaemonSpec(TRAINER, argv, output.log(TRAINER), num_nodes=num_nodes, min_nodes=min_nodes)


def members(output: OutputDir) -> list[psutil.Process]:
    """All processes of the workspace's starts: agents, daemons and what they started."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except (psutil.Error, OSError):
            continue
        if START_MARK in environ and environ.get("PRL_OUTPUT_DIR") == str(output.path.resolve()):
            found.append(process)
    return found


def records(output: OutputDir, handle: Handle) -> Mapping[int, AgentRecord]:
    return read_starts(output, handle.name, handle.start_id)


def until_ready(launcher: RayLauncher, handle: Handle, num_nodes: int = 1) -> None:
    """Until the daemon has printed that it is ready, on each node."""

    def is_ready() -> bool:
        assert isinstance(launcher.look(handle), Alive), launcher.look(handle)
        logs = [log_of(launcher.output, handle.name, node) for node in range(num_nodes)]
        return len(records(launcher.output, handle)) == num_nodes and all("\nready" in log.read_text() for log in logs)

    until_seen(is_ready, "the daemon to run")


def until_ended(launcher: RayLauncher, handle: Handle) -> Ended:
    seen: list[Alive | Ended] = []

    def has_ended() -> bool:
        seen.append(launcher.look(handle))
        return isinstance(seen[-1], Ended)

    until_seen(has_ended, "the daemon to end")
    until_seen(lambda: members(launcher.output) == [], "all of it to end")
    until_seen(lambda: handle.ref not in groups(), "its placement group to go")
    assert isinstance(seen[-1], Ended)
    return seen[-1]


def test_relative_paths_begin_where_the_supervisor_is(
    launcher: RayLauncher, output: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = output.path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    handle = launcher.start(spec(output, "import os; print('in', os.getcwd())"))
    assert until_ended(launcher, handle).exit_code == 0
    assert f"\nin {place.resolve()}\n" in log_of(output, TRAINER, 0).read_text()


def test_a_daemon_runs_and_its_exit_code_and_log_are_seen(launcher: RayLauncher, output: OutputDir) -> None:
    handle = launcher.start(spec(output, "import sys; print('hello'); sys.exit(3)"))
    assert until_ended(launcher, handle) == Ended(3)
    assert launcher.logs(handle).read_text().endswith("hello\n")


def test_a_daemon_ends_as_asked_with_time_and_without(launcher: RayLauncher, output: OutputDir) -> None:
    polite = launcher.start(spec(output, POLITE))
    until_ready(launcher, polite)
    launcher.stop(polite, PATIENCE_S)
    assert until_ended(launcher, polite).exit_code == 7
    stubborn = launcher.start(spec(output, STUBBORN))
    until_ready(launcher, stubborn)
    log = log_of(output, stubborn.name)
    until_seen(lambda: log.read_text().count("\nready") == 2, "the second daemon to run, in the log of the first")
    launcher.stop(stubborn, 0)
    launcher.stop(stubborn, 0)
    assert until_ended(launcher, stubborn).exit_code in (None, -signal.SIGKILL)


@pytest.mark.release
def test_a_daemon_outlives_a_killed_supervisor_and_is_adopted(
    launcher: RayLauncher, cluster: Cluster, output: OutputDir
) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(output.path), cluster.address, sys.executable, "-c", POLITE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as supervisor:
        assert supervisor.stdout is not None
        handle = msgspec.json.decode(supervisor.stdout.readline(), type=Handle)
        until_seen(
            lambda: launcher.logs(handle).exists() and "\nready" in launcher.logs(handle).read_text(), "the daemon"
        )
        until_seen(lambda: 0 in records(output, handle), "the first record of its agent")
        supervisor.kill()
    status = DaemonStatus(name=TRAINER, state="running", handle=handle)
    assert launcher.adopt(status) == handle
    before = records(output, handle)[0].beat
    until_seen(lambda: records(output, handle)[0].beat > before + 2, "some beats after the kill")
    seen = launcher.look(handle)
    assert isinstance(seen, Alive) and seen.process is not None and seen.process.is_running()
    launcher.stop(handle, PATIENCE_S)
    assert until_ended(launcher, handle).exit_code == 7
    assert launcher.adopt(status) is None


def test_a_killed_actor_leaves_no_orphan(launcher: RayLauncher, output: OutputDir) -> None:
    handle = launcher.start(spec(output, WAITS))
    until_ready(launcher, handle)
    agent = psutil.Process(records(output, handle)[0].pid).parent()
    assert agent is not None
    os.kill(agent.ppid(), signal.SIGKILL)
    ended = until_ended(launcher, handle)
    assert ended.exit_code in (None, -signal.SIGTERM)


@pytest.mark.release
def test_a_lost_node_ends_its_start_and_a_new_one_takes_its_place(
    launcher: RayLauncher, cluster: Cluster, output: OutputDir
) -> None:
    whole = launcher.start(spec(output, WAITS, num_nodes=3, min_nodes=3))
    until_ready(launcher, whole, num_nodes=3)
    cluster.ask("remove", "n2")
    ended = until_ended(launcher, whole)
    assert ended.exit_code is None and ended.reason is not None and "n2" in ended.reason
    fewer = launcher.start(spec(output, WAITS, num_nodes=3, min_nodes=2))
    until_ready(launcher, fewer, num_nodes=2)
    launcher.stop(fewer, 0)
    until_ended(launcher, fewer)
    waits = launcher.start(spec(output, WAITS, num_nodes=3, min_nodes=3))
    until_seen(lambda: waits.ref in groups(), "its placement group")
    assert launcher.look(waits) == Alive(None) and records(output, waits) == {}
    cluster.ask("add", "n4")
    until_ready(launcher, waits, num_nodes=3)
    launcher.stop(waits, 0)
    until_ended(launcher, waits)


@pytest.mark.release
def test_ranks_on_two_nodes_meet(launcher: RayLauncher, output: OutputDir) -> None:
    script = output.path / "ranks.py"
    script.write_text(RANKS)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script))
    handle = launcher.start(DaemonSpec(TRAINER, torchrun, output.log(TRAINER), num_nodes=2, min_nodes=2))
    ended = until_ended(launcher, handle)
    assert (ended.exit_code, ended.reason, ended.left) == (0, None, frozenset())
    for node in range(2):
        assert f"sum 3.0 of 2 at rank {node}" in log_of(output, TRAINER, node).read_text()


def test_a_cluster_that_is_away_is_reported(output: OutputDir) -> None:
    """In a process of its own: one process is connected to one cluster."""
    command = [sys.executable, "-c", STRANGER, str(output.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "no answer from the Ray cluster at 127.0.0.1:1: [Errno 111] Connection refused" in done.stdout
