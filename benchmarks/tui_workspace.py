"""A workspace of many runs for the benchmark of the TUI: on disk as real daemons leave it, with moving figures.

All status files name this process, so all that should live does. Metrics lines are as long as real ones.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path

import msgspec

from prime_rl.contract.layout import OutputDir, RunDir, stable_marker
from prime_rl.contract.status import (
    DaemonStatus,
    InferenceStatus,
    RunStatus,
    Status,
    TrainerRunStatus,
    TrainerStatus,
)
from prime_rl.utils.process import ProcessId

ORCH_TOML = """\
batch_size = 64
rollouts_per_example = 8
max_steps = {max_steps}
max_async_level = 2
[model]
name = "models/base"
[model.lora]
rank = 8
alpha = 16.0
[optim]
lr = 1e-3
[[env]]
id = "reverse-text"
args = {{ min_len = 3, max_len = 8 }}
"""
_RNG = random.Random(7)


def orchestrator_line(step: int, reward: float | None = None, at: float | None = None) -> str:
    figures = {
        "step": step,
        "time": time.time() if at is None else at,
        "reward/mean": round(0.9 * (1 - math.exp(-step / 700)), 5) if reward is None else reward,
        "reward/std": 0.21,
        "completion_tokens/mean": 41.5,
        "prompt_tokens/mean": 23.25,
        "truncated/mean": 0.015625,
        "async_level/max": 1,
        "time/wait_for_policy": 0.31,
        "time/generate": 9.87,
        "time/env": 0.02,
        "tokens_per_s": round(_RNG.uniform(1500, 1900), 1),
    }
    return json.dumps(figures) + "\n"


def trainer_line(step: int, at: float | None = None) -> str:
    figures = {
        "step": step,
        "time": time.time() if at is None else at,
        "loss": -0.05 * _RNG.random(),
        "entropy": 2.2 * math.exp(-step / 700) + 0.3,
        "mismatch_kl": 0.0012 * _RNG.random(),
        "grad_norm": _RNG.random(),
        "lr": 1e-3,
        "ratio/mean": 1.0 + 0.01 * _RNG.random(),
        "tokens": 12_345,
    }
    return json.dumps(figures) + "\n"


def ten_metrics(step: int) -> dict[str, float]:
    """Of one long run, by the names under which they are drawn."""
    names = ("loss", "entropy", "mismatch_kl", "grad_norm", "lr", "reward/std", "tokens_per_s", "time/generate")
    return {"reward/mean": math.sin(step / 9000), "async_level/max": 1.0} | {name: _RNG.random() for name in names}


def long_run_line(step: int, num_steps: int) -> str:
    return json.dumps({"step": step, "time": time.time() - (num_steps - step), **ten_metrics(step)}) + "\n"


class BenchWorkspace:
    """`num_runs` runs of `num_steps` steps; the first `num_live` are in slots and at work, the others are finished."""

    def __init__(self, path: Path, *, num_runs: int, num_steps: int, num_live: int) -> None:
        self.output = OutputDir(path)
        self.num_live = num_live
        self.step = num_steps
        self._writer = ProcessId.of(os.getpid())
        self._finished: dict[str, Path] = {}
        self.run_ids = [f"run_{number:04d}" for number in range(num_runs)]
        steps, began_at = range(1, num_steps + 1), time.time() - num_steps
        first = "".join(orchestrator_line(step, at=began_at + step) for step in steps)
        second = "".join(trainer_line(step, at=began_at + step) for step in steps)
        for number, run_id in enumerate(self.run_ids):
            self._make_run(RunDir(path / run_id), first, second, is_live=number < num_live)
        for name in ("supervisor", "trainer", "inference"):
            self.write(self.output.daemon_status(name), DaemonStatus(name=name, state="running", child_pid=os.getpid()))
        self.beat()

    def run(self, index: int) -> RunDir:
        """The paths of the run at `index`, 0 for the first."""
        return RunDir(self.output.path / self.run_ids[index])

    def write(self, path: Path, status: Status) -> None:
        """As `contract.files.write_atomic`, without waiting for the disk."""
        status.sign(self._writer)
        status.updated_at = time.time()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.bench")
        temporary.write_bytes(msgspec.json.encode(status))
        temporary.rename(path)

    def beat(self) -> None:
        """Write what the daemons write at a heartbeat."""
        live = self.run_ids[: self.num_live]
        slots = {
            run_id: TrainerRunStatus(run_idx=index, step=self.step, max_steps=2 * self.step, lr=1e-3)
            for index, run_id in enumerate(live)
        }
        self.write(
            self.output.trainer_status,
            TrainerStatus(state="training", max_runs=self.num_live, runs=slots, tokens_per_s=2770.0),
        )
        self.write(self.output.inference_status, InferenceStatus(state="serving", engine="vllm", model="models/base"))
        self.write(self.output.daemon_status("supervisor"), DaemonStatus(name="supervisor", state="running"))
        for run_id in live:
            self.write_run(run_id)

    def write_run(self, run_id: str, reward: float | None = None) -> None:
        """Write the status of one live run at the current step."""
        status = RunStatus(
            run_id=run_id, state="running", step=self.step, max_steps=2 * self.step, policy_version=self.step
        )
        status.tokens_per_s, status.reward = _RNG.uniform(1500, 1900), reward
        self.write(RunDir(self.output.path / run_id).status, status)

    def step_all(self) -> None:
        """One step of every live run, as the daemons would write it."""
        self.step += 1
        for run_id in self.run_ids[: self.num_live]:
            run = RunDir(self.output.path / run_id)
            append(run.orchestrator_metrics, orchestrator_line(self.step, _RNG.random()))
            append(run.trainer_metrics, trainer_line(self.step))
        self.beat()

    def _make_run(self, run: RunDir, first: str, second: str, *, is_live: bool) -> None:
        for folder in (run.control, run.metrics, run.broadcast_dir(self.step)):
            folder.mkdir(parents=True)
        max_steps = 2 * self.step if is_live else self.step
        run.orch_toml.write_text(ORCH_TOML.format(max_steps=max_steps), encoding="utf-8")
        for path, lines in ((run.orchestrator_metrics, first), (run.trainer_metrics, second)):
            known = self._finished.get(path.name)
            if known is not None and not is_live:
                path.hardlink_to(known)  # they are never written again: five thousand of them would take gigabytes
                continue
            path.write_text(lines, encoding="utf-8")
            if not is_live:
                self._finished[path.name] = path
        stable_marker(run.broadcast_dir(self.step)).touch()
        if not is_live:
            status = RunStatus(run_id=run.run_id, state="finished", step=self.step, max_steps=max_steps)
            self.write(run.status, status)


def append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
