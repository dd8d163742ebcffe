"""Delete a run: says what would go, asks for the name when it is live, and shows what it waits for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Button, Input, Static

from daemons import actions
from tui import fmt
from tui.dialogs.job import Job, JobDialog, Perform, prl_command
from tui.messages import ActionEntry

# Counting further would keep a thread busy long after the person has decided.
MAX_FILES = 100_000


def size_on_disk(folder: Path, stop: Callable[[], bool] = lambda: False) -> tuple[int, bool]:
    """(bytes of the files below `folder`, whether that is all of them); links are not followed."""
    total = num = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            num += 1
            if num > MAX_FILES or stop():
                return total, False
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total, True


class DeleteDialog(JobDialog):
    """A live run is deleted only after its name was typed."""

    DEFAULT_CSS = """
    DeleteDialog {
        & .label { display: none; }
        & #name { display: none; }
        &.-live .label { display: block; }
        &.-live #name { display: block; }
    }
    """

    class Measured(Message):
        """How large the run is."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, output_dir: Path, run_id: str, *, step: int, is_live: bool, perform: Perform) -> None:
        super().__init__(perform)
        self._output_dir = output_dir
        self._run_id = run_id
        self._step = step
        self._is_live = is_live

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = Content(f"delete {self._run_id}")
            box.border_subtitle = "esc cancels"
            yield Static(self._facts("..."), id="facts", markup=False)
            yield Static("it is in use: it will be evicted first. Type its name:", classes="label", markup=False)
            yield Input(id="name", placeholder=self._run_id, compact=True)
            yield Static(id="outcome", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("Delete", id="delete", variant="error", compact=True)

    def on_mount(self) -> None:
        self._ask()
        self.run_worker(self._measure, thread=True, name=f"size of {self._run_id}")

    def show_action(self, entry: ActionEntry) -> None:
        is_ours = entry.serial == self._serial
        super().show_action(entry)
        if is_ours and entry.state == "failed" and not self._is_live:
            # Its processes were at work after all: it can be forced, like a live one.
            self._is_live = True
            self._ask()

    def _ask(self) -> None:
        self.set_class(self._is_live, "-live")
        self.query_one("#delete", Button).disabled = self._is_live
        self.query_one("#name" if self._is_live else "#delete").focus()

    def _facts(self, size: str) -> Content:
        steps = f"{self._step} step{'' if self._step == 1 else 's'}"
        return Content.assemble(
            (f"{steps} of training, {size} on disk", "bold"),
            "\nIt moves to the trash; u brings it back until prl runs purge.",
        )

    def _measure(self) -> None:
        total, complete = size_on_disk(self._output_dir / self._run_id)
        self.post_message(self.Measured(fmt.size(total) if complete else f"more than {fmt.size(total)}"))

    def on_delete_dialog_measured(self, message: Measured) -> None:
        self.query_one("#facts", Static).update(self._facts(message.text))

    @on(Input.Changed, "#name")
    def _name_changed(self, event: Input.Changed) -> None:
        self.query_one("#delete", Button).disabled = event.value.strip() != self._run_id

    @on(Button.Pressed, "#cancel")
    def _cancel(self) -> None:
        self.dismiss()

    @on(Button.Pressed, "#delete")
    @on(Input.Submitted, "#name")
    def _delete(self) -> None:
        if self._is_live and self.query_one("#name", Input).value.strip() != self._run_id:
            self.say(f"type {self._run_id} to delete it", failed=True)
            return
        output_dir, run_id, force = self._output_dir, self._run_id, self._is_live

        def work(progress: Callable[[str], None]) -> str:
            lies = actions.delete_run(output_dir, run_id, force=force, on_progress=progress)
            return f"{run_id} lies in {lies.parent.name}; u brings it back"

        yes = ["--yes"] if force else []
        self.start(Job(prl_command(output_dir, "runs", "delete", run_id, *yes), work))
