"""The rollouts of one example side by side, with their tokens in colours; and the rewards of a batch as a histogram.

Builds text; `rollouts_view` shows it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prime_rl.contract.samples import Sample
from tui import fmt
from tui.model.tints import make_tint, tinted
from tui.readers.rollouts import TokenLine, turns, versions

# Cells of a column: with fewer, lines break too often to be read.
MIN_COLUMN = 44
# Rollouts of one example, and characters of each: the list shows a rollout in full.
MAX_COLUMNS = 32
MAX_CHARS = 6_000
_BLOCKS = " ▁▂▃▄▅▆▇█"
# Cells before and after a row of blocks.
_BEFORE, _AFTER = 8, 16
# Styles of the levels above 0 and below, by their size. The strongest are underlined too, or reversed: without colour
# they must be seen, and told apart where the text beside them has no sign.
_ABOVE = ("", "success", "bold success", "bold success")
_BELOW = ("", "error", "bold error", "bold error")
_STYLES = {
    "advantage": (_ABOVE, _BELOW),
    "log-ratio": (_ABOVE, (*_BELOW[:3], "bold error reverse")),
    "surprise": (("", "warning", "bold warning", "bold warning"), _BELOW),
}


@dataclass(frozen=True)
class GroupPicture:
    """What the picture of an example shows.

    Attributes:
        group: its rollouts, all or a part of them.
        chosen: the one under the cursor.
        tokens: by place.
        place: of the example among those of its batch, and how many these are.
        words: that are marked.
    """

    group: tuple[Sample, ...]
    chosen: Sample
    tokens: Mapping[int, TokenLine]
    tint: str
    place: tuple[int, int]
    words: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """The largest advantage, absolute."""
        lines = [self.tokens[sample.place] for sample in self.group if sample.place in self.tokens]
        own = [abs(value) for line in lines for value in line.advantages if math.isfinite(value)]
        return max([abs(sample.advantage) for sample in self.group] + own)


def level_text(text: Text, piece: str, level: int | None, tint: str) -> None:
    """Append `piece` in the style of its level; `tint` is one of TINTS."""
    if level is None:
        text.append(piece, "muted")
        return
    above, below = _STYLES[tint]
    start, style = len(text), (below if level < 0 else above)[abs(level)]
    text.append(piece, style)
    if abs(level) == 3 and "reverse" not in style:
        text.stylize("underline", start, len(text))


def legend(picture: GroupPicture) -> Text:
    """`tokens by surprise, sampled at p<50% p<10% p<1%`, each mark in its style."""
    if not picture.tokens:
        return Text(f"no tokens of step {picture.chosen.step} are kept", "muted")
    tint = make_tint(picture.tint, 0.0, picture.largest)
    text = Text.assemble(("tokens by ", "muted"), (picture.tint, "bold"), (f", {tint.about}", "muted"))
    for mark, level in tint.legend():
        text.append(" ")
        level_text(text, mark, level, picture.tint)
    return text


def draw_group(picture: GroupPicture, width: int) -> RenderableType:
    """The prompt, then the rollouts: as many beside each other as there is room for."""
    first, (number, num_groups) = picture.group[0], picture.place
    num_rollouts = fmt.counted(len(picture.group), "rollout")
    head = Text.assemble(
        (f"step {first.step} · example {number} of {num_groups} · {num_rollouts}", "bold"),
        (f"\n{fmt.shorten(first.env, 40)} · {fmt.shorten(first.example_id, 80)}\n", "muted"),
        ("prompt ", "bold primary"),
        fmt.shorten_middle(" ".join(first.prompt[: 50 * width].split()), 2 * width - 8),
    )
    start = max(picture.group.index(picture.chosen) - MAX_COLUMNS + 1, 0)
    shown = picture.group[start : start + MAX_COLUMNS]
    num_columns = min(max(width // MIN_COLUMN, 1), len(shown))
    parts: list[RenderableType] = [head]
    for at in range(0, len(shown), num_columns):
        table = Table.grid(*[""] * num_columns, padding=(0, 2, 0, 0), expand=True)
        for column in table.columns:
            column.ratio, column.overflow = 1, "fold"
        table.add_row(*(_column(picture, sample) for sample in shown[at : at + num_columns]))
        parts += ["", table]
    if len(shown) < len(picture.group):
        parts.append(Text(f"\n{len(picture.group) - len(shown)} more are in the list", "muted"))
    return Group(*parts)


def _column(picture: GroupPicture, sample: Sample) -> Text:
    is_chosen = sample is picture.chosen
    text = Text.assemble(
        ("▌" if is_chosen else " ", "accent"),
        ("reward ", "muted"),
        (fmt.reward(sample.reward), "bold"),
        ("  adv. ", "muted"),
        (fmt.gain(sample.advantage), "bold success" if sample.advantage > 0 else "bold warning"),
        (f"  {versions(sample)} {sample.num_completion_tokens} tok\n", "muted"),
    )
    body = _body(picture, sample)
    if picture.words:
        body.highlight_words(picture.words, "bold reverse", case_sensitive=False)
    num_more = len(body) - MAX_CHARS
    text.append_text(body[:MAX_CHARS])
    if num_more > 0:
        text.append(f"\n… {fmt.counted(num_more, 'more character')} in the list", "muted")
    return text


def _body(picture: GroupPicture, sample: Sample) -> Text:
    line = picture.tokens.get(sample.place)
    if line is not None:
        text = Text()
        tint = make_tint(picture.tint, sample.advantage, picture.largest)
        for piece, level in tinted(line, tint):
            level_text(text, piece, level, picture.tint)
        return text
    said = [(turn.text or "(nothing)", turn.speaker == "policy" and turn.text) for turn in turns(sample)[1:]]
    return Text("\n").join(Text(words, "" if by_policy else "muted") for words, by_policy in said)


def rewards_head(step: int, rewards: Sequence[float]) -> Text:
    """The line above the histogram of a step: how many rewards there are, their mean and their range."""
    text = Text.assemble((f"step {step}", "bold"), (f" · {fmt.counted(len(rewards), 'rollout')}", "muted"))
    if rewards:
        mean, low, high = map(fmt.reward, (statistics.fmean(rewards), min(rewards), max(rewards)))
        text.append(f" · mean {mean}, lowest {low}, highest {high}", "muted")
    return text


def draw_rewards(by_step: Mapping[int, Sequence[float]], chosen: int, width: int, height: int) -> Text:
    """The histogram of the chosen step, and below it a row of blocks for each step around it, newest first."""
    steps = sorted(by_step, reverse=True)
    num_bins = 20 if width < 120 else 40
    cell = max((width - _BEFORE - _AFTER) // num_bins, 1)
    bar_height = max(min(height // 3, 14), 3)
    num_rows = max(height - bar_height - 4, 1)
    place = steps.index(chosen)
    start = min(max(place - num_rows // 2, 0), max(len(steps) - num_rows, 0))
    shown = steps[start : start + num_rows]
    # One scale for all that is seen: the rows below line up with the bars above.
    low, high = reward_range(reward for step in shown for reward in by_step[step])
    counts = {step: count_bins(by_step[step], low, high, num_bins) for step in shown}
    text = Text(no_wrap=True, overflow="ellipsis")
    for row, line in enumerate(bars(counts[chosen], bar_height, cell)):
        most = f"{max(counts[chosen], default=0):>{_BEFORE - 2}}  " if row == 0 else " " * _BEFORE
        text.append(most, "muted").append(line, "primary").append("\n")
    last = fmt.reward(high)
    between = max(num_bins * cell - len(last) - (1 if cell > 1 else 0), 0)
    text.append(" " * _BEFORE + fmt.reward(low).ljust(between) + last, "muted")
    text.append(f"\n\n{'step':>{_BEFORE - 2}}  {'':{num_bins * cell}}{'mean':>7} {'rollouts':>8}", "muted")
    for step in shown:
        rewards, is_chosen = by_step[step], step == chosen
        text.append("\n▌" if is_chosen else "\n ", "accent")
        text.append(f"{step:>{_BEFORE - 3}}  ", "bold" if is_chosen else "muted")
        text.append(bars(counts[step], 1, cell)[0], "primary")
        mean = fmt.reward(statistics.fmean(rewards)) if rewards else fmt.DASH
        text.append(f"{mean:>7}").append(f" {len(rewards):>8}", "muted")
    return text


def reward_range(rewards: Iterable[float]) -> tuple[float, float]:
    """From 0 to 1 where that holds all of them, else from the lowest to the highest; never empty."""
    found = list(rewards)
    low, high = min(found, default=0.0), max(found, default=1.0)
    if low >= 0.0 and high <= 1.0:
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def count_bins(rewards: Iterable[float], low: float, high: float, num_bins: int) -> list[int]:
    """How many rewards are in each of `num_bins` equal parts of `low` to `high`; `high` itself is in the last."""
    counts = [0] * num_bins
    for reward in rewards:
        # Halves, because the difference of two finite numbers may not be finite.
        share = (reward / 2 - low / 2) / (high / 2 - low / 2)
        counts[min(max(int(share * num_bins), 0), num_bins - 1)] += 1
    return counts


def bars(counts: Sequence[int], height: int, cell: int) -> list[str]:
    """`height` lines, the highest first: each count a bar `cell` wide with a gap of one where there is room for it.

    What is not 0 has at least the lowest block.
    """
    most = max(counts, default=0)
    eighths = [max(round(count / most * (8 * height)), 1) if count else 0 for count in counts]
    gap = " " if cell > 1 else ""
    lines = []
    for row in reversed(range(height)):
        parts = (_BLOCKS[min(max(each - 8 * row, 0), 8)] * (cell - len(gap)) + gap for each in eighths)
        lines.append("".join(parts))
    return lines
