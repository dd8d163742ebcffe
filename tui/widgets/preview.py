"""The selected run under the table: its reason in full, and its curves when the terminal is tall."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from prime_rl.contract.condition import LOST
from tui import fmt
from tui.curves import simple_chart
from tui.palette import Palette, make_palette
from tui.series import change
from tui.snapshot import STATE_WORDS, RunRow
from tui.widgets.chart import Chart


def describe(row: RunRow, palette: Palette, now: float, num_marked: int = 0) -> Text:
    """A few sentences about one run; the first lines are the ones that matter."""
    colour = palette.level(row.level)
    text = Text.assemble((row.run_id, "bold"), "  ", (f"{row.symbol} {row.state}", colour))
    text.append(f"  {STATE_WORDS[row.state]}", palette.muted)
    if num_marked:
        text.append(f"  ✓ {num_marked} marked", palette.accent)
    body = row.reason or row.note
    if row.state == LOST:
        body = row.note
    if body:
        text.append("\n")
        text.append(body, palette.error if row.is_problem else palette.text)
    text.append("\n")
    text.append(_figures(row, now), palette.muted)
    return text


def _figures(row: RunRow, now: float) -> str:
    pieces = [f"step {row.step}" + (f" of {row.max_steps}" if row.max_steps else "")]
    if row.tokens_per_s is not None:
        pieces.append(f"{fmt.count(row.tokens_per_s)} tokens/s")
    if row.view.batch_size is not None:
        pieces.append(f"batch {row.view.batch_size}")
    if row.view.lr is not None:
        pieces.append(f"lr {fmt.number(row.view.lr)}")
    if row.updated_at is not None:
        pieces.append(f"seen {fmt.seen(now - row.updated_at)} ago".replace("now ago", "now"))
    return " · ".join(pieces)


class Preview(Vertical):
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
        self._reward = Chart("reward", colour="secondary")
        self._loss = Chart("loss", colour="accent")

    def compose(self) -> ComposeResult:
        yield self._text
        with Horizontal():
            yield self._reward
            yield self._loss

    def show(self, row: RunRow | None, now: float, num_marked: int = 0) -> None:
        self.display = row is not None
        if row is None:
            return
        text = describe(row, make_palette(self.app.theme_variables), now, num_marked)
        if text != self._described:
            self._described = text
            self._text.update(text, layout=False)
        rewards, tail = row.tail.rewards, row.tail
        self._reward.show(
            simple_chart(*tail.reward_curve, last=rewards[-1] if rewards else None, change=change(rewards))
        )
        self._loss.show(simple_chart(*tail.loss_curve, last=tail.loss))
