"""Groups of trainer ranks for tests, as torchrun would start them.

    python -m tests.managers_main ranks FOLDER

This process imports torch once and forks the ranks, because an import in each would take most of the time. A group goes
through its scenarios one after another, in one process group; each writes what it found under FOLDER. The store of a
group is in a process of its own, which outlives the ranks, as torchrun's does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.contract.types import USES, Use
from prime_rl.trainer import loop as loop  # here and not in each rank: they have ten seconds to join
from prime_rl.trainer import train as trainer
from prime_rl.trainer.model import part_here
from prime_rl.trainer.runs import get_multi_run_manager
from prime_rl.trainer.world import World, setup_world
from tests.patience import PATIENCE_S
from tests.trainer_support import (
    make_batch,
    published,
    put_batch,
    put_batches,
    trainer_config,
    whole_config,
    write_model,
    write_run,
)

NUM_STEPS = 4
# Where a rank that is silent is missed soon.
SHORT_TIMEOUT_S = 10.0
# Tiny passes: a batch takes several.
TIGHT = {"max_tokens_per_micro_batch": 48, "num_threads": 1}
RUNS: dict[str, dict[str, Any]] = {
    "run_adamw": {
        "seed": 1,
        "model": {"lora": {"rank": 4, "alpha": 16}},
        "optim": {"type": "adamw", "lr": 2e-3, "weight_decay": 0.1, "max_norm": 0.5},
        "scheduler": {"type": "cosine", "warmup_steps": 2},
    },
    "run_sgd": {
        "seed": 2,
        "model": {"lora": {"rank": 8, "alpha": 8}},
        "optim": {"type": "sgd", "lr": 5e-2},
        "loss": {"type": "gspo", "clip_low": 0.3, "clip_high": 0.3, "kl_coef": 0.5, "old_logprobs": "inference"},
    },
    "run_muon": {
        "seed": 3,
        "optim": {"type": "muon", "lr": 1e-2, "betas": [0.8, 0.999]},
        "loss": {"type": "dr_grpo"},
    },
    "run_texts": {"seed": 4, "data": [{"path": "texts.jsonl"}], "sft": {"share": 0.5}},
}
# One has fewer samples than there are ranks.
GROUPED = ("run_adamw", "run_muon")
# A group is in one pass.
ROOMY = {"max_tokens_per_micro_batch": 160}
NUM_SAMPLES = {"run_adamw": 3, "run_sgd": 12, "run_muon": 8, "run_texts": 12}


def put_run(workspace: Path, model: Path, run_id: str, num_steps: int = NUM_STEPS) -> RunDir:
    run = write_run(workspace, run_id, model, max_steps=NUM_STEPS, **RUNS[run_id])
    put_own_batches(run, num_steps)
    return run


def put_own_batches(run: RunDir, num_steps: int) -> None:
    """Those of one of RUNS; one of them has advantages of single tokens, one texts beside its rollouts."""
    run_id, by_token = run.run_id, run.run_id == "run_muon"
    for step in range(1, num_steps + 1):
        batch = make_batch(run_id, step, num_samples=NUM_SAMPLES[run_id], seed=len(run_id), by_token=by_token)
        if run_id == "run_texts":
            uses: list[Use] = [use for use in USES for _ in range(4)]
            samples = [msgspec.structs.replace(each, use=use) for each, use in zip(batch.samples, uses, strict=True)]
            batch = msgspec.structs.replace(batch, samples=samples)
        put_batch(run, batch)


def put_whole_run(workspace: Path, model: Path, num_steps: int = NUM_STEPS) -> RunDir:
    run = write_run(workspace, "run_a", model, max_steps=NUM_STEPS, optim={"lr": 3e-3, "max_norm": 0.7})
    put_batches(run, num_steps, num_samples=5)
    return run


def tight_config(workspace: Path, model: Path, **changes: Any) -> TrainerConfig:
    return trainer_config(workspace, model, **{**TIGHT, **changes})


@dataclasses.dataclass(frozen=True)
class Group:
    """What the ranks of one process group do it with."""

    folder: Path
    model: Path
    world: World

    def workspace(self, name: str) -> Path:
        workspace = self.folder / f"{name}_{self.world.size}"
        workspace.mkdir(exist_ok=True)
        return workspace

    def train(
        self,
        name: str,
        done: Callable[[], bool],
        config_of: Callable[..., TrainerConfig] = trainer_config,
        **changes: Any,
    ) -> None:
        """The real loop on all ranks, until rank 0 finds that it is `done`; then each rank reports what it holds."""
        config = config_of(self.workspace(name), self.model, **{**TIGHT, **changes})
        # Each loop numbers its messages from one.
        world = dataclasses.replace(self.world, store=PrefixStore(name, self.world.store))
        trainer.train(config, world, done)
        (self.workspace(name) / f"rank_{self.world.rank}.json").write_text(json.dumps(holdings()))


def holdings() -> dict[str, Any]:
    """A digest of the adapters of all slots on this rank, and how much of the sharded weights is here."""
    digest, num_here, num_all = hashlib.sha256(), 0, 0
    manager = get_multi_run_manager()
    sharded = [layer.base_layer.weight for layer in manager.layers.values()]
    for layer in manager.layers.values():
        for parameter in (*layer.lora_A, *layer.lora_B):
            digest.update(parameter.detach().numpy().tobytes())
    if not manager.layers:
        sharded = [parameter for _, parameter in manager.get_named_parameters_for_run(0)]
    for weight in sharded:
        num_all += weight.numel()
        num_here += part_here(weight).numel()
    return {"adapters": digest.hexdigest(), "base_here": num_here, "base_all": num_all}


def scenario_together(group: Group) -> None:
    """Three runs with different settings on two slots."""
    workspace = group.workspace("together")
    runs = [RunDir(workspace / run_id) for run_id in RUNS]
    if group.world.is_master:
        runs = [put_run(workspace, group.model, run_id) for run_id in RUNS]
    group.train("together", lambda: all(published(run) == NUM_STEPS for run in runs), max_concurrent_runs=2)


def put_groups(workspace: Path, model: Path) -> list[RunDir]:
    """Two of RUNS with batches of groups, whose prompts are computed once."""
    runs = [write_run(workspace, run_id, model, max_steps=NUM_STEPS, **RUNS[run_id]) for run_id in GROUPED]
    for number, run in enumerate(runs):
        put_batches(run, NUM_STEPS, num_samples=8, seed=number, group=4)
    return runs


def scenario_groups(group: Group) -> None:
    workspace = group.workspace("groups")
    runs = (
        put_groups(workspace, group.model) if group.world.is_master else [RunDir(workspace / each) for each in GROUPED]
    )
    group.train("groups", lambda: all(published(run) == NUM_STEPS for run in runs), **ROOMY)


def scenario_groups_in_sixteen_bits(group: Group) -> None:
    workspace = group.workspace("groups_bf16")
    runs = (
        put_groups(workspace, group.model) if group.world.is_master else [RunDir(workspace / each) for each in GROUPED]
    )
    changes = {**ROOMY, "model": {"dtype": "bfloat16"}}
    group.train("groups_bf16", lambda: all(published(run) == NUM_STEPS for run in runs), **changes)


def scenario_evicted(group: Group) -> None:
    """A run is evicted in the middle of its batch, the next one takes its slot."""
    workspace = group.workspace("evicted")
    first, run, late = (RunDir(workspace / name) for name in ("run_0", "run_adamw", "run_muon"))
    if group.world.is_master:
        write_run(workspace, "run_0", group.model, optim={"lr": 1.0})
        put_batches(first, 30, num_samples=24, seed=5)
        put_run(workspace, group.model, "run_adamw")
    looks = 0

    def done() -> bool:
        nonlocal looks
        looks += published(first) >= 1
        if looks == 3:
            first.evicted.write_text("enough")
            put_run(workspace, group.model, "run_muon")
        return published(run) == NUM_STEPS and published(late) == NUM_STEPS

    group.train("evicted", done, max_concurrent_runs=2)


def scenario_paused(group: Group) -> None:
    """A run is paused amid its training, its neighbour ends meanwhile, and then it is continued."""
    workspace = group.workspace("paused")
    paused, other = RunDir(workspace / "run_adamw"), RunDir(workspace / "run_sgd")
    if group.world.is_master:
        put_run(workspace, group.model, paused.run_id, NUM_STEPS // 2)  # or it may be finished before it is let go
        put_run(workspace, group.model, other.run_id)
    left: list[int] = []

    def done() -> bool:
        if not left and not paused.paused.exists() and published(paused) >= 1:
            paused.paused.write_text("later")
        if not left and paused.paused.exists() and paused.run_id not in get_multi_run_manager().id_2_idx:
            left.append(list_steps(paused.checkpoints, stable_only=True)[-1])
            (workspace / "left.json").write_text(json.dumps(left))
        if left and published(other) == NUM_STEPS and paused.paused.exists():
            put_own_batches(paused, NUM_STEPS)
            paused.paused.unlink()
        return published(paused) == published(other) == NUM_STEPS

    group.train("paused", done)


def scenario_whole(group: Group) -> None:
    """The whole model, for one run."""
    run = RunDir(group.workspace("whole") / "run_a")
    if group.world.is_master:
        run = put_whole_run(group.workspace("whole"), group.model)
    group.train("whole", lambda: published(run) == NUM_STEPS, config_of=whole_config)


def scenario_whole_half(group: Group) -> None:
    run = RunDir(group.workspace("whole_half") / "run_a")
    if group.world.is_master:
        run = put_whole_run(group.workspace("whole_half"), group.model, NUM_STEPS // 2)
    group.train("whole_half", lambda: published(run) == NUM_STEPS // 2, config_of=whole_config)


def scenario_whole_other_half(group: Group) -> None:
    run = RunDir(group.workspace("whole_half") / "run_a")
    group.train("whole_half", lambda: published(run) == NUM_STEPS, config_of=whole_config)


def scenario_half(group: Group) -> None:
    """The first half of each run, to be gone on with by another number of ranks."""
    workspace = group.workspace("half")
    runs = [RunDir(workspace / run_id) for run_id in RUNS]
    if group.world.is_master:
        runs = [put_run(workspace, group.model, run_id, NUM_STEPS // 2) for run_id in RUNS]
    group.train("half", lambda: all(published(run) == NUM_STEPS // 2 for run in runs))


def scenario_other_half(group: Group) -> None:
    workspace = group.workspace("half")
    runs = [RunDir(workspace / run_id) for run_id in RUNS]
    group.train("half", lambda: all(published(run) == NUM_STEPS for run in runs))


SCENARIOS = {
    2: [
        *(scenario_together, scenario_evicted, scenario_paused, scenario_half, scenario_whole, scenario_whole_half),
        *(scenario_groups, scenario_groups_in_sixteen_bits),
    ],
    4: [scenario_together, scenario_groups, scenario_other_half, scenario_whole_other_half],
}


def go_on(folder: Path, num_ranks: int) -> None:
    """What two ranks left half done, with the other batches, for a trainer of `num_ranks`.

    A version that is saved but was not published (a kill in between) is published by the next start.
    """
    workspace = folder / f"half_{num_ranks}"
    shutil.copytree(folder / "half_2", workspace)
    for run_id in RUNS:
        put_own_batches(RunDir(workspace / run_id), NUM_STEPS)
    whole = RunDir(folder / f"whole_half_{num_ranks}" / "run_a")
    shutil.copytree(folder / "whole_half_2", whole.path.parent)
    put_batches(whole, NUM_STEPS, num_samples=5)
    (whole.broadcast_dir(NUM_STEPS // 2) / "STABLE").unlink()


def run_scenarios(folder: Path, size: int) -> int:
    world = setup_world("cpu", PATIENCE_S, num_threads=1)
    group = Group(folder, folder / "model", world)
    for scenario in SCENARIOS[size]:
        scenario(group)
    world.close()
    return 0


def run_entry(workspace: Path, name: str) -> int:
    """The trainer's own entry, with its own workspace."""
    return trainer.main(["@", str(workspace / f"{name}.toml")])


