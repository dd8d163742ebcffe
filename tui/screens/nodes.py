"""The barrier of a multi-node group: which node is in which of the 14 phases, and which one the others wait for."""

from __future__ import annotations

import re
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from prime_rl.contract.nodes import NUM_PHASES, NodeHealth
from tui import fmt
from tui.model.levels import Level
from tui.model.nodes import HEALTH, Cell, Group, NodeRow, describe, phase_name
from tui.model.snapshot import Snapshot
from tui.screens.base import PlaceScreen, Setting
from tui.widgets.line_list import LineList, joined

START = (
    "prl multinode --num-nodes 3 --rank-weights 1,1,1 --rl-phase both --log-path WORKSPACE --data-path DATA --master"
)
# Header, group, headings, margins, the node, the keys.
NUM_OTHER_LINES = 14
# Each cell differs in shape, not only in colour.
CELLS = {Cell.OFF: " ", Cell.PAST: "■", Cell.WORKING: "▶", Cell.ARRIVED: "◆", Cell.AHEAD: "·"}
LEGEND = f"{CELLS[Cell.PAST]} past  {CELLS[Cell.WORKING]} works  {CELLS[Cell.ARRIVED]} has arrived, waits"
SHORT = (
    "sync",
    "rollout",
    "done",
    "ready",
    "join",
    "eval",
    "evjoin",
    "stop",
    "prepare",
    "config",
    "train",
    "copy",
    "restart",
    "final",
)
_MIDDLE, _WIDE, _HUGE = 110, 140, 170
_RANK = re.compile(r"\bnode (\d+)")


def _cell_width(width: int) -> int:
    return 8 if width >= _HUGE else 4 if width >= _WIDE else 3


def _host_width(width: int) -> int:
    return 24 if width >= _WIDE else 16 if width >= _MIDDLE else 0


def group_line(group: Group) -> Text:
    """The group's position and which node it waits for, in two lines."""
    text = Text.assemble(
        ("iteration ", "muted"),
        (str(group.iteration), "bold"),
        ("   phase ", "muted"),
        (f"{group.phase} {phase_name(group.phase)}", "bold"),
        (f"   epoch {group.epoch}   {group.num_nodes} nodes   {group.rl_phase}", "muted"),
        "\n",
    )
    if not group.waited_for:
        return text.append("no node waits" if group.rows else "", "muted")
    names = [f"node {rank}" for rank in group.waited_for[:6]]
    more = f" and {len(group.waited_for) - 6} more" if len(group.waited_for) > 6 else ""
    worst = max((row for row in group.rows if row.is_waited_for), key=lambda row: row.level)
    text.append("waits for ", "muted").append(", ".join(names) + more, f"bold {worst.level.style}")
    text.append(f" for {fmt.age(group.waited_s)}", "warning")
    return text.append(f"   node {worst.rank} is {describe(worst)}", worst.level.style)


def grid_heading(width: int) -> list[Text]:
    """The heading above the `node_line` of each node; two lines when `width` has room for the names of the phases."""
    cell, host = _cell_width(width), _host_width(width)
    numbers = "".join(f"{number:<{cell}}" for number in range(NUM_PHASES))
    left = f"  {'NODE':<5}{'HOST':<{host}}" if host else f"  {'NODE':<5}"
    right = f"{'IN IT':>6}{'BEAT':>6}{'ITER':>7}  NOTE" if width >= _MIDDLE else f"{'IN IT':>6}{'BEAT':>6}  NOTE"
    lines = [Text(f"{left}{'STATE':<12}{numbers}{right}")]
    if cell == 8:
        lines.append(Text(" " * len(left) + " " * 12 + "".join(f"{name:<{cell}}" for name in SHORT)))
    return lines


def node_line(row: NodeRow, width: int) -> Text:
    """One node: its health, a cell for each phase, its ages and its note. `width` in cells of the terminal."""
    cell, host = _cell_width(width), _host_width(width)
    colour = row.level.style
    stands_out = f"bold {colour}" if row.level >= Level.WARN else colour
    line = Text.assemble("  ", (f"{row.rank:<5}", "bold"))
    if host:
        line.append(f"{fmt.shorten_middle(row.host, host - 1):<{host}}", "muted")
    line.append(f"{row.symbol} {row.health:<10}", stands_out)
    for index, kind in enumerate(row.cells):
        line.append(f"{CELLS[kind]:<{cell}}", _cell_style(row, index, kind))
    silent = fmt.age(row.silent_s)
    line.append(f"{fmt.age(row.phase_s):>6}", "warning" if row.is_waited_for else "text")
    line.append(f"{silent:>6}", stands_out if row.health in (NodeHealth.DEAD, NodeHealth.SUSPECT) else "muted")
    if width >= _MIDDLE:
        line.append(f"{fmt.DASH if row.iteration is None else row.iteration:>7}", "muted")
    note = row.note.removeprefix("waits for ")
    if note is not row.note and width < _MIDDLE and (ranks := _RANK.findall(note)):
        note = f"→{','.join(ranks)}"
    return line.append(f"  {note}", "text" if row.level >= Level.WARN else "muted")


