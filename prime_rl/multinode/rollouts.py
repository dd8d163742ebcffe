"""A node's rollouts: the plan that divides the tasks, its own part of them, and what the master makes of all parts.

The same for training and for evaluation. A task that is in any rank file is not made again. The weights of the ranks
divide an iteration's tasks exactly, and the same on every node, by the largest remainder method (Hamilton): each rank
gets the whole part of its quota, and the tasks that are left go to the largest fractions, ties to the lower rank. No
floats are added up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import stable_marker
from prime_rl.contract.types import MakeRequest, Split, read_rank_file
from prime_rl.multinode.place import Place, TrainProof, read_json
from prime_rl.multinode.tasks import SERVER, Child, InferenceServer, Nothing, Now, Process, Task, size


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
            plan = read_json(self._plan_path(split), Plan)
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
        plan = read_json(plans[-1], Plan) if plans else None
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
