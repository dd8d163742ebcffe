"""Signs that a run does not learn: each rule at its limit, and what `prl` and the views make of them."""

from __future__ import annotations

import json
import random
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemons.cli import run as prl
from daemons.workspace import LOOP_CRASHES, LOOP_S, daemon_view
from daemons.workspace_reader import WorkspaceReader
from prime_rl.contract.files import append_line, mark_stable, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.metrics import REWARD, RULES, Learning, Sign, sign_texts
from prime_rl.contract.status import (
    LOST,
    LOST_AFTER_S,
    STALLED,
    Crash,
    DaemonStatus,
    RunState,
    RunStatus,
    TrainerStatus,
    read_status,
)
from prime_rl.orchestrator.report import LearningWatch
from prime_rl.utils.text import CleanText, one_line
from tests.alerts_support import Troubles
from tui.model.snapshot import STALL_MIN_S, make_snapshot
from tui.readers.machine import Alert
from tui.readers.workspace_metrics import RunTail
from tui.screens.system import key_of

ROOT = Path(__file__).parents[2]


def test_texts_that_are_learned_well_are_no_sign() -> None:
    learning = Learning()
    for step in range(1, 40):
        learning.feed(step, {"supervised/loss": 0.001, "entropy": 0.001, "grad_norm": 0.1})
    assert learning.signs() == []


def signs_of(figure: str, values: list[float]) -> dict[str, Sign]:
    learning = Learning()
    for step, value in enumerate(values, start=1):
        learning.feed(step, {figure: value})
        found = learning.signs()
    return {sign.name: sign for sign in found}


def test_a_run_without_a_gradient_is_told_with_the_number_of_updates() -> None:
    found = signs_of("grad_norm", [0.8, 0.5, *[0.0] * 28])
    assert found == {"no_gradient": Sign("no_gradient", 0.0, 1e-6, 28)}
    assert "for 28 updates" in sign_texts(found.values(), "run_a")[0]
    assert signs_of("grad_norm", [0.8, *[0.0] * 7]) == {} == signs_of("grad_norm", [*[0.0] * 20, 0.3])


CASES: list[tuple[str, str, list[float], bool]] = [
    ("reward_collapsed", REWARD, [0.7] * 10 + [0.002] * 10, True),
    ("reward_collapsed", REWARD, [0.7] * 10 + [0.36] * 10, False),
    ("reward_collapsed", REWARD, [0.7] * 10 + [0.002] * 10 + [0.7] * 10, False),
    ("reward_collapsed", REWARD, [0.1, 0.0] * 5 + [0.0, 0.05] * 5, False),  # noise
    ("no_signal", "signal", [1.0] + [0.0] * 5, True),
    ("no_signal", "signal", [0.0] * 4, False),
    ("no_signal", "signal", [0.0, 0.0, 0.1, 0.0, 0.0], False),
    ("mismatch", "mismatch_kl", [0.001] + [0.2] * 5, True),
    ("mismatch", "mismatch_kl", [0.05] * 20, False),
    ("entropy_exploded", "entropy", [0.9] * 10 + [3.0] * 10, True),
    ("entropy_exploded", "entropy", [0.01] * 10 + [0.5] * 10, False),  # little is no noise
    ("entropy_exploded", "entropy", [3.0] * 10, False),  # as it began
    ("entropy_gone", "entropy", [0.9] * 10 + [0.005] * 10, True),
    ("entropy_gone", "entropy", [0.9] + [0.005] * 9, False),
]


@pytest.mark.parametrize(("name", "figure", "values", "expected"), CASES)
def test_a_rule_holds_beyond_its_limit_alone(name: str, figure: str, values: list[float], expected: bool) -> None:
    assert (name in signs_of(figure, values)) == expected
    assert set(signs_of(figure, values)) <= {name}


def test_every_rule_has_a_case_and_its_line_in_the_documents() -> None:
    assert {case[0] for case in CASES} | {"no_gradient"} == set(RULES)
    page = (ROOT / "docs" / "learning.md").read_text()
    for name, rule in RULES.items():
        [line] = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
        assert f"`{rule.figure}`" in line and f"{rule.num}" in line


def test_steps_that_come_again_void_those_after_them() -> None:
    learning = Learning()
    for step in range(1, 20):
        learning.feed(step, {"grad_norm": 0.0})
    assert [sign.num for sign in learning.signs()] == [19]
    for step in range(5, 9):  # the run went back to a checkpoint
        learning.feed(step, {"grad_norm": 0.0})
    assert learning.signs() == [], "only steps 10 to 19 were kept, and they are void"
    for step in range(9, 14):
        learning.feed(step, {"grad_norm": 0.0})
    [sign] = learning.signs()
    assert sign.num == 9


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
LINES = st.tuples(
    st.integers(0, 40), st.dictionaries(st.sampled_from([rule.figure for rule in RULES.values()]), NUMBERS)
)


