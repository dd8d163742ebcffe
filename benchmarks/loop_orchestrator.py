"""What an orchestrator costs: rollouts a second through one process, and the processor time of fifty that wait.

Real processes, each from `control/orch.toml`, against inference that answers at once. No trainer runs.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from prime_rl.contract.files import mark_stable, staged_dir, wait_for
from prime_rl.contract.layout import RunDir, list_rollout_steps
from prime_rl.contract.status import RunStatus, read_status
from tests.orchestrator_support import make_model

BATCH_SIZE, ROLLOUTS_PER_EXAMPLE = 512, 16
# As many batches as one can be ahead, so that no trainer is needed.
NUM_BATCHES = 17
NUM_IDLE, IDLE_S = 50, 20.0
TIMEOUT_S = 300.0


def rollouts_per_s() -> float:
    """Rollouts of 32 tokens a second, from the first batch file to the last: prompts, HTTP, rewards, files, metrics."""
    over = {
        "batch_size": BATCH_SIZE,
        "rollouts_per_example": ROLLOUTS_PER_EXAMPLE,
        "max_steps": NUM_BATCHES,
        "max_async_level": NUM_BATCHES - 1,
        "ckpt": {"interval": NUM_BATCHES},
    }
    with _stub() as (folder, model, url):
        run = _run(folder / "run_a", model, url, over)
        with _started(run) as process:
            last = run.rollout_file(NUM_BATCHES)
            wait_for(lambda: last.exists() or process.poll() is not None, "the last batch", timeout_s=TIMEOUT_S)
            run.broadcast.mkdir(exist_ok=True)
            with staged_dir(run.broadcast_dir(NUM_BATCHES)) as version:
                mark_stable(version)
            assert process.wait(TIMEOUT_S) == 0, "the orchestrator failed"
        took_s = (last.stat().st_mtime_ns - run.rollout_file(1).stat().st_mtime_ns) / 1e9
    return (NUM_BATCHES - 1) * BATCH_SIZE / took_s


def idle_50_orchestrators_cpu() -> float:
    """Share of one core that fifty orchestrators take together while they wait for a policy."""
    over = {"batch_size": 16, "rollouts_per_example": 8, "max_async_level": 0}
    with _stub() as (folder, model, url), contextlib.ExitStack() as stack:
        runs = [_run(folder / f"run_{number}", model, url, over) for number in range(NUM_IDLE)]
        processes = [stack.enter_context(_started(run)) for run in runs]
        wait_for(lambda: all(map(_waits, runs)), "all runs to wait for a policy", timeout_s=TIMEOUT_S)
        before_s, start_s = _cpu_s(processes), time.monotonic()
        time.sleep(IDLE_S)
        return (_cpu_s(processes) - before_s) / (time.monotonic() - start_s)


def _waits(run: RunDir) -> bool:
    status = read_status(run.status, RunStatus)
    return status is not None and (status.waiting_on or "").startswith("policy") and bool(list_rollout_steps(run))


def _cpu_s(processes: list[subprocess.Popen[bytes]]) -> float:
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def _run(path: Path, model: Path, url: str, over: dict[str, Any]) -> RunDir:
    run = RunDir(path)
    run.control.mkdir(parents=True)
    config = {
        "seq_len": 256,
        "model": {"name": str(model), "full_finetune": False},  # else it waits for a trainer to decide
        "sampling": {"max_tokens": 32},
        "env": [{"id": "reverse-text", "args": {"wording": "short"}}],
        "client": {"base_url": url, "max_concurrent_requests": 256},
    }
    run.orch_toml.write_text(tomli_w.dumps({**config, **over}), encoding="utf-8")
    return run


@contextlib.contextmanager
def _started(run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "prime_rl.orchestrator.orchestrator", "@", str(run.orch_toml)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def _stub() -> Iterator[tuple[Path, Path, str]]:
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        command = [sys.executable, "-m", "benchmarks.loop_stub", str(model)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
            try:
                assert process.stdout is not None
                yield Path(folder), model, process.stdout.readline().strip()
            finally:
                process.kill()
