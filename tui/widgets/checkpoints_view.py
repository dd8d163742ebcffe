"""The checkpoints of a run, newest first: step, whether complete, size, age, and which one a restart goes on from."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical

from tui import fmt
from tui.checkpoints import Checkpoint, CheckpointsData
from tui.palette import Palette, make_palette
from tui.widgets.row_list import RowList

HEADING = "   step  state       size        age   saved (UTC)          holds"


def list_row(checkpoint: Checkpoint, palette: Palette, now: float, *, is_next: bool) -> Text:
    """One checkpoint; `is_next`: a restart goes on from it."""
    stable = checkpoint.is_stable
    saved = checkpoint.saved_at
    when = "-" if saved is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(saved))
    text = Text.assemble(
        (f"{checkpoint.step:>7}  ", "bold" if stable else palette.muted),
        (f"{'✔ STABLE' if stable else '◌ partial':<10}", palette.success if stable else palette.warning),
        f"{fmt.size(checkpoint.num_bytes):>10}  ",
        (f"{fmt.age(None if saved is None else max(now - saved, 0.0)):>5}   {when:<21}", palette.muted),
        ("◂ resumes here  " if is_next else "", palette.accent),
        (" ".join(checkpoint.parts) or "nothing yet", palette.muted),
        no_wrap=True,
    )
    return text


class CheckpointsView(Vertical, can_focus=False):
    """Has the keys through its list. What acts on the chosen step is the screen's."""

    DEFAULT_CSS = """
    CheckpointsView { background: $surface; & > RowList { height: 1fr; } }
    """
    BINDINGS: ClassVar[list[BindingType]] = []

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(id="checkpoints")
        self.list = RowList("no checkpoints yet: ckpt.interval sets how often one is saved")
        self._clock = clock
        self._rows: list[Checkpoint] = []
        self._data: CheckpointsData | None = None

    def compose(self) -> ComposeResult:
        yield self.list

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda _: self._fill())

    @property
    def selected(self) -> Checkpoint | None:
        return self._rows[self.list.cursor] if self._rows else None

    def show(self, data: CheckpointsData) -> None:
        self._data = data
        self._fill()

    def _fill(self) -> None:
        data = self._data
        if data is None:
            return
        selected, palette, clock = self.selected, make_palette(self.app.theme_variables), self._clock
        self._rows = rows = list(reversed(data.checkpoints))
        place = next((i for i, row in enumerate(rows) if selected and row.step == selected.step), 0)
        total = sum(row.num_bytes for row in rows)
        about = f"{len(rows)} checkpoints, {fmt.size(total)}" if rows else ""

        def make(index: int) -> Text:
            return list_row(rows[index], palette, clock(), is_next=rows[index].step == data.resumes_at)

        self.list.show(len(rows), make, place, (about, HEADING if rows else ""))
