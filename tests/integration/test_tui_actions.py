"""Every action of the TUI, done with keys in a real app, and looked up on disk."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Button, Input, OptionList, Static

from daemons import actions
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.utils.text import one_line
from tests.patience import PATIENCE_S
from tests.tui_support import add_run, build_workspace, cell_text, opened_app, orch_toml, screen_text, until
from tui.actions import Job
from tui.app import PrlApp
from tui.dialogs.add import AddDialog, TomlArea
from tui.dialogs.delete import ALWAYS, DeleteDialog, EvictDialog
from tui.messages import ActionChanged, ActionEntry, ActionState
from tui.screens.acting import ActsOnRuns
from tui.screens.runs import RunsScreen
from tui.widgets.header import CommandLine
from tui.widgets.runs_table import RunsTable


@pytest.fixture
def workspace(tmp_path: Path) -> OutputDir:
    return build_workspace(tmp_path / "workspace")


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with one template of a run and one other TOML file."""
    work = tmp_path / "work"
    (work / "configs" / "demo").mkdir(parents=True)
    (work / "configs" / "demo" / "fresh.toml").write_text(orch_toml())
    (work / "configs" / "demo" / "system.toml").write_text("max_concurrent_runs = 4\n")
    monkeypatch.chdir(work)
    return work / "configs"


# With the real clock, as the actions have it: the daemons of the fixture count as gone, so nothing holds a run.
opened = partial(opened_app, clock=time.time)


def entry_of(app: PrlApp) -> ActionEntry | None:
    return app.screen_stack[1].query_one(CommandLine).entry


async def outcome(app: PrlApp, pilot: Pilot[None], state: str = "done", *, of: str = "prl") -> ActionEntry:
    """The action whose command has the words `of`, which tell it from the one before."""

    def there() -> bool:
        entry = entry_of(app)
        return entry is not None and entry.state == state and of in entry.command

    await until(pilot, there, f"an action that is {state} (now {entry_of(app)})")
    entry = entry_of(app)
    assert entry is not None
    return entry


async def select(app: PrlApp, pilot: Pilot[None], run_id: str) -> None:
    table = app.screen.query_one(RunsTable)
    app.call_next(lambda: table.move_cursor(row=table.run_ids.index(run_id)))
    await until(pilot, lambda: table.selected_id == run_id, f"the cursor on {run_id}")
    await pilot.pause()


def audit(workspace: OutputDir) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in workspace.audit.read_text().splitlines()]
    return [(line["action"], line["run_id"]) for line in lines][3:]


