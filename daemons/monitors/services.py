"""TensorBoard event files, by the `tensorboard` package alone: no torch, no TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daemons.monitors.base import importing
from prime_rl.configs.monitors import TensorBoardConfig
from prime_rl.contract.files import make_folder


class TensorBoardMonitor:
    """Scalars in `{folder}/tensorboard`; every start adds a file to those that are read as one."""

    name = "tensorboard"
    wants_all = True

    def __init__(self, config: TensorBoardConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Open a file of events. Raises MonitorError without the package, OSError when the folder cannot be made."""
        with importing("tensorboard"):
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        make_folder(self._folder)  # refuses a link, which the library would follow
        self._writer = EventFileWriter(str(self._folder), flush_secs=self._config.flush_s)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one event with all figures of the line; the library writes it to disk within about `flush_s`."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))  # Unix seconds
        )

    def close(self) -> None:
        """Write what waits and close the file; does nothing when `start` failed."""
        if self._writer is not None:
            self._writer.close()
