"""Feeds monitors from a run's metrics files, `orchestrator.jsonl` and `trainer.jsonl`: every whole line, once.

How far each file was passed on is kept in `monitors/state.json`, so an orchestrator that starts again repeats nothing
and leaves nothing out; only a kill between passing on and keeping may repeat the last lines.

Names, as all text of a run, are cleaned here. Monitors keep every name that they have seen: they are given only so
many, none of which is long.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_rl.contract.files import make_folder, read_text, write_atomic
from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.contract.metrics import parse_metrics
from prime_rl.orchestrator.monitors.base import Monitor
from prime_rl.utils.tail import FileTail
from prime_rl.utils.text import clean_strings, one_line

logger = logging.getLogger("monitors")

# Far above what trainer and orchestrator write.
MAX_FIGURES = 1_000
MAX_NAME_CHARS = 128


class MonitorFeed:
    """Passes lines on. A monitor that raises is logged, once, and left out from there on; the others go on."""

    def __init__(self, run: RunDir, monitors: Sequence[Monitor]) -> None:
        self._run = run
        self._monitors = list(monitors)
        self._started: list[Monitor] = []
        self._state = run.monitors / "state.json"
        self._kept = _read_state(self._state)
        files = {"orchestrator": run.orchestrator_metrics, "trainer": run.trainer_metrics}
        self._tails = {writer: FileTail(path, position=self._kept.get(writer, 0)) for writer, path in files.items()}
        self._trainer_step = self._kept.get("trainer_step", 0)
        self._failed_to_keep = False
        self._names: set[str] = set()

    def start(self, config: Mapping[str, Any]) -> None:
        make_folder(self._run.monitors)
        self._started = list(self._monitors)
        run_id, config = one_line(self._run.run_id), clean_strings(dict(config))
        self._each(lambda monitor: monitor.start(run_id, config))

    def forward(self) -> None:
        for writer, tail in self._tails.items():
            more = True
            while more:
                read = tail.read()
                more = read.more
                for line in read.lines:
                    self._pass_on(writer, line)
        self._keep_state()

    @property
    def is_behind_trainer(self) -> bool:
        """Whether the trainer has published an update of which it has yet to write the line."""
        return max(list_steps(self._run.broadcast, stable_only=True), default=0) > self._trainer_step

    def close(self) -> None:
        self._monitors, monitors = [], self._started
        for monitor in reversed(monitors):
            _guarded(monitor, monitor.close)

    def _pass_on(self, writer: str, line: bytes) -> None:
        parsed = parse_metrics(line)
        if parsed is None:
            return
        step, values = parsed
        values.pop("time", None)
        if writer == "trainer":
            self._trainer_step = step
        figures = {f"{writer}/{one_line(name, MAX_NAME_CHARS)}": value for name, value in values.items()}
        new = [name for name in figures if name not in self._names]
        for name in new[max(0, MAX_FIGURES - len(self._names)) :]:
            del figures[name]
        self._names.update(figures)
        self._each(lambda monitor: monitor.log(step, figures))

    def _each(self, call: Callable[[Monitor], None]) -> None:
        self._monitors = [m for m in self._monitors if _guarded(m, lambda m=m: call(m))]  # type: ignore[misc]

    def _keep_state(self) -> None:
        state = {writer: tail.position for writer, tail in self._tails.items()} | {"trainer_step": self._trainer_step}
        if state != self._kept:
            self._kept = state
            try:
                write_atomic(self._state, json.dumps(state))
            except OSError as error:  # a full disk passes, and so may what it costs
                if not self._failed_to_keep:
                    logger.warning("a restart may repeat lines to the monitors: %s", error)
                self._failed_to_keep = True


def _guarded(monitor: Monitor, call: Callable[[], None]) -> bool:
    """Whether `call` went well. Whatever a library raises here must not cost the other monitors anything."""
    try:
        call()
    except Exception as error:
        logger.warning("%s is disabled: %s", monitor.name, " ".join(f"{type(error).__name__}: {error}".split()))
        return False
    return True


def _read_state(path: Path) -> dict[str, int]:
    try:
        found = json.loads(read_text(path) or "{}")
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, int) and v >= 0} if isinstance(found, dict) else {}
