"""The barrier of a multi-node group: which node is in which of the 14 phases, and which one the others wait for."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from tui.model.snapshot import Snapshot
from tui.screens.base import PlaceScreen, Setting
from tui.widgets.line_list import LineList, joined
from tui.widgets.node_lines import grid_heading, group_line, node_detail, node_line, phase_lines

START = (
    "prl multinode --num-nodes 3 --rank-weights 1,1,1 --rl-phase both --log-path WORKSPACE --data-path DATA --master"
)
# Header, group, headings, margins, the node, the keys.
NUM_OTHER_LINES = 14


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
        """Redraw at each change of the theme from here on, and let the app look more often."""
        self.app.theme_changed_signal.subscribe(self, lambda _: self._redraw())
        self.guide.look_closely(True)

    def on_unmount(self) -> None:
        """Let the app look as often as before."""
        self.guide.look_closely(False)

    def on_resize(self) -> None:
        """Redraw: lines and phases are made for the width and the height."""
        self._redraw()

    def refill(self, snapshot: Snapshot) -> None:
        """Redraw all; the cursor stays on its node."""
        self._redraw()

    @on(LineList.Moved)
    def _moved(self) -> None:
        self._show_node()

    def _redraw(self) -> None:
        if self.snapshot is None or not self.can_show:
            return
        group = self.snapshot.group
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

    def _show_node(self) -> None:
        group = self.snapshot.group if self.snapshot else None
        row = group.row(int(self.nodes.selected)) if group and self.nodes.selected else None
        self.node.display = row is not None
        if row is not None:
            lines = node_detail(row, self.size.width)
            self.node.update(joined(lines))
