"""One log format for every process, on standard error by default: time, level, part, message.

A record may quote a run: its message is one line, and nothing in it is obeyed by a terminal.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from prime_rl.utils.text import clean_text

REPEAT_S = 60.0
MAX_SEEN = 1000  # messages


class _Utc(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return time.strftime(datefmt or "%FT%T", time.gmtime(record.created))

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", " ")

    def format(self, record: logging.LogRecord) -> str:
        return clean_text(super().format(record))


class _Repeats(logging.Filter):
    """Lets the same warning or error through once in REPEAT_S, with how often it was left out since."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        message = record.getMessage()
        at, num_left_out = self._seen.pop((record.name, message), (-REPEAT_S, 0))
        is_repeated = 0 <= record.created - at < REPEAT_S
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[record.name, message] = (at, num_left_out + 1) if is_repeated else (record.created, 0)
        if num_left_out and not is_repeated:
            record.msg, record.args = f"{message} ({num_left_out} more times since)", ()
        return not is_repeated


def complain(part: str, message: object) -> None:
    """Print an error to standard error; `message` may quote a run."""
    print(f"{part}: {clean_text(str(message))}", file=sys.stderr, flush=True)


def setup_logger(part: str, level: str = "info", stream: TextIO | None = None) -> logging.Logger:
    """Configure the root logger once, at the start of an entry file, and return the logger of `part`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_Repeats())
    handler.setFormatter(_Utc("%(asctime)sZ %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "watchdog", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return logging.getLogger(part)