def forked(work: Callable[[], int]) -> int:
    """Pid of a child that ends with what `work` returns. The process that calls must have no threads.

    The store's thread looks up its peers' names, and a child that is forked meanwhile waits for the resolver for ever.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        signal.alarm(int(2 * PATIENCE_S))
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def open_store() -> int:
    """Port of a store that lives as long as this process."""
    read_end, write_end = os.pipe()
    owner = os.getpid()

    def keep() -> int:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write_end, f"{store.port:5}".encode())
        while os.getppid() == owner:
            time.sleep(0.1)
        return 0

    forked(keep)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        return int(pipe.read(5))


class Ranks:
    """The processes of one group."""

    def __init__(self, size: int, log: Path, work: Callable[[], int], port: int | None = None) -> None:
        self.port = port or open_store()
        self.pids = [forked(lambda rank=rank: self._be(rank, size, log, work)) for rank in range(size)]

    def _be(self, rank: int, size: int, log: Path, work: Callable[[], int]) -> int:
        descriptor = os.open(f"{log}_{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        return work()

    def wait(self) -> list[int]:
        """Exit codes by rank; a signal is negative."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def lose_a_rank(folder: Path, name: str, size: int, victim: int, *, busy: bool) -> list[int]:
    """Start the trainer's entry on `size` ranks, kill one of them with -9, and see how the others end."""
    workspace, model = folder / name, folder / "model"
    run = write_run(workspace, "run_a", model)
    put_batches(run, 60 if busy else 1)
    config = tight_config(workspace, model, dist_timeout_s=SHORT_TIMEOUT_S)
    (workspace / f"{name}.toml").write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_unset=True)))
    ranks = Ranks(size, folder / name / "rank", lambda: run_entry(workspace, name))
    wait_for(lambda: published(run) >= 1, f"{name}: version 1", timeout_s=PATIENCE_S)
    os.kill(ranks.pids[victim], signal.SIGKILL)
    codes = ranks.wait()
    return codes if busy else codes + start_again(workspace, name, ranks, run)