@given(st.lists(LINES, max_size=60))
def test_no_figures_raise_and_every_sign_is_json_that_is_read_again(lines: list[tuple[int, dict[str, float]]]) -> None:
    learning = Learning()
    for step, figures in lines:
        learning.feed(step, figures)
        found = learning.signs()
        assert msgspec.json.decode(msgspec.json.encode(found), type=list[Sign]) == found
        texts = sign_texts(found, "run_a")
        assert len(texts) == len(found) and all("\n" not in text for text in texts)


def test_learning_as_it_should_be_gives_no_sign() -> None:
    learning, rng = Learning(), random.Random(0)
    for step in range(1, 400):
        share = min(1.0, step / 200)
        noise = rng.gauss(0, 0.05)
        learning.feed(step, {REWARD: 0.1 + 0.8 * share + noise, "signal": 0.5, "entropy": 1.5 - 1.2 * share})
        learning.feed(step, {"grad_norm": 0.2 + abs(noise), "mismatch_kl": 0.002 + abs(noise) / 10})
        assert learning.signs() == []


def test_the_orchestrator_looks_at_both_files_also_after_a_restart(tmp_path: Path) -> None:
    run = OutputDir(tmp_path).run("run_a")
    run.metrics.mkdir(parents=True)
    watch = LearningWatch(run)
    assert watch.look() == [], "no file"
    for step in range(1, 21):
        append_line(run.orchestrator_metrics, json.dumps({"step": step, REWARD: 0.5, "signal": 0.0, "bottleneck": "x"}))
        append_line(run.trainer_metrics, json.dumps({"step": step, "grad_norm": 0.0, "entropy": None}))
    found = watch.look()
    assert [(sign.name, sign.num) for sign in found] == [("no_signal", 20), ("no_gradient", 20)]
    assert [sign.name for sign in LearningWatch(run).look()] == ["no_signal", "no_gradient"]


@pytest.fixture
def troubles(tmp_path: Path) -> Troubles:
    found = Troubles(OutputDir(tmp_path))
    signs = [Sign("made_up", 1.0, 1.0, 1), Sign("no_gradient", 0.0, 1e-6, 28), Sign("no_signal", 0.0, 0.0, 30)]
    found.run("run_trouble", signs=signs * 1000, problem="env x: 5 % of rollouts dropped")
    return found


def test_a_view_has_all_troubles_of_a_run_that_goes_on_the_environments_first(troubles: Troubles) -> None:
    run = WorkspaceReader(troubles.output.path).read().run("run_trouble")
    assert run is not None and run.state is RunState.ACTIVE
    assert len(run.signs) <= len(RULES) and "made_up" not in {sign.name for sign in run.signs}
    assert [each.partition(":")[0] for each in run.troubles] == ["env x", "no signal", "no gradient"]
    assert run.trouble == run.troubles[0] and run.why == f"{run.trouble}; 2 more problems"
    over = replace(run, state=RunState.FINISHED)
    assert over.troubles == () and over.trouble is None and over.signs == run.signs


def test_status_list_and_show_name_the_troubles(troubles: Troubles, capsys: Any) -> None:
    place = ["--output-dir", str(troubles.output.path)]
    assert prl(["status", *place]) == 0
    out = capsys.readouterr().out
    assert "problem: run_trouble: no gradient: grad_norm at most 0 for 28 updates" in out
    assert "problem: run_trouble: env x: 5 % of rollouts dropped" in out
    assert prl(["runs", "show", "run_trouble", *place]) == 0
    assert "no signal" in capsys.readouterr().out
    assert prl(["runs", "list", *place, "--json"]) == 0
    [run] = [each for each in json.loads(capsys.readouterr().out)["runs"] if each["run_id"] == "run_trouble"]
    assert len(run["troubles"]) == 3
    assert {"name": "no_gradient", "value": 0.0, "limit": 1e-06, "num": 28} in run["signs"]


