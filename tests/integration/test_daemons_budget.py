"""Budgets and usage on a living system: one slot, a run that uses up its budget, and one that waits for the slot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.contract.layout import list_steps
from prime_rl.contract.status import TrainerStatus, read_status
from tests.system_support import Workspace, closed, make_workspace

pytestmark = pytest.mark.release


@pytest.fixture
def workspace(untaught_model: Path, tmp_path: Path) -> Iterator[Workspace]:
    yield from closed(make_workspace(tmp_path, untaught_model, slots=1))


def test_a_budget_ends_a_run_frees_its_slot_and_can_be_raised(workspace: Workspace) -> None:
    def daemon_state(name: str) -> str:
        return next(each["state"] for each in workspace.json("status")["daemons"] if each["name"] == name)

    spender = workspace.write_run("a", max_steps=500)
    workspace.prl("runs", "add", str(spender), "--set", "budget.max_tokens=600", "--set", "tags=['x']")
    workspace.prl("runs", "add", str(workspace.write_run("b", max_steps=2)))
    workspace.up()
    workspace.wait(lambda: workspace.state("run_b") == "finished", "the run that waited for the slot")
    ended = workspace.runs()["run_a"]
    assert ended["state"] == "finished"
    assert re.fullmatch(r"budget used up: [\d,]+ of 600 tokens", ended["reason"])
    run = workspace.run_dir("run_a")
    assert list_steps(run.checkpoints, stable_only=True)[-1] == ended["step"] < 500

    # Refused while it would end again; then it goes on where it was.
    refused = workspace.prl("runs", "readmit", "run_a", check=False)
    assert refused.returncode == 1 and "raise [budget]" in refused.stderr
    run.orch_toml.write_text(run.orch_toml.read_text().replace("max_tokens = 600", "max_tokens = 1200"))
    workspace.prl("runs", "readmit", "run_a")
    workspace.wait(lambda: "of 1,200 tokens" in (workspace.runs()["run_a"]["reason"] or ""), "its second end")
    workspace.wait(lambda: daemon_state("run_a") == "done", "its orchestrator to write down its last seconds")
    assert workspace.runs()["run_a"]["step"] > ended["step"]

    used = workspace.json("usage")
    rows = {row["name"]: row for row in used["rows"]}
    assert rows["run_a"]["tokens_sampled"] >= 1200 and rows["run_b"]["tokens_trained"] > 0
    assert all(row["inference_s"] > 0 and row["hours"] > 0 for row in rows.values())
    status = read_status(workspace.paths.trainer_status, TrainerStatus)
    assert status is not None
    busy_s = sum(seconds for phase, seconds in status.total_s.items() if phase != "wait")
    assert used["total"]["trainer_s"] == pytest.approx(busy_s, rel=0.02)
    tagged = {row["name"]: row["tokens_sampled"] for row in workspace.json("usage", "--by", "tag")["rows"]}
    assert tagged["x"] == rows["run_a"]["tokens_sampled"]
    workspace.prl("runs", "delete", "run_a", "--yes")
    assert workspace.json("usage")["total"] == used["total"]
