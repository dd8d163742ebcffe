"""The config, the checkpoints and the events of a run, as their tabs show them.

Of the config: what is in effect, how `orch.toml` differs from that, what is wrong with it, all values, differences. Of
the checkpoints: each step's folder, its size, whether it is complete, since when; a complete one does not change, so it
is measured once.

Events come from all their sources. People's actions come from `logs/audit.jsonl`; admission, restarts and their reasons
from the lines of the trainer's and the supervisor's log that name the run; evictions, config errors and the final state
from the run's own files. Changes of state that are seen while the tab is open are noted too.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from daemons.details import Difference, change_texts, checkpoint_parts, diff_configs, steps_of
from daemons.workspace import SUPERVISOR, shown
from daemons.workspace_reader import edit_text, stamp_of
from prime_rl.configs import admitted
from prime_rl.configs.admitted import plain_text, read_effect
from prime_rl.configs.base import ConfigError, build, parse_toml
from prime_rl.configs.explain import key_lines
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import OutputDir, RunDir, stable_marker
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.utils.tail import FileTail
from prime_rl.utils.text import CleanText, clean_text, one_line
from tui.readers.tabs import CHECKPOINTS, CONFIG, EVENTS, TabData, changed_at, read_clean

MAX_VALUE_CHARS, MAX_PATH_CHARS = 200, 1_000
NO_TEXT = one_line("")
_LINE = re.compile(r"\bline (\d+)\b")


@dataclass(frozen=True)
class Value:
    """One key with its value as text. `is_default`: the file does not set it."""

    key: CleanText
    text: CleanText
    is_default: bool


@dataclass(frozen=True)
class ConfigRequest:
    """The file; or all values with their defaults; or the differences to the run `other`."""

    wants_all: bool = False
    other: str | None = None


@dataclass(frozen=True)
class ConfigData(TabData):
    """One look. `values` are all keys when they were asked for, `differences` to `other_id` when there is one.

    `text` is the config in effect, None when there is no readable file at `path`. `problem` is why values or
    differences are not available, `edited` how the file differs from what is in effect, `changes` what that was before.
    """

    tab = CONFIG
    path: CleanText = NO_TEXT
    text: CleanText | None = None
    error: CleanText | None = None
    error_lines: tuple[int, ...] = ()
    values: tuple[Value, ...] | None = None
    other_id: str | None = None
    differences: tuple[Difference, ...] = ()
    problem: CleanText | None = None
    edited: CleanText | None = None
    changes: tuple[CleanText, ...] = ()


class ConfigReader:
    """Reads again when a file or the request changed."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._output_dir = output_dir
        self._run = RunDir(output_dir / run_id)
        self._shown: object = None

    def read(self, request: ConfigRequest) -> tuple[ConfigData | None, bool]:
        """(what the request asks for, or None when neither it nor a file changed; False: one look reads all)."""
        other = request.other
        runs = [self._run] if other is None else [self._run, RunDir(self._output_dir / other)]
        shown = (request, stamp_of(self._run.config_error), *map(config_stamp, runs))
        if shown == self._shown:
            return None, False
        self._shown = shown
        return self._look(other, request.wants_all), False

    def _look(self, other: str | None, wants_all: bool) -> ConfigData:
        path, found = self._run.orch_toml, read_config(self._run)
        text, error = found or NO_TEXT, read_clean(self._run.config_error)
        lines = find_error_lines(text, error or "")
        data = ConfigData(self._run.run_id, one_line(str(path), MAX_PATH_CHARS), found, error, lines)
        with contextlib.suppress(ConfigError):
            edited = shown(edit_text(self._run, read_effect(self._run).edit))
            data = replace(data, edited=edited, changes=change_texts(self._run))
        try:
            if other is not None:
                differences = diff_configs(self._run, RunDir(self._output_dir / other))
                return replace(data, other_id=other, differences=differences)
            return replace(data, values=all_values(text)) if wants_all else data
        except ConfigError as problem:
            return replace(data, other_id=other, problem=clean_text(str(problem)))


def config_stamp(run: RunDir) -> tuple[object, ...]:
    """Changes whenever the run's config in effect, or the files that it names, may be others."""
    named = (run.data_file(name) for name in admitted.added_data(run))
    return tuple(map(stamp_of, (run.orch_toml, run.admitted, run.applied, run.data_digests, *named)))


def read_config(run: RunDir) -> CleanText | None:
    """The text of a run's config in effect, fit for the screen; None when it is not there or cannot be read."""
    if os.path.lexists(run.admitted):
        with contextlib.suppress(ConfigError):
            return clean_text(read_effect(run).text.expandtabs(4))
    return read_clean(run.orch_toml)


def all_values(text: str) -> tuple[Value, ...]:
    """Every key of a run's config in the order of the schema, with its default where the text does not set it.

    Raises ConfigError when the text is not a valid config.
    """
    said = dict(flatten(parse_toml(text, "orch.toml")))
    config = build(OrchestratorConfig, parse_toml(text, "orch.toml"), "orch.toml").model_dump(mode="json")
    return tuple(Value(key, toml_text(value), key not in said) for key, value in flatten(config))


def flatten(data: Mapping[str, Any]) -> Iterator[tuple[CleanText, Any]]:
    """Dotted keys, fit for the screen, with their values."""
    return ((one_line(key, MAX_VALUE_CHARS), value) for key, value in admitted.flatten(data))


