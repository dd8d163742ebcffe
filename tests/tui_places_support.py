"""A machine and a group of nodes as the tests of System, Nodes and Problems need them: always the same."""

from __future__ import annotations

import json
import math
import os

import msgspec

from daemons.machine import DaemonUse, DiskView, GpuView, MachineView
from daemons.workspace import Workspace
from prime_rl.configs.admitted import read_effect, write_admitted
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.metrics import Sign
from prime_rl.contract.notes import SweepPlan, SweepRun
from prime_rl.contract.status import (
    DaemonStatus,
    InferenceStatus,
    NodeStatus,
    PhaseTime,
    RunStatus,
    TrainerRunStatus,
    TrainerStatus,
    read_status,
)
from prime_rl.utils.process import ProcessId
from tests.tui_support import NOW, add_run, orch_toml, write_status
from tui.readers.machine import SystemLook

GIB = 1 << 30


class FakeProbe:
    """A machine of 32 cores with a GPU and a disk that is full in ten hours."""

    def read(self, workspace: Workspace) -> SystemLook:
        daemons = {
            "trainer": DaemonUse(cores=1.52, rss_bytes=3 * GIB, num_processes=3, started_at=NOW - 9000),
            "inference": DaemonUse(cores=0.25, rss_bytes=5 * GIB, num_processes=4, started_at=NOW - 9000),
            "supervisor": DaemonUse(cores=0.002, rss_bytes=38 << 20, num_processes=1, started_at=NOW - 9100),
        }
        gpu = GpuView("NVIDIA H200", 0.87, 96 * GIB, 139 * GIB)
        machine = MachineView(0.34, 32, 11.5, 61 * GIB, 128 * GIB, (gpu,), daemons)
        disk = DiskView(210 * GIB, 1000 * GIB, 42 * GIB, True, "ext4", 36_000.0)
        return SystemLook(machine, disk, updates_per_s=0.21)


def busy(output: OutputDir) -> None:
    """Say more of trainer, inference and two runs than `build_workspace` does: one learns nothing, one was edited."""
    idle, edited = output.run("run_sort-rank16"), output.run("run_reverse-lr1e-3")
    status = read_status(idle.status, RunStatus)
    assert status is not None
    status.signs = [Sign("no_gradient", 0.0, 1e-6, 28)]
    write_status(idle.status, status, updated_at=status.updated_at)
    write_admitted(edited, read_effect(edited), 0)
    edited.orch_toml.write_text(edited.orch_toml.read_text().replace("lr = 0.001", "lr = 0.01"))
    trainer = read_status(output.trainer_status, TrainerStatus)
    inference = read_status(output.inference_status, InferenceStatus)
    assert trainer is not None and inference is not None
    trainer.time_s = {"wait": 2.1, "forward_backward": 6.2, "optim": 0.4, "broadcast": 0.3, "checkpoint": 0.2}
    inference.num_waiting, inference.kv_use = 7, 0.62
    write_status(output.trainer_status, trainer)
    write_status(output.inference_status, inference)


def put_sweep(output: OutputDir) -> None:
    """Six runs that train: a learning rate that does nothing and one that learns, three seeds of each."""
    planned, slots = [], {}
    for lr, best in (("5e-4", 0.3), ("2e-3", 0.9)):
        for seed in (1, 2, 3):
            run_id = f"run_sweep-lr{lr}-seed{seed}"
            toml = orch_toml(lr=float(lr)).replace("seed = 7", f"seed = {seed}")
            slots[run_id] = TrainerRunStatus(run_idx=len(slots), step=60, max_steps=100, lr=float(lr))
            run = add_run(output, run_id, step=60, toml=toml, status={"state": "running", "tokens_per_s": 500.0})
            rewards = {step: best * (1 - math.exp(-step / 20)) + 0.016 * (seed - 2) for step in range(1, 61)}
            lines = [{"step": step, "time": NOW, "reward/mean": reward} for step, reward in rewards.items()]
            run.orchestrator_metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
            planned.append(SweepRun(run_id, {"optim.lr": float(lr), "seed": seed}))
    output.sweep("lrs").parent.mkdir()
    output.sweep("lrs").write_bytes(msgspec.json.encode(SweepPlan("lrs", "base.toml", planned)))
    write_status(output.trainer_status, TrainerStatus(state="training", max_runs=8, runs=slots, tokens_per_s=3000.0))
    write_status(output.inference_status, InferenceStatus(state="serving"))
    write_status(output.daemon_status("supervisor"), DaemonStatus(name="supervisor", state="running"))


def put_node(output: OutputDir, rank: int, **fields: object) -> NodeStatus:
    """Node `rank` of five: at work in phase 4 of iteration 12, in a process that lives, on another machine."""
    history = [
        PhaseTime(iteration=iteration, phase=phase, work_s=work_s * (1 + 0.1 * rank), wait_s=0.2)
        for iteration in range(8, 12)
        for phase, work_s in enumerate(
            [0.3, 30.0 + iteration, 0.3, 0.2, 1.1, 4.0, 0.2, 2.0, 1.0, 0.1, 60.0, 3.0, 9.0, 0.1]
        )
    ]
    base: dict[str, object] = {
        "num_nodes": 5,
        "host": f"gpu-node-{rank}",
        "pid": os.getpid(),
        "pid_create_time": ProcessId.of(os.getpid()).create_time,
        "state": "working",
        "phase": 4,
        "iteration": 12,
        "epoch": 2,
        "seq": 100,
        "heartbeat_s": 2.0,
        "phase_s": 44.0,
        "progress": 12,
        "weight": 2.0 if rank == 0 else 1.0,
        "history": msgspec.to_builtins(history),
    }
    status = msgspec.convert({"rank": rank, **base, **fields}, NodeStatus)
    write_atomic(output.node_status(rank), msgspec.json.encode(status))
    return status


def put_group(output: OutputDir, *, seq: int = 100) -> None:
    """Nodes 0 and 1 wait at the end of phase 4, node 2 works in it, node 3 hangs in phase 3, node 4 has no file."""
    waits = {"state": "waiting", "arrived": True, "waited_s": 41.0, "waiting_on": "node 2, node 3"}
    put_node(output, 0, seq=seq, **waits)
    put_node(output, 1, seq=seq, **waits)
    put_node(output, 2, seq=seq)
    put_node(output, 3, seq=100, phase=3)
