"""The run screen in a real app over a workspace on disk: tabs, charts, and what a file may do meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from textual.content import Content
from textual.events import DescendantFocus, MouseScrollDown, MouseScrollUp
from textual.widgets import Static

from prime_rl.configs.admitted import apply, read_effect, write_admitted
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunStatus, read_status
from tests.tui_run_support import RUN, SIZE, Opened, opened_run
from tests.tui_support import add_history, build_workspace, metrics_lines, opened_app, screen_text, until, write_status
from tui.readers.charts import SMOOTHINGS
from tui.readers.tabs import TABS
from tui.screens.compare import PickRuns
from tui.screens.run import RunScreen
from tui.screens.runs import RunsScreen
from tui.widgets.chart import Chart


@pytest.fixture
def workspace(tmp_path: Path) -> OutputDir:
    return build_workspace(tmp_path / "workspace")


def drawn(chart: Chart) -> str:
    """What is in the frame of a chart, without colours."""
    return "\n".join(chart.render_line(y).text for y in range(chart.size.height))


def title(chart: Chart) -> str:
    return Content.from_markup(str(chart.border_title)).plain


@pytest.mark.slow
async def test_tabs_by_number_letter_and_arrow(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        for number, name in enumerate(TABS, start=1):
            await o.press(str(number))
            assert o.screen.tab == name
        for key, name in (
            ("tab", "chat"), ("tab", "charts"), ("shift+tab", "chat"), ("shift+tab", "events"),
            ("left_square_bracket", "checkpoints"), ("right_square_bracket", "events"),
            ("tab", "chat"), ("tab", "charts"),
        ):  # fmt: skip
            await o.press(key)
            assert o.screen.tab == name, key
        assert o.screen.charts.has_focus


@pytest.mark.slow
async def test_a_tab_is_opened_that_is_asked_for_while_they_are_made_or_before_a_late_focus(
    workspace: OutputDir,
) -> None:
    async with opened_run(workspace.path) as o:
        before = o.screen.charts
        o.screen.action_tab(TABS.index("checkpoints"))
        await o.until(lambda: "checkpoints" in o.screen.shown, "the tab")
        before.post_message(DescendantFocus(before))
        await o.pilot.pause()
        assert o.screen.tab == "checkpoints", "the tab before does not come back"
        o.app.open_run(RUN)
        screen = o.app.screen
        assert isinstance(screen, RunScreen) and screen is not o.screen
        screen.action_tab(TABS.index("checkpoints"))
        await o.until(lambda: "checkpoints" in screen.shown, "the tab")
        await o.pilot.pause()
        assert screen.tab == "checkpoints" and "charts" not in screen.shown


async def test_only_the_open_tab_is_read(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        assert o.screen.shown == {"charts"}
        await o.tab("config")
        assert o.screen.shown == {"charts", "config"}


@pytest.mark.slow
async def test_escape_and_q_lead_back(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        await o.press("escape")
        await o.until(lambda: isinstance(o.app.screen, RunsScreen), "home")
        o.app.call_next(o.app.open_run, RUN)
        await o.until(lambda: isinstance(o.app.screen, RunScreen), "the run again")
        await o.press("q")
        await o.until(lambda: isinstance(o.app.screen, RunsScreen), "home")


@pytest.mark.slow
async def test_all_charts_have_room_on_a_large_screen_and_obey_cursor_and_mouse(workspace: OutputDir) -> None:
    """The cursor shows the values of one step in every chart; the mouse points, chooses and maximises."""
    async with opened_run(workspace.path, size=(200, 50)) as o:
        charts, grid = o.screen.charts.charts, o.screen.charts.grid
        with_values = [title(chart).split("  ")[0] for chart in charts if chart.data.has_values]
        assert with_values == [
            "reward", "loss", "entropy", "mismatch KL", "grad norm", "learning rate", "lengths", "lag", "step time, s",
            "trainer time, s", "tokens/s generated",
        ]  # fmt: skip
        assert [title(chart) for chart in charts if not chart.display] == [
            "KL to the teacher",
            "loss of texts",
            "tokens right",
            "epoch",
        ]
        charts = [chart for chart in charts if chart.display]
        await o.until(lambda: len({chart.region.y for chart in charts}) == 4, "four rows of three")
        await o.until(lambda: all(grid.region.contains_region(chart.region) for chart in charts), "room for all")
        await o.sees("█ gener… ", "▓ envir… ", "▒ policy ")
        view = o.screen.charts
        reward, loss = view.charts[:2]
        await o.press("l")
        assert "at 1" in title(reward) and "at 1" in title(loss)
        assert "│" in drawn(reward)
        await o.press("right", "l", "shift+right", "left", "shift+left", "shift+right", "shift+left")
        assert view.cursor == 2
        curve = reward.data.curves[0]
        step = curve.at(2)
        assert step is not None and f"{curve.values[step]:.3f}" in title(reward)
        await o.sees("at step 2")
        await o.press("escape")
        assert view.cursor is None and "at" not in title(reward) and o.app.screen is o.screen
        await o.press("h")
        assert view.cursor == 42, "from the right end"
        await o.press("escape")
        assert view.cursor is None
        chart = view.charts[1]
        await o.pilot.hover(chart, offset=(40, 5))
        await o.until(lambda: view.cursor is not None, "the cursor under the mouse")
        assert "at " in title(view.charts[0])
        await o.pilot.click(chart, offset=(40, 5))
        assert view.chosen == 1 and chart.has_class("-chosen")
        await o.pilot.click(chart, offset=(40, 5), times=2)
        await o.until(lambda: view.is_maximised, "the chart maximised")
        assert [each for each in view.charts if each.display] == [chart]


@pytest.mark.slow
async def test_charts_on_a_small_screen_come_four_at_a_time(workspace: OutputDir) -> None:
    async with opened_run(workspace.path, size=(80, 24)) as o:
        view = o.screen.charts

        def seen() -> list[int]:
            return [i for i, chart in enumerate(shown()) if view.grid.region.contains_region(chart.region)]

        def shown() -> list[Chart]:
            return [chart for chart in view.charts if chart.display]

        def chosen() -> int:
            return shown().index(view.charts[view.chosen])

        await o.until(lambda: seen() == [0, 1, 2, 3], "the first four")
        await o.press("space")
        await o.until(lambda: seen() == [4, 5, 6, 7], "the next four")
        await o.press("pageup")
        await o.until(lambda: seen() == [0, 1, 2, 3], "the first four again")
        await o.press(*"jjjjj")
        await o.until(lambda: chosen() == 5 and 5 in seen(), "the sixth, chosen and in sight")
        await o.press("k", "up", "down")
        assert chosen() == 4


@pytest.mark.slow
async def test_charts_grow_while_open(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        with RunDir(workspace.path / RUN).orchestrator_metrics.open("a") as file:
            file.write('{"step": 43, "reward/mean": 0.123}\n')
        await o.until(lambda: "0.123" in title(o.screen.charts.charts[0]), "the new point")


@pytest.mark.slow
async def test_one_chart_is_maximised_and_finer(workspace: OutputDir) -> None:
    async with opened_run(workspace.path, size=(120, 40)) as o:
        view = o.screen.charts
        await o.press("m")
        await o.until(lambda: view.charts[0].data.num_columns > 200, "a curve for the whole width")
        assert view.charts[0].size.width > 110
        await o.press("j")
        assert [chart.display for chart in view.charts[:2]] == [False, True]
        await o.press("enter")
        assert sum(chart.display for chart in view.charts) == 12 and not view.is_maximised
        await o.press("m", "escape")
        assert not view.is_maximised and o.app.screen is o.screen


@pytest.mark.slow
async def test_zoom_pan_and_following(workspace: OutputDir) -> None:
    async with opened_run(workspace.path) as o:
        view, reward = o.screen.charts, o.screen.charts.charts[0]

        async def shows(first: float, last: float) -> None:
            await o.until(lambda: reward.data.window == (first, last), f"steps {first} to {last}")

        await shows(1, 42)
        await o.press("plus")
        await shows(21.5, 42)
        await o.sees("following")
        with RunDir(workspace.path / RUN).orchestrator_metrics.open("a") as file:
            file.write('{"step": 46, "reward/mean": 0.5}\n')
        await shows(25.5, 46)
        await o.press("less_than_sign", "comma")
        await shows(15.25, 35.75)
        await o.press("greater_than_sign")
        await shows(20.375, 40.875)
        await o.press("full_stop", "full_stop")
        await shows(25.5, 46)
        assert view.view.end is None
        await o.press("minus")
        await shows(5, 46)
        await o.press("minus")
        await shows(1, 46)
        await o.press("equals_sign", "0")
        await shows(1, 46)
        await o.press("m")
        await o.pilot.hover(reward, offset=(30, 5))
        reward.post_message(MouseScrollUp(reward, 30, 5, 0, -1, 0, False, False, False))
        await o.until(lambda: reward.data.window[1] - reward.data.window[0] == 22.5, "a zoom around the cursor")
        reward.post_message(MouseScrollDown(reward, 30, 5, 0, 1, 0, False, False, False))
        await shows(1, 46)


@pytest.mark.slow
async def test_scale_smoothing_and_stacks(workspace: OutputDir) -> None:
    async with opened_run(workspace.path, size=(200, 50)) as o:
        charts = o.screen.charts.charts
        reward, split = charts[0], next(chart for chart in charts if "step time" in title(chart))
        linear = drawn(reward)
        await o.press("y")
        await o.until(lambda: reward.data.is_log and drawn(reward) != linear, "a logarithmic scale")
        await o.sees("log · not smoothed")
        await o.press("y")
        for factor in (*SMOOTHINGS[1:], 0.0):
            await o.press("s")
            await o.until(lambda f=factor: len(reward.data.curves) == (2 if f else 1), f"smoothing {factor}")
            await o.sees(f"EMA {factor:g}" if factor else "linear · not smoothed")
        assert any(shade in drawn(split) for shade in "█▓")
        await o.press("t")
        await o.until(lambda: not split.data.is_stacked, "lines")
        assert not any(shade in drawn(split) for shade in "█▓▒")


async def pick(o: Opened, *keys: str) -> None:
    """Press `keys` in the list of runs to compare with."""
    await o.press("w")
    await o.until(lambda: isinstance(o.app.screen, PickRuns), "the picker")
    await o.press(*keys)


@pytest.mark.slow
async def test_other_runs_in_the_same_charts(workspace: OutputDir) -> None:
    async with opened_run(workspace.path, size=(200, 50)) as o:
        view = o.screen.charts
        await pick(o, *"run_", "down", "up", "tab", "tab", "enter")
        await o.until(lambda: len(view.charts[0].data.curves) == 3, "three curves")
        assert [curve.name for curve in view.charts[0].data.curves] == [RUN, *view.view.compare]
        await o.sees(*view.view.compare)
        assert len({curve.colour for curve in view.charts[0].data.curves}) == 3
        await pick(o, "tab")
        await o.press("up", "up")
        await o.press("escape")
        assert len(view.view.compare) == 2, "escape changes nothing"
        await pick(o, *view.view.compare[0], "tab", "enter")
        await o.until(lambda: len(view.charts[0].data.curves) == 2, "two curves")
        await pick(o, *view.view.compare[0], "tab", "enter")
        await o.until(lambda: len(view.charts[0].data.curves) == 1, "its own curve only")
        await pick(o, *"sort", "enter")
        await o.until(lambda: view.view.compare == ("run_sort-rank16",), "the one under the cursor")


@pytest.mark.slow
async def test_a_long_history_is_thinned_and_its_spikes_stay(workspace: OutputDir) -> None:
    lines, _ = metrics_lines(20_000, seed=1)
    lines[12_345] = '{"step": 12346, "reward/mean": 9.5}'
    RunDir(workspace.path / RUN).orchestrator_metrics.write_text("\n".join(lines) + "\n")
    async with opened_run(workspace.path) as o:
        reward = o.screen.charts.charts[0]
        await o.until(lambda: reward.data.window[1] == 20_000, "all steps")
        curve = reward.data.curves[0]
        assert len(curve.xs) <= reward.data.num_columns <= 2 * SIZE[0]
        assert max(curve.highs) == 9.5


@pytest.mark.slow
async def test_the_run_that_is_open_may_vanish(workspace: OutputDir) -> None:
    async with opened_run(workspace.path, "run_done") as o:
        os.rename(workspace.path / "run_done", workspace.path / ".gone")
        banner = o.screen.query_one("#banner", Static)
        await o.until(lambda: "was removed from the workspace" in str(banner.render()), "the banner")
        await o.press(*"123456", "escape")
        await o.until(lambda: isinstance(o.app.screen, RunsScreen), "home")


async def see(o: Opened, tab: str, *words: str) -> None:
    await o.tab(tab)
    await o.sees(*words)


async def test_an_invalid_run_shows_its_error_at_its_line(workspace: OutputDir) -> None:
    async with opened_run(workspace.path, "run_typo") as o:
        await see(o, "config", "learning_rate")
        error = o.screen.config.query_one("#config-error", Static)
        assert "unknown key" in str(error.render()) and o.screen.config.has_class("-invalid")
        text = str(o.screen.config.query_one("#config-text", Static).render())
        marked = [line for line in text.splitlines() if line.startswith("▶")]
        assert len(marked) == 1 and "learning_rate" in marked[0]


async def test_an_edit_that_is_not_in_effect_is_told_once(workspace: OutputDir) -> None:
    run = RunDir(workspace.path / RUN)
    write_admitted(run, read_effect(run), 0)
    run.orch_toml.write_text(run.orch_toml.read_text().replace("rank = 8", "rank = 4"))
    async with opened_run(workspace.path) as o:
        for tab in ("charts", "config"):
            await see(o, tab, "edited, not in effect")
            await o.until(lambda: screen_text(o.app).count("not in effect") == 1, f"one of it on {tab}")


async def test_what_a_text_has_no_room_for_is_told_by_an_ellipsis(workspace: OutputDir) -> None:
    run = RunDir(workspace.path / RUN)
    status = read_status(run.status, RunStatus)
    assert status is not None
    status.problem = "env x: " + "every rollout was dropped " * 20
    write_status(run.status, status, updated_at=status.updated_at)
    async with opened_app(workspace.path, size=(80, 24)) as (app, pilot):
        lines = screen_text(app).splitlines()
        name = next(number for number, line in enumerate(lines) if line.startswith(f" {RUN}"))
        assert lines[name + 1].startswith(" env x: every") and lines[name + 2].rstrip().endswith("…")
        app.open_run(RUN)
        opened = f"▌ {status.problem[:60]}"
        await until(pilot, lambda: screen_text(app).splitlines()[2].startswith(opened), "the banner")
        lines = screen_text(app).splitlines()
        assert [line.rstrip().endswith("…") for line in lines[2:6]] == [False] * 3 + [True] and "▌" not in lines[6]


async def test_the_config_tab_tells_what_the_config_was(workspace: OutputDir) -> None:
    run = RunDir(workspace.path / RUN)
    write_admitted(run, read_effect(run), 0)
    apply(run, run.orch_toml.read_text().replace("rank = 8", "rank = 4"))
    write_admitted(run, read_effect(run), 10)
    async with opened_run(workspace.path) as o:
        await see(o, "config", "after step 10: model.lora.rank 8 -> 4")


@pytest.mark.slow
async def test_config_with_defaults_and_differences(workspace: OutputDir) -> None:
    async with opened_run(workspace.path, size=(120, 40)) as o:
        await see(o, "config", "batch_size = 64")
        await o.press("v")
        await o.sees("keys are set in orch.toml", "max_async_level", "filter_zero_advantage")
        await o.press("escape")
        await o.sees("batch_size = 64")
        await pick(o, *"upper", "enter")
        await o.sees("keys differ", "max_steps", "100", "500", "upper-case")
        assert "batch_size" not in screen_text(o.app)
        await o.press("w")
        await o.sees("batch_size = 64")
        await pick(o, *"typo", "enter")
        await o.sees("learning_rate", "high")
        await o.press("escape", "escape")
        await o.until(lambda: isinstance(o.app.screen, RunsScreen), "home")


@pytest.mark.slow
async def test_rollouts_in_every_order_turn_by_turn(workspace: OutputDir) -> None:
    add_history(workspace, RUN)
    async with opened_run(workspace.path) as o:
        await see(o, "rollouts", "60, newest first", "Reverse: word30", "30drow", "reverse-text/train-30")
        view = o.screen.rollouts
        await o.press("n")
        await o.sees("policy 1 of 3", "is it 5?", "environment 2 of 3", "lower", "policy 3 of 3", "v28 v29")
        await o.press("N", "j", "p", "G")
        assert view.selected is not None and view.selected.step == 1
        await o.press("g", "o")
        await o.sees("highest reward first")
        assert view.selected.reward == 1.0
        await o.press("o")
        assert view.selected.reward == 0.0
        await o.press("o")
        assert view.selected.advantage == 0.75
        await o.press("o", "end")
        assert view.selected.advantage == 0.75
        await o.press("home", "pagedown", "pageup", "space", "b")
        assert view.selected.advantage == -0.75


@pytest.mark.slow
async def test_new_rollouts_come_in_while_one_is_read(workspace: OutputDir) -> None:
    run = add_history(workspace, RUN)
    async with opened_run(workspace.path) as o:
        await see(o, "rollouts", "60, newest first")
        await o.press("j", "j")
        reading = o.screen.rollouts.selected
        with run.samples.open("a") as file:
            file.write(run.samples.read_text().splitlines()[-1].replace('"step": 30', '"step": 31') + "\n")
        await o.sees("61, newest first")
        assert o.screen.rollouts.selected == reading


async def test_checkpoints_newest_first(workspace: OutputDir) -> None:
    add_history(workspace, RUN)
    async with opened_run(workspace.path, size=(120, 30)) as o:
        await see(o, "checkpoints", "4 checkpoints, 11.5 MiB", "◌ partial", "✔ STABLE", "orchestrator trainer")
        assert o.screen.checkpoints.chosen is not None and o.screen.checkpoints.chosen.step == 40
        (line,) = [line for line in screen_text(o.app).splitlines() if "starts here" in line]
        assert " 30 " in line and "30m" in line
        await o.press("j")
        assert o.screen.checkpoints.chosen.step == 30


@pytest.mark.slow
async def test_events_tell_who_did_what_and_why(workspace: OutputDir) -> None:
    add_history(workspace, RUN)
    async with opened_run(workspace.path) as o:
        await see(
            o, "events", "add", "from reverse.toml", "mia@gpu1", "readmit", "tom@gpu1", "admitted", "takes slot 0",
            "restart", "killed by SIGKILL", "started", "pid 4720", "running",
        )  # fmt: skip
        assert "checkpoint of step" not in screen_text(o.app) and "collapsed" not in screen_text(o.app)
        await o.press("g", "G", "j", "k")
    async with opened_run(workspace.path, "run_collapsed") as o:
        await see(o, "events", "the reward collapsed", "after step 25; see the curves", "evicted")


async def test_a_run_is_rolled_back_to_the_chosen_checkpoint(workspace: OutputDir) -> None:
    run = add_history(workspace, "run_collapsed")
    run.status.unlink()  # it names the process of this test, which lives
    async with opened_run(workspace.path, "run_collapsed") as o:
        await see(o, "checkpoints", "◌ partial")
        assert not o.screen.check_action("rollback", ()), "step 40 is not complete"
        await o.press("enter")
        assert o.app.screen is o.screen
        await o.press("j", "j")
        await o.sees("Roll back")
        await o.press("enter")
        await o.sees("roll back run_collapsed", "to step 20", "Everything it made")
        await o.press("enter")
        await o.sees("rolled back to step 20", "prl runs rollback run_collapsed --step 20")
        assert "resume_step = 20" in run.orch_toml.read_text() and not run.evicted.exists()
        await o.press("1")
        assert o.screen.check_action("rollback", ()) is False


@pytest.mark.slow
async def test_read_only_offers_no_rollback(workspace: OutputDir) -> None:
    add_history(workspace, RUN)
    before = {path: path.read_bytes() for path in workspace.path.rglob("*") if path.is_file()}
    async with opened_run(workspace.path, read_only=True) as o:
        await see(o, "checkpoints", "✔ STABLE")
        await o.press("j", "enter")
        assert o.app.screen is o.screen and "Roll back" not in screen_text(o.app)
        for tab in TABS:
            await o.tab(tab)
            assert "rollback" not in {each.binding.action for each in o.screen.active_bindings.values()}
    assert {path: path.read_bytes() for path in workspace.path.rglob("*") if path.is_file()} == before
