"""Pictures of the screens, with frozen clocks. `--snapshot-update` takes new ones; look at them before committing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from prime_rl.utils.text import one_line
from tests.budgets import in_full
from tests.tui_pilot import PatientPilot
from tests.tui_support import (
    build_workspace,
    frozen_clock,
    has_looked,
    roomy_disk,
    screen_text,
    settled,
    until,
)
from tui.app import PrlApp
from tui.readers.machine import Finding

SMALL, LARGE = (80, 24), (200, 50)
# Each theme in the small terminal: what a large one shows more of has the colours of the rest.
LOOKS = pytest.mark.parametrize(
    ("size", "theme"),
    [(SMALL, "prl-dark"), *in_full((SMALL, "prl-light"), (LARGE, "prl-dark"))],
    ids=["80x24-prl-dark", "80x24-prl-light", "200x50-prl-dark"],
)
Compare = Callable[..., bool]
Steps = Callable[[Pilot[None]], Awaitable[None]]


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrlApp:
    """Over a workspace whose pictures hold no path, pid or time of this machine."""
    monkeypatch.setenv("TZ", "UTC")
    build_workspace(tmp_path / "lab")
    app = PrlApp(tmp_path / "lab", clock=frozen_clock, read_disk=roomy_disk)
    app.animation_level = "none"
    return app


def looked(*keys: str) -> Steps:
    """Wait for the first look, press `keys`, wait until what they open has read its files."""

    async def run(pilot: Pilot[None]) -> None:
        app, pilot = pilot.app, PatientPilot(pilot.app)
        await until(pilot, lambda: has_looked(app), "a look")
        await pilot.pause()
        for key in keys:
            await pilot.press(key)
        for field in app.screen.query(Input):
            field.cursor_blink = False  # seen or not, by the moment
        app.clear_notifications()  # as well
        await settled(pilot)

    return run


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "200x50"])
def test_home(snap_compare: Compare, app: PrlApp, size: tuple[int, int]) -> None:
    assert snap_compare(app, terminal_size=size, run_before=looked())


@pytest.mark.parametrize(
    "keys",
    [("question_mark",), ("space", "space", "e"), *in_full((("e",),))],
    ids=["help", "evict-two", "evict"],
)
def test_small_screen(snap_compare: Compare, app: PrlApp, keys: tuple[str, ...]) -> None:
    assert snap_compare(app, terminal_size=SMALL, run_before=looked(*keys))


@pytest.mark.parametrize("size", [SMALL, *in_full((LARGE,))], ids=["80x24", "200x50"])
def test_home_in_the_light_theme(snap_compare: Compare, app: PrlApp, size: tuple[int, int]) -> None:
    async def steps(pilot: Pilot[None]) -> None:
        await looked()(pilot)
        pilot.app.theme = "prl-light"
        await settled(pilot)

    assert snap_compare(app, terminal_size=size, run_before=steps)


@pytest.mark.slow
def test_marks_pins_an_order_and_a_filter_with_a_mistake(snap_compare: Compare, app: PrlApp) -> None:
    pressed = ("s", "s", "s", "s", "space", "space", "p", "slash", *"step>0 lag>x", "enter")
    assert snap_compare(app, terminal_size=(120, 32), run_before=looked(*pressed))


@pytest.mark.parametrize("theme", ["prl-dark-16", *in_full("prl-dark-256", "prl-light-16")])
def test_few_colours(snap_compare: Compare, app: PrlApp, theme: str) -> None:
    async def steps(pilot: Pilot[None]) -> None:
        await looked("space")(pilot)
        pilot.app.theme = theme
        await settled(pilot)

    assert snap_compare(app, terminal_size=SMALL, run_before=steps)


def test_read_only_home(snap_compare: Compare, tmp_path: Path) -> None:
    build_workspace(tmp_path / "lab")
    app = PrlApp(tmp_path / "lab", clock=frozen_clock, read_only=True, read_disk=roomy_disk)
    app.animation_level = "none"
    assert snap_compare(app, terminal_size=SMALL, run_before=looked())


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "200x50"])
def test_empty_home(snap_compare: Compare, tmp_path: Path, size: tuple[int, int]) -> None:
    """What to do first, and what `prl doctor` finds."""
    (tmp_path / "lab").mkdir()
    low = "disk: 2.1 GB free: remove files, or choose a workspace on another disk before checkpoints fail to be written"
    found = [Finding(one_line("port: 8000 is in use: stop what listens there"), True), Finding(one_line(low), False)]
    app = PrlApp(tmp_path / "lab", clock=frozen_clock, read_disk=roomy_disk, examine=lambda path: found)
    app.animation_level = "none"

    async def steps(pilot: Pilot[None]) -> None:
        await looked()(pilot)
        await until(pilot, lambda: "port: 8000" in screen_text(app), "the findings")
        await settled(pilot)

    assert snap_compare(app, terminal_size=size, run_before=steps)
