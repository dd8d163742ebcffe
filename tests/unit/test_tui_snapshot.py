"""From the disk to rows in words: every state, honest ages, no text that a terminal obeys."""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from daemons.commands.runs import run_json, workspace_json
from daemons.workspace_reader import WorkspaceReader
from prime_rl.contract.layout import OutputDir, RunDir, stable_marker
from prime_rl.contract.metrics import Sign
from prime_rl.contract.status import (
    LOST_AFTER_S,
    Crash,
    DaemonStatus,
    InferenceStatus,
    RunState,
    RunStatus,
    TrainerStatus,
    read_status,
    utc,
)
from prime_rl.utils.text import one_line
from tests.budgets import examples
from tests.tui_support import HOSTILE, NOW, build_workspace, write_status
from tui.model import snapshot as snapshot_module
from tui.model.levels import STATES, Level
from tui.model.snapshot import STALL_MIN_S, DaemonRow, Disk, RunRow, Snapshot, display_state, make_snapshot
from tui.readers.run_config import find_error_lines, parse_audit
from tui.readers.workspace_metrics import WorkspaceMetrics
from tui.screens.runs import describe
from tui.screens.system import daemon_detail, daemon_line, inference_lines, trainer_lines
from tui.watcher import StateTimes
from tui.widgets.header import run_lines, workspace_lines
from tui.widgets.runs_table import PADDING, choose_columns, make_cell, plain

ESSENTIAL = {"state", "run", "progress", "reward", "note"}


@pytest.fixture
def workspace(tmp_path: Path) -> OutputDir:
    return build_workspace(tmp_path / "workspace")


def look(output: OutputDir, now: float = NOW) -> Snapshot:
    found = WorkspaceReader(output.path).read(now=now)
    return make_snapshot(found, WorkspaceMetrics(output.path).update(found), now, since=StateTimes(output).read(found))


def test_every_state_is_told_apart(workspace: OutputDir) -> None:
    states = {row.run_id: row.state for row in look(workspace).rows}
    assert states == {
        "run_reverse-lr1e-3": "active",
        "run_sort-rank16": "active",
        "run_upper": "lost",
        "run_queued-a": "waiting",
        "run_queued-b": "waiting",
        "run_collapsed": "evicted",
        "run_crashed": "failed",
        "run_done": "finished",
        "run_typo": "invalid",
    }
    symbols = [symbol for symbol, _ in STATES.values()]
    assert len(set(symbols)) == len(symbols), "a state must be readable without colour"


def test_the_header_of_a_demo_says_how_it_ends_when_all_runs_are_done(workspace: OutputDir) -> None:
    snapshot = look(workspace)
    done = replace(snapshot, rows=tuple(replace(row, state=RunState.FINISHED) for row in snapshot.rows))
    for shown, is_demo, says in ((snapshot, True, False), (done, False, False), (done, True, True)):
        line = workspace_lines(shown, 80, read_only=False, is_demo=is_demo)[0].plain
        assert ("q ends the demo" in line) is says


def test_at_80_columns_the_header_names_the_end_of_the_bottleneck_too(workspace: OutputDir) -> None:
    words = one_line("run_reverse-text-sweep-lr2e-3-seed1 waits for inference")
    line = workspace_lines(replace(look(workspace), bottleneck=words), 80, read_only=False)[1].plain
    assert "-seed1 waits for inference" in line and "problems" in line


