"""One run, tab by tab: charts, rollouts, config, log, checkpoints, events; with what it waits for or died of on top.

Only the tab that is open is read (`RunReader`), in a thread; what it finds comes back as a `RunChanged`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import DescendantFocus
from textual.widget import Widget
from textual.widgets import TabbedContent, TabPane

from prime_rl.contract.layout import RunDir
from prime_rl.contract.status import LOST, RunState
from prime_rl.utils.text import size_text
from tui import fmt
from tui.messages import LogFound, RunChanged, TabAsked
from tui.model.snapshot import RunRow, Snapshot
from tui.readers.charts import CHARTS, MAX_COMPARED, ChartsData, ChartsReader, ChartView
from tui.readers.log_reader import LogData, LogRequest, LogSearch, LogTabReader
from tui.readers.rollouts import RolloutsData, RolloutsReader, RolloutsRequest
from tui.readers.run_config import (
    Checkpoint,
    CheckpointsData,
    CheckpointsReader,
    ConfigData,
    ConfigReader,
    ConfigRequest,
    EventsData,
    EventsReader,
)
from tui.readers.tabs import CHARTS as CHARTS_TAB
from tui.readers.tabs import CHECKPOINTS, CONFIG, EVENTS, LOGS, ROLLOUTS, TABS, TabData
from tui.screens.base import Setting, WorkspaceScreen
from tui.screens.compare import PickRuns, pick_one
from tui.watcher import RunWatcher
from tui.widgets.charts import ChartsView
from tui.widgets.config_view import ConfigView, EventsView
from tui.widgets.header import KeyFooter, RunHeader
from tui.widgets.line_list import Clipped, LineList
from tui.widgets.log_view import LogView
from tui.widgets.rollouts_view import RolloutsView


@dataclass(frozen=True)
class RunRequest:
    """The tab that is open, and what some tabs, by their names, are to show."""

    tab: str = CHARTS_TAB
    charts: ChartView = field(default_factory=ChartView)
    config: ConfigRequest = field(default_factory=ConfigRequest)
    logs: LogRequest = field(default_factory=LogRequest)
    rollouts: RolloutsRequest = field(default_factory=RolloutsRequest)


class RunReader:
    """The readers of all tabs of one run."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._charts = ChartsReader(output_dir, run_id)
        self._config = ConfigReader(output_dir, run_id)
        self._logs = LogTabReader(output_dir, run_id)
        self._rollouts = RolloutsReader(output_dir, run_id)
        self._others: dict[str, CheckpointsReader | EventsReader] = {
            CHECKPOINTS: CheckpointsReader(output_dir, run_id),
            EVENTS: EventsReader(output_dir, run_id),
        }

    def read(self, request: RunRequest, is_wanted: Callable[[], bool] = lambda: True) -> tuple[TabData | None, bool]:
        """A new look at what the open tab shows, or None when nothing changed; and whether to look again at once.

        Never raises for what a file may do. Long work ends when it `is_wanted` no more.
        """
        if request.tab == CHARTS_TAB:
            return self._charts.read(request.charts)
        if request.tab == CONFIG:
            return self._config.read(request.config)
        if request.tab == LOGS:
            return self._logs.read(request.logs, is_wanted)
        if request.tab == ROLLOUTS:
            return self._rollouts.read(request.rollouts)
        reader = self._others.get(request.tab)
        return reader.read() if reader else (None, False)


# In the footer the keys of the open tab come before those that act: 80 columns do not hold all.
KEY_ORDER = (
    *("app.pop_screen", "next_tab(1)", "help", "version", "reset", "rollback", "point(1)", "maximise", "zoom(1)"),
    *("log", "smooth", "compare", "view", "tint", "order", "move(1)", "move(-1)", "values", "follow", "ask", "level"),
    *("command", "evict", "pause", "readmit", "delete"),
)


class _Pane(TabPane):
    """A tab that keys and clicks open, never a focus: one that comes late would bring back the tab before."""

    def _on_descendant_focus(self, event: DescendantFocus) -> None:
        event.prevent_default()


