"""What a node really does in each phase: rollouts, evaluation, the joining of both, training, the servers.

Every piece of work is a process of another package or a file; the master alone writes plans and proofs. A proof that is
there already is never made again, so a phase can be done again after a restart or in a new round. When the group is in
which phase is not decided here (`decide`).
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import tomli_w

from prime_rl.configs.multinode import RUN_ID, MultinodeConfig
from prime_rl.contract.files import staged_dir, write_atomic
from prime_rl.contract.layout import IterationDir, OutputDir, stable_marker
from prime_rl.contract.rank_files import read_rank_file
from prime_rl.contract.shares import JoinRequest, MakeRequest, Split
from prime_rl.multinode.children import Child
from prime_rl.multinode.decide import MASTER_RANK
from prime_rl.multinode.member import Report
from prime_rl.multinode.phases import Phase, Position, RlPhase, eval_is_due, first_position
from prime_rl.multinode.records import GroupRecord
from prime_rl.multinode.split import Plan, make_plan
from prime_rl.multinode.tasks import InferenceServer, Now, Process, Task

# Proofs, the last first, and where a group goes on that has it and none before it in this list.
_AFTER = (
    ("checkpoint", Phase.RESTART_INFERENCE),
    ("update", Phase.CONFIG_READY),
    ("eval", Phase.STOP_INFERENCE),
    ("train", Phase.EVAL_ROLLOUT),
)


@dataclass(frozen=True)
class WorkSetting:
    """What one node's work needs to know beside the config.

    Attributes:
        address: this node's, as the others reach it.
        master: the master's, once it is known.
        weights: of all ranks.
        splits: which rollouts are made.
        max_iterations: None: endless.
    """

    rank: int
    incarnation: str
    rl_phase: RlPhase
    weights: tuple[float, ...]
    address: str
    master: Callable[[], str | None]
    eval_interval: int | None
    splits: frozenset[Split]
    max_iterations: int | None


def find_resume(output: OutputDir, rl_phase: RlPhase) -> Position:
    """Where a new epoch goes on: after the last proof that is complete."""
    iteration = 1
    while output.iteration(iteration).proof("done").exists():
        iteration += 1
    folder = output.iteration(iteration)
    opening = first_position(rl_phase, iteration)
    for name, phase in _AFTER:
        if folder.proof(name).exists():
            return max(Position(iteration, phase), opening)
    return opening


class PhaseWork:
    """The work of one node; see `Work` in `member`."""

    def __init__(self, setting: WorkSetting, config: MultinodeConfig, output: OutputDir) -> None:
        self._setting = setting
        self._config = config
        self._output = output
        self._run = output.run(RUN_ID)
        self._task: Task | None = None
        self._position = Position(0, Phase.START)
        self._group: GroupRecord | None = None
        self._server = InferenceServer(self._start_server, self._status_file)

    def begin(self, position: Position, group: GroupRecord) -> None:
        if self._task is not None:
            self._task.stop()
        self._position, self._group = position, group
        self._iteration.path.mkdir(parents=True, exist_ok=True)
        self._task = self._make_task(position.phase)

    def look(self) -> Report:
        assert self._task is not None
        return self._task.look()

    def stop(self) -> None:
        """End everything that this node has started."""
        if self._task is not None:
            self._task.stop()
        self._server.end()

    # -- which work ----

    def _make_task(self, phase: Phase) -> Task:
        works: Mapping[Phase, Callable[[], Task]] = {
            Phase.START: self._serve,
            Phase.TRAIN_ROLLOUT: lambda: self._rollout("train"),
            Phase.EVAL_ROLLOUT: lambda: self._rollout("eval"),
            Phase.STOP_INFERENCE: self._stop_serving,
            Phase.TRAIN: self._train,
            Phase.RESTART_INFERENCE: self._serve,
        }
        of_master: Mapping[Phase, Callable[[], Task]] = {
            Phase.FILES_READY: lambda: Now(lambda: self._sources("train") is not None),
            Phase.AGGREGATE: lambda: Now(self._aggregate),
            Phase.EVAL_AGGREGATE: self._aggregate_eval,
            Phase.PREPARE: self._prepare,
            Phase.COPY_CHECKPOINT: lambda: Now(self._copy_checkpoint),
            Phase.FINAL: lambda: Now(self._finish),
        }
        of_workers: Mapping[Phase, Callable[[], Task]] = {
            Phase.CONFIG_READY: lambda: Now(self._iteration.proof("update").exists),
        }
        make = works.get(phase) or (of_master if self._is_master else of_workers).get(phase)
        return make() if make else Now(lambda: True)

    @property
    def _is_master(self) -> bool:
        return self._setting.rank == MASTER_RANK

    @property
    def _iteration(self) -> IterationDir:
        return self._output.iteration(self._position.iteration)

    @property
    def _steps(self) -> list[int]:
        """The updates of this iteration."""
        count = self._config.updates_per_iteration
        return [(self._position.iteration - 1) * count + number for number in range(1, count + 1)]

    @property
    def _version(self) -> int:
        """The policy version that makes this iteration's rollouts."""
        return self._steps[0] - 1

    # -- servers ----

    @property
    def _status_file(self) -> Path:
        return self._output.multinode / f"inference_{self._setting.rank}.json"

    def _serve(self) -> Task:
        if self._is_master:
            self._write_run()
        self._server.start()
        return _Serving(self._server)

    def _stop_serving(self) -> Task:
        self._server.end()
        return Now(lambda: True)

    def _start_server(self) -> Child:
        toml = self._output.multinode / f"inference_{self._setting.rank}.toml"
        write_atomic(toml, tomli_w.dumps(self._config.inference_toml(self._output.path, self._status_file)))
        return self._child("inference", [sys.executable, "-m", "prime_rl.inference.server", "@", str(toml)])

    def _write_run(self) -> None:
        text = tomli_w.dumps(self._config.orchestrator(self._setting.max_iterations))
        run = self._run
        for folder in (run.control, run.rollouts, run.broadcast, run.checkpoints, run.metrics):
            folder.mkdir(parents=True, exist_ok=True)
        if not self._run.orch_toml.exists() or self._run.orch_toml.read_text() != text:
            write_atomic(self._run.orch_toml, text)

    # -- rollouts ----

    def _rollout(self, split: Split) -> Task:
        if self._is_master:
            self._write_plan(split)
        self._server.start()  # a node that came in the middle has none yet
        rank_file = self._iteration.rank_file(split, self._setting.rank, self._setting.incarnation)

        def start() -> Child | None:
            plan = _read(self._plan_path(split), Plan)
            if plan is None or not self._run.orch_toml.exists():
                return None
            tasks = list(plan.parts.get(self._setting.rank, ()))
            if not tasks:
                return self._child("nothing", [sys.executable, "-c", ""])
            if (url := self._server.url) is None:
                return None
            request = MakeRequest(
                run=str(self._run.path),
                base_url=url,
                policy_version=self._version,
                seq_len=self._config.seq_len,
                split=split,
                tasks=tasks,
                rank_file=str(rank_file),
            )
            return self._worker("make", split, request)

        return Process(start, measure=lambda: _size(rank_file))

    def _write_plan(self, split: Split) -> None:
        assert self._group is not None
        tasks = self._tasks(split)
        finished = {
            str(path): [entry.task for entry in read_rank_file(path)] for path in self._iteration.rank_files(split)
        }
        weights = {rank: self._setting.weights[rank] for rank in self._group.members}
        plan = make_plan(tasks, finished if tasks else {}, weights, seed=self._position.iteration)
        write_atomic(self._plan_path(split), msgspec.json.encode(plan))

    def _plan_path(self, split: Split) -> Path:
        assert self._group is not None
        # A round that came after the rollouts has no plan of its own.
        paths = [self._iteration.plan(split, self._group.epoch, number) for number in range(self._position.round + 1)]
        wanted = {Phase.TRAIN_ROLLOUT: "train", Phase.EVAL_ROLLOUT: "eval"}.get(self._position.phase) == split
        return paths[-1] if wanted else next((path for path in reversed(paths) if path.exists()), paths[0])

    def _tasks(self, split: Split) -> list[str]:
        count = self._config.groups_per_iteration
        if split not in self._setting.splits:
            return []
        if split == "train":
            first = (self._position.iteration - 1) * count
            return [str(first + number) for number in range(count)]
        run = self._config.run
        if not run.get("eval") or not eval_is_due(self._position.iteration, self._setting.eval_interval):
            return []
        num_envs = len(run["eval"].get("env", run.get("env", [])))
        return [str(number) for number in range(num_envs * run["eval"].get("num_examples", 16))]

    def _sources(self, split: Split) -> dict[str, str] | None:
        """The file of each task, or None while some are not there (or not to be seen yet)."""
        plan = _read(self._plan_path(split), Plan)
        if plan is None:
            return None
        sources = {task: path for path, tasks in plan.taken.items() for task in tasks}
        assigned = {task: rank for rank, tasks in plan.parts.items() for task in tasks}
        for path in self._iteration.rank_files(split):
            for entry in read_rank_file(path):
                if entry.task in assigned and path.name.startswith(f"{split}_rank_{assigned[entry.task]}_"):
                    sources.setdefault(entry.task, str(path))
        return sources if sources.keys() == set(self._tasks(split)) else None

    def _aggregate(self) -> bool:
        if self._iteration.proof("train").exists():
            return True
        sources = self._sources("train")
        if sources is None:
            return False
        digests = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in sorted(set(sources.values()))}
        self._prove("train", {"policy_version": self._version, "sources": sources, "sha256": digests})
        return True

    def _aggregate_eval(self) -> Task:
        if self._iteration.proof("eval").exists() or not self._tasks("eval"):
            return Now(lambda: self._prove("eval", {"due": False}))

        def start() -> Child | None:
            sources = self._sources("eval")
            return None if sources is None else self._join("eval", sources, [self._version], "eval")

        return Process(start, finish=self._iteration.proof("eval").exists)

    # -- the update ----

    def _prepare(self) -> Task:
        """The batch files of this iteration's updates, and the trainer's config."""
        if self._iteration.proof("update").exists():
            return Now(lambda: True)
        self._write_run()
        toml = self._config.trainer_toml(self._output.path) | {"stop_after_step": self._steps[-1]}
        write_atomic(self._trainer_toml, tomli_w.dumps(toml))
        proof = msgspec.json.decode(self._iteration.proof("train").read_bytes())
        return Process(
            lambda: self._join("train", proof["sources"], self._steps, "update"),
            finish=self._iteration.proof("update").exists,
        )

    @property
    def _trainer_toml(self) -> Path:
        return self._iteration.path / "trainer.toml"

    def _train(self) -> Task:
        self._server.end()

        def start() -> Child | None:
            master = self._setting.master()
            return self._child("trainer", self._torchrun(master)) if master else None

        return Process(
            start, measure=lambda: _size(self._run.trainer_metrics), finish=self._is_published, is_shared=True
        )

    def _torchrun(self, master: str) -> list[str]:
        assert self._group is not None
        name = f"{self._group.epoch}-{self._position.iteration}-{self._position.round}"
        conf = f"is_host={int(self._is_master)},join_timeout=120,last_call_timeout=1"
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(self._group.members)), "--nproc-per-node", "1", "--max-restarts", "0"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{master}:{self._config.rendezvous_port}"),
            *("--rdzv-id", name, "--rdzv-conf", conf, "--local-addr", self._setting.address),
            *("-m", "prime_rl.trainer.train", "@", str(self._trainer_toml)),
        ]

    def _is_published(self) -> bool:
        return stable_marker(self._run.broadcast_dir(self._steps[-1])).exists()

    def _copy_checkpoint(self) -> bool:
        if self._iteration.proof("checkpoint").exists():
            return True
        if not self._is_published():
            return False
        step = self._steps[-1]
        adapter = self._iteration.path / "adapter"
        with staged_dir(adapter) as folder:
            shutil.copytree(self._run.broadcast_dir(step), folder, dirs_exist_ok=True)
        self._prove("checkpoint", {"step": step, "adapter": str(adapter)})
        return True

    def _finish(self) -> bool:
        return self._prove("done", {"iteration": self._position.iteration})

    # -- helpers ----

    def _prove(self, name: str, content: Mapping[str, object]) -> bool:
        path = self._iteration.proof(name)
        if not path.exists():
            write_atomic(path, msgspec.json.encode(content))
        return True

    def _join(self, split: Split, sources: dict[str, str], steps: list[int], proof: str) -> Child:
        result = str(self._iteration.proof(proof))
        request = JoinRequest(run=str(self._run.path), split=split, sources=sources, steps=steps, result=result)
        return self._worker("join", split, request)

    def _worker(self, what: str, split: Split, request: MakeRequest | JoinRequest) -> Child:
        path = self._iteration.request(f"{split}_{what}", self._setting.rank)
        write_atomic(path, msgspec.json.encode(request))
        argv = [sys.executable, "-m", "prime_rl.orchestrator.share", what, str(path)]
        return self._child(f"{split}_{what}", argv)

    def _child(self, name: str, argv: list[str]) -> Child:
        return Child(name, argv, self._output.log(f"node_{self._setting.rank}_{name}"))


class _Serving:
    """Waits until the server serves; the server outlives the phase."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server

    def look(self) -> Report:
        return self._server.look()

    def stop(self) -> None:
        """The server goes on."""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, kind: type[Plan]) -> Plan | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
