"""Which rank does which task: the weights of the ranks divide an iteration's tasks exactly, and the same on every node.

Counts follow the largest remainder method (Hamilton): each rank gets the whole part of its quota, and the tasks that
are left go to the largest fractions, ties to the lower rank. Pure and exact: no floats are added up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any


def split_counts(num_tasks: int, weights: Sequence[float]) -> list[int]:
    """How many tasks each rank gets; they sum to `num_tasks`. Raises ValueError for weights that divide nothing."""
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
