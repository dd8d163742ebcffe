"""The daemon `monitors`: passes the metrics of all runs of a workspace on, to the monitors that it or the runs ask for.

    python -m daemons.monitors OUTPUT_DIR

It looks which runs there are (`followed`); for each run and monitor a thread reads the run's metrics files (`feed`) and
calls the monitor's library. So a library that hangs holds up one monitor of one run.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from daemons.monitors.followed import CLOSE_LIMIT_S, QUIET_S, FollowedRun
from daemons.monitors.prometheus import PrometheusPage
from daemons.specs import MONITORS
from prime_rl.configs.base import ConfigError, load_config
from prime_rl.configs.monitors import MonitorsConfig
from prime_rl.contract.layout import OutputDir, RunDir, scan_runs
from prime_rl.contract.status import Status, StatusWriter, TrainerStatus, read_status
from prime_rl.utils.logger import complain, setup_logger
from prime_rl.utils.signals import StopFlag
from prime_rl.utils.text import one_line

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
            followed = FollowedRun(run, self._config, self.page, now=now, quiet_s=self._quiet_s)
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
    if len(argv) != 1:
        complain(MONITORS, "expected one argument, the workspace")
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
    threading.Thread(target=_end_in_time, daemon=True).start()
    monitors.close()
    status.close(state="stopped")
    return 0


def _end_in_time() -> None:
    time.sleep(CLOSE_LIMIT_S + EXIT_LIMIT_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
