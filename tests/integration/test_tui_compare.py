"""Compare in a real app over a workspace on disk: groups, the metric, a filter, and the way to a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.metrics import Sign
from prime_rl.contract.notes import SweepPlan, SweepRun
from prime_rl.contract.status import RunStatus, read_status
from tests.tui_support import (
    add_run,
    build_workspace,
    command,
    opened_app,
    orch_toml,
    screen_text,
    sees,
    until,
    write_status,
)
from tui.app import PrlApp
from tui.readers.charts import SMOOTHINGS
from tui.readers.tabs import TABS
from tui.screens.compare import GROUP, CompareScreen, PickRuns
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen

BEST, SECOND, OTHER = "run_high", "run_high-again", "run_low"


@pytest.fixture
def workspace(tmp_path: Path) -> OutputDir:
    """Beside the runs of the tests: two with tag `high` and one with tag `low`, of which a learning rate differs."""
    workspace = build_workspace(tmp_path / "workspace")
    for run_id, tag, lr, best, seed in (
        (BEST, "high", 3e-3, 0.99, 21),
        (SECOND, "high", 3e-3, 0.97, 22),
        (OTHER, "low", 1e-5, 0.1, 23),
    ):
        toml = orch_toml(lr=lr, extra=f'tags = ["{tag}"]')
        add_run(workspace, run_id, step=80, seed=seed, best=best, toml=toml, status={"state": "running"})
    return workspace


@dataclass(frozen=True)
class Opened:
    app: PrlApp
    pilot: Pilot[None]

    @property
    def screen(self) -> CompareScreen:
        assert isinstance(self.app.screen, CompareScreen)
        return self.app.screen

    @property
    def runs(self) -> set[str]:
        """Those in the list, without the lines of the groups."""
        return {key for key in self.screen.list.keys if not key.startswith(GROUP)}

    async def choose(self, key: str) -> None:
        lines = self.screen.list
        lines.action_move(lines.keys.index(key) - lines.keys.index(lines.selected or key))
        await self.pilot.pause()
        assert lines.selected == key

    async def filter(self, text: str) -> None:
        await self.pilot.press("slash")
        await until(self.pilot, lambda: isinstance(self.app.focused, Input), "the filter line")
        await self.pilot.press(*text, "enter")

    async def pick(self, key: str, name: str) -> None:
        """Open a list with its key, and take the name."""
        await self.pilot.press(key)
        await until(self.pilot, lambda: isinstance(self.app.focused, Input), "the list")
        assert isinstance(self.app.screen, PickRuns)
        await self.pilot.press(*name, "enter" if name else "escape")
        await until(self.pilot, lambda: isinstance(self.app.screen, CompareScreen), "the list to close")

    async def sees(self, *words: str) -> None:
        await sees(self.app, self.pilot, *words)

    async def told(self, words: str) -> None:
        await until(self.pilot, lambda: any(words in each.message for each in self.app._notifications), words)

    async def shows(self, run_ids: set[str]) -> None:
        await until(self.pilot, lambda: self.runs == run_ids, f"the runs {sorted(run_ids)}")


@asynccontextmanager
async def opened(workspace: OutputDir, *, filtered: str = "") -> AsyncIterator[Opened]:
    """The screen, after the home screen got a filter, if there is one."""
    async with opened_app(workspace, size=(110, 30)) as (app, pilot):
        opened = Opened(app, pilot)
        if filtered:
            await opened.filter(filtered)
        await pilot.press("6")
        await opened.sees("★")
        yield opened


async def test_the_best_run_is_named_with_what_differs_and_with_the_reason_if_it_collapsed_or_failed(
    workspace: OutputDir,
) -> None:
    best = RunDir(workspace.path / BEST)
    status = read_status(best.status, RunStatus)
    assert status is not None
    async with opened(workspace, filtered="step=80") as o:
        await o.shows({BEST, SECOND, OTHER})
        await o.sees(f"best ★ {BEST}", "lr = 0.003")
        assert "environments" not in screen_text(o.app)
        status.signs = [Sign("reward_collapsed", 0.1, 0.9, 12)]
        write_status(best.status, status, updated_at=status.updated_at)
        o.app.watcher.wake()
        await o.sees(f"▲ ★ {BEST}: reward collapsed: mean 0.1 over 10 batches, was 0.9 at best", "★▲━ ")
        best.evicted.write_text("the loss is not finite")
        o.app.watcher.wake()
        await o.sees(f"▲ ★ {BEST}: evicted: the loss is not finite")
        status.signs = []
        write_status(best.status, status, updated_at=status.updated_at)
        best.evicted.unlink()
        o.app.watcher.wake()
        await until(o.pilot, lambda: "▲" not in "".join(screen_text(o.app).splitlines()[2:]), "no doubt")


async def test_each_environment_has_a_star_of_its_own_and_results_are_those_of_one_step(workspace: OutputDir) -> None:
    add_run(workspace, "run_late", step=20, seed=24, best=0.9, toml=orch_toml(), status={"state": "running"})
    async with opened(workspace) as o:
        await o.sees("environments, each ranked by itself")
        assert {BEST, SECOND, OTHER, "run_upper"} <= o.runs
        assert o.screen.data is not None and len(o.screen.data.best) > 1
        await command(o.pilot, "filter step>=20")
        await command(o.pilot, "step 80")
        await o.sees(f"★ {BEST}", "not ranked: ", "run_late")
        await command(o.pilot, "step soon")
        await o.told("must be a number")


async def test_runs_are_grouped_by_tag_and_a_group_opens_with_its_best_first(workspace: OutputDir) -> None:
    async with opened(workspace) as o:
        await command(o.pilot, "group tag")
        await o.sees("by tag", "high  2 runs")
        assert o.screen.list.keys[0] == f"{GROUP}high"
        await o.choose(f"{GROUP}high")
        assert {row.run_id for row in o.screen.target_rows()} == {BEST, SECOND}, "an act is for the whole group"
        await o.pilot.press("enter")
        await until(o.pilot, lambda: isinstance(o.app.screen, RunScreen), "the run's screen")
        screen = o.app.screen
        assert isinstance(screen, RunScreen) and screen.run_id == BEST
        await until(o.pilot, lambda: screen.charts.view.compare == (SECOND,), "the other one beside it")


@pytest.mark.slow
async def test_a_run_opens_and_smoothing_grouping_and_metric_are_chosen_by_key_list_and_command(
    workspace: OutputDir,
) -> None:
    async with opened(workspace) as o:
        await o.choose(OTHER)
        await o.pilot.press("enter")
        await until(o.pilot, lambda: isinstance(o.app.screen, RunScreen), "the run's screen")
        assert isinstance(o.app.screen, RunScreen) and o.app.screen.run_id == OTHER
        await o.pilot.press("escape")
        await until(o.pilot, lambda: isinstance(o.app.screen, CompareScreen), "the runs compared")
        before = o.screen.request.view.smoothing
        seen = []
        for _ in SMOOTHINGS:
            await o.pilot.press("s")
            seen.append(o.screen.request.view.smoothing)
        assert seen[-1] == before and set(seen) == set(SMOOTHINGS)
        await command(o.pilot, "metric entr")
        await o.sees("entropy")
        assert o.screen.request.metric == "entropy", "by a part of its name"
        await command(o.pilot, "metric no-such")
        await o.told("metric 'no-such' not found")
        await command(o.pilot, "group r")
        await o.told("grouping 'r' is ambiguous")
        await o.pick("b", "optim.lr")
        await o.sees("by optim.lr")
        await o.pick("m", "grad_norm")
        await o.sees("grad_norm")
        assert o.screen.request.metric == "grad_norm" and o.screen.chart.border_title is not None
        await o.pick("m", "")
        assert o.screen.request.metric == "grad_norm", "escape changes nothing"
        await o.pilot.press("b", *"zz")
        await o.sees("nothing matches")


@pytest.mark.slow
async def test_a_filter_narrows_and_escape_takes_it_away_before_it_leaves(workspace: OutputDir) -> None:
    async with opened(workspace) as o:
        everything = o.runs
        await o.filter("tag:high")
        await o.shows({BEST, SECOND})
        assert o.screen.list.has_focus
        await o.pilot.press("escape")
        await o.shows(everything)
        assert not o.screen.filter_bar.has_class("-open")
        await o.filter("")
        assert not o.screen.filter_bar.has_class("-open"), "an empty one closes"
        await command(o.pilot, "filter tag:low")
        await o.shows({OTHER})
        await o.pilot.press("escape")
        await o.pilot.press("escape")
        await until(o.pilot, lambda: isinstance(o.app.screen, RunsScreen), "home")


@pytest.mark.slow
async def test_it_begins_with_the_filter_of_the_home_screen(workspace: OutputDir) -> None:
    async with opened(workspace, filtered="tag:high") as o:
        await o.shows({BEST, SECOND})
        assert o.screen.filter_bar.input.value == "tag:high" and o.screen.list.has_focus


@pytest.mark.slow
async def test_a_run_that_comes_and_one_whose_folder_goes_change_the_list(workspace: OutputDir) -> None:
    async with opened(workspace) as o:
        add_run(workspace, "run_late", step=5, status={"state": "running"})
        o.app.watcher.wake()
        await until(o.pilot, lambda: "run_late" in o.runs, "the new run")
        evicted = RunDir(workspace.path / OTHER)
        evicted.path.rename(workspace.path / "gone")
        o.app.watcher.wake()
        await until(o.pilot, lambda: OTHER not in o.runs, "the removed run to go")


async def test_a_sweep_of_six_is_told_apart_at_80_columns(tmp_path: Path) -> None:
    """In the table, in the legend of the chart, and by columns: first what was swept, whatever else differs more."""
    output, planned = OutputDir(tmp_path), []
    envs = {("5e-4", 1): "sort-letters"}
    for lr in ("5e-4", "2e-3"):
        for seed in (1, 2, 3):
            toml = orch_toml(lr=float(lr), env=envs.get((lr, seed), "reverse-text"))
            run_id = f"run_sweep-lr{lr}-seed{seed}"
            toml = toml.replace("interval = 10", f"interval = {seed}").replace(
                "warmup_steps = 5", f"warmup_steps = {seed}"
            )
            add_run(output, run_id, step=20, seed=seed, toml=toml, status={"state": "running"})
            planned.append(SweepRun(run_id, {"optim.lr": float(lr)}))
    output.sweep("lrs").parent.mkdir()
    output.sweep("lrs").write_bytes(msgspec.json.encode(SweepPlan("lrs", "base.toml", planned)))
    async with opened_app(tmp_path, size=(80, 24)) as (app, pilot):
        words = [f"lr{lr}-seed{seed}" for lr in ("5e-4", "2e-3") for seed in (1, 2, 3)]
        home = Opened(app, pilot)
        await home.sees("SEEN", *(f"ru…{each}" for each in words))
        await command(pilot, "compare")
        await home.sees("RESULT  LR      ", *(f"━ lr{each[2]}e…eed{each[-1]}" for each in words))


async def test_slash_begins_with_an_empty_line(workspace: OutputDir) -> None:
    async with opened_app(workspace) as (app, pilot):

        def typed() -> str | None:
            return app.focused.value if isinstance(app.focused, Input) else None

        async def begins_empty() -> None:
            for text in "hl":
                await pilot.press("slash")
                await until(pilot, lambda: typed() is not None, "the line")
                assert typed() == ""
                await pilot.press(*text)
                await until(pilot, lambda text=text: typed() == text, f"{text} alone")
                await pilot.press("enter")

        await begins_empty()
        await command(pilot, "compare")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen), "compare")
        await begins_empty()
        app.call_next(app.open_run, BEST)
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and "charts" in app.screen.shown, "the run")
        screen = app.screen
        assert isinstance(screen, RunScreen)
        for place in ("rollouts", "logs"):
            await pilot.press(str(TABS.index(place) + 1))
            await until(pilot, lambda place=place: place in screen.shown, place)
            await begins_empty()
