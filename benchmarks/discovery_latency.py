"""From the rename of a run's `orch.toml` to the trainer's discovered hook, in a workspace of a thousand run folders.

The real training loop, idle, runs in this process with a hook beside its own. Another process places the configs and
evicts each run some time later, so that there is a free slot for the next one; a third looks at the whole workspace
every second, as a polling loop does. All read one clock (`time.monotonic` is the machine's).

    python -m benchmarks.discovery_latency place|poll WORKSPACE
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import wait_for, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, scan_runs
from prime_rl.contract.status import TrainerStatus, read_status

# Of the thousand, these get their config while it is measured; of the others most are done with, as in an old
# workspace.
NUM_NEW, NUM_EVICTED, NUM_INVALID, NUM_EMPTY = 200, 650, 100, 50
MAX_RUNS = 8
GAP_S = (0.1, 0.4)
POLL_S = 1.0
TIMEOUT_S = 180.0
STAGED = ".orch.toml.new"


def latency_figures() -> dict[str, float]:
    # A hundred refused configs would fill the screen.
    logging.getLogger("prime_rl").addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "workspace"
        placed, polled, discovered = _measure(workspace, Path(folder) / "model")
    ours = [1000 * (discovered[run_id] - at_s) for run_id, at_s in placed.items()]
    polling = [1000 * (polled[run_id] - at_s) for run_id, at_s in placed.items()]
    return {
        "discovered_p95_ms_1000_runs": _p95(ours),
        "discovered_median_ms_1000_runs": statistics.median(ours),
        "polling_p95_ms": _p95(polling),
    }


def _measure(workspace: Path, base: Path) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """When each run was placed, and when the polling loop and the trainer's hook saw it."""
    from prime_rl.trainer.runs import get_multi_run_manager
    from tests.trainer_support import train_until, trainer_config, write_model

    write_model(base)
    _fill(workspace, base)
    discovered: dict[str, float] = {}
    is_hooked = False

    def note(run_idx: int, run_id: str, config: OrchestratorConfig) -> None:
        discovered.setdefault(run_id, time.monotonic())

    def done() -> bool:
        nonlocal is_hooked
        if not is_hooked:
            get_multi_run_manager().register_discovered_hook(note)
            is_hooked = True
        return len(discovered) == NUM_NEW

    config = trainer_config(workspace, base, max_concurrent_runs=MAX_RUNS, num_threads=1, watch={"rescan_s": 5.0})
    with _helper("poll", workspace) as poll, _helper("place", workspace) as place:
        train_until(config, done, TIMEOUT_S)
        return _times(place), _times(poll), discovered


def _fill(workspace: Path, base: Path) -> None:
    from tests.trainer_support import write_config

    workspace.mkdir()
    kinds = ["new"] * NUM_NEW + ["evicted"] * NUM_EVICTED + ["invalid"] * NUM_INVALID + ["empty"] * NUM_EMPTY
    for number, kind in enumerate(kinds):
        run = RunDir(workspace / f"run_{kind}_{number}")
        run.control.mkdir(parents=True)
        if kind != "empty":
            write_config(run, base, **({"batch_size": "many"} if kind == "invalid" else {}))
        if kind == "evicted":
            run.evicted.write_text("over", encoding="utf-8")
        if kind == "new":
            run.orch_toml.rename(run.control / STAGED)


def _new_runs(workspace: Path) -> list[RunDir]:
    return [run for run in scan_runs(workspace)[0] if run.run_id.startswith("run_new_")]


def place(workspace: Path) -> dict[str, float]:
    """Rename one config after another, at random times, once the trainer is idle."""

    def is_idle() -> bool:
        status = read_status(OutputDir(workspace).trainer_status, TrainerStatus)
        refused = workspace.glob("run_invalid_*/control/config_validation_error.txt")
        return status is not None and status.state == "waiting" and len(list(refused)) == NUM_INVALID

    wait_for(is_idle, "the trainer to be idle", timeout_s=TIMEOUT_S)
    time.sleep(POLL_S)
    rng, placed, active = random.Random(0), {}, deque[RunDir]()
    for run in _new_runs(workspace):
        time.sleep(rng.uniform(*GAP_S))
        placed[run.run_id] = time.monotonic()
        os.rename(run.control / STAGED, run.orch_toml)
        active.append(run)
        if len(active) == MAX_RUNS - 1:
            write_atomic(active.popleft().evicted, "measured")
    return placed


def poll(workspace: Path) -> dict[str, float]:
    """Look at every run once a second."""
    names = {run.run_id for run in _new_runs(workspace)}
    seen: dict[str, float] = {}
    while names - seen.keys():
        time.sleep(POLL_S)
        for run in scan_runs(workspace)[0]:
            if run.orch_toml.exists():
                seen.setdefault(run.run_id, time.monotonic())
    return seen


@contextlib.contextmanager
def _helper(what: str, workspace: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.discovery_latency", what, str(workspace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            yield process
        finally:
            process.kill()


def _times(process: subprocess.Popen[str]) -> dict[str, float]:
    times: dict[str, float] = json.loads(process.communicate(timeout=TIMEOUT_S)[0])
    return times


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


if __name__ == "__main__":
    print(json.dumps({"place": place, "poll": poll}[sys.argv[1]](Path(sys.argv[2]))))
