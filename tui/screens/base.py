"""Parts that the screens share: each gets every new snapshot of the workspace, and every action.

`WorkspaceScreen` is the base of all; `PlaceScreen` of those that stand side by side (`PLACES`): they have the
workspace's header on top, and a number key leads from each to each. A new one is one line in `PLACES`.

Over each of them `:` opens a line at the bottom (enter runs the command, and an error is shown beside it) and `?` the
help: the keys, read from the bindings, and what the symbols mean, on one page.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias, runtime_checkable

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Static

from prime_rl.utils.text import one_line
from tui.keys import Command, CommandError, complete, key_rows, parse, place_of
from tui.memory import Memory
from tui.messages import ActionEntry
from tui.model.levels import STATE_WORDS, STATES
from tui.model.snapshot import RunRow, Snapshot
from tui.widgets.header import CommandLine, Completer, FilterInput, KeyFooter, WorkspaceHeader
from tui.widgets.line_list import Clipped, TextScreen, titled

if TYPE_CHECKING:
    from tui.readers.machine import Finding, Probe

# How the footer names the keys, by action; the others follow.
KEY_ORDER = (
    "open",
    "app.pop_screen",
    "next_tab(1)",
    "filter",
    "mark",
    "add",
    "evict",
    "readmit",
    "delete",
    "next_sort(1)",
    "follow",
    "command",
    "help",
    "app.quit",
    "pause",
)
# Keys that only move are not commands: all other named ones are in the command palette.
MOVES = ("move", "page", "end", "scroll", "cursor", "extend", "go", "next_tab", "focus", "copy_text")


@dataclass(frozen=True)
class Place:
    """A screen beside others. `key` opens it from every place.

    `reads` and `acts` ("module:class" below `tui.screens`) are what it is for a person who may only look, and who may
    act. They are imported when the screen is opened: what acts never is for the first.
    """

    name: str
    key: str
    title: str
    reads: str
    acts: str

    def make(self, setting: Setting) -> WorkspaceScreen:
        """Import and make the screen: the one that acts, or for a person who may only look the one that reads."""
        module, _, name = (self.reads if setting.read_only else self.acts).partition(":")
        screen: type[WorkspaceScreen] = getattr(importlib.import_module(f"tui.screens.{module}"), name)
        return screen(setting)


HOME = "runs"
PLACES = (
    Place(HOME, "1", "Runs", "runs:RunsScreen", "acting:ActingRunsScreen"),
    Place("system", "3", "System", "system:SystemScreen", "acting_places:ActingSystemScreen"),
    Place("nodes", "4", "Nodes", "nodes:NodesScreen", "acting_places:ActingNodesScreen"),
    Place("problems", "5", "Problems", "system:ProblemsScreen", "acting_places:ActingProblemsScreen"),
    Place("compare", "6", "Compare", "compare:CompareScreen", "acting_places:ActingCompareScreen"),
)


# Among the numbers of the places: one run.
RUN_KEY = 2
# From the workspace's folder to what asks the machine: `readers.machine.SystemProbe` in real life.
ProbeMaker: TypeAlias = "Callable[[Path], Probe]"
# From the workspace's folder to what keeps it from working: `readers.machine.find` in real life.
Examine: TypeAlias = "Callable[[Path], Sequence[Finding]]"


@dataclass(frozen=True)
class Setting:
    """The parts that every screen is given.

    `clock` gives Unix seconds; `make_probe` takes the place of the real machine; `is_demo`: `prl demo` shows it;
    `examine` finds what keeps the workspace from working.
    """

    output_dir: Path
    clock: Callable[[], float]
    read_only: bool
    memory: Memory
    # Runs that were deleted from here, newest last: what undo brings back.
    deleted: list[tuple[str, ...]] = field(default_factory=list)
    make_probe: ProbeMaker | None = None
    is_demo: bool = False
    examine: Examine | None = None


@runtime_checkable
class ShowsAction(Protocol):
    """A screen that gets the progress of actions."""

    def show_action(self, entry: ActionEntry) -> None:
        """Called by the app when an action begins, makes progress or ends."""


@runtime_checkable
class Guide(Protocol):
    """The part of the app that screens use: it opens one from another."""

    def go(self, name: str) -> None:
        """Close all screens above home, then open the place of that name."""

    def go_number(self, number: int) -> None:
        """Go to the place that has this key; do nothing for other numbers."""

    def open_run(self, run_id: str, compare: tuple[str, ...] = ()) -> None:
        """Open the screen of a run on top of the others, with the curves of `compare` beside its own."""

    def shown_theme(self, chosen: str) -> str:
        """The name of the variant of the theme `chosen` that fits the colours of this terminal."""

    def save_memory(self) -> None:
        """Write order, filter, pins and theme to disk, in a thread."""

    def entries(self) -> Sequence[ActionEntry]:
        """The actions of this session, each as it was last reported, the oldest first."""

    def look_closely(self, closely: bool) -> None:
        """Look at the workspace more often (true), or as usual (false)."""


class WorkspaceScreen(Screen[None]):
    """Base of all screens but the dialogs. `key_order` is the order of the keys in the footer, by action."""

    key_order: ClassVar[tuple[str, ...]] = KEY_ORDER

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "colon",
            "command",
            "Command",
            key_display=":",
            show=False,
            tooltip="command line; tab completes, the beginning of a name is enough",
        ),
        Binding("question_mark", "help", "Help", key_display="?"),
    ]

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.snapshot: Snapshot | None = None
        self.entry: ActionEntry | None = None
        # The runs that a command names, while it is carried out.
        self.named: list[RunRow] = []
        self.command_line = CommandLine()
        self.can_show = False
        """True when the widgets can be filled: not before they are mounted."""
        self._keys_for: str | None = None

    @property
    def guide(self) -> Guide:
        """The app, for going elsewhere."""
        assert isinstance(self.app, Guide)
        return self.app

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """The keys that Textual finds active, in the order of `key_order`, all others after them."""

        def place(item: tuple[str, ActiveBinding]) -> int:
            action = item[1].binding.action
            order = self.key_order
            return order.index(action) if action in order else len(order)

        found = dict(sorted(super().active_bindings.items(), key=place))
        shown: set[tuple[str | None, str]] = set()
        for key, active in found.items():  # a widget's key may look like one of the screen: it stands there once
            mark = active.binding.key_display, active.binding.description
            if active.binding.show and mark[0] and mark in shown:
                found[key] = active._replace(binding=replace(active.binding, show=False))
            shown |= {mark} if active.binding.show else set()
        return found

    def show_keys(self) -> None:
        """Let the footer grey out and bring back keys; costly, so only when the run in question can do other things."""
        row = self.target_row()
        state = row.state if row else None
        if state != self._keys_for:
            self._keys_for = state
            self.refresh_bindings()

    def target_row(self) -> RunRow | None:
        """The run that actions apply to: the selected or the open one; None without one."""
        return None

    def target_rows(self) -> list[RunRow]:
        """All runs that actions apply to."""
        row = self.target_row()
        return [row] if row else []

    def chosen_rows(self) -> list[RunRow]:
        """The runs that the command names; without any, those that actions apply to."""
        return self.named or self.target_rows()

    def target_daemon(self) -> str | None:
        """The daemon that actions apply to, by name; None without one."""
        row = self.target_row()
        return row.run_id if row else None

    def show_workspace(self, snapshot: Snapshot) -> None:
        """Keep a new snapshot, which every screen of the stack gets; subclasses draw it too."""
        self.snapshot = snapshot

    def show_action(self, entry: ActionEntry) -> None:
        """Keep the action; once the widgets are there, show it in the line above the keys."""
        self.entry = entry
        if self.can_show:
            self.command_line.entry = entry

    def why_not(self, action: str) -> str | None:
        """Why an action has no effect now, in one line: its key is greyed out; None: it has one, or no key here."""
        return None

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Grey out the keys without effect."""
        return None if self.why_not(action) else super().check_action(action, parameters)

    def run_ids(self) -> list[str]:
        """The ids of all runs of the snapshot, whatever the filter; [] before the first snapshot."""
        return [row.run_id for row in self.snapshot.rows] if self.snapshot else []

    def commands(self) -> dict[str, Command]:
        """The commands of `:` and ctrl+p here, by name: of every key that does more than move, and of the places."""
        found: dict[str, Command] = {}
        for command in self._key_commands():
            found.setdefault(command.name, command)
        for place in PLACES:
            go = functools.partial(self.guide.go, place.name)
            found[place.name] = Command(place.name, f"the screen {place.title}", go, place.title, place.key)
        states = {row.run_id: row.state for row in self.snapshot.rows} if self.snapshot else {}
        about = "open a run; part of its name is enough"
        take_words(found, "open", about, "RUN", self._command_open, lambda: states, is_listed=True)
        found["theme"] = Command("theme", "dark, light and many others", self.app.action_change_theme, "Theme")
        themes = dict.fromkeys(sorted(self.app.available_themes), "")
        take_words(found, "theme", found["theme"].help, "NAME", self._command_theme, lambda: themes)
        return found

    def _key_commands(self) -> Iterator[Command]:
        """Those with a name of their own (the binding's `id`) first, then those that are called as in the footer."""
        for active in sorted(self.active_bindings.values(), key=lambda each: each.binding.id is None):
            binding = active.binding
            action = binding.action.rpartition(".")[2].partition("(")[0]
            if binding.description and not binding.system and action not in (*MOVES, "command_palette"):
                name = binding.id or binding.description.lower().replace(" ", "-")
                words = binding.tooltip or binding.description
                run = functools.partial(self._run_key, active.node, binding.action) if active.enabled else None
                key = self.app.get_key_display(binding)
                about, why = words[:1].lower() + words[1:], self.why_not(action)
                yield Command(name, about, run, binding.description, key, why_not=why)

    def _run_key(self, owner: DOMNode, action: str) -> None:
        named = self.named

        async def run() -> None:
            self.named = named
            await self.app.run_action(action, default_namespace=owner)
            self.named = []

        self.app.call_next(run)

    def _command_open(self, words: str) -> None:
        run_ids = self.run_ids()
        fits = [words] if words in run_ids else [run_id for run_id in run_ids if words and words in run_id]
        if not fits:
            raise CommandError(f"run {words!r} not found in this workspace; :runs lists them")
        if len(fits) > 1:
            raise CommandError(f"{words!r} is ambiguous: {', '.join(fits[:4])}{' ...' if len(fits) > 4 else ''}")
        self.guide.open_run(fits[0])

    def _command_theme(self, words: str) -> None:
        if words not in self.app.available_themes:
            raise CommandError(f"theme {words!r} not found; themes: {', '.join(sorted(self.app.available_themes))}")
        self.app.theme = self.guide.shown_theme(words)

    def action_command(self) -> None:
        """`:` opens the command line with the commands of this screen."""
        self.app.push_screen(CommandScreen(self.commands()))

    def action_help(self) -> None:
        """`?` opens the page of keys, filter terms and states, at the keys of what has the focus."""
        nodes = self.focused.ancestors_with_self if self.focused else [self]
        self.app.push_screen(HelpScreen(self.setting.read_only, place_of(nodes, self.setting.read_only)))