def test_the_advice_has_the_run_and_a_version_that_is_there(troubles: Troubles, capsys: Any) -> None:
    signs = [Sign("reward_collapsed", 0.1, 0.8, 12), Sign("no_signal", 0.0, 0.0, 5)]
    troubles.run("run_trouble", signs=signs, step=40)
    run = troubles.output.run("run_trouble")

    def advice() -> list[str]:
        view = WorkspaceReader(troubles.output.path).read().run("run_trouble")
        assert view is not None
        return [text.partition("; ")[2] for text in view.sign_texts]

    assert advice()[0] == "no version from before it is left: add the run again with a lower optim.lr"
    assert advice()[1].startswith("look at prl runs samples run_trouble, then")
    for folder in (run.checkpoint_dir(16), run.broadcast_dir(36), run.broadcast_dir(40)):
        folder.mkdir(parents=True)
        mark_stable(folder)
    assert advice()[0].startswith("start again from before it: prl runs fork run_trouble --step 16 --set optim.lr=")
    run.finished.write_text("its budget is used up")
    assert prl(["runs", "show", "run_trouble", "--output-dir", str(troubles.output.path)]) == 0
    assert "last problem\n  reward collapsed: " in capsys.readouterr().out


def test_each_trouble_of_a_run_is_a_problem_of_its_own_with_the_alerts_of_the_run(troubles: Troubles) -> None:
    workspace = WorkspaceReader(troubles.output.path).read()
    run_id, other = one_line("run_trouble"), one_line("run_gone")
    told = [Alert(one_line(f"x {name}"), name, one_line("t"), 1.0, one_line("muted by me")) for name in (run_id, other)]
    found = make_snapshot(workspace, {}, time.time(), alerts=told).problems
    own = [each for each in found if each.name == run_id]
    assert tuple(each.text for each in own) == workspace.run(run_id).troubles  # type: ignore[union-attr]
    assert [each.kind for each in own] == ["env x", "no signal", "no gradient"]
    assert len({key_of(each) for each in found}) == len(found), "the cursor tells them apart"
    assert {each.alerts for each in own} == {("x run_trouble",)} and {each.note for each in own} == {"muted by me"}
    assert [each.text for each in found if each.name == other] == ["t"]


@pytest.mark.parametrize("state", [STALLED, LOST, "stalled orchestrator"])
def test_a_run_that_stands_still_keeps_its_troubles_among_the_problems(troubles: Troubles, state: str) -> None:
    now = time.time()
    workspace = WorkspaceReader(troubles.output.path).read()
    view = workspace.run("run_trouble")
    assert view is not None
    view = replace(view, updated_at=now, started_at=None, edited=CleanText("edited, not in effect: seed"))
    if state == "stalled orchestrator":  # the note has the reason, and the edit
        view = replace(view, stalled_since=now - 60, reason=CleanText("no turn of its loop"))
    tails = {} if state == LOST else {"run_trouble": RunTail(last_step_at=now - 2 * STALL_MIN_S)}
    alive_at = {"run_trouble": now - (2 * LOST_AFTER_S if state == LOST else 0)}
    snapshot = make_snapshot(replace(workspace, runs=(view,)), tails, now, alive_at=alive_at)
    row = snapshot.row("run_trouble")
    assert row is not None and row.state == state.split(maxsplit=1)[0] and row.is_problem
    texts = [each.text for each in snapshot.problems if each.name == "run_trouble"]
    assert texts[0] == f"{row.state}: {row.note}"
    assert [each for each in view.troubles if "\n".join(texts).count(each) != 1] == []
    assert len({key_of(each) for each in snapshot.problems}) == len(snapshot.problems)


