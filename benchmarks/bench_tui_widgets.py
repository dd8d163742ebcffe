"""What we wrote ourselves beside what there is: tables, lists, logs and charts.

CPU time is counted, until everything is drawn, in a terminal that is not there (headless), of both in turn.

- The runs' table and Textual's `DataTable` get the same 1,000 rows: a look changes one cell in each of 100 rows (of
  `DataTable` only those cells are updated), a key moves the cursor.
- `LineList` and Textual's `OptionList` get the same 1,000 lines: a look changes 100 of them (of `OptionList` only those
  are replaced), a key moves the cursor.
- `LogRows` and Textual's `Log`, which neither wraps nor colours lines, show the end of a log of 100,000 lines, and then
  the page before. `Log` needs all lines of the file; ours are read around the place that is shown.
- The chart and textual-plot get 100,000 points at 120x30, in braille.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from rich.text import Text
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import DataTable, Log, OptionList
from textual_plot import HiResMode, PlotWidget

from daemons.workspace import RunView
from prime_rl.contract.layout import RunDir
from prime_rl.contract.status import RunState
from prime_rl.utils.text import one_line
from tui.app import DARK, add_row_colours, text_styles
from tui.model.levels import Level
from tui.model.snapshot import RunRow
from tui.readers.charts import ChartData, History, thin
from tui.readers.log_reader import LogRequest, LogTabReader
from tui.readers.workspace_metrics import RunTail
from tui.widgets.chart import Chart
from tui.widgets.line_list import LineList
from tui.widgets.log_view import LogRows
from tui.widgets.runs_table import RunsTable, make_cell, plain

SIZE = (200, 50)
NUM_ROWS, NUM_CHANGED = 1000, 100
NUM_LOOKS, NUM_KEYS = 15, 40
NUM_LOG_LINES, NUM_OPENED, NUM_PAGES = 100_000, 5, 20
NUM_POINTS, NUM_CHARTS, CHART_SIZE = 100_000, 7, (120, 30)
NOW = 1.8e9

Act = Callable[[], Awaitable[object]]
Pairs = list[tuple[float, float]]


def run() -> dict[str, float]:
    """Milliseconds of CPU, medians; `ratio_` is ours divided by the other's."""
    found: dict[str, float] = {}
    for measure in (_tables, _lists, _logs, _charts):
        found |= asyncio.run(measure())
    return found


class SideBySide(App[None]):
    """Two widgets, each alone on the screen while it is measured; ours need names of colours."""

    def __init__(self, ours: Widget, other: Widget) -> None:
        super().__init__()
        self.ours, self.other = ours, other
        self.animation_level = "none"

    def compose(self) -> ComposeResult:
        """Put both widgets on the screen."""
        yield self.ours
        yield self.other

    def on_mount(self) -> None:
        """Choose the dark theme of `prl-tui`."""
        self.register_theme(DARK)
        self.theme = DARK.name

    def get_css_variables(self) -> dict[str, str]:
        """Add the colours of rows to the theme's variables, and the console's styles made of them."""
        variables = super().get_css_variables()
        add_row_colours(variables)
        self.console.push_theme(text_styles(variables))
        return variables

    async def cost_ms(self, pilot: Pilot[None], widget: Widget, act: Act) -> float:
        """CPU milliseconds of this process from `act` until `widget`, alone on the screen, is drawn."""
        self.ours.display, self.other.display = widget is self.ours, widget is self.other
        widget.focus()
        for _ in range(3):  # until the other picture is drawn
            await pilot.pause()
        began_s = time.process_time()
        await act()
        await pilot.pause()
        return 1000 * (time.process_time() - began_s)

    async def pairs(
        self, pilot: Pilot[None], num: int, ours: Callable[[int], Act], other: Callable[[int], Act]
    ) -> Pairs:
        """Milliseconds of both in each of `num` turns."""
        return [
            (await self.cost_ms(pilot, self.ours, ours(turn)), await self.cost_ms(pilot, self.other, other(turn)))
            for turn in range(num)
        ]

    async def keys(self, pilot: Pilot[None]) -> Pairs:
        """Milliseconds of both for each of `NUM_KEYS` keys that move the cursor down."""
        return await self.pairs(
            pilot, NUM_KEYS, lambda _: lambda: pilot.press("j"), lambda _: lambda: pilot.press("down")
        )


def at_once(call: Callable[[], object]) -> Act:
    async def act() -> None:
        call()

    return act


def _compared(other_name: str, name: str, pairs: Pairs) -> dict[str, float]:
    own, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {f"{name}_ms": own, f"{other_name}{name}_ms": other, f"ratio_{name}": own / other}


