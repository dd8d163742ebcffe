"""A workspace of real daemons on a real Slurm of three nodes, through one fault after another.

Each test finds three runs that train, does one thing to them, and needs all three to train on. At the end nothing is
lost: their adapters are those of one machine. Quicker, with stand-ins for the daemons: `test_slurm`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from daemons.launchers.slurm import find_step
from daemons.workspace import SUPERVISOR
from daemons.workspace_reader import read_workspace
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import list_steps
from tests.budgets import in_release
from tests.patience import PATIENCE_S
from tests.several_nodes import NUM_RANKS, SeveralNodes, install_paced, path_with
from tests.slurm_support import MISSING, WHY_SKIPPED, SlurmCluster, slurm_cluster
from tests.system_support import closed

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.release,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(MISSING), reason=WHY_SKIPPED),
]
TABLE = """
[deployment.slurm]
nodes = 3
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def living(
    cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory, untaught_model: Path
) -> Iterator[SeveralNodes]:
    folder = tmp_path_factory.mktemp("slurm")
    install_paced(folder / "environment")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.conf))
        patch.setenv("PYTHONPATH", path_with(folder / "environment"))
        nodes = SeveralNodes.make(folder, untaught_model, "slurm", TABLE)
        for _ in closed(nodes.workspace):
            yield nodes
            cluster.restore()  # a job does not end on a node without a slurmd


@pytest.fixture
def training(cluster: SlurmCluster, living: SeveralNodes) -> SeveralNodes:
    """All nodes are there, the job runs on them, and all runs train."""
    cluster.restore()
    if not read_workspace(living.workspace.output_dir).supervisor_alive:
        living.workspace.up()
    living.all_train()
    return living


def nodes_of(nodes: SeveralNodes, name: str) -> list[str]:
    handle = nodes.record(name).handle
    assert handle is not None and handle.engine == "slurm", (name, handle)
    return handle.ref.split()[2].split(",")


def job_of(nodes: SeveralNodes) -> str:
    handle = nodes.record("trainer").handle
    assert handle is not None
    return handle.ref.split()[0]


def set_down(cluster: SlurmCluster, node: str) -> None:
    cluster.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")


def test_up_places_two_ranks_and_two_servers_on_nodes_of_their_own(training: SeveralNodes) -> None:
    assert len(set(nodes_of(training, "trainer"))) == NUM_RANKS
    training.wait(lambda: training.record("trainer").state == "running", "the supervisor to see the trainer run")
    assert {rank: process.environ()["SLURMD_NODENAME"] for rank, process in training.ranks().items()} == dict(
        enumerate(nodes_of(training, "trainer"))
    )
    assert nodes_of(training, "inference") != nodes_of(training, "inference-1")
    training.wait(training.serve_all, "both servers to have the adapters of all runs")


@pytest.mark.release
def test_a_killed_rank_ends_its_group_which_starts_again(training: SeveralNodes) -> None:
    training.crash("trainer", training.ranks()[1])
    assert set(training.ranks()) == {0, 1}


@pytest.mark.release
def test_a_killed_orchestrator_starts_again(training: SeveralNodes) -> None:
    training.crash("run_b", training.process("run_b"))


@pytest.mark.release
def test_a_killed_inference_server_starts_again_and_gets_the_adapters(training: SeveralNodes) -> None:
    training.crash("inference-1", training.process("inference-1"))
    training.wait(training.serve_all, "both servers to have the adapters of all runs")


def test_a_killed_slurmd_and_its_stepds_leave_nothing_behind(training: SeveralNodes, cluster: SlurmCluster) -> None:
    lost = nodes_of(training, "trainer")[-1]

    def kill() -> None:
        stepds = cluster.stepds(lost)
        assert stepds
        cluster.daemons[lost].kill()
        for stepd in stepds:
            stepd.kill()

    training.restart("trainer", kill)
    assert lost not in nodes_of(training, "trainer")
    training.wait(lambda: not cluster.processes(lost), f"no process to be left on {lost}")


