"""Compare: runs grouped by tag or config key, their curves in one chart, and what differs beside what came of it.

`PickRuns` is the list in which runs are chosen for it: typing narrows it, enter takes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from daemons.ranking import FAILED_STATES, RUN
from prime_rl.contract.metrics import short_texts
from tui import fmt
from tui.keys import Command, CommandError
from tui.messages import RunChanged
from tui.model.query import Subject
from tui.model.snapshot import RunRow, Snapshot
from tui.readers.charts import SMOOTHINGS
from tui.readers.compare import (
    MAX_RUNS,
    METRICS,
    CompareData,
    CompareReader,
    CompareRequest,
    Contender,
    Group,
    drawn_groups,
    short_keys,
)
from tui.screens.base import PlaceScreen, Setting, take_words
from tui.watcher import RunWatcher
from tui.widgets.chart import COLOURS, LABEL_WIDTH, Chart
from tui.widgets.header import FilterBar
from tui.widgets.line_list import Clipped, LineList, titled

# Before the name of a group in a list of lines: what no run id has.
GROUP = "\0"
WIDE = 120
NAME_WIDTHS = (22, 34)
BORDERS = 2
MAX_VALUE = 14
MAX_NOTES = 2
KEY_ORDER = ("open", "filter", "group_by", "metric", "smooth", "back", "help")


class CompareScreen(PlaceScreen):
    """Reads only. Owns the thread that reads the compared runs' files."""

    DEFAULT_CSS = """
    CompareScreen {
        & > #about { height: auto; max-height: 3; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
        & > Chart { height: 45%; min-height: 8; }
        & > #contenders { height: 1fr; }
    }
    """
    key_order = KEY_ORDER
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("b", "group_by", "Group by", id="group", tooltip="group the runs by a tag or a config key"),
        Binding("m", "metric", "Metric", tooltip="the metric that is compared"),
        Binding("s", "smooth", "Smooth", tooltip="smoothing: factors 0.6, 0.9, 0.97"),
        Binding("slash", "filter", "Filter", key_display="/", tooltip="compare some of the runs; tab completes"),
        Binding("escape,q", "back", "Back", key_display="esc"),
    ]
    AUTO_FOCUS = "#contenders"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.filter_bar = FilterBar(lambda: self.run_ids())
        self.about = Clipped(id="about", markup=False)
        self.chart = Chart(METRICS[0])
        self.list = LineList[str]("no runs", id="contenders", opens=True)
        self.request = CompareRequest()
        self.data: CompareData | None = None
        self._watcher = RunWatcher(CompareReader(setting.output_dir), self.request, self.post_message)

    def compose_body(self) -> ComposeResult:
        """Yield the filter, what is compared, the chart and the list of groups and runs."""
        yield self.filter_bar
        yield self.about
        yield self.chart
        yield self.list

    def on_mount(self) -> None:
        """Begin with the filter of home, and start the thread that reads the compared runs."""
        text = self.setting.memory.workspace.filter
        if text:  # what is compared at first is what the home screen shows
            self.filter_bar.open(text)
        self.list.focus()
        # When `PlaceScreen.on_mount` has asked for the runs: Textual calls it after this one.
        self.call_next(self.run_worker, self._watcher.run, thread=True, name="read the compared runs")

    def on_unmount(self) -> None:
        """Stop the thread that reads the compared runs."""
        self._watcher.stop()

    def refill(self, snapshot: Snapshot) -> None:
        """Ask for the runs that match the filter now and for curves of this width, and draw what is there."""
        self._ask()
        self._redraw()

    def on_run_changed(self, message: RunChanged) -> None:
        """Keep and draw what the thread has read."""
        if self.can_show and isinstance(message.data, CompareData):
            self.data = message.data
            self._redraw()

    def target_row(self) -> RunRow | None:
        """The run under the cursor; None on the line of a group."""
        key = self.list.selected
        return self.snapshot.row(key) if key and self.snapshot and not key.startswith(GROUP) else None

    def target_rows(self) -> list[RunRow]:
        """The selected run, or all of the selected group."""
        group = self._selected_group()
        if group is None or self.snapshot is None:
            return super().target_rows()
        return [row for run in group.runs if (row := self.snapshot.row(run.run_id)) is not None]

    def commands(self) -> dict[str, Command]:
        """The commands of the keys; `group`, `metric` and `filter` take words too."""

        def names(kind: str) -> Callable[[], Mapping[str, str]]:
            return lambda: dict.fromkeys(getattr(self.data, kind, ()), "")

        found = super().commands()
        about = "group by run, tag or a config key"
        take_words(found, "group", about, "KEY", self._group_by, names("groupings"))
        take_words(found, "metric", "the metric that is compared", "NAME", self._take_metric, names("metrics"))
        take_words(
            found, "step", "compare at this step the runs that are there; none: as far as all are", "N", self._step
        )
        take_words(found, "filter", "compare the runs that match", "TERMS", self.filter_bar.put)
        return found

    def action_back(self) -> None:
        """The filter goes first."""
        if self.filter_bar.input.value:
            self.filter_bar.put("")
            self.list.focus()
        else:
            self.app.pop_screen()

    def action_filter(self) -> None:
        """Open the filter line, which gets the focus."""
        self.filter_bar.open()

    def action_group_by(self) -> None:
        """Open the choice of what the runs are grouped by: run, tag, or a config key that differs."""
        pick_one(self.app, self.data.groupings if self.data else (RUN,), "group by", self._group_by)

    def action_metric(self) -> None:
        """Open the choice of the metric that is compared."""
        pick_one(self.app, self.data.metrics if self.data else (), "compare by", self._take_metric)

    def action_smooth(self) -> None:
        """Take the next of `SMOOTHINGS`; after the last comes the first."""
        view = self.request.view
        after = SMOOTHINGS[(SMOOTHINGS.index(view.smoothing) + 1) % len(SMOOTHINGS)]
        self._ask(view=replace(view, smoothing=after))

    @on(Input.Changed, "#filter")
    def _filter_changed(self, event: Input.Changed) -> None:
        self.filter_bar.take(event.value)
        self._ask()

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        self.list.focus()
        if not self.filter_bar.input.value:
            self.filter_bar.close()

    @on(LineList.Moved)
    def _moved(self) -> None:
        self.show_keys()

    @on(LineList.Opened)
    def _opened(self) -> None:
        """A run, or the best of a group with the others of the group beside it."""
        group = self._selected_group()
        if group is not None:
            first, *others = [run.run_id for run in group.runs]
            self.guide.open_run(first, tuple(others))
        else:
            self.guide.open_run(self.list.selected or "")

    def _group_by(self, words: str) -> None:
        self._ask(by=_known(words, self.data.groupings if self.data else (), "grouping"))

    def _take_metric(self, words: str) -> None:
        self._ask(metric=_known(words, self.data.metrics if self.data else (), "metric"))

    def _step(self, words: str) -> None:
        if words and not words.isdecimal():
            raise CommandError(f"step {words!r}: must be a number; without one all runs are compared")
        self._ask(step=int(words) if words else None)

    def _selected_group(self) -> Group | None:
        key = self.list.selected or ""
        groups = self.data.groups if self.data and key.startswith(GROUP) else ()
        return next((group for group in groups if GROUP + group.name == key), None)

    def _ask(self, **changes: object) -> None:
        if self.snapshot is None or not self.can_show:
            return
        now, query = self.setting.clock(), self.filter_bar.parsed
        pins = frozenset(self.setting.memory.workspace.pins)
        rows = [
            row for row in self.snapshot.rows if query.matches(Subject(row, now, row.run_id in pins, is_marked=False))
        ]
        self.filter_bar.say_count(len(rows), len(self.snapshot.rows))
        width = max(self.size.width - BORDERS - LABEL_WIDTH, 20) * 2  # the chart's own comes one layout later
        request = replace(self.request, **changes)  # type: ignore[arg-type]
        runs = tuple((row.run_id, tuple(map(str, row.view.tags)), row.view.step) for row in rows)
        failed = frozenset(row.run_id for row in rows if row.view.state in FAILED_STATES)
        request = replace(request, runs=runs, failed=failed, view=replace(request.view, num_columns=width))
        if request != self.request:
            self.request = request
            self._watcher.ask(request)

    def _redraw(self) -> None:
        data = self.data
        if data is None or not self.can_show:
            return
        rows = {row.run_id: row for row in self.snapshot.rows} if self.snapshot else {}
        doubts = {best.run_id: why for best, _ in data.best if (why := doubt_of(rows.get(best.run_id)))}
        self.about.update(about_line(data, self.size.width - 2, doubts))
        self.chart.rename(data.request.metric)
        self.chart.show(data.chart, is_read=not data.is_reading)
        table = Table(data, self.size.width, doubts)
        self.list.show(table.keys, table.line, [table.heading()])
        self.show_keys()


