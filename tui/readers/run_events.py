"""Events of a run, from all their sources: people, trainer, supervisor, its own files. No widgets here.

People's actions come from `logs/audit.jsonl`; admission, restarts and their reasons from the lines of the trainer's and
the supervisor's log that name the run; evictions, config errors and the final state from the run's own files. Changes
of state that are seen while the tab is open are noted too.
"""

from __future__ import annotations

import calendar
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.utils.tail import FileTail
from prime_rl.utils.text import CleanText, clean_text, one_line
from tui.readers.tabs import EVENTS, TabData, changed_at, file_stamp, read_clean

MAX_EVENTS = 500
MAX_TEXT_CHARS = 10_000
# Of a part's log this much is looked through, from its end.
LOG_TAIL_BYTES = 4 << 20
_STAMPED = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)Z (\w+) +([\w.]+): (.*)")

# The supervisor's words for the state of a run's orchestrator, and how the trainer's sentences begin -> kind of event.
_STATES = {
    "starting": "",
    "running": "running",
    "stalled": "stalled",
    "backoff": "restart",
    "failed": "failed",
    "stopped": "stopped",
    "done": "done",
    "pid": "started",
}
_SENTENCES = {"checkpoint of step": "", "takes slot": "admitted", "leaves slot": "left", "resumes from": "resumed"}
# Checkpoints have their own tab, and "starting" follows each "pid".
_LEFT_OUT = ("",)


@dataclass(frozen=True)
class Event:
    """Something that happened to the run: when (Unix seconds, None when unknown), what, its text, and who did it."""

    time: float | None
    kind: CleanText
    text: CleanText
    who: CleanText

    @classmethod
    def of(cls, time: float | None, kind: str, text: str, who: str = "") -> Event:
        """An event with its text made fit for the screen and cut to MAX_TEXT_CHARS."""
        return cls(time, one_line(kind, 20), clean_text(text.strip(), MAX_TEXT_CHARS), one_line(who, 60))


@dataclass(frozen=True)
class EventsData(TabData):
    """One look, oldest first."""

    tab = EVENTS
    events: tuple[Event, ...] = ()


class EventsReader:
    """Keeps up with all of it."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._output, self._run = OutputDir(output_dir), RunDir(output_dir / run_id)
        self._tails = [
            _EventTail(self._output.audit, lambda line: parse_audit(line, run_id)),
            _EventTail(self._output.log("trainer"), lambda line: parse_log(line, run_id, "trainer"), LOG_TAIL_BYTES),
            _EventTail(
                self._output.log("supervisor"), lambda line: parse_log(line, run_id, "supervisor"), LOG_TAIL_BYTES
            ),
        ]
        self._states: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._stamps: object = None
        self._has_news = False

    def read(self) -> tuple[EventsData | None, bool]:
        """Read one block of each source: (the newest MAX_EVENTS events, or None; whether more is left).

        The events come only from a read that leaves nothing to read, when something changed since they came last.
        """
        looks = [tail.update() for tail in self._tails]
        own = (self._run.config_error, self._run.evicted, self._run.status)
        stamps = (*map(file_stamp, own[:2]), self._note_state())
        self._has_news |= any(each for each, _ in looks) or stamps != self._stamps
        self._stamps = stamps
        more = any(each for _, each in looks)
        if more or not self._has_news:
            return None, more
        self._has_news = False
        return self._data(), False

    def _data(self) -> EventsData:
        events = [*(event for tail in self._tails for event in tail.events), *self._states, *self._own()]
        events.sort(key=lambda event: event.time or 0.0)
        return EventsData(self._run.run_id, tuple(events[-MAX_EVENTS:]))

    def _own(self) -> Iterable[Event]:
        error, evicted = read_clean(self._run.config_error), read_clean(self._run.evicted)
        if error:
            yield Event.of(changed_at(self._run.config_error), "invalid", error, "trainer")
        if evicted is not None:
            yield Event.of(changed_at(self._run.evicted), "evicted", evicted.strip() or "no reason was given")

    def _note_state(self) -> int:
        """Note the orchestrator's state when it changed; returns how many were noted."""
        status = read_status(self._run.status, RunStatus)
        if status is not None:
            text = status.reason or f"step {status.step} of {status.max_steps}"
            event = Event.of(status.updated_at or None, status.state, text, "orchestrator")
            if not self._states or self._states[-1].kind != event.kind:
                self._states.append(event)
        return len(self._states)


class _EventTail:
    """The lines of one file that are events, newest MAX_EVENTS."""

    def __init__(self, path: Path, parse: Callable[[bytes], Event | None], start_bytes: int | None = None) -> None:
        self._tail = FileTail(path, start_bytes=start_bytes)
        self._parse = parse
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def update(self) -> tuple[bool, bool]:
        read = self._tail.read()
        if read.reset:
            self.events.clear()
        found = [event for line in read.lines if (event := self._parse(line)) is not None]
        self.events.extend(found)
        return read.reset or bool(found), read.more


def parse_audit(line: bytes, run_id: str) -> Event | None:
    """One audit line as an event of `run_id`; None for another run's, and for an invalid line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("run_id") != run_id:
        return None
    when = record.get("time")
    words = [str(record[key]).strip() for key in ("reason", "detail") if record.get(key)]
    return Event.of(
        time=float(when) if isinstance(when, int | float) and 0 <= when < 1e11 else None,
        kind=str(record.get("action", "?")),
        text="; ".join(dict.fromkeys(words)),
        who=str(record.get("who", "")),
    )


def parse_log(line: bytes, run_id: str, who: str) -> Event | None:
    """A line of a daemon's log that begins with the run's id, as an event of the run; else None."""
    match = _STAMPED.match(line)
    if match is None:
        return None
    name, _, rest = match[4].removeprefix(b"evicting ").partition(b" ")
    if name.rstrip(b":") != run_id.encode():
        return None
    text = rest.decode(errors="replace").strip()
    kind = "evicted" if match[4].startswith(b"evicting ") else kind_of(text, match[2].decode())
    if kind in _LEFT_OUT:
        return None
    try:
        when = float(calendar.timegm(time.strptime(match[1].decode(), "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None
    if text.partition(" ")[0] == kind or kind == "restart":  # the kind is in the text already
        text = text.partition(" ")[2].removeprefix("(").removesuffix(")")
    return Event.of(when, kind, text, who)


def kind_of(text: str, level: str) -> str:
    """The kind of event in a daemon's line: the supervisor writes states, the trainer sentences."""
    first = text.partition(" ")[0]
    if first in _STATES:
        return _STATES[first]
    quiet = {"WARNING": "warning", "ERROR": "error"}.get(level, "note")
    return next((kind for part, kind in _SENTENCES.items() if part in text), quiet)
