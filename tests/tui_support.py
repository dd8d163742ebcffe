"""A workspace on disk as the TUI's tests need it: runs in every state, with metrics, logs and frozen times.

All status files name the test's own process, so that they count as alive as long as the clock is `NOW`.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, stable_marker
from prime_rl.contract.samples import Sample, SampleFile, SampleTurn
from prime_rl.contract.status import (
    DaemonStatus,
    InferenceStatus,
    RunStatus,
    Status,
    TrainerRunStatus,
    TrainerStatus,
)
from prime_rl.utils.process import ProcessId
from tests.patience import PATIENCE_S
from tests.patience import until as until
from tests.tui_pilot import PatientPilot
from tests.tui_pilot import screen_text as screen_text
from tests.tui_pilot import sees as sees
from tests.tui_pilot import settled as settled
from tui.app import PrlApp
from tui.model.snapshot import Disk
from tui.screens.base import CommandScreen
from tui.watcher import WorkspaceWatcher
from tui.widgets.header import CommandLine
from tui.widgets.runs_table import RunsTable, make_cell, plain

# What the app has told stays told, however late a test looks.
PrlApp.NOTIFICATION_TIMEOUT = PATIENCE_S
CommandLine.SHOWN_S = PATIENCE_S
NOW = 1_790_000_000.0
MODEL = "models/base"
HOSTILE = "\x1b]2;owned\x07\x1b[31mred [bold]not bold[/] [/] \u202eevil"


def frozen_clock() -> float:
    return NOW


def roomy_disk(path: Path) -> Disk:
    """In place of this machine's disk, which may be as full as it likes."""
    return Disk(free_bytes=400 << 30, total_bytes=1 << 40)


def orch_toml(*, max_steps: int = 100, lr: float = 1e-3, env: str = "reverse-text", extra: str = "") -> str:
    return f"""\
# A run of {env}: the whole request, checked by the trainer.
batch_size = 64
rollouts_per_example = 8
max_steps = {max_steps}
max_async_level = 2
seed = 7
{extra}
[model]
name = "{MODEL}"

[model.lora]
rank = 8
alpha = 16.0

[optim]
type = "adamw"
lr = {lr}
max_norm = 1.0

[scheduler]
type = "cosine"
warmup_steps = 5

[sampling]
temperature = 1.0
max_tokens = 64

[[env]]
id = "{env}"
args = {{ min_len = 3, max_len = 8 }}

[ckpt]
interval = 10
"""


def write_status(path: Path, status: Status, *, updated_at: float = NOW - 1.0) -> None:
    status.sign(ProcessId.of(os.getpid()))
    status.updated_at = updated_at
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(status))


def metrics_lines(num: int, *, seed: int, best: float = 0.9, lr: float = 1e-3) -> tuple[list[str], list[str]]:
    """(orchestrator lines, trainer lines) of `num` steps that look like training."""
    rng = random.Random(seed)
    orchestrator, trainer = [], []
    for step in range(1, num + 1):
        share = 1 - math.exp(-3 * step / 60)
        reward = min(max(best * share + rng.gauss(0, 0.035), 0.0), 1.0)
        time_s = NOW - (num - step) * 12.0
        orchestrator.append(
            json.dumps(
                {
                    "step": step,
                    "time": time_s,
                    "reward/mean": reward,
                    "reward/std": 0.2 * (1 - share) + 0.05,
                    "async_level/max": rng.choice([0, 1, 1, 2]),
                    "completion_len/mean": round(40 + 12 * share, 1),
                    "prompt_len/mean": 31.5,
                    "tokens_per_s": round(1500 + 200 * share),
                    "time/generate": round(6 + 2 * math.sin(step / 5), 1),
                    "time/environment": 0.9,
                    "time/wait_for_policy": round(3 - 2 * math.sin(step / 5), 1),
                    "time/wait_for_inference": 0.3 if step % 17 == 0 else 0.0,
                }
            )
        )
        trainer.append(
            json.dumps(
                {
                    "step": step,
                    "time": time_s,
                    "loss": -0.02 - 0.05 * share * rng.uniform(0.6, 1.2),
                    "entropy": 2.2 * math.exp(-step / 70) + 0.3 + rng.gauss(0, 0.03),
                    "mismatch_kl": abs(rng.gauss(0.0012, 0.0004)),
                    "grad_norm": abs(rng.gauss(0.8, 0.12)) * (1.6 - share),
                    "lr": lr * min(step / 5, 0.5 * (1 + math.cos(math.pi * step / 100))),
                    "tokens_per_s": rng.uniform(1500, 1900),
                    "time/forward_backward": round(5 + math.cos(step / 7), 1),
                    "time/optim": 0.2,
                    "time/broadcast": 0.8,
                    "time/checkpoint": 1.5 if step % 10 == 0 else 0.0,
                }
            )
        )
    return orchestrator, trainer


