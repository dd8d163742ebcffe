"""`prl-tui --read-only` on a copied workspace whose daemons are down: every screen and tab, and not a byte changes."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from prime_rl.contract.layout import OutputDir
from tests.tui_pilot import PatientPilot
from tests.tui_places_support import FakeProbe, put_group
from tests.tui_support import NOW, Ticker, add_history, build_workspace, roomy_disk, screen_text, until
from tui.app import PrlApp
from tui.memory import Memory
from tui.readers.tabs import TABS
from tui.screens.run import RunScreen

RUN = "run_reverse-lr1e-3"


def tree(folder: Path) -> dict[str, tuple[object, ...]]:
    """Name -> all that a look may not change: kind, mode, time of change, content."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        info = path.lstat()
        data = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (info.st_mode, info.st_mtime_ns, info.st_size, data)
    return found


@pytest.fixture
def copied(tmp_path: Path) -> OutputDir:
    workspace = build_workspace(tmp_path / "workspace")
    add_history(workspace, RUN)
    put_group(workspace)
    shutil.copytree(workspace.path, tmp_path / "copy")
    return OutputDir(tmp_path / "copy")


@pytest.mark.slow
async def test_looking_at_everything_changes_no_byte(copied: OutputDir, tmp_path: Path) -> None:
    before = tree(copied.path)
    clock = Ticker()
    clock.now = NOW + 90_000
    app = PrlApp(
        copied.path,
        clock=clock,
        read_only=True,
        read_disk=roomy_disk,
        memory_path=tmp_path / "state" / "state.json",
        make_probe=lambda path: FakeProbe(),
    )
    app.animation_level = "none"
    async with app.run_test(size=(120, 40)):
        pilot = PatientPilot(app)

        async def sees(words: str) -> None:
            await until(pilot, lambda: words in screen_text(app), words)

        await sees("run_reverse-lr1e-3")
        assert "supervisor lost" in screen_text(app) and "● active" not in screen_text(app)
        await pilot.press("s", "S", "p", "space", "slash", *"run_", "enter", "escape")
        for key, words in (("3", "DAEMON"), ("4", "iteration 12"), ("5", "WHAT"), ("1", "STATE")):
            await pilot.press(key)
            await sees(words)
        app.open_run(RUN)
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and app.screen.can_show, "the run")
        screen = app.screen
        assert isinstance(screen, RunScreen)
        for number, name in enumerate(TABS, start=1):
            await pilot.press(str(number))
            await until(pilot, lambda name=name: name in screen.shown, name)
        # Keys that act where it may: here they do nothing.
        await pilot.press("5", "enter", *"aerducxzwBFWEUDL", "escape")
        app.go("runs")
        await pilot.press(*"aerducxzwBFWEUDLq")
        await until(pilot, lambda: not app.is_running, "the end")
    assert tree(copied.path) == before
    assert Memory(copied.path, tmp_path / "state" / "state.json").workspace.pins, "what it remembers lies elsewhere"
