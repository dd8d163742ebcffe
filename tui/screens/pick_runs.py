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

from tui.widgets.line_list import LineList


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
        self.list = LineList[str]("no other runs")
        self.list.can_focus = False

    def compose(self) -> ComposeResult:
        """Yield the input and, below it, the runs that contain what is typed."""
        with Vertical() as box:
            several = self._limit > 1
            box.border_title = f"compare with up to {self._limit} runs" if several else self._title
            box.border_subtitle = "tab marks · enter takes · esc closes" if several else "enter takes · esc closes"
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
