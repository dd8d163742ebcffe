"""A sweep of six runs on two slots with successive halving, on a living system: one winner, sums that add up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemons.halving import Decision, read_decisions
from tests.integration.test_system_sharing import wait_until_let_go
from tests.system_support import Workspace, closed, greedy_answer, make_workspace

pytestmark = pytest.mark.slow

NUM_RUNS = 6
MAX_STEPS = 60
QUESTION = "Reverse: abc"


@pytest.fixture
def workspace(untaught_model: Path, tmp_path: Path) -> Iterator[Workspace]:
    yield from closed(make_workspace(tmp_path, untaught_model, slots=2))


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
        assert step == MAX_STEPS or reason.startswith("halving: rung ")
    audit = [json.loads(line) for line in workspace.paths.audit.read_text().splitlines()]
    assert {line["run_id"] for line in audit if line["action"] == "halving"} >= set(first.lost) | set(second.lost)
    used = workspace.json("usage", "--by", "tag")
    (row,) = used["rows"]
    assert row["name"] == "seeds" and {**row, "name": "total"} == used["total"]
    assert row["tokens_trained"] > 0 and row["tokens_sampled"] > 0

    (winner,), out = second.kept, workspace.output_dir.parent / "winner"
    workspace.prl("runs", "pause", winner, check=False)  # its newest version stays the newest; it may have finished
    wait_until_let_go(workspace, winner)
    workspace.prl("runs", "export", winner, "--merge", "--out", str(out))
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(out)
    assert greedy_answer(merged, out, QUESTION) == workspace.answer(winner, QUESTION)
