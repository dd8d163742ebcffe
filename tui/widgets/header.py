"""The lines at the top and at the foot of a screen. Built as `Text`, never markup.

On top: the workspace with its daemons, or one run with its figures. At the foot: one line with the outcome of the last
action, and as many keys as stand there whole. Between them the filter line, an input that completes fields and marks
invalid terms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.cells import cell_len
from rich.highlighter import Highlighter
from rich.text import Text
from textual.app import ComposeResult, RenderResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.suggester import Suggester
from textual.widget import Widget
from textual.widgets import Footer, Input, Label, Static

from daemons.workspace import replica_number
from prime_rl.contract.layout import RUN_PREFIX
from prime_rl.contract.status import RunState
from prime_rl.utils.text import one_line
from tui import fmt
from tui.messages import ActionEntry
from tui.model.levels import LEVEL_SYMBOLS, Level
from tui.model.nodes import Group, phase_name
from tui.model.query import Query, complete, parse
from tui.model.snapshot import DaemonRow, RunRow, Snapshot, budget_share, standing
from tui.widgets.line_list import Clipped

PROBLEMS_WIDTH = 14  # cells at the right end that a click on the count of problems may hit
BUDGET_WIDTH = 8  # cells of the bar
NEARLY_USED = 0.9  # of a budget: from here on its bar warns
MIN_WORD = 7  # letters that a shortened id keeps
_ASIDES = re.compile(r" \([^()]*\)|: prl .*")  # of a bottleneck: counts, and what to do, which the problems have
MAIN_DAEMONS = ("trainer", "inference", "supervisor")
SIDE_DAEMONS = ("alerts", "monitors", "gateway")  # shown when something is wrong with them


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


def workspace_lines(snapshot: Snapshot, width: int, read_only: bool, is_demo: bool = False) -> tuple[Text, Text]:
    """Workspace and health of its daemons; use of slots, speed, bottleneck."""
    name = Text.assemble((" prl ", "bold primary reverse"), " ", (snapshot.name, "bold"), no_wrap=True, end="")
    if num_unread := snapshot.workspace.num_unread:
        name.append(f"  reading {fmt.counted(num_unread, 'more run')}", "muted")
    if read_only:
        name.append("  read-only", "warning")
    if is_demo and snapshot.rows and all(row.state == RunState.FINISHED for row in snapshot.rows):
        done = "all runs are done" if width >= 100 else "done"
        name.append(f"  {done}: q ends the demo", "bold success")
    daemons = _shown_daemons(snapshot.daemons)
    group = snapshot.group if all(daemon.state == "down" for daemon in daemons) else None
    words = width >= 100
    who = [_nodes(group)] if group else _daemons(daemons, words)
    first = spread(name, join(who, "   ", width - 12), width - 1)
    alert = _problems(len(snapshot.problems))
    most = width - alert.cell_len - 2
    full = [_position(group)] if group else [_slots(snapshot), *_throughput(snapshot)]
    if snapshot.bottleneck:
        held = Text.assemble(("bottleneck ", "muted"), (snapshot.bottleneck, "warning"))
        if sum(each.cell_len + 3 for each in full) + held.cell_len > most:  # the words count more than the rest
            slots, bare = _slots(snapshot, marks=False), _slots(snapshot, marks=False, waiting=False)
            shorter = [[slots, *_throughput(snapshot, "train ", "/s")], [bare]]
            for pieces in [full] if group else shorter:
                room = most - sum(each.cell_len + 3 for each in pieces)
                cause = _fit(snapshot.bottleneck, room)
                if not cause.endswith("…"):
                    break
            full, held = pieces, Text.assemble(("bottleneck " * (len(cause) <= room - 11), "muted"), (cause, "warning"))
        full.append(held)
    facts = join(full, "   ", most)
    facts.pad_left(1)
    return first, spread(facts, alert, width)


def _shown_daemons(daemons: Sequence[DaemonRow]) -> list[DaemonRow]:
    """Several inference servers as one: how many of them are up, and how the worst one is.

    Of the daemons at the side only those that something is wrong with. A server that was scaled away is done.
    """
    servers = [each for each in daemons if replica_number(each.name) is not None and each.state != "done"]
    shown: dict[str, DaemonRow] = {daemon.name: daemon for daemon in daemons}
    if len(servers) > 1:
        num_up = sum(server.level is Level.GOOD for server in servers)
        worst = max(servers, key=lambda server: (server.level is not Level.GOOD, server.level))
        shown["inference"] = replace(worst, name=one_line(f"inference {num_up}/{len(servers)}"))
    main = [shown[name] for name in MAIN_DAEMONS if name in shown]
    return main + [shown[name] for name in SIDE_DAEMONS if name in shown and shown[name].level >= Level.WARN]


def _daemons(daemons: Sequence[DaemonRow], words: bool) -> list[Text]:
    """One by one; where there is little room, all that are down alike in one."""
    alike = len({(daemon.state, daemon.level) for daemon in daemons}) == 1
    if alike and not words and daemons[0].level is not Level.GOOD:
        return [_daemon(replace(daemons[0], name=one_line(", ".join(daemon.name for daemon in daemons))), words)]
    return [_daemon(daemon, words) for daemon in daemons]


def _daemon(daemon: DaemonRow, words: bool) -> Text:
    colour = daemon.level.style
    text = Text.assemble((f"{daemon.symbol} ", colour), (daemon.name, ""))
    if words or daemon.level is not Level.GOOD:
        text.append(f" {daemon.state}", colour if daemon.level is not Level.GOOD else "muted")
    return text


def _nodes(group: Group) -> Text:
    """A multi-node group has no daemons of this workspace: its nodes are."""
    colour = group.level.style
    return Text.assemble(
        (f"{LEVEL_SYMBOLS[group.level]} ", colour), f"nodes {group.num_living}/{group.num_nodes} alive"
    )


def _position(group: Group) -> Text:
    return Text.assemble(
        ("iteration ", "muted"),
        (f"{group.iteration}", "bold"),
        (f"   phase {group.phase} ", "muted"),
        phase_name(group.phase),
    )


def _fit(words: str, width: int) -> str:
    """A bottleneck on `width` characters: without asides, then a run's id without its beginning, then the cause."""
    bare = _ASIDES.sub("", words)
    run_id = max((word for word in bare.split() if word.startswith(RUN_PREFIX)), key=len, default="")
    over = len(bare) - width
    named = bare.replace(run_id, f"…{run_id[1 - max(len(run_id) - over, MIN_WORD) :]}", 1) if run_id else bare
    _, waits, cause = re.sub(rf"^{RUN_PREFIX}.*?: ", "", bare).rpartition("waits for ")
    whole = next((each for each in (words, bare, named, waits + cause, cause) if len(each) <= width), None)
    return whole or f"{cause[: max(width, 1)].rpartition(' ')[0] or cause[: max(width - 1, 0)]}…"


