"""A chart between two layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.text import Text
from rich.theme import Theme
from textual.app import App, ComposeResult
from textual.geometry import Size

from prime_rl.contract.layout import OutputDir
from tests.budgets import in_full
from tests.tui_run_support import opened_run
from tests.tui_support import add_run, build_workspace, screen_text
from tui.readers.charts import ChartData
from tui.readers.rollouts import RolloutsData
from tui.widgets.chart import Chart
from tui.widgets.line_list import LineList
from tui.widgets.rollouts_view import RolloutsView


async def test_one_that_has_grown_and_was_not_told_yet_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = build_workspace(tmp_path / "lab")
    async with opened_run(output.path) as o:
        chart = o.screen.charts.charts[0]
        chart.point_at(chart.data.window[1])
        for grown in (Size(chart.size.width + 40, chart.size.height + 20), chart.size):
            with monkeypatch.context() as patched:
                patched.setattr(Chart, "size", grown)
                lines = [chart.render_line(y) for y in range(grown.height)]
            assert {line.cell_length for line in lines} == {grown.width}


class Places(App[None]):
    """A chart and a list, as they are before anything is read."""

    def __init__(self) -> None:
        super().__init__()
        self.chart, self.list = Chart("reward"), LineList[str]("no rollouts are kept yet")
        self.rollouts = RolloutsView()
        self.console.push_theme(Theme({"muted": "dim"}))

    def compose(self) -> ComposeResult:
        yield self.chart
        yield self.list
        yield self.rollouts


async def test_what_is_not_read_yet_is_told_apart_from_what_is_not_there() -> None:
    app = Places()
    async with app.run_test(size=(80, 40)):

        def words() -> list[str]:
            lines = [app.chart.render_line(app.chart.size.height // 2)]
            lines += [each.render_line(len(each._heading)) for each in (app.list, app.rollouts.list)]
            return [line.text.strip() for line in lines]

        assert words() == ["reading …"] * 3
        app.chart.show(ChartData(), is_read=False)
        assert words()[0] == "reading …"
        app.chart.show(ChartData())
        app.list.show((), lambda index: Text())
        app.rollouts.show(RolloutsData("run_a"))
        assert words() == ["no values yet", *["no rollouts are kept yet"] * 2]


@pytest.mark.parametrize("size", [(80, 24), *in_full(((200, 50),))])
async def test_the_names_of_six_runs_are_told_whole_or_by_what_differs(tmp_path: Path, size: tuple[int, int]) -> None:
    output = OutputDir(tmp_path)
    run_ids = tuple(f"run_reverse-text-with-a-long-name-lr{lr}-seed{seed}" for lr in (1, 2) for seed in (1, 2, 3))
    for run_id in run_ids:
        add_run(output, run_id, step=20, status={"state": "running"})
    async with opened_run(tmp_path, run_ids[0], size=size) as o:
        o.screen.charts.compare_with(run_ids[1:])
        ends = [run_id[-5:] for run_id in run_ids]

        def line() -> list[str]:
            return [piece.strip() for piece in screen_text(o.app).splitlines()[4].split("━")[1:]]

        await o.until(lambda: [name[-5:] for name in line()] == ends and len(set(line())) == 6, f"six names: {line()}")
