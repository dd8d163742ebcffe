"""The orchestrator's end of the monitors' process (`main.py`): started, watched, closed. It never stops the run.

A separate process, because a monitor's library may hang, crash, start threads and take 200 MB; this one stays small.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import RunDir

logger = logging.getLogger("orchestrator")

# It ends by itself before that; below the supervisor's grace.
CLOSE_TIMEOUT_S = 15.0


class MonitorProcess:
    """Runs while the orchestrator does. Nothing is started when the run asks for no monitor."""

    def __init__(self, config: OrchestratorConfig, run: RunDir) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        if not config.monitor.any_on:
            return
        request = {
            "run": str(run.path.absolute()),
            "log_level": config.log.level,
            "monitor": config.monitor.model_dump(mode="json"),
            "config": config.model_dump(mode="json"),
        }
        try:
            self._process = self._start(json.dumps(request).encode() + b"\n")
        except OSError as error:
            logger.warning("no monitors: %s", error)

    def close(self) -> None:
        """Let it pass on the last lines, and wait until it is gone; at the deadline it is killed."""
        if self._process is None:
            return
        self._closing.set()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the monitors did not end within %g s and were killed", CLOSE_TIMEOUT_S)
            self._process.kill()
            self._process.wait()
        self._watcher.join()

    def _start(self, request: bytes) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "prime_rl.orchestrator.monitors.main"]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE)
        self._watcher = threading.Thread(target=self._watch, args=(process,), name="monitors", daemon=True)
        self._watcher.start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once, which the watcher reports
            process.stdin.write(request)
            process.stdin.flush()
        return process

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing.is_set():
            logger.warning("the monitors' process ended (exit code %d): the run continues without them", code)
