"""Terminals that lack characters: all that is drawn has a plainer one of the same width, and kinds stay apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color

import tui
from tests.tui_pilot import PatientPilot
from tests.tui_support import build_workspace, frozen_clock, has_looked, roomy_disk, screen_text, settled, until
from tui.app import PrlApp
from tui.fmt import PlainGlyphs, plain_glyphs, sparkline
from tui.model.levels import LEVEL_SYMBOLS, STATES
from tui.model.nodes import HEALTH
from tui.screens.nodes import CELLS

BLACK = Color.parse("black")


def plain(text: str, *, ascii_only: bool) -> str:
    (segment,) = PlainGlyphs(ascii_only=ascii_only).apply([Segment(text)], BLACK)
    return segment.text


def test_every_character_of_ours_has_a_plainer_one_of_its_width() -> None:
    sources = "".join(path.read_text() for path in Path(tui.__file__).parent.rglob("*.py") if path.stem != "glyphs")
    used = {char for char in sources if not char.isascii()} | {chr(code) for code in range(0x2800, 0x2900)}
    for char in used:
        for ascii_only in (False, True):
            assert cell_len(plain(char, ascii_only=ascii_only)) == cell_len(char)
        assert plain(char, ascii_only=True).isascii() and plain(char, ascii_only=True) != "?"
        console = plain(char, ascii_only=False)
        assert console in "←→↑↓¶" or console.encode("cp437"), char
    assert plain("漢é", ascii_only=True) == "???" and plain("漢é", ascii_only=False) == "漢é"


STATE_SYMBOLS, HEALTH_SYMBOLS = [symbol for symbol, _ in STATES.values()], [symbol for symbol, _ in HEALTH.values()]


@pytest.mark.parametrize(
    "kinds",
    [STATE_SYMBOLS, HEALTH_SYMBOLS, [*LEVEL_SYMBOLS.values()], [*CELLS.values()], ["━", "─"], ["▮", "▯"]],
)
def test_what_differs_in_shape_still_does(kinds: list[str]) -> None:
    assert len({plain(each, ascii_only=True) for each in kinds}) == len(set(kinds))


def test_curves_still_rise() -> None:
    rising = sparkline([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 8)
    assert len(set(plain(rising, ascii_only=True))) >= 6
    assert plain("⠀⠁⡀⡇⣿", ascii_only=False) == " '.:#"


@pytest.mark.parametrize(
    ("term", "encoding", "is_plain"),
    [("xterm-256color", "utf-8", False), ("linux", "UTF-8", True), ("xterm", "iso-8859-1", True), ("", "utf_8", False)],
)
def test_who_gets_them(term: str, encoding: str, is_plain: bool) -> None:
    assert (plain_glyphs(term, encoding) is not None) is is_plain


async def test_nothing_but_ascii_is_drawn_where_there_is_nothing_else(tmp_path: Path) -> None:
    workspace = build_workspace(tmp_path / "workspace")
    app = PrlApp(workspace.path, clock=frozen_clock, read_disk=roomy_disk, glyphs=PlainGlyphs(ascii_only=True))
    app.animation_level = "none"
    async with app.run_test(size=(160, 50)):
        pilot = PatientPilot(app)
        await until(pilot, lambda: has_looked(app), "a look")
        for keys in ("1", "2", "5"):
            await pilot.press(keys)
            await settled(pilot)
            assert screen_text(app).isascii() and "run_" in screen_text(app)
