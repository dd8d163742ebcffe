"""Managers that are made directly in groups of gloo ranks, and a trainer of two ranks that has nothing to do for long.

    python -m tests.managers_main managers FOLDER
    python -m tests.managers_main ranks FOLDER       what `ranks_main` does: one import of torch for both

Ranks are forked from one process (see `ranks_main`). What each found is in FOLDER/facts_SIZE_RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist
from torch import nn

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import wait_for
from prime_rl.contract.status import TrainerStatus, read_status
from prime_rl.lora.linear import MultiLoRALinear
from prime_rl.trainer.runs import MultiRunManager, setup_multi_run_manager
from tests.patience import PATIENCE_S
from tests.ranks_main import Ranks, run_entry, run_ranks, tight_config
from tests.runs_support import add
from tests.trainer_support import make_batch, published, put_batch, write_model, write_run

SIZES = (4, 2, 1)
# Small, but a rank that has to share two cores with many others still beats in time.
IDLE_TIMEOUT_S = 10.0


def state_of(manager: MultiRunManager) -> dict[str, Any]:
    """What must be the same on all ranks. JSON makes the keys of dicts strings."""
    return {
        "idx_2_id": {str(idx): run_id for idx, run_id in manager.idx_2_id.items()},
        "id_2_idx": manager.id_2_idx,
        "used": sorted(manager.used_idxs),
        "unused": sorted(manager.unused_idxs),
        "dirs": [path.name for path in manager.run_dirs()],
        "ready": manager.ready_to_update_idxs,
        "progress": [list(vars(manager.progress[idx]).values()) for idx in sorted(manager.used_idxs)],
        "scaling": [manager.scaling_factors[idx] for idx in sorted(manager.used_idxs)],
        "names": [manager.config[idx].model.name for idx in sorted(manager.used_idxs)],
    }


def sum_of(manager: MultiRunManager, idx: int) -> float:
    return float(sum(tensor.double().abs().sum() for tensor in manager.get_state_dict_for_run(idx).values()))


def refused_here(manager: MultiRunManager) -> list[str]:
    """Which of the calls that are for rank 0 alone raise on this rank."""

    def no_hook(*arguments: object) -> tuple[bool, str]:
        return True, ""

    refused = []
    for name, arguments in (
        ("register_discovered_hook", [no_hook]),
        ("register_forgotten_hook", [no_hook]),
        ("register_config_validation_hook", [no_hook]),
        ("discover_runs", []),
        ("evict_run", [0, "test"]),
    ):
        try:
            getattr(manager, name)(*arguments)
        except RuntimeError:
            refused.append(name)
    return refused


def drive(workspace: Path) -> dict[str, Any]:
    """One manager's life on this rank, beside another manager whose messages must not mix with its own."""
    rank, is_last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    manager = MultiRunManager(output_dir=workspace, max_runs=3)
    other = setup_multi_run_manager(workspace / "other", 1)
    layer = MultiLoRALinear(base_layer=nn.Linear(6, 4), rank=8, n_adapters=manager.max_runs)
    layer.register_with_runs(manager, "model.layer")
    facts: dict[str, Any] = {}
    calls: list[str] = []

    def scale(idx: int, run_id: str, config: OrchestratorConfig) -> None:
        manager.scaling_factors[idx] = 3.5 + idx

    def picky(idx: int, run_id: str) -> None:
        if run_id == "run_bad" and is_last:
            raise ValueError("no room here")

    def meet(idx: int, run_id: str) -> None:
        dist.barrier()
        calls.append(f"creation {run_id}")

    def part(idx: int, run_id: str) -> None:
        dist.barrier()
        calls.append(f"deletion {run_id}")

    if rank == 0:
        manager.register_discovered_hook(scale)
    manager.register_creation_hook(picky)
    manager.register_creation_hook(meet)
    manager.register_deletion_hook(part)

    def look() -> dict[str, Any]:
        if rank == 0:
            other.discover_runs()
            manager.discover_runs()
        other.synchronize_state()
        manager.synchronize_state()
        return state_of(manager)

    facts["first"] = look()
    facts["layer_scaling"] = layer.routing.scaling[1]
    facts["weights"] = sum_of(manager, 1)
    facts["other"] = other.id_2_idx
    if rank == 0:
        manager.progress[1].step, manager.progress[1].total_tokens, manager.progress[1].total_samples = 5, 70, 8
        manager.ready_to_update[1] = True
    manager.synchronize_state()
    facts["told"] = state_of(manager)
    if rank == 0:
        manager.evict_run(idx=1, reason="Run exceeded memory limits")
        add(workspace, "run_late", landed=9)
    facts["evicted"] = state_of(manager)
    facts["last"] = look()
    facts["calls"] = calls
    facts["refused"] = refused_here(manager)
    return facts


def drive_in_groups(folder: Path) -> int:
    """Four ranks over the store of their launcher, then two over a file, then one: each time a new process group."""
    rank = int(os.environ["RANK"])
    for size in SIZES:
        if rank >= size:
            break
        workspace = folder / f"workspace_{size}"
        store = f"file://{folder}/store_{size}"
        where: dict[str, Any] = {} if size == 4 else {"init_method": store, "rank": rank, "world_size": size}
        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S), **where)
        (folder / f"facts_{size}_{rank}.json").write_text(json.dumps(drive(workspace)))
        dist.barrier()
        dist.destroy_process_group()
    return 0


def idle_for_long(ranks: Ranks, workspace: Path) -> list[int]:
    """Nothing to do for three times the timeout, then one batch, then a stop; the exit codes."""
    run = write_run(workspace, "run_a", workspace.parent / "model")

    def waits() -> bool:
        status = read_status(workspace / "trainer" / "status.json", TrainerStatus)
        return status is not None and status.waiting_on == "a batch of run_a (step 1)"

    wait_for(waits, "the trainer to wait for a batch", timeout_s=PATIENCE_S)
    until = time.monotonic() + 3 * IDLE_TIMEOUT_S
    wait_for(lambda: time.monotonic() >= until, "time to pass")
    put_batch(run, make_batch("run_a", 1))
    wait_for(lambda: published(run) == 1, "the batch to be trained on", timeout_s=PATIENCE_S)
    for pid in reversed(ranks.pids):  # rank 0, which stops all, is asked last: so each of them was asked
        os.kill(pid, signal.SIGTERM)
    return ranks.wait()


def run_managers(folder: Path) -> None:
    torch.set_num_threads(1)
    model, workspace = write_model(folder / "model"), folder / "idle"
    for size in SIZES:
        add(folder / f"workspace_{size}", "run_bad", landed=1)
        add(folder / f"workspace_{size}", "run_good", landed=2, model={"lora": {"rank": 4}})
        add(folder / f"workspace_{size}" / "other", "run_other")
    workspace.mkdir()
    config = tight_config(workspace, model, dist_timeout_s=IDLE_TIMEOUT_S)
    (workspace / "idle.toml").write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_unset=True)))
    idle = Ranks(2, workspace / "rank", lambda: run_entry(workspace, "idle"))
    codes = {"managers": Ranks(max(SIZES), folder / "managers", lambda: drive_in_groups(folder)).wait()}
    codes["idle"] = idle_for_long(idle, workspace)
    (folder / "codes.json").write_text(json.dumps(codes))


def main(argv: Sequence[str]) -> None:
    what, folder = argv
    {"managers": run_managers, "ranks": run_ranks}[what](Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
