"""Confirmation of an action on many runs, or on the whole workspace. It lists what is affected."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Button, Static

from tui.dialogs.job import JobDialog
from tui.dialogs.listing import Listing
from tui.jobs import Job, Perform


class ConfirmDialog(JobDialog):
    """Enter confirms, esc cancels."""

    def __init__(self, title: str, lines: Sequence[str], words: str, verb: str, job: Job, perform: Perform) -> None:
        super().__init__(perform)
        self._title, self._lines, self._words, self._verb, self._job = title, lines, words, verb, job

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = Content(self._title)
            box.border_subtitle = "esc cancels"
            yield Listing(self._lines)
            yield Static(Content(self._words), markup=False)
            yield Static(Content(f"$ {self._job.command}"), classes="command", markup=False)
            yield Static(id="outcome", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button(self._verb, id="do", variant="warning", compact=True)

    def on_mount(self) -> None:
        self.query_one("#do").focus()

    @on(Button.Pressed, "#cancel")
    def _cancel(self) -> None:
        self.dismiss()

    @on(Button.Pressed, "#do")
    def _do(self) -> None:
        self.start(self._job)
