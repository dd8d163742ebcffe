"""The base of the dialogs that act: they start a job and stay until it is done or failed."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from tui.jobs import Job, Perform
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
        return self._serial is not None

    def start(self, job: Job) -> None:
        if not self.is_busy:
            self.say("...")
            self._serial = self._perform(job)

    def say(self, text: str, *, failed: bool = False) -> None:
        for outcome in self.query("#outcome").results(Static):  # none while the app ends
            outcome.update(Content(text))
            outcome.set_class(bool(text), "-shown")
            outcome.set_class(failed, "-failed")

    def show_action(self, entry: ActionEntry) -> None:
        if self._serial is None or entry.serial != self._serial:
            return
        if entry.state == "done":
            self.dismiss()
        elif entry.state == "failed":
            self._serial = None
            self.say(entry.text, failed=True)
        else:
            self.say(entry.text)
