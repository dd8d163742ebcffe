"""The home screen: marks, pins, orders, the filter line, the command line, the mouse, and what it remembers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from prime_rl.contract.layout import OutputDir
from tests.budgets import in_full
from tests.tui_support import (
    add_run,
    build_workspace,
    command,
    opened_app,
    screen_text,
    until,
)
from tui.memory import Memory
from tui.messages import ReadFailed
from tui.readers.charts import MAX_COMPARED
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen
from tui.widgets.chart import Chart
from tui.widgets.runs_table import RunsTable

FIRST = ["run_reverse-lr1e-3", "run_sort-rank16", "run_upper", "run_queued-a", "run_queued-b"]


@pytest.fixture
def workspace(tmp_path: Path) -> OutputDir:
    return build_workspace(tmp_path / "workspace")


@asynccontextmanager
async def opened(
    path: Path, *, size: tuple[int, int] = (120, 30), memory: Path | None = None, read_only: bool = False
) -> AsyncIterator[tuple[RunsScreen, RunsTable, Pilot[None]]]:
    async with opened_app(path, size=size, memory_path=memory, read_only=read_only) as (app, pilot):
        home = app.screen
        assert isinstance(home, RunsScreen)
        yield home, home.table, pilot


def chosen(home: RunsScreen) -> list[str]:
    return [row.run_id for row in home.target_rows()]


async def test_marks_by_key_range_all_none_and_invert(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (home, table, pilot):
        assert chosen(home) == FIRST[:1], "without marks the run under the cursor"
        await pilot.press("space", "space")
        assert chosen(home) == FIRST[:2] and table.selected_id == FIRST[2]
        await pilot.press("space", "j", "v")
        assert chosen(home) == FIRST[:5], "a range from the last mark to the cursor"
        assert "5 marked" in screen_text(home.app)
        await pilot.press("escape")
        assert chosen(home) == [table.selected_id]
        await pilot.press("g", "J", "J")
        assert chosen(home) == FIRST[:3]
        await pilot.press("i")
        assert len(chosen(home)) == 6 and not set(chosen(home)) & set(FIRST[:3])
        await pilot.press("asterisk")
        assert len(chosen(home)) == 9
        await pilot.press("slash", *"queued", "enter", "escape")
        assert home.memory.workspace.filter == "queued", "esc lets the marks go first"
        await pilot.press("asterisk", "escape", "escape")
        assert home.memory.workspace.filter == "" and table.marks == set()
        await pilot.press("g", "space", "space")
        (workspace.path / FIRST[0]).rename(workspace.path / ".gone")
        await until(pilot, lambda: table.marks == {FIRST[1]}, "the mark of the run that went away to go")
        assert chosen(home) == [FIRST[1]]


@pytest.mark.slow
async def test_pins_stay_on_top_in_every_order_and_under_new_runs(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (home, table, pilot):
        await pilot.press("G", "p")
        last = table.selected_id
        assert table.run_ids[0] == last and table.cursor == 0, "the cursor went with its run"
        await pilot.press("s", "s", "S")
        add_run(workspace, "run_aaa")
        await until(pilot, lambda: "run_aaa" in table.run_ids, "the new run")
        assert table.run_ids[0] == last
        await pilot.press("g", "p")
        assert home.memory.workspace.pins == []


async def test_the_filter_line_says_what_is_wrong_where_and_completes(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (home, table, pilot):
        await pilot.press("slash", *"state:act lag>x")
        assert table.run_ids == FIRST[:2], "the term that is right counts"
        await until(pilot, lambda: "invalid number 'x'" in screen_text(home.app), "what is wrong")
        await pilot.press("backspace", *"1 st")
        await until(pilot, lambda: home.filter_bar.input._suggestion.endswith("state:"), "a suggestion")
        await pilot.press("tab", *"ac")
        await until(pilot, lambda: home.filter_bar.input._suggestion.endswith("state:active"), "a suggestion")
        await pilot.press("tab", "enter")
        assert home.memory.workspace.filter == "state:act lag>1 state:active"
        assert table.run_ids == ["run_sort-rank16"]
        assert "1 of 9" in screen_text(home.app)


@pytest.mark.slow
async def test_the_mouse_sorts_chooses_opens_and_marks(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (home, table, pilot):
        reward = home.app.screen.query_one(RunsTable).region.x + screen_text(home.app).splitlines()[2].index("REWARD")
        await pilot.click(offset=(reward, 2))
        assert (home.memory.workspace.sort, home.memory.workspace.descending) == ("reward", True)
        assert "REWARD▼" in screen_text(home.app) and table.run_ids[0] == "run_done"
        await pilot.click(offset=(reward, 2))
        assert not home.memory.workspace.descending and table.run_ids[0] == "run_collapsed"
        await pilot.click(offset=(20, 5))
        assert table.cursor == 2
        await pilot.click(offset=(0, 6))
        assert table.marks == {table.run_ids[3]}
        await pilot.hover(offset=(20, 7))
        assert table.hover == 4
        await pilot.click(offset=(20, 5))
        await pilot.click(offset=(20, 5))
        await until(pilot, lambda: isinstance(home.app.screen, RunScreen), "a click on the chosen run to open it")


async def test_a_click_on_the_count_of_problems_shows_them(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (home, _, pilot):
        await pilot.click(offset=(115, 1))
        await until(pilot, lambda: type(home.app.screen).__name__.endswith("ProblemsScreen"), "the problems")


async def test_a_thousand_runs_are_drawn_only_where_they_are_seen(tmp_path: Path) -> None:
    workspace = OutputDir(tmp_path)
    add_run(workspace, "run_0000", step=3)
    for number in range(1, 300):
        control = tmp_path / f"run_{number:04}" / "control"
        control.mkdir(parents=True)
        (control / "orch.toml").write_text("x = 1\n")
    async with opened(workspace.path, size=(100, 24)) as (home, table, pilot):
        assert len(table._drawn) <= 24
        await pilot.press("G")
        assert table.selected_id == "run_0299" and "run_0299" in screen_text(home.app)
        await pilot.press("pageup")
        before = table.selected_id
        assert before is not None and before in screen_text(home.app)
        drawn = dict(table._drawn)
        home.refill(home.snapshot)  # type: ignore[arg-type]
        await pilot.pause()
        same = [run_id for run_id in drawn if table._drawn.get(run_id) is drawn[run_id]]
        assert len(same) >= 12, "what did not change is not drawn again"


@pytest.mark.slow
async def test_the_command_line(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (home, table, pilot):
        app = home.app
        await command(pilot, "sort reward asc")
        await until(pilot, lambda: home.memory.workspace.sort == "reward", "the order")
        assert not home.memory.workspace.descending
        await command(pilot, "filter state:waiting")
        await until(pilot, lambda: table.run_ids == FIRST[3:], "the filter")
        await command(pilot, "theme prl-light")
        await until(pilot, lambda: app.theme == "prl-light", "the theme")
        await command(pilot, "op run_done")
        await until(pilot, lambda: isinstance(app.screen, RunScreen), "the run")
        await pilot.press("escape")
        await command(pilot, "runs")
        await until(pilot, lambda: app.screen is home, "home")
        for line, words in (("nonsense", "unknown command 'nonsense'"), ("help me", "takes no arguments")):
            await command(pilot, line)
            await until(pilot, lambda words=words: words in screen_text(app), words)  # type: ignore[misc]
            await pilot.press("escape")
        await command(pilot, "sort colour")
        await until(pilot, lambda: any("columns:" in note.message for note in app._notifications), "what is wrong")
        app.screen.post_message(ReadFailed("KeyError: [b]\nx"))
        said = "This view cannot be read: KeyError: [b] x"
        await until(pilot, lambda: any(note.message == said for note in app._notifications), "what is not read")
        await pilot.press("colon", *"so")
        line = app.screen.query_one(Input)
        await until(pilot, lambda: line._suggestion == "sort", "a suggestion")
        await pilot.press("tab", *" rew")
        await until(pilot, lambda: line._suggestion == "sort reward", "a suggestion")
        await pilot.press("escape")
        await command(pilot, "quit")
        await until(pilot, lambda: not app.is_running, "the end")


async def test_a_wrong_command_tells_what_is_wrong_and_what_to_do(workspace: OutputDir) -> None:
    order = "give COLUMN [asc|desc]; columns: "
    missing = "run 'nix' not found in this workspace; :runs lists them"
    async with opened(workspace.path) as (home, _, pilot):
        for line, words in (
            ("sort colour asc", f"invalid order 'colour asc': {order}"),
            ("sort reward down", f"invalid order 'reward down': {order}"),
            ("diff nix", missing),
            ("open nix", missing),
        ):
            await command(pilot, line)
            notes = home.app._notifications
            await until(pilot, lambda w=words, n=notes: [note.message.startswith(w) for note in n] == [True], words)  # type: ignore[misc]
            home.app.clear_notifications()


@pytest.mark.slow
async def test_a_command_for_a_run_tells_that_there_is_none_under_the_cursor(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (home, table, pilot):
        await command(pilot, "filter no-such-run")
        await until(pilot, lambda: not table.run_ids, "the filter")
        await command(pilot, "pause for now")
        words = "this command needs a run: move the cursor to one; :runs lists them"
        await until(pilot, lambda: any(note.message == words for note in home.app._notifications), words)


@pytest.mark.slow
@pytest.mark.parametrize("read_only", [True, *in_full(False)])
async def test_it_remembers_order_filter_pins_and_theme_and_the_workspace_stays_untouched(
    workspace: OutputDir, tmp_path: Path, read_only: bool
) -> None:
    memory = tmp_path / "state" / "state.json"
    before = {path: path.stat().st_mtime_ns for path in workspace.path.rglob("*")}
    async with opened(workspace.path, memory=memory, read_only=read_only) as (home, _, pilot):
        await pilot.press("s", "s", "S", "j", "p", "slash", *"is:pinned", "enter")
        home.app.theme = "prl-light"
        await until(pilot, lambda: Memory(workspace.path, memory).theme == "prl-light", "the memory on disk")
        pins = home.memory.workspace.pins
    async with opened(workspace.path, memory=memory, read_only=read_only) as (home, table, _):
        assert (home.memory.workspace.sort, home.memory.workspace.descending) == ("run", True)
        assert table.run_ids == pins and len(pins) == 1
        assert home.app.theme == "prl-light"
        assert table.has_focus and home.filter_bar.has_class("-open")
    assert {path: path.stat().st_mtime_ns for path in workspace.path.rglob("*")} == before


@pytest.mark.slow
async def test_the_curves_below_the_table_are_those_of_the_selected_run(workspace: OutputDir) -> None:
    async with opened(workspace.path, size=(120, 45)) as (home, table, pilot):
        for run_id, last_step in zip(FIRST, (42, 87, 9, 0), strict=False):
            assert table.selected_id == run_id
            charts = home.preview.query(Chart)
            ends = {last_step}
            await until(pilot, lambda c=charts, e=ends: {each.data.window[1] for each in c} == e, f"curves of {run_id}")
            await pilot.press("j")


@pytest.mark.slow
async def test_more_marked_runs_than_fit_into_the_charts_are_counted(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (home, table, pilot):
        app, first = home.app, table.selected_id
        await pilot.press("asterisk", "enter")
        await until(pilot, lambda: isinstance(app.screen, RunScreen), "the run")
        screen = app.screen
        assert isinstance(screen, RunScreen) and screen.run_id == first
        assert screen.charts.view.compare == tuple(table.run_ids[1 : MAX_COMPARED + 1])
        words = f"7 of 8 runs are drawn beside {first}; w chooses others"
        await until(pilot, lambda: any(note.message == words for note in app._notifications), words)
