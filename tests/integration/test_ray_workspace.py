"""A workspace of real daemons on a real Ray cluster that was there before it: a head and three nodes, on this host.

Quicker, with small programs as daemons: `test_ray`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemons.workspace import SUPERVISOR
from daemons.workspace_reader import read_workspace
from prime_rl.contract.files import wait_for
from tests.patience import PATIENCE_S
from tests.ray_support import MARKS, Cluster, groups, nodes_of, ray_cluster
from tests.several_nodes import SeveralNodes, install_paced, path_with
from tests.system_support import closed

pytestmark = [*MARKS, pytest.mark.release]
TABLE = """
[deployment.ray]
address = "{address}"
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster() as cluster:
        import ray

        ray.init(cluster.address, namespace="prl", log_to_driver=False, configure_logging=False)
        yield cluster


@pytest.fixture(scope="module")
def living(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, untaught_model: Path) -> Iterator[SeveralNodes]:
    folder = tmp_path_factory.mktemp("ray")
    install_paced(folder / "environment")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path_with(folder / "environment"))
        table = TABLE.format(address=cluster.address)
        nodes = SeveralNodes.make(folder, untaught_model, "ray", table, min_nodes=2)
        for _ in closed(nodes.workspace):
            yield nodes


@pytest.fixture
def training(living: SeveralNodes) -> SeveralNodes:
    """The workspace is up, and all runs train."""
    if not read_workspace(living.workspace.output_dir).supervisor_alive:
        living.workspace.up()
    living.all_train()
    return living


def places(nodes: SeveralNodes, name: str) -> list[str]:
    handle = nodes.record(name).handle
    assert handle is not None and handle.engine == "ray", (name, handle)
    return nodes_of(handle.ref)


def test_up_places_two_ranks_and_two_servers_in_the_cluster(training: SeveralNodes) -> None:
    assert set(training.ranks()) == {0, 1} and len(set(places(training, "trainer"))) == 2
    training.wait(lambda: training.record("trainer").state == "running", "the supervisor to see the trainer run")
    training.wait(training.serve_all, "both servers to have the adapters of all runs")


def test_a_killed_rank_ends_its_group_which_starts_again(training: SeveralNodes) -> None:
    training.crash("trainer", training.ranks()[1])
    assert set(training.ranks()) == {0, 1}


def test_a_killed_orchestrator_starts_again(training: SeveralNodes) -> None:
    training.crash("run_b", training.process("run_b"))


def test_a_killed_inference_server_starts_again_and_gets_the_adapters(training: SeveralNodes) -> None:
    training.crash("inference-1", training.process("inference-1"))
    training.wait(training.serve_all, "both servers to have the adapters of all runs")


def test_the_daemons_outlive_the_supervisor_and_the_next_one_adopts_them(training: SeveralNodes) -> None:
    names = ("trainer", "inference", "inference-1")
    before = [training.record(name).child for name in names]
    supervisor = training.record(SUPERVISOR).writer
    os.kill(supervisor.pid, signal.SIGKILL)
    training.wait(lambda: not supervisor.is_running(), "the supervisor to be dead")
    training.workspace.up()
    assert [training.record(name).child for name in names] == before
    training.all_train()
    training.no_strays()


def test_a_lost_node_is_left_and_a_new_one_is_taken(training: SeveralNodes, cluster: Cluster) -> None:
    lost = places(training, "trainer")[1]
    training.restart("trainer", lambda: cluster.ask("remove", lost))
    assert len(places(training, "trainer")) == 2 and lost not in places(training, "trainer")

    before = training.record("trainer").handle
    cluster.ask("remove", places(training, "trainer")[1])
    training.wait(lambda: training.record("trainer").handle not in (None, before), "the trainer to be placed again")
    assert training.record("trainer").state == "starting" and len(places(training, "trainer")) < 2
    cluster.ask("add", "n4")
    training.wait(lambda: training.record("trainer").state == "running", "the trainer to run on the new node")
    training.all_train()
    training.no_strays()
    assert "n4" in places(training, "trainer") and set(training.ranks()) == {0, 1}


def test_all_runs_finish_with_the_weights_of_one_machine_and_down_leaves_nothing(training: SeveralNodes) -> None:
    training.finish()
    training.workspace.prl("down")
    # An agent's last record is written before it ends itself.
    training.wait(lambda: training.workspace.processes() == [], "the agents to end")
    wait_for(lambda: groups() == {}, "the placement groups to go", timeout_s=PATIENCE_S)
    training.check_weights()
