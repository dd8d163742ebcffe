"""Below the table of home: the selected run in short, with its curves in a tall terminal; without runs, advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text
from textual.app import ComposeResult, RenderResult
from textual.containers import Horizontal, Vertical
from textual.widget import Widget
from textual.widgets import Static

from prime_rl.contract.condition import LOST
from tui import fmt
from tui.model.levels import STATE_WORDS
from tui.model.snapshot import RunRow, budget_words, standing
from tui.readers.machine import Finding
from tui.readers.workspace_metrics import CurvesData
from tui.widgets.chart import Chart
from tui.widgets.header import budget_text

# The curves of the run before stay for so long: those of the selected one come at once, unless the disk is slow, and
# an empty chart between them would flicker.
CURVES_S = 0.2


def describe(row: RunRow, now: float, num_marked: int = 0) -> Text:
    """A few sentences about one run; the first lines are the ones that matter."""
    colour = row.level.style
    text = Text.assemble((row.run_id, "bold"), "  ", (f"{row.symbol} {row.state}", colour))
    text.append(f"  {STATE_WORDS[row.state]}", "muted")
    if num_marked:
        text.append(f"  ✓ {num_marked} marked", "accent")
    body = row.reason or row.note
    if row.state == LOST:
        body = row.note
    if body:
        text.append("\n")
        text.append(body, "error" if row.is_bad else "text")
    text.append("\n")
    if (budget := budget_text(row)) is not None:
        text.append_text(budget).append(f" {budget_words(row)} · ", "muted")
    text.append(_figures(row, now), "muted")
    return text


def _figures(row: RunRow, now: float) -> str:
    pieces = [f"step {row.step}" + (f" of {row.max_steps}" if row.max_steps else "")]
    if row.tokens_per_s is not None:
        pieces.append(f"{fmt.count(row.tokens_per_s)} tokens/s")
    if row.view.batch_size is not None:
        pieces.append(f"batch {row.view.batch_size}")
    if row.view.lr is not None:
        pieces.append(f"lr {fmt.number(row.view.lr)}")
    pieces += [f"{name} {value}" for name, value in standing(row)]
    if row.updated_at is not None:
        pieces.append(f"seen {fmt.seen_ago(now - row.updated_at)}")
    return " · ".join(pieces)


class Preview(Vertical):
    """The selected run; hidden while there is none."""

    DEFAULT_CSS = """
    Preview {
        height: 4;
        border-top: solid $border;
        background: $surface;
        & > Static { height: 3; padding: 0 1; }
        & > Horizontal { height: 0; }
        &.-tall { height: 45%; }
        &.-tall > Horizontal { height: 1fr; }
    }
    """

    def __init__(self) -> None:
        super().__init__(id="preview")
        self._text = Static(markup=False)
        self._described = Text()
        self._run_id = self._drawn_id = ""
        self._reward = Chart("reward", is_reward=True)
        self._loss = Chart("loss", colour="accent")

    def compose(self) -> ComposeResult:
        """Yield the text, and the charts of reward and loss, which have height only in a tall preview."""
        yield self._text
        with Horizontal():
            yield self._reward
            yield self._loss

    def on_mount(self) -> None:
        """Draw the text again whenever the theme changes."""
        self.app.theme_changed_signal.subscribe(self, lambda _: self._text.update(self._described, layout=False))

    def show(self, row: RunRow | None, now: float, num_marked: int = 0) -> None:
        """Describe `row`, or hide for None; charts of another run are emptied if no curves come in CURVES_S."""
        self.display = row is not None
        if row is None:
            return
        text = describe(row, now, num_marked)
        if text != self._described:
            self._described = text
            self._text.update(text, layout=False)
        if row.run_id != self._run_id:
            self._run_id = row.run_id
            self.set_timer(CURVES_S, self._miss_curves)

    def show_curves(self, curves: CurvesData) -> None:
        """Those of a run that is no longer selected are dropped."""
        if curves.run_id == self._run_id:
            self._drawn_id = curves.run_id
            self._reward.show(curves.reward)
            self._loss.show(curves.loss)

    def _miss_curves(self) -> None:
        if self._drawn_id != self._run_id:
            self.show_curves(CurvesData(self._run_id))


@dataclass(frozen=True)
class Nothing:
    """Why no run is shown, and what a person who starts should know.

    Attributes:
        needle: the filter that no run matches; "" for a workspace without runs.
        findings: what `prl doctor` found; None: it is not done yet.
    """

    needle: str = ""
    trainer_lives: bool = False
    findings: Sequence[Finding] | None = None


# More than fit into the smallest terminal under the advice.
MAX_FINDINGS = 6


def describe_nothing(nothing: Nothing, *, read_only: bool, width: int = 80) -> Text:
    """What to do next, in the order in which to do it; then what stands in the way, one line each."""
    key = "bold accent"
    if nothing.needle:
        return Text.assemble(
            ("no runs match ", "muted"),
            (nothing.needle, "bold"),
            "\n\n",
            ("esc", key),
            (" shows all runs", "muted"),
        )
    text = Text.assemble(("no runs here yet", "bold primary"), "\n\n", justify="left")
    lines = [] if nothing.trainer_lives else [("prl up", "start trainer and inference")]
    if not (nothing.trainer_lives or read_only):
        lines[0] = ("U", "start trainer and inference; from a shell: prl up")
    if not read_only:
        lines.append(("a", "add a run: from a template, or from a TOML file of yours"))
    lines.append(("prl runs add FILE", "add a run from a shell" if read_only else "the same from a shell"))
    if not nothing.trainer_lives:
        lines.append(("prl demo", "see it work first: three small runs in their own folder"))
    for name, words in lines:
        text.append(f"{name:<22}", key).append(f"{words}\n", "muted")
    return text.append_text(_findings(nothing.findings, width))


def _findings(findings: Sequence[Finding] | None, width: int) -> Text:
    if findings is None:
        return Text()
    if not findings:
        return Text.styled("\n✔ prl doctor finds no problem here", "success")
    text = Text()
    for finding in findings[:MAX_FINDINGS]:
        colour = "error" if finding.is_broken else "warning"
        line = Text.assemble((f"{'✖' if finding.is_broken else '▲'} ", colour), (finding.text, "text"))
        line.truncate(max(width - 4, 1), overflow="ellipsis")
        text.append("\n").append_text(line)
    more = len(findings) - MAX_FINDINGS
    return text.append(f"\n{f'{more} more, and ' if more > 0 else ''}what to do: prl doctor", "muted")


class EmptyState(Widget):
    """Takes the table's place."""

    DEFAULT_CSS = """
    EmptyState { height: 1fr; width: 1fr; align: center middle; content-align: center middle; }
    """

    def __init__(self, *, read_only: bool) -> None:
        super().__init__(id="empty")
        self._read_only = read_only
        self._nothing = Nothing()

    def show(self, nothing: Nothing) -> None:
        """Show why the table is empty; draw again only when that changed."""
        if nothing != self._nothing:
            self._nothing = nothing
            self.refresh()

    def render(self) -> RenderResult:
        """Return the advice, its findings cut to the width."""
        return describe_nothing(self._nothing, read_only=self._read_only, width=self.size.width)
