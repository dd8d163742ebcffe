"""The keys at the foot of a screen, in terminals of many widths."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.app import App
from textual.screen import ModalScreen

from tests.tui_run_support import opened_run
from tests.tui_support import build_workspace, opened_app, screen_text, settled, until
from tui.widgets.header import KeyFooter


def foot(app: App[None]) -> str:
    return screen_text(app).splitlines()[-1].rstrip()


@pytest.mark.slow
async def test_no_key_at_the_foot_is_cut(tmp_path: Path) -> None:
    async with opened_run(build_workspace(tmp_path).path) as o:
        for width, last in [(80, "w Compare"), (140, "d Delete"), (44, "m Maximise"), (43, "← → Step"), (32, "? Help")]:
            await o.pilot.resize_terminal(width, 24)
            await o.until(lambda last=last: foot(o.app).endswith(last), f"{last} as the last of {width} columns")
        await o.pilot.resize_terminal(80, 24)
        await o.press("5")
        await o.until(lambda: foot(o.app).endswith("d Delete"), "the keys of another tab")


async def test_nor_under_a_dialog(tmp_path: Path) -> None:
    async with opened_app(build_workspace(tmp_path), size=(80, 24)) as (app, pilot):
        await until(pilot, lambda: foot(app).endswith("q Quit"), "the keys")
        keys = list(app.screen.query_one(KeyFooter).children)
        app.screen.refresh_bindings()
        await settled(pilot)
        assert list(app.screen.query_one(KeyFooter).children) == keys, "what is the same is not made again"
        await pilot.press("e")
        await until(pilot, lambda: isinstance(app.screen, ModalScreen), "the dialog")
        await settled(pilot)
        assert foot(app).endswith("q Quit")


async def test_a_key_that_means_the_same_twice_stands_there_once(tmp_path: Path) -> None:
    """In Chat, outside of the line: `esc` of the view, and `q` of the screen that is called so too."""
    async with opened_run(build_workspace(tmp_path).path, size=(200, 50)) as o:
        await o.press("7")
        await o.until(lambda: "New chat" in foot(o.app), "the keys of the chat")
        await o.press("escape")
        await o.until(lambda: "? Help" in foot(o.app), "the keys outside of its line")
        assert foot(o.app).count("esc Back") == 1
