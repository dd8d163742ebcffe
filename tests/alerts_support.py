"""A workspace whose files a test writes: how each kind of alert comes about on disk, and how it ends.

All that should live is written by the test's own process, and again by `Troubles.beat`, so that it never grows old.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.configs.reports import ALERT_KINDS, AlertKind, AlertsConfig
from prime_rl.contract.files import append_line, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.metrics import Sign
from prime_rl.contract.status import (
    DaemonStatus,
    InferenceStatus,
    NodeStatus,
    RunStatus,
    Status,
    TrainerRunStatus,
    TrainerStatus,
)
from prime_rl.trainer.step import not_finite
from prime_rl.utils.process import ProcessId
from tests.orchestrator_support import config_data, write_toml

# Within which an alert arrives.
PROMISE_S = 30.0
REWARD = {"window": 2, "drop": 0.5}
_SUBJECTS: dict[AlertKind, str] = {
    "reward_collapsed": "run_reward",
    "daemon_crashed": "trainer",
    "daemon_stalled": "inference",
    "node_lost": "node 1",
    "disk_low": "disk",
}


class Troubles:
    """A workspace in which all is well, but for what is caused. Each run is named after the kind that befalls it.

    `disk_low` is caused by a daemon that is started with another `min_free_gb`. A node that was mended lives as long as
    it beats.
    """

    def __init__(self, output: OutputDir, clock: Callable[[], float] = time.time) -> None:
        self.output = output
        self._clock = clock
        self._batches = 0
        self._node: NodeStatus | None = None
        self._mended = False
        self._ahead_s = 0.0
        self._written: dict[Path, Status] = {}
        run_ids = [self.subject(kind) for kind in ALERT_KINDS if self.subject(kind).startswith("run_")]
        in_slots = [run_id for run_id in run_ids if run_id != "run_invalid"]
        slots = {run_id: TrainerRunStatus(run_idx=number) for number, run_id in enumerate(in_slots)}
        self._put(output.trainer_status, TrainerStatus(state="training", max_runs=len(slots), runs=slots))
        for name in ("supervisor", "trainer", "inference"):
            self._daemon(name, "running")
        for run_id in run_ids:
            self.run(run_id)
        self._train(0.8, 0.8)

    def subject(self, kind: AlertKind) -> str:
        return _SUBJECTS.get(kind, kind)

    def config(self, **fields: Any) -> AlertsConfig:
        return AlertsConfig(output_dir=self.output.path, reward=REWARD, **fields)

    def cause(self, kind: AlertKind) -> None:
        match kind:
            case "run_failed":
                self.run(kind, state="failed", reason="boom")
            case "run_stalled":
                self.run(kind, loop_still_s=1000.0)
            case "run_trouble":
                self.run(kind, signs=[Sign("no_gradient", 0.0, 1e-6, 28)])
            case "run_invalid":
                write_atomic(self.output.run(kind).orch_toml, "max_steps = 'ten'")
            case "run_evicted":
                write_atomic(self.output.run(kind).evicted, "asked for")
            case "run_not_finite":
                reason = not_finite(kind, 3, "its loss or gradient", math.nan, 1.0, 1e-4)
                write_atomic(self.output.run(kind).evicted, reason)
            case "reward_collapsed":
                self._train(0.1, 0.1, 0.1)
            case "daemon_crashed":
                self._daemon("trainer", "backoff", reason="exit code 1")
            case "daemon_stalled":
                self._daemon("inference", "stalled", reason="no progress")
            case "clocks":
                self._ahead_s = 9.0
                self._put(self.output.inference_status, InferenceStatus(state="serving"))
            case "node_lost":
                self._node = NodeStatus(rank=1, state="working", heartbeat_s=2.0)
                self._put(self.output.node_status(1), self._node)

    def mend(self, kind: AlertKind) -> None:
        if kind.startswith("run_"):
            self.output.run(kind).evicted.unlink(missing_ok=True)
            self.run(kind)
        elif kind == "reward_collapsed":
            self._train(0.8, 0.8)
        elif kind.startswith("daemon_"):
            self._daemon(self.subject(kind), "running")
        elif kind == "clocks":
            self._ahead_s = 0.0
        else:
            assert kind == "node_lost"
            self._mended = True

    def beat(self) -> None:
        """What all that lives does again and again, and a node once it is mended."""
        for path, status in self._written.items():
            if not isinstance(status, NodeStatus):
                self._put(path, status)
        if self._node is not None and self._mended:
            self._node.seq += 1
            self._put(self.output.node_status(1), self._node)

    def run(self, run_id: str, **fields: Any) -> None:
        """Write a run's config and its orchestrator's status: one that works, but for `fields`."""
        run = self.output.run(run_id)
        run.control.mkdir(parents=True, exist_ok=True)
        write_toml(run, config_data(Path("model")))
        self._put(run.status, RunStatus(run_id=run_id, loop=1, **({"state": "running"} | fields)))

    def _train(self, *rewards: float) -> None:
        run = self.output.run(self.subject("reward_collapsed"))
        run.metrics.mkdir(exist_ok=True)
        for reward in rewards:
            self._batches += 1
            append_line(run.orchestrator_metrics, f'{{"step": {self._batches}, "reward/mean": {reward}}}')

    def _daemon(self, name: str, state: str, **fields: Any) -> None:
        self._put(self.output.daemon_status(name), DaemonStatus(name=name, state=state, **fields))

    def _put(self, path: Path, status: Status) -> None:
        status.sign(ProcessId.of(os.getpid()))
        status.updated_at = self._clock()
        self._written[path] = status
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(status, InferenceStatus):  # of another machine
            status.host, status.pid_start = "gpu7", "another-boot/1"
            status.updated_at += self._ahead_s
        write_atomic(path, msgspec.json.encode(status))
        os.utime(path, (self._clock(), self._clock()))
