"""Feeds one monitor of one run from the run's metrics files, in a thread: `orchestrator.jsonl` and `trainer.jsonl`.

Every whole line is passed on once. How far each monitor has come is kept in the run's `monitors/state.json`, so a new
start of the daemon repeats nothing and leaves nothing out; only a kill between passing on and keeping may repeat the
last lines.

Names, as all text of a run, are cleaned here. Monitors keep every name that they have seen: they are given only so
many, none of which is long.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from daemons.monitors.base import Monitor
from prime_rl.contract.files import make_folder, read_text, write_atomic
from prime_rl.contract.layout import RunDir
from prime_rl.contract.metrics import parse_metrics
from prime_rl.utils.tail import MAX_LINE_BYTES, FileTail
from prime_rl.utils.text import clean_strings, one_line

logger = logging.getLogger("monitors")

# Figures come once a step; people do not see the difference.
POLL_S = 1.0
# Of each writer, so that none takes the other's room: far above what trainer and orchestrator write.
MAX_FIGURES = 1_000
MAX_NAME_CHARS = 128
# Of 1 MiB each: what one run may have read before it rests.
READS_PER_TURN = 16
# For a monitor that wants only the newest figures: a whole line at least, whatever its length.
NEWEST_BYTES = 2 * MAX_LINE_BYTES


def folder_id(run: RunDir) -> tuple[int, int] | None:
    """The identity of the folder; another one for a run that was deleted and added again. None when it is gone."""
    with contextlib.suppress(OSError):
        info = os.lstat(run.path)
        return info.st_dev, info.st_ino
    return None


def metrics_files(run: RunDir) -> dict[str, Path]:
    """By writer."""
    return {"orchestrator": run.orchestrator_metrics, "trainer": run.trainer_metrics}


class Positions:
    """`monitors/state.json` of a run: {monitor: {writer: bytes passed on}}. Shared by the feeds of the run.

    A run that was deleted and added again is another one, at the same path: see `is_there`.
    """

    def __init__(self, run: RunDir) -> None:
        self._run, self._folder = run, folder_id(run)
        self._path = run.monitors / "state.json"
        self._kept = _read_positions(self._path)
        self._lock = threading.Lock()
        self._failed = False

    @property
    def is_there(self) -> bool:
        """True when the folder at the path is still the one that these are of."""
        return folder_id(self._run) == self._folder

    def of(self, monitor: str) -> Mapping[str, int]:
        """{} for a monitor that was never fed."""
        return self._kept.get(monitor, {})

    def behind(self, sizes: Mapping[str, int]) -> set[str]:
        """The monitors that were fed, but not with all of files of these sizes."""
        return {name for name, kept in self._kept.items() if any(kept.get(w, 0) < size for w, size in sizes.items())}

    def keep(self, monitor: str, positions: Mapping[str, int]) -> None:
        """Write how far a monitor has come, if that has changed; that the file cannot be written is logged once."""
        with self._lock:
            if self.of(monitor) == positions:
                return
            self._kept[monitor] = dict(positions)
            try:
                write_atomic(self._path, json.dumps(self._kept))
            except OSError as error:  # a full disk passes, and so may what it costs
                if not self._failed:
                    logger.warning("a restart may repeat lines to the monitors: %s", error)
                self._failed = True


class Feed:
    """Passes lines on in a thread of its own, so neither a monitor nor a disk that hangs holds another feed up.

    Args:
        config: the run's whole config.
        poll_s: between two looks at the files.

    What the monitor raises is logged once and ends the feed: `is_over` and `failed`.
    """

    def __init__(
        self, run: RunDir, monitor: Monitor, config: Mapping[str, Any], positions: Positions, *, poll_s: float = POLL_S
    ) -> None:
        self.name, self.failed = monitor.name, True
        self.run_id = one_line(run.run_id)
        # When the call that the monitor has not returned from began, in seconds of the monotonic clock.
        self.called_at: float | None = None
        self._run, self._monitor, self._config, self._positions = run, monitor, config, positions
        self._poll_s = poll_s
        self._names: dict[str, set[str]] = {writer: set() for writer in metrics_files(run)}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"{self.name} of {self.run_id}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True when its thread has ended: it was stopped, the monitor failed, or the run's folder is gone."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Pass on what is there, close the monitor, end. Waits for nothing."""
        self._stopping.set()

    def _work(self) -> None:
        self.failed = not self._guarded(self._feed)
        self._guarded(self._close)

    def _feed(self) -> None:
        if self._monitor.wants_all:
            make_folder(self._run.monitors)
        with self._call():
            self._monitor.start(self.run_id, clean_strings(dict(self._config)))
        tails = self._tails()
        while True:
            is_last = self._stopping.is_set()
            while self._turn(tails) and is_last:
                pass
            if is_last or not self._positions.is_there:
                return
            self._stopping.wait(self._poll_s)

    def _tails(self) -> dict[str, FileTail]:
        if not self._monitor.wants_all:
            return {w: FileTail(path, start_bytes=NEWEST_BYTES) for w, path in metrics_files(self._run).items()}
        kept = self._positions.of(self.name)
        return {w: FileTail(path, position=kept.get(w, 0)) for w, path in metrics_files(self._run).items()}

    def _turn(self, tails: Mapping[str, FileTail]) -> bool:
        """True when there is more to read."""
        is_more = False
        for writer, tail in tails.items():
            for _ in range(READS_PER_TURN):
                read = tail.read()
                if not self._positions.is_there:  # what was read may be another run's
                    return False
                for line in read.lines:
                    self._pass_on(writer, line)
                has_news = bool(read.lines) or not read.more
                if has_news and self._monitor.wants_all and self._positions.is_there:
                    self._positions.keep(self.name, {w: each.position for w, each in tails.items()})
                if not read.more:
                    break
            else:
                is_more = True
        return is_more

    def _pass_on(self, writer: str, line: bytes) -> None:
        parsed = parse_metrics(line)
        if parsed is None:
            return
        step, values = parsed
        values.pop("time", None)
        figures = {f"{writer}/{one_line(name, MAX_NAME_CHARS)}": value for name, value in values.items()}
        known = self._names[writer]
        new = [name for name in figures if name not in known]
        for name in new[MAX_FIGURES - len(known) :]:
            del figures[name]
        known.update(figures)
        with self._call():
            self._monitor.log(step, figures)

    def _close(self) -> None:
        with self._call():
            self._monitor.close()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        self.called_at = time.monotonic()
        try:
            yield
        finally:
            self.called_at = None

    def _guarded(self, call: Callable[[], None]) -> bool:
        """True when `call` went well. Whatever a library raises costs this run this monitor, and nothing else."""
        try:
            call()
        except Exception as error:
            text = one_line(f"{type(error).__name__}: {error}")
            logger.warning("%s: %s is disabled: %s", self.run_id, self.name, text)
            return False
        return True


def _read_positions(path: Path) -> dict[str, dict[str, int]]:
    try:
        found = json.loads(read_text(path) or "{}")
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    # One position for all monitors, as the version before kept it.
    shared = _whole_numbers({writer: found.pop(writer, None) for writer in ("orchestrator", "trainer")})
    before = dict.fromkeys(("wandb", "tensorboard"), shared) if shared else {}
    return before | {name: _whole_numbers(each) for name, each in found.items() if isinstance(each, dict)}


def _whole_numbers(found: Mapping[str, Any]) -> dict[str, int]:
    return {key: value for key, value in found.items() if type(value) is int and value >= 0}
