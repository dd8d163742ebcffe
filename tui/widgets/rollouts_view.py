"""The rollouts that a run keeps: a list of them in a chosen order, and the one under the cursor turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.events import Resize
from textual.widgets import Static

from prime_rl.contract.samples import Sample
from tui import fmt
from tui.palette import Palette, make_palette
from tui.rollouts import ORDERS, RolloutsData, arrange, turns, versions
from tui.widgets.row_list import RowList

# From this width on the list has room for what else is known of each.
WIDE = 120


def list_row(sample: Sample, palette: Palette, *, wide: bool) -> Text:
    """`   87  0.333  -0.577`: step, reward, advantage; wide also environment, versions and length."""
    text = Text.assemble(
        (f"{sample.step:>6} ", palette.muted),
        f"{fmt.fixed(sample.reward):>7} ",
        (f"{fmt.signed(sample.advantage):>8}", palette.success if sample.advantage > 0 else palette.warning),
        no_wrap=True,
    )
    if wide:
        text.append(f"  {versions(sample):<12} {sample.num_completion_tokens:>5}  ", palette.muted)
        text.append(fmt.shorten(sample.env, 40))
    return text


def list_head(*, wide: bool) -> str:
    return "  step  reward   advant." + ("  version      tokens environment" if wide else "")


def describe(sample: Sample, palette: Palette) -> Text:
    text = Text.assemble(
        ("reward ", palette.muted),
        (fmt.fixed(sample.reward), "bold"),
        ("  advantage ", palette.muted),
        (fmt.signed(sample.advantage), f"bold {palette.success if sample.advantage > 0 else palette.warning}"),
        (f"\nstep {sample.step} · {versions(sample)} · {sample.num_completion_tokens} tokens", palette.muted),
        (f"\n{fmt.shorten(sample.env, 60)} · {fmt.shorten(sample.example_id, 80)}\n", palette.muted),
    )
    colours = {"prompt": palette.primary, "policy": palette.accent, "environment": palette.secondary}
    conversation = turns(sample)
    for number, turn in enumerate(conversation):
        place = f" {number} of {len(conversation) - 1}" if number and len(conversation) > 2 else ""
        text.append(f"\n── {turn.speaker}{place} ──\n", f"bold {colours[turn.speaker]}")
        text.append(turn.text or "(nothing)", "" if turn.text else palette.muted).append("\n")
    return text


class RolloutsView(Horizontal, can_focus=False):
    """Has the keys through its list."""

    DEFAULT_CSS = """
    RolloutsView {
        background: $surface;
        & > RowList { width: 27; }
        &.-wide > RowList { width: 62; }
        & > VerticalScroll { width: 1fr; border-left: solid $border; padding: 0 1; scrollbar-size-vertical: 1; }
        & > VerticalScroll > Static { height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("o", "order", "Order", tooltip="order: newest, reward, advantage"),
        Binding("n", "move(1)", "Next"),
        Binding("N,p", "move(-1)", "Previous", key_display="N"),
        Binding("space,J", "read(1)", "Read on", show=False),
        Binding("b,K", "read(-1)", "Read back", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="rollouts")
        self.list = RowList("no rollouts are kept yet")
        self.order = ORDERS[0]
        self._detail = VerticalScroll(can_focus=False)
        self._text = Static(markup=False)
        self._samples: Sequence[Sample] = ()
        self._arranged: list[Sample] = []
        self._described: Sample | None = None

    def compose(self) -> ComposeResult:
        yield self.list
        with self._detail:
            yield self._text

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda _: self._fill())

    @property
    def selected(self) -> Sample | None:
        return self._arranged[self.list.cursor] if self._arranged else None

    def show(self, data: RolloutsData) -> None:
        self._samples = data.samples
        self._fill()

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.width >= WIDE, "-wide")
        self._fill()

    def action_order(self) -> None:
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        self.list.cursor = 0
        self._arranged = []
        self._fill()

    def action_move(self, num: int) -> None:
        self.list.move(num)

    def action_read(self, direction: int) -> None:
        self._detail.scroll_relative(y=direction * max(self._detail.size.height - 1, 1), animate=False)

    def _fill(self) -> None:
        selected = self.selected
        # On top of the newest it stays on top; else it stays with the rollout that is read.
        follows = self.order == "newest" and self.list.cursor == 0
        self._arranged = arrange(self._samples, self.order)
        place = 0 if follows or selected not in self._arranged else self._arranged.index(selected)
        wide, palette = self.has_class("-wide"), make_palette(self.app.theme_variables)
        arranged = self._arranged
        heading = (f"{len(arranged)}, {self.order} first" if arranged else "", list_head(wide=wide))
        self.list.show(len(arranged), lambda index: list_row(arranged[index], palette, wide=wide), place, heading)
        self._described = None
        self._describe()

    @on(RowList.Moved)
    def _moved(self, event: RowList.Moved) -> None:
        event.stop()
        self._describe()

    def _describe(self) -> None:
        sample = self.selected
        if sample is None:
            self._text.update("")
        elif sample != self._described:
            self._described = sample
            self._text.update(describe(sample, make_palette(self.app.theme_variables)))
            self._detail.scroll_home(animate=False)
