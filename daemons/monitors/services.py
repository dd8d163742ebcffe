"""The monitors: TensorBoard, Weights & Biases, trackio, and a page for Prometheus. One interface (`Monitor`).

Each imports its library in `start`, so only when it is used, and has one run for the life of a run, however often that
is started. TensorBoard: event files by the `tensorboard` package alone, without torch or TensorFlow. W&B: all runs
share its one process. trackio: one local database with all runs, without a server; lines are written as the records by
which trackio takes what others logged, for `trackio.init` drops what it cannot write within ten seconds, as where many
runs log at once, and asks Hugging Face for the name of the user. Prometheus: the newest figures of all runs, on
loopback.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from daemons.specs import MONITORS
from daemons.trash import list_trash
from prime_rl.configs.reports import PrometheusConfig, TensorBoardConfig, TrackioConfig, WandbConfig
from prime_rl.contract.files import UNDECODABLE, make_folder, read_file, read_text, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, scan_runs
from prime_rl.contract.usage import life_of
from prime_rl.utils.runtime import http_refusal, install_command
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

    def __init__(self, config: WandbConfig, run: RunDir, ids: KeptIds) -> None:
        self._config, self._id = config, partial(ids.of, self.name, run)
        self._folder = run.monitors
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
            id=self._id(),
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
        data: of the workspace; trackio has one such folder in a process.
    """

    name = "trackio"
    wants_all = True

    def __init__(self, config: TrackioConfig, run: RunDir, ids: KeptIds, data: Path) -> None:
        self._project, self._id, self._data = config.project, partial(ids.of, self.name, run), data

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Prepare what every record of the run has in common, with the id that is kept for it.

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
            "run_id": self._id(),
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


_IMPORTS = threading.Lock()
_ID = re.compile(r"[0-9a-f]{16}")
_MAX_IDS_BYTES = 2**26  # half a million ids
MAX_LIVES = 100  # of one run id, whose folder has the name of its life: the oldest are forgotten


class MonitorError(RuntimeError):
    """A monitor that cannot work; the message has what is missing."""


class Monitor(Protocol):
    """Takes the metrics of one run, called by one thread. Any call may raise, which ends this monitor of this run."""

    name: str
    # Whether it gets every line once, over all starts; else the newest lines at each start.
    wants_all: bool

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Called once, before all else. `config` is the run's whole config, as plain data."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of a metrics file. Names begin with the writer: "orchestrator/reward/mean", "trainer/loss"."""

    def close(self) -> None:
        """Called once, also when `start` failed half way."""


@contextmanager
def importing(package: str) -> Iterator[None]:
    """Import a monitor's library in here, one after another: numpy, begun by two threads at once, is broken for good.

    Raises MonitorError when it is not installed.
    """
    with _IMPORTS:
        try:
            yield
        except ImportError as error:
            raise MonitorError(f"the package {package} is not installed: {install_command('monitors')}") from error


