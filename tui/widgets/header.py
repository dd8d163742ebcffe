"""The lines at the top: the workspace with its daemons, or one run with its figures. Built as `Text`, never markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.text import Text
from textual.app import RenderResult
from textual.events import Click
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from prime_rl.utils.text import one_line
from tui import fmt
from tui.nodes import Group, phase_name
from tui.palette import Palette, make_palette
from tui.snapshot import LEVEL_SYMBOLS, DaemonRow, Level, RunRow, Snapshot

PROBLEMS_WIDTH = 14  # cells at the right end that a click on the count of problems may hit
MAIN_DAEMONS = ("trainer", "inference", "supervisor")


def join(pieces: Sequence[Text], gap: str, width: int) -> Text:
    """As many of `pieces` as fit into `width` cells, from the left."""
    line = Text(no_wrap=True, end="")
    for piece in pieces:
        extra = (cell_len(gap) if line else 0) + piece.cell_len
        if line.cell_len + extra > width:
            break
        line.append_text(Text(gap) if line else Text()).append_text(piece)
    return line


def spread(left: Text, right: Text, width: int) -> Text:
    """`left` and `right` at the two ends of a line; `left` is cut when both do not fit."""
    room = width - right.cell_len - 1
    left = left.copy()
    if left.cell_len > room:
        left.truncate(max(room, 0), overflow="ellipsis")
    return Text.assemble(left, " " * max(width - left.cell_len - right.cell_len, 1), right, no_wrap=True, end="")


def workspace_lines(snapshot: Snapshot, width: int, palette: Palette, read_only: bool) -> tuple[Text, Text]:
    """Workspace and health of its daemons; use of slots, speed, bottleneck."""
    name = Text.assemble(
        (" prl ", f"bold {palette.primary} reverse"), " ", (snapshot.name, "bold"), no_wrap=True, end=""
    )
    if read_only:
        name.append("  read-only", palette.warning)
    daemons = [daemon for daemon in snapshot.daemons if daemon.name in MAIN_DAEMONS]
    group = snapshot.group if all(daemon.state == "down" for daemon in daemons) else None
    words = width >= 100
    who = [_nodes(group, palette)] if group else _daemons(daemons, palette, words)
    first = spread(name, join(who, "   ", width - 12), width - 1)
    alert = _problems(len(snapshot.problems), palette)
    full = [_position(group, palette)] if group else [_slots(snapshot, palette), *_throughput(snapshot, palette)]
    facts = join(full, "   ", width - alert.cell_len - 2)
    facts.pad_left(1)
    room = width - facts.cell_len - alert.cell_len - 4
    if snapshot.bottleneck and room > 20:
        held = Text.assemble(("   bottleneck ", palette.muted), (snapshot.bottleneck, palette.warning))
        held.truncate(room + 3, overflow="ellipsis")
        facts.append_text(held)
    return first, spread(facts, alert, width)


def _daemons(daemons: Sequence[DaemonRow], palette: Palette, words: bool) -> list[Text]:
    """One by one; where there is little room, all that are down alike in one."""
    alike = len({(daemon.state, daemon.level) for daemon in daemons}) == 1
    if alike and not words and daemons[0].level is not Level.GOOD:
        return [
            _daemon(replace(daemons[0], name=one_line(", ".join(daemon.name for daemon in daemons))), palette, words)
        ]
    return [_daemon(daemon, palette, words) for daemon in daemons]


def _daemon(daemon: DaemonRow, palette: Palette, words: bool) -> Text:
    colour = palette.level(daemon.level)
    text = Text.assemble((f"{daemon.symbol} ", colour), (daemon.name, ""))
    if words or daemon.level is not Level.GOOD:
        text.append(f" {daemon.state}", colour if daemon.level is not Level.GOOD else palette.muted)
    return text


def _nodes(group: Group, palette: Palette) -> Text:
    """A multi-node group has no daemons of this workspace: its nodes are."""
    colour = palette.level(group.level)
    return Text.assemble(
        (f"{LEVEL_SYMBOLS[group.level]} ", colour), f"nodes {group.num_living}/{group.num_nodes} alive"
    )


def _position(group: Group, palette: Palette) -> Text:
    return Text.assemble(
        ("iteration ", palette.muted),
        (f"{group.iteration}", "bold"),
        (f"   phase {group.phase} ", palette.muted),
        phase_name(group.phase),
    )


def _slots(snapshot: Snapshot, palette: Palette) -> Text:
    used, most = snapshot.num_used, snapshot.max_runs
    text = Text.assemble(("slots ", palette.muted))
    if most:
        if most <= 16:
            text.append("▮" * used, palette.success).append("▯" * max(most - used, 0), palette.muted).append(" ")
        text.append(f"{used}/{most}", "bold")
    else:
        text.append("unknown", palette.muted)
    if snapshot.num_waiting:
        text.append(f" +{snapshot.num_waiting} waiting", palette.secondary)
    return text


def _throughput(snapshot: Snapshot, palette: Palette) -> list[Text]:
    if snapshot.tokens_per_s is None:
        return []
    return [Text.assemble((fmt.count(snapshot.tokens_per_s), "bold"), (" tok/s", palette.muted))]


def _problems(num: int, palette: Palette) -> Text:
    if not num:
        return Text.assemble(("✔ no problems ", palette.muted))
    return Text.assemble((f"▲ {num} problem{'s' if num > 1 else ''} ", f"bold {palette.error}"))


def run_lines(
    row: RunRow, width: int, palette: Palette, now: float, num_problems: int | None = None
) -> tuple[Text, Text]:
    """Which run, how it is, how far it is;

    then its figures, as many as fit, and the problems of the whole workspace.
    """
    colour = palette.level(row.level)
    left = Text.assemble(
        (" prl ", f"bold {palette.primary} reverse"),
        " ",
        (row.run_id, "bold"),
        "   ",
        (f"{row.symbol} {row.state}", colour),
        no_wrap=True,
        end="",
    )
    bar_width = 24 if width >= 110 else 10
    filled, empty = fmt.bar(row.step, row.max_steps, bar_width)
    progress = Text.assemble(
        (filled, palette.primary), (empty, palette.faint), f" {row.step}/{row.max_steps or '?'} ", no_wrap=True, end=""
    )
    view = row.view
    seen = fmt.seen(now - row.updated_at) if row.updated_at is not None else None
    facts = [
        ("reward", fmt.number(row.reward) if row.reward is not None else None),
        ("loss", fmt.number(row.loss) if row.loss is not None else None),
        ("tok/s", fmt.count(row.tokens_per_s) if row.tokens_per_s is not None else None),
        ("lag", str(row.lag) if row.lag is not None else None),
        ("seen", None if seen is None else seen if seen == "now" else f"{seen} ago"),
        ("slot", str(view.run_idx) if view.run_idx is not None else None),
        ("queue", str(view.queue_position) if view.queue_position is not None else None),
        ("version", str(view.policy_version) if view.policy_version is not None else None),
        ("lr", fmt.number(view.lr) if view.lr is not None else None),
        ("batch", str(view.batch_size) if view.batch_size is not None else None),
        ("restarts", str(view.num_restarts) if view.num_restarts else None),
        ("model", fmt.shorten_middle(view.model, 40) if view.model else None),
    ]
    pieces = [Text.assemble((f"{name} ", palette.muted), value) for name, value in facts if value is not None]
    alert = _problems(num_problems, palette) if num_problems is not None else Text()
    second = join(pieces, "   ", width - alert.cell_len - 2)
    second.pad_left(1)
    return spread(left, progress, width), spread(second, alert, width)


class WorkspaceHeader(Widget):
    DEFAULT_CSS = """
    WorkspaceHeader { height: 2; background: $panel; }
    """

    def __init__(self, *, read_only: bool) -> None:
        super().__init__()
        self._read_only = read_only
        self._snapshot: Snapshot | None = None
        self._drawn: Text | None = None

    def show(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        if self._drawn is None or self._lines() != self._drawn:
            self.refresh()

    class ProblemsAsked(Message):
        """The count of problems was clicked."""

    def on_click(self, event: Click) -> None:
        if event.y == 1 and event.x >= self.size.width - PROBLEMS_WIDTH:
            self.post_message(self.ProblemsAsked())

    def render(self) -> RenderResult:
        self._drawn = self._lines()
        return self._drawn

    def _lines(self) -> Text:
        palette = make_palette(self.app.theme_variables)
        if self._snapshot is None:
            return Text("reading the workspace ...", style=palette.muted)
        return Text("\n").join(workspace_lines(self._snapshot, self.size.width, palette, self._read_only))


class RunHeader(Widget):
    """Two lines about one run. `now` (Unix seconds) makes the age."""

    DEFAULT_CSS = """
    RunHeader { height: 2; background: $panel; }
    """
    row: reactive[RunRow | None] = reactive(None)
    now: reactive[float] = reactive(0.0)
    num_problems: reactive[int] = reactive(0)

    def render(self) -> RenderResult:
        palette = make_palette(self.app.theme_variables)
        if self.row is None:
            return Text("this run was removed", style=palette.warning)
        return Text("\n").join(run_lines(self.row, self.size.width, palette, self.now, self.num_problems))
