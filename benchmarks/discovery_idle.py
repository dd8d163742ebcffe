"""What the supervisor costs while 200 runs hold their slots and wait.

The supervisor is the real one, started by `prl up`, with 202 real processes: each does what its part does while there
is nothing to do, which is a status file every heartbeat. So nothing of torch is loaded two hundred times.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.discovery_burst import TEXT
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import DaemonStatus, read_status

NUM_RUNS = 200
IDLE_S = 20.0
TIMEOUT_S = 180.0
DAEMON = "benchmarks.discovery_daemon"


def idle_200_runs_cpu() -> float:
    """Share of one core."""
    with tempfile.TemporaryDirectory() as folder:
        output = OutputDir(Path(folder) / "out")
        runs = [_run(output.path / f"run_{number}") for number in range(NUM_RUNS)]
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text("{}", encoding="utf-8")
        try:
            _prl("up", output, "--model.name", str(model), "--inference.port", "0", "--max_concurrent_runs", "200")
            wait_for(lambda: all(_is_up(output, run) for run in runs), "200 orchestrators", timeout_s=TIMEOUT_S)
            status = read_status(output.daemon_status("supervisor"), DaemonStatus)
            assert status is not None
            supervisor = psutil.Process(status.pid)
            # The last of them has just started; what that takes is not idle.
            time.sleep(IDLE_S / 6)
            before_s, start_s = _cpu_s(supervisor), time.monotonic()
            time.sleep(IDLE_S)
            return (_cpu_s(supervisor) - before_s) / (time.monotonic() - start_s)
        finally:
            _prl("down", output)


def _run(path: Path) -> RunDir:
    run = RunDir(path)
    run.control.mkdir(parents=True)
    run.orch_toml.write_text(TEXT, encoding="utf-8")
    return run


def _is_up(output: OutputDir, run: RunDir) -> bool:
    status = read_status(output.daemon_status(run.run_id), DaemonStatus)
    return status is not None and status.state == "running"


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _prl(command: str, output: OutputDir, *more: str) -> None:
    kinds = ("trainer", "inference", "orchestrator") if command == "up" else ()
    modules = [word for kind in kinds for word in (f"--deployment.modules.{kind}", DAEMON)]
    environment = {key: value for key, value in os.environ.items() if key != "PRL_OUTPUT_DIR"}
    subprocess.run(
        [sys.executable, "-m", "daemons.cli", command, *more, "--output-dir", str(output.path), *modules],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
