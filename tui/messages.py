"""Messages from the reading threads and the actions to the screens. Messages that replace each other cannot pile up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from textual.message import Message

if TYPE_CHECKING:
    from prime_rl.utils.text import CleanText
    from tui.model.snapshot import Snapshot
    from tui.readers.log_reader import Found
    from tui.readers.machine import SystemLook
    from tui.readers.tabs import TabData


class Look(Message):
    """A new look at something; any later one makes it worthless."""

    def can_replace(self, message: Message) -> bool:
        """True when the next message in the queue replaces this one: any later look of the same kind does."""
        return isinstance(message, type(self))


class WorkspaceChanged(Look):
    """A new look at the workspace. A newer one makes an older one worthless."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class RunChanged(Message):
    """A new look at what one tab shows of the run that is open."""

    def __init__(self, data: TabData) -> None:
        super().__init__()
        self.data = data

    def can_replace(self, message: Message) -> bool:
        """True when the next message in the queue replaces this one: a later look at the same tab and run does."""
        if not isinstance(message, RunChanged) or type(message.data) is not type(self.data):
            return False
        return message.data.run_id == self.data.run_id


class ReadFailed(Message):
    """What is in the files of a run could not be shown, and why."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why


class TabAsked(Message):
    """The tab of that name of the open run is to show what `request` says: `ChartView`, `LogRequest` and the like."""

    def __init__(self, tab: str, request: object) -> None:
        super().__init__()
        self.tab, self.request = tab, request


class SystemChanged(Look):
    """A new look at the machine."""

    def __init__(self, look: SystemLook) -> None:
        super().__init__()
        self.look = look


class LogFound(Message):
    """Progress of a search in a log."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found = found

    def can_replace(self, message: Message) -> bool:
        """True when the next message in the queue replaces this one: one of the same or of a later search does."""
        return isinstance(message, LogFound) and message.found.serial >= self.found.serial


@dataclass(frozen=True)
class ChatTurn:
    """`name` is what answered, such as `run_a@v3`; None for a question."""

    name: CleanText | None
    text: CleanText


@dataclass(frozen=True)
class ChatLook:
    """The content of the tab Chat.

    Attributes:
        target: what is to answer: a run (its newest version), `run_a@v3`, or "base".
        label: what is loaded, such as `run_a@v3`.
        problem: why a question was not answered, in one line.
        question: one to ask again: it was not answered, or another version is to answer it.
    """

    target: CleanText
    state: Literal["idle", "loading", "answering"] = "idle"
    label: CleanText | None = None
    turns: tuple[ChatTurn, ...] = ()
    problem: CleanText | None = None
    question: str = ""


class ChatChanged(Look):
    """Progress of a conversation."""

    def __init__(self, look: ChatLook) -> None:
        super().__init__()
        self.look = look


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
        """True when the next message in the queue replaces this one: later progress of the same action does."""
        return isinstance(message, ActionChanged) and message.entry.serial == self.entry.serial
