"""TensorBoard, Weights & Biases and trackio. Each has one run for the life of a run, however often that is started.

TensorBoard: event files by the `tensorboard` package alone, without torch or TensorFlow. W&B: all runs share its one
process. trackio: one local database with all runs, without a server; lines are written as the records by which trackio
takes what others logged, for `trackio.init` drops what it cannot write within ten seconds, as where many runs log at
once, and asks Hugging Face for the name of the user.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from daemons.monitors.base import importing, kept_id
from prime_rl.configs.monitors import TensorBoardConfig, TrackioConfig, WandbConfig
from prime_rl.contract.files import make_folder
from prime_rl.utils.secrets import WANDB_VARIABLE, read_secret


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


# Without a network, or without a key, W&B must give up rather than wait for a person.
INIT_TIMEOUT_S = 60.0


class WandbMonitor:
    """Figures over `step`, as trainer and orchestrator are at different steps at the same time."""

    name = "wandb"
    wants_all = True

    def __init__(self, config: WandbConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._run: Any = None

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin the W&B run, or resume it when online. Raises MonitorError without the package, and what W&B raises."""
        with importing("wandb"):
            import wandb
        make_folder(self._folder / "wandb")  # else W&B takes the system's temporary folder
        self._run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            mode=self._config.mode,
            dir=str(self._folder),
            id=kept_id(self._folder / "wandb_id.txt"),
            name=run_id,
            config=dict(config),
            reinit="create_new",  # beside those of other runs
            resume="allow" if self._config.mode == "online" else None,
            settings=wandb.Settings(
                api_key=read_secret(WANDB_VARIABLE, os.environ) if self._config.mode == "online" else None,
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                init_timeout=INIT_TIMEOUT_S,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the figures of one line to W&B, with their step beside them."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Finish the W&B run; does nothing when `start` failed."""
        if self._run is not None:
            self._run.finish()


# trackio waits ten seconds for its database and then fails: only one run writes at a time.
_WRITING = threading.Lock()


class TrackioMonitor:
    """Figures over `step`. One trackio run for the life of a run, however often it is started.

    Args:
        folder: of the run; keeps the id of its trackio run.
        data: of the workspace; trackio has one such folder in a process.
    """

    name = "trackio"
    wants_all = True

    def __init__(self, config: TrackioConfig, folder: Path, data: Path) -> None:
        self._project, self._folder, self._data = config.project, folder, data

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Prepare what every record of the run has in common, with the id that is kept in its folder.

        Raises MonitorError without the package, ValueError for a project name that trackio reserves.
        """
        with importing("trackio"):
            os.environ |= {"TRACKIO_DIR": str(self._data), "HF_HUB_OFFLINE": "1"}  # both are read at the import
            from trackio import SQLiteStorage, fragments, utils
        SQLiteStorage.validate_project_name(self._project)  # it reserves some names
        self._fragments = fragments
        # On a network file system, where SQLite is not safe, `trackio show` takes the records from files.
        self._files = fragments.FragmentWriter() if utils.get_storage_mode() == "jsonl" else None
        self._run: dict[str, Any] = {
            "project": self._project,
            "run": run_id,
            "run_id": kept_id(self._folder / "trackio_id.txt"),
            "config": dict(config),
        }

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one record, to the database or to the files; only one run writes to the database at a time."""
        line = {"step": step, "metrics": dict(metrics)}
        # A line that is repeated after a kill has the same id, and trackio takes each id once.
        log_id = hashlib.sha256(json.dumps([self._run["run_id"], line]).encode()).hexdigest()[:32]
        now = datetime.now(UTC).isoformat()
        records = [self._fragments.metric_record({**self._run, **line, "log_id": log_id, "timestamp": now})]
        self._run["config"] = None  # once is enough
        if self._files is not None:
            self._files.write_local(records)
        else:
            with _WRITING:
                self._fragments.import_records(records)

    def close(self) -> None:
        """Nothing is left open between lines."""
