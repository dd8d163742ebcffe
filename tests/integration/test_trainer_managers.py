"""A MultiRunManager that is made directly among real gloo ranks, and a trainer that idles longer than its timeout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.managers_main import SIZES
from tests.patience import PATIENCE_S
from tests.warm import ROOT, warm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("managers")
    main = warm("tests.managers_main")
    result = main.run(["managers", str(folder)], env=os.environ, cwd=ROOT, timeout_s=PATIENCE_S)
    logs = "\n".join(f"{path}:\n{path.read_text()}" for path in sorted(folder.rglob("*.log")))
    assert result.returncode == 0, f"{result.stderr}\n{logs}"
    assert json.loads((folder / "codes.json").read_text()) == {"managers": [0] * max(SIZES), "idle": [0, 0]}, logs
    return folder


@pytest.fixture(params=SIZES)
def facts(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank of a group found."""
    return [json.loads((folder / f"facts_{request.param}_{rank}.json").read_text()) for rank in range(request.param)]


def test_all_ranks_know_the_same(facts: list[dict[str, Any]]) -> None:
    for key in ("first", "told", "evicted", "last", "layer_scaling", "weights", "other", "calls"):
        assert all(fact[key] == facts[0][key] for fact in facts), key
    assert facts[0]["first"] == {
        "idx_2_id": {"1": "run_good"},
        "id_2_idx": {"run_good": 1},
        "used": [1],
        "unused": [0, 2],
        "dirs": ["run_good"],
        "ready": [],
        "progress": [[0, 0, 0]],
        "scaling": [4.5],
        "names": ["some/model"],
    }
    assert facts[0]["layer_scaling"] == 4.5, "what a discovered hook sets reaches the layers"
    assert facts[0]["weights"] > 0 and facts[0]["other"] == {"run_other": 0}


def test_what_rank_0_counts_reaches_the_others(facts: list[dict[str, Any]]) -> None:
    assert facts[-1]["told"]["progress"] == [[5, 70, 8]] and facts[-1]["told"]["ready"] == [1]


def test_calls_for_rank_0_raise_elsewhere(facts: list[dict[str, Any]]) -> None:
    only_master = [
        "register_discovered_hook",
        "register_forgotten_hook",
        "register_config_validation_hook",
        "discover_runs",
        "evict_run",
    ]
    assert [fact["refused"] for fact in facts] == [[], *[only_master] * (len(facts) - 1)]


def test_barriers_in_hooks_meet_also_after_a_hook_failed_on_one_rank(folder: Path, facts: list[dict[str, Any]]) -> None:
    """run_bad fails on the last rank before the hook with the barrier; all ranks leave that one out together."""
    assert facts[0]["calls"] == [
        "deletion run_bad",
        "creation run_good",
        "deletion run_good",
        "creation run_late",
    ]
    workspace = folder / f"workspace_{len(facts)}"
    reason = (workspace / "run_bad" / "control" / "evicted.txt").read_text()
    assert "it cannot be started: drive.<locals>.picky: no room here" in reason


def test_an_evicted_run_stays_until_the_next_look(folder: Path, facts: list[dict[str, Any]]) -> None:
    workspace = folder / f"workspace_{len(facts)}"
    assert (workspace / "run_good" / "control" / "evicted.txt").read_text() == "Run exceeded memory limits"
    assert facts[0]["evicted"]["id_2_idx"] == {"run_good": 1} and facts[0]["last"]["id_2_idx"] == {"run_late": 0}


def test_a_trainer_that_idles_three_timeouts_trains_the_next_batch(folder: Path) -> None:
    log = (folder / "idle" / "rank_0.log").read_text() + (folder / "idle" / "rank_1.log").read_text()
    assert log.count("stopped by SIGTERM") == 2 and "Traceback" not in log
