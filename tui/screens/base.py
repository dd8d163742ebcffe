"""What the screens share: they are told of each new look at the house, and of each action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from textual.binding import ActiveBinding, Binding, BindingType
from textual.screen import Screen

from tui.messages import ActionEntry
from tui.snapshot import RunRow, Snapshot

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


class HouseScreen(Screen[None]):
    """Base of the home screen and the run screen."""

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
        """The run that actions are about: the selected one, or the one that is open."""
        raise NotImplementedError

    def show_house(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def show_action(self, entry: ActionEntry) -> None:
        self.entry = entry

    def action_help(self) -> None:
        from tui.screens.help import HelpScreen

        self.app.push_screen(HelpScreen(self.setting.read_only))