@pytest.mark.parametrize(
    ("bottleneck", "at_80", "at_60"),
    [
        ("run_a waits for inference", "train 2.8k/s   run_a waits for inference", "3/4   run_a waits for inference "),
        ("run_sort-rank16 waits for the trainer (step 86)", "k/s   waits for the trainer ", "waits for the trainer"),
        ("run_a and 4 more: inference is not running", "k/s   inference is not running", "inference is not running"),
        ("run_a, run_b and 4 more: the trainer", "k/s   bottleneck the trainer", "bottleneck the trainer"),
        ("the trainer waits for run_a, which waits for 64 rollouts of step 43 (51 done)", "of step 43 ", "of step 43 "),
        ("run_a waits for inference, which has failed (exit 1): prl restart inference", "which has failed ", "failed "),
        ("no space left on /dev/sda1 (/data): 12 bytes free; free some", "/dev/sda1:", "no space left on"),
    ],
)  # fmt: skip
def test_a_narrow_header_keeps_the_cause_of_the_bottleneck(
    workspace: OutputDir, bottleneck: str, at_80: str, at_60: str
) -> None:
    """Without counts and advice in brackets and behind a colon; a word is never cut in its middle."""
    snapshot = replace(look(workspace), bottleneck=one_line(bottleneck))
    for width, words in ((80, at_80), (60, at_60)):
        line = workspace_lines(snapshot, width, read_only=False)[1].plain
        assert words in line and line.endswith(" problems ") and len(line) == width, line
        said = line.partition(" ▲")[0].rstrip()
        assert not said.endswith("…") or said[:-1].split()[-1] in bottleneck.split(), line


def test_a_run_that_gives_no_sign_of_life_is_lost_and_says_since_when(workspace: OutputDir) -> None:
    row = look(workspace).row("run_upper")
    assert row is not None and row.is_problem
    assert row.note.startswith("no heartbeat for 1m")
    later = look(workspace, NOW + LOST_AFTER_S - 2).row("run_reverse-lr1e-3")
    assert later is not None and later.state == "active"
    assert look(workspace, NOW + LOST_AFTER_S + 1).workspace.trainer is None


def test_rows_carry_the_newest_metrics(workspace: OutputDir) -> None:
    row = look(workspace).row("run_reverse-lr1e-3")
    assert row is not None
    assert len(row.tail.rewards) == 42
    assert row.reward == row.tail.rewards[-1]
    assert row.loss is not None and row.reward_change is not None


