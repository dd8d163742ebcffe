"""Reasons to evict are read off the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daemons.workspace_reader import WorkspaceReader
from prime_rl.contract.metrics import REWARD, Learning
from tests.tui_support import NOW, build_workspace
from tui.actions import each, free_id
from tui.dialogs.delete import ALWAYS, MAX_SUGGESTIONS, suggest
from tui.model.snapshot import RunRow, make_snapshot
from tui.readers.charts import change
from tui.readers.workspace_metrics import RunTail


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRow]:
    workspace = WorkspaceReader(build_workspace(tmp_path_factory.mktemp("s") / "h").path).read(now=NOW)
    return {row.run_id: row for row in make_snapshot(workspace, {}, NOW).rows}


def with_rewards(row: RunRow, *rewards: float) -> RunRow:
    """As the orchestrator and the console judge them."""
    learning = Learning()
    for step, reward in enumerate(rewards):
        learning.feed(step, {REWARD: reward})
    view = replace(row.view, signs=tuple(learning.signs()))
    return replace(row, tail=RunTail(rewards=rewards), view=view, reward=rewards[-1], reward_change=change(rewards))


def test_what_is_seen_comes_first(rows: dict[str, RunRow]) -> None:
    active, all_rows = rows["run_reverse-lr1e-3"], list(rows.values())
    fallen = suggest([with_rewards(active, *[0.8] * 10, *[0.1] * 10)], all_rows)
    assert fallen[0] == "reward collapsed: mean 0.1 over 10 batches, was 0.8 at best"
    noisy = suggest([with_rewards(active, *[0.8] * 10, *[0.0, 0.6] * 5)], all_rows)
    assert "collapsed" not in "".join(noisy), "the one rule of a collapse decides: less is noise"
    assert fallen[1] == "makes room for run_queued-a, which waits for a slot"
    flat = suggest([with_rewards(active, *[0.3] * 12)], all_rows)
    assert flat[0].startswith("the reward does not improve: 0.300") and ALWAYS[1] not in flat
    assert suggest([rows["run_upper"]], all_rows)[0].startswith("no heartbeat for 1m")
    assert suggest([replace(active, loss=float("nan"))], [])[0] == "the loss is nan"
    rising = suggest([with_rewards(active, *(i / 20 for i in range(15)))], [])
    assert rising == list(ALWAYS)
    assert all(len(found) <= MAX_SUGGESTIONS for found in (fallen, flat, rising))


def test_several_runs_get_what_is_true_of_any(rows: dict[str, RunRow]) -> None:
    two = [with_rewards(rows["run_reverse-lr1e-3"], *[0.3] * 12), rows["run_queued-a"]]
    assert suggest(two, list(rows.values()))[0] == "makes room for run_queued-b, which waits for a slot"


def test_a_copy_gets_the_next_free_name() -> None:
    assert free_id("run_a", {"run_a"}) == "run_a-2"
    assert free_id("run_a-2", {"run_a-2", "run_a-3"}) == "run_a-4"
    assert len(free_id("run_" + "x" * 64, ())) <= 68


def test_work_on_many_goes_on_after_a_failure_and_names_it() -> None:
    done, said = [], []

    def act(run_id: str, progress: object) -> str:
        if run_id == "run_3":
            raise OSError("no room")
        done.append(run_id)
        return "ok"

    run_ids = [f"run_{number}" for number in range(20)]
    with pytest.raises(RuntimeError, match="1 of 20 failed: run_3: no room"):
        each(run_ids, "done", act)(said.append)
    assert sorted(done) == sorted(set(run_ids) - {"run_3"}) and said[-1] == "20 of 20"
    assert each(["run_1"], "done", act)(said.append) == "ok"