def _known(words: str, names: Sequence[str], what: str) -> str:
    """The name that `words` is, or the only one that contains it. Raises CommandError."""
    fits = [words] if words in names else [name for name in names if words and words in name]
    if len(fits) != 1:
        raise CommandError(f"{what} {words!r} {'is ambiguous' if fits else 'not found'}: {', '.join(fits or names)}")
    return fits[0]


def doubt_of(row: RunRow | None) -> str:
    """In words why the best result of a run may be worth nothing: it failed, or does not learn. Empty without doubt."""
    if row is None or row.view.state in FAILED_STATES:
        return f"{row.state}: {row.note}" if row else ""
    return "; ".join(short_texts(row.view.signs))


def about_line(data: CompareData, width: int, doubts: Mapping[str, str]) -> Text:
    """The line about what is compared, and which run is best, with as many of its settings as `width` has room for.

    Below it the `doubts` about best runs, by id, and the notes.
    """
    line = Text.assemble(("by ", "muted"), (data.request.by if data.request.by in data.groupings else RUN, "bold"))
    if width >= WIDE:  # else the frame of the chart alone has it
        line.append("  ·  ", "faint").append(data.request.metric, "bold")
    for number, (best, result) in enumerate(data.best):
        line.append_text(
            Text.assemble(
                ("  ·  best " if number == 0 else "  ", "muted"),
                (f"★ {best.run_id} ", "bold success"),
                (fmt.reward(result), "success"),
            )
        )
    if len(data.best) == 1:
        best, told = data.best[0][0], ""
        for key, head in short_keys(data.keys).items():
            setting = f"{', ' if told else '  '}{head} = {best.config.get(key, fmt.DASH)}"
            if line.cell_len + cell_len(told + setting) <= width:
                told += setting
        line.append(told, "muted")
    if data.num_left_out:
        line.append(f"  ·  the first {MAX_RUNS}, {data.num_left_out} more: narrow with /", "warning")
    if data.is_reading:
        line.append("  ·  reading ...", "muted")
    notes = [*(f"▲ ★ {run_id}: {why}" for run_id, why in doubts.items()), *data.notes]
    for note in notes[:MAX_NOTES]:
        line.append(f"\n{note}", "warning")
    if len(notes) > MAX_NOTES:
        line.append(" …", "warning")
    return line