def test_a_cancelled_step_starts_again(
    training: SeveralNodes, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm kills all of the step, agents too: none can tell why, unless one outlives its neighbour's ranks."""
    monkeypatch.setattr("daemons.launchers.slurm.COMMAND_TIMEOUT_S", PATIENCE_S)  # of this process alone
    handle = training.record("trainer").handle
    assert handle is not None
    step = find_step(job_of(training), handle.start_id)
    assert step is not None
    began = time.time()
    training.restart("trainer", lambda: cluster.call("scancel", step))
    reasons = [crash.reason for crash in training.record("trainer").crashes if crash.at >= began]
    assert "its agent left no final record: srun exit code" in reasons[0] or reasons[0].startswith("exit code"), reasons
    assert set(training.ranks()) == set(range(len(nodes_of(training, "trainer"))))


def test_nodes_that_are_set_down_are_left_until_the_trainer_has_one(
    training: SeveralNodes, cluster: SlurmCluster
) -> None:
    assert len(nodes_of(training, "trainer")) == NUM_RANKS
    while len(nodes := nodes_of(training, "trainer")) > 1:
        training.restart("trainer", partial(set_down, cluster, nodes[-1]))
        assert nodes[-1] not in nodes_of(training, "trainer")
    assert nodes_of(training, "trainer") == nodes[:1]
    assert set(training.ranks()) == {0}


def test_a_requeued_job_goes_on(training: SeveralNodes, cluster: SlurmCluster) -> None:
    job = job_of(training)
    training.restart("trainer", lambda: cluster.call("scontrol", "requeue", job))
    assert job_of(training) == job and set(training.ranks()) == {0, 1}


@pytest.mark.parametrize("how", ["supervisor killed", *in_release("first node down")])
def test_the_death_of_the_supervisor_ends_the_job_and_the_next_one_goes_on(
    training: SeveralNodes, cluster: SlurmCluster, how: str
) -> None:
    job, before = job_of(training), training.published()
    if how == "supervisor killed":
        os.kill(training.record(SUPERVISOR).writer.pid, signal.SIGKILL)
    else:
        set_down(cluster, cluster.call("squeue", "-h", "-j", job, "-o", "%B").strip())
    training.wait(lambda: cluster.job_state(job) == "", "the job to end")
    wait_for(lambda: not cluster.processes(), "no process to be left", timeout_s=PATIENCE_S)
    cluster.restore()
    training.workspace.up()
    training.all_train()
    training.no_strays()
    assert job_of(training) != job
    assert all(training.published()[run_id] >= step for run_id, step in before.items())


def test_the_time_limit_is_announced_and_everything_is_saved(training: SeveralNodes, cluster: SlurmCluster) -> None:
    job = job_of(training)
    # The warning comes 130 s before the limit (`_MARGIN_S` and what the daemons may take).
    minutes = int(cluster.call("squeue", "-h", "-j", job, "-o", "%M").split(":")[-2])
    cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 3}")
    training.wait(lambda: cluster.job_state(job) == "", "the job to end")
    wait_for(lambda: not cluster.processes(), "no process to be left", timeout_s=PATIENCE_S)
    assert training.record("trainer").state == "stopped"
    for run_id, step in training.published().items():
        assert list_steps(training.workspace.run_dir(run_id).checkpoints, stable_only=True)[-1] == step, run_id


@pytest.mark.release
def test_all_runs_finish_with_the_weights_of_one_machine_and_down_leaves_nothing(
    training: SeveralNodes, cluster: SlurmCluster
) -> None:
    job = job_of(training)
    training.finish()
    assert f"ending job {job} (RUNNING" in training.workspace.prl("down").stdout
    assert cluster.job_state(job) == ""
    wait_for(lambda: not cluster.processes(), "no process to be left", timeout_s=PATIENCE_S)
    training.check_weights()
