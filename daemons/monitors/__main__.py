"""The daemon `monitors`: passes the metrics of all runs of a workspace on, to the monitors that it or the runs ask for.

    python -m daemons.monitors OUTPUT_DIR

It looks which runs there are (`FollowedRun`); for each run and monitor a thread reads the run's `orchestrator.jsonl`
and `trainer.jsonl` (`Feed`) and calls the monitor's library. So a library that hangs holds up one monitor of one run.

Every whole line is passed on once. How far each monitor has come is kept in the run's `monitors/state.json`, so a new
start of the daemon repeats nothing and leaves nothing out; only a kill between passing on and keeping may repeat the
last lines. Names, as all text of a run, are cleaned here. Monitors keep every name that they have seen: they are given
only so many, none of which is long.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from daemons.monitors.services import KeptIds, Monitor, PrometheusMonitor, PrometheusPage
from daemons.specs import MONITORS
from prime_rl.configs.admitted import config_in_effect
from prime_rl.configs.base import BaseConfig, ConfigError, load_config
from prime_rl.configs.reports import MonitorsConfig, PrometheusConfig, TensorBoardConfig, TrackioConfig, WandbConfig
from prime_rl.contract.files import make_folder, read_text, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, scan_runs
from prime_rl.contract.metrics import parse_metrics
from prime_rl.contract.status import RunStatus, Status, StatusWriter, TrainerStatus, is_there, read_status
from prime_rl.utils.process import StopFlag
from prime_rl.utils.runtime import complain, setup_logger
from prime_rl.utils.tail import MAX_LINE_BYTES, FileTail
from prime_rl.utils.text import clean_strings, one_line

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
    return {
        name: {writer: position for writer, position in each.items() if type(position) is int and position >= 0}
        for name, each in found.items()
        if isinstance(each, dict)
    }


# A run without a slot is followed until its files have not changed for so long: a scrape or two of Prometheus.
QUIET_S = 60.0
# A call of a monitor that takes longer is reported.
SLOW_S = 30.0
# A service that does not answer must keep neither this process nor what follows in the run's folder: W&B keeps on disk
# what it could not send.
CLOSE_LIMIT_S = 12.0
_Stamp = tuple[int, int]


@dataclass
class _Fed:
    """A feed and the table of the config that it was started for."""

    table: BaseConfig
    feed: Feed
    stopped_at: float | None = None
    is_reported: bool = False


class FollowedRun:
    """Starts and ends the feeds of one run folder. `now` is in seconds of the monotonic clock.

    Args:
        page: the workspace's page, if there is one.
        ids: of all runs of the workspace.
        quiet_s: how long a run without a slot is followed after its last line.
    """

    def __init__(
        self,
        run: RunDir,
        workspace: MonitorsConfig,
        page: PrometheusPage | None,
        ids: KeptIds,
        *,
        now: float,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.run = run
        self._workspace, self._page, self._ids, self._quiet_s = workspace, page, ids, quiet_s
        self._feeds: dict[str, _Fed] = {}
        self._failed: dict[str, BaseConfig] = {}
        self._positions = Positions(run)
        self._tables: dict[str, BaseConfig] = {}
        self._config: dict[str, Any] = {}
        self._config_stamp: tuple[_Stamp | None, _Stamp | None] | None = None
        self._files = {writer: str(path) for writer, path in metrics_files(run).items()}
        self._stamps = self._look_at_files()
        # An earlier start of a daemon may have left lines of this run; else since the last change, by the files' clock.
        behind = self._positions.behind({writer: size for writer, (_, size) in self._stamps.items()})
        times = [time_ns for time_ns, _ in self._stamps.values()]
        age_s = max(0.0, time.time() - max(times) / 1e9) if times else self._quiet_s
        self._changed_at = now if behind and behind & self._wanted().keys() else now - age_s

    @property
    def is_there(self) -> bool:
        """False once the run was deleted, and for its successor."""
        return self._positions.is_there

    def look(self, now: float, *, in_slot: bool) -> None:
        """Start what should run, stop what should not; waits for nothing."""
        stamps = self._look_at_files()
        if stamps != self._stamps:
            self._stamps, self._changed_at = stamps, now
        wanted = self._wanted() if self._is_due(now, in_slot) else {}
        self._settle(wanted, now)
        for name, table in wanted.items():
            if name not in self._feeds and self._failed.get(name) != table:
                feed = Feed(self.run, self._monitor(table), self._config, self._positions)
                self._feeds[name] = _Fed(table, feed)

    def stop(self, now: float) -> bool:
        """Let all feeds end; whether they have, or had their time."""
        self._settle({}, now)
        return not self._feeds

    def slow(self, now: float) -> Iterator[str]:
        """The monitors that do not answer, in words. Each is logged once."""
        for name, fed in self._feeds.items():
            called_at = fed.feed.called_at
            if called_at is not None and now - called_at >= SLOW_S:
                if not fed.is_reported:
                    fed.is_reported = True
                    logger.warning("%s: %s has not answered for %g s", fed.feed.run_id, name, SLOW_S)
                yield f"{name} of {fed.feed.run_id}"

    def _settle(self, wanted: dict[str, BaseConfig], now: float) -> None:
        """Forget feeds that are over, stop those that are not wanted as they are, give up those that do not stop."""
        for name, fed in list(self._feeds.items()):
            if fed.feed.is_over:
                if fed.feed.failed:
                    self._failed[name] = fed.table
                del self._feeds[name]
            elif fed.stopped_at is None and wanted.get(name) != fed.table:
                fed.stopped_at = now
                fed.feed.stop()
            elif fed.stopped_at is not None and now - fed.stopped_at >= CLOSE_LIMIT_S:
                logger.warning("%s: %s did not end within %g s: given up", fed.feed.run_id, name, CLOSE_LIMIT_S)
                del self._feeds[name]

    def _is_due(self, now: float, in_slot: bool) -> bool:
        if in_slot or now - self._changed_at < self._quiet_s:
            return True
        if not self._feeds:
            return False
        status = read_status(self.run.status, RunStatus)  # it may still evaluate the last version
        return status is not None and status.state in ("starting", "running") and is_there(status)

    def _wanted(self) -> dict[str, BaseConfig]:
        """The monitors of the run, by their tables; as they were while its config is invalid."""
        stamp = _stamp(str(self.run.orch_toml)), _stamp(str(self.run.admitted))
        if stamp != self._config_stamp:
            self._config_stamp = stamp
            try:
                config = config_in_effect(self.run)
            except ConfigError:  # reported to the run's owner elsewhere
                return self._tables
            self._config = config.model_dump(mode="json")
            tables = self._workspace.of_run(config.monitor)
            self._tables = {name: table for name, table in tables if table is not None}
            if config.monitor.prometheus is not None:
                self._warn_of_own_page()
            if self._page is not None:
                self._tables["prometheus"] = self._page.config
        return self._tables

    def _warn_of_own_page(self) -> None:
        if self._page is not None:
            what = f"is ignored: its metrics are at {self._page.url}; remove it"
        else:
            what = "ends with the next version: set [monitors.prometheus] in the system file, one page for all runs"
        logger.warning("%s: [monitor.prometheus] %s", one_line(self.run.run_id), what)

    def _monitor(self, table: BaseConfig) -> Monitor:
        if isinstance(table, WandbConfig):
            from daemons.monitors.services import WandbMonitor

            return WandbMonitor(table, self.run, self._ids)
        if isinstance(table, TensorBoardConfig):
            from daemons.monitors.services import TensorBoardMonitor

            return TensorBoardMonitor(table, self.run.monitors)
        if isinstance(table, TrackioConfig):
            from daemons.monitors.services import TrackioMonitor

            return TrackioMonitor(table, self.run, self._ids, OutputDir(self.run.path.parent).trackio)
        assert isinstance(table, PrometheusConfig)
        return PrometheusMonitor(self._page or PrometheusPage(table), is_own=self._page is None)

    def _look_at_files(self) -> dict[str, _Stamp]:
        """Time and size of those that are there, by writer."""
        return {writer: stamp for writer, path in self._files.items() if (stamp := _stamp(path)) is not None}


def _stamp(path: str) -> _Stamp | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size


logger = logging.getLogger(MONITORS)

LOOK_EVERY_S = 2.0
CLOSE_POLL_S = 0.05
# For what a library does when Python ends, beyond the time that monitors have to close.
EXIT_LIMIT_S = 3.0


class Monitors:
    """The runs of one workspace and their monitors. `clock`: seconds, monotonic."""

    def __init__(
        self,
        output: OutputDir,
        config: MonitorsConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.page = PrometheusPage(config.prometheus) if config.prometheus is not None else None
        self._output, self._config, self._clock, self._quiet_s = output, config, clock, quiet_s
        self._ids = KeptIds(output)
        self._runs: dict[str, FollowedRun] = {}
        self._troubles: dict[str, str] = {}

    def look(self) -> None:
        """Follow runs that are there, end what belongs to those that are not. Never raises for what a run does."""
        now, trainer = self._clock(), read_status(self._output.trainer_status, TrainerStatus)
        if self.page is not None and not self.page.is_open:
            self._guarded("prometheus", self.page.open)
        runs = {run.run_id: run for run in scan_runs(self._output.path)[0]}
        for run_id, followed in list(self._runs.items()):
            is_gone = run_id not in runs or not followed.is_there
            if is_gone and followed.stop(now):
                del self._runs[run_id]
                self._troubles.pop(run_id, None)
        for run_id, run in runs.items():
            in_slot = trainer is not None and run_id in trainer.runs
            self._guarded(run_id, partial(self._follow, run, now, in_slot))

    def _follow(self, run: RunDir, now: float, in_slot: bool) -> None:
        followed = self._runs.get(run.run_id)
        if followed is None:
            followed = FollowedRun(run, self._config, self.page, self._ids, now=now, quiet_s=self._quiet_s)
            self._runs[run.run_id] = followed
        if followed.is_there:  # else the one before it is still being closed
            followed.look(now, in_slot=in_slot)

    def slow(self) -> str | None:
        """The monitors that do not answer, in one sentence."""
        names = [name for followed in self._runs.values() for name in followed.slow(self._clock())]
        return f"{', '.join(names)} to answer" if names else None

    def close(self) -> None:
        """Pass on what is there and close all monitors, in CLOSE_LIMIT_S at most."""
        while self._runs:
            self._runs = {run_id: each for run_id, each in self._runs.items() if not each.stop(self._clock())}
            time.sleep(CLOSE_POLL_S)
        if self.page is not None:
            self.page.close()

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        """The boundary of a run, and of the page: what goes wrong is logged once, and tried again at the next look."""
        try:
            call()
        except Exception as error:
            what = one_line(f"{type(error).__name__}: {error}")
            if self._troubles.get(name) != what:
                self._troubles[name] = what
                logger.warning("%s: %s; trying again", name, what)
        else:
            self._troubles.pop(name, None)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 stopped as asked, 2 wrong use."""
    stop = StopFlag().install()
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        complain(MONITORS, "expected one argument, the folder of a workspace")
        return 2
    output = OutputDir(Path(argv[0]))
    path = output.component_config(MONITORS)
    try:
        config = load_config(MonitorsConfig, path) if path.exists() else MonitorsConfig()
    except ConfigError as error:
        complain(MONITORS, error)
        return 2
    setup_logger(MONITORS, config.log.level)
    monitors = Monitors(output, config)
    own = output.own_status(MONITORS)
    own.parent.mkdir(parents=True, exist_ok=True)
    status = StatusWriter(own, Status(state="running"))
    while not stop():
        status.turn()
        try:
            monitors.look()
        except Exception:  # one bad look must not end the others
            logger.exception("a look at the workspace failed; next one in %g s", LOOK_EVERY_S)
        status.update(waiting_on=monitors.slow())
        stop.wait(LOOK_EVERY_S)
    limit = threading.Timer(CLOSE_LIMIT_S + EXIT_LIMIT_S, os._exit, (0,))
    limit.daemon = True
    limit.start()
    monitors.close()
    status.close(state="stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
