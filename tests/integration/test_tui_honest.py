"""Whatever the files of a workspace are, every screen goes on and shows nothing false."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import RunStatus, TrainerStatus, read_status
from tests.budgets import in_full
from tests.tui_places_support import FakeProbe, busy, put_group
from tests.tui_support import (
    NOW,
    add_run,
    build_workspace,
    opened_app,
    screen_text,
    until,
    write_status,
)
from tui.app import PrlApp

RUN = "run_sort-rank16"
# What stands on each screen, whatever happened to the files of one run.
PLACES = {"1": "run_done", "3": "DAEMON", "4": "iteration 12", "5": "WHAT"}


opened = partial(opened_app, size=(160, 50), make_probe=lambda path: FakeProbe(), read_only=True)


async def sees(app: PrlApp, pilot: Pilot[None], words: str) -> None:
    await until(pilot, lambda: words in screen_text(app), words)


def files_of(workspace: OutputDir) -> list[Path]:
    """All that any screen reads."""
    run = workspace.run(RUN)
    own = [run.orch_toml, run.status, run.orchestrator_metrics, run.trainer_metrics, run.samples, run.log]
    daemons = [
        workspace.trainer_status,
        workspace.inference_status,
        workspace.daemon_status("supervisor"),
        workspace.audit,
    ]
    return [*own, *daemons, workspace.node_status(2)]


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    data = path.read_bytes() if path.exists() else b"{"
    path.write_bytes(data[: max(len(data) // 2, 1)])


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 << 30)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def long_line(path: Path) -> None:
    path.write_bytes(b"x" * 1_000_000 + b"\n" + b"\xff" * 1000 + b"\n")


def gone(path: Path) -> None:
    path.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [half, *in_full(empty, huge, folder, long_line, gone)])
async def test_files_that_are_damaged_while_they_are_open(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    workspace = build_workspace(tmp_path / "workspace")
    busy(workspace)
    put_group(workspace)
    async with opened(workspace) as (app, pilot):
        for key, words in PLACES.items():
            await pilot.press(key)
            await sees(app, pilot, words)
        await pilot.press("1")
        app.open_run(RUN)
        await sees(app, pilot, RUN)
        for path in files_of(workspace):
            damage(path)
        before = app.watcher._shown
        app.watcher.wake()
        await until(pilot, lambda: app.watcher._shown is not before, "a look at what is left")
        for tab in "123456":
            await pilot.press(tab)
            await pilot.pause()
        await pilot.press("escape")
        for key, words in PLACES.items():
            await pilot.press(key)
            await sees(app, pilot, words)


async def test_a_workspace_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    workspace = build_workspace(tmp_path / "workspace")
    put_group(workspace)
    async with opened(workspace) as (app, pilot):
        shutil.move(workspace.path, tmp_path / "away")
        app.watcher.wake()
        await sees(app, pilot, "no runs here yet")
        for key in "345":
            await pilot.press(key)
            await pilot.pause()
        shutil.move(tmp_path / "away", workspace.path)
        await pilot.press("1")
        app.watcher.wake()
        await sees(app, pilot, "run_done")


@pytest.mark.parametrize("skew_s", [-3600.0, -5.0, 5.0, 3600.0, 1e9])
async def test_a_clock_that_is_ahead_invents_no_age_and_no_life(tmp_path: Path, skew_s: float) -> None:
    """All that a run writes is of its own clock: from the future it is fresh, from long ago it is not alive."""
    workspace = build_workspace(tmp_path / "workspace")
    for run_id in ("run_reverse-lr1e-3", RUN):
        status = read_status(workspace.run(run_id).status, RunStatus)
        assert status is not None
        write_status(workspace.run(run_id).status, status, updated_at=NOW + skew_s)
        for path in (workspace.run(run_id).orchestrator_metrics, workspace.run(run_id).trainer_metrics):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text("".join(json.dumps({**line, "time": line["time"] + skew_s}) + "\n" for line in lines))
    async with opened(workspace) as (app, _):
        row = app.watcher._shown and app.watcher._shown.row(RUN)
        assert row is not None
        assert row.state == ("lost" if skew_s < -15 else "active")
        assert "-" not in "".join(line.split()[-1] for line in screen_text(app).splitlines() if RUN in line)


async def test_nothing_is_running_once_its_process_is_gone(tmp_path: Path) -> None:
    """A trainer that died with a fresh status: nothing trains, whatever is in the file."""
    workspace = build_workspace(tmp_path / "workspace")
    busy(workspace)
    for path, kind in ((workspace.trainer_status, TrainerStatus), (workspace.run(RUN).status, RunStatus)):
        status = read_status(path, kind)
        assert status is not None
        status.pid, status.updated_at = 2**22 + 1, NOW
        write_atomic(path, msgspec.json.encode(status))
    async with opened(workspace) as (app, pilot):
        for key in PLACES:
            await pilot.press(key)
            await pilot.pause()
            text = screen_text(app)
            assert "trainer training" not in text and "● active" not in text
        await pilot.press("3")
        await sees(app, pilot, "trainer  not running")


async def test_ages_of_files_from_the_future_are_none(tmp_path: Path) -> None:
    workspace = build_workspace(tmp_path / "workspace")
    run = add_run(workspace, "run_future", status={"state": "evicted"})
    run.evicted.write_text("tomorrow")
    os.utime(run.evicted, (NOW + 86_400, NOW + 86_400))
    async with opened(workspace) as (app, pilot):
        await pilot.press("5")
        await sees(app, pilot, "tomorrow")
        line = next(line for line in screen_text(app).splitlines() if "run_future" in line)
        assert " now " in line
