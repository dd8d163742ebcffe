"""The real work of a node in each phase, and its inference server.

Every piece of work is a process of another package or a file; the master alone writes plans and proofs. A proof that
holds is never made again, so a phase can be done again after a restart or in a new round. When the group is in which
phase is not decided here (`decide`).

The work of rollouts is the same for training and for evaluation. A plan divides the tasks. A task that is in any rank
file is not made again. The weights of the ranks divide an iteration's tasks exactly, and the same on every node, by the
largest remainder method (Hamilton): each rank gets the whole part of its quota, and the tasks that are left go to the
largest fractions, ties to the lower rank. No floats are added up.
"""

from __future__ import annotations

import os
import queue
import random
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from prime_rl.configs.multinode import MultinodeConfig
from prime_rl.contract.files import read_json, staged_dir, write_atomic
from prime_rl.contract.layout import OutputDir, stable_marker
from prime_rl.contract.types import MakeRequest, Split, read_rank_file
from prime_rl.multinode.member import Report
from prime_rl.multinode.place import (
    MAX_PROOF_BYTES,
    SERVER,
    Child,
    InferenceServer,
    Nothing,
    Now,
    Place,
    Process,
    Task,
    TrainProof,
    WorkSetting,
    size,
)
from prime_rl.multinode.records import GroupRecord, Phase, Position, RlPhase
from prime_rl.utils.runtime import bound_socket, interface_of