LOG = [
    "2026-09-21T14:00:01Z INFO    orchestrator: run {run_id}: 8 examples a step, 8 rollouts each",
    "2026-09-21T14:00:02Z INFO    orchestrator: inference at http://127.0.0.1:8000/v1 serves models/base",
    "2026-09-21T14:00:09Z DEBUG   scheduler: 64 rollouts in flight",
    "2026-09-21T14:00:21Z INFO    orchestrator: step 1: reward 0.081, 1.6k tokens/s, version 0",
    "2026-09-21T14:00:33Z WARNING client: request took 8.1 s, retried once",
    "2026-09-21T14:00:45Z INFO    orchestrator: step 2: reward 0.104, 1.7k tokens/s, version 1",
]


def add_run(
    output: OutputDir,
    run_id: str,
    *,
    step: int = 0,
    max_steps: int = 100,
    env: str = "reverse-text",
    seed: int = 1,
    best: float = 0.9,
    status: dict[str, object] | None = None,
    toml: str | None = None,
    seen_s: float = 1.0,
) -> RunDir:
    """One run's folder, with metrics for `step` steps. `status`: the fields of the orchestrator's status."""
    run = RunDir(output.path / run_id)
    for folder in (run.control, run.metrics, run.log.parent):
        folder.mkdir(parents=True)
    run.orch_toml.write_text(toml if toml is not None else orch_toml(max_steps=max_steps, env=env))
    run.log.write_text("\n".join(line.format(run_id=run_id) for line in LOG) + "\n")
    if step:
        orchestrator, trainer = metrics_lines(step, seed=seed, best=best)
        run.orchestrator_metrics.write_text("\n".join(orchestrator) + "\n")
        run.trainer_metrics.write_text("\n".join(trainer) + "\n")
        run.broadcast_dir(step).mkdir(parents=True)
        stable_marker(run.broadcast_dir(step)).touch()
    if status is not None:
        fields = {"step": step, "max_steps": max_steps, "policy_version": max(step - 1, 0), **status}
        status = msgspec.convert({"run_id": run_id, **fields}, RunStatus)
        write_status(run.status, status, updated_at=NOW - seen_s)
    return run


def build_workspace(path: Path, *, living: bool = True) -> OutputDir:
    """Nine runs in every state, a trainer with four slots, inference, a supervisor, a refused entry, an audit log.

    With `living` false the trainer, inference and supervisor have stopped.
    """
    output = OutputDir(path)
    path.mkdir(parents=True, exist_ok=True)
    _add_working(output)
    _add_others(output)
    (path / "run_bad name").mkdir()
    _add_parts(output, living)
    audit = [
        (NOW - 5000, "mia@gpu1", "add", "run_reverse-lr1e-3", "from reverse.toml"),
        (NOW - 3000, "mia@gpu1", "evict", "run_collapsed", "the reward collapsed"),
        (NOW - 2000, "tom@gpu1", "readmit", "run_reverse-lr1e-3", ""),
    ]
    output.logs.mkdir(exist_ok=True)
    keys = ("time", "who", "action", "run_id", "reason")
    output.audit.write_text("".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in audit))
    for file in path.rglob("*.txt"):
        os.utime(file, (NOW - 2900, NOW - 2900))
    for file in path.rglob("orch.toml"):
        os.utime(file, (NOW - 9000, NOW - 9000))
    return output