def toml_text(value: Any) -> CleanText:
    """As TOML, on one line, `1e+15` and `1e-05` for floats of many digits; null for what TOML cannot express."""
    if value is None or isinstance(value, bool):
        return one_line(str(value).lower())
    return one_line(f'"{value}"' if isinstance(value, str) else plain_text(value), MAX_VALUE_CHARS)


def find_error_lines(config: str, error: str) -> tuple[int, ...]:
    """Line numbers (from 1) of `config` that `error` names: as "line N", or by the key that is set there."""
    lines = config.splitlines()
    named = {int(number) for number in _LINE.findall(error) if 1 <= int(number) <= len(lines)}
    return tuple(sorted(named | {number for key, number in key_lines(lines).items() if f": {key}: " in f": {error}"}))


@dataclass(frozen=True)
class Checkpoint:
    """One `checkpoints/step_N`. `saved_at` (Unix seconds) is of STABLE, of the folder while that is missing.

    `parts` are the folders in it ("orchestrator", "trainer").
    """

    step: int
    is_stable: bool
    num_bytes: int
    saved_at: float | None
    parts: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointsData(TabData):
    """One look, ascending by step. `starts_at` is where a restart goes on."""

    tab = CHECKPOINTS
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def starts_at(self) -> int | None:
        """The newest step with a complete checkpoint; None without one."""
        return max((each.step for each in self.checkpoints if each.is_stable), default=None)


class CheckpointsReader:
    """Looks at the folders each time; measures only what is new or not complete."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._run = RunDir(output_dir / run_id)
        self._known: dict[int, Checkpoint] = {}
        self._shown: CheckpointsData | None = None

    def read(self) -> tuple[CheckpointsData | None, bool]:
        """(all checkpoints, or None when nothing changed; False: one look reads all)."""
        steps = steps_of(self._run.checkpoints)
        self._known = {step: self._look(step) for step in steps}
        data = CheckpointsData(self._run.run_id, tuple(self._known[step] for step in steps))
        if data == self._shown:
            return None, False
        self._shown = data
        return data, False

    def _look(self, step: int) -> Checkpoint:
        folder = self._run.checkpoint_dir(step)
        marker = changed_at(stable_marker(folder))
        known = self._known.get(step)
        if known is not None and known.is_stable and known.saved_at == marker:
            return known
        parts = checkpoint_parts(self._run, step)
        return Checkpoint(step, marker is not None, sum(parts.values()), marker or changed_at(folder), tuple(parts))


MAX_EVENTS, MAX_SERVICE_EVENTS = 500, 50
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
# Of what all runs share only these: they explain why a run was set back.
_OF_SERVICES = ("restart", "failed", "stalled")


@dataclass(frozen=True)
class Event:
    """Something that happened to the run: when (Unix seconds, None when unknown), what, its text, and who did it."""

    time: float | None
    kind: CleanText
    text: CleanText
    who: CleanText
    is_of_service: bool = False

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
            _EventTail(self._output.log(SUPERVISOR), lambda line: parse_log(line, run_id, SUPERVISOR), LOG_TAIL_BYTES),
            _EventTail(self._output.log(SUPERVISOR), parse_service, LOG_TAIL_BYTES, MAX_SERVICE_EVENTS),
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
        stamps = (*map(stamp_of, own[:2]), self._note_state())
        self._has_news |= any(each for each, _ in looks) or stamps != self._stamps
        self._stamps = stamps
        more = any(each for _, each in looks)
        if more or not self._has_news:
            return None, more
        self._has_news = False
        return self._data(), False

    def _data(self) -> EventsData:
        events = [*(event for tail in self._tails for event in tail.events), *self._states, *self._own()]
        # Of what all runs share only what happened while this one was there.
        times = [each.time for each in events if each.time and not each.is_of_service]
        began, ended = min(times, default=0.0), max(times, default=0.0)
        if self._states and self._states[-1].kind in ("starting", "running"):
            ended = math.inf
        events = [each for each in events if not each.is_of_service or began <= (each.time or 0.0) <= ended]
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


Parse = Callable[[bytes], Event | None]


class _EventTail:
    """The lines of one file that are events, the newest `most`."""

    def __init__(self, path: Path, parse: Parse, start_bytes: int | None = None, most: int = MAX_EVENTS) -> None:
        self._tail = FileTail(path, start_bytes=start_bytes)
        self._parse = parse
        self.events: deque[Event] = deque(maxlen=most)

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


def parse_service(line: bytes) -> Event | None:
    """A line of the supervisor's log about the end of the trainer or of inference, as an event of each run."""
    match = _STAMPED.match(line)
    name = match[4].partition(b":")[0].decode(errors="replace") if match else ""
    if not name.startswith(("trainer", "inference")):
        return None
    event = parse_log(line, name, SUPERVISOR)
    if event is None or event.kind not in _OF_SERVICES:
        return None
    return replace(event, text=clean_text(f"{name}: {event.text}", MAX_TEXT_CHARS), is_of_service=True)


def kind_of(text: str, level: str) -> str:
    """The kind of event in a daemon's line: the supervisor writes states, the trainer sentences."""
    first = text.partition(" ")[0]
    if first in _STATES:
        return _STATES[first]
    quiet = {"WARNING": "warning", "ERROR": "error"}.get(level, "note")
    return next((kind for part, kind in _SENTENCES.items() if part in text), quiet)
