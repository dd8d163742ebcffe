"""The rollouts of one example: each is a session with the policy (`recorder`), lost ones are made again.

Legend: G = rollouts of one example.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from prime_rl.contract.types import MAX_BATCH_BYTES
from prime_rl.orchestrator.client import AccessDenied, AdapterRefused
from prime_rl.orchestrator.envs.base import Environment, RolloutError
from prime_rl.orchestrator.envs.checked import (
    EnvironmentBroken,
    EnvironmentFault,
    ExampleUnusable,
    Interrupted,
    TimedOut,
)
from prime_rl.orchestrator.policy import ChatTokenizer, FirstTurn, TurnSampler
from prime_rl.orchestrator.recorder import PolicySession, Rollout, derive_seed
from prime_rl.orchestrator.sampler import ExampleSampler, Pick

logger = logging.getLogger(__name__)

# How often one rollout of a group is replaced after a fault of its environment. A fault that always comes must end; of
# an environment that fails on every second rollout, one group of eight in nine is lost.
MAX_REPLACEMENTS = 5

ResultT = TypeVar("ResultT")


class GroupFailed(RuntimeError):
    """No group came of an example: one of its rollouts failed. The message names the environment and the error."""


@dataclass(frozen=True)
class Group:
    """All G rollouts of the example at `index` of the run's example order."""

    index: int
    env_name: str
    example_id: str
    rollouts_G: list[Rollout]

    @functools.cached_property
    def oldest_version(self) -> int:
        """The oldest policy version that any of its rollouts was sampled from."""
        return min(rollout.oldest_version for rollout in self.rollouts_G)


@dataclass(frozen=True)
class RolloutWorker:
    """Makes the groups that a run trains on.

    Args:
        is_noted: whether what comes next depends on each group as soon as it is made. On several nodes it depends on
            the groups of all nodes, once these are joined.
        max_rollout_bytes: the share of one rollout in a batch.
    """

    turns: TurnSampler
    tokenizer: ChatTokenizer
    envs: Mapping[str, Environment]
    sampler: ExampleSampler
    rollouts_per_example: int
    seed: int
    is_noted: bool = True
    max_rollout_bytes: int = MAX_BATCH_BYTES

    async def group(self, index: int, note_version: Callable[[int], None] = lambda version: None) -> Group:
        """All rollouts of the example at `index`; `note_version` gets the version of each request beforehand.

        A rollout that the environment loses is replaced by a new one: half a group has no baseline, and dropping the
        whole group would throw away every good rollout in it. Raises GroupFailed when one cannot be made at all, and
        ExampleUnusable when none ever will be.
        """
        pick = self.sampler.pick(index)
        first_turn, limit_reached = FirstTurn(self.rollouts_per_example), asyncio.Event()
        try:
            rollouts = await together(
                self._member(pick, index, number, first_turn, limit_reached, note_version)
                for number in range(self.rollouts_per_example)
            )
        except (AccessDenied, AdapterRefused, EnvironmentBroken, ExampleUnusable):
            raise
        except Exception as error:  # whatever an environment raises is its own affair
            raise GroupFailed(f"env {pick.env_name}: {type(error).__name__}: {error}") from error
        if self.is_noted:
            self.sampler.note(index, pick.env_name, pick.example.id, [rollout.reward for rollout in rollouts])
        return Group(index, pick.env_name, f"{pick.env_name}/{pick.example.id}", rollouts)

    async def _member(
        self,
        pick: Pick,
        index: int,
        number: int,
        first_turn: FirstTurn,
        limit_reached: asyncio.Event,
        note_version: Callable[[int], None],
    ) -> Rollout:
        """Rollout `number` of a group, or what replaces it: sampled with its own seed from its first turn on.

        A time limit is reached twice at most: `limit_reached` is set from the first one of the group on.
        """
        num_faults = 0
        for attempt in itertools.count():
            parts = (index, number, attempt) if attempt else (index, number)
            is_last = limit_reached.is_set()
            session = PolicySession(
                self.turns,
                self.tokenizer,
                seed=derive_seed(self.seed, "train", *parts),
                first_turn=None if attempt else first_turn,
                number=number,
                note_version=note_version,
                max_bytes=self.max_rollout_bytes,
            )
            try:
                return await session.rollout(self.envs[pick.env_name], pick.example)
            except ExampleUnusable:
                raise
            except (EnvironmentFault, RolloutError) as fault:
                num_faults += not isinstance(fault, Interrupted)
                if num_faults > MAX_REPLACEMENTS or (is_last and isinstance(fault, TimedOut)):
                    raise
                if isinstance(fault, TimedOut):
                    limit_reached.set()
                logger.warning("env %s, %s: rollout dropped: %s", pick.env_name, pick.example.id, fault)
        raise AssertionError("unreachable")


async def together(parts: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Run all of `parts` at once. The first error cancels the rest; one that ends the run goes before any other."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(part) for part in parts]
    except ExceptionGroup as errors:
        kinds = (AccessDenied, AdapterRefused, EnvironmentBroken, ExampleUnusable, Exception)
        raise next(error for kind in kinds for error in errors.exceptions if isinstance(error, kind)) from None
    return [task.result() for task in running]