def _add_working(output: OutputDir) -> None:
    running: dict[str, object] = {"state": "running", "tokens_per_s": 1710.0, "async_level": 1}
    add_run(output, "run_reverse-lr1e-3", step=42, status=running | {"waiting_on": "64 rollouts of step 43 (51 done)"})
    add_run(
        output,
        "run_sort-rank16",
        step=87,
        seed=2,
        best=0.71,
        env="sort-letters",
        status=running | {"tokens_per_s": 940.0, "async_level": 2, "bottleneck": "the trainer (step 86)"},
    )
    add_run(
        output,
        "run_upper",
        step=9,
        max_steps=500,
        seed=3,
        env="upper-case",
        seen_s=61.0,
        status=running | {"tokens_per_s": 120.0},
    )
    add_run(output, "run_queued-a", status={"state": "starting"})
    add_run(output, "run_queued-b")


def _add_others(output: OutputDir) -> None:
    add_run(output, "run_done", step=60, max_steps=60, seed=4, status={"state": "finished"}, seen_s=8000)
    evicted = add_run(output, "run_collapsed", step=31, seed=5, best=0.2, status={"state": "evicted"}, seen_s=3000)
    evicted.evicted.write_text("the reward collapsed\nafter step 25; see the curves")
    invalid = add_run(output, "run_typo", toml=orch_toml(extra='learning_rate = "high"'))
    invalid.config_error.write_text(
        "Error parsing orchestrator config: lab/run_typo/control/orch.toml: learning_rate: unknown key; "
        "valid here: advantage, batch_size, ckpt, client, env"
    )
    add_run(
        output,
        "run_crashed",
        step=17,
        seed=6,
        seen_s=400,
        status={"state": "failed", "reason": "inference refused the adapter three times: rank 64 is more than 16"},
    )


def _add_parts(output: OutputDir, living: bool) -> None:
    slots = {
        "run_reverse-lr1e-3": TrainerRunStatus(run_idx=0, step=42, max_steps=100, lr=7.1e-4, ready=True),
        "run_sort-rank16": TrainerRunStatus(run_idx=1, step=87, max_steps=100, lr=1.2e-4),
        "run_upper": TrainerRunStatus(run_idx=2, step=9, max_steps=500, lr=1e-3),
    }
    trainer = TrainerStatus(
        state="training" if living else "stopped",
        max_runs=4,
        model=MODEL,
        max_rank=16,
        max_seq_len=512,
        runs=slots if living else {},
        waiting=["run_queued-a", "run_queued-b"] if living else [],
        num_updates=138,
        tokens_per_s=2770.0,
    )
    inference = InferenceStatus(
        state="serving" if living else "stopped",
        base_url="http://127.0.0.1:8000/v1",
        engine="vllm",
        model=MODEL,
        adapters=["run_reverse-lr1e-3@v41", "run_sort-rank16@v86"],
        num_running=51,
        tokens_per_s=2850.0,
    )
    write_status(output.trainer_status, trainer)
    write_status(output.inference_status, inference)
    for name, child in (("supervisor", None), ("trainer", 4711), ("inference", 4712)):
        state = "running" if living else "stopped"
        write_status(output.daemon_status(name), DaemonStatus(name=name, state=state, child_pid=child))


def add_samples(run: RunDir, num_steps: int) -> None:
    """Two rollouts of each batch, one of them a game over several turns."""
    samples = SampleFile(run.samples, keep=10_000)
    for step in range(1, num_steps + 1):
        asked = f"user\nReverse: word{step}\nassistant\n"
        good = Sample(
            step, "reverse-text", f"reverse-text/train-{step}", asked, f"{step}drow", 1.0, 0.75, [step - 1], 39, 6
        )
        turns = [SampleTurn(True, "is it 5?"), SampleTurn(False, "user\nlower\nassistant\n"), SampleTurn(True, "3!")]
        said = "".join(turn.text for turn in turns)
        reward = (step % 10) / 20
        versions = [max(step - 2, 0), step - 1]
        game = Sample(step, "guess", f"guess/{step}", "Guess.", said, reward, reward - 0.75, versions, 60, 9, turns)
        samples.append([game, good])


