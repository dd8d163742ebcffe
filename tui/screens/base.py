"""What the screens share: they are told of each new look at the house, and of each action.

`HouseScreen` is the base of all; `PlaceScreen` of those that stand side by side (`places`): they have the house's
header on top, and a number key leads from each to each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer

from tui.messages import ActionEntry
from tui.snapshot import RunRow, Snapshot
from tui.widgets.command_line import CommandLine
from tui.widgets.header import HouseHeader

# How the keys stand in the footer, by action; the others follow.
KEY_ORDER = (
    "select_cursor",
    "app.pop_screen",
    "next_tab(1)",
    "filter",
    "add",
    "evict",
    "readmit",
    "delete",
    "sort",
    "parts",
    "follow",
    "help",
    "app.quit",
)
# What has a key but no place in the footer, and still a name in the command palette.
MORE_COMMANDS = ("undo_delete", "clear_filter", *(f"tab({index})" for index in range(4)))


@dataclass(frozen=True)
class Setting:
    """What every screen is given. `clock` gives Unix seconds."""

    output_dir: Path
    clock: Callable[[], float]
    read_only: bool


@runtime_checkable
class ShowsHouse(Protocol):
    """A screen that wants each new snapshot."""

    def show_house(self, snapshot: Snapshot) -> None: ...


@runtime_checkable
class ShowsAction(Protocol):
    """A screen that wants to know how actions go."""

    def show_action(self, entry: ActionEntry) -> None: ...


@runtime_checkable
class Guide(Protocol):
    """The app, as screens know it: who leads from one to another."""

    def go(self, name: str) -> None: ...

    def go_number(self, number: int) -> None: ...

    def open_run(self, run_id: str) -> None: ...


class HouseScreen(Screen[None]):
    """Base of all screens but the dialogs."""

    BINDINGS: ClassVar[list[BindingType]] = [
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
            return KEY_ORDER.index(action) if action in KEY_ORDER else len(KEY_ORDER)

        return dict(sorted(super().active_bindings.items(), key=place))

    def show_keys(self) -> None:
        """Let the footer grey out and bring back keys; costly, so only when the run in question can do other things."""
        row = self.target_row()
        state = row.state if row else None
        if state != self._keys_for:
            self._keys_for = state
            self.refresh_bindings()

    def target_row(self) -> RunRow | None:
        """The run that actions are about: the selected one, or the one that is open; None where there is none."""
        return None

    def target_part(self) -> str | None:
        """The part that actions are about, by name; None where there is none."""
        row = self.target_row()
        return row.run_id if row else None

    def show_house(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def show_action(self, entry: ActionEntry) -> None:
        self.entry = entry

    def action_help(self) -> None:
        from tui.screens.help import HelpScreen

        self.app.push_screen(HelpScreen(self.setting.read_only))


class PlaceScreen(HouseScreen):
    """A screen of `places`: header, `compose_body`, the line of the last action, the keys.

    A subclass gives `compose_body` and shows `self.snapshot` in `refill`, which is called for each new look once the
    widgets are there.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"go({number})", show=False) for number in range(1, 6)),
    ]

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        # Held, not looked up: a look at the house may arrive while the app ends and takes its widgets away.
        self.header = HouseHeader(read_only=setting.read_only)
        self.command_line = CommandLine()

    def compose(self) -> ComposeResult:
        yield self.header
        yield from self.compose_body()
        yield self.command_line
        yield Footer(compact=True, show_command_palette=False)

    def compose_body(self) -> ComposeResult:
        raise NotImplementedError

    def refill(self, snapshot: Snapshot) -> None:
        raise NotImplementedError

    def on_mount(self) -> None:
        self._is_ready = True
        self.command_line.entry = self.entry
        if self.snapshot is not None:
            self.show_house(self.snapshot)

    def show_house(self, snapshot: Snapshot) -> None:
        super().show_house(snapshot)
        if self.can_show:
            self.header.snapshot = snapshot
            self.refill(snapshot)

    def show_action(self, entry: ActionEntry) -> None:
        super().show_action(entry)
        if self.can_show:
            self.command_line.entry = entry

    def action_go(self, number: int) -> None:
        """Open the place with that number; nothing for a number that has none."""
        self.guide.go_number(number)
