"""One run: curves, config, log and events, each on its tab, with what it waits for or died of on top."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Footer, Static, TabbedContent, TabPane

from prime_rl.contract.status import RunState
from tui.messages import ActionEntry, RunChanged
from tui.run_detail import CHARTS, RunDetailReader
from tui.screens.base import HouseScreen, Setting
from tui.snapshot import LOST, RunRow, Snapshot
from tui.watcher import RunWatcher
from tui.widgets.charts import ChartGrid
from tui.widgets.command_line import CommandLine
from tui.widgets.config_view import ConfigView
from tui.widgets.events_view import EventsView
from tui.widgets.header import RunHeader
from tui.widgets.log_view import LogView

_COLOURS = ("secondary", "accent", "success", "warning", "error", "primary")
_TABS = ("tab-charts", "tab-config", "tab-logs", "tab-events")


class RunScreen(HouseScreen):
    """Reads only; `acting.ActingRunScreen` adds what acts. Owns the thread that reads the run's files."""

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
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "Back", key_display="esc"),
        Binding("1", "tab(0)", "Charts", show=False),
        Binding("2", "tab(1)", "Config", show=False),
        Binding("3", "tab(2)", "Logs", show=False),
        Binding("4", "tab(3)", "Events", show=False),
        Binding("l,right,right_square_bracket", "next_tab(1)", "Next tab", key_display="→"),
        Binding("h,left,left_square_bracket", "next_tab(-1)", "Previous tab", show=False),
    ]

    def __init__(self, setting: Setting, run_id: str) -> None:
        super().__init__(setting)
        self.run_id = run_id
        self._banner_text = ""
        # Held, not looked up: a message may arrive while the app ends and takes its widgets away.
        self.header = RunHeader()
        self.banner = Static(id="banner", markup=False)
        self.tabs = TabbedContent()
        self.charts = ChartGrid(CHARTS, _COLOURS)
        self.config = ConfigView()
        self.log_view = LogView()
        self.events = EventsView()
        self.command_line = CommandLine()
        self._watcher = RunWatcher(RunDetailReader(setting.output_dir, run_id), self.post_message)

    def compose(self) -> ComposeResult:
        yield self.header
        yield self.banner
        with self.tabs:
            with TabPane("1 Charts", id="tab-charts"):
                yield self.charts
            with TabPane("2 Config", id="tab-config"):
                yield self.config
            with TabPane("3 Logs", id="tab-logs"):
                yield self.log_view
            with TabPane("4 Events", id="tab-events"):
                yield self.events
        yield self.command_line
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        # The panes of the tabs are made after the screen itself.
        self.call_after_refresh(self._start)

    def _start(self) -> None:
        self._is_ready = True
        self.app.theme_changed_signal.subscribe(self, lambda _: self.log_view.redraw())
        self.command_line.entry = self.entry
        self._focus_tab()
        self._show()
        self.run_worker(self._watcher.run, thread=True, name=f"read {self.run_id}")

    def on_unmount(self) -> None:
        self._watcher.stop()

    def target_row(self) -> RunRow | None:
        return self.snapshot.row(self.run_id) if self.snapshot else None

    def show_house(self, snapshot: Snapshot) -> None:
        super().show_house(snapshot)
        if self.can_show:
            self._show()

    def show_action(self, entry: ActionEntry) -> None:
        super().show_action(entry)
        if self.can_show:
            self.command_line.entry = entry

    def on_run_changed(self, message: RunChanged) -> None:
        if not self.can_show:
            return
        detail = message.detail
        self.charts.show(detail.charts)
        self.config.show(detail.config, detail.config_error, detail.error_lines)
        self.log_view.show(detail.log_lines, detail.log_num_read, detail.log_generation)
        self.events.show(detail.events)

    @on(ChartGrid.Resized)
    def _charts_resized(self, message: ChartGrid.Resized) -> None:
        self._watcher.reader.limit = message.limit
        self._watcher.wake()

    @on(TabbedContent.TabActivated)
    def _tab_activated(self, event: TabbedContent.TabActivated) -> None:
        if self.can_show:
            self._focus_tab()
            self._show()

    def action_tab(self, index: int) -> None:
        self.tabs.active = _TABS[index]

    def action_next_tab(self, direction: int) -> None:
        self.tabs.active = _TABS[(_TABS.index(self.tabs.active) + direction) % len(_TABS)]

    def _focus_tab(self) -> None:
        views = dict(zip(_TABS, (self.charts, self.config, self.log_view, self.events), strict=True))
        if self.tabs.active in views:
            views[self.tabs.active].focus()

    def _banner(self, row: RunRow | None) -> str:
        if row is None:
            return f"{self.run_id} is not in the house any more; esc goes back"
        if row.state == RunState.INVALID:
            # The config tab says it in full, beside the line.
            return "" if self.tabs.active == "tab-config" else row.note
        return row.note if row.state == LOST else row.reason or row.note

    def _show(self) -> None:
        row = self.target_row()
        self.header.row, self.header.now = row, self.setting.clock()
        self.header.num_problems = len(self.snapshot.problems) if self.snapshot else 0
        text = self._banner(row)
        self.banner.set_class(bool(text), "-shown")
        self.banner.set_class(row is None or row.is_problem, "-bad")
        self.banner.set_class(row is not None and not row.is_problem, "-note")
        if text != self._banner_text:
            self._banner_text = text
            self.banner.update(Content(text))
        self.show_keys()