def take_words(
    commands: dict[str, Command],
    name: str,
    about: str,
    argument: str,
    take: Callable[[str], None],
    words: Callable[[], Mapping[str, str]] = dict,
    *,
    is_listed: bool = False,
) -> None:
    """Let the command of that name take words too; without a key for it now it needs them."""
    known = commands.get(name) or Command(name, about, title=name.capitalize())
    commands[name] = replace(known, help=about, argument=argument, take=take, words=words, is_listed=is_listed)


class PlaceScreen(WorkspaceScreen):
    """A screen of `PLACES`: header, `compose_body`, the line of the last action, the keys.

    A subclass gives `compose_body` and `refill`.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(str(number), f"go({number})", "Runs, the chosen run, system, nodes, problems, compare", show=False)
        for number in range(1, 7)
    ]

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        # Held, not looked up: a look at the workspace may arrive while the app ends and takes its widgets away.
        self.header = WorkspaceHeader(read_only=setting.read_only, is_demo=setting.is_demo)

    def compose(self) -> ComposeResult:
        """Yield the header, the body, the line of the last action and the keys, from top to bottom."""
        yield self.header
        yield from self.compose_body()
        yield self.command_line
        yield KeyFooter()

    def compose_body(self) -> ComposeResult:
        """A subclass yields the widgets between the header and the line of the last action."""
        raise NotImplementedError

    def refill(self, snapshot: Snapshot) -> None:
        """A subclass draws `snapshot` in the body; called for a new look, size or theme, once the widgets are there."""
        raise NotImplementedError

    def on_mount(self) -> None:
        """Show the snapshot and the action that came before the widgets were there.

        Textual itself calls it, after the `on_mount` of a subclass.
        """
        self.can_show = True
        self.command_line.entry = self.entry
        self.app.theme_changed_signal.subscribe(self, lambda _: self.redraw())
        if self.snapshot is not None:
            self.show_workspace(self.snapshot)

    def on_resize(self) -> None:
        """Draw all for the new size."""
        self.redraw()

    def show_workspace(self, snapshot: Snapshot) -> None:
        """Keep the snapshot; once the widgets are there, draw it in header and body."""
        super().show_workspace(snapshot)
        if self.can_show:
            self.header.show(snapshot)
            self.refill(snapshot)

    def redraw(self) -> None:
        """Draw the body again, if there are a snapshot and the widgets."""
        if self.snapshot is not None and self.can_show:
            self.refill(self.snapshot)

    @on(WorkspaceHeader.ProblemsAsked)
    def _problems_asked(self) -> None:
        self.guide.go("problems")

    def action_go(self, number: int) -> None:
        """Open the place with that number.

        RUN_KEY opens the run that is chosen here, else the first of the workspace.
        """
        if number != RUN_KEY:
            self.guide.go_number(number)
            return
        row = self.target_row()
        run_id = row.run_id if row else next(iter(self.run_ids()), None)
        if run_id is not None:
            self.guide.open_run(run_id)


FILTER = (
    ("math", "in the id, state or note"),
    ("state:", "state:active,waiting; is:pinned, marked, problem, live"),
    ("reward>0.5", "> >= < <= = !=, 10k, 50%, seen<5m; !TERM is not"),
    ("name~lr", "contains; also note, reason, model"),
)
ALSO = (
    ("ctrl+p", "all commands by name, themes"),
    ("mouse", "head sorts, edge marks, click chooses, again opens"),
)


def describe_help(read_only: bool) -> Text:
    """Every key, the filter's terms, the states. What is shortened here stands whole in docs/tui.md."""
    text = Text()
    groups = [(place, [(" ".join(keys), words) for keys, words in rows]) for place, rows in key_rows(read_only).items()]
    groups[0][1].extend(ALSO)
    groups.insert(2, ("Filter", list(FILTER)))
    for title, rows in groups:
        text.append(f"{title}\n", "bold primary")
        for key, words in rows:
            text.append(f"  {key:<13} ", "accent").append(f"{words}\n")
        text.append("\n")
    text.append("States\n", "bold primary")
    for state, (symbol, level) in STATES.items():
        text.append(f"  {symbol} {state:<9}", level.style).append(f" {STATE_WORDS[state]}\n")
    text.rstrip()
    return text