async def test_evict_needs_a_reason_and_writes_it(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_queued-a")
        await pilot.press("e")
        assert isinstance(app.screen, EvictDialog)
        await pilot.press("enter")
        assert "reason missing" in str(app.screen.query_one("#outcome", Static).render())
        assert not RunDir(workspace.path / "run_queued-a").evicted.exists()
        await pilot.press(*"too slow", "enter")
        entry = await outcome(app, pilot)
        assert RunDir(workspace.path / "run_queued-a").evicted.read_text() == "too slow"
        assert entry.command.startswith("prl runs evict run_queued-a --reason 'too slow'")
        await until(pilot, lambda: isinstance(app.screen, RunsScreen), "home")
        table = app.screen.query_one(RunsTable)
        await until(pilot, lambda: "evicted" in cell_text(table, "run_queued-a", "state"), "the new state")
    assert audit(workspace) == [("evict", "run_queued-a")]


@pytest.mark.slow
async def test_evict_with_a_suggestion_and_cancel(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_queued-a")
        await pilot.press("e", "escape")
        assert isinstance(app.screen, RunsScreen) and entry_of(app) is None
        await pilot.press("e", "tab", "down", "enter")
        await outcome(app, pilot)
    assert RunDir(workspace.path / "run_queued-a").evicted.read_text() == ALWAYS[1]


async def test_readmit_an_evicted_and_a_failed_run_and_no_other(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_done")
        assert not app.screen.active_bindings["r"].enabled
        await pilot.press("r")
        await select(app, pilot, "run_collapsed")
        assert app.screen.active_bindings["r"].enabled
        assert not app.screen.active_bindings["e"].enabled
        assert entry_of(app) is None
        await pilot.press("r")
        assert (await outcome(app, pilot)).text == "run_collapsed: readmitted"
        assert not RunDir(workspace.path / "run_collapsed").evicted.exists()
        await select(app, pilot, "run_crashed")
        await pilot.press("r")
        await until(pilot, lambda: "run_crashed" in getattr(entry_of(app), "text", ""), "the second readmission")
        word = read_status(RunDir(workspace.path / "run_crashed").status, RunStatus)
        assert word is None or word.state != "failed"


async def test_delete_says_what_goes_and_undo_brings_it_back(workspace: OutputDir) -> None:
    # The fixture's statuses name this very process, which would hold the run.
    RunDir(workspace.path / "run_done").status.unlink()
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_done")
        await pilot.press("u")
        words = "nothing to restore"
        await until(pilot, lambda: any(words in notice.message for notice in app._notifications), words)
        await pilot.press("d")
        dialog = app.screen
        assert isinstance(dialog, DeleteDialog)
        facts = dialog.query_one("#facts", Static)
        await until(pilot, lambda: "KiB on disk" in str(facts.render()), "the size")
        assert "60 steps" in str(facts.render())
        await pilot.press("enter")
        entry = await outcome(app, pilot)
        assert not (workspace.path / "run_done").exists()
        assert entry.command.startswith("prl runs delete run_done")
        table = app.screen_stack[1].query_one(RunsTable)
        await until(pilot, lambda: "run_done" not in table.run_ids, "the row to go")
        await pilot.press("u")
        await until(pilot, lambda: (workspace.path / "run_done").exists(), "the run to come back")
        await outcome(app, pilot, of="undelete run_done")
    assert audit(workspace) == [("delete", "run_done"), ("undelete", "run_done")]


async def test_a_live_run_is_deleted_only_with_its_name_and_the_wait_is_shown(workspace: OutputDir) -> None:
    holder = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        run = add_run(workspace, "run_live", step=3)
        hold(run, holder.pid)
        async with opened(workspace.path) as (app, pilot):
            row = acting(app).snapshot.row("run_live")
            dialog = DeleteDialog(workspace.path, [replace(row, state="active")], lambda ids: None, acting(app).perform)
            app.call_next(app.push_screen, dialog)
            await until(pilot, lambda: app.screen is dialog and dialog.query("#name"), "the dialog")
            await pilot.press(*"run_liv", "enter")
            assert dialog.query_one("#delete", Button).disabled and run.path.exists()
            await pilot.press("e", "enter")
            words = dialog.query_one("#outcome", Static)
            await until(pilot, lambda: "waiting for its orchestrator" in str(words.render()), "what it waits for")
            assert run.evicted.exists(), "it is evicted first"
            await pilot.press("x")  # the screen still answers
            assert holder.stdin is not None
            holder.stdin.close()
            await asyncio.to_thread(holder.wait)
            assert (await outcome(app, pilot)).text.startswith("run_live: moved to")
            assert not run.path.exists()
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.slow
async def test_a_run_that_only_claims_to_live_can_be_deleted_at_the_second_try(
    workspace: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "delete_run", partial(actions.delete_run, wait_s=0.3))
    run = add_run(workspace, "run_live", step=3)
    hold(run, os.getpid())
    async with opened(workspace.path) as (app, pilot):
        row = acting(app).snapshot.row("run_live")
        dialog = DeleteDialog(workspace.path, [replace(row, state="active")], lambda ids: None, acting(app).perform)
        app.call_next(app.push_screen, dialog)
        await until(pilot, lambda: app.screen is dialog and dialog.query("#name"), "the dialog")
        await pilot.press(*"run_live", "enter")
        warning = dialog.query_one(".label", Static)
        await until(pilot, lambda: "only its own status file" in str(warning.render()), "what it can do now")
        assert run.path.exists()
        await pilot.press("enter")
        entry = await outcome(app, pilot)
        assert " --yes --force " in entry.command and not run.path.exists()


def hold(run: RunDir, pid: int) -> None:
    """Make process `pid` look like the run's orchestrator."""
    from prime_rl.utils.process import ProcessId

    status = {"run_id": run.run_id, "pid": pid, "pid_create_time": ProcessId.of(pid).create_time, "state": "running"}
    run.status.write_text(json.dumps(status))


def acting(app: PrlApp) -> ActsOnRuns:
    screen = app.screen_stack[1]
    assert isinstance(screen, ActsOnRuns)
    return screen


async def test_a_failed_action_is_readable_and_can_be_tried_again(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_queued-b")
        await pilot.press("e", *"why")
        dialog = app.screen
        control = RunDir(workspace.path / "run_queued-b").control
        control.rename(control.with_name("control.away"))
        control.write_text("in the way")
        await pilot.press("enter")
        entry = await outcome(app, pilot, "failed")
        assert app.screen is dialog, "the dialog stays, so that nothing typed is lost"
        assert entry.text in str(dialog.query_one("#outcome", Static).render())
        control.unlink()
        control.with_name("control.away").rename(control)
        await pilot.press("enter")
        await outcome(app, pilot)
        assert RunDir(workspace.path / "run_queued-b").evicted.read_text() == "why"


async def test_an_action_never_blocks_the_screen(workspace: OutputDir) -> None:
    release = threading.Event()

    def work(progress: Callable[[str], None]) -> str:
        progress("half way")
        release.wait(PATIENCE_S)
        return "all done"

    async with opened(workspace.path) as (app, pilot):
        app.call_next(acting(app).perform, Job("prl slow", work))
        await until(pilot, lambda: getattr(entry_of(app), "text", "") == "half way", "the progress")
        await pilot.press("j", "j")
        assert app.screen.query_one(RunsTable).cursor == 2
        release.set()
        assert (await outcome(app, pilot)).text == "all done"


async def add_dialog(app: PrlApp, pilot: Pilot[None]) -> AddDialog:
    await pilot.press("a")
    dialog = app.screen
    assert isinstance(dialog, AddDialog)
    await until(pilot, lambda: dialog.query_one("#templates", OptionList).option_count > 0, "the templates")
    return dialog


def verdict(dialog: AddDialog) -> str:
    return str(dialog.query_one("#check", Static).render())


@pytest.mark.slow
async def test_add_an_unchanged_template(workspace: OutputDir, configs: Path) -> None:
    async with opened(workspace.path) as (app, pilot):
        dialog = await add_dialog(app, pilot)
        assert [template.label for template in dialog._templates][:2] == ["demo/fresh.toml", "run_collapsed"]
        await pilot.press("enter")
        await until(pilot, lambda: verdict(dialog).startswith("✔ valid"), "the verdict")
        await pilot.press("ctrl+s")
        entry = await outcome(app, pilot)
        assert entry.text == "run_fresh: added"
        assert entry.command.startswith("prl runs add configs/demo/fresh.toml")
    assert RunDir(workspace.path / "run_fresh").orch_toml.read_text() == orch_toml()
    assert audit(workspace) == [("add", "run_fresh")]


async def test_add_checks_as_you_type_and_takes_the_edited_text(workspace: OutputDir, configs: Path) -> None:
    async with opened(workspace.path) as (app, pilot):
        dialog = await add_dialog(app, pilot)
        await pilot.press("enter")
        await until(pilot, lambda: verdict(dialog).startswith("✔ valid"), "the verdict")
        area = dialog.query_one(TomlArea)
        await until(pilot, lambda: area.has_focus, "the editor")
        await pilot.press(*"nonsense = 1", "enter")
        await until(pilot, lambda: "nonsense: unknown key" in verdict(dialog), "the problem")
        assert dialog.query_one("#start", Button).disabled
        await pilot.press("ctrl+s")
        assert not (workspace.path / "run_mine").exists()
        await pilot.press("up", *"#")
        await until(pilot, lambda: verdict(dialog).startswith("✔ valid"), "the mended text")
        dialog.query_one("#run-id", Input).focus()
        await pilot.press(*"mine")
        await until(pilot, lambda: "invalid run id 'mine'" in verdict(dialog), "the bad id")
        await pilot.press("home", *"run_")
        await until(pilot, lambda: verdict(dialog).startswith("✔ valid"), "the good id")
        await pilot.press("ctrl+s")
        assert (await outcome(app, pilot)).text == "run_mine: added"
    assert RunDir(workspace.path / "run_mine").orch_toml.read_text().startswith("#nonsense = 1\n")


async def test_what_validate_warns_of_is_told_whole_before_a_run_is_added(workspace: OutputDir, configs: Path) -> None:
    text = orch_toml(lr=0.05).replace("batch_size = 64", "batch_size = 8")
    (configs / "demo" / "fresh.toml").write_text(text)
    async with opened(workspace.path, size=(80, 24)) as (app, pilot):
        await add_dialog(app, pilot)
        await pilot.press("enter")
        for words in ("✔ valid", "▲ line 17: optim.lr", "1e-5 to 1e-3 is usual", "batch_size: found 8"):
            await until(pilot, lambda words=words: words in screen_text(app), words)


async def test_the_line_of_an_action_gives_way(workspace: OutputDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the next screen at once, else after a while; not while it runs."""
    words = one_line("done")
    async with opened(workspace.path) as (app, pilot):

        def report(state: ActionState) -> None:
            app.post_message(ActionChanged(ActionEntry(1, words, state, words, words)))

        report("running")
        await until(pilot, lambda: entry_of(app) is not None, "the line")
        report("done")
        await pilot.press("3")
        line = app.screen.query_one(CommandLine)
        await until(pilot, lambda: line.is_mounted, "the next screen")
        assert line.entry is None or line.entry.state == "running"
        monkeypatch.setattr(CommandLine, "SHOWN_S", 0.01)
        report("done")
        await until(pilot, lambda: line.entry is None and not line.has_class("-used"), "the end of the line")


@pytest.mark.slow
async def test_a_start_that_is_refused_tells_why(
    workspace: OutputDir, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(workspace.path) as (app, pilot):
        dialog = await add_dialog(app, pilot)

        async def refused(words: str) -> None:
            await pilot.press("ctrl+s")
            assert str(dialog.query_one("#outcome", Static).render()).startswith(f"not started: {words}")

        await refused("no config yet")
        area = dialog.query_one(TomlArea)
        app.call_next(area.load_text, orch_toml(extra="nonsense = 1"))
        await until(pilot, lambda: "nonsense: unknown key" in verdict(dialog), "the problem")
        await refused("fix the problems first")
        monkeypatch.setattr("tui.dialogs.form.DEBOUNCE_S", PATIENCE_S)
        app.call_next(area.load_text, orch_toml())
        await until(pilot, lambda: dialog._check is None, "the change")
        await refused("the config is still being checked")


@pytest.mark.slow
async def test_add_says_when_the_text_is_no_toml_or_the_trainer_cannot_hold_it(
    workspace: OutputDir, configs: Path
) -> None:
    workspace.component_config("trainer").parent.mkdir(parents=True)
    workspace.component_config("trainer").write_text('[model]\nname = "models/base"\n[model.lora]\nrank = 4\n')
    async with opened(workspace.path) as (app, pilot):
        dialog = await add_dialog(app, pilot)
        await pilot.press("enter")
        await until(pilot, lambda: "must be at most the trainer's 4" in verdict(dialog), "the trainer's limit")
        app.call_next(dialog.query_one(TomlArea).load_text, "a = [1\nb")
        await until(pilot, lambda: "line 2" in verdict(dialog), "the line of the error")


@pytest.mark.slow
async def test_add_from_a_typed_path(workspace: OutputDir, configs: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere.toml"
    other.write_text(orch_toml(max_steps=7))
    async with opened(workspace.path) as (app, pilot):
        dialog = await add_dialog(app, pilot)
        path = dialog.query_one("#path", Input)
        path.focus()
        path.value = str(tmp_path / "none.toml")
        await pilot.press("enter")
        await until(pilot, lambda: "not found" in str(dialog.query_one("#outcome").render()), "what is wrong")
        path.value = "~nouser/x.toml"
        await pilot.press("enter")
        words = "home folder of ~nouser not found: give the full path"
        await until(pilot, lambda: words in str(dialog.query_one("#outcome").render()), words)
        path.value = str(other)
        await pilot.press("enter")
        await until(pilot, lambda: "7 steps" in verdict(dialog), "the other file")
        await pilot.press("ctrl+s")
        assert (await outcome(app, pilot)).text == "run_elsewhere: added"


@pytest.mark.slow
async def test_the_first_run_of_an_empty_workspace(tmp_path: Path, configs: Path) -> None:
    (tmp_path / "new").mkdir()
    async with opened(tmp_path / "new") as (app, pilot):
        await add_dialog(app, pilot)
        await pilot.press("escape", "x", "y")
        assert not isinstance(app.screen.focused, Input), "no hidden field takes the keys"
        dialog = await add_dialog(app, pilot)
        await pilot.press("enter")
        await until(pilot, lambda: verdict(dialog).startswith("✔ valid"), "the verdict")
        await pilot.press("ctrl+s")
        await outcome(app, pilot)
        await until(pilot, lambda: app.screen.focused is app.screen.query_one(RunsTable), "the table")
        await until(pilot, lambda: app.screen.query_one(RunsTable).selected_id == "run_fresh", "the new run's row")


@pytest.mark.slow
async def test_an_id_that_is_taken_is_a_problem(workspace: OutputDir, configs: Path) -> None:
    async with opened(workspace.path) as (app, pilot):
        dialog = await add_dialog(app, pilot)
        await pilot.press("enter")
        dialog.query_one("#run-id", Input).value = "run_done"
        await until(pilot, lambda: "run_done already exists" in verdict(dialog), "the taken id")
        await pilot.press("escape")
        assert isinstance(app.screen, RunsScreen)


@pytest.mark.slow
async def test_acting_on_the_open_run(workspace: OutputDir) -> None:
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_queued-a")
        await pilot.press("enter", "e", *"no need", "enter")
        await until(pilot, RunDir(workspace.path / "run_queued-a").evicted.exists, "the eviction")
        await until(pilot, lambda: any(line.entry for line in app.screen.query(CommandLine)), "its command")