def test_every_number_of_runs_that_train_or_wait_is_that_of_their_files(workspace: OutputDir) -> None:
    """Read another way: as JSON and TOML alone. Of a finished run test_system_quick has the same."""
    write_status(workspace.daemon_status("run_upper"), DaemonStatus(name="run_upper", state="running", num_restarts=3))
    again = DaemonStatus(name="trainer", state="running", child_pid=4711, child_create_time=NOW - 5, num_restarts=2)
    again.crashes = [Crash(at=NOW - 90, kind="crash", reason="exit 1"), Crash(at=NOW - 9, kind="stall", reason="")]
    write_status(workspace.daemon_status("trainer"), again)
    ahead = read_status(workspace.trainer_status, TrainerStatus)
    assert ahead is not None
    ahead.runs["run_reverse-lr1e-3"].step += 1  # its version is being published
    write_status(workspace.trainer_status, ahead)
    enrich(workspace.run("run_sort-rank16"))
    snapshot = look(workspace)
    trainer = json.loads(workspace.trainer_status.read_text())
    shown = {run["run_id"]: run for run in workspace_json(snapshot.workspace, None)["runs"]}
    assert trainer["runs"] and trainer["waiting"] and set(trainer["runs"]) <= set(shown)
    for run_id in [*trainer["runs"], *trainer["waiting"]]:
        run, slot = workspace.run(run_id), trainer["runs"].get(run_id)
        status = json.loads(run.status.read_text()) if run.status.exists() else {}
        config = tomllib.loads(run.orch_toml.read_text())
        folders = run.broadcast.iterdir() if run.broadcast.exists() else []
        published = max((int(path.name.removeprefix("step_")) for path in folders), default=0)
        expected = {
            "state": "active" if slot else "waiting",
            "step": slot["step"] if slot else published,
            "max_steps": config["max_steps"],
            "run_idx": slot["run_idx"] if slot else None,
            "queue_position": None if slot else trainer["waiting"].index(run_id) + 1,
            "lr": slot["lr"] if slot else config["optim"]["lr"],
            "batch_size": config["batch_size"],
            "num_restarts": 3 if run_id == "run_upper" else 0,
            "updated_at": status.get("updated_at"),
            "added_at": run.orch_toml.stat().st_mtime,
            "weight": config.get("weight", 1.0),
            "priority": config.get("priority", 0),
            "max_tokens": config.get("budget", {}).get("max_tokens"),
            "max_hours": config.get("budget", {}).get("max_hours"),
            "examples_unusable": status.get("examples_unusable", 0),
            "signs": tuple(status.get("signs", [])),
            "sound_step": 60 if run_id == "run_sort-rank16" else None,  # the newest of 60, 80 and 87 up to 87 - 20
            "stalled_since": None,
        }
        is_silent = NOW - status.get("updated_at", NOW) > LOST_AFTER_S
        told = expected | {"reward": status.get("reward"), "tokens_per_s": None, "async_level": None}
        if status:
            told["policy_version"] = published if is_silent else status["policy_version"]
        if status and not is_silent:
            told |= {name: status[name] for name in ("tokens_per_s", "async_level")}
        told["started_at"] = status["pid_create_time"] if status and not is_silent else None
        assert {name: shown[run_id][name] for name in told} == told, run_id
        # A number that is new in the answer needs another way to it.
        assert {name for name, value in shown[run_id].items() if is_number(value)} <= told.keys() | {"policy_version"}
        row = snapshot.row(run_id)
        assert row is not None and run_json(row.view) == shown[run_id]
        lines = [
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            for path in (run.orchestrator_metrics, run.trainer_metrics)
        ]
        rewards, losses = ([line[name] for line in of] for of, name in zip(lines, ("reward/mean", "loss"), strict=True))
        assert (row.step, row.max_steps, row.lag) == (told["step"], told["max_steps"], told.get("async_level"))
        assert (row.tokens_per_s, row.loss) == (told.get("tokens_per_s"), losses[-1] if losses else None)
        newest = rewards[-len(row.tail.rewards) :] if row.tail.rewards else []
        assert (list(row.tail.rewards), row.reward) == (newest, rewards[-1] if rewards else told.get("reward"))
    check_parts(workspace, workspace_json(snapshot.workspace, None))
    head = "\n".join(line.plain for line in workspace_lines(snapshot, 160, read_only=False))
    assert f"{len(trainer['runs'])}/{trainer['max_runs']} +{len(trainer['waiting'])} waiting" in head
    assert f"trains {trainer['tokens_per_s'] / 1000:.1f}k tok/s" in head
    slots = {slot["run_idx"]: run_id for run_id, slot in trainer["runs"].items()}
    assert workspace_json(snapshot.workspace, None)["slots"] == [
        {"run_idx": place, "run_id": slots.get(place)} for place in range(trainer["max_runs"])
    ]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def enrich(run: RunDir) -> None:
    """Give a run signs, examples that cannot be used, two older versions, a budget, a weight and a priority."""
    before = read_status(run.status, RunStatus)
    assert before is not None
    before.examples_unusable, before.signs = 7, [Sign("no_gradient", 0.0, 0.0, 5), Sign("no_signal", 1.0, 0.9, 20)]
    write_status(run.status, before)
    for step in (60, 80):
        run.broadcast_dir(step).mkdir()
        stable_marker(run.broadcast_dir(step)).touch()
    budget = "[budget]\nmax_tokens = 900_000\nmax_hours = 1.5\n"
    run.orch_toml.write_text(f"weight = 2.5\npriority = 3\n{run.orch_toml.read_text()}\n{budget}")
    os.utime(run.orch_toml, (NOW - 900, NOW - 900))  # whole seconds, which have one float