def _cell_style(row: NodeRow, index: int, kind: Cell) -> str:
    if kind is Cell.WORKING:
        return f"bold {row.level.style}"
    if kind is Cell.ARRIVED:
        return "bold secondary"
    return "muted" if kind is Cell.PAST else "faint"


def phase_lines(group: Group, width: int, limit: int) -> list[Text]:
    """The history: how long each phase takes, which node takes longest, and the last iterations."""
    if not group.phases:
        return [Text.styled("no phase has ended yet", "muted")]
    lines = [Text.styled(f"{'PHASE':<22}{'USUAL':>8}{'SLOWEST':>9}  {'NODE':<8}LAST ITERATIONS", "muted")]
    order = sorted(group.phases, key=lambda stat: -stat.slowest_s)[: max(limit - 1, 1)]
    for stat in sorted(order, key=lambda stat: stat.phase):
        is_uneven = stat.slowest_s > 2 * stat.usual_s and stat.slowest_s > 1.0
        lines.append(
            Text.assemble(
                (
                    f"{stat.phase:>2} {phase_name(stat.phase):<19}",
                    "bold" if stat.phase == group.phase else "text",
                ),
                f"{fmt.duration(stat.usual_s):>8}",
                (f"{fmt.duration(stat.slowest_s):>9}  ", "warning" if is_uneven else "muted"),
                (f"{stat.slowest_rank:<8}", "warning" if is_uneven else "muted"),
                (fmt.sparkline(stat.recent_s, max(min(width - 52, 40), 4)), "secondary"),
            )
        )
    return lines


def node_detail(row: NodeRow, width: int) -> list[Text]:
    """One node: its state, its share, and how much of its time it waits for others."""
    symbol, level = HEALTH[row.health]
    lines = [
        Text.assemble((f"{symbol} node {row.rank} ", f"bold {level.style}"), (row.host, "bold"), f"  {describe(row)}")
    ]
    facts = [
        f"weight {row.weight:g}" if row.weight is not None else None,
        f"progress {row.progress}" if row.progress is not None else None,
        f"waits {fmt.age(row.waited_s)}" if row.waited_s else None,
    ]
    if row.history:
        work, wait = sum(past.work_s for past in row.history), sum(past.wait_s for past in row.history)
        if work + wait > 0:
            facts.append(f"waited {fmt.percent(wait / (work + wait))} of its last {len(row.history)} phases")
        facts.append(f"most in a phase {fmt.duration(max(past.work_s for past in row.history))}")
    lines.append(Text.styled("  ".join(fact for fact in facts if fact), "muted"))
    lines.append(Text.styled(LEGEND, "muted"))
    return lines


class NodesScreen(PlaceScreen):
    """Asks the app to look more often while it is open."""

    DEFAULT_CSS = """
    NodesScreen {
        & > Static { text-wrap: nowrap; text-overflow: ellipsis; }
        & > #group { height: auto; padding: 0 1; }
        & > #nodes { height: auto; max-height: 60%; margin-top: 1; }
        & > #phases { height: 1fr; padding: 1 1 0 1; }
        & > #node { height: auto; padding: 0 1; background: $panel; }
        & > #none { text-wrap: wrap; height: 1fr; width: 1fr; content-align: center middle; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "Back", key_display="esc"),
    ]
    AUTO_FOCUS = "#nodes"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.group = Static(id="group", markup=False)
        self.nodes = LineList[str](id="nodes")
        self.phases = Static(id="phases", markup=False)
        self.node = Static(id="node", markup=False)
        self.nothing = Static(id="none", markup=False)

    def compose_body(self) -> ComposeResult:
        """Yield the group, its nodes, their phases and the selected node; and what stands there without a group."""
        yield self.group
        yield self.nodes
        yield self.phases
        yield self.node
        yield self.nothing

    def on_mount(self) -> None:
        """Let the app look more often."""
        self.guide.look_closely(True)

    def on_unmount(self) -> None:
        """Let the app look as often as before."""
        self.guide.look_closely(False)

    def refill(self, snapshot: Snapshot) -> None:
        """Draw all; the cursor stays on its node."""
        group = snapshot.group
        for widget in (self.group, self.nodes, self.phases, self.node):
            widget.display = group is not None
        self.nothing.display = group is None
        if group is None:
            self.nothing.update(
                Text.assemble(
                    ("no multi-node group in this workspace\n\n", "bold primary"),
                    (
                        "run this on the master, and on each other node with --worker RANK instead of --master:\n",
                        "muted",
                    ),
                    (START, "accent"),
                    justify="center",
                )
            )
            return
        width = self.size.width
        self.group.update(group_line(group))
        lines = [node_line(row, width) for row in group.rows]
        self.nodes.show([str(row.rank) for row in group.rows], lines.__getitem__, grid_heading(width))
        room = self.size.height - len(lines) - NUM_OTHER_LINES
        self.phases.display = room >= 3
        self.phases.update(joined(phase_lines(group, width, max(room, 3))))
        self._show_node()

    @on(LineList.Moved)
    def _show_node(self) -> None:
        group = self.snapshot.group if self.snapshot else None
        row = group.row(int(self.nodes.selected)) if group and self.nodes.selected else None
        self.node.display = row is not None
        if row is not None:
            lines = node_detail(row, self.size.width)
            self.node.update(joined(lines))
