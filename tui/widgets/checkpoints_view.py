"""The checkpoints of a run, newest first: step, whether complete, size, age, and which one a restart goes on from."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical

from prime_rl.utils.text import size_text
from tui import fmt
from tui.readers.checkpoints import Checkpoint, CheckpointsData
from tui.widgets.line_list import LineList

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


class CheckpointsView(Vertical, can_focus=False):
    """Has the keys through its list. What acts on the chosen step is the screen's."""

    DEFAULT_CSS = """
    CheckpointsView { background: $surface; & > LineList { height: 1fr; background: $surface; } }
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(id="checkpoints")
        self.list = LineList[int]("no checkpoints yet: ckpt.interval sets how often one is saved")
        self._clock = clock
        self._data: CheckpointsData | None = None

    def compose(self) -> ComposeResult:
        """Yield the list."""
        yield self.list

    def on_mount(self) -> None:
        """Fill the list again whenever the theme changes."""
        self.app.theme_changed_signal.subscribe(self, lambda _: self._fill())

    @property
    def selected(self) -> Checkpoint | None:
        """The checkpoint under the cursor; None while the list is empty."""
        rows = self._data.checkpoints if self._data else ()
        return next((row for row in rows if row.step == self.list.selected), None)

    def show(self, data: CheckpointsData) -> None:
        """Fill the list with the checkpoints of `data`; above it their number and their size in all."""
        self._data = data
        self._fill()

    def _fill(self) -> None:
        data = self._data
        if data is None:
            return
        clock, rows = self._clock, data.checkpoints[::-1]
        total = sum(row.num_bytes for row in rows)
        about = f"{len(rows)} checkpoints, {size_text(total)}" if rows else ""

        def make(index: int) -> Text:
            return list_row(rows[index], clock(), is_next=rows[index].step == data.starts_at)

        self.list.show([row.step for row in rows], make, (Text(about), Text(HEADING if rows else "")))