def check_parts(workspace: OutputDir, shown: dict[str, Any]) -> None:
    """The numbers of daemons and inference are those of their files, as JSON alone."""
    for daemon in shown["daemons"]:
        file = json.loads(workspace.daemon_status(daemon["name"]).read_text())
        told = {name: file[name] for name in ("num_restarts", "updated_at", "stalled_since")}
        told["crashed_at"] = max((crash["at"] for crash in file["crashes"]), default=None)
        of_child = "child_pid", "child_create_time"  # the supervisor writes about itself, and about its children
        pid, create_time = ("pid", "pid_create_time") if daemon["name"] == "supervisor" else of_child
        told |= {"pid": file[pid], "pid_create_time": (file[create_time] or 0.0) if file[pid] else None}
        assert {name: daemon[name] for name in told} == told, daemon["name"]
        assert {name for name, value in daemon.items() if is_number(value)} <= told.keys()
    (server,), file = shown["inference"], json.loads(workspace.inference_status.read_text())
    told = {"replica": 0} | {name: file[name] for name in ("num_running", "num_waiting", "tokens_per_s", "kv_use")}
    assert {name: server[name] for name in told} == told
    assert {name for name, value in server.items() if is_number(value)} <= told.keys()


def test_the_shares_of_the_trainers_time_are_those_of_its_file(workspace: OutputDir) -> None:
    status = read_status(workspace.trainer_status, TrainerStatus)
    assert status is not None
    status.time_s = {"wait": 2.0, "forward_backward": 5.0, "optim": 1.0, "broadcast": 1.5, "checkpoint": 0.5}
    write_status(workspace.trainer_status, status)
    lines = [line.plain for line in trainer_lines(look(workspace), None, 102)]
    assert "wait 20 %  █ train 50 %  ▓ optimizer 10 %  ▒ publish 15 %  ▪ checkpoint 5 %" in "\n".join(lines)
    assert [lines[1].count(char) for char in "░█▓▒▪"] == [20, 50, 10, 15, 5]


def test_every_rate_tells_whether_tokens_are_trained_or_generated(workspace: OutputDir) -> None:
    snapshot = look(workspace)
    row = next(row for row in snapshot.rows if row.tokens_per_s)
    for verb, lines in (
        ("trains?", workspace_lines(snapshot, 80, read_only=False)),
        ("trains", trainer_lines(snapshot, None, 80)),
        ("generates", inference_lines(snapshot, 80)),
        ("generates", run_lines(row, 80, NOW)),
        ("generates", [describe(row, NOW)]),
    ):
        text = "\n".join(line.plain for line in lines)
        assert re.search(rf"{verb} [\d.]+k?( tok|/s)", text), text


def test_a_finished_run_tells_which_end_it_had(workspace: OutputDir) -> None:
    workspace.run("run_collapsed").evicted.unlink()
    workspace.run("run_collapsed").finished.write_text("budget used up: 9 of 9 tokens")
    rows = {row.run_id: row for row in look(workspace).rows}
    done, early = (describe(rows[name], NOW).plain.splitlines() for name in ("run_done", "run_collapsed"))
    assert done[0].endswith("finished  reached max_steps") and "budget" not in "".join(done[:2])
    assert early[0].endswith("finished  ended before max_steps") and early[1] == "budget used up: 9 of 9 tokens"


def test_notes_say_what_is_waited_for_or_wrong_on_one_line(workspace: OutputDir) -> None:
    notes = {row.run_id: row.note for row in look(workspace).rows}
    assert notes["run_reverse-lr1e-3"] == "waits for 64 rollouts of step 43 (51 done)"
    assert notes["run_queued-b"] == "waits for a free slot (2. in the queue)"
    assert notes["run_collapsed"] == "the reward collapsed"
    assert notes["run_typo"].startswith("learning_rate: unknown key")
    assert notes["run_sort-rank16"] == "bottleneck: the trainer (step 86)"


