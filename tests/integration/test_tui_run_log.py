"""The log tab in a real app: following, scrolling far, searching, leaving out levels, rotation under one's eyes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from textual.widgets import Static

from prime_rl.contract.layout import OutputDir, RunDir
from tests.tui_run_support import RUN, Opened, opened_run
from tests.tui_support import build_workspace, screen_text
from tui.screens.runs import RunsScreen

NUM_LINES = 4_000


@pytest.fixture
def workspace(tmp_path: Path) -> OutputDir:
    workspace = build_workspace(tmp_path / "workspace")
    levels = ("INFO   ",) * 19 + ("WARNING",)
    lines = [f"2026-09-21T14:00:00Z {levels[n % 20]} data: line {n:04}\n" for n in range(NUM_LINES)]
    lines[10] = "2026-09-21T14:00:00Z ERROR   data: line 0010 broke\n  because of it\n"
    RunDir(workspace.path / RUN).log.write_text("".join(lines))
    return workspace


def append(workspace: OutputDir, text: str) -> None:
    with RunDir(workspace.path / RUN).log.open("a") as file:
        file.write(text)


def number(workspace: OutputDir, offset: int | None) -> int:
    """The number of the line that starts at `offset`; -1 for none."""
    if offset is None:
        return -1
    line = RunDir(workspace.path / RUN).log.read_bytes()[offset:].split(b"\n", 1)[0]
    return int(line.split()[4])


async def open_log(o: Opened) -> None:
    await o.tab("logs")
    await o.sees("following", "line 3999")


async def test_the_end_is_followed_unless_scrolled_away(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        await open_log(o)
        append(workspace, "newest\n")
        await o.sees("newest")
        await o.press("k", "up", "j", "b")
        assert not o.screen.log_view.follows
        append(workspace, "newer\n")
        await o.until(
            lambda: (o.screen.log_view.data or 0) and o.screen.log_view.data.slice.lines[-1].text == "newer", "it"
        )
        assert "newer" not in screen_text(o.app)
        await o.press("f")
        await o.sees("following", "newer")
        await o.press("pageup", "pagedown")
        assert o.screen.log_view.follows, "at the end again"


@pytest.mark.slow
async def test_all_of_it_can_be_reached(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        await open_log(o)
        for _ in range(60):
            await o.press("b")
        assert not o.screen.log_view.follows
        await o.until(lambda: o.screen.log_view.data is not None and not o.screen.log_view.data.slice.is_last, "older")
        await o.press("g")
        await o.sees("line 0000", "because of it")
        while "line 12" not in screen_text(o.app):
            await o.press("space")
        await o.press("G")
        await o.sees("line 3999", "following")


@pytest.mark.slow
async def test_words_are_found_up_and_down_and_round(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        await open_log(o)
        view = o.screen.log_view
        await o.press("slash", *"LINE", "escape")
        assert not view.rows.words
        await o.press("slash", *"line", "space", *"2345", "enter")
        await o.sees("data: line 2345", "/line 2345", "found")
        await o.press("slash", *("backspace",) * 20, *"warning", "enter")  # from what is in sight upwards
        await o.until(lambda: view.found.start is not None, "a warning")
        first = number(workspace, view.found.start)
        assert first % 20 == 19 and 2300 < first < 2380
        for key, line in (("N", first - 20), ("n", first), ("n", first + 20)):
            await o.press(key)
            await o.until(lambda line=line: number(workspace, view.found.start) == line, f"line {line}")
            await o.sees(f"line {line}")
        await o.press("slash", *("backspace",) * 20, *"broke", "enter")
        await o.sees("line 0010 broke")
        await o.press("n")
        await o.sees("wrapped around")
        await o.press("slash", *("backspace",) * 20, *"BROKE", "enter")
        await o.sees("not found")
        await o.press("escape")
        assert not view.rows.words and o.app.screen is o.screen
        await o.press("escape")
        await o.until(lambda: isinstance(o.app.screen, RunsScreen), "home")


@pytest.mark.slow
async def test_levels_leave_out_what_is_below(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        await open_log(o)
        await o.press("v", "v")
        await o.sees("· level warning", "line 3979")
        assert "INFO" not in screen_text(o.app)
        await o.press("v")
        await o.sees("· level error", "line 0010 broke", "because of it")
        assert "WARNING" not in screen_text(o.app)
        await o.press("v")
        await o.sees("· level all", "line 3999")


def where(o: Opened) -> str:
    """The line above the log."""
    return str(o.screen.log_view.query_one("#where", Static).render())


@pytest.mark.slow
async def test_the_start_is_reached_again_from_a_few_lines_below(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        await open_log(o)
        view = o.screen.log_view
        await o.press("g")
        await o.sees("line 0000")
        await o.press("j", "j", "j")
        assert view.rows.top == 3
        await o.press("g")
        assert view.rows.top == 0
        await o.press("j", "j", "j")
        append(workspace, "newest\n")
        size = RunDir(workspace.path / RUN).log.stat().st_size
        await o.until(lambda: view.data is not None and view.data.size == size, "the log that has grown")
        assert view.rows.top == 3, "what was reached already moves nothing later"


@pytest.mark.slow
async def test_following_forgets_the_start_that_was_not_there_yet(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        await open_log(o)
        view = o.screen.log_view
        view.action_start()
        view.action_follow()
        assert view.follows and view._go_to is None
        view.action_start()
        view.action_rows(1)
        await o.pilot.pause()
        assert view._go_to is None, "the place that was asked for last counts"


@pytest.mark.slow
async def test_the_only_match_is_reached_again(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        await open_log(o)
        view = o.screen.log_view
        await o.press("slash", *"broke", "enter")
        await o.sees("line 0010 broke")
        top = view.rows.top
        await o.press("j", "j", "j")
        assert view.rows.top == top + 3
        await o.press("n")
        await o.until(lambda: view.rows.top == top, "the place of the match")


@pytest.mark.slow
async def test_a_search_starts_at_the_last_line_on_the_screen_where_lines_are_long(workspace: OutputDir) -> None:
    log = RunDir(workspace.path / RUN).log
    log.write_text("".join(f"INFO data: x line {n:04} {'word ' * 60}\n" for n in range(200)))
    async with opened_run(workspace.path) as o:
        await o.tab("logs")
        await o.sees("following", "line 0199")
        view = o.screen.log_view
        await o.press("g")
        await o.sees("line 0000")
        last = max(map(int, re.findall(r"line (\d{4})", screen_text(o.app))))
        assert last < 10 and where(o).startswith(f"{(last + 1) / 2:.0f} %")
        await o.press("slash", *"word", "enter")
        await o.until(lambda: view.found.start is not None, "a match")
        assert number(workspace, view.found.start) == last


@pytest.mark.slow
async def test_the_line_above_tells_what_is_read_and_which_log_is_not_there(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        await open_log(o)
        view = o.screen.log_view
        for level in ("info", "warning", "error"):
            view.action_level()
            assert where(o) == f"searching for lines of level {level} and above …"
            await o.sees(f"· level {level}")
        view.action_level()
        assert where(o) == "reading lines of all levels …"
        await o.sees("· level all")
        RunDir(workspace.path / RUN).log.unlink()
        await o.sees(f"no log yet: {RUN}/logs/orchestrator.log")


@pytest.mark.slow
async def test_rotation_and_removal_under_ones_eyes(workspace: OutputDir) -> None:
    log = RunDir(workspace.path / RUN).log
    async with opened_run(workspace.path) as o:
        await open_log(o)
        await o.press("g")
        await o.sees("line 0000")
        os.replace(log, log.with_suffix(".1"))
        log.write_text("after rotation\n")
        await o.sees("after rotation", "following")
        log.unlink()
        await o.sees("no log yet")
        log.write_text("a new one\n")
        await o.sees("a new one")
