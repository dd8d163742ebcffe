"""Five thousand runs that come at once: how many the trainer's manager does not discover.

python -m benchmarks.discovery_burst WORKSPACE
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prime_rl.contract.layout import RunDir
from prime_rl.utils.watch import Watcher

NUM_RUNS = 5000
PATIENCE_S = 60.0
TEXT = """\
batch_size = 8
rollouts_per_example = 4
model = { name = "some/model" }
sampling = { max_tokens = 16 }
env = [{ id = "reverse-text" }]
"""


def lost_of_5000() -> float:
    """Runs without a call of the discovered hook after all were placed and a rescan has gone by."""
    from prime_rl.trainer.loop import POLL_S, Scout
    from tests.runs_support import manager_of

    discovered: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, Watcher() as watcher:
        workspace = Path(folder)
        manager = manager_of(workspace, NUM_RUNS)
        manager.register_discovered_hook(lambda run_idx, run_id, config: discovered.add(run_id))
        scout = Scout(manager, watcher)
        with subprocess.Popen([sys.executable, "-m", "benchmarks.discovery_burst", str(workspace)]) as writer:
            quiet_since = time.monotonic()
            while writer.poll() is None or time.monotonic() - quiet_since < PATIENCE_S:
                before = len(discovered)
                scout.wait(POLL_S)
                scout.look()
                if len(discovered) == NUM_RUNS:
                    break
                if len(discovered) > before:
                    quiet_since = time.monotonic()
        assert writer.returncode == 0, "not all runs were placed"
    return NUM_RUNS - len(discovered)


def place(workspace: Path) -> None:
    for number in range(NUM_RUNS):
        run = RunDir(workspace / f"run_{number}")
        run.control.mkdir(parents=True)
        staged = run.control / ".orch.toml.new"
        staged.write_text(TEXT, encoding="utf-8")
        staged.rename(run.orch_toml)


if __name__ == "__main__":
    place(Path(sys.argv[1]))
