"""The monitors' process, one a run. Started by its orchestrator (`process.py`), which holds the other end of our input.

    python -m prime_rl.orchestrator.monitors.main    (the request as one line of JSON on standard input)

It lives as long as its input is open: the orchestrator closes it when it ends, and the system does when it is killed.
What the libraries start (W&B has its own process) lives no longer than this process. The orchestrator handles signals
to the whole group.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from prime_rl.configs.base import build
from prime_rl.configs.monitors import MonitorConfig
from prime_rl.contract.files import WaitTimeout, wait_for
from prime_rl.contract.layout import RunDir
from prime_rl.orchestrator.monitors.base import make_monitors
from prime_rl.orchestrator.monitors.feed import MonitorFeed
from prime_rl.utils.logger import setup_logger

logger = logging.getLogger("monitors")

# Figures come once a step; people do not see the difference.
POLL_S = 1.0
# The trainer writes the line of its last update after it has published it and saved its checkpoint.
LAST_LINE_S = 3.0
# A service that does not answer must not keep this process: W&B keeps on disk what it could not send.
CLOSE_LIMIT_S = 12.0


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    setup_logger("monitors", request["log_level"])
    run = RunDir(Path(request["run"]))
    feed = MonitorFeed(run, make_monitors(build(MonitorConfig, request["monitor"], "monitor"), run.monitors))
    try:
        feed.start(request["config"])
        while not input_closed(POLL_S):
            feed.forward()
    except OSError as error:  # most likely the run was deleted
        logger.warning("monitors end: %s", error)
    threading.Thread(target=_end_in_time, daemon=True).start()
    with contextlib.suppress(OSError):
        _await_last_line(feed)
    feed.close()
    return 0


def input_closed(timeout_s: float) -> bool:
    """Whether the other end of standard input was closed, within `timeout_s`. Nothing more is ever sent."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], timeout_s)
    return bool(readable)


def _await_last_line(feed: MonitorFeed) -> None:
    def has_it() -> bool:
        feed.forward()
        return not feed.is_behind_trainer

    with contextlib.suppress(WaitTimeout):
        wait_for(has_it, "the trainer's last line of metrics", timeout_s=LAST_LINE_S)


def _end_in_time() -> None:
    time.sleep(CLOSE_LIMIT_S)
    logger.warning("a monitor did not end within %g s: given up", CLOSE_LIMIT_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