def add_checkpoint(run: RunDir, step: int, *, stable: bool = True, num_bytes: int = 3_000_000) -> None:
    """`checkpoints/step_N`, saved an hour before NOW less its step in minutes."""
    for part in (run.trainer_checkpoint(step), run.orchestrator_checkpoint(step)):
        part.mkdir(parents=True)
    with (run.trainer_checkpoint(step) / "state.safetensors").open("wb") as file:
        file.truncate(num_bytes + step * 1000)
    marker = stable_marker(run.checkpoint_dir(step))
    if stable:
        marker.touch()
    saved_at = NOW - 3600 + step * 60
    os.utime(marker if stable else run.checkpoint_dir(step), (saved_at, saved_at))


def add_history(workspace: OutputDir, run_id: str) -> RunDir:
    """Rollouts, checkpoints, and what trainer and supervisor did, for a run of the workspace that trains."""
    run = RunDir(workspace.path / run_id)
    add_samples(run, 30)
    for step in (10, 20, 30):
        add_checkpoint(run, step)
    add_checkpoint(run, 40, stable=False)
    workspace.log("trainer").write_text(
        f"2026-09-21T12:36:49Z INFO    prime_rl.trainer.runs.manager: {run_id} takes slot 0 at step 0\n"
        f"2026-09-21T12:40:00Z INFO    prime_rl.trainer.checkpoint: {run_id}: checkpoint of step 10 is complete\n"
    )
    workspace.log("supervisor").write_text(
        f"2026-09-21T12:36:50Z INFO    supervisor: {run_id}: pid 4713\n"
        f"2026-09-21T12:36:50Z INFO    supervisor: {run_id}: starting\n"
        f"2026-09-21T12:50:11Z INFO    supervisor: {run_id}: backoff (killed by SIGKILL, exit code -9)\n"
        f"2026-09-21T12:50:13Z INFO    supervisor: {run_id}: pid 4720\n"
    )
    return run


class Ticker:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def has_looked(app: App[None]) -> bool:
    """Whether the home screen is there and has all of the workspace, with its curves, if it has any."""
    snapshot, watcher = getattr(app.screen, "snapshot", None), getattr(app, "watcher", None)
    if isinstance(watcher, WorkspaceWatcher) and not (watcher.is_caught_up and snapshot is watcher._shown):
        return False
    return snapshot is not None and (not snapshot.rows or any(row.tail.rewards for row in snapshot.rows))


@asynccontextmanager
async def opened_app(
    workspace: Path | OutputDir, *keys: str, size: tuple[int, int] = (100, 30), **settings: Any
) -> AsyncIterator[tuple[PrlApp, Pilot[None]]]:
    """The app over a workspace, after its first look and then `keys`. `settings` are PrlApp's; the clock is NOW."""
    path = workspace.path if isinstance(workspace, OutputDir) else workspace
    app = PrlApp(path, **{"clock": frozen_clock, "read_disk": roomy_disk, **settings})
    app.animation_level = "none"
    async with app.run_test(size=size):
        pilot = PatientPilot(app)
        await until(pilot, lambda: has_looked(app), "a look")
        await pilot.press(*keys)
        await pilot.pause()
        yield app, pilot


def cell_text(table: RunsTable, run_id: str, column: str) -> str:
    """The cell of a run in a column, as the table draws it."""
    shown = next(each for each in table._layout if each.key == column)
    row = table._rows[table.run_ids.index(run_id)]
    return plain(make_cell(shown, row, table._now)).strip()


async def command(pilot: Pilot[None], line: str) -> None:
    """Type a command at `:`. The screen below may have a line of its own, so it is waited for."""
    await pilot.press("colon")
    await until(pilot, lambda: isinstance(pilot.app.screen, CommandScreen), "the command line")
    pilot.app.screen.query_one(Input).value = line
    await pilot.press("enter")
