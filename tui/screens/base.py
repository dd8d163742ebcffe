"""What the screens share: each gets every new snapshot of the workspace, and every action.

`WorkspaceScreen` is the base of all; `PlaceScreen` of those that stand side by side (`places`): they have the
workspace's header on top, and a number key leads from each to each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias, runtime_checkable

from textual import on
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.screen import Screen

from tui.commands import Command, CommandError
from tui.memory import Memory
from tui.messages import ActionEntry
from tui.snapshot import RunRow, Snapshot
from tui.widgets.command_line import CommandLine
from tui.widgets.header import WorkspaceHeader
from tui.widgets.keys import KeyFooter

if TYPE_CHECKING:
    from tui.system_watch import Probe

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
)
# Keys that only move are not commands: all other named ones are in the command palette.
MOVES = ("move", "page", "end", "scroll", "cursor", "extend", "go", "next_tab", "focus", "copy_text")


@dataclass(frozen=True)
class Place:
    """A screen beside others. `key` opens it from every place; `module` and `class_name` locate it."""

    name: str
    key: str
    title: str
    module: str
    class_name: str


# Among the numbers of the places: one run.
RUN_KEY = 2
# From the workspace's folder to what asks the machine: `system_watch.SystemProbe` in real life.
ProbeMaker: TypeAlias = "Callable[[Path], Probe]"


@dataclass(frozen=True)
class Setting:
    """What every screen is given. `clock` gives Unix seconds; `make_probe` takes the place of the real machine."""

    output_dir: Path
    clock: Callable[[], float]
    read_only: bool
    memory: Memory
    # Runs that were deleted from here, newest last: what undo brings back.
    deleted: list[tuple[str, ...]] = field(default_factory=list)
    make_probe: ProbeMaker | None = None


@runtime_checkable
class ShowsWorkspace(Protocol):
    """A screen that gets each new snapshot."""

    def show_workspace(self, snapshot: Snapshot) -> None: ...


@runtime_checkable
class ShowsAction(Protocol):
    """A screen that gets the progress of actions."""

    def show_action(self, entry: ActionEntry) -> None: ...


@runtime_checkable
class Guide(Protocol):
    """The part of the app that screens use: it opens one from another."""

    @property
    def places(self) -> Sequence[Place]: ...

    def go(self, name: str) -> None: ...

    def go_number(self, number: int) -> None: ...

    def open_run(self, run_id: str, compare: tuple[str, ...] = ()) -> None: ...

    def shown_theme(self, chosen: str) -> str: ...

    def save_memory(self) -> None: ...

    def entries(self) -> Sequence[ActionEntry]: ...

    def look_closely(self, closely: bool) -> None: ...


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
        self._is_ready = False
        self._keys_for: str | None = None

    @property
    def can_show(self) -> bool:
        """Whether the widgets can be filled: not before they are mounted."""
        return self._is_ready

    @property
    def guide(self) -> Guide:
        """The app, for going elsewhere."""
        assert isinstance(self.app, Guide)
        return self.app

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        def place(item: tuple[str, ActiveBinding]) -> int:
            action = item[1].binding.action
            order = self.key_order
            return order.index(action) if action in order else len(order)

        return dict(sorted(super().active_bindings.items(), key=place))

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

    def target_daemon(self) -> str | None:
        """The daemon that actions apply to, by name; None without one."""
        row = self.target_row()
        return row.run_id if row else None

    def show_workspace(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def show_action(self, entry: ActionEntry) -> None:
        self.entry = entry

    def run_ids(self) -> list[str]:
        return [row.run_id for row in self.snapshot.rows] if self.snapshot else []

    def commands(self) -> Mapping[str, Command]:
        """The commands of `:` here, by name."""
        guide = self.guide
        return {
            **{place.name: self.go_command(place.name, place.title) for place in guide.places},
            "open": Command("open RUN", "open a run; part of its name is enough", self._command_open, self.run_ids),
            "theme": Command("theme NAME", "colours", self._command_theme, lambda: sorted(self.app.available_themes)),
            "help": self.simple_command("help", "keys and symbols", "help"),
            "quit": self.simple_command("quit", "quit; the daemons keep running", "app.quit"),
        }

    def go_command(self, name: str, title: str) -> Command:
        return Command(name, f"the screen {title}", lambda words: self.guide.go(name))

    def simple_command(self, name: str, help_text: str, action: str) -> Command:
        """A command without words that does what a key does."""
        return Command(name, help_text, lambda words: self.run_named(action))

    def run_named(self, action: str) -> None:
        """Run an action of this screen by name."""

        async def run() -> None:
            await self.app.run_action(action, default_namespace=self)

        self.app.call_next(run)

    def _command_open(self, words: str) -> None:
        run_ids = self.run_ids()
        fits = [words] if words in run_ids else [run_id for run_id in run_ids if words and words in run_id]
        if not fits:
            raise CommandError(f"run {words!r} not found")
        if len(fits) > 1:
            raise CommandError(f"{words!r} is ambiguous: {', '.join(fits[:4])}{' ...' if len(fits) > 4 else ''}")
        self.guide.open_run(fits[0])

    def _command_theme(self, words: str) -> None:
        if words not in self.app.available_themes:
            raise CommandError(f"theme {words!r} not found; themes: {', '.join(sorted(self.app.available_themes))}")
        self.app.theme = self.guide.shown_theme(words)

    def action_command(self) -> None:
        from tui.screens.command import CommandScreen

        self.app.push_screen(CommandScreen(self.commands()))

    def action_help(self) -> None:
        from tui.screens.help import HelpScreen

        self.app.push_screen(HelpScreen(self.setting.read_only))


class PlaceScreen(WorkspaceScreen):
    """A screen of `places`: header, `compose_body`, the line of the last action, the keys.

    A subclass gives `compose_body` and shows `self.snapshot` in `refill`, which is called for each new look once the
    widgets are there.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"go({number})", "Runs, the chosen run, system, nodes, problems", show=False)
            for number in range(1, 6)
        ),
    ]

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        # Held, not looked up: a look at the workspace may arrive while the app ends and takes its widgets away.
        self.header = WorkspaceHeader(read_only=setting.read_only)
        self.command_line = CommandLine()

    def compose(self) -> ComposeResult:
        yield self.header
        yield from self.compose_body()
        yield self.command_line
        yield KeyFooter()

    def compose_body(self) -> ComposeResult:
        raise NotImplementedError

    def refill(self, snapshot: Snapshot) -> None:
        raise NotImplementedError

    def on_mount(self) -> None:
        self._is_ready = True
        self.command_line.entry = self.entry
        if self.snapshot is not None:
            self.show_workspace(self.snapshot)

    def show_workspace(self, snapshot: Snapshot) -> None:
        super().show_workspace(snapshot)
        if self.can_show:
            self.header.show(snapshot)
            self.refill(snapshot)

    def show_action(self, entry: ActionEntry) -> None:
        super().show_action(entry)
        if self.can_show:
            self.command_line.entry = entry

    @on(WorkspaceHeader.ProblemsAsked)
    def _problems_asked(self) -> None:
        self.guide.go("problems")

    def action_go(self, number: int) -> None:
        """Open the place with that number;

        RUN_KEY opens the run that is chosen here, else the first of the workspace.
        """
        if number != RUN_KEY:
            self.guide.go_number(number)
            return
        row = self.target_row()
        run_id = row.run_id if row else next(iter(self.run_ids()), None)
        if run_id is not None:
            self.guide.open_run(run_id)