@pytest.mark.parametrize("problem", [None, "env x: 5 % of rollouts dropped: KeyError: 'answer' in example 7"])
def test_samples_of_a_run_whose_rollouts_were_dropped_tells_so(
    troubles: Troubles, capsys: Any, problem: str | None
) -> None:
    reason = "env x: 24 of its newest 24 rollouts were dropped, more than max_env_failure_share = 0.5 of them; last: y"
    state = {"problem": problem} if problem else {"state": "failed", "reason": reason}
    troubles.run("run_trouble", **state)
    assert prl(["runs", "samples", "run_trouble", "--output-dir", str(troubles.output.path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"run_trouble has no rollouts: {problem or reason}; those that are dropped are not kept: ")
    assert "prl env try FILE" in out and "prl logs run_trouble --grep dropped" in out and len(out.splitlines()) == 1


def test_an_edit_is_told_beside_other_troubles(troubles: Troubles) -> None:
    view = WorkspaceReader(troubles.output.path).read().run("run_trouble")
    assert view is not None
    edited = replace(view, edited=CleanText("edited, not in effect: seed"))
    assert edited.why.endswith("; edited, not in effect: seed; 2 more problems")


@pytest.mark.parametrize(
    ("signs", "ended", "told"),
    [
        ([Sign("no_gradient", 0.0, 1e-6, 17), Sign("no_signal", 0.0, 0.0, 20)], "", True),
        ([Sign("no_signal", 0.0, 0.0, 20)], "its budget is used up", True),
        ([Sign("no_signal", 0.0, 0.0, 19)], "", False),
        ([Sign("entropy_gone", 0.0, 0.01, 20)], "", False),
        ([], "its budget is used up", False),
    ],
)
def test_a_finished_run_tells_that_it_learned_nothing(
    troubles: Troubles, capsys: Any, signs: list[Sign], ended: str, told: bool
) -> None:
    troubles.run("run_trouble", signs=signs, step=20, max_steps=20)
    run = troubles.output.run("run_trouble")
    for step in (19, 20):
        run.broadcast_dir(step).mkdir(parents=True)
        mark_stable(run.broadcast_dir(step))
    workspace = WorkspaceReader(troubles.output.path).read()
    view = workspace.run("run_trouble")
    assert view is not None and view.state is RunState.FINISHED and view.troubles == ()
    view = replace(view, reason=CleanText(ended) if ended else None)
    words = "learned nothing in 20 of 20 updates: no signal: no rollout of 20 batches in a row has an advantage"
    assert (words in view.why) is told and view.why.startswith(ended)
    if not told:
        assert view.why == ended
    row = make_snapshot(replace(workspace, runs=(view,)), {}, time.time()).row("run_trouble")
    assert row is not None and row.note[:150] == view.why[:150]
    assert prl(["runs", "show", "run_trouble", "--output-dir", str(troubles.output.path)]) == 0
    assert ("last problem" in capsys.readouterr().out) is bool(signs)


def test_a_status_of_an_earlier_version_has_no_signs(tmp_path: Path) -> None:
    text = msgspec.json.encode(RunStatus(run_id="run_a"))
    write_atomic(tmp_path / "status.json", text.replace(b',"signs":[]', b""))
    found = read_status(tmp_path / "status.json", RunStatus)
    assert found is not None and found.signs == []


def test_a_daemon_that_ends_again_and_again_is_in_a_restart_loop(troubles: Troubles) -> None:
    now = 1000.0
    crashes = [Crash(at=now - 100 * number, kind="crash", reason="exit code 1") for number in range(LOOP_CRASHES)]
    status = DaemonStatus(name="run_trouble", state="running", crashes=crashes[::-1])
    assert daemon_view(status, now).crash_loop == (
        "restart loop: run_trouble ended 3 times within 10 minutes: exit code 1; see prl logs run_trouble"
    )
    assert daemon_view(status, now + LOOP_S).crash_loop is None
    status.state = "failed"
    assert daemon_view(status, now).crash_loop is None, "that has its own reason"


def test_status_names_a_restart_loop(troubles: Troubles, capsys: Any) -> None:
    crashes = [Crash(at=time.time() - number, kind="crash", reason="exit code 1") for number in range(LOOP_CRASHES)]
    troubles._daemon("inference", "running", crashes=crashes[::-1])
    assert prl(["status", "--output-dir", str(troubles.output.path)]) == 0
    assert "problem: inference: restart loop: inference ended 3 times within 10 minutes" in capsys.readouterr().out


@pytest.mark.parametrize(("ahead_s", "words"), [(41.0, "41 s ahead of"), (-12.0, "12 s behind"), (3.0, None)])
def test_a_machine_with_another_time_is_named(tmp_path: Path, ahead_s: float, words: str | None, capsys: Any) -> None:
    output, now = OutputDir(tmp_path), time.time()
    status = TrainerStatus(state="training", host="gpu7", updated_at=now + ahead_s, pid=1, pid_create_time=1.0)
    status.pid_start = "another-boot/1"
    output.trainer_status.parent.mkdir()
    write_atomic(output.trainer_status, msgspec.json.encode(status))
    found = WorkspaceReader(output.path).read(now=now).clocks
    assert [words in each and "gpu7" in each for each in found if words] == [True] * (words is not None)
    assert WorkspaceReader(output.path).read(now=now + 60).clocks == (), "written long ago"
    assert prl(["status", "--output-dir", str(output.path)]) == 0
    assert ("problem: the clock of gpu7 is " in (told := capsys.readouterr().out)) == (words is not None)
    if words is not None:
        assert "set all clocks by NTP" in told
        assert any(
            words in each.text for each in make_snapshot(WorkspaceReader(output.path).read(now=now), {}, now).problems
        )


def test_this_machine_has_one_clock(tmp_path: Path) -> None:
    output, now = OutputDir(tmp_path), time.time()
    status = TrainerStatus(state="training", host=socket.gethostname(), updated_at=now + 100, pid=1)
    output.trainer_status.parent.mkdir()
    write_atomic(output.trainer_status, msgspec.json.encode(status))
    assert WorkspaceReader(output.path).read(now=now).clocks == ()
