"""One run that the daemon may follow: whether there is something to pass on, and the feeds that do it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from daemons.monitors.base import Monitor
from daemons.monitors.feed import Feed, Positions, metrics_files
from daemons.monitors.prometheus import PrometheusMonitor, PrometheusPage
from prime_rl.configs.base import BaseConfig, ConfigError
from prime_rl.configs.monitors import MonitorsConfig, PrometheusConfig, TensorBoardConfig, TrackioConfig, WandbConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import RunStatus, is_there, read_status
from prime_rl.utils.text import one_line

logger = logging.getLogger("monitors")

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
        quiet_s: how long a run without a slot is followed after its last line.
    """

    def __init__(
        self,
        run: RunDir,
        workspace: MonitorsConfig,
        page: PrometheusPage | None,
        *,
        now: float,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.run = run
        self._workspace, self._page, self._quiet_s = workspace, page, quiet_s
        self._feeds: dict[str, _Fed] = {}
        self._failed: dict[str, BaseConfig] = {}
        self._positions = Positions(run)
        self._tables: dict[str, BaseConfig] = {}
        self._config: dict[str, Any] = {}
        self._config_stamp: _Stamp | None = None
        self._files = {writer: str(path) for writer, path in metrics_files(run).items()}
        self._stamps = self._look_at_files()
        self._changed_at = now if self._has_unread() else now - self._age_s()

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
        stamp = _stamp(str(self.run.orch_toml))
        if stamp != self._config_stamp:
            self._config_stamp = stamp
            try:
                config = load_run_config(self.run.orch_toml)
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

            return WandbMonitor(table, self.run.monitors)
        if isinstance(table, TensorBoardConfig):
            from daemons.monitors.services import TensorBoardMonitor

            return TensorBoardMonitor(table, self.run.monitors)
        if isinstance(table, TrackioConfig):
            from daemons.monitors.services import TrackioMonitor

            return TrackioMonitor(table, self.run.monitors, OutputDir(self.run.path.parent).trackio)
        assert isinstance(table, PrometheusConfig)
        return PrometheusMonitor(self._page or PrometheusPage(table), is_own=self._page is None)

    def _look_at_files(self) -> dict[str, _Stamp]:
        """Time and size of those that are there, by writer."""
        return {writer: stamp for writer, path in self._files.items() if (stamp := _stamp(path)) is not None}

    def _has_unread(self) -> bool:
        """True when an earlier start of the daemon left lines of this run."""
        behind = self._positions.behind({writer: size for writer, (_, size) in self._stamps.items()})
        return bool(behind and behind & self._wanted().keys())

    def _age_s(self) -> float:
        """Since the last change by the clock of the files."""
        times = [time_ns for time_ns, _ in self._stamps.values()]
        return max(0.0, time.time() - max(times) / 1e9) if times else self._quiet_s


def _stamp(path: str) -> _Stamp | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size
