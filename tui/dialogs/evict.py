"""Evict runs: the reason is required, because their owners will read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Button, Input, OptionList, Static
from textual.widgets.option_list import Option

from daemons import actions
from tui.dialogs.job import JobDialog
from tui.dialogs.listing import listing
from tui.jobs import Job, Perform, Progress, each, name_runs, prl_command


class EvictDialog(JobDialog):
    """Enter in the reason or on a suggestion evicts all of `run_ids`."""

    DEFAULT_CSS = """
    EvictDialog {
        & OptionList { height: auto; max-height: 6; background: $surface; }
    }
    """

    def __init__(self, output_dir: Path, run_ids: Sequence[str], suggestions: Sequence[str], perform: Perform) -> None:
        super().__init__(perform)
        self._output_dir = output_dir
        self._run_ids = list(run_ids)
        self._suggestions = list(suggestions)

    def compose(self) -> ComposeResult:
        one = len(self._run_ids) == 1
        with Vertical(classes="box") as box:
            box.border_title = Content(f"evict {name_runs(self._run_ids)}")
            box.border_subtitle = "esc cancels"
            if not one:
                yield listing(self._run_ids)
            words = "It frees its slot; its" if one else "They free their slots; their"
            yield Static(
                f"{words} weights and checkpoints are kept. r readmits {'it' if one else 'them'}.", markup=False
            )
            yield Static("reason (required)", classes="label", markup=False)
            yield Input(id="reason", placeholder="why; the run's owner reads this", compact=True)
            yield Static("suggestions", classes="label", markup=False)
            yield OptionList(
                *(Option(Content(each)) for each in self._suggestions), id="suggestions", markup=False, compact=True
            )
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
            self.say("reason missing: the run's owner will read it", failed=True)
            self.query_one("#reason").focus()
            return
        self._evict(reason)

    @on(OptionList.OptionSelected)
    def _suggested(self, event: OptionList.OptionSelected) -> None:
        self._evict(self._suggestions[event.option_index])

    def _evict(self, reason: str) -> None:
        output_dir, run_ids = self._output_dir, self._run_ids

        def act(run_id: str, progress: Progress) -> str:
            done = actions.evict_run(output_dir, run_id, reason)
            return f"{run_id}: evicted" if done else f"{run_id}: already evicted; its first reason stays"

        command = prl_command(output_dir, "runs", "evict", *run_ids, "--reason", reason)
        self.start(Job(command, each(run_ids, "evicted", act)))
