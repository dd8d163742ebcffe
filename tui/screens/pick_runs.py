"""Choose one run, or several, to compare with. Type to narrow; enter takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from tui.palette import make_palette
from tui.widgets.row_list import RowList


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
        & RowList { height: 12; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close"),
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("tab", "mark", "Mark", show=False, priority=True),
    ]

    def __init__(self, run_ids: Sequence[str], chosen: Sequence[str] = (), *, limit: int = 1) -> None:
        super().__init__()
        self._run_ids = list(run_ids)
        self._chosen = [run_id for run_id in chosen if run_id in run_ids]
        self._had_some = bool(self._chosen)
        self._limit = limit
        self._shown: list[str] = []
        self.input = Input(placeholder="type to narrow", compact=True)
        self.list = RowList("no other runs")
        self.list.can_focus = False

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            several = self._limit > 1
            box.border_title = f"compare with up to {self._limit} runs" if several else "compare with"
            box.border_subtitle = "tab marks · enter takes · esc closes" if several else "enter takes · esc closes"
            yield self.input
            yield self.list

    def on_mount(self) -> None:
        self.input.focus()
        self._fill("")

    def action_move(self, num: int) -> None:
        self.list.move(num)

    def action_mark(self) -> None:
        if self._limit == 1 or not self._shown:
            return
        run_id = self._shown[self.list.cursor]
        if run_id in self._chosen:
            self._chosen.remove(run_id)
        elif len(self._chosen) < self._limit:
            self._chosen.append(run_id)
        self._fill(self.input.value)
        self.list.move(1)

    @on(Input.Changed)
    def _narrow(self, event: Input.Changed) -> None:
        self._fill(event.value)

    @on(Input.Submitted)
    @on(RowList.Chosen)
    def _take(self) -> None:
        under = self._shown[self.list.cursor] if self._shown else None
        if self._limit == 1:
            self.dismiss((under,) if under else None)
        else:
            # Enter right away takes the one under the cursor; with all marks taken away it takes none.
            take_one = under is not None and not self._chosen and not self._had_some
            self.dismiss((under,) if take_one and under else tuple(self._chosen))

    def _fill(self, needle: str) -> None:
        self._shown = shown = [run_id for run_id in self._run_ids if needle.lower() in run_id.lower()]
        palette = make_palette(self.app.theme_variables)

        def make(index: int) -> Text:
            is_chosen = shown[index] in self._chosen
            return Text.assemble(("  ● " if is_chosen else "    ", palette.success), shown[index])

        self.list.show(len(shown), make, self.list.cursor, ())
