"""Messages from the reading threads and the actions to the screens. Messages that replace each other cannot pile up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from textual.message import Message

if TYPE_CHECKING:
    from prime_rl.utils.text import CleanText
    from tui.log_search import Found
    from tui.snapshot import Snapshot
    from tui.tabs import TabData


class WorkspaceChanged(Message):
    """A new look at the workspace. A newer one makes an older one worthless."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, WorkspaceChanged)


class RunChanged(Message):
    """A new look at what one tab shows of the run that is open."""

    def __init__(self, data: TabData) -> None:
        super().__init__()
        self.data = data

    def can_replace(self, message: Message) -> bool:
        if not isinstance(message, RunChanged) or type(message.data) is not type(self.data):
            return False
        return self.data.replaces and message.data.run_id == self.data.run_id


class LogFound(Message):
    """Progress of a search in a log."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found = found

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, LogFound) and message.found.serial <= self.found.serial


ActionState = Literal["running", "done", "failed"]


@dataclass(frozen=True)
class ActionEntry:
    """One action of the person at the screen. `command` would do the same in a shell.

    `text` is its progress in one line, `detail` in full; `at` is when that was reported (Unix seconds).
    """

    serial: int
    command: CleanText
    state: ActionState
    text: CleanText
    detail: CleanText
    at: float = 0.0


class ActionChanged(Message):
    """An action began, made progress or ended."""

    def __init__(self, entry: ActionEntry) -> None:
        super().__init__()
        self.entry = entry

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, ActionChanged) and message.entry.serial == self.entry.serial
