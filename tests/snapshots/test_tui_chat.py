"""Pictures of the tab Chat of a run, with a fixed conversation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from prime_rl.utils.text import clean_text, one_line
from tests.budgets import in_full
from tests.tui_run_support import RUN
from tests.tui_support import build_workspace, frozen_clock, has_looked, roomy_disk, settled, until
from tui.app import PrlApp
from tui.messages import ChatLook, ChatTurn
from tui.screens.acting_places import ActingRunScreen

SIZES = pytest.mark.parametrize("size", [(80, 24), *in_full(((200, 50),))], ids=["80x24", "200x50"])
VERSION = one_line(f"{RUN}@v42")
TURNS = (
    ChatTurn(None, clean_text("Reverse: banana")),
    ChatTurn(VERSION, clean_text("ananab")),
    ChatTurn(None, clean_text("And a sentence: the trainer trains, the orchestrators sample, and no slot is idle.")),
    ChatTurn(VERSION, clean_text("[bold]eldi si tols on dna\n,elpmas srotartsehcro eht")),
)
ANSWERING = ChatLook(one_line(RUN), "answering", VERSION, TURNS)
REFUSED = ChatLook(
    one_line(f"{RUN}@v40"),
    turns=TURNS[:2],
    problem=one_line("inference is not ready: it waits for the weights of the base model"),
)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrlApp:
    monkeypatch.setenv("TZ", "UTC")
    build_workspace(tmp_path / "lab")
    app = PrlApp(tmp_path / "lab", clock=frozen_clock, read_disk=roomy_disk)
    app.animation_level = "none"
    return app


def showing(look: ChatLook) -> Callable[[Pilot[None]], Awaitable[None]]:
    async def run(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, PrlApp)
        await until(pilot, lambda: has_looked(app), "a look")
        app.call_next(app.open_run, RUN)
        await until(pilot, lambda: isinstance(app.screen, ActingRunScreen) and app.screen.can_show, "the run")
        screen = app.screen
        assert isinstance(screen, ActingRunScreen)
        await pilot.press("7")
        await until(pilot, lambda: screen.chat.line.has_focus, "the tab Chat")
        screen.chat.line.cursor_blink = False
        screen.chat.show(look)
        await settled(pilot)

    return run


@SIZES
@pytest.mark.parametrize("look", [ANSWERING, *in_full(REFUSED)], ids=["answers", "refused"])
def test_chat(snap_compare: Callable[..., bool], app: PrlApp, size: tuple[int, int], look: ChatLook) -> None:
    assert snap_compare(app, terminal_size=size, run_before=showing(look))
