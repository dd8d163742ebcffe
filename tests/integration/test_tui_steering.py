"""Pause, share, fork, sweep, export and compare runs with keys and commands in a real app, looked up on disk."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Button, Checkbox, Input, Static, TextArea

from daemons.actions import set_run_keys
from prime_rl.configs.admitted import read_effect, write_admitted
from prime_rl.configs.base import load_toml
from prime_rl.contract.layout import OutputDir, RunDir
from tests.integration.test_tui_actions import audit, entry_of, outcome, select
from tests.tui_support import (
    add_history,
    build_workspace,
    cell_text,
    command,
    opened_app,
    orch_toml,
    screen_text,
    until,
)
from tests.unit.test_daemons_forks import put_adapter, put_version
from tui.actions import ExportForm, ForkForm, SweepForm
from tui.app import PrlApp
from tui.dialogs.form import FormDialog
from tui.keys import Command, complete
from tui.screens.runs import RunsScreen
from tui.widgets.runs_table import RunsTable

QUEUED = "run_queued-a"
opened = partial(opened_app, clock=time.time)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_workspace(tmp_path_factory.mktemp("built") / "workspace").path


@pytest.fixture
def workspace(built: Path, tmp_path: Path) -> OutputDir:
    shutil.copytree(built, tmp_path / "workspace")
    return OutputDir(tmp_path / "workspace")


async def form(app: PrlApp, pilot: Pilot[None]) -> FormDialog:
    await until(pilot, lambda: isinstance(app.screen, FormDialog), "the form")
    dialog = app.screen
    assert isinstance(dialog, FormDialog)
    return dialog


async def checked(dialog: FormDialog, pilot: Pilot[None], words: str) -> None:
    await until(pilot, lambda: words in str(dialog.query_one("#check", Static).render()), words)


async def refused(dialog: FormDialog, pilot: Pilot[None], field: str, words: str) -> None:
    problem = dialog.query_one(f"#problem-{field}", Static)
    await until(pilot, lambda: words in str(problem.render()), f"{words} at {field}: {screen_text(pilot.app)}")
    assert problem.has_class("-shown") and dialog.query_one("#do", Button).disabled


async def typed(app: PrlApp, pilot: Pilot[None], line: str) -> None:
    await command(pilot, line)


async def test_pause_with_a_reason_and_continue(workspace: OutputDir) -> None:
    run = RunDir(workspace.path / QUEUED)
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, QUEUED)
        await pilot.press("z")
        await form(app, pilot)
        await pilot.press(*"others first", "enter")
        entry = await outcome(app, pilot)
        assert run.paused.read_text() == "others first"
        assert entry.command.startswith(f"prl runs pause {QUEUED} --reason 'others first'")
        table = app.screen_stack[1].query_one(RunsTable)
        await until(pilot, lambda: "paused" in cell_text(table, QUEUED, "state"), "the new state")
        assert "others first" in cell_text(table, QUEUED, "note")
        await pilot.press("z")
        await until(pilot, lambda: not run.paused.exists(), "the end of the pause")
        assert (await outcome(app, pilot, of="runs continue")).text == f"{QUEUED}: continues"
    assert audit(workspace) == [("pause", QUEUED), ("continue", QUEUED)]


async def test_a_command_acts_on_the_runs_that_it_names(workspace: OutputDir) -> None:
    """Its other words are for those runs, on every screen; a run that is not there is no reason of a pause."""
    named = RunDir(workspace.path / "run_queued-b")
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, QUEUED)
        await typed(app, pilot, "pause run_nix")
        await until(pilot, lambda: any("'run_nix' not found" in each.message for each in app._notifications), "why")
        await typed(app, pilot, "pause run_queued-b run_upper others first")
        await outcome(app, pilot)
        assert named.paused.read_text() == RunDir(workspace.path / "run_upper").paused.read_text() == "others first"
        await typed(app, pilot, "set run_queued-b weight=2")
        assert (await outcome(app, pilot, of="runs set")).command.startswith("prl runs set run_queued-b weight=2")
        await pilot.press("4")
        await typed(app, pilot, "evict run_queued-b")
        await until(pilot, lambda: "evict run_queued-b" in screen_text(app), "the dialog")
        await pilot.press("escape")
        await typed(app, pilot, "diff run_queued-b run_upper")
        await until(pilot, lambda: "runs diff run_queued-b run_upper" in screen_text(app), "the difference")
        await pilot.press("escape", "1")
        await select(app, pilot, QUEUED)
        await typed(app, pilot, "diff run_done")
        await until(pilot, lambda: f"prl runs diff {QUEUED} run_done" in screen_text(app), "the differences")
        assert "max_steps" in screen_text(app) and "result" in screen_text(app)
    assert not RunDir(workspace.path / QUEUED).paused.exists()


async def test_an_edit_is_applied_or_restored_by_command(workspace: OutputDir) -> None:
    run_id = "run_queued-b"
    run = RunDir(workspace.path / run_id)
    write_admitted(run, read_effect(run), 0)
    before = run.orch_toml.read_text()
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, run_id)
        for lr, act in ((0.004, "restore"), (0.005, "apply")):
            run.orch_toml.write_text(before.replace("lr = 0.001", f"lr = {lr}"))
            await typed(app, pilot, act)
            entry = await outcome(app, pilot, of=f"runs {act}")
            assert entry.command.startswith(f"prl runs {act} {run_id}")
            assert read_effect(run).edit is None
    assert load_toml(run.orch_toml)["optim"]["lr"] == read_effect(run).data["optim"]["lr"] == 0.005
    assert audit(workspace) == [("restore", run_id), ("apply", run_id)]


@pytest.mark.slow
async def test_pause_many_and_continue_them_by_command(workspace: OutputDir) -> None:
    runs = [RunDir(workspace.path / name) for name in (QUEUED, "run_queued-b")]
    async with opened(workspace.path) as (app, pilot):
        await mark(app, pilot, [run.run_id for run in runs])
        await typed(app, pilot, "pause no need")
        await until(pilot, lambda: all(run.paused.exists() for run in runs), "both pauses")
        assert (await outcome(app, pilot)).text == "2 runs paused"
        rows = app.screen_stack[1]
        assert isinstance(rows, RunsScreen)
        await until(pilot, lambda: {row.state for row in rows.target_rows()} == {"paused"}, "the states")
        await typed(app, pilot, "continue")
        await until(pilot, lambda: "continue 2 runs" in screen_text(app), "the question")
        await pilot.press("enter")
        await until(pilot, lambda: not any(run.paused.exists() for run in runs), "the end of both")


# Of a run by its state: the acts that do nothing to it, and what tells so after its id.
IDLE_ACTS = {
    "run_done": {
        "pause": "cannot be paused: it is finished and has no slot",
        "evict": "already finished",
        "readmit": "is finished: only",
        "continue": "not paused",
    },
    "run_collapsed": {"pause": "cannot be paused: it is evicted", "evict": "already evicted"},
    "run_typo": {"pause": "cannot be paused: it is invalid", "readmit": "is invalid: only"},
    "run_crashed": {"pause": "cannot be paused: it has failed"},
    QUEUED: {"readmit": "is stopped: only"},
}
PAUSED = "run_queued-b"
ACT_KEYS = {"pause": "z", "evict": "e", "readmit": "r"}


def told(app: PrlApp) -> list[str]:
    return [each.message for each in app._notifications]


async def test_each_act_tells_why_it_does_nothing_by_command_and_by_key(workspace: OutputDir) -> None:
    """By command of the run that it names, whatever the state of the run under the cursor."""
    async with opened(workspace.path) as (app, pilot):

        async def tells(why: str) -> None:
            await until(pilot, lambda: len(told(app)) == 1, why)
            assert told(app)[0].startswith(why), told(app)
            app.clear_notifications()

        for run_id, acts in IDLE_ACTS.items():
            await select(app, pilot, run_id)
            for act in ACT_KEYS.keys() & acts.keys():
                assert not app.screen.active_bindings[ACT_KEYS[act]].enabled
                await pilot.press(ACT_KEYS[act])
                await tells(f"{run_id}: {acts[act]}")
        await select(app, pilot, "run_done")
        await pilot.press("space")
        await select(app, pilot, "run_collapsed")
        await pilot.press("space", "e")
        await until(pilot, lambda: told(app)[-1:] != [], "why of both")
        assert told(app)[0].endswith("so nothing was changed; and 1 more")
        await pilot.press("escape")
        app.clear_notifications()
        RunDir(workspace.path / PAUSED).paused.write_text("later")
        for run_id, acts in {**IDLE_ACTS, PAUSED: {"pause": "already paused", "readmit": "is paused: only"}}.items():
            for act, why in acts.items():
                await typed(app, pilot, f"{act} {run_id}")
                await tells(f"{run_id}: {why}")
        await select(app, pilot, "run_done")
        await typed(app, pilot, "pause")
        await tells("run_done: cannot be paused: it is finished and has no slot")
        assert entry_of(app) is None and isinstance(app.screen, RunsScreen)


async def test_weight_is_checked_at_its_field_and_set(workspace: OutputDir) -> None:
    """To remove what is not there changes nothing, and a mistake is told."""
    path = RunDir(workspace.path / QUEUED).orch_toml
    before = path.read_text()
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, QUEUED)
        await typed(app, pilot, "set weight")
        await until(pilot, lambda: any("expected KEY=VALUE" in each for each in told(app)), "why")
        assert entry_of(app) is None
        await typed(app, pilot, "set budget.max_hours=null")
        assert (await outcome(app, pilot)).text == f"{QUEUED}: has these values already"
        assert path.read_text() == before
        await pilot.press("w")
        dialog = await form(app, pilot)
        field = dialog.query_one("#weight", Input)
        assert field.value == "1"
        field.value = "-1"
        await refused(dialog, pilot, "weight", "greater than 0")
        field.value = "2"
        await checked(dialog, pilot, "share of the trainer")
        await pilot.press("enter")
        entry = await outcome(app, pilot, of="weight=2")
        assert entry.command.startswith(f"prl runs set {QUEUED} weight=2")
        table = app.screen_stack[1].query_one(RunsTable)
        await until(pilot, lambda: "weight 2" in cell_text(table, QUEUED, "note"), "the weight in the table")
        await typed(app, pilot, "set weight=3 tags=a,b")
        await until(pilot, lambda: "weight 3" in cell_text(table, QUEUED, "note"), "the other weight")
    config = load_toml(RunDir(workspace.path / QUEUED).orch_toml)
    assert (config["weight"], config["tags"]) == (3, ["a", "b"])


@pytest.mark.slow
async def test_budget_shows_what_is_used_and_is_taken_back(workspace: OutputDir) -> None:
    run = RunDir(workspace.path / QUEUED)
    before = run.orch_toml.read_text()
    run.life.write_text("one")
    workspace.usage.mkdir(exist_ok=True)
    line = '{"version":1,"run_id":"run_queued-a","day":"2026-09-21","life":"%s","tokens":900,"work_s":1800}\n'
    workspace.run_usage(QUEUED).write_text(line % "one" + line % "before")
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, QUEUED)
        await pilot.press("B")
        dialog = await form(app, pilot)
        await checked(dialog, pilot, "used so far: 900 tokens, 0.50 hours")
        dialog.query_one("#tokens", Input).value = "800"
        await checked(dialog, pilot, f"would end at once: {QUEUED}")
        dialog.query_one("#tokens", Input).value = "a lot"
        await refused(dialog, pilot, "tokens", "integer")
        dialog.query_one("#tokens", Input).value = "1e3"
        await checked(dialog, pilot, "0.50 hours")
        await pilot.press("enter")
        await outcome(app, pilot)
        assert load_toml(run.orch_toml)["budget"] == {"max_tokens": 1000}
        table = app.screen_stack[1].query_one(RunsTable)
        await until(pilot, lambda: "budget 90 %" in cell_text(table, QUEUED, "note"), "the share")
        await until(pilot, lambda: "900 of 1.0k tokens" in screen_text(app), "the bar of the preview")
        await pilot.press("B")
        dialog = await form(app, pilot)
        assert dialog.query_one("#tokens", Input).value == "1000"
        dialog.query_one("#tokens", Input).value = ""
        await pilot.press("enter")
        await until(pilot, lambda: "max_tokens" not in run.orch_toml.read_text().replace("max_tokens = 64", ""), "none")
    assert run.orch_toml.read_text().startswith(before.rstrip()), "its comments stay"


async def test_fork_from_the_chosen_version(workspace: OutputDir) -> None:
    put_adapter(RunDir(workspace.path / "run_done").broadcast_dir(60))
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_done")
        await pilot.press("F")
        dialog = await form(app, pilot)
        await checked(dialog, pilot, "run_done-fork would start from run_done@v60")
        dialog.query_one("#version", Input).value = "7"
        await refused(dialog, pilot, "version", "does not have a version of step 7")
        dialog.query_one("#version", Input).value = "v60"
        dialog.query_one("#settings", Input).value = "optim.lr"
        await refused(dialog, pilot, "settings", "expected KEY=VALUE")
        dialog.query_one("#settings", Input).value = "optim.lr=3e-5"
        dialog.query_one("#new-id", Input).value = "run_slower"
        await checked(dialog, pilot, "run_slower would start from run_done@v60")
        await pilot.press("ctrl+s")
        entry = await outcome(app, pilot)
        words = "prl runs fork run_done --step 60 --id run_slower --set optim.lr=3e-5"
        assert entry.command.startswith(words)
    config = load_toml(RunDir(workspace.path / "run_slower").orch_toml)
    assert (config["optim"]["lr"], config["init"]) == (3e-5, {"from": "run_done@v60"})
    assert audit(workspace) == [("fork", "run_slower")]


async def test_sweep_shows_the_grid_before_it_is_added(workspace: OutputDir, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(orch_toml())
    async with opened(workspace.path) as (app, pilot):
        await typed(app, pilot, f"sweep {tmp_path / 'grid.toml'}")
        dialog = await form(app, pilot)
        axes = dialog.query_one("#axes", TextArea)
        await refused(dialog, pilot, "axes", "values missing: type a key and its values")
        axes.load_text("seed")
        await refused(dialog, pilot, "axes", "expected KEY=VALUE")
        axes.load_text("seed=1,2\noptim.lr=1e-4,-1")
        await refused(dialog, pilot, "axes", "optim.lr")
        axes.load_text("seed=1,2\noptim.lr=1e-4,3e-4")
        file = dialog.query_one("#file", Input)
        file.value = ""
        await refused(dialog, pilot, "file", "config missing: type the path")
        file.value = "~nouser/grid.toml"
        await refused(dialog, pilot, "file", "home folder of ~nouser not found")
        file.value = str(tmp_path / "grid.toml")
        dialog.query_one("#halving", Input).value = "1"
        await refused(dialog, pilot, "halving", "at least 2")
        dialog.query_one("#halving", Input).value = "2"
        await checked(dialog, pilot, "4 runs, of 2 one goes on at each rung, by reward/mean (max)")
        await checked(dialog, pilot, "· run_grid-seed2-lr3e-4  seed=2  optim.lr=0.0003")
        assert not workspace.run("run_grid-seed2-lr3e-4").path.exists()
        await pilot.press("ctrl+s")
        entry = await outcome(app, pilot)
        assert entry.text == "sweep grid: 4 runs added"
    assert len(list(workspace.path.glob("run_grid-*/control/orch.toml"))) == 4


async def test_export_writes_the_folder(workspace: OutputDir, tmp_path: Path) -> None:
    put_adapter(RunDir(workspace.path / "run_done").broadcast_dir(60))
    async with opened(workspace.path) as (app, pilot):
        await select(app, pilot, "run_done")
        await pilot.press("E")
        dialog = await form(app, pilot)
        out = dialog.query_one("#out", Input)
        out.value = str(workspace.path / "inside")
        await refused(dialog, pilot, "out", "is inside the workspace")
        out.value = "~nouser/home"
        await refused(dialog, pilot, "out", "home folder of ~nouser not found")
        out.value = str(tmp_path / "home")
        await checked(dialog, pilot, "version 60 of run_done (adapter) would be written")
        tick = dialog.query_one("#merge", Checkbox)
        assert tick.BUTTON_INNER == " "
        tick.toggle()
        assert tick.BUTTON_INNER == "X"
        await checked(dialog, pilot, "version 60 of run_done (merged) would be written")
        dialog.query_one("#merge", Checkbox).toggle()
        await checked(dialog, pilot, "(adapter)")
        await pilot.press("ctrl+s")
        entry = await outcome(app, pilot)
        assert entry.command.startswith(f"prl runs export run_done --out {tmp_path / 'home'}")
    assert (tmp_path / "home" / "adapter_config.json").is_file()


@pytest.fixture
def two_with_versions(workspace: OutputDir) -> list[str]:
    for run_id, step in (("run_done", 60), (QUEUED, 3)):
        put_version(RunDir(workspace.path / run_id), step)
    return ["run_done", QUEUED]


async def mark(app: PrlApp, pilot: Pilot[None], run_ids: list[str]) -> None:
    for run_id in run_ids:
        await select(app, pilot, run_id)
        await pilot.press("space")


@pytest.mark.slow
async def test_all_marked_runs_are_forked(workspace: OutputDir, two_with_versions: list[str]) -> None:
    async with opened(workspace.path) as (app, pilot):
        await mark(app, pilot, two_with_versions)
        await pilot.press("F")
        dialog = await form(app, pilot)
        assert not dialog.query("#new-id"), "one name for several runs"
        for words in ("run_done-fork would start from run_done@v60", f"{QUEUED}-fork would start from {QUEUED}@v3"):
            await checked(dialog, pilot, words)
        dialog.query_one("#version", Input).value = "60"
        await refused(dialog, pilot, "version", f"{QUEUED} does not have a version of step 60")
        dialog.query_one("#version", Input).value = ""
        dialog.query_one("#settings", Input).value = "seed=9"
        await checked(dialog, pilot, f"{QUEUED}-fork would start")
        await pilot.press("ctrl+s")
        entry = await outcome(app, pilot)
        assert entry.text == "2 runs forked"
        assert all(f"prl runs fork {run_id} --set seed=9" in entry.command for run_id in two_with_versions)
    made = [load_toml(RunDir(workspace.path / f"{run_id}-fork").orch_toml) for run_id in two_with_versions]
    assert [each["init"]["from"] for each in made] == ["run_done@v60", f"{QUEUED}@v3"]
    assert [each["seed"] for each in made] == [9, 9]


@pytest.mark.slow
async def test_all_marked_runs_are_exported_each_into_its_folder(
    workspace: OutputDir, two_with_versions: list[str], tmp_path: Path
) -> None:
    async with opened(workspace.path) as (app, pilot):
        await mark(app, pilot, two_with_versions)
        await pilot.press("E")
        dialog = await form(app, pilot)
        out = dialog.query_one("#out", Input)
        out.value = str(tmp_path / "nowhere")
        await refused(dialog, pilot, "out", "nowhere not found")
        (tmp_path / "exports").mkdir()
        out.value = str(tmp_path / "exports")
        await checked(dialog, pilot, f"version 3 of {QUEUED} (adapter) would be written to {tmp_path}/exports/queued-a")
        await pilot.press("ctrl+s")
        assert (await outcome(app, pilot)).text == "2 runs exported"
    folders = sorted(path.parent.name for path in (tmp_path / "exports").glob("*/adapter_config.json"))
    assert folders == ["done", "queued-a"]


@pytest.mark.slow
async def test_all_marked_runs_get_the_limit_that_was_typed_and_keep_the_others(workspace: OutputDir) -> None:
    budgets = {QUEUED: {"max_tokens": 700, "max_hours": 1234.5678}, "run_queued-b": {"max_hours": 1234.5678}}
    for run_id, budget in budgets.items():
        set_run_keys(workspace.path, run_id, {"budget": budget, "weight": 2 / 3})
    async with opened(workspace.path) as (app, pilot):
        await mark(app, pilot, list(budgets))
        await pilot.press("w")
        dialog = await form(app, pilot)
        assert dialog.query_one("#weight", Input).value == str(2 / 3)
        await pilot.press("escape", "B")
        dialog = await form(app, pilot)
        tokens, hours = dialog.query_one("#tokens", Input), dialog.query_one("#hours", Input)
        assert (tokens.value, tokens.placeholder, hours.value) == ("", "differs between the runs", "1234.5678")
        await checked(dialog, pilot, "used so far")
        await pilot.press("ctrl+s")
        assert str(dialog.query_one("#outcome", Static).render()).startswith("no limit was changed")
        hours.value = "2"
        await pilot.press("ctrl+s")
        assert (await outcome(app, pilot)).text == "2 runs set budget.max_hours=2"
    found = [load_toml(RunDir(workspace.path / run_id).orch_toml)["budget"] for run_id in budgets]
    assert found == [{"max_tokens": 700, "max_hours": 2}, {"max_hours": 2}]


@pytest.mark.slow
@pytest.mark.parametrize(("key", "what"), [("W", "a sweep"), ("c", "a clone")])
async def test_what_starts_from_one_run_refuses_several(workspace: OutputDir, key: str, what: str) -> None:
    async with opened(workspace.path) as (app, pilot):
        await mark(app, pilot, [QUEUED, "run_queued-b"])
        await pilot.press(key)
        words = f"{what} starts from one run, and 2 are marked: clear the marks with esc"
        await until(pilot, lambda: [note.message for note in app._notifications] == [words], words)
        assert isinstance(app.screen, RunsScreen)
        await pilot.press("escape", key)
        await until(pilot, lambda: not isinstance(app.screen, RunsScreen), "the form for the run under the cursor")


@pytest.mark.slow
async def test_a_run_offers_its_chosen_checkpoint_and_tells_its_budget(workspace: OutputDir) -> None:
    run = add_history(workspace, "run_collapsed")
    run.orch_toml.write_text(orch_toml(extra="weight = 4\npriority = 2\nbudget = { max_hours = 2 }\n"))
    run.life.write_text("one")
    workspace.usage.mkdir(exist_ok=True)
    workspace.run_usage(run.run_id).write_text(
        '{"version":1,"run_id":"run_collapsed","day":"2026-09-21","life":"one","work_s":3600}\n'
    )
    async with opened(workspace.path, size=(120, 30)) as (app, pilot):
        await select(app, pilot, "run_collapsed")
        await pilot.press("enter", "5")
        await until(pilot, lambda: "◌ partial" in screen_text(app), "the checkpoints")
        assert "budget ━━━━──── 50 %" in screen_text(app) and "weight 4   priority 2" in screen_text(app)
        await pilot.press("j", "j", "F")
        dialog = await form(app, pilot)
        assert dialog.query_one("#version", Input).value == "20"
        await pilot.press("escape", "percent_sign")
        assert (await form(app, pilot)).query_one("#weight", Input).value == "4"


def test_forms_have_the_words_of_their_command() -> None:
    fork = ForkForm(("run_a",), "4", "run_b", "seed=2 optim.lr=1e-4", with_optimizer=True)
    words = "run_a --step 4 --id run_b --set seed=2 --set optim.lr=1e-4 --with-optimizer"
    assert fork.words("run_a") == words.split()
    several = """tags=["a b", 'c'] env.0.prompt.system="x  y" half="a b"""
    assert ForkForm(("run_a",), settings=several).words("run_a") == [
        *("run_a", "--set", """tags=["a b", 'c']""", "--set", 'env.0.prompt.system="x  y"', "--set", 'half="a'),
        *("--set", "b"),
    ]
    export = ExportForm(("run_a",), "home", "4", merge=True)
    assert export.words("run_a") == ["run_a", "--step", "4", "--merge", "--out", "home"]
    both = ExportForm(("run_a", "run_b"), "home")
    assert both.words("run_b") == ["run_b", "--out", "home/b"]
    sweep = SweepForm("a.toml", " seed=1,2\n\nx=3,4 ", "grid", "3")
    assert sweep.words() == ["a.toml", "--set", "seed=1,2", "--set", "x=3,4", "--name", "grid", "--halving", "3"]


def test_live_keys_are_completed_one_after_another() -> None:
    keys = {"weight=": "", "budget.max_hours=": ""}
    several = {"set": Command("set", "", words=lambda: keys, on_runs=True)}
    assert complete("set we", several) == "set weight="
    assert complete("set weight=2 bud", several) == "set weight=2 budget.max_hours="
    assert complete("set weight=2 ", several) is None
    assert complete("set weight=2 bud", {"set": Command("set", "", words=lambda: keys)}) is None