def split_counts(num_tasks: int, weights: Sequence[float]) -> list[int]:
    """The number of tasks of each rank; they sum to `num_tasks`. Raises ValueError for weights that divide nothing."""
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    if total <= 0 or any(weight < 0 for weight in exact):
        raise ValueError(f"rank weights {list(weights)}: they must be 0 or more, and not all 0")
    quotas = [num_tasks * weight / total for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_fraction = sorted(range(len(quotas)), key=lambda rank: (counts[rank] - quotas[rank], rank))
    for rank in by_fraction[: num_tasks - sum(counts)]:
        counts[rank] += 1
    return counts


def assign(tasks: Sequence[str], weights: Mapping[int, float], seed: int) -> dict[int, list[str]]:
    """The tasks of each rank: disjoint, complete, and decided by (tasks, weights, seed) alone.

    Tasks are shuffled first, so a rank does not get all of one kind; a rank's own part keeps the tasks' order.
    Raises ValueError for a task that is there twice.
    """
    place = {task: number for number, task in enumerate(tasks)}
    if len(place) != len(tasks):
        raise ValueError("duplicate task")
    shuffled = list(tasks)
    random.Random(f"tasks {seed}").shuffle(shuffled)
    ranks = sorted(weights)
    parts: dict[int, list[str]] = {}
    start = 0
    for rank, count in zip(ranks, split_counts(len(shuffled), [weights[rank] for rank in ranks]), strict=True):
        parts[rank] = sorted(shuffled[start : start + count], key=place.__getitem__)
        start += count
    return parts


@dataclass(frozen=True)
class Plan:
    """The tasks of each rank in one round. `taken` names, file by file, what is finished already and counts from there.

    What a late rank adds to a file after the plan was made does not count, so no task counts twice.
    `policy_version` makes the rest, of the examples that `sampler_state` leads to.
    """

    taken: Mapping[str, Sequence[str]]
    parts: Mapping[int, Sequence[str]]
    policy_version: int = 0
    sampler_state: Mapping[str, Any] = field(default_factory=dict)


def make_plan(
    tasks: Sequence[str],
    finished: Mapping[str, Sequence[str]],
    weights: Mapping[int, float],
    seed: int,
    policy_version: int = 0,
    sampler_state: Mapping[str, Any] | None = None,
) -> Plan:
    """Keep what is finished (by file name), divide the rest by weight. Each task is in exactly one place."""
    open_tasks = dict.fromkeys(tasks)
    taken: dict[str, list[str]] = {}
    for name in sorted(finished):
        kept = [task for task in finished[name] if task in open_tasks]
        for task in kept:
            open_tasks.pop(task, None)
        if kept:
            taken[name] = list(dict.fromkeys(kept))
    parts = assign(list(open_tasks), weights, seed) if open_tasks else {rank: [] for rank in sorted(weights)}
    return Plan(taken, parts, policy_version, sampler_state or {})


class Rollouts:
    """Phases 1 to 6 of one node."""

    def __init__(self, place: Place, server: InferenceServer) -> None:
        self._place = place
        self._server = server

    # -- making ----

    def make(self, split: Split) -> Task:
        """This node's part of the newest plan. Its server is started when there is something to make."""
        place, rank = self._place, self._place.setting.rank
        if place.is_master:
            self._write_plan(split)
        path: Path | None = None

        def start() -> Child | Nothing | None:
            nonlocal path
            plan = read_json(self._plan_path(split), Plan, limit=MAX_PROOF_BYTES)
            if plan is None or not self._can_be_served(plan):
                return None
            tasks = list(plan.parts.get(rank, ()))
            if not tasks:
                return Nothing()
            if path is None:  # once: a server that ends unasked is not started again and again
                path = place.iteration.rank_file(
                    split, rank, plan.policy_version, place.proofs.key, place.setting.incarnation
                )
                self._server.start()
            if (url := self._server.url) is None:
                return None
            return place.make(split, self._request(split, plan, tasks, url, path))

        return Process(start, waiting_on=SERVER, needs=self._server.failure, measure=lambda: size(path) if path else 0)

    def _can_be_served(self, plan: Plan) -> bool:
        """True when this node sees the run's config and the weights already, which other nodes wrote."""
        run, version = self._place.run, plan.policy_version
        return run.orch_toml.exists() and (not version or stable_marker(run.broadcast_dir(version)).exists())

    def _request(self, split: Split, plan: Plan, tasks: list[str], url: str, path: Path) -> MakeRequest:
        return MakeRequest(
            run=str(self._place.run.path),
            base_url=url,
            policy_version=plan.policy_version,
            seq_len=self._place.config.seq_len,
            split=split,
            tasks=tasks,
            rank_file=str(path),
            sampler_state=dict(plan.sampler_state),
        )

    # -- the plan ----

    def _write_plan(self, split: Split) -> None:
        """Raises ValueError when no node with a weight above 0 is left, and OSError."""
        place = self._place
        number = place.position.iteration
        version, tasks = place.proofs.version(number), self.tasks(split)
        weights = {rank: place.setting.weights[rank] for rank in place.group.members}
        files = place.iteration.rank_files(split, version=version, key=place.proofs.key) if tasks else []
        state = place.proofs.sampler_state(version) if split == "train" else {}
        finished = {path.name: [entry.task for entry in read_rank_file(path)] for path in files}
        try:
            plan = make_plan(tasks, finished, weights, number, version, state)
        except ValueError as error:
            where = f"nodes {', '.join(map(str, sorted(weights)))} make no rollouts: {error}"
            remedy = "give one of them a weight above 0 in --rank-weights, or start a node that has one"
            raise ValueError(f"{where}: {remedy}") from error
        write_atomic(self._plan_path(split), msgspec.json.encode(plan))

    def _plan_path(self, split: Split) -> Path:
        """Of the round that makes rollouts now."""
        place = self._place
        return place.iteration.plan(split, place.group.epoch, place.position.round)

    def tasks(self, split: Split) -> list[str]:
        """All of this iteration: groups of the run's example order, or examples of the evaluation."""
        place = self._place
        number = place.position.iteration
        if split == "train":
            count = place.config.groups_per_iteration
            first = (number - 1) * count
            return [str(first + each) for each in range(count)] if "train" in place.setting.splits else []
        if not place.proofs.eval_is_due(number):
            return []
        run = place.config.run
        num_envs = len(run["eval"].get("env", run.get("env", [])))
        return [str(each) for each in range(num_envs * run["eval"].get("num_examples", 16))]

    # -- what the master makes of it ----

    def files_are_ready(self, split: Split) -> Task:
        """The wait of the master until every task of the plan is in a rank file that it sees."""
        return Now(lambda: self._finished(split) is not None, f"all tasks to be seen in {split}_rank_*")

    def _finished(self, split: Split) -> tuple[int, dict[str, str]] | None:
        """The policy version, and the name of each task's file; None while some are not to be seen (yet).

        The last plan of the epoch counts: rounds are numbered within a phase, and this is asked in later ones.
        """
        place = self._place
        plans = place.iteration.plans(split, place.group.epoch)
        plan = read_json(plans[-1], Plan, limit=MAX_PROOF_BYTES) if plans else None
        if plan is None:
            return None
        sources = {task: name for name, tasks in plan.taken.items() for task in tasks}
        for rank, tasks in plan.parts.items():
            mine = set(tasks)
            files = place.iteration.rank_files(split, rank=rank, version=plan.policy_version, key=place.proofs.key)
            for path in files:
                for entry in read_rank_file(path):
                    if entry.task in mine:
                        sources.setdefault(entry.task, path.name)
        return (plan.policy_version, sources) if sources.keys() == set(self.tasks(split)) else None

    def aggregate(self) -> bool:
        """Prove the train rollouts, with the file of each task; false while some of them are not to be seen."""
        place = self._place
        if place.is_proven("train") or not self.tasks("train"):
            return True
        finished = self._finished("train")
        if finished is None:
            return False
        version, sources = finished
        proof = TrainProof(policy_version=version, key=place.proofs.key, sources=sources)
        return place.prove("train", msgspec.structs.asdict(proof))

    def aggregate_eval(self) -> Task:
        """The proof of the evaluation: the figures of all rank files, or that none was due."""
        place = self._place
        if place.is_proven("eval") or not self.tasks("eval"):
            return Now(lambda: place.prove("eval", {"due": False}))

        def start() -> Child | None:
            finished = self._finished("eval")
            return None if finished is None else place.join("eval", finished[1], [finished[0]], "eval")

        return Process(start, finish=lambda: place.is_proven("eval"))


# For the ranks to find each other, on machines that are busy too: a node that is dead is found so by its beats.
JOIN_TIMEOUT_S = 900


class Training:
    """Phases 8 to 11 of one node."""

    def __init__(self, place: Place, server: InferenceServer) -> None:
        self._place = place
        self._server = server

    def prepare(self) -> Task:
        """The batch files of this iteration's updates, and the trainer's config."""
        place = self._place
        if place.is_proven("update"):
            return Now(lambda: True)
        sources = self._sources()
        state = place.proofs.sampler_state(place.steps[0] - 1)
        place.write_run()
        toml = place.config.trainer_toml(place.output.path) | {"stop_after_step": place.steps[-1]}
        write_atomic(self._toml, tomli_w.dumps(toml))
        return Process(
            lambda: place.join("train", sources, place.steps, "update", state), finish=lambda: place.is_proven("update")
        )

    def _sources(self) -> dict[str, str]:
        """Raises ValueError when this iteration has no rollouts that an update may learn from."""
        place, number = self._place, self._place.position.iteration
        proof = place.proofs.train(number)
        where = f"iteration {number} in {place.iteration.path}"
        if proof is None:
            raise ValueError(f"{where} has no rollouts: make them first with --rl-phase rollout")
        if (version := place.proofs.version(number)) != proof.policy_version:
            found = f"{where} has rollouts of policy version {proof.policy_version}, and the policy is at {version} now"
            raise ValueError(f"{found}: make them again with --rl-phase rollout")
        if proof.key != place.proofs.key:
            found = f"{where} has rollouts with other settings of model, environments, sampling or seed"
            raise ValueError(
                f"{found}: use the TOML that they were made with, or make them again with --rl-phase rollout"
            )
        if (lost := place.proofs.lost_task(number, proof)) is not None:
            raise ValueError(f"{where} has lost {lost}: make it again with --rl-phase rollout")
        return proof.sources

    @property
    def _toml(self) -> Path:
        return self._place.iteration.path / "trainer.toml"

    def config_is_ready(self) -> Task:
        """The wait of a worker until it sees the proof of the batches and the trainer's config."""
        return Now(lambda: self._place.is_proven("update") and self._toml.exists(), f"{self._toml} to be seen")

    def train(self) -> Task:
        """This node's rank of the trainer, until the last version of this iteration is published.

        The inference server is asked to end, and the trainer starts when it has.
        """
        self._server.give_up()  # of a group that came here from its first phase
        if self._is_published():  # by processes that were killed right after; a trainer would wait for more to do
            return Now(lambda: self._server.has_ended)

        def start() -> Child | None:
            master = self._place.setting.master()
            if master is None or not self._server.has_ended:
                return None
            if self._place.is_master:
                port = self._place.config.rendezvous_port
                try:
                    bound_socket("", port).close()
                except OSError as error:  # torchrun would report that in fifty lines
                    words = f"rendezvous_port {port} is in use on this machine: set another one on all nodes"
                    raise OSError(words) from error
            return self._place.child("trainer", self._torchrun(master), self._network())

        metrics = self._place.run.trainer_metrics
        return Process(start, measure=lambda: size(metrics), finish=self._is_published, is_shared=True)

    def _network(self) -> dict[str, str]:
        """The ranks meet on this node's interface, not on the one that its name happens to lead to (often loopback)."""
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        interface = interface_of(self._place.setting.address)
        found = {name: interface for name in names if interface and name not in os.environ}
        # Nodes may have different numbers of ranks.
        return {"TORCH_ELASTIC_WORKER_IDENTICAL": "0", **found}

    def _torchrun(self, master: str) -> list[str]:
        place = self._place
        name = f"{place.group.epoch}-{place.position.iteration}-{place.position.round}"
        conf = f"is_host={int(place.is_master)},join_timeout={JOIN_TIMEOUT_S},last_call_timeout=1"
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(place.group.members)), "--nproc-per-node", str(place.setting.num_ranks)),
            *("--max-restarts", "0"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{master}:{place.config.rendezvous_port}"),
            *("--rdzv-id", name, "--rdzv-conf", conf, "--local-addr", place.setting.address),
            *("-m", "prime_rl.trainer.train", "@", str(self._toml)),
        ]

    def _is_published(self) -> bool:
        return stable_marker(self._place.run.broadcast_dir(self._place.steps[-1])).exists()

    def copy_checkpoint(self) -> bool:
        """Copy the iteration's last version into its folder, with the proof of it; false while it is not published."""
        place = self._place
        if place.is_proven("checkpoint"):
            return True
        if not self._is_published():
            return False
        step = place.steps[-1]
        with staged_dir(place.iteration.path / "adapter") as folder:
            shutil.copytree(place.run.broadcast_dir(step), folder, dirs_exist_ok=True)
        return place.prove("checkpoint", {"step": step})


ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class _Order:
    """Where this node is to work, and with which others."""

    position: Position
    group: GroupRecord


