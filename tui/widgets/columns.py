"""The columns of the runs table: which fit into a width, what each shows of a run, and a line made of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style

from prime_rl.contract.condition import LOST
from prime_rl.contract.status import RunState
from tui import fmt
from tui.model.query import age_s
from tui.model.snapshot import RunRow
from tui.model.standing import standing_words

_FIRST = ("state", "run", "progress", "reward", "change", "loss", "tokens", "lag", "version", "lr", "note")
ORDER = (*_FIRST, "seen", "age")
GUTTER = 2  # cells before the first column: whether the run is marked, whether it is pinned
PADDING = 1  # cells on each side of a column
MARK, PIN = "✓", "★"
MIN_NOTE = 12
MIN_ID = 10
MAX_ID = 28

# Pieces of text with their styles, not a `Text`: a screenful of these is made at each sign of life of its runs.
Cell = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Column:
    """One column. `width` is without the padding; figures are right-aligned."""

    key: str
    label: str
    width: int
    is_figure: bool = False


def choose_columns(width: int, longest_id: int) -> tuple[Column, ...]:
    """The columns that fit into `width` cells: the essential ones always, others as there is room, in fixed order.

    `longest_id` is the length of the longest run id.
    """
    id_width = min(max(longest_id, MIN_ID), 16 if width < 100 else MAX_ID)
    bar = 14 if width < 100 else 18 if width < 160 else 26
    spark = 8 if width < 100 else 12 if width < 160 else 24
    wanted = {
        "state": Column("state", "STATE", 10),
        "run": Column("run", "RUN", id_width),
        "progress": Column("progress", "PROGRESS", bar),
        "reward": Column("reward", "REWARD", 6 + spark),
    }
    room = width - sum(column.width + 2 * PADDING for column in wanted.values()) - (MIN_NOTE + 2 * PADDING)
    extras = [
        Column("seen", "SEEN", 4, True),
        Column("change", "CHANGE", 7, True),
        Column("loss", "LOSS", 8, True),
        Column("tokens", "TOK/S", 5, True),
        Column("lag", "LAG", 3, True),
        Column("version", "VERSION", 7, True),
        Column("lr", "LR", 7, True),
        Column("age", "AGE", 4, True),
    ]
    for column in extras:
        # The note is what people read most, so further columns come only when it has more than its least.
        reserve = 0 if column.key == "seen" else 12
        if room - reserve >= column.width + 2 * PADDING:
            wanted[column.key] = column
            room -= column.width + 2 * PADDING
    wanted["note"] = Column("note", "NOTE", MIN_NOTE + max(room, 0))
    return tuple(wanted[key] for key in ORDER if key in wanted)


def plain(cell: Cell) -> str:
    """The text of a cell without colours."""
    return "".join(text for text, _ in cell)


def make_cell(column: Column, row: RunRow, now: float) -> Cell:
    """The cell of one column of one run, exactly as wide as the column. `now` in Unix seconds."""
    width = column.width
    match column.key:
        case "state":
            return ((fit(f"{row.symbol} {row.state}", width), row.level.style),)
        case "run":
            return ((fit(fmt.shorten_middle(row.run_id, width), width), "bold"),)
        case "progress":
            return _progress(row, width)
        case "reward":
            return _reward(row, width)
        case "change":
            return _change(row, width)
        case "note":
            # Of a run that trains, what it waits for just now counts less.
            words = [row.note, standing_words(row)]
            said = " · ".join(filter(None, reversed(words) if row.state == RunState.ACTIVE else words))
            return ((fit(said, width), row.level.style if row.is_bad else "muted"),)
        case "seen":
            return _right(seen_age(row, now), width, "error" if row.state == LOST else "muted")
        case "age":
            return _right(fmt.age(age_s(row, now)), width, "muted")
    figures = {
        "loss": fmt.number(row.loss),
        "tokens": fmt.count(row.tokens_per_s),
        "lag": fmt.DASH if row.lag is None else str(row.lag),
        "version": fmt.DASH if row.view.policy_version is None else f"v{row.view.policy_version}",
        "lr": fmt.number(row.view.lr),
    }
    text = figures[column.key]
    return _right(text, width, "faint" if text == fmt.DASH else "text")


def make_gutter(is_marked: bool, is_pinned: bool) -> Cell:
    """What stands before the first column, GUTTER cells wide."""
    return (MARK if is_marked else " ", "bold accent"), (PIN if is_pinned else " ", "warning")


def line_segments(
    columns: Sequence[Column],
    row: RunRow,
    now: float,
    gutter: Cell,
    base: Style,
    get_style: Callable[[str], Style],
) -> list[Segment]:
    """The line of one run. Plain segments: a line is drawn at each sign of life of its run."""
    segments = [Segment(text, base + get_style(style)) for text, style in gutter]
    segments.append(Segment(" " * PADDING, base))
    between = Segment(" " * 2 * PADDING, base)
    for column in columns:
        segments += [Segment(text, base + get_style(style)) for text, style in make_cell(column, row, now)]
        segments.append(between)
    return segments


def head_segments(columns: Sequence[Column], sort: tuple[str, bool], usual: Style, chosen: Style) -> list[Segment]:
    """The labels of the columns; that of `sort`, (column, descending), has an arrow and the style `chosen`."""
    segments = [Segment(" " * GUTTER, usual)]
    pad = " " * PADDING
    for column in columns:
        is_sorted = column.key == sort[0]
        arrow = ("▼" if sort[1] else "▲") if is_sorted else ""
        label = column.label[: column.width - len(arrow)] + arrow
        label = label.rjust(column.width) if column.is_figure else label.ljust(column.width)
        segments.append(Segment(f"{pad}{label}{pad}", chosen if is_sorted else usual))
    return segments


def column_at(columns: Sequence[Column], x: int) -> Column | None:
    """The column that is drawn at cell `x` of a line; None before the first and after the last."""
    left = GUTTER
    for column in columns:
        if left <= x < left + column.width + 2 * PADDING:
            return column
        left += column.width + 2 * PADDING
    return None


def fit(text: str, width: int) -> str:
    """`text` on exactly `width` cells: cut off with `…`, or filled up with blanks."""
    if cell_len(text) <= width:
        return text + " " * (width - cell_len(text))
    return set_cell_size(text, width - 1) + "…"


def ages(row: RunRow, now: float) -> tuple[str, str]:
    """All that changes by itself as time passes."""
    return seen_age(row, now), fmt.age(age_s(row, now))


def seen_age(row: RunRow, now: float) -> str:
    """Since the last sign of life."""
    return fmt.seen(now - row.updated_at) if row.updated_at is not None else fmt.DASH


def _progress(row: RunRow, width: int) -> Cell:
    digits = len(str(row.max_steps or "?"))
    figures = f"{row.step:>{digits}}/{row.max_steps or '?'}"
    filled, empty = fmt.bar(row.step, row.max_steps, max(width - len(figures) - 1, 3))
    room = width - len(filled) - len(empty)
    return (filled, "primary"), (empty, "faint"), (fit(f" {figures}", room), "text")


def _reward(row: RunRow, width: int) -> Cell:
    if row.reward is None:
        return ((fit(f"{fmt.DASH:>5}", width), "faint"),)
    figure = f"{fmt.reward(row.reward):>5} "
    curve = fmt.sparkline(row.tail.rewards, width - len(figure))
    return (figure, "bold"), (fit(curve, width - len(figure)), "secondary")


def _change(row: RunRow, width: int) -> Cell:
    text = fmt.gain(row.reward_change)
    colours = {"+": "success", "-": "error", "±": "muted"}
    return _right(text, width, colours.get(text[0], "faint"))


def _right(text: str, width: int, style: str) -> Cell:
    return ((text.rjust(width), style),)