class RunScreen(WorkspaceScreen):
    """Reads only; `acting_places` adds what acts. Owns the thread that reads the run's files.

    Args:
        compare: runs whose curves are drawn beside this one's, MAX_COMPARED of them at most.
    """

    DEFAULT_CSS = """
    RunScreen {
        & > #banner { display: none; height: auto; max-height: 4; padding: 0 1; background: $panel; }
        & > #banner.-shown { display: block; }
        & > #banner.-bad { color: $text-error; border-left: outer $error; }
        & > #banner.-note { color: $foreground 75%; border-left: outer $secondary; }
        & > TabbedContent { height: 1fr; }
        background: $surface;
        Tabs { height: 2; }
        TabPane { padding: 0; height: 1fr; }
        ContentSwitcher { height: 1fr; }
    }
    """
    key_order = KEY_ORDER
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "Back", key_display="esc"),
        *(Binding(str(i + 1), f"tab({i})", name.capitalize(), show=False) for i, name in enumerate(TABS)),
        Binding("tab,right_square_bracket", "next_tab(1)", "Tabs", key_display="tab"),
        Binding("shift+tab,left_square_bracket", "next_tab(-1)", "Previous tab", show=False),
    ]

    def __init__(self, setting: Setting, run_id: str, compare: tuple[str, ...] = ()) -> None:
        super().__init__(setting)
        self.run_id = run_id
        self._banner_text = ""
        # Held, not looked up: a message may arrive while the app ends and takes its widgets away.
        self.header = RunHeader()
        self.banner = Clipped(id="banner", markup=False)
        self.tabs = TabbedContent()
        self._others = tuple(each for each in compare if each != run_id)
        self.charts = ChartsView(CHARTS, self._others[:MAX_COMPARED])
        self.rollouts = RolloutsView()
        self.config = ConfigView()
        self.log_view = LogView()
        self.checkpoints = CheckpointsView(setting.clock)
        self.events = EventsView()
        views = (self.charts, self.rollouts, self.config, self.log_view, self.checkpoints, self.events)
        self.views: dict[str, Widget] = dict(zip(TABS, views, strict=True))
        """By tab, from left to right."""
        self._shows: dict[type[TabData], Callable[[Any], None]] = {
            ChartsData: self.charts.show,
            RolloutsData: self.rollouts.show,
            ConfigData: self.config.show,
            LogData: self.log_view.show,
            CheckpointsData: self.checkpoints.show_data,
            EventsData: self.events.show,
        }
        self.shown: set[str] = set()
        """The tabs that have shown something."""
        # A key may come before the tabs have opened the first of them, which they do by themselves and late.
        self._has_opened = False
        self._asked = 0
        self._search: LogSearch | None = None
        self._log = RunDir(setting.output_dir / run_id).log
        self._request = RunRequest(charts=self.charts.view)
        self._watcher = RunWatcher(RunReader(setting.output_dir, run_id), self._request, self.post_message)

    def compose(self) -> ComposeResult:
        """Yield header, banner, tabs, the line of the last action and the keys, from top to bottom."""
        yield self.header
        yield self.banner
        with self.tabs:
            for number, (name, view) in enumerate(self.views.items(), start=1):
                with _Pane(f"{number} {name.capitalize()}", id=f"tab-{name}"):
                    yield view
        yield self.command_line
        yield KeyFooter()

    def on_mount(self) -> None:
        """Once the panes are there, open a tab and start the thread that reads."""
        if (num := len(self._others)) > MAX_COMPARED:
            words = f"{MAX_COMPARED} of {num} runs are drawn beside {self.run_id}; w chooses others"
            self.notify(words, markup=False)
        # The panes of the tabs are made after the screen itself.
        self.call_after_refresh(self._start)

    def _start(self) -> None:
        self.can_show = True
        self.command_line.entry = self.entry
        self._open_tab()
        self._show()
        self.run_worker(self._watcher.run, thread=True, name=f"read {self.run_id}")

    def on_unmount(self) -> None:
        """Stop the thread that reads, and a search in the log."""
        self._watcher.stop()
        if self._search is not None:
            self._search.stop()

    def target_row(self) -> RunRow | None:
        """This run; None once it was removed from the workspace."""
        return self.snapshot.row(self.run_id) if self.snapshot else None

    def show_workspace(self, snapshot: Snapshot) -> None:
        """Keep the snapshot; once the widgets are there, show what it has of this run."""
        super().show_workspace(snapshot)
        self.rollouts.are_texts = (row := self.target_row()) is not None and row.view.kind == "sft"
        if self.can_show:
            self._show()

    def on_run_changed(self, message: RunChanged) -> None:
        """Show what the thread has read, in the view of its tab."""
        if self.can_show:
            self._shows[type(message.data)](message.data)
            self.shown.add(message.data.tab)
            if isinstance(message.data, CheckpointsData):
                self.refresh_bindings()

    @on(LineList.Moved)
    def _row_moved(self) -> None:
        """Refresh the keys: what can be done may depend on the row, such as a checkpoint that is not complete."""
        self.refresh_bindings()

    def _ask(self, **changes: Any) -> None:
        """Of the reading thread: what `changes` in the request."""
        self._request = replace(self._request, **changes)
        self._watcher.ask(self._request)

    def on_tab_asked(self, message: TabAsked) -> None:
        """Let the thread read what a tab is to show."""
        self._ask(**{message.tab: message.request})
        if message.tab == ROLLOUTS:
            self.refresh_bindings()

    @on(ChartsView.Compare)
    def _compare_charts(self) -> None:
        def take(run_ids: tuple[str, ...] | None) -> None:
            if run_ids is not None:
                self.charts.compare_with(run_ids)

        self.app.push_screen(PickRuns(self._other_ids(), self.charts.view.compare, limit=MAX_COMPARED), take)

    @on(ConfigView.Compare)
    def _compare_config(self) -> None:
        pick_one(self.app, self._other_ids(), "compare with", self.config.compare_with)

    @on(LogView.Search)
    def _search_log(self, message: LogView.Search) -> None:
        if self._search is not None:
            self._search.stop()
            self._search = None
        if message.words:
            self._search = LogSearch(
                self._log,
                message.words,
                message.offset,
                forwards=message.forwards,
                level=message.level,
                serial=message.serial,
                post=lambda found: self.post_message(LogFound(found)),
            )
            self.run_worker(self._search.run, thread=True, name="search the log")

    def on_log_found(self, message: LogFound) -> None:
        """Show how far the search in the log has come."""
        if self.can_show:
            self.log_view.show_found(message.found)

    def _other_ids(self) -> list[str]:
        return [run_id for run_id in self.run_ids() if run_id != self.run_id]

    @on(TabbedContent.TabActivated)
    def _tab_activated(self, event: TabbedContent.TabActivated) -> None:
        if not self._has_opened:
            self._has_opened = True
            self.action_tab(self._asked)
        if self.can_show:
            self._open_tab()
            self._show()

    def action_tab(self, index: int) -> None:
        """Open the tab of this index, counted from 0; before the tabs are there, note it for then."""
        self._asked = index
        if self._has_opened:
            self.tabs.active = f"tab-{list(self.views)[index]}"

    def action_next_tab(self, direction: int) -> None:
        """Open the next tab (1) or the one before (-1); after the last comes the first."""
        self.action_tab((list(self.views).index(self.tab) + direction) % len(self.views))

    @property
    def tab(self) -> str:
        """The open tab, one of `views`."""
        return self.tabs.active.removeprefix("tab-") or TABS[0]

    def _open_tab(self) -> None:
        self._ask(tab=self.tab)
        self.refresh_bindings()
        view = self.views[self.tab]
        if isinstance(view, RolloutsView):
            view.take_focus()
        elif isinstance(view, LogView):
            view.rows.focus()
        else:
            view.focus()

    def _banner(self, row: RunRow | None) -> str:
        if row is None:
            return f"{self.run_id} was removed from the workspace; esc goes back"
        if row.state == RunState.INVALID:
            return "" if self.tab == CONFIG else row.note
        if self.tab == CONFIG and row.view.edited:  # the tab has the edit in full
            return row.reason or ""
        return row.note if row.state == LOST else row.reason or row.note

    def _show(self) -> None:
        row = self.target_row()
        self.header.row, self.header.now = row, self.setting.clock()
        self.header.num_problems = len(self.snapshot.problems) if self.snapshot else 0
        text = self._banner(row)
        self.banner.set_class(bool(text), "-shown")
        self.banner.set_class(row is None or row.is_bad, "-bad")
        self.banner.set_class(row is not None and not row.is_bad, "-note")
        if text != self._banner_text:
            self._banner_text = text
            self.banner.update(Content(text))
        self.show_keys()


