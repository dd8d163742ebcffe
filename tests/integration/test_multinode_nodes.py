"""Two real nodes that are not alike: one whose main loop stands still, one with more ranks of the trainer.

And two that draw what one draws alone, when that depends on earlier rewards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemons.cli import run
from prime_rl.contract.files import wait_for
from prime_rl.contract.types import TrainingBatch, read_batch
from prime_rl.multinode.records import Phase
from tests.multinode_support import CONFIG, HEARTBEAT_S, Nodes, processes
from tests.patience import PATIENCE_S
from tests.ports import free_port

# A quarter of it is when a node counts as stalled: nothing that a busy machine does to a loop takes so long.
LOOP_TIMEOUT_S = 40.0


def config(model: Path) -> str:
    own = f"loop_timeout_s = {LOOP_TIMEOUT_S}\n"
    return own + CONFIG.format(
        model=model, groups=4, rollouts=2, examples=4, updates=1, heartbeat_s=HEARTBEAT_S, port=free_port()
    )


@pytest.fixture
def nodes(tmp_path: Path, base_model: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, config(base_model), "--max-iterations 1", num_nodes=2)
    try:
        yield made
    finally:
        made.kill_all()


@pytest.mark.slow
def test_a_node_whose_loop_stands_still_is_stalled_then_given_up_by_name(nodes: Nodes, capsys: Any) -> None:
    nodes.start(kill=(1, Phase.START), hold="loop")

    def health() -> str | None:
        assert run(["multinode", "status", "--log-path", str(nodes.output.path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["nodes"]
        return found[1]["health"] if len(found) == 2 else None

    nodes.wait_phase(1, Phase.START)
    wait_for(lambda: health() == "stalled", "node 1 to be stalled", timeout_s=PATIENCE_S)
    assert nodes.running[0].wait(PATIENCE_S) == 75
    said = nodes.log(0).read_text()
    assert "waits for iteration 1, phase 0 (sync): node 1 (" in said
    assert "node 1 (" in nodes.last_line(0) and "is alive but its loop has stood still for" in nodes.last_line(0)
    assert nodes.running[1].poll() is None


@pytest.mark.release
def test_nodes_may_have_different_numbers_of_ranks(nodes: Nodes) -> None:
    """Two on the first, one on the second: the trainer is one world of three."""
    nodes.own_flags = {0: ["--gpus-per-node", "2"]}
    nodes.start()
    seen: dict[int, str] = {}

    def look() -> bool:
        for process in processes(nodes.mark):
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            if "LOCAL_RANK" in environment:
                seen[int(environment["RANK"])] = environment["WORLD_SIZE"]
        return all(process.poll() is not None for process in nodes.running.values())

    wait_for(look, "all nodes to end", timeout_s=PATIENCE_S)
    assert nodes.wait() == {0: 0, 1: 0}, nodes.last_line(0)
    assert seen == {0: "3", 1: "3", 2: "3"}
    assert nodes.proof(1, "checkpoint") == {"step": 1}
    nodes.check_nothing_is_left()


def batches(nodes: Nodes) -> list[TrainingBatch]:
    return [read_batch(nodes.output.run("run_multinode").rollout_file(step)) for step in (1, 2)]


@pytest.mark.release
def test_two_nodes_that_are_started_again_draw_what_one_draws(tmp_path: Path, base_model: Path) -> None:
    """The base model works out no sum: iteration 1 settles four of five examples, and the fifth stands in for them."""
    text = config(base_model).replace("[run]\n", "[run]\nsettled_share = 0.1\n")
    text = text.replace('"reverse-text"\nargs = {', '"arithmetic"\nargs = { num_examples = 5,')
    one = Nodes(tmp_path / "one", text, "", num_nodes=1)
    two = Nodes(tmp_path / "two", text, "", num_nodes=2)
    try:
        for nodes, num_iterations in ((one, 2), (two, 1), (two, 2)):
            nodes.use(f"--max-iterations {num_iterations}")
            nodes.start()
            assert set(nodes.wait().values()) == {0}, nodes.last_line(0)
    finally:
        for nodes in (one, two):
            nodes.kill_all()
    for ours, theirs in zip(batches(two), batches(one), strict=True):
        assert [sample.example_id for sample in ours.samples] == [sample.example_id for sample in theirs.samples]
        assert ours.sampler_state == theirs.sampler_state
    first, second = ({sample.example_id for sample in batch.samples} for batch in batches(one))
    assert (len(first), len(second)) == (4, 1) and not first & second
    lines = [json.loads(line) for line in two.output.run("run_multinode").orchestrator_metrics.read_text().splitlines()]
    assert [line["env/arithmetic/settled_wrong"] for line in lines if "reward/mean" in line] == [4, 5]
