"""Home: all runs of the workspace, the selected one in short, and the keys to everything else.

Below the table is the selected run, with its curves in a tall terminal; without runs, advice takes its place.

What it remembers (order, filter, pins) is in `memory`, the orders and the filter language are in `query`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Static

from prime_rl.contract.status import LOST, RunState
from tui import fmt
from tui.keys import Command, CommandError
from tui.messages import RunChanged
from tui.model.levels import STATE_WORDS
from tui.model.query import DEFAULT_SORT, SORTS, Subject, sort_rows
from tui.model.snapshot import RunRow, Snapshot, budget_words, standing
from tui.readers.charts import ChartData
from tui.readers.machine import Finding
from tui.readers.workspace_metrics import CurvesData, CurvesReader, CurvesRequest
from tui.screens.base import PlaceScreen, Setting, take_words
from tui.watcher import RunWatcher
from tui.widgets.chart import Chart
from tui.widgets.header import FilterBar, budget_text
from tui.widgets.line_list import Clipped
from tui.widgets.runs_table import RunsTable

# The curves of the run before stay for so long: those of the selected one come at once, unless the disk is slow, and
# an empty chart between them would flicker.
CURVES_S = 0.2


def describe(row: RunRow, now: float, num_marked: int = 0) -> Text:
    """A few sentences about one run; the first lines are the ones that matter."""
    colour = row.level.style
    text = Text.assemble((row.run_id, "bold"), "  ", (f"{row.symbol} {row.state}", colour))
    words = STATE_WORDS[row.state]
    if row.state == RunState.FINISHED:
        words = "ended before max_steps" if row.reason else "reached max_steps"
    text.append(f"  {words}", "muted")
    if num_marked:
        text.append(f"  ✓ {num_marked} marked", "accent")
    body = row.reason or row.note
    if row.state == LOST:
        body = row.note
    if body:
        text.append("\n")
        text.append(body, "error" if row.is_bad else "text")
    text.append("\n")
    if (budget := budget_text(row)) is not None:
        text.append_text(budget).append(f" {budget_words(row)} · ", "muted")
    text.append(_figures(row, now), "muted")
    return text


def _figures(row: RunRow, now: float) -> str:
    pieces = [f"step {row.step}" + (f" of {row.max_steps}" if row.max_steps else "")]
    if row.tokens_per_s is not None:
        pieces.append(f"generates {fmt.count(row.tokens_per_s)} tokens/s")
    if row.view.batch_size is not None:
        pieces.append(f"batch {row.view.batch_size}")
    if row.view.lr is not None:
        pieces.append(f"lr {fmt.number(row.view.lr)}")
    pieces += [f"{name} {value}" for name, value in standing(row)]
    if row.updated_at is not None:
        pieces.append(f"seen {fmt.seen_ago(now - row.updated_at)}")
    return " · ".join(pieces)


class Preview(Vertical):
    """The selected run; hidden while there is none."""

    DEFAULT_CSS = """
    Preview {
        height: 4;
        border-top: solid $border;
        background: $surface;
        & > Static { height: 3; padding: 0 1; }
        & > Horizontal { height: 0; }
        &.-tall { height: 45%; }
        &.-tall > Horizontal { height: 1fr; }
    }
    """

    def __init__(self) -> None:
        super().__init__(id="preview")
        self._text = Clipped(markup=False)
        self._run_id = self._drawn_id = ""
        self._reward = Chart("reward", is_reward=True)
        self._loss = Chart("loss", colour="accent")

    def compose(self) -> ComposeResult:
        """Yield the text, and the charts of reward and loss, which have height only in a tall preview."""
        yield self._text
        with Horizontal():
            yield self._reward
            yield self._loss

    def show(self, row: RunRow | None, now: float, num_marked: int = 0) -> None:
        """Describe `row`, or hide for None; charts of another run are emptied if no curves come in CURVES_S."""
        self.display = row is not None
        if row is None:
            return
        text = describe(row, now, num_marked)
        if text != self._text.content:
            self._text.update(text, layout=False)
        if row.run_id != self._run_id:
            self._run_id = row.run_id
            self.set_timer(CURVES_S, self._miss_curves)

    def show_curves(self, curves: CurvesData) -> None:
        """Those of a run that is no longer selected are dropped."""
        if curves.run_id == self._run_id:
            self._drawn_id = curves.run_id
            self._reward.show(curves.reward)
            self._loss.show(curves.loss)

    def _miss_curves(self) -> None:
        if self._drawn_id != self._run_id:
            for chart in (self._reward, self._loss):
                chart.show(ChartData(), is_read=False)


# More than fit into the smallest terminal under the advice.
MAX_FINDINGS = 6


def describe_no_match(needle: str) -> Text:
    """No run matches the filter."""
    return Text.assemble(
        ("no runs match ", "muted"),
        (needle, "bold"),
        "\n\n",
        ("esc", "bold accent"),
        (" shows all runs", "muted"),
    )


def describe_nothing(*, trainer_lives: bool, findings: Sequence[Finding] | None, read_only: bool, width: int) -> Text:
    """The next things to do, in their order; then what stands in the way, one line each.

    `findings` are those of `prl doctor`; None: it is not done yet.
    """
    text = Text.assemble(("no runs here yet", "bold primary"), "\n\n", justify="left")
    lines = [] if trainer_lives else [("prl up", "start trainer and inference")]
    if not (trainer_lives or read_only):
        lines[0] = ("U", "start trainer and inference; from a shell: prl up")
    if not read_only:
        lines.append(("a", "add a run: from a template, or from a TOML file of yours"))
    lines.append(("prl runs add FILE", "add a run from a shell" if read_only else "the same from a shell"))
    if not trainer_lives:
        lines.append(("prl demo", "see it work first: three small runs in their own folder"))
    for name, words in lines:
        text.append(f"{name:<22}", "bold accent").append(f"{words}\n", "muted")
    return text.append_text(_findings(findings, width))


def _findings(findings: Sequence[Finding] | None, width: int) -> Text:
    if findings is None:
        return Text()
    if not findings:
        return Text.styled("\n✔ prl doctor finds no problem here", "success")
    text = Text()
    for finding in findings[:MAX_FINDINGS]:
        colour = "error" if finding.is_broken else "warning"
        line = Text.assemble((f"{'✖' if finding.is_broken else '▲'} ", colour), (finding.text, "text"))
        line.truncate(max(width - 4, 1), overflow="ellipsis")
        text.append("\n").append_text(line)
    more = len(findings) - MAX_FINDINGS
    return text.append(f"\n{f'{more} more, and ' if more > 0 else ''}what to do: prl doctor", "muted")


# The selected run's curves have room under the table from this height on, or where so many lines are left over.
TALL, ALMOST_TALL, LEFT_OVER = 38, 28, 18


class RunsScreen(PlaceScreen):
    """Reads only; `acting` adds what acts."""

    DEFAULT_CSS = """
    RunsScreen {
        & > #empty { display: none; height: 1fr; width: 1fr; align: center middle; content-align: center middle; }
        &.-empty > #empty { display: block; }
        &.-empty > RunsTable { display: none; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/", tooltip="filter; tab completes"),
        Binding("s", "next_sort(1)", "Sort", tooltip="sort by the next column, as a click on its head"),
        Binding("S", "reverse_sort", "Reverse the order", show=False),
        Binding("p", "pin", "Pin", show=False, tooltip="pin to the top in every order, or unpin"),
        Binding("P", "daemons", "Daemons", show=False, tooltip="the daemons, on the screen System"),
        Binding("escape", "clear", "Clear the marks, then the filter", show=False),
        Binding("q", "app.quit", "Quit", tooltip="quit; the daemons keep running"),
    ]
    AUTO_FOCUS = "RunsTable"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.memory = setting.memory
        self.table = RunsTable()
        self.filter_bar = FilterBar(lambda: self.run_ids())
        self.empty = Static(id="empty", markup=False)
        self.preview = Preview()
        reader = CurvesReader(setting.output_dir)
        self._watcher = RunWatcher(reader, CurvesRequest(), self.post_message, interval_s=None)
        self._findings: Sequence[Finding] | None = None
        self._is_examined = False
        if self.memory.workspace.sort not in SORTS:
            self.memory.workspace = msgspec.structs.replace(self.memory.workspace, sort=DEFAULT_SORT, descending=False)

    def compose_body(self) -> ComposeResult:
        """Yield the filter, the table, what takes its place when no run is shown, and the selected run."""
        yield self.filter_bar
        yield self.table
        yield self.empty
        yield self.preview

    def on_mount(self) -> None:
        """Set the remembered filter, show the runs, and start the thread that reads the selected run's curves."""
        self.preview.display = False
        self.table.focus()
        if self.memory.workspace.filter:
            self.filter_bar.open(self.memory.workspace.filter)
            self.table.focus()
        self.app.theme_changed_signal.subscribe(self, lambda _: self.call_after_refresh(self.table.redraw))
        self.run_worker(self._watcher.run, thread=True, name="read the selected run")

    def on_unmount(self) -> None:
        """Stop the thread that reads the curves."""
        self._watcher.stop()

    def on_run_changed(self, message: RunChanged) -> None:
        """Show the curves that the thread has read."""
        if isinstance(message.data, CurvesData):
            self.preview.show_curves(message.data)

    def _fit_preview(self, height: int) -> None:
        is_tall = height >= TALL or (height >= ALMOST_TALL and height - len(self.table.run_ids) >= LEFT_OVER)
        if is_tall is not self.preview.has_class("-tall"):
            self.preview.set_class(is_tall, "-tall")

    def target_row(self) -> RunRow | None:
        """The run under the cursor; None in an empty table."""
        run_id = self.table.selected_id
        return self.snapshot.row(run_id) if self.snapshot and run_id else None

    def target_rows(self) -> list[RunRow]:
        """The marked runs, in the order in which they stand; without marks the one under the cursor."""
        if not self.table.marks:
            return super().target_rows()
        rows = self.snapshot.rows if self.snapshot else ()
        marked = {row.run_id: row for row in rows if row.run_id in self.table.marks}
        shown = [marked.pop(run_id) for run_id in self.table.run_ids if run_id in marked]
        return [*shown, *marked.values()]

    def commands(self) -> dict[str, Command]:
        """The commands of the keys; `sort` and `filter` take words too."""
        found = super().commands()
        columns = {name: sort.title for name, sort in SORTS.items()}
        take_words(found, "sort", "sort the runs", "[COLUMN [asc|desc]]", self._command_sort, lambda: columns)
        take_words(found, "filter", "filter the runs", "[TERMS]", self.set_filter)
        return found

    def refill(self, snapshot: Snapshot) -> None:
        """Filter and sort the runs and show them; marks of runs that are gone are removed."""
        workspace, now = self.memory.workspace, self.setting.clock()
        self.table.forget_marks({row.run_id for row in snapshot.rows})
        pins = frozenset(workspace.pins)
        query, marks = self.filter_bar.parsed, self.table.marks
        found = [
            row
            for row in snapshot.rows
            if not query.tests or query.matches(Subject(row, now, row.run_id in pins, row.run_id in marks))
        ]
        rows = sort_rows(found, workspace.sort, workspace.descending, pins)
        self.set_class(not rows, "-empty")
        if rows and self.focused is None:
            self.table.focus()
        if not snapshot.rows:
            self._examine()
        if not rows:
            self.empty.update(self._why_empty(snapshot), layout=False)
        self.filter_bar.say_count(len(rows), len(snapshot.rows))
        self.table.show(rows, now, pins=pins, sort=(workspace.sort, workspace.descending))
        self._fit_preview(self.size.height)
        self._show_selected()

    def _why_empty(self, snapshot: Snapshot) -> Text:
        if snapshot.rows:
            return describe_no_match(self.memory.workspace.filter)
        return describe_nothing(
            trainer_lives=snapshot.workspace.trainer is not None,
            findings=self._findings,
            read_only=self.setting.read_only,
            width=self.size.width,
        )

    def _examine(self) -> None:
        """Once, in a thread: an empty workspace is where a person starts. It tries to write: never when read-only."""
        app, examine, output_dir = self.app, self.setting.examine, self.setting.output_dir
        if examine is None or self._is_examined or self.setting.read_only:
            return
        self._is_examined = True

        def work() -> None:
            app.call_later(self._take_findings, examine(output_dir))

        app.run_worker(work, thread=True, name="examine the machine")

    def _take_findings(self, findings: Sequence[Finding]) -> None:
        self._findings = findings
        self.redraw()

    def action_filter(self) -> None:
        """Open the filter line, which gets the focus."""
        self.filter_bar.open()

    def action_clear(self) -> None:
        """Remove the marks; without marks, or from the filter line, the filter."""
        if self.table.marks and not self.filter_bar.input.has_focus:
            self.table.clear_marks()
            return
        self.set_filter("")
        self.table.focus()

    def set_filter(self, text: str) -> None:
        """Show the runs that match and remember the filter; an empty one closes the filter line."""
        self.filter_bar.put(text)
        self._take_filter(text)

    def action_next_sort(self, step: int) -> None:
        """Order by the column `step` places on in `SORTS`, in that column's own direction."""
        names = list(SORTS)
        self.sort_by(names[(names.index(self.memory.workspace.sort) + step) % len(names)])

    def action_reverse_sort(self) -> None:
        """Keep the column and turn the direction round."""
        self.sort_by(self.memory.workspace.sort, not self.memory.workspace.descending)

    def sort_by(self, column: str, descending: bool | None = None) -> None:
        """Order by a column; default: the column's own direction."""
        down = SORTS[column].descending if descending is None else descending
        self._remember(sort=column, descending=down)
        self.notify(f"sorted by {SORTS[column].title} {'▼' if down else '▲'}", timeout=2, markup=False)

    def action_pin(self) -> None:
        """Pin the chosen runs; when all of them are pinned, unpin them."""
        chosen, pins = [row.run_id for row in self.chosen_rows()], self.memory.workspace.pins
        others = [run_id for run_id in pins if run_id not in chosen]
        self._remember(pins=others if set(chosen) <= set(pins) else [*others, *chosen])

    def action_daemons(self) -> None:
        """Go to the screen System."""
        self.guide.go("system")

    def _remember(self, **changes: object) -> None:
        self.memory.workspace = msgspec.structs.replace(self.memory.workspace, **changes)
        self.guide.save_memory()
        self.redraw()

    def _command_sort(self, words: str) -> None:
        column, _, way = words.partition(" ")
        if column not in SORTS or way.strip() not in ("", "asc", "desc"):
            raise CommandError(f"invalid order {words!r}: give COLUMN [asc|desc]; columns: {', '.join(SORTS)}")
        self.sort_by(column, {"asc": False, "desc": True}.get(way.strip()))

    @on(Input.Changed, "#filter")
    def _filter_changed(self, event: Input.Changed) -> None:
        if event.value != self.memory.workspace.filter:
            self._take_filter(event.value)

    def _take_filter(self, text: str) -> None:
        self.filter_bar.take(text)
        self._remember(filter=text)

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        self.table.focus()
        if not self.memory.workspace.filter:
            self.filter_bar.close()

    @on(RunsTable.Opened)
    def _opened(self, message: RunsTable.Opened) -> None:
        """With runs marked their curves are drawn beside it."""
        marked = [row.run_id for row in self.target_rows()] if self.table.marks else []
        self.guide.open_run(message.run_id, tuple(each for each in marked if each != message.run_id))

    @on(RunsTable.SortAsked)
    def _sort_asked(self, message: RunsTable.SortAsked) -> None:
        workspace = self.memory.workspace
        self.sort_by(message.column, not workspace.descending if message.column == workspace.sort else None)

    @on(RunsTable.Moved)
    def _moved(self) -> None:
        """The cursor is drawn first: the curves take several times as long."""
        self.call_after_refresh(self._show_selected)

    def _show_selected(self) -> None:
        if not self.can_show:
            return
        row = self.target_row()
        self.preview.show(row, self.setting.clock(), len(self.table.marks))
        if row is not None and self.preview.has_class("-tall"):
            self._watcher.ask(CurvesRequest(row.run_id, row.tail))
        self.show_keys()
