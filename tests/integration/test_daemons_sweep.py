"""A sweep of six runs on two slots with successive halving, on a living system: one winner, sums that add up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemons.halving import Decision, read_decisions
from prime_rl.contract.status import TrainerStatus, read_status
from tests.integration.test_system_sharing import wait_until_let_go
from tests.system_support import Workspace, closed, greedy_answer, make_workspace

pytestmark = pytest.mark.release

NUM_RUNS = 6
MAX_STEPS = 60
QUESTIONS = "Reverse: abc", "Reverse: hello", "Copy: xyz"


@pytest.fixture
def workspace(base_model: Path, tmp_path: Path) -> Iterator[Workspace]:
    yield from closed(make_workspace(tmp_path, base_model, slots=2))


def test_a_sweep_with_halving_ends_with_one_winner(workspace: Workspace) -> None:
    def decided() -> list[Decision]:
        return [each for each in read_decisions(workspace.paths, "seeds").rungs if each.carried_out]

    file = workspace.write_run("base", max_steps=MAX_STEPS)
    seeds = ",".join(str(seed) for seed in range(NUM_RUNS))
    workspace.prl("runs", "sweep", str(file), "--set", f"seed={seeds}", "--halving", "3", "--name", "seeds")
    workspace.up()
    workspace.wait(lambda: len(decided()) == 2, "both rungs")
    first, second = decided()
    assert (first.step, len(first.kept), len(first.lost)) == (7, 2, 4)
    assert (second.step, len(second.kept), len(second.lost)) == (20, 1, 1)

    def goes_on() -> bool:
        winner = workspace.runs()[second.kept[0]]
        return winner["run_idx"] is not None or winner["step"] == MAX_STEPS

    workspace.wait(goes_on, "the winner to have a slot again")
    runs = workspace.runs()
    for run_id in [*first.lost, *second.lost]:
        step, reason = runs[run_id]["step"], runs[run_id]["reason"]
        assert runs[run_id]["state"] == "finished" and first.step <= step <= MAX_STEPS
        # A very quick run is through before the supervisor looks.
        assert step == MAX_STEPS or reason.startswith("ended by halving at rung ")
    audit = [json.loads(line) for line in workspace.paths.audit.read_text().splitlines()]
    assert {line["run_id"] for line in audit if line["action"] == "halving"} >= set(first.lost) | set(second.lost)

    (winner,), out = second.kept, workspace.output_dir.parent / "winner"
    workspace.prl("runs", "pause", winner, check=False)  # its newest version stays the newest; it may have finished
    wait_until_let_go(workspace, winner)
    check_usage(workspace)
    workspace.prl("runs", "export", winner, "--merge", "--out", str(out))
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(out)
    for question in QUESTIONS:
        assert greedy_answer(merged, out, question) == workspace.answer(winner, question)


def check_usage(workspace: Workspace) -> None:
    """The six runs add up to the total, which is what the trainer's own clock counted. Nothing trains."""
    runs, tags = (workspace.json("usage", "--by", by) for by in ("run", "tag"))
    (tag,), total = tags["rows"], runs["total"]
    assert len(runs["rows"]) == NUM_RUNS and tag == {**total, "name": "seeds"}
    for name in ("tokens_sampled", "tokens_trained", "trainer_s", "inference_s"):
        assert sum(row[name] for row in runs["rows"]) == pytest.approx(total[name]) and total[name] > 0
    status = read_status(workspace.paths.trainer_status, TrainerStatus)
    assert status is not None
    busy_s = sum(seconds for phase, seconds in status.total_s.items() if phase != "wait")
    assert total["trainer_s"] == pytest.approx(busy_s, rel=0.02)