def start_again(workspace: Path, name: str, dead: Ranks, run: RunDir) -> list[int]:
    """As torchrun does, which keeps its store: the same ranks once more, until they trained one more batch."""
    before = published(run)
    put_batch(run, make_batch(run.run_id, before + 1))
    config = tight_config(workspace, workspace.parent / "model", dist_timeout_s=PATIENCE_S)  # none is lost here
    (workspace / "again.toml").write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_unset=True)))
    ranks = Ranks(len(dead.pids), workspace / "again", lambda: run_entry(workspace, "again"), dead.port)
    wait_for(lambda: published(run) == before + 1, f"{name}: the next version", timeout_s=PATIENCE_S)
    for pid in ranks.pids:
        os.kill(pid, signal.SIGTERM)
    return ranks.wait()


def run_ranks(folder: Path) -> None:
    torch.set_num_threads(1)
    write_model(folder / "model")

    def note_codes(name: str, codes: list[int]) -> int:
        (folder / f"codes_{name}.json").write_text(json.dumps(codes))
        return 0

    for size in SCENARIOS:
        ranks = Ranks(size, folder / f"scenarios_{size}", lambda size=size: run_scenarios(folder, size))
        note_codes(str(size), ranks.wait())
        go_on(folder, 4 if size == 2 else 1)
    # Mostly waiting, so both at once.
    idle = forked(lambda: note_codes("idle", lose_a_rank(folder, "idle", 2, 0, busy=False)))
    note_codes("busy", lose_a_rank(folder, "busy", 4, 2, busy=True))
    os.waitpid(idle, 0)
