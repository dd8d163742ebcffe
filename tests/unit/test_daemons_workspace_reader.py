"""One look at a workspace: right facts, also with the daemons down, with damaged files, and on a copy."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from daemons import client
from daemons.workspace import Workspace
from daemons.workspace_reader import MAX_FILE_BYTES, WorkspaceReader, read_workspace
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import (
    LOST_AFTER_S,
    DaemonStatus,
    InferenceStatus,
    RunState,
    RunStatus,
    Status,
    TrainerRunStatus,
    TrainerStatus,
    utc,
)
from prime_rl.utils.process import ProcessId
from prime_rl.utils.text import clean_text, one_line
from tests.daemons_support import RUN_TOML

NOW = time.time()


def put(path: Path, status: Status, *, alive: bool = True, age_s: float = 0.0) -> None:
    """Write a status as a living process (this one) or a dead one would have."""
    status.sign(ProcessId.of(os.getpid()) if alive else ProcessId(2**22 + 1))
    status.updated_at = NOW - age_s
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(status))


def make_run(workspace: Path, run_id: str, *, max_steps: int = 10, published: int = 0) -> RunDir:
    run = RunDir(workspace / run_id)
    run.control.mkdir(parents=True)
    run.orch_toml.write_text(RUN_TOML.format(max_steps=max_steps, model="m"))
    if published:
        run.broadcast_dir(published).mkdir(parents=True)
        (run.broadcast_dir(published) / "STABLE").touch()
    return run


def put_trainer(workspace: Path, runs: dict[str, int], waiting: list[str], *, state: str = "training") -> None:
    slots = {run_id: TrainerRunStatus(run_idx=idx, step=2, lr=0.5) for run_id, idx in runs.items()}
    put(
        OutputDir(workspace).trainer_status,
        TrainerStatus(state=state, max_runs=2, runs=slots, waiting=waiting, refused={"run_link": "a link"}),
    )


def states(workspace: Workspace) -> dict[str, str]:
    return {run.run_id: str(run.state) for run in workspace.runs}


def test_runs_in_every_state_in_the_order_of_importance(tmp_path: Path) -> None:
    for run_id in ("run_waits1", "run_waits2", "run_b", "run_a"):
        make_run(tmp_path, run_id)
    make_run(tmp_path, "run_done", published=10)
    put(make_run(tmp_path, "run_failed").status, RunStatus(run_id="run_failed", state="failed", reason="no key"))
    make_run(tmp_path, "run_evicted").evicted.write_text("too slow\n")
    make_run(tmp_path, "run_invalid").config_error.write_text("bad lr")
    put_trainer(tmp_path, {"run_b": 0, "run_a": 1}, ["run_waits2", "run_waits1"])
    workspace = read_workspace(tmp_path, now=NOW)
    assert list(states(workspace).items()) == [
        ("run_b", "active"),
        ("run_a", "active"),
        ("run_waits2", "waiting"),
        ("run_waits1", "waiting"),
        ("run_done", "finished"),
        ("run_evicted", "evicted"),
        ("run_failed", "failed"),
        ("run_invalid", "invalid"),
    ]
    assert [run.queue_position for run in workspace.runs[:4]] == [None, None, 1, 2]
    assert [run.reason for run in workspace.runs[5:]] == ["too slow", "no key", "bad lr"]
    assert (workspace.max_runs, workspace.num_used) == (2, 2)
    run = workspace.runs[0]
    assert (run.run_idx, run.step, run.max_steps, run.lr, run.model, run.batch_size) == (0, 2, 10, 0.5, "m", 8)
    assert [(each.name, each.reason) for each in workspace.refused] == [("run_link", "a link")]


@pytest.mark.parametrize("still_s", [1e300, -1e300])
def test_numbers_that_mean_nothing_are_their_own_runs_trouble(tmp_path: Path, still_s: float) -> None:
    run, status = make_run(tmp_path, "run_a"), RunStatus(run_id="run_a", state="running", loop=1)
    status.loop_still_s, status.loop_limit_s = still_s, min(0.0, 2 * still_s)
    put(run.status, status)
    run.added.write_text(f"run_a {'9' * 190}")
    number = make_run(tmp_path, "run_b")
    number.orch_toml.write_text(number.orch_toml.read_text() + f"args.a = {'9' * 5_000}\n")
    put_trainer(tmp_path, {"run_a": 0, "run_b": 1}, [])
    one, other = read_workspace(tmp_path, now=NOW).runs
    assert "has not turned since" in (one.reason or "") and utc(one.added_at or 0.0).startswith("9999-12-31")
    assert other.state is RunState.ACTIVE and other.max_steps is None


def test_a_copied_workspace_shows_what_was_and_claims_no_life(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    put(make_run(workspace, "run_a", published=3).status, RunStatus(run_id="run_a", state="running", reward=0.5))
    put_trainer(workspace, {"run_a": 0}, [])
    put(OutputDir(workspace).daemon_status("trainer"), DaemonStatus(name="trainer", state="running", child_pid=1))
    put(OutputDir(workspace).daemon_status("supervisor"), DaemonStatus(name="supervisor", state="running"))
    shutil.copytree(workspace, tmp_path / "copy")
    later = read_workspace(tmp_path / "copy", now=NOW + LOST_AFTER_S + 1)
    assert states(later) == {"run_a": "stopped"}
    assert (later.runs[0].step, later.runs[0].reward) == (3, 0.5)
    assert (later.trainer, later.inference, later.supervisor_alive, later.bottleneck) == (None, None, False, None)
    assert [(daemon.name, daemon.state) for daemon in later.daemons] == [("supervisor", "lost"), ("trainer", "lost")]


def test_a_dead_writer_is_lost_at_once(tmp_path: Path) -> None:
    put(OutputDir(tmp_path).trainer_status, TrainerStatus(state="training", max_runs=2), alive=False)
    put(OutputDir(tmp_path).daemon_status("trainer"), DaemonStatus(name="trainer", state="running"), alive=False)
    workspace = read_workspace(tmp_path, now=NOW)
    assert workspace.trainer is None
    assert workspace.daemons[0].state == "lost"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def _fill(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)


def _become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _nest(path: Path) -> None:
    path.write_text("[" * 100_000, encoding="utf-8")


@pytest.mark.parametrize("damage", [_truncate, _fill, _become_fifo, _become_folder, _nest, os.unlink])
def test_a_damaged_file_costs_its_own_facts_only(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    good = make_run(tmp_path, "run_good")
    bad = make_run(tmp_path, "run_bad")
    put(good.status, RunStatus(run_id="run_good", state="running", reward=0.25))
    put(bad.status, RunStatus(run_id="run_bad", state="running"))
    put_trainer(tmp_path, {"run_good": 0}, [])
    put(OutputDir(tmp_path).inference_status, InferenceStatus(state="serving"))
    put(OutputDir(tmp_path).daemon_status("trainer"), DaemonStatus(name="trainer", state="running"))
    for path in (bad.status, bad.orch_toml, OutputDir(tmp_path).inference_status):
        damage(path)
    damage(OutputDir(tmp_path).daemon_status("trainer"))
    workspace = read_workspace(tmp_path, now=NOW)
    assert workspace.run("run_good") is not None
    assert workspace.run("run_good").reward == 0.25  # type: ignore[union-attr]
    assert workspace.inference is None
    assert workspace.daemons == ()
    told = [run.reason for run in workspace.runs if run.state is RunState.INVALID] + [
        each.reason for each in workspace.refused
    ]
    assert any("run_bad" in (reason or "") for reason in told)


def test_no_workspace_is_an_empty_workspace(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file", tmp_path / "file" / "below"):
        assert read_workspace(path).runs == ()


def test_refused_entries_are_shown_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run_link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run_empty").mkdir()
    (tmp_path / "run_a b").mkdir()
    reasons = {each.name: each.reason for each in read_workspace(tmp_path).refused}
    assert "symbolic link" in reasons["run_link"]
    assert "orch.toml not found" in reasons["run_empty"]
    assert "letters" in reasons["run_a b"]


def test_a_reader_sees_changes_and_forgets_what_is_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run_a", max_steps=10)
    reader = WorkspaceReader(tmp_path)
    assert reader.read(now=NOW).runs[0].max_steps == 10
    write_atomic(run.orch_toml, RUN_TOML.format(max_steps=77, model="m"))
    assert reader.read(now=NOW).runs[0].max_steps == 77
    shutil.rmtree(run.path)
    assert reader.read(now=NOW).runs == ()
    assert (reader._files, reader._views) == ({}, {})


def test_unchanged_configs_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        make_run(tmp_path, f"run_{number}")
    reader = WorkspaceReader(tmp_path)
    reader.read(now=NOW)
    monkeypatch.setattr("prime_rl.configs.validate.load_run_config", lambda path: pytest.fail(f"parsed {path} again"))
    assert len(reader.read(now=NOW).runs) == 5


def test_the_first_look_may_leave_configs_unread_and_the_next_reads_them(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run_a", max_steps=77)
    put(run.status, RunStatus(run_id="run_a", state="running", max_steps=50))
    make_run(tmp_path, "run_b", max_steps=5)
    (tmp_path / "run_b" / "control" / "orch.toml").write_text("batch_size = 'many'")
    put_trainer(tmp_path, {}, [])
    reader = WorkspaceReader(tmp_path)
    first = reader.read(now=NOW, with_configs=False)
    assert [(view.run_id, view.state, view.max_steps) for view in first.runs] == [
        ("run_a", RunState.WAITING, 50),
        ("run_b", RunState.WAITING, None),
    ]
    second = reader.read(now=NOW)
    assert [(view.run_id, view.state, view.max_steps) for view in second.runs] == [
        ("run_a", RunState.WAITING, 77),
        ("run_b", RunState.INVALID, None),
    ]
    assert reader.read(now=NOW, with_configs=False).runs == second.runs


def test_a_first_look_may_read_only_runs_in_slots_and_the_next_reads_all(tmp_path: Path) -> None:
    for name in "abcd":
        make_run(tmp_path, f"run_{name}")
    reader = WorkspaceReader(tmp_path)
    without_slots = reader.read(now=NOW, with_configs=False, most=2)
    assert (len(without_slots.runs), without_slots.num_unread) == (4, 0)
    put_trainer(tmp_path, {"run_c": 0, "run_b": 1, "run_a": 2}, ["run_d"])
    first = WorkspaceReader(tmp_path).read(now=NOW, with_configs=False, most=2)
    assert ([view.run_id for view in first.runs], first.num_unread) == (["run_c", "run_b"], 2)
    reader.read(now=NOW, with_configs=False, most=2)
    second = reader.read(now=NOW)
    assert (len(second.runs), second.num_unread) == (4, 0)


def test_what_did_not_change_is_the_same_view(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run_a", published=3)
    put_trainer(tmp_path, {"run_a": 0}, [])
    reader = WorkspaceReader(tmp_path)
    view = reader.read(now=NOW).runs[0]
    assert view.step == 3 and reader.read(now=NOW).runs[0] is view
    # A folder of a step that is filled in is seen while the run is in a slot: its parent does not change.
    run.broadcast_dir(4).mkdir()
    assert reader.read(now=NOW).runs[0].step == 3
    (run.broadcast_dir(4) / "STABLE").touch()
    assert reader.read(now=NOW).runs[0].step == 4
    # As well where the folder has been as it is for so long that it is not listed again.
    os.utime(run.broadcast, (1, 1))
    assert [reader.read(now=NOW).runs[0].step for _ in range(2)] == [4, 4]
    run.broadcast_dir(5).mkdir()
    os.utime(run.broadcast, (2, 2))
    assert [reader.read(now=NOW).runs[0].step for _ in range(2)] == [4, 4]
    (run.broadcast_dir(5) / "STABLE").touch()
    assert reader.read(now=NOW).runs[0].step == 5
    run.evicted.write_text("one")
    assert reader.read(now=NOW).runs[0].reason == "one"
    run.evicted.write_text("three")
    assert reader.read(now=NOW).runs[0].reason == "three"


def test_a_run_that_starts_again_lives_by_the_process_that_starts_and_not_by_the_last_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run_a")
    put_trainer(tmp_path, {"run_a": 0}, [])
    put(run.status, RunStatus(run_id="run_a", state="stopped"), alive=False, age_s=3 * 3600)
    starts = DaemonStatus(name="run_a", state="starting")
    starts.child = ProcessId(4713, NOW - 5.0)
    put(OutputDir(tmp_path).daemon_status("run_a"), starts)
    view = read_workspace(tmp_path, now=NOW).runs[0]
    assert (view.state, view.updated_at, view.started_at) == ("active", NOW, NOW - 5.0)
    put(run.status, RunStatus(run_id="run_a", state="running"))
    view = read_workspace(tmp_path, now=NOW).runs[0]
    assert view.started_at == pytest.approx(ProcessId.of(os.getpid()).create_time, abs=1)


def test_a_run_that_the_supervisor_gave_up_has_failed_with_its_reason(tmp_path: Path) -> None:
    make_run(tmp_path, "run_a")
    put_trainer(tmp_path, {"run_a": 0}, [])
    path = OutputDir(tmp_path).daemon_status("run_a")
    put(path, DaemonStatus(name="run_a", state="failed", reason="3 early crashes", num_restarts=2, log_tail=["oh"]))
    workspace = read_workspace(tmp_path, now=NOW)
    assert (workspace.runs[0].state, workspace.runs[0].reason, workspace.runs[0].num_restarts) == (
        "failed",
        "3 early crashes",
        2,
    )
    assert workspace.daemons[0].log_tail == ("oh",)


def test_the_neighbours_of_a_run_that_broke_inference_wait_for_what_a_person_has_to_do(tmp_path: Path) -> None:
    output, why = OutputDir(tmp_path), "9 crashes in a row, last: exit code 1 while it served the base model"
    waits = RunStatus(run_id="run_a", state="running", waiting_on="inference at http://a:1 (connection refused)")
    put(make_run(tmp_path, "run_a").status, waits)
    put_trainer(tmp_path, {"run_a": 0}, [])
    reader = WorkspaceReader(tmp_path)
    assert reader.read(now=NOW).runs[0].waiting_on == waits.waiting_on
    put(output.daemon_status("inference"), DaemonStatus(name="inference", state="failed", reason=why))
    told = f"inference, which has failed ({why}): prl restart inference"
    assert reader.read(now=NOW, working=set()).runs[0].waiting_on == told
    put(output.replica_status(1), InferenceStatus(state="serving"))
    assert reader.read(now=NOW).runs[0].waiting_on == waits.waiting_on, "another server serves it"


@pytest.mark.parametrize(
    ("daemon", "told"),
    [
        (
            DaemonStatus(name="trainer", state="backoff", waiting_on="3 s until it restarts"),
            "the trainer to start (3 s until it restarts)",
        ),
        (DaemonStatus(name="trainer", state="running"), "the trainer to report"),
        (
            DaemonStatus(name="trainer", state="failed", reason="bad"),
            "trainer, which has failed (bad): prl restart trainer",
        ),
        (DaemonStatus(name="trainer", state="stopped"), None),
    ],
)
def test_runs_that_stand_without_a_trainer_say_what_comes_next(
    tmp_path: Path, daemon: DaemonStatus, told: str | None
) -> None:
    make_run(tmp_path, "run_a")
    daemon.child_pid = os.getpid()
    put(OutputDir(tmp_path).daemon_status("trainer"), daemon)
    run = read_workspace(tmp_path, now=NOW).runs[0]
    assert (run.state, run.waiting_on) == ("stopped", told)


def test_the_bottleneck_is_named(tmp_path: Path) -> None:
    put(make_run(tmp_path, "run_a").status, RunStatus(run_id="run_a", state="running", bottleneck="inference"))
    put_trainer(tmp_path, {"run_a": 0}, [])
    assert read_workspace(tmp_path, now=NOW).bottleneck == "run_a: inference is not running"
    put(OutputDir(tmp_path).inference_status, InferenceStatus(state="serving"))
    assert read_workspace(tmp_path, now=NOW).bottleneck == "run_a waits for inference"
    put_trainer(tmp_path, {"run_a": 0}, [], state="waiting")
    assert read_workspace(tmp_path, now=NOW).bottleneck == "the trainer waits for run_a"


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b]2;title\x07b\x1b]8;;http://x\x1b\\c", "abc"),
        ("a\x9b31mb\x9d0;t\x9cc", "abc"),
        ("\x1bPq#0\x1b\\x\x1b_apc\x1b\\y\x1b^pm\x1b\\z\x1bXsos\x1b\\.", "xyz."),
        ("never closed \x1b]0;evil\nnext", "never closed \nnext"),
        ("\x1b\x1b[m[1m", "[1m"),
        ("tab\tline\nnul\x00bell\x07del\x7fback\x08cr\r.", "tab\tline\nnulbelldelbackcr."),
        ("\u202eright\u2066to\u200fleft", "<U+202E>right<U+2066>to<U+200F>left"),
        ("half \udc80 pair", "half \N{REPLACEMENT CHARACTER} pair"),
        ("[bold]markup[/bold] é 漢", "[bold]markup[/bold] é 漢"),
    ],
)
def test_what_a_terminal_obeys_is_stripped(raw: str, clean: str) -> None:
    assert clean_text(raw) == clean


def test_one_line_is_one_short_line() -> None:
    assert one_line("a\n\tb  c" + "x" * 300, 6) == "a b cx"[:5] + "…"


def test_the_reader_is_found_under_its_first_name_too() -> None:
    assert (client.WorkspaceReader, client.read_workspace) == (WorkspaceReader, read_workspace)


def test_a_look_at_some_runs_leaves_the_others_as_they_were_unless_trainer_or_supervisor_report_more(
    tmp_path: Path,
) -> None:
    def write(reward: float, *names: str) -> None:
        for name in names:
            put(
                RunDir(tmp_path / f"run_{name}").status, RunStatus(run_id=f"run_{name}", state="running", reward=reward)
            )

    def rewards(working: set[str] | None) -> dict[str, float | None]:
        return {view.run_id: view.reward for view in reader.read(now=NOW, at_rest=False, working=working).runs}

    for name in "abc":
        make_run(tmp_path, f"run_{name}")
    write(0.1, *"abc")
    put_trainer(tmp_path, {"run_a": 0, "run_b": 1, "run_c": 2}, [])
    reader = WorkspaceReader(tmp_path)
    assert rewards(set()) == {"run_a": 0.1, "run_b": 0.1, "run_c": 0.1}, "all that were not read before"
    write(0.2, *"abc")
    assert rewards({"run_b"}) == {"run_a": 0.1, "run_b": 0.2, "run_c": 0.1}
    put_trainer(tmp_path, {"run_a": 0, "run_b": 1, "run_c": 3}, [])
    assert rewards(set()) == {"run_a": 0.1, "run_b": 0.2, "run_c": 0.2}, "the trainer reports another slot"
    put(OutputDir(tmp_path).daemon_status("run_a"), DaemonStatus(name="run_a", state="running"))
    assert rewards(set()) == {"run_a": 0.2, "run_b": 0.2, "run_c": 0.2}, "the supervisor reports another state"
    write(0.3, *"abc")
    assert rewards(None) == {"run_a": 0.3, "run_b": 0.3, "run_c": 0.3}