def _slots(snapshot: Snapshot, *, marks: bool = True, waiting: bool = True) -> Text:
    used, most = snapshot.num_used, snapshot.max_runs
    text = Text.assemble(("slots ", "muted"))
    if most:
        if marks and most <= 16:
            text.append("▮" * used, "success").append("▯" * max(most - used, 0), "muted").append(" ")
        text.append(f"{used}/{most}", "bold")
    else:
        text.append("unknown", "muted")
    if waiting and snapshot.num_waiting:
        text.append(f" +{snapshot.num_waiting} waiting", "secondary")
    return text


def _throughput(snapshot: Snapshot, does: str = "trains ", unit: str = " tok/s") -> list[Text]:
    if snapshot.tokens_per_s is None:
        return []
    return [Text.assemble((does, "muted"), (fmt.count(snapshot.tokens_per_s), "bold"), (unit, "muted"))]


def _problems(num: int) -> Text:
    if not num:
        return Text.assemble(("✔ no problems ", "muted"))
    return Text.assemble((f"▲ {fmt.counted(num, 'problem')} ", "bold error"))


def run_lines(row: RunRow, width: int, now: float, num_problems: int | None = None) -> tuple[Text, Text]:
    """Two lines: the run with its state and progress; then its figures, as many as fit, and the number of problems."""
    colour = row.level.style
    left = Text.assemble(
        (" prl ", "bold primary reverse"),
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
        (filled, "primary"), (empty, "faint"), f" {row.step}/{row.max_steps or '?'} ", no_wrap=True, end=""
    )
    view = row.view
    facts = [
        ("reward", fmt.reward(row.reward) if row.reward is not None else None),
        ("loss", fmt.number(row.loss) if row.loss is not None else None),
        ("generates", f"{fmt.count(row.tokens_per_s)} tok/s" if row.tokens_per_s is not None else None),
        ("lag", str(row.lag) if row.lag is not None else None),
        ("seen", fmt.seen_ago(now - row.updated_at) if row.updated_at is not None else None),
        ("slot", str(view.run_idx) if view.run_idx is not None else None),
        ("queue", str(view.queue_position) if view.queue_position is not None else None),
        *standing(row),
        ("version", str(view.policy_version) if view.policy_version is not None else None),
        ("lr", fmt.number(view.lr) if view.lr is not None else None),
        ("batch", str(view.batch_size) if view.batch_size is not None else None),
        ("restarts", str(view.num_restarts) if view.num_restarts else None),
        ("model", fmt.shorten_middle(view.model, 40) if view.model else None),
    ]
    pieces = [Text.assemble((f"{name} ", "muted"), value) for name, value in facts if value is not None]
    if (budget := budget_text(row)) is not None:
        pieces.insert(0, budget)
    alert = _problems(num_problems) if num_problems is not None else Text()
    second = join(pieces, "   ", width - alert.cell_len - 2)
    second.pad_left(1)
    return spread(left, progress, width), spread(second, alert, width)


