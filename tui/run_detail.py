"""What the run screen shows of one run's own files, and the reader that gathers it. No user interface here.

`RunDetailReader` is called by one thread; the `RunDetail` that it makes is frozen, so the screen may keep it.
"""

from __future__ import annotations

import json
import re
import stat
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.utils.text import clean_text, one_line
from tui.readers import FileTail, LogReader, MetricsReader
from tui.series import Series, change, downsample

CAPACITY = 4096
MAX_CONFIG_BYTES = 256 * 1024
MAX_EVENTS = 500
# A look at all files of a run takes at most this long before it is shown; the rest follows at once.
READ_SLICE_S = 0.25
_LINE = re.compile(r"\bline (\d+)\b")


@dataclass(frozen=True)
class ChartSpec:
    """One chart: metric names in order of preference, and its title."""

    keys: tuple[str, ...]
    title: str


CHARTS = (
    ChartSpec(("reward/mean",), "reward"),
    ChartSpec(("loss",), "loss"),
    ChartSpec(("entropy",), "entropy"),
    ChartSpec(("mismatch_kl",), "mismatch KL"),
    ChartSpec(("grad_norm",), "grad norm"),
    ChartSpec(("lr",), "learning rate"),
)


@dataclass(frozen=True)
class ChartData:
    """One curve, thinned out to what the chart can show."""

    steps: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    last: float | None = None
    change: float | None = None


@dataclass(frozen=True)
class Event:
    """Something that happened to the run: when (Unix seconds, None when unknown), what, and the words with it."""

    time: float | None
    kind: str
    text: str
    who: str = ""


@dataclass(frozen=True)
class RunDetail:
    """One look at a run's files. `log_num_read` counts log lines since `log_generation` began."""

    run_id: str
    charts: tuple[ChartData, ...]
    config: str
    config_error: str | None
    error_lines: tuple[int, ...]
    log_lines: tuple[str, ...]
    log_num_read: int
    log_generation: int
    events: tuple[Event, ...]


class RunDetailReader:
    """Keeps up with the files of one run. `limit` is how many points a chart can show; set it from any thread."""

    def __init__(self, output_dir: Path, run_id: str, *, limit: int = 120) -> None:
        output = OutputDir(output_dir)
        self.run = RunDir(output_dir / run_id)
        self.limit = limit
        keys = [key for spec in CHARTS for key in spec.keys]
        self._metrics = MetricsReader(
            [self.run.orchestrator_metrics, self.run.trainer_metrics], keys, capacity=CAPACITY
        )
        self._log = LogReader(self.run.log)
        self._audit = AuditReader(output.audit, run_id)
        self._shown: tuple[object, ...] | None = None

    def read(self) -> tuple[RunDetail | None, bool]:
        """(what there is to show, or None when nothing changed; whether there is more to read at once)."""
        changed, more = self._update()
        files = (self.limit, *(_stamp(p) for p in (self.run.orch_toml, self.run.config_error, self.run.evicted)))
        if not changed and files == self._shown:
            return None, more
        self._shown = files
        return self._detail(), more

    def _update(self) -> tuple[bool, bool]:
        deadline = time.monotonic() + READ_SLICE_S
        changed = False
        while True:
            looks = [reader.update() for reader in (self._metrics, self._log, self._audit)]
            changed |= any(each for each, _ in looks)
            more = any(each for _, each in looks)
            if not more or time.monotonic() > deadline:
                return changed, more

    def _detail(self) -> RunDetail:
        config = read_clean(self.run.orch_toml) or ""
        error = read_clean(self.run.config_error)
        evicted = read_clean(self.run.evicted)
        events = [*self._audit.events]
        if error:
            events.append(Event(_mtime(self.run.config_error), "invalid", error))
        if evicted is not None:
            events.append(Event(_mtime(self.run.evicted), "evicted", evicted or "no reason was given"))
        return RunDetail(
            run_id=self.run.run_id,
            charts=tuple(self._chart(spec) for spec in CHARTS),
            config=config,
            config_error=error,
            error_lines=find_error_lines(config, error or ""),
            log_lines=tuple(self._log.lines()),
            log_num_read=self._log.num_read,
            log_generation=self._log.generation,
            events=tuple(sorted(events, key=lambda event: event.time or 0.0)),
        )

    def _chart(self, spec: ChartSpec) -> ChartData:
        found = next((series for key in spec.keys if (series := self._metrics.series(key)) is not None), None)
        return chart_data(found, self.limit)


def chart_data(series: Series | None, limit: int) -> ChartData:
    if series is None or not len(series):
        return ChartData()
    steps, values = downsample(*series.points(), limit)
    return ChartData(tuple(steps), tuple(values), series.last, change(series.recent(10)))


class AuditReader:
    """The lines of `logs/audit.jsonl` that are about one run."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._tail = FileTail(path)
        self._run_id = run_id
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def update(self) -> tuple[bool, bool]:
        read = self._tail.read()
        if read.reset:
            self.events.clear()
        found = [event for line in read.lines if (event := parse_audit(line, self._run_id)) is not None]
        self.events.extend(found)
        return read.reset or bool(found), read.more


def parse_audit(line: bytes, run_id: str) -> Event | None:
    """One audit line as an event of `run_id`; None for another run's, and for what is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("run_id") != run_id:
        return None
    when = record.get("time")
    return Event(
        time=float(when) if isinstance(when, int | float) and 0 <= when < 1e11 else None,
        kind=one_line(str(record.get("action", "?")), 20),
        text=clean_text(str(record.get("reason") or "")),
        who=one_line(str(record.get("who", "")), 60),
    )


def read_clean(path: Path, limit: int = MAX_CONFIG_BYTES) -> str | None:
    """At most `limit` bytes of a regular file, fit for the screen; None when it is not there or cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError:
        return None
    text = clean_text(data[:limit].decode(errors="replace")).expandtabs(4)
    return text + "\n# ... (the rest is not shown)" if len(data) > limit else text


def find_error_lines(config: str, error: str) -> tuple[int, ...]:
    """Line numbers (from 1) of `config` that `error` speaks of: said as "line N", or the line that sets a named key."""
    lines = config.splitlines()
    named = {int(number) for number in _LINE.findall(error) if 1 <= int(number) <= len(lines)}
    return tuple(sorted(named | {number for key, number in key_lines(lines).items() if f": {key}: " in f": {error}"}))


def key_lines(lines: Sequence[str]) -> dict[str, int]:
    """Dotted key ("model.lora.rank", "env.0.id") -> line (from 1) that sets it; tables too. Simple TOML only."""
    found: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    for number, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0].strip()
        if text.startswith("[[") and text.endswith("]]"):
            name = text[2:-2].strip()
            table = f"{name}.{counts.get(name, 0)}"
            counts[name] = counts.get(name, 0) + 1
            found.setdefault(table, number)
        elif text.startswith("[") and text.endswith("]"):
            table = text[1:-1].strip()
            found.setdefault(table, number)
        elif "=" in text:
            key = text.split("=", 1)[0].strip().strip("\"'")
            found.setdefault(f"{table}.{key}" if table else key, number)
    return found


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        info = path.stat()
    except OSError:
        return (0, 0, 0)
    return (info.st_mtime_ns, info.st_size, info.st_ino)


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
