"""Choose one item of a list, and do it: which daemon to restart, how to start the workspace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from prime_rl.utils.text import CleanText
from tui.dialogs.job import JobDialog
from tui.jobs import Job, Perform


@dataclass(frozen=True)
class Choice:
    """One line and its job."""

    label: CleanText
    job: Callable[[], Job]


class ChooseDialog(JobDialog):
    """Enter on a line does it; `first` is the line that is selected at first."""

    DEFAULT_CSS = """
    ChooseDialog {
        & OptionList { height: auto; max-height: 14; background: $surface; margin-top: 1; }
    }
    """

    def __init__(self, title: str, words: str, choices: Sequence[Choice], perform: Perform, *, first: int = 0) -> None:
        super().__init__(perform)
        self._title, self._words, self._choices, self._first = title, words, choices, first

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = Content(self._title)
            box.border_subtitle = "enter confirms · esc cancels"
            yield Static(Content(self._words), markup=False)
            yield OptionList(*(Option(Content(each.label)) for each in self._choices), markup=False, compact=True)
            yield Static(id="outcome", markup=False)

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        options.focus()
        options.highlighted = self._first

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.start(self._choices[event.option_index].job())