class HelpScreen(TextScreen):
    """The keys and the meaning of symbols, in two parts."""

    DEFAULT_CSS = "HelpScreen { & > VerticalScroll { width: 78; } & Static { height: auto; } }"

    def __init__(self, read_only: bool, place: str) -> None:
        super().__init__()
        self._text = describe_help(read_only)
        self._first = f"\n{self._text.plain}".index(f"\n{place}\n")

    def compose(self) -> ComposeResult:
        """Yield the text in a box that scrolls, in two parts: the second begins with the place."""
        with titled(VerticalScroll(), "help", "esc closes"):
            yield Static(self._text[: self._first], markup=False)
            yield Static(self._text[self._first :], id="here", markup=False)

    def on_mount(self) -> None:
        """Begin at the keys of the place where the help was opened."""
        box, here = self.query_one(VerticalScroll), self.query_one("#here")
        self.call_after_refresh(box.scroll_to_widget, here, animate=False, top=True)


class LineScreen(ModalScreen[None]):
    """A screen with one line to type in: what is typed before the line has the focus is typed into it then."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead: list[events.Key] = []

    def on_key(self, event: events.Key) -> None:
        """Keep a key that comes before the line has the focus; escape is never kept."""
        if event.key != "escape" and not self._line_has_focus():
            event.stop()
            self._ahead.append(event)

    def on_descendant_focus(self) -> None:
        """Type the kept keys into the line as soon as it has the focus."""
        if self._line_has_focus():
            ahead, self._ahead = self._ahead, []
            for event in ahead:
                self.query_one(Input).post_message(events.Key(event.key, event.character))

    def _line_has_focus(self) -> bool:
        return any(line.has_focus for line in self.query(Input))


class CommandScreen(LineScreen):
    """Opens over any screen, which defines its commands."""

    DEFAULT_CSS = """
    CommandScreen {
        background: transparent;
        align: left bottom;
        & > Horizontal { height: 1; background: $panel; padding: 0 1; }
        & #colon { width: 2; color: $accent; }
        & Input { width: 1fr; padding: 0; background: $panel; }
        & #said { width: auto; height: 1; max-width: 70%; color: $foreground 60%; padding-left: 2; }
        & #said.-wrong { color: $text-error; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Close")]

    def __init__(self, commands: Mapping[str, Command]) -> None:
        super().__init__()
        self._commands = commands

    def compose(self) -> ComposeResult:
        """Yield the input, and beside it what the command does or what is wrong."""
        with Horizontal():
            yield Static(":", id="colon", markup=False)
            yield FilterInput(
                placeholder="runs, sort reward, theme prl-light ...",
                id="command",
                compact=True,
                suggester=Completer(lambda text: complete(text, self._commands)),
            )
            yield Clipped(id="said", markup=False)

    def on_mount(self) -> None:
        """Give the input the focus."""
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        self._say("")
        name = event.value.partition(" ")[0]
        if name in self._commands:
            command = self._commands[name]
            self._say(f"{command.usage}: {command.help}")

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        if not event.value.strip():
            self.dismiss()
            return
        try:
            command, words = parse(event.value, self._commands)
        except CommandError as error:
            self._say(one_line(str(error)), wrong=True)
            return
        self.dismiss()
        self.app.call_later(self._run, command, words)

    def _run(self, command: Command, words: str) -> None:
        """After this screen is gone, for the command may open another."""
        try:
            command.run(words)
        except CommandError as error:
            self.app.notify(one_line(str(error)), severity="error", markup=False)

    def _say(self, text: str, *, wrong: bool = False) -> None:
        said = self.query_one("#said", Static)
        said.set_class(wrong, "-wrong")
        said.update(Content(text))