HEADING = "   step  state       size        age   saved (UTC)          holds"


def list_row(checkpoint: Checkpoint, now: float, *, is_next: bool) -> Text:
    """One checkpoint; `is_next`: a restart goes on from it."""
    stable = checkpoint.is_stable
    saved = checkpoint.saved_at
    when = "-" if saved is None else fmt.stamp(saved)
    return Text.assemble(
        (f"{checkpoint.step:>7}  ", "bold" if stable else "muted"),
        (f"{'✔ STABLE' if stable else '◌ partial':<10}", "success" if stable else "warning"),
        f"{size_text(checkpoint.num_bytes):>10}  ",
        (f"{fmt.age(None if saved is None else max(now - saved, 0.0)):>5}   {when:<21}", "muted"),
        ("◂ starts here  " if is_next else "", "accent"),
        (" ".join(checkpoint.parts) or "nothing yet", "muted"),
        no_wrap=True,
    )


class CheckpointsView(LineList[int]):
    """The steps. What acts on the chosen one is the screen's."""

    DEFAULT_CSS = """
    CheckpointsView { height: 1fr; background: $surface; }
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__("no checkpoints yet: ckpt.interval sets how often one is saved", id="checkpoints")
        self._clock = clock
        self._data: CheckpointsData | None = None

    @property
    def chosen(self) -> Checkpoint | None:
        """The checkpoint under the cursor; None while the list is empty."""
        rows = self._data.checkpoints if self._data else ()
        return next((row for row in rows if row.step == self.selected), None)

    def show_data(self, data: CheckpointsData) -> None:
        """Fill the list with the checkpoints of `data`; above it their number and their size in all."""
        self._data = data
        clock, rows = self._clock, data.checkpoints[::-1]
        total = sum(row.num_bytes for row in rows)
        about = f"{len(rows)} checkpoints, {size_text(total)}" if rows else ""

        def make(index: int) -> Text:
            return list_row(rows[index], clock(), is_next=rows[index].step == data.starts_at)

        self.show([row.step for row in rows], make, (Text(about), Text(HEADING if rows else "")))