def test_problems_are_named(workspace: OutputDir) -> None:
    write_status(workspace.daemon_status("inference"), DaemonStatus(name="inference", state="backoff", reason="exit 1"))
    snapshot = look(workspace)
    assert [problem.name for problem in snapshot.problems] == [
        "inference",
        "run_upper",
        "run_crashed",
        "run_collapsed",
        "run_typo",
        "run_bad name",
    ]
    assert "exit 1" in snapshot.problems[0].text
    assert {row.run_id for row in snapshot.rows if row.is_problem} == {
        problem.name for problem in snapshot.problems if problem.target == "run"
    }
    assert [problem.target for problem in snapshot.problems] == ["daemon", "run", "run", "run", "run", "entry"]
    assert snapshot.problems[3].since == NOW - 2900, "an eviction counts from when it was written down"


def test_a_full_disk_is_a_problem(workspace: OutputDir) -> None:
    found = WorkspaceReader(workspace.path).read(now=NOW)
    for free, total, is_low in ((1 << 30, 1 << 40, True), (30 << 30, 1 << 40, False), (3 << 30, 4 << 30, False)):
        problems = make_snapshot(found, {}, NOW, disk=Disk(free, total)).problems
        assert ("workspace" in [problem.target for problem in problems]) is is_low
        assert not is_low or "1.0 GiB of 1.0 TiB free" in problems[-1].text


def test_a_run_whose_steps_stop_is_stalled_and_says_since_when(workspace: OutputDir) -> None:
    found = WorkspaceReader(workspace.path).read(now=NOW)
    # The process of their status files is this one, which has started after NOW.
    found = replace(found, runs=tuple(replace(run, started_at=None) for run in found.runs))
    usual = WorkspaceMetrics(workspace.path).update(found)

    def row(silent_s: float) -> RunRow:
        tail = replace(usual["run_sort-rank16"], last_step_at=NOW - 1 - silent_s)
        made = make_snapshot(found, usual | {"run_sort-rank16": tail}, NOW).row("run_sort-rank16")
        assert made is not None
        return made

    assert usual["run_sort-rank16"].step_s == 12.0
    assert row(STALL_MIN_S - 1).state == "active"
    stalled = row(STALL_MIN_S + 61)
    assert (stalled.state, stalled.note) == ("stalled", "no step for 6m")
    (view,) = (run for run in found.runs if run.run_id == "run_sort-rank16")
    resumed = replace(view, started_at=NOW - STALL_MIN_S + 9)  # that it stood still before is no trouble
    assert display_state(resumed, NOW, stalled.tail, NOW) == "active"
    assert display_state(replace(view, started_at=NOW - STALL_MIN_S - 9), NOW, stalled.tail, NOW) == "stalled"
    starts = replace(resumed, started_at=NOW - 5.0, updated_at=NOW)
    assert display_state(starts, NOW, replace(stalled.tail, last_step_at=NOW - 10_800.0), NOW) == "active"
    slow = replace(usual["run_sort-rank16"], step_s=200.0, last_step_at=NOW - 1 - 1000)
    assert make_snapshot(found, {"run_sort-rank16": slow}, NOW).row("run_sort-rank16").state == "active"  # type: ignore[union-attr]
    problems = make_snapshot(found, usual | {"run_sort-rank16": stalled.tail}, NOW).problems
    assert problems[1].text == "stalled: no step for 6m" and problems[1].since == NOW - 1 - STALL_MIN_S - 61


def test_a_run_that_was_seen_lost_or_alive_is_the_other_as_soon_as_it_is(workspace: OutputDir) -> None:
    """Nothing of it changes on disk: only the time passes, and its signs of life on our own clock."""
    found = WorkspaceReader(workspace.path).read(now=NOW)
    tails = WorkspaceMetrics(workspace.path).update(found)
    name, before = "run_reverse-lr1e-3", None
    seen = []
    for now, alive_at in ((0, 0), (61, 0), (200, 0), (201, 201), (202, 201)):
        signs = {name: NOW + alive_at}
        before = make_snapshot(found, tails, NOW + now, before=before, alive_at=signs)
        row = before.row(name)
        assert row is not None
        seen.append((row.state, row.note.split(";")[0]))
    alive = ("active", "waits for 64 rollouts of step 43 (51 done)")
    assert seen == [alive, ("lost", "no heartbeat for 1m"), ("lost", "no heartbeat for 3m"), alive, alive]


