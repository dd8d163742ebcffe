"""Keys that come in one packet, as over a slow line, do what they would do one after another."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import Input

from tests.tui_run_support import opened_run
from tests.tui_support import build_workspace, has_looked, until
from tui.app import PrlApp
from tui.screens.base import CommandScreen
from tui.screens.compare import PickRuns
from tui.screens.runs import RunsScreen

NAMES = {":": "colon", "/": "slash", " ": "space", "\r": "enter", "\x1b": "escape", ">": "greater_than_sign"}


def burst(pilot: Pilot[None], keys: str) -> None:
    driver = pilot.app._driver
    assert driver is not None
    for key in keys:
        event = events.Key(NAMES.get(key, key), key if key.isprintable() else None)
        event.set_sender(pilot.app)
        driver.send_message(event)


def typed(app: PrlApp) -> str:
    return next((line.value for line in app.screen.query(Input) if line.has_focus), "")


async def test_a_line_that_a_key_opens_gets_all_that_is_typed_after_it(tmp_path: Path) -> None:
    app = PrlApp(tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: has_looked(app), "a look")
        burst(pilot, "/step>3 lost")
        await until(pilot, lambda: typed(app) == "step>3 lost", "the filter")
        assert isinstance(app.screen, RunsScreen), "no key of it opened another screen"
        burst(pilot, "\x1b:sort rew")
        await until(pilot, lambda: typed(app) == "sort rew", "the command")
        assert isinstance(app.screen, CommandScreen)
        burst(pilot, "ard\r/lost\r:runs\r:quit\r")
        await until(pilot, lambda: not app.is_running, "all of it to be done, to the end")


@pytest.mark.slow
async def test_a_list_that_a_tab_asks_its_screen_for_gets_them_too(tmp_path: Path) -> None:
    """The way is longer: a message goes from the tab to the screen, which opens the list."""
    async with opened_run(build_workspace(tmp_path / "workspace").path, size=(200, 50)) as o:
        burst(o.pilot, "wsort")
        await o.until(lambda: typed(o.app) == "sort", "the list of runs")
        assert isinstance(o.app.screen, PickRuns)


@pytest.mark.slow
async def test_keys_whose_screen_is_gone_hold_up_no_others(tmp_path: Path) -> None:
    app = PrlApp(tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: has_looked(app), "a look")
        for _ in range(3):
            burst(pilot, ":\x1b?\x1b:\x1b")
        burst(pilot, ":theme")
        await until(pilot, lambda: typed(app) == "theme", "the command")
