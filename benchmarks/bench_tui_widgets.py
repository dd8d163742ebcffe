"""What we wrote ourselves beside what there is: the runs' table and Textual's `DataTable`, the chart and textual-plot.

CPU time is counted, until everything is drawn, in a terminal that is not there (headless), of both in turn. The tables
get the same 1,000 rows at 200x50: a look changes one cell in each of 100 rows (of `DataTable` only those cells are
updated), a key moves the cursor. The charts get 100,000 points at 120x30, in braille. textual-plot is no dependency:
without it the charts are left out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from textual.app import App, ComposeResult
from textual.widget import Widget
from textual.widgets import DataTable

from daemons.workspace import RunView
from prime_rl.contract.status import RunState
from prime_rl.utils.text import one_line
from tui.model.levels import Level
from tui.model.snapshot import RunRow
from tui.readers.charts import ChartData, thin
from tui.readers.history import History
from tui.readers.workspace_metrics import RunTail
from tui.themes import DARK, add_row_colours, text_styles
from tui.widgets.chart import Chart
from tui.widgets.columns import make_cell, plain
from tui.widgets.runs_table import RunsTable

SIZE = (200, 50)
NUM_ROWS, NUM_CHANGED = 1000, 100
NUM_LOOKS, NUM_KEYS = 15, 40
NUM_POINTS, NUM_CHARTS, CHART_SIZE = 100_000, 7, (120, 30)
NOW = 1.8e9


def run() -> dict[str, float]:
    """Milliseconds of CPU, medians; `ratio_` is ours divided by the other's."""
    found = asyncio.run(_measure())
    if importlib.util.find_spec("textual_plot") is None:
        print("bench: no textual-plot: pip install textual-plot to compare the chart with it", file=sys.stderr)
        return found
    return found | asyncio.run(_measure_charts())


class ChartBench(App[None]):
    def __init__(self) -> None:
        super().__init__()
        from textual_plot import PlotWidget

        self.ours = Chart("reward/mean")
        self.other = PlotWidget()

    def compose(self) -> ComposeResult:
        yield self.ours
        yield self.other

    def get_css_variables(self) -> dict[str, str]:
        variables = super().get_css_variables()
        self.console.push_theme(text_styles(variables))
        return variables


async def _measure_charts() -> dict[str, float]:
    """From 100,000 points to one line on 120x30 cells, in braille."""
    from textual_plot import HiResMode

    steps = [float(step) for step in range(1, NUM_POINTS + 1)]
    values, app = [math.sin(step / 9000) + math.sin(step) / 9 for step in steps], ChartBench()
    history = History(NUM_POINTS)
    history.extend(steps, values)
    async with app.run_test(size=CHART_SIZE) as pilot:
        for widget in (app.ours, app.other):
            widget.styles.width, widget.styles.height = CHART_SIZE

        async def ours(turn: int) -> None:
            shown = (1.0, NUM_POINTS - float(turn))
            num_columns = 2 * CHART_SIZE[0]
            curve = thin("", history, history.values, shown, num_columns)
            app.ours.show(ChartData((curve,), shown, num_columns))

        async def other(turn: int) -> None:
            app.other.clear()
            app.other.plot(steps[: NUM_POINTS - turn], values[: NUM_POINTS - turn], hires_mode=HiResMode.BRAILLE)

        async def cost_ms(widget: Widget, act: Awaitable[None]) -> float:
            app.ours.display, app.other.display = widget is app.ours, widget is app.other
            await pilot.pause()
            began_s = time.process_time()
            await act
            await pilot.pause()
            return 1000 * (time.process_time() - began_s)

        pairs = []
        for turn in range(NUM_CHARTS):
            own = await cost_ms(app.ours, ours(turn))
            pairs.append((own, await cost_ms(app.other, other(turn))))
    return _compared("textual_plot_", "chart_100k", pairs)


