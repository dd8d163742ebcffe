"""One log format for every process, on standard error unless told otherwise: time, level, part, message."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO


class _Utc(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return time.strftime(datefmt or "%FT%T", time.gmtime(record.created))


def setup_logger(part: str, level: str = "info", stream: TextIO | None = None) -> logging.Logger:
    """Configure the root logger once, at the start of an entry file, and return the logger of `part`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Utc("%(asctime)sZ %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "watchdog", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return logging.getLogger(part)