def test_a_daemon_whose_loop_hangs_is_stalled_in_header_system_and_problems(workspace: OutputDir) -> None:
    trainer = read_status(workspace.trainer_status, TrainerStatus)
    supervisor = read_status(workspace.daemon_status("supervisor"), DaemonStatus)
    assert trainer is not None and supervisor is not None
    for each in (trainer, supervisor):
        each.loop, each.loop_still_s = 7, each.loop_limit_s + 60.0
    write_status(workspace.trainer_status, trainer)
    write_status(workspace.daemon_status("supervisor"), supervisor)
    snapshot = look(workspace)
    for name, status in {"trainer": trainer, "supervisor": supervisor}.items():
        at = utc(status.updated_at - status.loop_still_s)
        daemon = next(each for each in snapshot.daemons if each.name == name)
        assert (daemon.state, daemon.level) == ("stalled", Level.WARN)
        assert daemon.detail == f"its main loop has not turned since {at}"
        assert daemon.detail in daemon_line(daemon, None, 12).plain
        assert f"{name} stalled" in workspace_lines(snapshot, 140, read_only=False)[0].plain
        assert f"stalled: {daemon.detail}" in [problem.text for problem in snapshot.problems if problem.name == name]
    assert snapshot.bottleneck is not None and snapshot.bottleneck.endswith("the trainer is stalled")


def test_the_orchestrator_of_a_paused_run_is_paused_not_done(workspace: OutputDir) -> None:
    RunDir(workspace.path / "run_sort-rank16").paused.touch()
    write_status(workspace.daemon_status("run_sort-rank16"), DaemonStatus(name="run_sort-rank16", state="done"))
    states = {daemon.name: (daemon.state, daemon.level) for daemon in look(workspace).daemons}
    assert states["run_sort-rank16"] == ("paused", Level.QUIET)


def test_daemons_of_a_workspace_that_is_down(tmp_path: Path) -> None:
    snapshot = look(build_workspace(tmp_path / "workspace", living=False))
    assert {daemon.name: daemon.state for daemon in snapshot.daemons} == {
        "trainer": "stopped",
        "inference": "stopped",
        "supervisor": "stopped",
    }
    assert {row.state for row in snapshot.rows} == {"stopped", "evicted", "failed", "finished", "invalid"}


def test_an_empty_folder_is_an_empty_workspace(tmp_path: Path) -> None:
    snapshot = look(OutputDir(tmp_path))
    assert snapshot.rows == () and snapshot.problems == ()
    assert [daemon.state for daemon in snapshot.daemons] == ["down", "down", "down"]


def test_hostile_text_is_clean_in_every_row_and_problem(workspace: OutputDir) -> None:
    RunDir(workspace.path / "run_collapsed").evicted.write_text(HOSTILE)
    RunDir(workspace.path / "run_typo").config_error.write_text(HOSTILE * 2)
    write_status(
        workspace.daemon_status("trainer"),
        DaemonStatus(name="trainer", state="failed", reason=HOSTILE, log_tail=[HOSTILE]),
    )
    snapshot = look(workspace)
    texts = [text for row in snapshot.rows for text in (row.note, row.reason or "")]
    texts += [problem.text for problem in snapshot.problems]
    texts += [text for daemon in snapshot.daemons for text in (daemon.detail, *daemon.log_tail)]
    assert any("[bold]not bold[/]" in text for text in texts), "text is kept, only what a terminal obeys goes"
    for text in texts:
        assert not set(text) & {"\x1b", "\x07", "\u202e", "\x9b"}
        assert "owned" not in text


