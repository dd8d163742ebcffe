"""Three nodes with a network each (namespaces, joined by a bridge): one is lost, and comes back. As root only.

In three phases one is cut off or killed, in turn; with PRL_ALL_PHASES=1 both happen in each of the fourteen. How soon a
loss is found, and what each phase leaves, is tested in simulated time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.contract.files import wait_for
from prime_rl.multinode.records import Phase
from tests.budgets import ALL_PHASES
from tests.multinode_support import CONFIG, HEARTBEAT_S, PATIENCE_S, Nodes, check_same_adapter

pytestmark = pytest.mark.release
SOME_PHASES = [Phase.TRAIN_ROLLOUT, Phase.TRAIN, Phase.RESTART_INFERENCE]
PHASES = list(Phase) if ALL_PHASES else SOME_PHASES
# Each node has its network for itself.
RENDEZVOUS_PORT = 29400


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Networks:
    """A bridge in its own namespace, and a namespace for each node with one leg on it."""

    def __init__(self, num_nodes: int) -> None:
        self.prefix = f"prl{os.getpid()}"
        self.names = [f"{self.prefix}n{rank}" for rank in range(num_nodes)]
        self.switch = f"{self.prefix}sw"

    def build(self) -> None:
        for name in (self.switch, *self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.switch, "link", "add", "name", "sw0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "sw0", "up")
        for rank, name in enumerate(self.names):
            ip(
                "-n",
                self.switch,
                "link",
                "add",
                "name",
                f"p{rank}",
                "type",
                "veth",
                "peer",
                "name",
                "veth",
                "netns",
                name,
            )
            ip("-n", self.switch, "link", "set", f"p{rank}", "master", "sw0", "up")
            ip("-n", name, "address", "add", self.address(rank) + "/24", "dev", "veth")
            ip("-n", name, "link", "set", "veth", "up")

    @staticmethod
    def address(rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def plug(self, rank: int, is_in: bool) -> None:
        """At the switch: the node's own interface stays as it is, like with a cut cable."""
        ip("-n", self.switch, "link", "set", f"p{rank}", "up" if is_in else "down")

    def remove(self) -> None:
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def networks() -> Iterator[Networks]:
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    probe = subprocess.run(["ip", "netns", "add", f"prl{os.getpid()}try"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.strip()}")
    ip("netns", "del", f"prl{os.getpid()}try")
    made = Networks(3)
    try:
        made.build()
        yield made
    finally:
        made.remove()


def config(model: Path) -> str:
    return CONFIG.format(
        model=model, groups=8, rollouts=4, examples=4, updates=2, heartbeat_s=HEARTBEAT_S, port=RENDEZVOUS_PORT
    )


@pytest.mark.release
@pytest.mark.parametrize("first", ["cut", "killed"] if ALL_PHASES else ["cut"])
def test_a_node_that_is_lost_is_named_in_time_and_the_same_commands_again_end_as_undisturbed(
    tmp_path: Path, base_model: Path, networks: Networks, first: str
) -> None:
    prefixes = {rank: ("ip", "netns", "exec", name) for rank, name in enumerate(networks.names)}
    nodes = Nodes(tmp_path / "lost", config(base_model), "--max-iterations 1 --eval-interval 1", prefixes=prefixes)
    try:
        for number, phase in enumerate(PHASES):
            lose(nodes, networks, phase, "cut" if (number % 2 == 0) == (first == "cut") else "killed")
        nodes.start()
        assert nodes.wait() == {0: 0, 1: 0, 2: 0}, nodes.last_line(0)
        nodes.check_nothing_is_left()
        assert sorted(nodes.proof(1, "train")["sources"]) == nodes.made(1), "each task once"
        check_same_adapter(nodes, replay(nodes, tmp_path / "replayed", base_model))
    finally:
        nodes.kill_all()
        wait_for(lambda: not nodes.left(), "all nodes to end", timeout_s=PATIENCE_S)


def lose(nodes: Nodes, networks: Networks, phase: Phase, how: str) -> None:
    """One node is lost in that phase; the others end in time and name it."""
    victim = phase % 3
    nodes.start(kill=(victim, phase), hold="1" if how == "cut" else "")
    if how == "cut":
        nodes.wait_phase(victim, phase)
        status = nodes.status(victim)
        assert status is not None and status.address == networks.address(victim)
        networks.plug(victim, False)
    else:
        assert nodes.running[victim].wait() == -signal.SIGKILL
    codes = nodes.wait()
    networks.plug(victim, True)
    assert codes == {rank: -9 if how == "killed" and rank == victim else 75 for rank in range(3)}, nodes.last_line(0)
    for rank in {0, 1, 2} - ({victim} if how == "killed" else set()):
        said = nodes.last_line(rank)
        assert f"node {victim} (" in said and ("is cut off" if how == "cut" else "no heartbeat") in said, said
        assert f"phase {int(phase)} (" in said, said
    nodes.check_nothing_is_left()


def replay(nodes: Nodes, folder: Path, model: Path) -> Nodes:
    """One undisturbed node trains on the rollouts that they recorded."""
    other = Nodes(folder, config(model), "--rl-phase update --max-iterations 1", num_nodes=1)
    shutil.copytree(nodes.output.iteration(1).path, other.output.iteration(1).path, ignore=without_updates)
    try:
        other.start()
        assert other.wait() == {0: 0}, other.last_line(0)
    finally:
        other.kill_all()
    return other


def without_updates(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("train")} | {"trainer.toml"}
