"""What asynchrony is worth: the same run with `max_async_level` 2 and 0, in one real workspace, one after the other.

Trainer and embedded engine have one core each; passes and samples are chosen so that making a batch and training on it
take about as long. A run's wall time is that from its first update to its last. What it learned is measured afterwards:
its last policy answers one and the same set of examples.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.loop_reward import reward_of
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import RunDir, list_steps

SEEDS, LEVELS, NUM_STEPS = (1, 2, 3), (0, 2), 48
TIMEOUT_S = 900.0
MODEL = Path("models/base")
SYSTEM = """
output_dir = "{workspace}"
max_concurrent_runs = 1
seq_len = 96
[model]
name = "{model}"
[lora]
rank = 16
alpha = 32.0
[trainer]
num_threads = 1
max_tokens_per_micro_batch = 4096
[inference]
engine = "embedded"
port = 0
num_threads = 1
max_num_seqs = 48
"""
RUN = """
batch_size = 128
rollouts_per_example = 8
max_steps = {num_steps}
max_async_level = {level}
seed = {seed}
[model]
name = "{model}"
[model.lora]
rank = 8
alpha = 16.0
[optim]
lr = 1.5e-3
[sampling]
max_tokens = 12
[client]
max_concurrent_requests = 256
[[env]]
id = "reverse-text"
args = {{ wording = "short" }}
[ckpt]
interval = 100
"""


def async_figures() -> dict[str, float]:
    """Ratio of wall times (median over seeds), and the rewards of the last policies with the noise of their difference.

    The noise is the standard error of the difference of the two means, from the spread over the seeds of either arm:
    that of the training and that of the sampling of the evaluation are both in it.
    """
    if not MODEL.is_dir():
        raise SystemExit(f"bench: {MODEL} is not there: make it with `.venv/bin/prl make-base` or `make demo`")
    with tempfile.TemporaryDirectory() as folder, _workspace(Path(folder)) as workspace:
        for seed in SEEDS:
            for level in LEVELS:
                _add(Path(folder), workspace, level, seed)
        runs = {(seed, level): RunDir(workspace / f"run_s{seed}_k{level}") for seed in SEEDS for level in LEVELS}
        wait_for(lambda: all(_is_done(run) for run in runs.values()), "all runs of the bench", timeout_s=TIMEOUT_S)
        walls = {key: _wall_s(run) for key, run in runs.items()}
        rewards = {key: reward_of(run, NUM_STEPS) for key, run in runs.items()}
        shares = [_train_share(runs[seed, 0]) for seed in SEEDS]
    arms = {level: [rewards[seed, level] for seed in SEEDS] for level in LEVELS}
    return {
        "async2_vs_sync": statistics.median(walls[seed, 2] / walls[seed, 0] for seed in SEEDS),
        "sync_training_share": statistics.median(shares),
        "async2_reward": statistics.mean(arms[2]),
        "sync_reward": statistics.mean(arms[0]),
        "reward_noise": math.sqrt(sum(statistics.variance(arm) / len(arm) for arm in arms.values())),
    }


@contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    workspace, system = folder / "workspace", folder / "system.toml"
    system.write_text(SYSTEM.format(workspace=workspace, model=MODEL.resolve()), encoding="utf-8")
    _prl("up", "@", str(system))
    try:
        yield workspace
    finally:
        _prl("down", "--output-dir", str(workspace))


def _add(folder: Path, workspace: Path, level: int, seed: int) -> None:
    file = folder / f"s{seed}_k{level}.toml"
    file.write_text(RUN.format(num_steps=NUM_STEPS, level=level, seed=seed, model=MODEL.resolve()), encoding="utf-8")
    _prl("runs", "add", str(file), "--id", f"run_{file.stem}", "--output-dir", str(workspace))


def _prl(*arguments: str) -> None:
    command = [sys.executable, "-m", "daemons.cli", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)


def _is_done(run: RunDir) -> bool:
    assert not run.evicted.exists(), run.evicted.read_text(encoding="utf-8")
    return NUM_STEPS in list_steps(run.broadcast, stable_only=True)


def _lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _wall_s(run: RunDir) -> float:
    times = [line["time"] for line in _lines(run.trainer_metrics)]
    return times[-1] - times[0]


def _train_share(run: RunDir) -> float:
    """Of a synchronous run: seconds of training over wall time."""
    lines = _lines(run.trainer_metrics)[1:]
    return sum(line["time/forward_backward"] + line["time/optim"] for line in lines) / _wall_s(run)
