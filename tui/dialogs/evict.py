"""Evict a run: the reason is required, because the run's owner will read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Button, Input, OptionList, Static

from daemons import actions
from tui.dialogs.job import Job, JobDialog, Perform, prl_command

SUGGESTIONS = (
    "makes room for another run",
    "the reward does not improve",
    "the reward collapsed",
    "wrong configuration",
)


class EvictDialog(JobDialog):
    """Enter in the reason or on a suggestion evicts."""

    DEFAULT_CSS = """
    EvictDialog {
        & OptionList { height: 5; background: $surface; }
    }
    """

    def __init__(self, output_dir: Path, run_id: str, perform: Perform) -> None:
        super().__init__(perform)
        self._output_dir = output_dir
        self._run_id = run_id

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = Content(f"evict {self._run_id}")
            box.border_subtitle = "esc cancels"
            yield Static("It leaves its slot; its weights and checkpoints stay. r readmits it.", markup=False)
            yield Static("reason (required)", classes="label", markup=False)
            yield Input(id="reason", placeholder="why; the run's owner reads this", compact=True)
            yield Static("or one of these", classes="label", markup=False)
            yield OptionList(*SUGGESTIONS, id="suggestions", markup=False, compact=True)
            yield Static(id="outcome", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("Evict", id="evict", variant="warning", compact=True)

    def on_mount(self) -> None:
        self.query_one("#reason").focus()

    @on(Button.Pressed, "#cancel")
    def _cancel(self) -> None:
        self.dismiss()

    @on(Button.Pressed, "#evict")
    @on(Input.Submitted, "#reason")
    def _submit(self) -> None:
        reason = self.query_one("#reason", Input).value.strip()
        if not reason:
            self.say("write a reason: the run's owner will read it", failed=True)
            self.query_one("#reason").focus()
            return
        self._evict(reason)

    @on(OptionList.OptionSelected)
    def _suggested(self, event: OptionList.OptionSelected) -> None:
        self._evict(SUGGESTIONS[event.option_index])

    def _evict(self, reason: str) -> None:
        output_dir, run_id = self._output_dir, self._run_id

        def work(progress: Callable[[str], None]) -> str:
            done = actions.evict_run(output_dir, run_id, reason)
            return f"{run_id} is evicted" if done else f"{run_id} was evicted already; its first reason stays"

        self.start(Job(prl_command(output_dir, "runs", "evict", run_id, "--reason", reason), work))