class Table:
    """The lines of the list: each run with its result and the values that differ; groups of several runs first."""

    def __init__(self, data: CompareData, width: int, doubts: Container[str] = ()) -> None:
        self._data, self._doubts = data, doubts
        self._name = NAME_WIDTHS[width >= WIDE]
        self._has_groups = not all(map(_is_alone, data.groups))
        self._colours = {
            group.name: COLOURS[index % len(COLOURS)] for index, group in enumerate(drawn_groups(data.groups))
        }
        room = width - self._name - 22 - 8 * self._has_groups
        runs = [run for group in data.groups for run in group.runs]
        self._names = fmt.short_names(tuple(run.run_id for run in runs), self._name)
        self._columns: list[tuple[str, str, int]] = []
        for key, head in short_keys(data.keys).items():
            texts = [run.config.get(key, fmt.DASH) for run in runs if run.config]
            column = min(max(len(head), *map(len, texts)), MAX_VALUE)
            is_told = len({fmt.shorten_middle(text, column) for text in texts}) > 1  # else what differs is cut out
            if is_told and room >= column + 2:
                self._columns.append((key, head, column))
                room -= column + 2
        self._lines: dict[str, tuple[Group, Contender | None]] = {}
        for group in data.groups:
            if not _is_alone(group):
                self._lines[GROUP + group.name] = (group, None)
            for run in group.runs:  # one with several tags is listed once, in its best group
                self._lines.setdefault(run.run_id, (group, run))

    def heading(self) -> Text:
        """The heads of the columns: the end of each config key stands for it."""
        heads = (f"  {fmt.shorten_middle(head.upper(), width):<{width}}" for _, head, width in self._columns)
        spread = f" {'± S.D.':>7}" if self._has_groups else ""
        return Text(f"     {'RUN':<{self._name}} {'STEP':>6} {'RESULT':>7}{spread}{''.join(heads)}")

    @property
    def keys(self) -> list[str]:
        """A group of several runs is a line of its own, before them."""
        return list(self._lines)

    def line(self, index: int) -> Text:
        """The line of `keys[index]`: a group, or a run with its values."""
        group, run = self._lines[self.keys[index]]
        return self._group_line(group) if run is None else self._run_line(group, run)

    def _group_line(self, group: Group) -> Text:
        name = fmt.shorten(f"{group.name}  {fmt.counted(len(group.runs), 'run')}", self._name)
        return Text.assemble(
            "   ",
            self._mark(group),
            (f"{name:<{self._name}} ", "bold primary"),
            f"{'':>6} ",
            (f"{fmt.reward(group.result):>7} ", "bold"),
            (f"{fmt.reward(group.spread):>7}", "muted"),
        )

    def _run_line(self, group: Group, run: Contender) -> Text:
        is_best = any(best.run_id == run.run_id for best, _ in self._data.best)
        result = group.results[group.runs.index(run)]
        name = self._names[run.run_id]
        line = Text.assemble(
            (" ★▲", "warning") if run.run_id in self._doubts else (" ★ " if is_best else "   ", "success"),
            self._mark(group) if _is_alone(group) else "  ",
            (f"{name:<{self._name}} ", "bold" if is_best else "text"),
            (f"{min(run.step, group.step) or fmt.DASH:>6} ", "muted"),
            (f"{fmt.reward(result):>7}", "success" if is_best else "text"),
            " " * 8 * self._has_groups,
        )
        for key, _, width in self._columns:
            line.append(f"  {fmt.shorten_middle(run.config.get(key, fmt.DASH), width):<{width}}", "text")
        return line

    def _mark(self, group: Group) -> tuple[str, str]:
        """As in the legend of the chart; nothing where the group has no curve."""
        colour = self._colours.get(group.name)
        return ("━ ", colour) if colour else ("  ", "")