def budget_text(row: RunRow) -> Text | None:
    """The used share of a run's budget, as a bar; None without a budget."""
    share = budget_share(row)
    if share is None:
        return None
    filled, empty = fmt.bar(share, 1.0, BUDGET_WIDTH)
    colour = "warning" if share >= NEARLY_USED else "primary"
    return Text.assemble(("budget ", "muted"), (filled, colour), (empty, "faint"), f" {fmt.percent(share)}")


class WorkspaceHeader(Widget):
    """The two `workspace_lines` at the top of a screen."""

    DEFAULT_CSS = """
    WorkspaceHeader { height: 2; background: $panel; }
    """

    def __init__(self, *, read_only: bool, is_demo: bool = False) -> None:
        super().__init__()
        self._read_only = read_only
        self._is_demo = is_demo
        self._snapshot: Snapshot | None = None
        self._drawn: Text | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Take `snapshot`; draw again only when the lines differ from those drawn."""
        self._snapshot = snapshot
        if self._drawn is None or self._lines() != self._drawn:
            self.refresh()

    class ProblemsAsked(Message):
        """The count of problems was clicked."""

    def on_click(self, event: Click) -> None:
        """Post `ProblemsAsked` for a click on the right end of the second line."""
        if event.y == 1 and event.x >= self.size.width - PROBLEMS_WIDTH:
            self.post_message(self.ProblemsAsked())

    def render(self) -> RenderResult:
        """Return the two lines; before the first snapshot, that the workspace is being read."""
        self._drawn = self._lines()
        return self._drawn

    def _lines(self) -> Text:
        if self._snapshot is None:
            return Text.styled("reading the workspace …", "muted")
        lines = workspace_lines(self._snapshot, self.size.width, self._read_only, self._is_demo)
        return Text("\n").join(lines)


class RunHeader(Widget):
    """Two lines about one run. `now` (Unix seconds) makes the age; it is 0 until the run was looked for."""

    DEFAULT_CSS = """
    RunHeader { height: 2; background: $panel; }
    """
    row: reactive[RunRow | None] = reactive(None)
    now: reactive[float] = reactive(0.0)
    num_problems: reactive[int] = reactive(0)

    def render(self) -> RenderResult:
        """Return the two lines of `row`; without a row, that the run was removed, or nothing before `now` is set."""
        if self.row is None:
            return Text.styled("this run was removed" if self.now else "", "warning")
        return Text("\n").join(run_lines(self.row, self.size.width, self.now, self.num_problems))


OUTCOMES = {"running": ("◌", "secondary"), "done": ("✔", "success"), "failed": ("✖", "error")}


class CommandLine(Widget):
    """Shown while an action runs, and for `SHOWN_S` after its end."""

    SHOWN_S: ClassVar[float] = 30.0

    DEFAULT_CSS = """
    CommandLine { height: 1; display: none; background: $panel; padding: 0 1; }
    CommandLine.-used { display: block; }
    """
    entry: reactive[ActionEntry | None] = reactive(None)

    def watch_entry(self, entry: ActionEntry | None) -> None:
        """Show the line while there is an entry; one that has ended gives way."""
        self.set_class(entry is not None, "-used")
        if entry is not None and entry.state != "running":
            self.set_timer(self.SHOWN_S, lambda: self._forget(entry))

    def _forget(self, entry: ActionEntry) -> None:
        if self.entry is entry:
            self.entry = None

    class Asked(Message):
        """The line was clicked."""

    def on_click(self) -> None:
        """Post `Asked`: the screen opens the list of actions."""
        self.post_message(self.Asked())

    def render(self) -> RenderResult:
        """Return the command and, at the right, its outcome, cut to two thirds of the width; empty without an entry."""
        entry = self.entry
        if entry is None:
            return Text()
        symbol, colour = OUTCOMES[entry.state]
        outcome = Text.assemble((f"{symbol} {entry.text}", colour), no_wrap=True, end="")
        outcome.truncate(max(self.size.width * 2 // 3, 10), overflow="ellipsis")
        return spread(Text.assemble(("$ ", "muted"), entry.command, no_wrap=True), outcome, self.size.width)


class KeyFooter(Footer):
    """The keys of the screen, without those that do not fit into its width."""

    def __init__(self) -> None:
        super().__init__(compact=True, show_command_palette=False)

    def compose(self) -> ComposeResult:
        """Yield the keys, and keep what they are made from."""
        self._made_from = self._bindings_shown()
        yield from super().compose()

    def _bindings_shown(self) -> list[object]:
        return [each[1:] for each in self.screen.active_bindings.values() if each.binding.show]

    async def recompose(self) -> None:
        """Make the keys again if they are others, and forget their size, so that `watch_virtual_size` is called."""
        if self.is_attached and self.children and self._made_from == self._bindings_shown():
            return
        await super().recompose()
        self.set_reactive(Widget.virtual_size, Size(0, 0))  # so the size of what is new is one that has changed

    def on_resize(self, event: Resize) -> None:
        """Hide the keys that do not fit into the width, and show those that do."""
        self._hide_what_is_cut()

    def watch_virtual_size(self) -> None:
        """Keys were laid out. Under a dialog `call_after_refresh` would wait for the dialog, not for them."""
        self.call_next(self._hide_what_is_cut)

    def _hide_what_is_cut(self) -> None:
        """The first key that does not fit and all after it; with a label its keys, which stand before it."""
        shown = list(self.children)
        fits = next((at for at, key in enumerate(shown) if key.region.right > self.region.right), len(shown))
        if fits < len(shown) and isinstance(shown[fits], Label):
            fits -= 1
        for at, key in enumerate(shown):
            key.visible = at < fits


class _Painter(Highlighter):
    """Underlines the terms that are wrong."""

    def highlight(self, text: Text) -> None:
        for error in parse(text.plain).errors:
            text.stylize("bold red underline", error.start, error.end)


class Completer(Suggester):
    """Suggests what `find` makes of the text so far."""

    def __init__(self, find: Callable[[str], str | None]) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._find = find

    async def get_suggestion(self, value: str) -> str | None:
        """Return the whole text that is suggested."""
        return self._find(value)


class FilterInput(Input):
    """Tab takes the suggestion, as in a shell."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("tab", "cursor_right_all", "Complete", show=False)]

    def action_cursor_right_all(self) -> None:
        """Go to the end of the text and take the suggestion, if there is one."""
        self.cursor_position = len(self.value)
        self.action_cursor_right()


