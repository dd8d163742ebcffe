"""Real nodes over one folder: iterations of rollouts, evaluation and training; kills; modes; elastic groups.

Training is killed here where the group goes on without the node; test_multinode_network cuts it off where it must not.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import list_steps
from prime_rl.contract.types import read_batch
from prime_rl.multinode.records import Phase
from prime_rl.multinode.work import Plan
from tests.budgets import ALL_PHASES
from tests.learning import ascent_of_adapter
from tests.multinode_support import CONFIG, HEARTBEAT_S, Nodes, check_same_adapter, interrupt
from tests.patience import PATIENCE_S
from tests.ports import free_port

pytestmark = pytest.mark.release
GROUPS = 32
ROLLOUTS = 8
UPDATES = 4
EXAMPLES = 12
PHASES = list(Phase) if ALL_PHASES else [Phase.TRAIN_ROLLOUT]


def config(model: Path) -> str:
    return CONFIG.format(
        model=model,
        groups=GROUPS,
        rollouts=ROLLOUTS,
        examples=EXAMPLES,
        updates=UPDATES,
        heartbeat_s=HEARTBEAT_S,
        port=free_port(),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Iterator[Nodes]:
    """Two iterations, with evaluation, of two nodes: what is made does not depend on how many there are."""
    flags = "--max-iterations 2 --eval-interval 1"
    nodes = Nodes(tmp_path_factory.mktemp("group"), config(base_model), flags, num_nodes=2)
    try:
        nodes.start()
        assert nodes.wait() == {0: 0, 1: 0}, nodes.last_line(0)
        yield nodes
    finally:
        nodes.kill_all()


@pytest.mark.numeric
def test_two_iterations_make_each_task_once_and_train(undisturbed: Nodes, base_model: Path) -> None:
    nodes = undisturbed
    nodes.check_nothing_is_left()
    run = nodes.output.run("run_multinode")
    for iteration in (1, 2):
        tasks = [str(task) for task in range((iteration - 1) * GROUPS, iteration * GROUPS)]
        aggregate = nodes.proof(iteration, "train")
        assert sorted(aggregate["sources"], key=int) == tasks
        assert sorted(nodes.made(iteration), key=int) == tasks
        assert len(set(aggregate["sources"].values())) == 2, "each node has made some"
        assert aggregate["policy_version"] == (iteration - 1) * UPDATES
        assert nodes.proof(iteration, "update")["num_rollouts"] == ROLLOUTS * GROUPS
        assert (nodes.output.iteration(iteration).path / "adapter" / "adapter_model.safetensors").exists()
        assert nodes.proof(iteration, "checkpoint")["step"] == iteration * UPDATES
        assert nodes.proof(iteration, "eval")["num_rollouts"] == EXAMPLES
    assert list_steps(run.broadcast, stable_only=True)[-1] == 2 * UPDATES
    assert 2 * UPDATES in list_steps(run.checkpoints, stable_only=True)
    samples = [each for step in range(1, UPDATES + 1) for each in read_batch(run.rollout_file(step)).samples]
    assert {sample.policy_version for sample in samples} == {0}
    ascent_of_adapter(base_model, nodes.output.iteration(1).path / "adapter", samples[::4]).check()


@pytest.mark.release
def test_kills_cost_no_task_and_change_nothing(tmp_path: Path, base_model: Path, undisturbed: Nodes) -> None:
    nodes = Nodes(tmp_path, config(base_model), "--max-iterations 1", num_nodes=2)
    try:
        for phase in PHASES:
            victim = (phase + 1) // 2 % 2
            nodes.start(kill=(victim, phase))
            codes = nodes.wait()
            assert codes == {victim: -signal.SIGKILL, 1 - victim: 75}, (phase, nodes.last_line(0))
            said = nodes.last_line(1 - victim)
            assert f"node {victim} (" in said and "no heartbeat for" in said, said
            assert f"phase {int(phase)} (" in said, said
            nodes.check_nothing_is_left()
        nodes.start()
        assert nodes.wait() == {0: 0, 1: 0}, nodes.last_line(0)
        nodes.check_nothing_is_left()
        assert nodes.made(1) == sorted(nodes.proof(1, "train")["sources"]), "no task was made twice"
        assert nodes.results(1) == undisturbed.results(1)
        check_same_adapter(nodes, undisturbed)
    finally:
        nodes.kill_all()


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Iterator[Nodes]:
    """Rollouts alone and without end, elastic: node 2 is killed and started again at once, node 1 is interrupted."""
    flags = "--rl-phase rollout --rollout-split train-only --elastic"
    nodes = Nodes(tmp_path_factory.mktemp("elastic"), config(base_model), flags)
    try:
        nodes.start(kill=(2, Phase.TRAIN_ROLLOUT))
        assert nodes.running[2].wait() == -signal.SIGKILL
        nodes.running[2] = nodes.start_one(2)
        wait_for(
            lambda: of_all_nodes(nodes) is not None, "an iteration with rollouts of all nodes", timeout_s=PATIENCE_S
        )
        interrupt(nodes.running[1])
        assert nodes.wait() == {0: 130, 1: 130, 2: 130}, nodes.last_line(0)
        nodes.check_nothing_is_left()
        yield nodes
    finally:
        nodes.kill_all()


def of_all_nodes(nodes: Nodes) -> int | None:
    """An iteration after the first in which every node made rollouts. When a node is back depends on the machine."""
    status = nodes.status(0)
    for number in range(2, (status.iteration if status else 0) + 1):
        if all(nodes.output.iteration(number).rank_files("train", rank=rank) for rank in range(3)):
            return number
    return None


def test_survivors_share_the_open_tasks_and_the_lost_node_comes_back(rollouts: Nodes, undisturbed: Nodes) -> None:
    assert rollouts.results(1) == undisturbed.results(1), "each task once, from any node"
    (path,) = rollouts.output.iteration(1).path.glob("train_plan_*_1.json")
    plan = msgspec.json.decode(path.read_bytes(), type=Plan)
    num_open = sum(map(len, plan.parts.values()))
    assert num_open, "at least the task that was torn"
    assert plan.parts.keys() == {0, 1} and abs(len(plan.parts[0]) - 2 * num_open / 3) < 1
    assert num_open + sum(map(len, plan.taken.values())) == GROUPS
    assert of_all_nodes(rollouts), "its share is made by the others only while it is away"
    for rank in (0, 1):
        said = rollouts.log(rank).read_text()
        assert "the group goes on with nodes 0, 1: node 2 (" in said
        assert "the group goes on with nodes 0, 1, 2: node 2 (" in said
    assert all("node 1 (" in rollouts.last_line(rank) and "left in" in rollouts.last_line(rank) for rank in (0, 2))


@pytest.mark.release
@pytest.mark.numeric
def test_an_update_of_those_rollouts_goes_on_with_the_ranks_that_are_left(rollouts: Nodes, undisturbed: Nodes) -> None:
    nodes = rollouts
    nodes.use("--rl-phase update --max-iterations 1 --elastic")
    nodes.start(kill=(1, Phase.TRAIN))
    assert nodes.wait() == {0: 0, 1: -signal.SIGKILL, 2: 0}, nodes.last_line(0)
    nodes.check_nothing_is_left()
    commands = [line for line in nodes.output.log("node_0_trainer").read_text().splitlines() if line.startswith("$ ")]
    assert ["--nnodes 3 " in commands[0], "--nnodes 2 " in commands[-1]] == [True, True], commands
    check_same_adapter(nodes, undisturbed)
