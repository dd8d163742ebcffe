"""Where a group goes on by its proofs, and what a worker finds at the master's address."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.multinode.phases import Phase, Position, RlPhase
from prime_rl.multinode.reach import Doorbell, Ringer, answers
from prime_rl.multinode.records import NodeRecord
from prime_rl.multinode.resume import find_resume

DONE = ("train", "eval", "update", "checkpoint", "done")


def prove(output: OutputDir, iteration: int, *names: str) -> None:
    for name in names:
        path = output.iteration(iteration).proof(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


@pytest.mark.parametrize(
    ("mode", "proven", "phase"),
    [
        (RlPhase.BOTH, 0, Phase.START),
        (RlPhase.BOTH, 1, Phase.EVAL_ROLLOUT),
        (RlPhase.BOTH, 2, Phase.STOP_INFERENCE),
        (RlPhase.BOTH, 3, Phase.CONFIG_READY),
        (RlPhase.BOTH, 4, Phase.RESTART_INFERENCE),
        (RlPhase.ROLLOUT, 0, Phase.START),
        (RlPhase.ROLLOUT, 1, Phase.EVAL_ROLLOUT),
        (RlPhase.UPDATE, 0, Phase.STOP_INFERENCE),
        (RlPhase.UPDATE, 2, Phase.STOP_INFERENCE),
        (RlPhase.UPDATE, 4, Phase.RESTART_INFERENCE),
    ],
)
def test_a_group_goes_on_after_its_last_proof(tmp_path: Path, mode: RlPhase, proven: int, phase: Phase) -> None:
    output = OutputDir(tmp_path)
    prove(output, 1, *DONE)
    prove(output, 2, *DONE[:proven])
    assert find_resume(output, mode) == Position(2, phase)


def test_rollouts_alone_end_with_their_evaluation(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    prove(output, 1, "train", "eval")
    assert find_resume(output, RlPhase.ROLLOUT) == Position(2, Phase.START)
    assert find_resume(output, RlPhase.UPDATE) == Position(1, Phase.STOP_INFERENCE)
    assert find_resume(output, RlPhase.BOTH) == Position(1, Phase.STOP_INFERENCE)


def test_a_worker_knows_its_master_by_its_answer() -> None:
    port = Doorbell("first").port
    assert answers(NodeRecord(0, "first", 1, address="127.0.0.1", port=port), 5.0)
    assert not answers(NodeRecord(0, "second", 1, address="127.0.0.1", port=port), 5.0)
    assert not answers(NodeRecord(0, "first", 1, address="127.0.0.1", port=1), 5.0)


def test_rings_in_vain_are_counted_until_there_is_an_answer() -> None:
    bell = Doorbell("word")
    known = [NodeRecord(0, "word", 1, address="127.0.0.1", port=1)]
    ringer = Ringer(lambda: known[0], 0.01)
    wait_for(lambda: ringer.count("1-word") >= 3, "three rings in vain", timeout_s=30.0)
    assert ringer.count("2-next") == 0, "who was rung before says nothing of another"
    known[0] = NodeRecord(0, "word", 1, address="127.0.0.1", port=bell.port)
    wait_for(lambda: ringer.count("1-word") == 0, "an answer", timeout_s=30.0)
