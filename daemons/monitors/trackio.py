"""trackio: one local database with all runs of the workspace, for `trackio show`. No server and no network.

Lines are written as the records by which trackio takes what others logged. `trackio.init` is not used: it drops what it
cannot write within ten seconds, as where many runs log at once, and asks Hugging Face for the name of the user.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from daemons.monitors.base import importing, kept_id
from prime_rl.configs.monitors import TrackioConfig

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