@settings(max_examples=examples(40))
@given(width=st.integers(77, 260), longest=st.integers(5, 68))
@example(width=100, longest=68)
def test_the_columns_fit_and_hold_the_essential(width: int, longest: int) -> None:
    columns = choose_columns(width, ["run_".ljust(longest, "x")])
    assert sum(column.width + 2 * PADDING for column in columns) <= width
    assert {column.key for column in columns} >= ESSENTIAL | {"seen"}
    if width >= 200:
        assert len(columns) == 13


def test_cells_are_as_wide_as_their_column(workspace: OutputDir) -> None:
    for width in (79, 119, 199):
        columns = choose_columns(width, ["run_with-a-long-id"])
        for row in look(workspace).rows:
            cells = {column.key: plain(make_cell(column, row, NOW)) for column in columns}
            assert {key: cell for key, cell in cells.items() if cell_len(cell) != _width(columns, key)} == {}


def _width(columns: object, key: str) -> int:
    return next(column.width for column in columns if column.key == key)  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_headers_fit_their_width(workspace: OutputDir, width: int) -> None:
    snapshot = look(workspace)
    lines = [*workspace_lines(snapshot, width, True)]
    for row in snapshot.rows:
        lines += run_lines(row, width, NOW)
    assert all(cell_len(line.plain) <= width for line in lines), [line.plain for line in lines]


def test_a_small_header_of_a_workspace_that_is_down_says_so_and_that_it_is_read_only(workspace: OutputDir) -> None:
    snapshot = look(workspace)
    down = tuple(replace(daemon, state="stopped", level=Level.QUIET) for daemon in snapshot.daemons)
    first, _ = workspace_lines(replace(snapshot, daemons=down), 80, True)
    assert "read-only" in first.plain and "■ trainer, inference, supervisor stopped" in first.plain


def test_the_header_counts_the_inference_servers_that_are_up(workspace: OutputDir) -> None:
    def head(width: int) -> str:
        return workspace_lines(look(workspace), width, False)[0].plain

    assert "● inference serving" in head(140), "one server is not counted"
    serving = InferenceStatus(state="serving", engine="vllm", model="models/base")
    write_status(workspace.replica_status(1), serving)
    for number, state in ((1, "running"), (2, "backoff"), (3, "done")):
        write_status(
            workspace.daemon_status(f"inference-{number}"), DaemonStatus(name=f"inference-{number}", state=state)
        )
    assert "▲ inference 2/3 backoff" in head(140) and "▲ inference 2/3 backoff" in head(80)
    write_status(workspace.daemon_status("inference-2"), DaemonStatus(name="inference-2", state="running"))
    assert "◌ inference 2/3 starting" in head(140), "it runs, and does not serve yet"
    write_status(workspace.daemon_status("inference-2"), DaemonStatus(name="inference-2", state="done"))
    assert "● inference 2/2 serving" in head(140) and "● inference 2/2 " in head(80)


@pytest.mark.parametrize("name", ["alerts", "monitors"])
def test_a_daemon_at_the_side_is_shown_when_it_has_crashed(workspace: OutputDir, name: str) -> None:
    write_status(workspace.daemon_status(name), DaemonStatus(name=name, state="running"))
    assert name not in workspace_lines(look(workspace), 140, False)[0].plain
    for state, symbol in (("backoff", "▲"), ("failed", "✖")):
        status = DaemonStatus(name=name, state=state, reason="exit code 1")
        write_status(workspace.daemon_status(name), status)
        snapshot = look(workspace)
        assert f"{symbol} {name} {state}" in workspace_lines(snapshot, 140, False)[0].plain
        (problem,) = [problem for problem in snapshot.problems if problem.name == name]
        assert problem.text == f"{state}: exit code 1"