def _is_alone(group: Group) -> bool:
    return len(group.runs) == 1 and group.name == group.runs[0].run_id


class PickRuns(ModalScreen[tuple[str, ...] | None]):
    """Gives the chosen run ids, in their order; None when left with escape."""

    DEFAULT_CSS = """
    PickRuns {
        align: center middle;
        & > Vertical {
            width: 60; max-width: 96%; height: auto; max-height: 90%; padding: 0 1;
            border: round $primary; border-title-color: $primary; border-subtitle-color: $foreground 50%;
            background: $surface;
        }
        & Input { background: $panel; padding: 0 1; margin-bottom: 1; }
        & LineList { height: 12; background: $surface; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close"),
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("tab", "mark", "Mark", show=False, priority=True),
    ]

    def __init__(
        self, run_ids: Sequence[str], chosen: Sequence[str] = (), *, limit: int = 1, title: str = "compare with"
    ) -> None:
        super().__init__()
        self._run_ids = list(run_ids)
        self._chosen = [run_id for run_id in chosen if run_id in run_ids]
        self._had_some = bool(self._chosen)
        self._limit = limit
        self._title = title
        self.input = Input(placeholder="type to narrow", compact=True)
        self.list = LineList[str]("nothing matches" if run_ids else "no other runs")
        self.list.can_focus = False

    def compose(self) -> ComposeResult:
        """Yield the input and, below it, the runs that contain what is typed."""
        several = self._limit > 1
        title = f"compare with up to {self._limit} runs" if several else self._title
        with titled(Vertical(), title, f"{'tab marks · ' * several}enter takes · esc closes"):
            yield self.input
            yield self.list

    def on_mount(self) -> None:
        """Give the input the focus, and list all runs."""
        self.input.focus()
        self._fill("")

    def action_move(self, num: int) -> None:
        """Move the cursor of the list by `num` lines; the input keeps the focus."""
        self.list.action_move(num)

    def action_mark(self) -> None:
        """Mark the run under the cursor, or take its mark away, and go one line down.

        Does nothing where only one run can be chosen; at the limit no mark is added.
        """
        run_id = self.list.selected
        if self._limit == 1 or run_id is None:
            return
        if run_id in self._chosen:
            self._chosen.remove(run_id)
        elif len(self._chosen) < self._limit:
            self._chosen.append(run_id)
        self._fill(self.input.value)
        self.list.action_move(1)

    @on(Input.Changed)
    def _narrow(self, event: Input.Changed) -> None:
        self._fill(event.value)

    @on(Input.Submitted)
    @on(LineList.Opened)
    def _take(self) -> None:
        under = self.list.selected
        if self._limit == 1:
            self.dismiss((under,) if under else None)
        else:
            # Enter right away takes the one under the cursor; with all marks taken away it takes none.
            take_one = under is not None and not self._chosen and not self._had_some
            self.dismiss((under,) if take_one and under else tuple(self._chosen))

    def _fill(self, needle: str) -> None:
        shown = [run_id for run_id in self._run_ids if needle.lower() in run_id.lower()]

        def make(index: int) -> Text:
            is_chosen = shown[index] in self._chosen
            return Text.assemble(("  ● " if is_chosen else "    ", "success"), shown[index])

        self.list.show(shown, make)


def pick_one(app: App[object], names: Sequence[str], title: str, take: Callable[[str], None]) -> None:
    """Let one of `names` be chosen, which `take` gets."""
    app.push_screen(PickRuns(names, title=title), lambda found: take(found[0]) if found else None)
