"""What the screens share: they are told of each new look at the house, and of each action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from textual.binding import Binding, BindingType
from textual.screen import Screen

from tui.messages import ActionEntry
from tui.snapshot import RunRow, Snapshot


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