class WorkThread:
    """Makes calls one after another, in a thread that lasts as long as the process and that no exit waits for.

    One thread for all: to the kernel the thread that started a child is its parent, and the keepers of this node's
    children end them when their parent ends (`utils.keeper`).
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="work", daemon=True).start()

    def submit(self, call: Callable[[], ResultT]) -> Future[ResultT]:
        """The future raises again what the call raised."""
        future: Future[ResultT] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        return future

    def _run(self) -> None:
        while True:
            self._calls.get()()


class PhaseWork:
    """The work of one node; see `Work` in `member`.

    It is done in turns, in its own thread: a turn may read and copy for as long as it takes. Only the turns touch
    `place` and the tasks.

    Args:
        wake: called when there is something new to look at.
    """

    def __init__(
        self, setting: WorkSetting, config: MultinodeConfig, output: OutputDir, wake: Callable[[], None]
    ) -> None:
        self.place = Place(setting, config, output)
        self._wake = wake
        self._thread = WorkThread()
        self._search: Future[Position] | None = None
        self._order: _Order | None = None
        self._turn: Future[tuple[_Order, Report]] | None = None
        self._report = Report()
        self._taken: _Order | None = None
        self._task: Task | None = None
        self._server = InferenceServer(self._start_server, self._status_file)
        self._rollouts = Rollouts(self.place, self._server)
        self._training = Training(self.place, self._server)

    def resume(self) -> Position | None:
        """Begin to read the proofs, or return what was found; None meanwhile. Raises what the search raised."""
        if self._search is None:
            self._search = self._thread.submit(self.place.proofs.resume)
            self._search.add_done_callback(lambda search: self._wake())
        if not self._search.done():
            return None
        search, self._search = self._search, None
        return search.result()

    def begin(self, position: Position, group: GroupRecord) -> None:
        """Take a new order; the turns give up the work before it, then start this one."""
        self._order, self._report = _Order(position, group), Report()

    def look(self) -> Report:
        """The newest report on the order; starts another turn when none is under way and the work is not done."""
        if self._turn is not None and self._turn.done():
            order, report = self._turn.result()
            self._turn = None
            if order is self._order:
                self._report = report
        if self._turn is None and self._order is not None and not self._report.done:
            self._turn = self._thread.submit(partial(self._take_turn, self._order))
            self._turn.add_done_callback(self._tell)
        return self._report

    def stop(self) -> None:
        """Drop the order and ask all of this node's processes to end; no other is started."""
        self._order = None
        self.place.close()

    @property
    def has_ended(self) -> bool:
        """True when all of this node's processes have ended."""
        return self.place.has_ended

    # -- in the thread ----

    def _tell(self, turn: Future[tuple[_Order, Report]]) -> None:
        """Of what cannot wait for the next look."""
        if turn.exception() is not None or turn.result()[1].done or turn.result()[0] is not self._order:
            self._wake()

    def _take_turn(self, order: _Order) -> tuple[_Order, Report]:
        try:
            return order, self._look(order)
        except OSError as error:  # a full disk, a shared folder that is gone for a while
            return order, Report(error=str(error), may_heal=True)
        except ValueError as error:  # nothing to train on, a damaged file, no node left that may make rollouts
            return order, Report(error=str(error))

    def _look(self, order: _Order) -> Report:
        if order is not self._taken:
            if self._task is not None:
                self._task.give_up()
                if not self._task.has_ended:
                    return Report(waiting_on="the work that was given up to end")
            self.place.move(order.position, order.group)
            self.place.iteration.path.mkdir(parents=True, exist_ok=True)
            self._task = self._make_task(order.position.phase)
            self._taken = order
        assert self._task is not None
        return self._task.look()

    def _make_task(self, phase: Phase) -> Task:
        place, rollouts, training = self.place, self._rollouts, self._training
        works: Mapping[Phase, Callable[[], Task]] = {
            Phase.TRAIN_ROLLOUT: lambda: rollouts.make("train"),
            Phase.EVAL_ROLLOUT: lambda: rollouts.make("eval"),
            Phase.STOP_INFERENCE: self._stop_serving,
            Phase.TRAIN: training.train,
            Phase.RESTART_INFERENCE: self._restart,
        }
        of_master: Mapping[Phase, Callable[[], Task]] = {
            Phase.START: self._open,
            Phase.FILES_READY: lambda: rollouts.files_are_ready("train"),
            Phase.AGGREGATE: lambda: Now(rollouts.aggregate),
            Phase.EVAL_AGGREGATE: rollouts.aggregate_eval,
            Phase.PREPARE: training.prepare,
            Phase.COPY_CHECKPOINT: lambda: Now(training.copy_checkpoint),
            Phase.FINAL: lambda: Now(lambda: place.prove("done", {"iteration": place.position.iteration})),
        }
        of_workers: Mapping[Phase, Callable[[], Task]] = {Phase.CONFIG_READY: training.config_is_ready}
        make = works.get(phase) or (of_master if place.is_master else of_workers).get(phase)
        return make() if make else Now(lambda: True)

    def _open(self) -> Task:
        self.place.write_run()
        return Now(lambda: True)

    # -- the server ----

    @property
    def _status_file(self) -> Path:
        return self.place.output.multinode / f"inference_{self.place.setting.rank}.json"

    def _stop_serving(self) -> Task:
        self._server.give_up()
        return Now(lambda: self._server.has_ended, "this node's inference server to end")

    def _restart(self) -> Task:
        """Not after the last iteration, and not where no rollouts are made."""
        setting = self.place.setting
        is_needed = setting.rl_phase is RlPhase.BOTH and setting.weights[setting.rank] > 0
        if not is_needed or self.place.position.iteration == setting.max_iterations:
            return Now(lambda: True)
        self._server.start()
        return Now(lambda: self._server.url is not None, SERVER, self._server.failure)

    def _start_server(self) -> Child:
        place, toml = self.place, self._status_file.with_suffix(".toml")
        write_atomic(toml, tomli_w.dumps(place.config.inference_toml(place.output.path, self._status_file)))
        return place.child("inference", [sys.executable, "-m", "prime_rl.inference.server", "@", str(toml)])