class KeptIds:
    """The random ids under which services find runs again, in a file of the workspace: {"service/run id/life": id}.

    A run's folder has no say in it, else it could name the record of another run. Once, where an earlier version of the
    daemon has worked, the ids that it kept in the folders of runs are taken over, each that only one run has.
    """

    def __init__(self, output: OutputDir) -> None:
        self._output, self._path, self._lock = output, output.monitor_ids, threading.Lock()
        self._had_monitors = os.path.exists(output.own_status(MONITORS))
        self._ids: dict[str, str] | None = None

    def of(self, service: str, run: RunDir) -> str:
        """The run's id at the service, made at the first call. Raises OSError."""
        lives = f"{service}/{run.run_id}/"
        key = lives + life_of(run)
        with self._lock:
            if self._ids is None:
                self._ids = self._read()
            if key not in self._ids:
                oldest = [each for each in self._ids if each.startswith(lives)][: 1 - MAX_LIVES]
                kept = {each: known for each, known in self._ids.items() if each not in oldest}
                kept[key] = secrets.token_hex(8)
                write_atomic(self._path, json.dumps(kept))
                self._ids = kept
            return self._ids[key]

    def _read(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(read_file(self._path, limit=_MAX_IDS_BYTES), type=dict[str, str])
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            ids = _earlier_ids(self._output) if self._had_monitors else {}
            write_atomic(self._path, json.dumps(ids))
            return ids
        except UNDECODABLE as error:
            logger.warning("%s is damaged, runs get new records: %s", self._path, error)
            return {}


def _earlier_ids(output: OutputDir) -> dict[str, str]:
    """Those in the folders of runs, deleted ones too."""
    runs = [(run.run_id, run) for run in scan_runs(output.path)[0]]
    runs += [(run_id, RunDir(output.trashed(run_id, stamp))) for run_id, stamp in list_trash(output.path)]
    ids: dict[str, str] = {}
    for service in (WandbMonitor.name, TrackioMonitor.name):
        found = {}
        for run_id, run in runs:
            with suppress(OSError):
                known = (read_text(run.monitors / f"{service}_id.txt") or "").strip()
                if _ID.fullmatch(known):
                    found[f"{service}/{run_id}/{life_of(run)}"] = known
        holders = Counter(found.values())
        ids |= {key: known for key, known in found.items() if holders[known] == 1}
    return ids


logger = logging.getLogger("monitors")

LOOPBACK = "127.0.0.1"
_HEADERS = {"Host": "HTTP_HOST", "Origin": "HTTP_ORIGIN", "Content-Type": "CONTENT_TYPE"}


class PrometheusPage(Collector):
    """Every figure as a gauge `prl_<name>{run="..."}`; `prl_orchestrator_step` and `prl_trainer_step` beside them.

    It is also the collector that the library asks for the gauges at each scrape, in another thread.
    """

    def __init__(self, config: PrometheusConfig) -> None:
        self.config = config
        # {run id: {gauge: value}}; the inner ones are replaced whole.
        self._runs: dict[str, dict[str, float]] = {}
        self._server: Any = None

    @property
    def url(self) -> str:
        """The address of the page; the port of the config until the page is open."""
        return f"http://{LOOPBACK}:{self._server.server_port if self._server else self.config.port}/metrics"

    @property
    def is_open(self) -> bool:
        """True when the page is served: from `open` until `close`."""
        return self._server is not None

    def open(self) -> None:
        """Raises OSError when the port is taken."""
        registry = CollectorRegistry(auto_describe=False)
        self._server, self._thread = start_http_server(self.config.port, LOOPBACK, registry)
        self._server.set_app(_guarded(self._server.get_app()))
        registry.register(self)
        logger.info("prometheus: %s", self.url)

    def close(self) -> None:
        """Stop the server and wait for its thread; does nothing without a server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def show(self, run_id: str, figures: dict[str, float]) -> None:
        """Put a run's figures on the page, by gauge; those that `figures` lacks keep their values."""
        self._runs[run_id] = self._runs.get(run_id, {}) | figures

    def remove(self, run_id: str) -> None:
        """Take all figures of a run off the page."""
        self._runs.pop(run_id, None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a gauge for each figure, with the values of all runs. The library calls it at each scrape."""
        gauges: dict[str, GaugeMetricFamily] = {}
        for run_id, figures in list(self._runs.items()):
            for name, value in figures.items():
                if name not in gauges:
                    gauges[name] = GaugeMetricFamily(name, "See docs/metrics.md.", labels=["run"])
                gauges[name].add_metric([run_id], value)
        yield from gauges.values()


def _guarded(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def guarded(environ: Mapping[str, str], start_response: Callable[..., object]) -> Iterable[bytes]:
        headers = [(name, environ[key]) for name, key in _HEADERS.items() if environ.get(key)]
        if (refused := http_refusal(environ["REQUEST_METHOD"], headers)) is None:
            return app(environ, start_response)
        start_response(f"{refused[0]} Refused", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{refused[1]}\n".encode()]

    return guarded


class PrometheusMonitor:
    """One run's figures on a page. A page of its own is opened and closed with it."""

    name = "prometheus"
    wants_all = False

    def __init__(self, page: PrometheusPage, *, is_own: bool = False) -> None:
        self._page, self._is_own = page, is_own
        self._run_id = ""

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Open the page if it is the run's own. Raises OSError when its port is taken."""
        self._run_id = run_id
        if self._is_own:
            self._page.open()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the figures of one line, and its step as that of the writer."""
        writers = {name.partition("/")[0] for name in metrics}
        # orchestrator/reward/mean -> prl_orchestrator_reward_mean
        news = {f"prl_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value for name, value in metrics.items()}
        self._page.show(self._run_id, news | {f"prl_{writer}_step": float(step) for writer in writers})

    def close(self) -> None:
        """Take the run off the page; a page of its own is closed."""
        self._page.remove(self._run_id)
        if self._is_own:
            self._page.close()
