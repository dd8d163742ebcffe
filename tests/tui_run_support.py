"""An app with one run open, for the tests of the run screen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from textual.pilot import Pilot

from tests.tui_support import opened_app, sees, until
from tui.app import PrlApp
from tui.readers.tabs import TABS
from tui.screens.run import RunScreen

SIZE = (100, 30)
RUN = "run_reverse-lr1e-3"


@dataclass
class Opened:
    """The app, its pilot, and the run screen that is open."""

    app: PrlApp
    pilot: Pilot[None]
    screen: RunScreen

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        await until(self.pilot, condition, what)

    async def tab(self, name: str) -> None:
        """Open a tab and wait until it shows something."""
        await self.press(str(TABS.index(name) + 1))
        await self.until(lambda: self.screen.tab == name and name in self.screen.shown, f"the tab {name}")

    async def sees(self, *words: str) -> None:
        await sees(self.app, self.pilot, *words)


@asynccontextmanager
async def opened_run(
    path: Path, run_id: str = RUN, *, size: tuple[int, int] = SIZE, read_only: bool = False
) -> AsyncIterator[Opened]:
    async with opened_app(path, size=size, read_only=read_only) as (app, pilot):
        app.call_next(app.open_run, run_id)  # a screen must be made in the app's own context
        await until(pilot, lambda: isinstance(app.screen, RunScreen), "the run screen")
        screen = app.screen
        assert isinstance(screen, RunScreen)
        await until(pilot, lambda: "charts" in screen.shown, "the charts")
        await pilot.pause()
        yield Opened(app, pilot, screen)
