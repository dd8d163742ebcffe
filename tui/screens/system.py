"""The machine and the parts: what trainer, inference and orchestrators do and take, and how long the disk lasts."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from tui.palette import make_palette
from tui.screens.base import PlaceScreen, Setting
from tui.snapshot import Part, RunRow, Snapshot
from tui.system import (
    inference_lines,
    machine_lines,
    part_detail,
    part_heading,
    part_line,
    part_name_width,
    trainer_lines,
)
from tui.system_watch import SystemChanged, SystemLook, SystemProbe, SystemWatcher
from tui.widgets.line_list import LineList, joined

# Where there is room, so many lines of the selected part's log.
DETAIL_LINES = 8
WIDE = 120


class SystemScreen(PlaceScreen):
    """Owns the thread that asks the machine; it runs while this screen is open."""

    DEFAULT_CSS = """
    SystemScreen {
        & > Static { text-wrap: nowrap; text-overflow: ellipsis; }
        & > #machine { height: auto; padding: 1 1 0 1; }
        & > #trainer, & > #inference { height: auto; padding: 1 1 0 1; }
        & > #parts { height: 1fr; margin-top: 1; min-height: 4; }
        & > #detail { height: auto; max-height: 9; padding: 0 1; background: $panel; }
        &.-small > #machine, &.-small > #trainer, &.-small > #inference { padding: 0 1; }
        &.-small > #parts { margin-top: 0; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,P", "app.pop_screen", "Back", key_display="esc"),
    ]
    AUTO_FOCUS = "#parts"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.machine = Static(id="machine", markup=False)
        self.trainer = Static(id="trainer", markup=False)
        self.inference = Static(id="inference", markup=False)
        self.parts = LineList(id="parts")
        self.detail = Static(id="detail", markup=False)
        self.look: SystemLook | None = None
        probe = (setting.make_probe or SystemProbe)(setting.output_dir)
        self._watcher = SystemWatcher(probe, self.post_message)

    def compose_body(self) -> ComposeResult:
        yield self.machine
        yield self.trainer
        yield self.inference
        yield self.parts
        yield self.detail

    def on_mount(self) -> None:
        super().on_mount()
        self.app.theme_changed_signal.subscribe(self, lambda _: self._redraw())
        self.run_worker(self._watcher.run, thread=True, name="ask the machine")

    def on_unmount(self) -> None:
        self._watcher.stop()

    def on_resize(self) -> None:
        self.set_class(self.size.height < 34, "-small")
        self._redraw()

    def target_row(self) -> RunRow | None:
        """An orchestrator is a part by the name of its run."""
        name = self.parts.selected
        return self.snapshot.row(name) if self.snapshot and name else None

    def target_part(self) -> str | None:
        return self.parts.selected

    def refill(self, snapshot: Snapshot) -> None:
        if self._watcher.house is None:
            self._watcher.house = snapshot.house
            self._watcher.wake()
        self._watcher.house = snapshot.house
        self._redraw()

    def on_system_changed(self, message: SystemChanged) -> None:
        self.look = message.look
        self._redraw()

    @on(LineList.Moved)
    def _moved(self) -> None:
        self._show_detail()

    @on(LineList.Opened)
    def _opened(self, event: LineList.Opened) -> None:
        if event.key in self.run_ids():
            self.guide.open_run(event.key)

    def _redraw(self) -> None:
        snapshot = self.snapshot
        if snapshot is None or not self.can_show:
            return
        width, palette = max(self.size.width - 2, 20), make_palette(self.app.theme_variables)
        self.machine.update(joined(machine_lines(self.look, width, palette)))
        self.trainer.update(joined(trainer_lines(snapshot, self.look, width, palette)))
        self.inference.update(joined(inference_lines(snapshot, width, palette)))
        uses = self.look.machine.parts if self.look else {}
        names = part_name_width(snapshot.parts, width)
        lines = [(part.name, part_line(part, uses.get(part.name), names, palette)) for part in snapshot.parts]
        self.parts.show(lines, [part_heading(names)])
        self._show_detail()

    def _show_detail(self) -> None:
        part = self._selected_part()
        room = DETAIL_LINES if self.size.height >= 34 else 2
        lines = part_detail(part, make_palette(self.app.theme_variables), room) if part else []
        self.detail.display = bool(lines)
        self.detail.update(joined(lines))
        self.show_keys()

    def _selected_part(self) -> Part | None:
        parts = self.snapshot.parts if self.snapshot else ()
        return next((part for part in parts if part.name == self.parts.selected), None)