class FilterBar(Horizontal):
    """Hidden while there is no filter. `parsed` is what the text means."""

    DEFAULT_CSS = """
    FilterBar {
        height: 1; display: none; background: $panel; padding: 0 1;
        &.-open { display: block; }
        & > #slash { width: 2; color: $accent; }
        & > Input { width: 1fr; padding: 0; background: $panel; }
        & > #said { width: auto; height: 1; max-width: 60%; color: $foreground 60%; padding-left: 2; }
        &.-wrong > #said { color: $text-error; }
    }
    """

    def __init__(self, run_ids: Callable[[], Sequence[str]]) -> None:
        super().__init__(id="filter-bar")
        self.input = FilterInput(
            placeholder="words, or state:active reward>0.5 name~math",
            id="filter",
            select_on_focus=False,
            compact=True,
            highlighter=_Painter(),
            suggester=Completer(lambda text: complete(text, run_ids())),
        )
        self.parsed = Query()
        self._said = Clipped(id="said", markup=False)
        self._said_now = ""

    def compose(self) -> ComposeResult:
        """Yield the slash, the input and the text of `say_count`."""
        yield Static("/", id="slash", markup=False)
        yield self.input
        yield self._said

    def on_mount(self) -> None:
        """Keep the input from taking the focus before `open`."""
        self.input.can_focus = False  # or it takes the keys when the table of an empty workspace cannot

    def take(self, text: str) -> None:
        """`text` is the filter now."""
        self.parsed = parse(text)
        self.set_class(bool(self.parsed.errors), "-wrong")

    def put(self, text: str) -> None:
        """Write `text` into the input; an empty one hides the bar."""
        self.input.value = text
        if text:
            self.add_class("-open")
        else:
            self.close()

    def say_count(self, num_shown: int, num_all: int) -> None:
        """Say what is wrong, else how much is left."""
        errors = self.parsed.errors
        said = errors[0].message if errors else f"{num_shown} of {num_all}"
        if said != self._said_now:
            self._said_now = said
            self._said.update(Content(said))

    def open(self, text: str = "") -> None:
        """Show the bar with `text`, and focus its input."""
        self.input.value = text
        self.take(text)
        self.add_class("-open")
        self.input.can_focus = True
        self.input.focus()

    def close(self) -> None:
        """Hide the bar; its text stays, its input cannot take the focus before `open`."""
        self.remove_class("-open")
        self.input.can_focus = False
