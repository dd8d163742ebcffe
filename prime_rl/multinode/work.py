"""What a node really does in each phase: rollouts, evaluation, the joining of both, training, the servers.

Every piece of work is a process of another package or a file; the master alone writes plans and proofs. A proof that is
there already is never made again, so a phase can be done again after a restart or in a new round. When the group is in
which phase is not decided here (`decide`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import tomli_w

from prime_rl.configs.multinode import RUN_ID, MultinodeConfig
from prime_rl.contract.files import staged_dir, wait_for, write_atomic
from prime_rl.contract.layout import IterationDir, OutputDir, list_steps, stable_marker
from prime_rl.contract.rank_files import read_rank_file
from prime_rl.contract.shares import JoinRequest, MakeRequest, Split
from prime_rl.multinode.children import END_TIMEOUT_S, Child
from prime_rl.multinode.decide import MASTER_RANK
from prime_rl.multinode.member import Report
from prime_rl.multinode.phases import Phase, Position, RlPhase, eval_is_due
from prime_rl.multinode.records import GroupRecord
from prime_rl.multinode.split import Plan, make_plan
from prime_rl.multinode.tasks import InferenceServer, Now, Process, Serving, Task
from prime_rl.utils.network import interface_of


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


class PhaseWork:
    """The work of one node; see `Work` in `member`."""

    def __init__(self, setting: WorkSetting, config: MultinodeConfig, output: OutputDir) -> None:
        self._setting = setting
        self._config = config
        self._output = output
        self._run = output.run(RUN_ID)
        self._task: Task | None = None
        self._given_up: Task | None = None
        self._position = Position(0, Phase.START)
        self._group: GroupRecord | None = None
        self._server = InferenceServer(self._start_server, self._status_file)

    def begin(self, position: Position, group: GroupRecord) -> None:
        if self._task is not None:
            self._task.give_up()
        self._position, self._group = position, group
        self._given_up, self._task = self._task, None

    def look(self) -> Report:
        try:
            if self._task is None:
                if self._given_up is not None and not self._given_up.has_ended:
                    return Report()
                self._iteration.path.mkdir(parents=True, exist_ok=True)
                self._task = self._make_task(self._position.phase)
            return self._task.look()
        except OSError as error:  # a full disk, a shared folder that is gone for a while
            return Report(error=f"{type(error).__name__}: {error}", may_heal=True)
        except ValueError as error:  # nothing to train on, a damaged proof, nobody left who may make rollouts
            return Report(error=str(error))

    def stop(self) -> None:
        """End everything that this node has started, and wait for it."""
        for task in (self._task, self._given_up, self._server):
            if task is not None:
                task.give_up()
        wait_for(lambda: self._is_idle, "what this node has started to end", timeout_s=END_TIMEOUT_S)

    @property
    def _is_idle(self) -> bool:
        return all(task is None or task.has_ended for task in (self._task, self._given_up, self._server))

    # -- which work ----

    def _make_task(self, phase: Phase) -> Task:
        works: Mapping[Phase, Callable[[], Task]] = {
            Phase.START: self._begin,
            Phase.TRAIN_ROLLOUT: lambda: self._rollout("train"),
            Phase.EVAL_ROLLOUT: lambda: self._rollout("eval"),
            Phase.STOP_INFERENCE: self._stop_serving,
            Phase.TRAIN: self._train,
            Phase.RESTART_INFERENCE: self._restart,
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
        """The policy version that makes this iteration's rollouts. Where nobody trains it stays the newest there is."""
        wanted = self._steps[0] - 1
        if self._setting.rl_phase is not RlPhase.ROLLOUT:
            return wanted
        return min(wanted, max(list_steps(self._run.broadcast, stable_only=True), default=0))

    # -- servers ----

    @property
    def _status_file(self) -> Path:
        return self._output.multinode / f"inference_{self._setting.rank}.json"

    def _begin(self) -> Task:
        """The server gets ready while the group goes on; who needs it waits for it."""
        if self._is_master:
            self._write_run()
        self._server.start()
        return Now(lambda: True)

    def _restart(self) -> Task:
        if self._position.iteration == self._setting.max_iterations:
            return Now(lambda: True)
        self._server.start()
        return Serving(self._server)

    def _stop_serving(self) -> Task:
        self._server.give_up()
        return Now(lambda: self._server.has_ended)

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

        return Process(start, needs=self._server.failure, measure=lambda: _size(rank_file))

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
        if self._iteration.proof("train").exists() or not self._tasks("train"):
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
        sources = self._sources_to_train()
        return Process(
            lambda: self._join("train", sources, self._steps, "update"),
            finish=self._iteration.proof("update").exists,
        )

    def _sources_to_train(self) -> dict[str, str]:
        """Raises ValueError when this iteration has no rollouts that an update may learn from."""
        path = self._iteration.proof("train")
        if not path.exists():
            raise ValueError(f"{path} is not there: make the rollouts first, with --rl-phase rollout")
        proof = msgspec.json.decode(path.read_bytes())
        if proof["policy_version"] != self._version:
            found = f"{path}: rollouts of policy version {proof['policy_version']}"
            raise ValueError(f"{found} cannot train version {self._steps[0]}; only those of {self._version} can")
        return dict(proof["sources"])

    @property
    def _trainer_toml(self) -> Path:
        return self._iteration.path / "trainer.toml"

    def _train(self) -> Task:
        self._server.give_up()  # of a group that came here from its first phase
        if self._is_published():  # by those who were killed right after; a trainer would wait for more to do
            return Now(lambda: self._server.has_ended)

        def start() -> Child | None:
            master = self._setting.master()
            if master is None or not self._server.has_ended:
                return None
            return self._child("trainer", self._torchrun(master), self._network())

        return Process(
            start, measure=lambda: _size(self._run.trainer_metrics), finish=self._is_published, is_shared=True
        )

    def _network(self) -> dict[str, str]:
        """The ranks meet on this node's interface, not on the one that its name happens to lead to (often loopback)."""
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        interface = interface_of(self._setting.address)
        return {name: interface for name in names if interface and name not in os.environ}

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

    def _child(self, name: str, argv: list[str], environment: Mapping[str, str] | None = None) -> Child:
        return Child(name, argv, self._output.log(f"node_{self._setting.rank}_{name}"), environment or {})


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
