"""Every key of the home screen and the run screen, pressed in a real app over a workspace on disk."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from textual.command import CommandList
from textual.pilot import Pilot
from textual.widgets import Input

from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunStatus
from tests.tui_support import (
    NOW,
    Ticker,
    add_run,
    build_workspace,
    cell_text,
    opened_app,
    orch_toml,
    screen_text,
    until,
    write_status,
)
from tui.app import PrlApp
from tui.model.query import SORTS
from tui.screens.base import HelpScreen
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen
from tui.screens.system import SystemScreen
from tui.widgets.runs_table import RunsTable

SIZE = (100, 30)


@pytest.fixture
def workspace(tmp_path: Path) -> OutputDir:
    return build_workspace(tmp_path / "workspace")


opened = opened_app


def home(app: PrlApp) -> RunsScreen:
    screen = app.screen
    assert isinstance(screen, RunsScreen)
    return screen


def table(app: PrlApp) -> RunsTable:
    return app.screen.query_one(RunsTable)


def shown_ids(app: PrlApp) -> list[str]:
    return table(app).run_ids


async def open_run(app: PrlApp, pilot: Pilot[None], run_id: str) -> RunScreen:
    app.call_next(app.open_run, run_id)  # a screen must be made in the app's own context
    await until(pilot, lambda: isinstance(app.screen, RunScreen), "the run screen")
    screen = app.screen
    assert isinstance(screen, RunScreen)
    await until(pilot, lambda: screen.can_show, "the run's files")
    return screen


@pytest.mark.slow
async def test_moving_with_letters_and_arrows(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        ids = shown_ids(app)
        assert len(ids) == 9
        for key, place in [("j", 1), ("down", 2), ("k", 1), ("up", 0), ("G", 8), ("g", 0), ("end", 8), ("home", 0)]:
            await pilot.press(key)
            assert table(app).selected_id == ids[place], key


async def test_enter_opens_and_esc_and_q_go_back_and_q_quits(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        for back in ("escape", "q"):
            await pilot.press("j", "enter")
            await until(pilot, lambda: isinstance(app.screen, RunScreen), "the run screen")
            assert isinstance(app.screen, RunScreen) and app.screen.run_id == table_id(app)
            await pilot.press(back)
            await until(pilot, lambda: isinstance(app.screen, RunsScreen), "home")
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running, "the end")
        assert app.return_code == 0


def table_id(app: PrlApp) -> str | None:
    return app.screen_stack[-2].query_one(RunsTable).selected_id


async def test_filter_narrows_and_esc_shows_all_again(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        await pilot.press("slash", *"queued")
        assert shown_ids(app) == ["run_queued-a", "run_queued-b"]
        await pilot.press("enter")
        assert table(app).has_focus
        await pilot.press("j")
        assert table(app).selected_id == "run_queued-b"
        await pilot.press("escape")
        assert len(shown_ids(app)) == 9
        assert table(app).selected_id == "run_queued-b"
        await pilot.press("slash", *"nothing")
        assert app.screen.has_class("-empty")
        await pilot.press("escape")
        assert not app.screen.has_class("-empty") and app.screen.query_one("#filter", Input).value == ""


@pytest.mark.slow
async def test_sort_goes_through_every_column_both_ways_and_the_cursor_stays_on_its_run(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        await pilot.press("j", "j")
        chosen = table(app).selected_id
        memory = home(app).memory
        for sort in [*list(SORTS)[1:], "slot"]:
            await pilot.press("s")
            assert memory.workspace.sort == sort
            one_way = shown_ids(app)
            await pilot.press("S")
            assert memory.workspace.descending is not SORTS[sort].descending
            assert table(app).selected_id == chosen
            assert sorted(one_way) == sorted(shown_ids(app))
        await pilot.press("s", "s")
        assert shown_ids(app) == sorted(shown_ids(app))


async def test_new_metrics_change_the_row_and_the_cursor_stays_on_its_run_when_others_come_and_go(
    workspace: OutputDir,
) -> None:
    async with opened(workspace.path) as (app, pilot):
        before = cell_text(table(app), "run_reverse-lr1e-3", "reward")
        with RunDir(workspace.path / "run_reverse-lr1e-3").orchestrator_metrics.open("a") as file:
            file.write('{"step": 43, "reward/mean": 0.111}\n')
        await until(pilot, lambda: "0.111" in cell_text(table(app), "run_reverse-lr1e-3", "reward"), "the new reward")
        assert "0.111" not in before
        await pilot.press("j", "j", "j")
        chosen = table(app).selected_id
        add_run(workspace, "run_a-new", toml=orch_toml())
        os.rename(workspace.path / "run_sort-rank16", workspace.path / ".gone")
        await until(pilot, lambda: "run_a-new" in shown_ids(app), "the new run")
        await until(pilot, lambda: "run_sort-rank16" not in shown_ids(app), "the other to go")
        assert table(app).selected_id == chosen


async def test_a_sign_of_life_that_changes_nothing_repaints_nothing(workspace: OutputDir) -> None:
    clock, run_id = Ticker(), "run_reverse-lr1e-3"
    async with opened(workspace.path, clock=clock) as (app, pilot):
        lines = [table(app).render_line(y) for y in range(8)]
        clock.now = NOW + 6
        path = RunDir(workspace.path / run_id).status
        word = msgspec.json.decode(path.read_bytes(), type=RunStatus)
        write_status(path, word, updated_at=clock.now)
        app.watcher.wake()
        await until(pilot, lambda: heard_at(app, run_id) == clock.now, "the sign of life")
        await pilot.pause()
        assert all(table(app).render_line(y) is line for y, line in enumerate(lines) if y)
        word.waiting_on = "rain"
        write_status(path, word, updated_at=clock.now + 1)
        app.watcher.wake()
        await until(pilot, lambda: "waits for rain" in screen_text(app), "the new note on the screen")
        assert [y for y, line in enumerate(lines) if y and table(app).render_line(y) is not line] == [1]


def heard_at(app: PrlApp, run_id: str) -> float | None:
    snapshot = home(app).snapshot
    row = snapshot.row(run_id) if snapshot else None
    return row.updated_at if row else None


async def test_a_run_becomes_lost_as_time_passes(workspace: OutputDir) -> None:
    clock = Ticker()
    async with opened(workspace.path, clock=clock) as (app, pilot):
        assert "active" in cell_text(table(app), "run_reverse-lr1e-3", "state")
        clock.now = NOW + 14.5  # the trainer wrote one second before NOW, the run as well
        RunDir(workspace.path / "run_reverse-lr1e-3").status.touch()
        clock.now = NOW + 30
        await until(
            pilot, lambda: "active" not in cell_text(table(app), "run_reverse-lr1e-3", "state"), "the loss of life"
        )


async def test_help_and_daemons_open_scroll_and_close_and_help_begins_at_the_keys_of_the_screen(
    workspace: OutputDir,
) -> None:
    async with opened(workspace.path, size=(80, 24)) as (app, pilot):
        for key, screen in (("question_mark", HelpScreen), ("P", SystemScreen)):
            await pilot.press(key)
            assert isinstance(app.screen, screen)
            await pilot.press("j", "k", key)
            assert isinstance(app.screen, RunsScreen)

        def top() -> list[str]:
            return [line.strip(" │▁▂▃▄▅▆▇█") for line in screen_text(app).splitlines()[1:4]]

        for keys, title in (("", "Runs"), ("6", "Compare")):
            await pilot.press(*keys, "question_mark")
            await until(pilot, lambda title=title: title in top(), f"{title} at the top")
            await pilot.press("escape", "1")


@pytest.mark.slow
async def test_columns_follow_the_width(workspace: OutputDir) -> None:
    async with opened(workspace.path, size=(80, 24)) as (app, pilot):
        assert [each.key for each in table(app)._layout] == ["state", "run", "progress", "reward", "note", "seen"]
        await pilot.press("j")
        chosen = table(app).selected_id
        assert table(app).virtual_size.width <= 80
        await pilot.resize_terminal(200, 50)
        await until(pilot, lambda: len(table(app)._layout) == 13, "all columns")
        assert table(app).selected_id == chosen
        assert table(app).virtual_size.width <= 200


@pytest.mark.slow
async def test_the_palette_knows_every_key_and_every_run(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert titles >= {
            "Open",
            "Filter",
            "Add",
            "Evict",
            "Delete",
            "Undo delete",
            "Sort",
            "Daemons",
            "Pin",
            "Help",
            "Quit",
        }
        assert "Open run_done" in titles and "Readmit" not in titles, "what would do nothing is left out"
        await choose(app, pilot, "open run_done")
        await until(pilot, lambda: isinstance(app.screen, RunScreen), "the run from the palette")
        assert isinstance(app.screen, RunScreen) and app.screen.run_id == "run_done"


async def choose(app: PrlApp, pilot: Pilot[None], words: str) -> None:
    """Of the palette, by its first words. What fits comes a moment after them."""
    await pilot.press("ctrl+p", *words)

    def is_found() -> bool:
        found = app.screen.query_one(CommandList)
        return found.highlighted == 0 and str(found.get_option_at_index(0).prompt).lower().startswith(words)

    await until(pilot, is_found, f"the command {words}")
    await pilot.press("enter")


async def test_a_command_of_the_palette_acts_like_its_key(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        await choose(app, pilot, "daemons")
        await until(pilot, lambda: isinstance(app.screen, SystemScreen), "daemons from the palette")


async def test_ctrl_c_quits_and_says_so(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.is_running, "the end")
        assert app.return_code == 130


async def test_an_empty_workspace_says_what_to_do(tmp_path: Path) -> None:
    async with opened(tmp_path) as (app, pilot):
        assert app.screen.has_class("-empty")
        words = str(app.screen.query_one("#empty").render())
        assert "prl up" in words and "add a run" in words
        add_run(OutputDir(tmp_path), "run_first")
        await until(pilot, lambda: not app.screen.has_class("-empty"), "the first run")


@pytest.mark.slow
async def test_bad_files_do_not_stop_it(workspace: OutputDir) -> None:
    run = add_run(workspace, "run_bad", step=3, status={"state": "running"})
    run.orchestrator_metrics.write_bytes(b"\xff\x00" * 1000 + b"\n{}\n[]\n" + b'{"step": 4, "reward/mean": 0.4')
    run.status.write_bytes(b"")
    run.orch_toml.write_bytes(b"\x80\x81 = [")
    run.log.unlink()
    run.log.mkdir()
    workspace.trainer_status.write_text("{")
    async with opened(workspace.path) as (app, pilot):
        await open_run(app, pilot, "run_bad")
        await pilot.press(*"123456")
        with run.orchestrator_metrics.open("a") as file:
            file.write("}\n")
        await pilot.press("escape")
        await until(pilot, lambda: "0.400" in cell_text(table(app), "run_bad", "reward"), "the completed line")


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["prl-light", "nord"])
async def test_other_themes(workspace: OutputDir, theme: str) -> None:
    async with opened(workspace.path, size=(120, 40)) as (app, pilot):
        app.theme = theme
        await pilot.pause()
        await open_run(app, pilot, "run_reverse-lr1e-3")
        await pilot.press(*"6543216")


async def test_no_color_still_draws(workspace: OutputDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(workspace.path) as (app, _):
        assert app.no_color
        svg = app.export_screenshot()
        assert "active" in svg and "run_done" in svg


async def test_read_only_has_no_key_that_acts(workspace: OutputDir) -> None:
    before = sorted(str(path) for path in workspace.path.rglob("*"))
    async with opened(workspace.path, read_only=True) as (app, pilot):
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert not titles & {"Add", "Evict", "Readmit", "Delete", "Undo delete"}
        assert not set("aerdu") & set(app.screen.active_bindings)
        await pilot.press("a", "e", "r", "d", "u")
        assert isinstance(app.screen, RunsScreen) and len(app.screen_stack) == 2
        screen = await open_run(app, pilot, "run_reverse-lr1e-3")
        assert not set("erdu") & set(screen.active_bindings)
        await pilot.press("e", "r", "d", "u")
        assert app.screen is screen
    assert sorted(str(path) for path in workspace.path.rglob("*")) == before
