"""The base of the dialogs that act: they start a job and stay until it is done or failed; and the two plain dialogs.

`ConfirmDialog` is for an action on many runs or on the whole workspace, `ChooseDialog` for one item of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, OptionList, Static
from textual.widgets.button import ButtonVariant
from textual.widgets.option_list import Option

from prime_rl.utils.text import CleanText
from tui.actions.jobs import Job, Perform
from tui.messages import ActionEntry


class JobDialog(ModalScreen[None]):
    """A dialog with a `#outcome` line. Escape closes it at any time; a running job continues."""

    DEFAULT_CSS = """
    JobDialog {
        align: center middle;
        & .box {
            width: 76; max-width: 98%; height: auto; max-height: 98%;
            border: round $primary; border-title-color: $primary; border-subtitle-color: $foreground 50%;
            background: $surface; padding: 1 2;
        }
        & #outcome { height: auto; max-height: 4; margin-top: 1; color: $foreground 70%; display: none; }
        & #outcome.-shown { display: block; }
        & #outcome.-failed { color: $text-error; }
        & .buttons { height: auto; margin-top: 1; align-horizontal: right; }
        & .buttons Button { margin-left: 2; min-width: 12; }
        & Input { padding: 0 1; background: $panel; }
        & Input:focus { background: $primary 25%; background-tint: transparent 0%; }
        & .label { color: $foreground 60%; height: 1; margin-top: 1; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Close")]

    def __init__(self, perform: Perform) -> None:
        super().__init__()
        self._perform = perform
        self._serial: int | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the job was started and has not failed."""
        return self._serial is not None

    def buttons(self, verb: str, id: str, variant: ButtonVariant) -> ComposeResult:
        """Yield a row of two buttons: Cancel, and `verb` with the id `id`."""
        with Horizontal(classes="buttons"):
            yield Button("Cancel", id="cancel", compact=True)
            yield Button(verb, id=id, variant=variant, compact=True)

    @on(Button.Pressed, "#cancel")
    def _cancel(self) -> None:
        self.dismiss()

    def start(self, job: Job) -> None:
        """Start the job unless one is running; its progress comes through `show_action`."""
        if not self.is_busy:
            self.say("...")
            self._serial = self._perform(job)

    def say(self, text: str, *, failed: bool = False) -> None:
        """Show a text in the `#outcome` line, as an error where it `failed`; "" hides the line."""
        for outcome in self.query("#outcome").results(Static):  # none while the app ends
            outcome.update(Content(text))
            outcome.set_class(bool(text), "-shown")
            outcome.set_class(failed, "-failed")

    def show_action(self, entry: ActionEntry) -> None:
        """Close when the dialog's own job is done, else show its progress; after an error it may start again."""
        if self._serial is None or entry.serial != self._serial:
            return
        if entry.state == "done":
            self.dismiss()
        elif entry.state == "failed":
            self._serial = None
            self.say(entry.text, failed=True)
        else:
            self.say(entry.text)


class Listing(VerticalScroll):
    """Lines of text, at most nine at a time; more of them scroll."""

    DEFAULT_CSS = """
    Listing {
        height: auto; max-height: 9; margin-bottom: 1; scrollbar-size-vertical: 1;
        & > Static { height: auto; color: $foreground 80%; }
    }
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(can_focus=len(lines) > 9)
        self._text = Static(Content("\n".join(lines)), markup=False)

    def compose(self) -> ComposeResult:
        """Yield the lines as one text."""
        yield self._text

    def show(self, lines: Sequence[str]) -> None:
        """Replace the lines."""
        self._text.update(Content("\n".join(lines)))


def listing(run_ids: Sequence[str]) -> Listing:
    """Runs, one a line."""
    return Listing([f"· {run_id}" for run_id in run_ids])


class ConfirmDialog(JobDialog):
    """Enter confirms, esc cancels."""

    def __init__(self, title: str, lines: Sequence[str], words: str, verb: str, job: Job, perform: Perform) -> None:
        super().__init__(perform)
        self._title, self._lines, self._words, self._verb, self._job = title, lines, words, verb, job

    def compose(self) -> ComposeResult:
        """Yield the lines, the words, the shell command and the buttons."""
        with Vertical(classes="box") as box:
            box.border_title = Content(self._title)
            box.border_subtitle = "esc cancels"
            yield Listing(self._lines)
            yield Static(Content(self._words), markup=False)
            yield Static(Content(f"$ {self._job.command}"), classes="command", markup=False)
            yield Static(id="outcome", markup=False)
            yield from self.buttons(self._verb, "do", "warning")

    def on_mount(self) -> None:
        """Give the focus to the button, so that enter confirms."""
        self.query_one("#do").focus()

    @on(Button.Pressed, "#do")
    def _do(self) -> None:
        self.start(self._job)


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
        """Yield the words and the list of choices."""
        with Vertical(classes="box") as box:
            box.border_title = Content(self._title)
            box.border_subtitle = "enter confirms · esc cancels"
            yield Static(Content(self._words), markup=False)
            yield OptionList(*(Option(Content(each.label)) for each in self._choices), markup=False, compact=True)
            yield Static(id="outcome", markup=False)

    def on_mount(self) -> None:
        """Give the focus to the list, with the line `first` selected."""
        options = self.query_one(OptionList)
        options.focus()
        options.highlighted = self._first

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.start(self._choices[event.option_index].job())
