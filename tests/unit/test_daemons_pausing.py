"""Pausing, continuing, and setting keys of a run, on files alone; and what the supervisor makes of a paused run."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemons import actions
from daemons.actions import continue_run, edited, parse_changes, pause_run, set_run_keys
from daemons.decide import Daemon, Do, Seen, State
from daemons.errors import ActionError, WrongUseError
from daemons.launchers.base import Ended
from daemons.observe import Observer
from daemons.specs import RunNow, orchestrator_spec, wants_orchestrator
from daemons.workspace import why_idle
from daemons.workspace_reader import read_workspace
from prime_rl.configs.base import parse_toml
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.notes import pending_request
from prime_rl.contract.status import RunState, RunStatus, StatusWriter, TrainerRunStatus, TrainerStatus
from prime_rl.utils.process import ProcessId
from prime_rl.utils.text import one_line
from tests.daemons_support import RUN_TOML
from tests.unit.test_daemons_decide import CONFIG, READY, RUN, running


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    source = tmp_path / "a.toml"
    source.write_text(RUN_TOML.format(max_steps=3, model="m"))
    return OutputDir(tmp_path / "workspace").run(actions.add_run(tmp_path / "workspace", source))


def acts(run: RunDir) -> list[tuple[str, str, str]]:
    lines = map(json.loads, OutputDir(run.path.parent).audit.read_text().splitlines())
    return [(line["action"], line["reason"], line["detail"]) for line in lines][1:]


def view(run: RunDir) -> tuple[str, str | None]:
    found = read_workspace(run.path.parent).run(run.run_id)
    assert found is not None
    return str(found.state), found.reason


def test_pausing_and_continuing_twice_does_no_more_than_once(run: RunDir) -> None:
    workspace = run.path.parent
    assert not continue_run(workspace, run.run_id)
    assert pause_run(workspace, run.run_id, reason="others first")
    assert not pause_run(workspace, run.run_id, reason="again")
    assert view(run) == ("paused", "others first")
    assert continue_run(workspace, run.run_id, reason="now") and not continue_run(workspace, run.run_id)
    assert view(run)[0] == "stopped" and not run.paused.exists()
    assert acts(run) == [("pause", "others first", ""), ("continue", "now", "")]


def fail(run: RunDir) -> None:
    StatusWriter(run.status, RunStatus(run_id=run.run_id)).close(state="failed", reason="no")


REFUSED: dict[str, Callable[[RunDir], object]] = {
    "evicted": lambda run: run.evicted.write_text("enough"),
    "invalid": lambda run: run.config_error.write_text("batch_size"),
    "finished": lambda run: run.finished.write_text("budget used up"),
    "failed": fail,
}


@pytest.mark.parametrize("state", REFUSED)
def test_what_has_no_slot_to_give_up_is_refused_in_one_line(run: RunDir, state: str) -> None:
    REFUSED[state](run)
    with pytest.raises(ActionError, match=f"run_a: cannot be paused: it (is|has) {state}") as error:
        pause_run(run.path.parent, run.run_id)
    assert "\n" not in str(error.value) and not run.paused.exists() and acts(run) == []
    with pytest.raises(ActionError, match="not found"):
        continue_run(run.path.parent, "run_missing")


# By act: the states in which it does something; in all others a person is told why not.
HAS_EFFECT = {
    "pause": {"waiting", "active", "paused", "stopped"},
    "continue": {"paused"},
    "evict": {"waiting", "active", "paused", "stopped", "invalid", "failed"},
    "readmit": {"evicted", "failed", "finished early"},
    "delete": {*RunState, "finished early"},
}


@pytest.mark.parametrize("act", HAS_EFFECT)
def test_why_an_act_does_nothing_in_a_state(run: RunDir, act: str) -> None:
    found = read_workspace(run.path.parent).run(run.run_id)
    assert found is not None
    for state in (*RunState, "finished early"):
        is_early = state == "finished early"
        reason = one_line("budget used up") if is_early else None
        why = why_idle(act, replace(found, state=RunState(state.partition(" ")[0]), reason=reason))
        assert (why is None) == (state in HAS_EFFECT[act]), (act, state, why)
        assert why is None or ("\n" not in why and "None" not in why and "{" not in why)


def test_a_preempted_run_waits_and_the_reason_is_shown(run: RunDir) -> None:
    run.preempted.write_text("preempted by run_b: it goes on when a slot is free")
    status = StatusWriter(
        OutputDir(run.path.parent).trainer_status,
        TrainerStatus(state="training", max_runs=1, waiting=["run_x", run.run_id]),
    )
    found = read_workspace(run.path.parent).run(run.run_id)
    status.close(state="stopped")
    assert found is not None and found.queue_position == 2
    assert (found.state, found.reason) == ("waiting", "preempted by run_b: it goes on when a slot is free")
    assert found.waiting_on == "a free slot (2. in the queue)"


def test_keys_are_set_in_the_file_and_all_else_of_it_stays(run: RunDir) -> None:
    os.utime(run.orch_toml, (1000, 1000))
    changes = parse_changes(["weight=2", "priority=5", "preempt=true", "budget.max_tokens=1e6", "tags=a,b"])
    assert set_run_keys(run.path.parent, run.run_id, changes, reason="urgent")
    config = load_run_config(run.orch_toml)
    assert (config.weight, config.priority, config.preempt, config.tags) == (2.0, 5, True, ["a", "b"])
    assert config.budget.max_tokens == 1_000_000
    assert "# kept as it is" in run.orch_toml.read_text() and run.orch_toml.stat().st_mtime == 1000
    assert not set_run_keys(run.path.parent, run.run_id, changes)
    assert set_run_keys(run.path.parent, run.run_id, parse_changes(["budget.max_tokens=null", "tags="]))
    config = load_run_config(run.orch_toml)
    assert config.budget.max_tokens is None and config.tags == []
    assert [act[0] for act in acts(run)] == ["set", "set"]
    assert acts(run)[0][1:] == ("urgent", 'weight=2 priority=5 preempt=true budget.max_tokens=1000000 tags=["a", "b"]')


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("a = 1  # one\nb = 2\n", {"a": 3}, "a = 3  # one\nb = 2\n"),
        ("# top\n[t]\nx = 1\n", {"a": 3}, "a = 3\n# top\n[t]\nx = 1\n"),
        ("[t]\nx = 1 # y\n[u]\n", {"t": {"x": None}}, "[t]\n[u]\n"),
        ("[t]  # table\nx = 1\n", {"t": {"y": "z"}}, '[t]  # table\ny = "z"\nx = 1\n'),
        ("a = 1\n\n[t]", {"t": {"y": [1, "b"]}}, 'a = 1\n\n[t]\ny = [1, "b"]\n'),
        ("a = 1\n", {"t": {"y": True}}, "a = 1\n\n[t]\ny = true\n"),
        ('a = "x # y"  # z\nb = 1\n', {"a": "w"}, 'a = "w"\nb = 1\n'),
        ("tags = [\n  'a',\n]\n# gone\n", {"tags": ["b"]}, 'tags = [\n    "b",\n]\n'),
        ("t = {x = 1}\n", {"t": {"x": 2}}, "[t]\nx = 2\n"),
    ],
)  # fmt: skip
def test_a_file_keeps_its_comments_where_it_can_and_its_meaning_always(
    text: str, changes: dict[str, Any], expected: str
) -> None:
    assert edited(text, changes) == expected
    parse_toml(expected, "orch.toml")


def test_while_a_run_has_its_slot_only_live_keys_can_be_set(run: RunDir) -> None:
    workspace = run.path.parent
    status = TrainerStatus(state="training", max_runs=1, runs={run.run_id: TrainerRunStatus(run_idx=0)})
    writer = StatusWriter(OutputDir(workspace).trainer_status, status)
    before = run.orch_toml.read_text()
    with pytest.raises(ActionError, match="only weight, priority, preempt, budget, tags can be set, not optim"):
        set_run_keys(workspace, run.run_id, parse_changes(["weight=2", "optim.lr=0.1"]))
    assert run.orch_toml.read_text() == before
    assert set_run_keys(workspace, run.run_id, {"weight": 2})
    writer.close(state="stopped", runs={})
    assert set_run_keys(workspace, run.run_id, parse_changes(["optim.lr=0.1"]))
    assert load_run_config(run.orch_toml).optim.lr == 0.1


@pytest.mark.parametrize(("item", "problem"), [("weight=0", "weight"), ("wieght=2", "wieght"), ("tags=a b", "tags")])
def test_values_that_are_invalid_change_nothing(run: RunDir, item: str, problem: str) -> None:
    before = run.orch_toml.read_text()
    with pytest.raises(ActionError, match=problem) as error:
        set_run_keys(run.path.parent, run.run_id, parse_changes([item]))
    assert "\n" not in str(error.value) and run.orch_toml.read_text() == before and acts(run) == []
    with pytest.raises(WrongUseError, match="KEY=VALUE"):
        parse_changes(["weight"])


def test_a_run_that_went_back_to_a_checkpoint_does_not_go_back_again(run: RunDir) -> None:
    set_run_keys(run.path.parent, run.run_id, {"ckpt": {"resume_step": 0}})
    assert set_run_keys(run.path.parent, run.run_id, {"weight": 3}), "not carried out yet: it stays"
    assert load_run_config(run.orch_toml).ckpt.resume_step == 0
    run.resumed.write_bytes(msgspec.json.encode(pending_request(run, 0)))
    assert set_run_keys(run.path.parent, run.run_id, {"weight": 4})
    step = load_run_config(run.orch_toml).ckpt.resume_step
    assert pending_request(run, step) is None


@pytest.mark.parametrize("mark", ["paused", "preempted"])
def test_a_paused_run_has_no_orchestrator(run: RunDir, mark: str) -> None:
    output = OutputDir(run.path.parent)
    status = TrainerStatus(state="training", max_runs=1, runs={run.run_id: TrainerRunStatus(run_idx=0)})
    writer = StatusWriter(output.trainer_status, status)
    observer = Observer(output)
    assert wants_orchestrator(observer.runs(())[run.run_id])
    path = getattr(run, mark)
    path.write_text("")
    now = observer.runs(())[run.run_id]
    assert now.paused and not wants_orchestrator(now)
    path.unlink()
    assert wants_orchestrator(observer.runs(())[run.run_id])
    writer.close(state="stopped")


def test_the_end_of_a_paused_orchestrator_is_no_crash_and_it_starts_again_when_it_goes_on() -> None:
    history = running(RUN)
    history.wanted = False
    ended = Seen(exit_code=0, final_state="paused", paused=True)
    assert history.see(ended, after_s=1) == [Do.CLEAN]
    assert (history.daemon.state, history.daemon.reason, history.daemon.num_crashes) == (State.DONE, "paused", 0)
    assert history.see(Seen(paused=True), after_s=100) == []
    assert history.see(Seen(paused=True), after_s=1, asked=True) == [Do.NOTE], "nor does a restart request start it"
    assert history.daemon.state is State.DONE
    history.wanted = True
    assert history.see(Seen(), after_s=1) == [Do.START]


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "hangs"])
def test_an_orchestrator_that_does_not_end_at_a_pause_is_ended_and_left_alone(killed: bool) -> None:
    history = running(RUN)
    history.wanted = killed
    if killed:  # another one unloads the adapters that it left, and ends
        history.see(Seen(exit_code=-9, paused=True), after_s=1)
        assert history.daemon.state is State.BACKOFF
        assert history.see(Seen(paused=True), after_s=5) == [Do.START]
        assert history.see(Seen(lives=True, paused=True), after_s=2 * CONFIG.grace_s) == []
        history.wanted = False
        history.see(Seen(exit_code=0, final_state="paused", paused=True), after_s=1)
        assert history.see(Seen(paused=True), after_s=100) == []
    else:
        assert history.see(Seen(**{**READY.__dict__, "paused": True}), after_s=1) == [Do.NOTE]
        assert history.see(Seen(**{**READY.__dict__, "paused": True}), after_s=CONFIG.grace_s) == [Do.TERM]
        history.see(Seen(exit_code=0, paused=True), after_s=1)
    assert history.daemon.state is State.DONE


@pytest.mark.parametrize(("state", "in_slot", "paused"), itertools.product(["running", "paused"], *[[True, False]] * 2))
def test_a_paused_run_has_an_orchestrator_only_to_clear_up(state: str, in_slot: bool, paused: bool) -> None:
    run = RunNow("run_a", in_slot, False, False, RunStatus(run_id="run_a", state=state, max_steps=3), 3, paused=paused)
    assert wants_orchestrator(run) == (state == "running" if paused else in_slot)
    assert not wants_orchestrator(replace(run, evicted=True))


def test_the_last_word_of_a_paused_orchestrator_is_final(run: RunDir) -> None:
    process = ProcessId.of(os.getpid())
    StatusWriter(run.status, RunStatus(run_id=run.run_id)).close(state="paused")
    observer = Observer(OutputDir(run.path.parent))
    now = observer.runs([run.run_id])[run.run_id]
    daemon = Daemon(orchestrator_spec(run), State.RUNNING, process=process)
    assert observer.see(daemon, Ended(None), now, 0.0).final_state == "paused"
