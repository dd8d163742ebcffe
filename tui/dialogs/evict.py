"""Evict runs with a reason: chosen among those that what is seen of the run suggests, or written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Button, Input, OptionList, Static
from textual.widgets.option_list import Option

from daemons import actions
from prime_rl.contract.condition import LOST, STALLED
from prime_rl.contract.status import RunState
from tui import fmt
from tui.actions.jobs import Job, Perform, Progress, each, name_runs, prl_command
from tui.dialogs.job import JobDialog, listing
from tui.model.snapshot import RunRow

# A mean of five rewards below this share of the best mean is a collapse; a smaller change is ignored.
COLLAPSE_SHARE = 0.5
LEAST_GAIN = 0.005
WINDOW = 5
MAX_SUGGESTIONS = 5
ALWAYS = ("makes room for another run", "the reward does not improve", "wrong configuration")


def suggest(rows: Sequence[RunRow], all_rows: Sequence[RunRow]) -> list[str]:
    """What fits the run best comes first; for several runs only what is true of any."""
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
    rewards = row.tail.rewards
    if len(rewards) >= 2 * WINDOW:
        means = [sum(rewards[i : i + WINDOW]) / WINDOW for i in range(len(rewards) - WINDOW + 1)]
        best, last = max(means), means[-1]
        if best > 0 and last < COLLAPSE_SHARE * best:
            found.append(f"the reward collapsed: {fmt.reward(last)} after {fmt.reward(best)}")
        elif row.reward_change is not None and row.reward_change < LEAST_GAIN:
            change = fmt.gain(row.reward_change)
            found.append(f"the reward does not improve: {fmt.reward(last)}, {change} over {2 * WINDOW} steps")
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
        output_dir, run_ids = self._output_dir, self._run_ids

        def act(run_id: str, progress: Progress) -> str:
            return actions.EVICT(output_dir, run_id, reason=reason)

        command = prl_command(output_dir, "runs", "evict", *run_ids, "--reason", reason)
        self.start(Job(command, each(run_ids, "evicted", act)))
