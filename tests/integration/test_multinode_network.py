"""Three nodes with a network each (namespaces, joined by a bridge): one is cut off, and comes back. As root only."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.contract.files import wait_for
from prime_rl.contract.status import NodeStatus, read_status
from prime_rl.multinode.phases import Phase
from tests.multinode_support import CONFIG, HEARTBEAT_S, Nodes

# Detection, and the end of what was under way; on a machine that other tests keep busy.
BOUND_S = 3 * HEARTBEAT_S + 5.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Networks:
    """A bridge in a namespace of its own, and a namespace for each node with one leg on it."""

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
    probe = subprocess.run(["ip", "netns", "add", f"prl{os.getpid()}try"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.strip()}")
    ip("netns", "del", f"prl{os.getpid()}try")
    made = Networks(3)
    try:
        made.build()
        yield made
    finally:
        made.remove()


def test_a_node_that_is_cut_off_is_named_in_time_and_back_again_it_trains(
    tmp_path: Path, able_model: Path, networks: Networks
) -> None:
    text = CONFIG.format(
        model=able_model, groups=4, rollouts=4, examples=4, updates=1, heartbeat_s=HEARTBEAT_S, port=29400
    )
    prefixes = {rank: ("ip", "netns", "exec", name) for rank, name in enumerate(networks.names)}
    nodes = Nodes(tmp_path, text, "--max-iterations 1", prefixes=prefixes)
    try:
        nodes.start()
        nodes.wait_phase(2, Phase.TRAIN)
        for rank in range(3):
            status = read_status(nodes.output.node_status(rank), NodeStatus)
            assert status is not None and status.address == networks.address(rank)
        networks.plug(2, False)
        cut_s = time.monotonic()
        assert nodes.wait() == {0: 75, 1: 75, 2: 75}, nodes.last_line(0)
        took_s = time.monotonic() - cut_s
        assert took_s < BOUND_S, f"took {took_s:.1f} s"
        for rank in range(3):
            said = nodes.last_line(rank)
            assert "node 2 (" in said and "is cut off" in said and "phase 10 (train)" in said, said
        nodes.check_nothing_is_left()
        networks.plug(2, True)
        nodes.start()
        assert nodes.wait() == {0: 0, 1: 0, 2: 0}, nodes.last_line(0)
        assert nodes.proof(1, "checkpoint")["step"] == 1
        nodes.check_nothing_is_left()
    finally:
        nodes.kill_all()
        wait_for(lambda: not nodes.left(), "all nodes to end", timeout_s=30.0)
