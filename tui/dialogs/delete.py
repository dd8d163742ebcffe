"""Evict and delete runs.

A reason for an eviction is chosen among those that what is seen of the run suggests, or written. Before runs are
deleted the dialog lists what would go, asks for the name when one is live, and shows what it waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Button, Input, OptionList, Static
from textual.widgets.option_list import Option

from daemons import actions
from daemons.machine import disk_use
from prime_rl.contract.metrics import short_texts
from prime_rl.contract.status import LOST, STALLED, RunState
from prime_rl.utils.text import size_text
from tui import fmt
from tui.actions import Job, Perform, Progress, each, name_runs, prl_command, runs_job
from tui.dialogs.form import JobDialog, Listing
from tui.messages import ActionEntry
from tui.model.snapshot import RunRow
from tui.readers.charts import CHANGE_WINDOW
from tui.widgets.line_list import Clipped, titled

# Counting for longer would keep a thread busy long after the person has decided.
COUNT_LIMIT_S = 30.0


class DeleteDialog(JobDialog):
    """Live runs are deleted only after typing a name: the run's, or for several "delete" and their number.

    `deleted` gets the ids of what was deleted, for undo.
    """

    DEFAULT_CSS = """
    DeleteDialog {
        & .label { display: none; }
        & #name { display: none; }
        &.-live .label { display: block; }
        &.-live #name { display: block; }
    }
    """

    def __init__(
        self, output_dir: Path, rows: Sequence[RunRow], deleted: Callable[[Sequence[str]], None], perform: Perform
    ) -> None:
        super().__init__(perform)
        self._output_dir = output_dir
        self._rows = list(rows)
        self._run_ids = [row.run_id for row in rows]
        self._deleted = deleted
        self._is_live = any(row.is_live for row in rows)
        # After a failure of a live one: what only the run's own status file names is not waited for.
        self._is_forced = False

    @property
    def wanted(self) -> str:
        """The text that confirms the deletion of a live run."""
        return self._run_ids[0] if len(self._run_ids) == 1 else f"delete {len(self._run_ids)}"

    def compose(self) -> ComposeResult:
        """Yield the runs, the facts, the line for the name and the buttons; the sizes come later."""
        with titled(Vertical(classes="box"), f"delete {name_runs(self._run_ids)}", "esc cancels"):
            yield Listing(self._lines({}))
            yield Static(self._facts("..."), id="facts", markup=False)
            yield Static(self._warning(), classes="label", markup=False)
            yield Input(id="name", placeholder=self.wanted, compact=True)
            yield Clipped(id="outcome", markup=False)
            yield from self.buttons("Delete", "delete", "error")

    def on_mount(self) -> None:
        """Measure the runs in a thread; the list is shown for several runs only."""
        self.query_one(Listing).display = len(self._rows) > 1
        self._ask()
        self.run_worker(self._measure, thread=True, name=f"size of {name_runs(self._run_ids)}")

    def show_action(self, entry: ActionEntry) -> None:
        """Show how the deletion goes; after a failure the name is asked for, and the next attempt is forced."""
        is_ours = entry.serial == self._serial
        super().show_action(entry)
        if is_ours and entry.state == "failed":
            # Processes were at work after all: it can be forced, like a live one; and that again, with --force.
            self._is_forced, self._is_live = self._is_live, True
            self.query_one(".label", Static).update(self._warning())
            self._ask()

    def _ask(self) -> None:
        self.set_class(self._is_live, "-live")
        self.query_one("#delete", Button).disabled = self._is_live
        self.query_one("#name" if self._is_live else "#delete").focus()

    def _warning(self) -> Content:
        if self._is_forced:
            return Content(f"Or delete what only its own status file shows as in use (--force). Type {self.wanted}:")
        if len(self._rows) == 1:
            return Content("It is in use and will be evicted first. Type its name:")
        return Content(f"Some are in use and will be evicted first. Type {self.wanted}:")

    def _lines(self, sizes: dict[str, str]) -> list[str]:
        return [
            f"· {row.run_id}  {row.symbol} {row.state}  {fmt.counted(row.step, 'step')}  {sizes.get(row.run_id, '...')}"
            for row in self._rows
        ]

    def _facts(self, size: str) -> Content:
        what = fmt.counted(self._rows[0].step, "step") if len(self._rows) == 1 else f"{len(self._rows)} runs"
        return Content.assemble(
            (f"{what} of training, {size} on disk", "bold"),
            f"\nMoves to the trash; u restores {'it' if len(self._rows) == 1 else 'them'} until prl runs purge.",
        )

    def _measure(self) -> None:
        sizes, total, complete = {}, 0, True
        for run_id in self._run_ids:
            folder, stop = self._output_dir / run_id, lambda: not self.is_running
            use = disk_use(folder, limit_s=COUNT_LIMIT_S, stop=stop, as_stored=False)
            total, complete = total + use.num_bytes, complete and use.complete
            sizes[run_id] = _said(use.num_bytes, use.complete)
        self.call_later(self._show_sizes, sizes, _said(total, complete))

    def _show_sizes(self, sizes: dict[str, str], total: str) -> None:
        self.query_one("#facts", Static).update(self._facts(total))
        self.query_one(Listing).show(self._lines(sizes))

    @on(Input.Changed, "#name")
    def _name_changed(self, event: Input.Changed) -> None:
        self.query_one("#delete", Button).disabled = event.value.strip() != self.wanted

    @on(Button.Pressed, "#delete")
    @on(Input.Submitted, "#name")
    def _delete(self) -> None:
        if self._is_live and self.query_one("#name", Input).value.strip() != self.wanted:
            self.say(f"type {self.wanted} to delete", failed=True)
            return
        output_dir, run_ids, force, claimed = self._output_dir, self._run_ids, self._is_live, not self._is_forced
        gone: list[str] = []

        def act(run_id: str, progress: Progress) -> str:
            lies = actions.delete_run(output_dir, run_id, force=force, on_progress=progress, claimed=claimed)
            gone.append(run_id)
            return f"{run_id}: moved to {lies.parent.name}; u restores it"

        def work(progress: Progress) -> str:
            try:
                return each(run_ids, "moved to the trash; u restores them", act)(progress)
            finally:
                self._deleted(gone)

        yes = [*(["--yes"] if force or len(run_ids) > 1 else []), *([] if claimed else ["--force"])]
        self.start(Job(prl_command(output_dir, "runs", "delete", *run_ids, *yes), work))


def _said(size: int, complete: bool) -> str:
    return size_text(size) if complete else f"more than {size_text(size)}"


# A smaller rise of the reward is none.
LEAST_GAIN = 0.005
MAX_SUGGESTIONS = 5
ALWAYS = ("makes room for another run", "the reward does not improve", "wrong configuration")


def suggest(rows: Sequence[RunRow], all_rows: Sequence[RunRow]) -> list[str]:
    """Suggest reasons, those that fit the run best first; for several runs only what is true of any."""
    found: list[str] = []
    if len(rows) == 1:
        found += _seen(rows[0])
    waiting = next((row for row in all_rows if row.state == RunState.WAITING and row not in rows), None)
    if waiting is not None:
        found.append(f"makes room for {waiting.run_id}, which waits for a slot")
    heads = {reason.split(":")[0] for reason in found}
    return [*found, *(reason for reason in ALWAYS if reason not in heads)][:MAX_SUGGESTIONS]


def _seen(row: RunRow) -> list[str]:
    found: list[str] = []
    if row.state in (LOST, STALLED):
        found.append(row.note)
    if row.loss is not None and not math.isfinite(row.loss):
        found.append(f"the loss is {row.loss}")
    signs = short_texts(row.view.signs)
    found += signs
    if not signs and row.reward_change is not None and row.reward_change < LEAST_GAIN:
        change = f"{fmt.reward(row.reward)}, {fmt.gain(row.reward_change)} over {2 * CHANGE_WINDOW} steps"
        found.append(f"the reward does not improve: {change}")
    return found


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
        """Yield the line for the reason and the suggestions; above them the runs, if there are several."""
        one = len(self._run_ids) == 1
        with titled(Vertical(classes="box"), f"evict {name_runs(self._run_ids)}", "esc cancels"):
            if not one:
                yield Listing([f"· {run_id}" for run_id in self._run_ids])
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
            yield Clipped(id="outcome", markup=False)
            yield from self.buttons("Evict", "evict", "warning")

    def on_mount(self) -> None:
        """Give the focus to the line for the reason."""
        self.query_one("#reason").focus()

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
        act = partial(actions.EVICT, reason=reason)
        self.start(runs_job(self._output_dir, "evict", self._run_ids, "evicted", act, "--reason", reason))
