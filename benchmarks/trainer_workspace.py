"""The real trainer on recorded batches: how much memory eight runs take against one, and what publishing costs it.

Each measurement runs in its own process (`python -m benchmarks.trainer_workspace ...`), so that nothing of another one
is in its memory. The workload is that of the demo: batches of 64 short samples, a checkpoint at every eighth update.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import tomli_w

from benchmarks.trainer_step import ALPHA, RANK, VOCAB, bench_sample
from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.contract.types import TrainingBatch, write_batch

NUM_SAMPLES, NUM_TOKENS = 64, 48
TIMEOUT_S = 600.0


class Measured(msgspec.Struct):
    """What one process reports.

    Attributes:
        peak_bytes: largest resident memory of the process.
        adapter_bytes: the weights of one run.
        phase_s: seconds of the training thread by phase.
        writer_s: seconds that the background writer was busy.
        wall_s: seconds from the first update to the last.
    """

    peak_bytes: int
    adapter_bytes: int
    phase_s: dict[str, float]
    writer_s: float
    wall_s: float


def memory_8_vs_1() -> float:
    """Peak resident memory of the whole process with eight runs over that with one, the adapters' own bytes aside."""
    eight, one = _measure(num_runs=8, num_steps=3), _measure(num_runs=1, num_steps=3)
    return (eight.peak_bytes - 7 * eight.adapter_bytes) / one.peak_bytes


def publish_shares() -> dict[str, float]:
    """Shares of the trainer's wall time: of its training thread, and of the background thread that writes.

    Two runs at a time, as in the demo. Their batches are always there, so nothing is waited for: the worst case.
    """
    measured = _measure(num_runs=2, num_steps=24)
    own_s = measured.phase_s["broadcast"] + measured.phase_s["checkpoint"]
    return {"publish_share": own_s / measured.wall_s, "publish_share_of_writer": measured.writer_s / measured.wall_s}


def _measure(num_runs: int, num_steps: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.trainer_workspace", folder, str(num_runs), str(num_steps)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured)


def _main(folder: Path, num_runs: int, num_steps: int) -> None:
    from benchmarks.trainer_step import bench_model, world
    from prime_rl.configs.trainer import TrainerConfig
    from prime_rl.trainer.metrics import PHASES, PhaseTimer
    from prime_rl.trainer.train import train

    model, workspace = folder / "model", folder / "workspace"
    bench_model().save_pretrained(model)
    runs = [write_run(workspace, f"run_{number}", model, num_steps) for number in range(num_runs)]
    config = TrainerConfig.model_validate(
        {
            "output_dir": workspace,
            "model": {"name": str(model), "lora": {"rank": RANK, "alpha": ALPHA}},
            "max_concurrent_runs": num_runs,
            "seq_len": 64,
            # Less than one batch, so that a pass is as large with one run as with eight.
            "max_tokens_per_micro_batch": 2048,
            "device": "cpu",
        }
    )
    phase_s, take, times = dict.fromkeys(PHASES, 0.0), PhaseTimer.take, []

    def listening(timer: PhaseTimer) -> dict[str, float]:
        seconds = take(timer)
        times.append(time.perf_counter())
        if len(times) > 1:
            for phase, value in seconds.items():
                phase_s[phase] += value
        return seconds

    PhaseTimer.take = listening  # type: ignore[assignment,method-assign]
    train(config, world(), lambda: all(num_steps in list_steps(run.broadcast, stable_only=True) for run in runs))
    world().close()
    wall_s = times[-1] - times[0]
    measured = Measured(_peak_bytes(), _adapter_bytes(runs[0], num_steps), phase_s, _writer_s(runs), wall_s)
    print(msgspec.json.encode(measured).decode())


def write_run(
    workspace: Path, run_id: str, model: Path, num_steps: int, *, keeps: bool = False, vocab_size: int = VOCAB
) -> RunDir:
    """A run with all its batches; one that `keeps` them can be replayed."""
    run = RunDir(workspace / run_id)
    run.control.mkdir(parents=True)
    run.rollouts.mkdir()
    config = {
        "batch_size": NUM_SAMPLES,
        "rollouts_per_example": 8,
        "max_steps": num_steps,
        "max_async_level": 16,
        "model": {"name": str(model)},
        "sampling": {"max_tokens": 16},
        "ckpt": {"interval": 8, "keep_rollouts": keeps},
        "env": [{"id": "reverse-text"}],
    }
    run.orch_toml.write_text(tomli_w.dumps(config), encoding="utf-8")
    rng = random.Random(run_id)
    for step in range(1, num_steps + 1):
        samples = [
            msgspec.structs.replace(
                bench_sample(rng, rng.randrange(NUM_TOKENS // 2, NUM_TOKENS), vocab_size=vocab_size),
                policy_version=step - 1,
            )
            for _ in range(NUM_SAMPLES)
        ]
        write_batch(run.rollout_file(step), TrainingBatch(run_id, step, samples, {}))
    return run


def _peak_bytes() -> int:
    # Not getrusage: its peak is inherited from the parent process.
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def _adapter_bytes(run: RunDir, step: int) -> int:
    return (run.broadcast_dir(step) / "adapter_model.safetensors").stat().st_size


def _writer_s(runs: list[RunDir]) -> float:
    lines = [json.loads(line) for run in runs for line in run.trainer_metrics.read_text(encoding="utf-8").splitlines()]
    return float(sum(line["time/broadcast"] + line["time/checkpoint"] for line in lines if line["step"] > 1))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
