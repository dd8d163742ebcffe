"""Acting on several runs at once, on parts and on the workspace; and the log of what was done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Button, Input, OptionList, Static

from prime_rl.contract.layout import OutputDir, RunDir
from tests.integration.test_tui_actions import configs, opened, outcome, select, verdict, workspace  # noqa: F401
from tests.tui_support import add_run, screen_text, until
from tui.actions import up_choices
from tui.app import PrlApp
from tui.dialogs.add import AddDialog, TomlArea
from tui.dialogs.delete import DeleteDialog, EvictDialog
from tui.dialogs.form import ChooseDialog, ConfirmDialog
from tui.screens.acting import ActionLogScreen
from tui.screens.base import CommandScreen
from tui.screens.runs import RunsScreen


def home(app: PrlApp) -> RunsScreen:
    screen = app.screen_stack[1]
    assert isinstance(screen, RunsScreen)
    return screen


async def mark(app: PrlApp, pilot: Pilot[None], *run_ids: str) -> None:
    for run_id in run_ids:
        await select(app, pilot, run_id)
        await pilot.press("space")
    assert home(app).table.marks == set(run_ids)


async def test_several_runs_are_evicted_and_readmitted_with_one_confirmation_each(workspace: OutputDir) -> None:  # noqa: F811
    chosen = ["run_queued-a", "run_queued-b"]
    async with opened(workspace.path) as (app, pilot):
        await mark(app, pilot, *chosen)
        await pilot.press("e")
        assert isinstance(app.screen, EvictDialog)
        await pilot.pause()
        assert all(run_id in screen_text(app) for run_id in chosen), "the confirmation lists them"
        await pilot.press(*"no room", "enter")
        entry = await outcome(app, pilot)
        assert entry.text == "2 runs evicted"
        assert entry.command.startswith("prl runs evict run_queued-a run_queued-b --reason 'no room'")
        assert [RunDir(workspace.path / run_id).evicted.read_text() for run_id in chosen] == ["no room"] * 2
        await until(pilot, lambda: {row.state for row in home(app).target_rows()} == {"evicted"}, "the new states")
        await pilot.press("r")
        assert isinstance(app.screen, ConfirmDialog)
        await pilot.press("enter")
        await until(
            pilot, lambda: not any(RunDir(workspace.path / each).evicted.exists() for each in chosen), "the return"
        )


async def test_one_of_several_that_fails_is_named_and_the_others_are_done(workspace: OutputDir) -> None:  # noqa: F811
    async with opened(workspace.path) as (app, pilot):
        await mark(app, pilot, "run_queued-a", "run_queued-b")
        control = RunDir(workspace.path / "run_queued-b").control
        await pilot.press("e", *"why")
        control.rename(control.with_name("away"))
        control.write_text("in the way")
        await pilot.press("enter")
        entry = await outcome(app, pilot, "failed")
        assert entry.text.startswith("1 of 2 failed: run_queued-b: ")
        assert RunDir(workspace.path / "run_queued-a").evicted.exists()


async def test_several_deletes_say_what_goes_and_one_undo_brings_all_back(workspace: OutputDir) -> None:  # noqa: F811
    for run_id in ("run_a1", "run_a2"):
        add_run(workspace, run_id, step=4)
    async with opened(workspace.path) as (app, pilot):
        await until(pilot, lambda: "run_a2" in home(app).table.run_ids, "the runs")
        await mark(app, pilot, "run_a1", "run_a2")
        await pilot.press("d")
        dialog = app.screen
        assert isinstance(dialog, DeleteDialog)
        await until(pilot, lambda: screen_text(app).count("KiB") == 3, "the size of each and of all")
        await pilot.press("enter")
        entry = await outcome(app, pilot)
        assert entry.command.startswith("prl runs delete run_a1 run_a2 --yes")
        assert not (workspace.path / "run_a1").exists() and not (workspace.path / "run_a2").exists()
        await until(pilot, lambda: home(app).table.marks == set(), "the marks to go with their runs")
        await pilot.press("u")
        await until(
            pilot, lambda: (workspace.path / "run_a1").exists() and (workspace.path / "run_a2").exists(), "both"
        )


@pytest.mark.slow
async def test_several_with_a_live_one_need_words(workspace: OutputDir) -> None:  # noqa: F811
    add_run(workspace, "run_a1")
    async with opened(workspace.path) as (app, pilot):
        await until(pilot, lambda: "run_a1" in home(app).table.run_ids, "the run")
        await mark(app, pilot, "run_a1", "run_crashed")
        # The fixture's statuses name this very process, so run_crashed turns out to be in use.
        await pilot.press("d", "enter")
        dialog = app.screen
        assert isinstance(dialog, DeleteDialog)
        await outcome(app, pilot, "failed")
        await until(pilot, lambda: dialog.query_one("#name", Input).has_focus, "the question")
        await pilot.press(*"delete 1", "enter")
        assert dialog.query_one("#delete", Button).disabled
        assert "type delete 2" in str(dialog.query_one("#outcome", Static).render())


@pytest.mark.slow
async def test_clone_begins_with_the_runs_text_and_a_free_name(workspace: OutputDir, configs: Path) -> None:  # noqa: F811
    add_run(workspace, "run_done-2")
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_done")
        await pilot.press("c")
        await until(pilot, lambda: isinstance(app.screen, AddDialog), "the dialog")
        dialog = app.screen
        assert isinstance(dialog, AddDialog)
        await until(pilot, lambda: verdict(dialog).startswith("✔ valid"), "the verdict")
        assert dialog.query_one("#run-id", Input).value == "run_done-3"
        await pilot.press("ctrl+s")
        await outcome(app, pilot)
    text = RunDir(workspace.path / "run_done").orch_toml.read_text()
    assert RunDir(workspace.path / "run_done-3").orch_toml.read_text() == text


@pytest.mark.slow
async def test_what_is_wrong_stands_at_its_line(workspace: OutputDir, configs: Path) -> None:  # noqa: F811
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_done")
        await pilot.press("c")
        await until(pilot, lambda: isinstance(app.screen, AddDialog), "the dialog")
        dialog = app.screen
        assert isinstance(dialog, AddDialog)
        area = dialog.query_one(TomlArea)
        await until(pilot, lambda: area.text != "", "the text")
        text = area.text.replace("lr = 0.001", 'lr = "fast"').replace("seed = 7", "seeds = 7")
        app.call_next(area.load_text, text)
        await until(pilot, lambda: len(area._problems) == 2, "both problems")
        lines = text.splitlines()
        assert {lines[number - 1] for number in area._problems} == {'lr = "fast"', "seeds = 7"}
        first = min(area._problems)
        await pilot.pause()
        shown = next(line for line in screen_text(app).splitlines() if lines[first - 1] in line)
        assert "◀" in shown and "✖" in shown


@pytest.mark.slow
async def test_the_log_of_actions_tells_all_and_copies_the_command(workspace: OutputDir) -> None:  # noqa: F811
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_collapsed")
        await pilot.press("r")
        await outcome(app, pilot)
        await pilot.press("D")
        assert isinstance(app.screen, ConfirmDialog)
        await pilot.press("enter")
        await until(pilot, lambda: len(app.entries()) == 2 and app.entries()[-1].state == "done", "the second action")
        await until(pilot, lambda: app.screen is home(app), "home")
        await pilot.press("L")
        assert isinstance(app.screen, ActionLogScreen)
        words = screen_text(app)
        assert "prl down" in words and "prl runs readmit run_collapsed" in words and "nothing was running" in words
        await pilot.press("j", "y")
        assert app.clipboard == app.entries()[0].command
        await pilot.press("L")
        await pilot.click("CommandLine")
        await until(pilot, lambda: isinstance(app.screen, ActionLogScreen), "the log by a click on the line")


async def test_starting_the_workspace_fails_with_a_reason_and_offers_every_way(
    workspace: OutputDir,  # noqa: F811
    configs: Path,  # noqa: F811
) -> None:
    (configs / "demo" / "system.toml").write_text('[model]\nname = "models/none"\n')
    workspace.daemons.joinpath("configs").mkdir(exist_ok=True)
    workspace.component_config("up").write_text("max_concurrent_runs = 1\n")
    async with opened(workspace.path) as (app, pilot):
        assert not app.screen.active_bindings["x"].enabled, "nothing runs that could be started again"
        await pilot.press("U")
        await until(pilot, lambda: isinstance(app.screen, ChooseDialog), "the ways to start")
        dialog = app.screen
        assert isinstance(dialog, ChooseDialog)
        labels = [str(option.prompt) for option in dialog.query_one(OptionList).options]
        assert labels == ["with its last settings", "as in configs/demo/system.toml"]
        await pilot.press("down", "enter")
        entry = await outcome(app, pilot, "failed")
        assert entry.command.startswith("prl up @ configs/demo/system.toml")
        assert "models/none" in entry.text
        assert app.screen is dialog


def test_the_examples_of_the_program_are_offered_where_there_are_no_configs(workspace: OutputDir) -> None:  # noqa: F811
    labels = [label for label, _ in up_choices(workspace.path)]
    assert labels[0] == "a small workspace for this machine's CPU" and "as in configs/demo/system.toml" in labels


@pytest.mark.slow
async def test_every_action_has_a_command_too(workspace: OutputDir, configs: Path) -> None:  # noqa: F811
    steps = {"evict": EvictDialog, "delete": DeleteDialog, "clone": AddDialog, "add": AddDialog, "up": ChooseDialog,
             "down": ConfirmDialog, "log": ActionLogScreen}  # fmt: skip
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_crashed")
        for name, screen in steps.items():
            await pilot.press("colon")
            assert isinstance(app.screen, CommandScreen)
            await pilot.press(*name, "enter")
            await until(pilot, lambda kind=screen: isinstance(app.screen, kind), name)
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is home(app), "home")
        await pilot.press("colon", *"restart nobody", "enter")
        words = "daemon 'nobody' not found"
        await until(pilot, lambda: any(words in note.message for note in app._notifications), words)
        await pilot.press("colon", *"undo", "enter")
        await until(pilot, lambda: any("nothing to restore" in n.message for n in app._notifications), "the answer")


@pytest.mark.slow
async def test_the_audit_names_every_run_of_a_bulk_action(workspace: OutputDir) -> None:  # noqa: F811
    async with opened(workspace.path) as (app, pilot):
        await mark(app, pilot, "run_queued-a", "run_queued-b")
        await pilot.press("e", *"x", "enter")
        await outcome(app, pilot)
    lines = [json.loads(line) for line in workspace.audit.read_text().splitlines()][3:]
    assert {(line["action"], line["run_id"]) for line in lines} == {
        ("evict", "run_queued-a"),
        ("evict", "run_queued-b"),
    }


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the configs of this project, so that only the fixture's are offered."""
    monkeypatch.chdir(tmp_path)
