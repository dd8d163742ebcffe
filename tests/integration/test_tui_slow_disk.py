"""Actions on a disk that takes its time: the thread that draws never waits for it."""

from __future__ import annotations

import builtins
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input, OptionList

from daemons import actions, up_and_down
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.text import CleanText
from tests.budgets import in_full
from tests.integration.test_tui_actions import opened, outcome, select
from tests.patience import PATIENCE_S
from tests.tui_support import build_workspace, orch_toml, settled, until
from tui.actions import read_draft
from tui.dialogs.add import AddDialog, TomlArea
from tui.dialogs.form import ChooseDialog
from tui.screens.runs import RunsScreen
from tui.widgets.runs_table import RunsTable

DISK_CALLS = ("stat", "lstat", "open", "scandir", "listdir", "readlink", "mkdir", "rename")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutputDir:
    (tmp_path / "configs" / "demo").mkdir(parents=True)
    (tmp_path / "configs" / "demo" / "fresh.toml").write_text(orch_toml())
    monkeypatch.chdir(tmp_path)
    return build_workspace(tmp_path / "workspace", living=False)


def watch_this_thread(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """What this thread asks of the disk below `folder` from now on."""
    here, asked = threading.get_ident(), []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here and isinstance(path, str | os.PathLike):
                place = os.path.abspath(os.fspath(path))
                if place.startswith(str(folder)):
                    asked.append(f"{name} {place}")
            return real(path, *args, **kwargs)

        return call

    for name in DISK_CALLS:
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    monkeypatch.setattr(builtins, "open", watched("open", open))
    monkeypatch.setattr("io.open", builtins.open)
    return asked


async def test_no_action_asks_the_disk_in_the_thread_that_draws(
    workspace: OutputDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_queued-b")
        asked = watch_this_thread(monkeypatch, tmp_path)
        for key in ("e", *"slow", "enter"):
            await pilot.press(key)
        await outcome(app, pilot)
        await until(pilot, lambda: isinstance(app.screen, RunsScreen), "home")
        for action, *keys in (("readmit", "r"), ("delete", "d", "enter"), ("undo_delete", "u")):
            # What the picture does not show yet cannot be readmitted: the key is grey until then.
            await until(pilot, lambda a=action: app.screen.check_action(a, ()) is True, f"{action} to be offered")  # type: ignore[misc]
            before = len(app.entries())
            for key in keys:
                await pilot.press(key)
            await until(pilot, lambda n=before: len(app.entries()) > n, f"what {keys} does")  # type: ignore[misc]
            await outcome(app, pilot)
            await until(pilot, lambda: isinstance(app.screen, RunsScreen), "home")
        await pilot.press("c")
        await until(pilot, lambda: isinstance(app.screen, AddDialog), "the dialog")
        await until(pilot, lambda: bool(app.screen.query_one(TomlArea).text), "the text of the clone")
        dialog = app.screen
        assert isinstance(dialog, AddDialog)
        await until(pilot, lambda: dialog._check is not None and dialog._check.ok, "the verdict")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(app.screen, RunsScreen), "home")
        assert (await outcome(app, pilot)).command.startswith("prl runs add ")
        await pilot.press("U")
        await until(pilot, lambda: isinstance(app.screen, ChooseDialog), "the ways to start")
        assert app.screen.query_one(OptionList).option_count >= 1
        await pilot.press("escape", "D", "escape")
    assert asked == []


@pytest.mark.parametrize(
    ("key", "owner", "name"),
    [("U", up_and_down, "last_start"), *in_full(("u", actions, "list_trash"), ("c", OutputDir, "run"))],
)
async def test_a_key_is_answered_while_an_action_waits_for_the_disk(
    workspace: OutputDir, monkeypatch: pytest.MonkeyPatch, key: str, owner: Any, name: str
) -> None:
    here, real = threading.get_ident(), getattr(owner, name)
    is_asked, is_free = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        is_asked.set()
        # In the thread that draws nothing could set it: the test would hang instead of failing.
        assert threading.get_ident() != here, "the thread that draws waits for the disk"
        assert is_free.wait(PATIENCE_S)
        return real(*args)

    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_queued-a")
        monkeypatch.setattr(owner, name, slow)
        try:
            await pilot.press(key)
            await until(pilot, is_asked.is_set, "the disk to be asked")
            table = app.screen.query_one(RunsTable)
            before = table.selected_id
            await pilot.press("j")
            await until(pilot, lambda: table.selected_id != before, "the cursor to move")
        finally:
            is_free.set()
            monkeypatch.undo()
        if key != "u":
            await until(pilot, lambda: bool(app.screen.query(OptionList)), "the dialog")
            await pilot.pause()


async def test_a_slow_file_does_not_replace_one_that_was_asked_for_later(
    workspace: OutputDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, is_free = threading.Event(), threading.Event()

    def slow(path: Path) -> CleanText:
        if path.name == "fresh.toml":
            is_asked.set()
            assert is_free.wait(PATIENCE_S)
        return read_draft(path)

    later = tmp_path / "later.toml"
    later.write_text(orch_toml(max_steps=7))
    monkeypatch.setattr("tui.dialogs.add.read_draft", slow)
    async with opened(workspace.path, "a") as (app, pilot):
        options = app.screen.query_one(OptionList)
        await until(pilot, lambda: options.option_count > 0, "the templates")
        try:
            await pilot.press("enter")
            await until(pilot, is_asked.is_set, "the slow file to be read")
            path, area = app.screen.query_one("#path", Input), app.screen.query_one(TomlArea)
            path.focus()
            path.value = str(later)
            await pilot.press("enter")
            await until(pilot, lambda: area.text == later.read_text(), "the later file")
        finally:
            is_free.set()
        await settled(pilot)
        assert area.text == later.read_text()


async def test_the_console_can_be_left_while_an_action_waits_for_the_disk(
    workspace: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread does when the disk answers at last finds no console, and no error either."""
    looks: list[Callable[[], None]] = []
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_queued-a")
        monkeypatch.setattr(app, "run_worker", lambda look, **options: looks.append(look))
        await pilot.press("u")
        await until(pilot, lambda: bool(looks), "the disk to be asked")
        monkeypatch.undo()
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(looks[0]).exception() is None
