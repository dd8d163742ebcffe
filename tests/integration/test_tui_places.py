"""System, Nodes and Problems: every key, what stands there, and that it is true."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from textual.screen import Screen
from textual.widgets import Input, OptionList

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.metrics import Sign
from prime_rl.contract.status import Crash, DaemonStatus, RunStatus
from tests.tui_places_support import FakeProbe, busy, put_group
from tests.tui_support import (
    NOW,
    Ticker,
    build_workspace,
    command,
    frozen_clock,
    opened_app,
    sees,
    until,
    write_status,
)
from tui.app import PrlApp
from tui.model.snapshot import Snapshot
from tui.screens.base import CommandScreen, HelpScreen
from tui.screens.compare import CompareScreen
from tui.screens.nodes import NodesScreen
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen
from tui.screens.system import ProblemsScreen, SystemScreen
from tui.widgets.header import WorkspaceHeader


@pytest.fixture
def workspace(tmp_path: Path) -> OutputDir:
    output = build_workspace(tmp_path / "workspace")
    busy(output)
    crashed = DaemonStatus(name="run_crashed", state="failed", reason="3 early crashes", log_tail=["oh", "no"])
    write_status(output.daemon_status("run_crashed"), crashed)
    return output


opened = partial(opened_app, size=(120, 30), monotonic=frozen_clock, make_probe=lambda path: FakeProbe())


@pytest.mark.slow
async def test_numbers_lead_from_each_place_to_each(workspace: OutputDir) -> None:
    places = {"3": SystemScreen, "4": NodesScreen, "5": ProblemsScreen, "1": RunsScreen}
    async with opened(workspace) as (app, pilot):
        for key in "3314153443545511":  # every way from one to another, and to itself
            await pilot.press(key)
            assert isinstance(app.screen, places[key])
            assert len(app.screen_stack) <= 3
        for key in ("3", "4", "5"):
            for back in ("escape", "q"):
                await pilot.press(key, back)
                assert isinstance(app.screen, RunsScreen)
        await pilot.press("P")
        assert isinstance(app.screen, SystemScreen)
        await pilot.press("P")
        assert isinstance(app.screen, RunsScreen)


OF_A_RUN = ("2", "23", "24")


@pytest.mark.slow
@pytest.mark.parametrize("places", [("1", "3", "4", "5"), OF_A_RUN], ids=["places", "tabs"])
async def test_command_line_help_and_palette_work_everywhere(workspace: OutputDir, places: tuple[str, ...]) -> None:
    async with opened(workspace, size=(80, 24)) as (app, pilot):

        async def comes(kind: type[Screen[object]], how: str) -> None:
            await until(pilot, lambda: isinstance(app.screen, kind), f"{kind.__name__} by {how}")

        for keys in places:
            app.go("runs")
            await comes(RunsScreen, "runs")
            await pilot.press(*keys)
            here = type(app.screen)
            assert issubclass(here, RunScreen) is (keys in OF_A_RUN)
            await pilot.press("question_mark")
            await comes(HelpScreen, f"? on {keys}")
            await pilot.press("escape", "colon")
            await comes(CommandScreen, f": on {keys}")
            app.screen.query_one(Input).value = "nix"
            await pilot.press("enter")
            await sees(app, pilot, "unknown command 'nix'")
            await pilot.press("escape")
            await comes(here, f"esc on {keys}")
            await command(pilot, "op crashed")
            await until(pilot, lambda: getattr(app.screen, "run_id", None) == "run_crashed", f"the run, on {keys}")
            await pilot.press("escape")
            await comes(here, f"esc on {keys}")
        await pilot.press("ctrl+p", *"nodes")

        def first() -> list[str]:
            return [str(each.prompt).partition("\n")[0] for each in app.screen.query_one(OptionList).options[:1]]

        await until(pilot, lambda: first() == ["Nodes"], "what fits")
        await pilot.press("enter")
        await comes(NodesScreen, "the palette")
        assert len(app.screen_stack) == 3


@pytest.mark.slow
async def test_a_place_draws_each_look_once(workspace: OutputDir, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[WorkspaceHeader, Snapshot]] = []  # keeps them, so that each has an id of its own
    show = WorkspaceHeader.show

    def record(header: WorkspaceHeader, snapshot: Snapshot) -> None:
        drawn.append((header, snapshot))
        show(header, snapshot)

    monkeypatch.setattr(WorkspaceHeader, "show", record)
    async with opened(workspace, *"3456") as (app, _):
        assert isinstance(app.screen, CompareScreen)
    assert len({header for header, _ in drawn}) == 5
    assert len({(header, id(snapshot)) for header, snapshot in drawn}) == len(drawn)


@pytest.mark.slow
async def test_numbers_on_a_run_are_its_tabs_and_esc_leads_back(workspace: OutputDir) -> None:
    async with opened(workspace, "5", size=(80, 24)) as (app, pilot):
        chosen = problems(app).target_row()
        await pilot.press("2", "5", "3")
        assert isinstance(app.screen, RunScreen) and app.screen.tab == "config"
        assert chosen is not None and app.screen.run_id == chosen.run_id
        await pilot.press("escape")
        assert problems(app).target_row() is not None
        await pilot.press("colon", *"open run_", "enter")
        words = "'run_' is ambiguous"
        await until(pilot, lambda: any(words in note.message for note in app._notifications), words)


async def test_system_says_what_everything_does_and_takes(workspace: OutputDir) -> None:
    async with opened(workspace, "3") as (app, pilot):
        await sees(app, pilot, "34 %", "61.0 GiB of 128.0 GiB", "NVIDIA H200", "87 %", "full in 10h", "210.0 GiB free")
        await sees(app, pilot, "3/4 slots", "updates, 0.21/s", "train 67 %", "wait 23 %")
        await sees(app, pilot, "51 running", "7 waiting", "62 %", "run_sort-rank16@v86")
        await sees(app, pilot, "152 %", "3.0 GiB", "run_crashed", "3 early crashes")


@pytest.mark.slow
async def test_keys_on_system(workspace: OutputDir) -> None:
    async with opened(workspace, "3") as (app, pilot):
        screen = app.screen
        assert isinstance(screen, SystemScreen)
        await until(pilot, lambda: len(screen.daemons.keys) == 4, "the daemons")
        assert screen.target_daemon() == "trainer"
        for key, daemon in (("j", "inference"), ("down", "supervisor"), ("k", "inference"), ("up", "trainer")):
            await pilot.press(key)
            assert screen.target_daemon() == daemon
        for key, daemon in (("G", "run_crashed"), ("g", "trainer"), ("pagedown", "run_crashed"), ("pageup", "trainer")):
            await pilot.press(key)
            assert screen.target_daemon() == daemon
        await pilot.press("enter")
        assert app.screen is screen, "there is no screen of the trainer alone"
        await pilot.press("end")
        await sees(app, pilot, "│ no")
        assert screen.target_row() is not None
        await pilot.press("enter")
        assert isinstance(app.screen, RunScreen) and app.screen.run_id == "run_crashed"


@pytest.mark.slow
async def test_a_click_chooses_a_daemon_and_a_double_click_opens_it(workspace: OutputDir) -> None:
    async with opened(workspace, "3") as (app, pilot):
        screen = app.screen
        assert isinstance(screen, SystemScreen)
        # What is known of the machine comes from another thread, and moves the list down.
        await until(pilot, lambda: screen.look is not None and len(screen.daemons.keys) == 4, "all of the screen")
        await pilot.pause()
        await pilot.click("#daemons", offset=(5, 2))
        assert screen.target_daemon() == "inference"
        await pilot.click("#daemons", offset=(5, 4), times=2)
        assert isinstance(app.screen, RunScreen)


async def test_who_asks_the_machine_ends_with_its_screen(workspace: OutputDir) -> None:
    async with opened(workspace, "3") as (app, pilot):
        workers = [worker for worker in app.workers if worker.name == "measure the machine"]
        assert len(workers) == 1
        await pilot.press("escape")
        await until(pilot, lambda: all(worker.is_finished for worker in workers), "the end of the thread")


async def test_nodes_show_who_holds_up_all_others(workspace: OutputDir) -> None:
    clock = Ticker()
    put_group(workspace, seq=100)
    async with opened(workspace, "4", monotonic=clock) as (app, pilot):
        await sees(app, pilot, "iteration 12", "waits for node 2, node 3, node 4", "unproven", "missing")
        clock.now += 8
        put_group(workspace, seq=101)
        await sees(app, pilot, "suspect")
        clock.now += 8
        put_group(workspace, seq=102)
        await sees(app, pilot, "node 3 is dead: no heartbeat for 16s, in phase 3 (files ready)", "slow")
        screen = app.screen
        assert isinstance(screen, NodesScreen)
        for key, rank in (("j", "1"), ("G", "4"), ("k", "3"), ("g", "0"), ("down", "1"), ("up", "0")):
            await pilot.press(key)
            assert screen.nodes.selected == rank
        await pilot.press("enter")
        assert app.screen is screen
        await pilot.press("5")
        await sees(app, pilot, "node 3", "dead: no heartbeat")
        await until(pilot, lambda: "node node 3" in keys_of(app), "the node among the problems")
        while not str(problems(app).problems.selected).startswith("node"):
            await pilot.press("j")
        await pilot.press("enter")
        assert isinstance(app.screen, NodesScreen)


async def test_without_nodes_the_command_that_starts_them_is_shown(workspace: OutputDir) -> None:
    async with opened(workspace, "4", size=(80, 24)) as (app, pilot):
        await sees(app, pilot, "no multi-node group", "prl multinode --num-nodes 3", "--worker RANK")


def problems(app: PrlApp) -> ProblemsScreen:
    assert isinstance(app.screen, ProblemsScreen)
    return app.screen


def keys_of(app: PrlApp) -> list[str]:
    return problems(app).problems.keys


async def test_problems_newest_first_and_each_opens_what_has_it(workspace: OutputDir) -> None:
    workspace.run("run_collapsed").evicted.write_text("the reward collapsed")
    os.utime(workspace.run("run_collapsed").evicted, (NOW - 1, NOW - 1))
    async with opened(workspace, "5") as (app, pilot):
        await until(pilot, lambda: len(keys_of(app)) == 7, "the problems")
        assert keys_of(app)[0] == "run run_collapsed" and keys_of(app)[-1] == "entry run_bad name"
        await sees(app, pilot, "▲ 7 problems", "the reward collapsed")
        assert problems(app).target_row() is not None and problems(app).target_daemon() == "run_collapsed"
        await pilot.press("enter")
        assert isinstance(app.screen, RunScreen) and app.screen.run_id == "run_collapsed"
        await pilot.press("escape", "5", "G", "enter")
        await sees(app, pilot, "letters, digits")
        assert problems(app).target_row() is None
        await pilot.press("g", "j", "k", "pagedown", "pageup")
        assert problems(app).problems.selected == "run run_collapsed"


async def test_a_daemon_among_the_problems_opens_system(tmp_path: Path) -> None:
    workspace = build_workspace(tmp_path / "workspace")
    write_status(
        workspace.daemon_status("inference"), DaemonStatus(name="inference", state="backoff", reason="it crashed")
    )
    async with opened(workspace, "5") as (app, pilot):
        await until(pilot, lambda: "daemon inference" in keys_of(app), "the daemon")
        while problems(app).problems.selected != "daemon inference":
            await pilot.press("j")
        assert problems(app).target_daemon() == "inference"
        await pilot.press("enter")
        assert isinstance(app.screen, SystemScreen)


async def test_a_run_that_does_not_learn_and_a_restart_loop_are_problems_with_what_to_do(tmp_path: Path) -> None:
    workspace = build_workspace(tmp_path / "workspace")
    signs = [Sign("no_gradient", 0.0, 1e-6, 28), Sign("entropy_gone", 0.001, 0.01, 12)]
    run = workspace.run("run_reverse-lr1e-3")
    write_status(run.status, RunStatus(run_id=run.run_id, state="running", signs=signs))
    crashes = [Crash(at=NOW - 100 * number, kind="crash", reason="exit code 1") for number in (3, 2, 1)]
    write_status(workspace.daemon_status("inference"), DaemonStatus(name="inference", state="running", crashes=crashes))
    async with opened(workspace, "5") as (app, pilot):
        await until(pilot, lambda: f"run {run.run_id} no gradient" in keys_of(app), "the run")
        assert "daemon inference" in keys_of(app)
        keys = keys_of(app)
        for key, words in (
            ("daemon inference", ("restart loop: inference ended 3 times", "prl logs inference")),
            (
                f"run {run.run_id} no gradient",
                ("no gradient: grad_norm at most 0 for 28 updates", "no version from before it is left"),
            ),
            (f"run {run.run_id} entropy is gone", ("entropy is gone: mean 0.001 nats", "end the run if its reward")),
        ):
            await pilot.press("g", *["j"] * keys.index(key))
            assert problems(app).problems.selected == key
            await sees(app, pilot, *words)
        await pilot.press("1")
        await sees(app, pilot, "no gradient")


async def test_no_problem_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    async with opened(OutputDir(tmp_path / "workspace"), "5") as (app, pilot):
        await sees(app, pilot, "no problems in this workspace")