async def _tables() -> dict[str, float]:
    rows, ours = [make_row(number) for number in range(NUM_ROWS)], RunsTable()
    other: DataTable[str] = DataTable(cursor_type="row")
    app = SideBySide(ours, other)

    def look(turn: int) -> Act:
        return at_once(lambda: ours.show([*changed(turn), *rows[NUM_CHANGED:]], NOW))

    def changed(turn: int) -> list[RunRow]:
        return [replace(row, loss=-0.02 - 0.01 * turn) for row in rows[:NUM_CHANGED]]

    def update(turn: int) -> Act:
        def call() -> None:
            for row in changed(turn):
                other.update_cell(row.run_id, "loss", f"{row.loss:.3f}")

        return at_once(call)

    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        ours.show(rows, NOW)
        other.add_columns(*((column.label, column.key) for column in ours._layout))
        for row in rows:
            other.add_row(*(plain(make_cell(column, row, NOW)) for column in ours._layout), key=row.run_id)
        looks, keys = await app.pairs(pilot, NUM_LOOKS, look, update), await app.keys(pilot)
    return _compared("datatable_", "table_look", looks) | _compared("datatable_", "table_key", keys)


async def _lists() -> dict[str, float]:
    ours, other, shown = LineList[int](), OptionList(), range(NUM_ROWS)
    app = SideBySide(ours, other)
    ours.styles.height = other.styles.height = "1fr"

    def line(index: int, turn: int) -> Text:
        return Text.assemble((f" {index:>5}  ", "bold"), f"{turn if index < NUM_CHANGED else 0} words of this line")

    def look(turn: int) -> Act:
        return at_once(lambda: ours.show(shown, lambda index: line(index, turn)))

    def update(turn: int) -> Act:
        def call() -> None:
            for index in range(NUM_CHANGED):
                other.replace_option_prompt_at_index(index, line(index, turn))

        return at_once(call)

    async with app.run_test(size=SIZE) as pilot:
        ours.show(shown, lambda index: line(index, 0))
        other.add_options([line(index, 0) for index in shown])
        looks, keys = await app.pairs(pilot, NUM_LOOKS, look, update), await app.keys(pilot)
    return _compared("optionlist_", "list_look", looks) | _compared("optionlist_", "list_key", keys)


async def _logs() -> dict[str, float]:
    ours, other = LogRows(), Log()
    app = SideBySide(ours, other)
    with tempfile.TemporaryDirectory() as folder:
        log = RunDir(Path(folder) / "run_a").log
        log.parent.mkdir(parents=True)
        log.write_text(
            "".join(
                f"2026-11-23T10:00:{number % 60:02}.125Z INFO orchestrator: step {number}: reward 0.5, 12,345 tokens\n"
                for number in range(NUM_LOG_LINES)
            ),
            encoding="utf-8",
        )

        def open_ours() -> None:
            data, _ = LogTabReader(Path(folder), "run_a").read(LogRequest())
            assert data is not None
            ours.show(data.slice.lines)
            ours.go_to_end()

        def open_other() -> None:
            other.clear()
            other.write_lines(log.read_text(encoding="utf-8").splitlines())

        def page(show: Callable[[], object]) -> Callable[[int], Act]:
            return lambda _: at_once(show)

        async with app.run_test(size=SIZE) as pilot:
            opened = await app.pairs(pilot, NUM_OPENED, page(open_ours), page(open_other))
            pages = await app.pairs(
                pilot,
                NUM_PAGES,
                page(lambda: ours.scroll_rows(-SIZE[1])),
                page(lambda: other.scroll_page_up(animate=False)),
            )
    return _compared("log_", "log_open", opened) | _compared("log_", "log_page", pages)


async def _charts() -> dict[str, float]:
    """From 100,000 points to one line on 120x30 cells, in braille."""
    steps = [float(step) for step in range(1, NUM_POINTS + 1)]
    values = [math.sin(step / 9000) + math.sin(step) / 9 for step in steps]
    history = History(NUM_POINTS)
    history.extend(steps, values)
    chart, plot = Chart("reward/mean"), PlotWidget()

    def ours(turn: int) -> Act:
        shown, num_columns = (1.0, NUM_POINTS - float(turn)), 2 * CHART_SIZE[0]

        def call() -> None:
            chart.show(ChartData((thin("", history, history.values, shown, num_columns),), shown, num_columns))

        return at_once(call)

    def other(turn: int) -> Act:
        def call() -> None:
            plot.clear()
            plot.plot(steps[: NUM_POINTS - turn], values[: NUM_POINTS - turn], hires_mode=HiResMode.BRAILLE)

        return at_once(call)

    app = SideBySide(chart, plot)
    async with app.run_test(size=CHART_SIZE) as pilot:
        for widget in (chart, plot):
            widget.styles.width, widget.styles.height = CHART_SIZE
        return _compared("textual_plot_", "chart_100k", await app.pairs(pilot, NUM_CHARTS, ours, other))


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
