"""The machine and the daemons: what trainer, inference and orchestrators do and use, and how long the disk lasts."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from tui.messages import SystemChanged
from tui.model.snapshot import DaemonRow, RunRow, Snapshot
from tui.readers.machine import SystemLook, SystemProbe
from tui.screens.base import PlaceScreen, Setting
from tui.watcher import SystemWatcher
from tui.widgets.line_list import LineList, joined
from tui.widgets.system_lines import (
    daemon_detail,
    daemon_heading,
    daemon_line,
    daemon_name_width,
    inference_lines,
    machine_lines,
    trainer_lines,
)

# Where there is room, so many lines of the selected daemon's log.
DETAIL_LINES = 8
WIDE = 120


class SystemScreen(PlaceScreen):
    """Owns the thread that asks the machine; it runs while this screen is open."""

    DEFAULT_CSS = """
    SystemScreen {
        & > Static { text-wrap: nowrap; text-overflow: ellipsis; }
        & > #machine { height: auto; padding: 1 1 0 1; }
        & > #trainer, & > #inference { height: auto; padding: 1 1 0 1; }
        & > #daemons { height: 1fr; margin-top: 1; min-height: 4; }
        & > #detail { height: auto; max-height: 9; padding: 0 1; background: $panel; }
        &.-small > #machine, &.-small > #trainer, &.-small > #inference { padding: 0 1; }
        &.-small > #daemons { margin-top: 0; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,P", "app.pop_screen", "Back", key_display="esc"),
    ]
    AUTO_FOCUS = "#daemons"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.machine = Static(id="machine", markup=False)
        self.trainer = Static(id="trainer", markup=False)
        self.inference = Static(id="inference", markup=False)
        self.daemons = LineList[str](id="daemons", opens=True)
        self.detail = Static(id="detail", markup=False)
        self.look: SystemLook | None = None
        probe = (setting.make_probe or SystemProbe)(setting.output_dir)
        self._watcher = SystemWatcher(probe, self.post_message)

    def compose_body(self) -> ComposeResult:
        """Yield the machine, the trainer, inference, the daemons and the selected daemon."""
        yield self.machine
        yield self.trainer
        yield self.inference
        yield self.daemons
        yield self.detail

    def on_mount(self) -> None:
        """Redraw at each change of the theme from here on, and start the thread that measures the machine."""
        self.app.theme_changed_signal.subscribe(self, lambda _: self._redraw())
        self.run_worker(self._watcher.run, thread=True, name="measure the machine")

    def on_unmount(self) -> None:
        """Stop the thread that measures the machine."""
        self._watcher.stop()

    def on_resize(self) -> None:
        """Redraw; below 34 lines the blank lines between the parts are left out."""
        self.set_class(self.size.height < 34, "-small")
        self._redraw()

    def target_row(self) -> RunRow | None:
        """An orchestrator is a daemon by the name of its run."""
        name = self.daemons.selected
        return self.snapshot.row(name) if self.snapshot and name else None

    def target_daemon(self) -> str | None:
        """The name of the daemon under the cursor; None when there are no daemons."""
        return self.daemons.selected

    def refill(self, snapshot: Snapshot) -> None:
        """Redraw all, and let the thread measure the daemons of this look from here on."""
        self._watcher.take(snapshot.workspace)
        self._redraw()

    def on_system_changed(self, message: SystemChanged) -> None:
        """Keep what was measured, and redraw."""
        self.look = message.look
        self._redraw()

    @on(LineList.Moved)
    def _moved(self) -> None:
        self._show_detail()

    @on(LineList.Opened)
    def _opened(self) -> None:
        if row := self.target_row():
            self.guide.open_run(row.run_id)

    def _redraw(self) -> None:
        snapshot = self.snapshot
        if snapshot is None or not self.can_show:
            return
        width = max(self.size.width - 2, 20)
        self.machine.update(joined(machine_lines(self.look, width)))
        self.trainer.update(joined(trainer_lines(snapshot, self.look, width)))
        self.inference.update(joined(inference_lines(snapshot, width)))
        uses = self.look.machine.daemons if self.look else {}
        names = daemon_name_width(snapshot.daemons, width)
        lines = [daemon_line(daemon, uses.get(daemon.name), names) for daemon in snapshot.daemons]
        self.daemons.show([daemon.name for daemon in snapshot.daemons], lines.__getitem__, [daemon_heading(names)])
        self._show_detail()

    def _show_detail(self) -> None:
        daemon = self._selected_daemon()
        room = DETAIL_LINES if self.size.height >= 34 else 2
        lines = daemon_detail(daemon, room) if daemon else []
        self.detail.display = bool(lines)
        self.detail.update(joined(lines))
        self.show_keys()

    def _selected_daemon(self) -> DaemonRow | None:
        daemons = self.snapshot.daemons if self.snapshot else ()
        return next((daemon for daemon in daemons if daemon.name == self.daemons.selected), None)