class Bench(App[None]):
    """Both tables need names of colours; each is alone on the screen while it is measured."""

    def __init__(self, rows: list[RunRow]) -> None:
        super().__init__()
        self.rows = rows
        self.ours = RunsTable()
        self.other: DataTable[str] = DataTable(cursor_type="row")

    def compose(self) -> ComposeResult:
        yield self.ours
        yield self.other

    def on_mount(self) -> None:
        self.register_theme(DARK)
        self.theme = DARK.name

    def get_css_variables(self) -> dict[str, str]:
        variables = super().get_css_variables()
        add_row_colours(variables)
        self.console.push_theme(text_styles(variables))
        return variables

    def fill(self) -> None:
        self.ours.show(self.rows, NOW)
        columns = self.ours._layout
        self.other.add_columns(*((column.label, column.key) for column in columns))
        for row in self.rows:
            self.other.add_row(*(plain(make_cell(column, row, NOW)) for column in columns), key=row.run_id)


def make_rows() -> list[RunRow]:
    return [make_row(number) for number in range(NUM_ROWS)]


def make_row(number: int) -> RunRow:
    run_id, rewards = f"run_{number:04d}", tuple((number * step % 97) / 97 for step in range(64))
    view = RunView(
        run_id=run_id,
        state=RunState.ACTIVE,
        step=number,
        max_steps=4000,
        reward=0.5,
        reason=None,
        waiting_on=None,
        updated_at=NOW,
        run_idx=number,
        queue_position=None,
        tokens_per_s=1700.0,
        async_level=1,
        policy_version=number,
        lr=1e-3,
        bottleneck=None,
        model=None,
        batch_size=64,
        num_restarts=0,
        added_at=NOW - 3600,
    )
    return RunRow(
        run_id=run_id,
        order=number,
        state=RunState.ACTIVE,
        symbol="▶",
        level=Level.GOOD,
        step=number,
        max_steps=4000,
        reward=rewards[-1],
        reward_change=0.125,
        loss=-0.01,
        tokens_per_s=1700.0,
        lag=1,
        note=one_line(""),
        reason=None,
        updated_at=NOW,
        view=view,
        tail=RunTail(rewards=rewards),
    )


async def _measure() -> dict[str, float]:
    app = Bench(make_rows())
    app.animation_level = "none"
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        app.fill()

        async def cost_ms(widget: RunsTable | DataTable[str], act: Callable[[], Awaitable[object]]) -> float:
            app.ours.display, app.other.display = widget is app.ours, widget is app.other
            widget.focus()
            await pilot.pause()
            began_s = time.process_time()
            await act()
            await pilot.pause()
            return 1000 * (time.process_time() - began_s)

        looks, keys = [], []
        for turn in range(NUM_LOOKS):
            ours = await cost_ms(app.ours, _look(app, turn))
            looks.append((ours, await cost_ms(app.other, _update(app, turn))))
        for _ in range(NUM_KEYS):
            ours = await cost_ms(app.ours, lambda: pilot.press("j"))
            keys.append((ours, await cost_ms(app.other, lambda: pilot.press("down"))))
    return _compared("datatable_", "table_look", looks) | _compared("datatable_", "table_key", keys)


def _compared(other_name: str, name: str, pairs: list[tuple[float, float]]) -> dict[str, float]:
    own, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {f"{name}_ms": own, f"{other_name}{name}_ms": other, f"ratio_{name}": own / other}


def _look(app: Bench, turn: int) -> Callable[[], Awaitable[None]]:
    async def act() -> None:
        rows = list(app.rows)
        for index in range(NUM_CHANGED):
            rows[index] = replace(rows[index], loss=-0.02 - 0.01 * turn)
        app.ours.show(rows, NOW)

    return act


def _update(app: Bench, turn: int) -> Callable[[], Awaitable[None]]:
    async def act() -> None:
        for row in app.rows[:NUM_CHANGED]:
            app.other.update_cell(row.run_id, "loss", f"{-0.02 - 0.01 * turn:.3f}")

    return act