def test_error_lines_are_found_by_number_and_by_key() -> None:
    config = "a = 1\n[model]\nname = 'x'\n[model.lora]\nrank = 99\n[[env]]\nid = 'q'\n[[env]]\nid = 'r'\n"
    assert find_error_lines(config, "f.toml: model.lora.rank: found 99") == (5,)
    assert find_error_lines(config, "f.toml: env.1.id: found 'r'") == (9,)
    assert find_error_lines(config, "f.toml: line 2: not valid TOML") == (2,)
    assert find_error_lines(config, "f.toml: line 2000: not valid TOML") == ()
    assert find_error_lines("", "") == ()


def test_audit_lines_of_other_runs_and_no_lines_are_left_out() -> None:
    good = b'{"time": 5, "who": "me", "action": "evict", "run_id": "run_a", "reason": "why\\u001b[31m"}'
    event = parse_audit(good, "run_a")
    assert event is not None and (event.time, event.kind, event.text, event.who) == (5, "evict", "why", "me")
    for line in (b"", b"[]", b"{", b'{"run_id": "run_b"}', b"[" * 100_000):
        assert parse_audit(line, "run_a") is None
    odd = parse_audit(b'{"run_id": "run_a", "time": "soon", "reason": 7}', "run_a")
    assert odd is not None and (odd.time, odd.text) == (None, "7")


def test_rows_are_kept_after_the_trainer_was_silent_for_a_while(
    workspace: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, metrics, made = WorkspaceReader(workspace.path), WorkspaceMetrics(workspace.path), []
    trainer = read_status(workspace.trainer_status, TrainerStatus)
    assert trainer is not None
    real = snapshot_module._row
    monkeypatch.setattr(snapshot_module, "_row", lambda *args: made.append(args[1].run_id) or real(*args))
    before: Snapshot | None = None
    for silent_s in (1.0, 2 * LOST_AFTER_S, 1.0, 1.0, 1.0):
        write_status(workspace.trainer_status, trainer, updated_at=NOW - silent_s)
        found = reader.read(now=NOW)
        made.clear()
        after = make_snapshot(found, metrics.update(found), NOW, before=before)
        if before is not None and silent_s == 1.0 and before.workspace.trainer is not None:
            assert made == ["run_upper"], "of a lost run the note has an age"
            assert after.rows == before.rows
        before = after


def test_what_goes_wrong_in_an_environment_is_a_problem_of_a_run_that_goes_on(workspace: OutputDir) -> None:
    run, problem = (
        workspace.run("run_sort-rank16"),
        "env jsonl: 3 % of rollouts dropped: KeyError: 'answer' in example 17",
    )
    status = read_status(run.status, RunStatus)
    assert status is not None and len(look(workspace).problems) == 5
    status.problem, status.examples_unusable = f"\x1b[31m{problem}", 2
    write_status(run.status, status)
    snapshot = look(workspace)
    (found,) = [each for each in snapshot.problems if each.name == "run_sort-rank16"]
    assert (found.text, found.target, found.level) == (problem, "run", Level.WARN)
    row = snapshot.row("run_sort-rank16")
    assert row is not None and (row.state, row.note, row.view.why) == ("active", problem, problem)
    assert row.view.examples_unusable == 2
    status.waiting_on = "a policy"
    write_status(run.status, status)
    row = look(workspace).row("run_sort-rank16")
    assert row is not None and row.note == row.view.why == f"{problem}; waits for a policy"


def test_the_log_of_a_process_that_ended_is_not_that_of_the_one_after_it() -> None:
    ended = DaemonRow(
        one_line("trainer"), one_line("backoff"), Level.WARN, one_line("exit code 1"), log_tail=(one_line("oh"),)
    )
    began = replace(ended, pid=4720, num_restarts=1)
    assert [line.plain for line in daemon_detail(ended, 2)] == ["▲ trainer  exit code 1", "│ oh"]
    words = "▲ trainer  pid 4720  below: the log of the process before it  exit code 1"
    assert daemon_detail(began, 2)[0].plain == words
    assert daemon_detail(replace(began, log_tail=()), 2)[0].plain == "▲ trainer  pid 4720  exit code 1"
