"""One rollout: an environment talks to the policy, every token is recorded, and out comes a training sample.

`PolicySession` is the `Policy` that an environment sees: text in, text out. Behind it a conversation is one growing
sequence of token ids: what the policy sampled is kept as sampled (with its logprobs and its version), the
environment's messages in between are appended and masked out of the loss.

Legend: T = tokens of the whole sequence, G = rollouts of one example.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prime_rl.orchestrator.client import AccessDenied, AdapterRefused, Completion
from prime_rl.orchestrator.envs.base import Environment, Example, Message, RolloutError
from prime_rl.orchestrator.envs.checked import (
    EnvironmentBroken,
    EnvironmentFault,
    ExampleUnusable,
    Interrupted,
    TimedOut,
)
from prime_rl.orchestrator.policy import ChatTokenizer, FirstTurn, TokenizerError, TurnSampler
from prime_rl.orchestrator.sampler import ExampleSampler, Pick

logger = logging.getLogger(__name__)

# How often one rollout of a group is replaced after a fault of its environment. A fault that always comes must end; of
# an environment that fails on every second rollout, one group of eight in nine is lost.
MAX_REPLACEMENTS = 5

ResultT = TypeVar("ResultT")


class GroupFailed(RuntimeError):
    """No group came of an example: one of its rollouts failed. The message names the environment and the error."""


@dataclass(frozen=True)
class Rollout:
    """One finished conversation. The lists over T have equal length; `turn_versions` has one policy version a turn.

    `token_advantages_T` is what the environment gave in place of the advantage that follows from the rewards, or [].
    """

    token_ids_T: list[int]
    loss_mask_T: list[bool]
    logprobs_T: list[float]
    reward: float
    metrics: dict[str, float]
    oldest_version: int
    num_prompt_tokens: int
    truncated: bool
    turn_versions: list[int] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    token_advantages_T: list[float] = field(default_factory=list)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that the policy sampled, over all turns."""
        return sum(self.loss_mask_T)


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


class PolicySession:
    """One conversation with the policy.

    Args:
        seed: of this rollout; every turn derives its own.
        version: the policy version for all turns; None takes the current one at each turn.
        first_turn: shared with the other rollouts of the group, of which this is number `number`. Needs `version` None.
        note_version: called with the version of each request before it goes out.
    """

    def __init__(
        self,
        turns: TurnSampler,
        tokenizer: ChatTokenizer,
        *,
        seed: int,
        version: int | None = None,
        first_turn: FirstTurn | None = None,
        number: int = 0,
        note_version: Callable[[int], None] = lambda version: None,
    ) -> None:
        self.answer_lens: list[int] = []
        self._turns = turns
        self._tokenizer = tokenizer
        self._seed = seed
        self._version = version
        self._first_turn = first_turn
        self._number = number
        self._note_version = note_version
        self._seen: list[Message] = []
        self._ended = False
        self._token_ids_T: list[int] = []
        self._loss_mask_T: list[bool] = []
        self._logprobs_T: list[float] = []
        self._turn_versions: list[int] = []
        self._num_prompt_tokens = 0
        self._truncated = False

    async def complete(self, messages: Sequence[Message]) -> str:
        """One assistant turn that follows `messages`, which must begin with the conversation so far."""
        try:
            new_ids = self._new_tokens(messages)
        except TokenizerError as error:
            raise RolloutError(str(error)) from error
        version, completion = await self._sample(self._token_ids_T + new_ids)
        self._append(new_ids)
        text = self._tokenizer.decode(completion.token_ids)
        if completion.stop is not None:
            text = text.rpartition(completion.stop)[0]
        self._record(completion, version)
        self._seen = [*messages, {"role": "assistant", "content": text}]
        return text

    async def rollout(self, env: Environment, example: Example) -> Rollout:
        """Return the rollout that `env` makes of `example` with this session, and its score.

        Raises RolloutError when it cannot be trained on, and what the environment raises.
        """
        outcome = await env.rollout(example, self)
        if not self._turn_versions:
            raise RolloutError("the environment ended without asking the policy")
        return Rollout(
            token_ids_T=self._token_ids_T,
            loss_mask_T=self._loss_mask_T,
            logprobs_T=self._logprobs_T,
            reward=outcome.reward,
            metrics=outcome.metrics,
            oldest_version=min(self._turn_versions),
            num_prompt_tokens=self._num_prompt_tokens,
            truncated=self._truncated,
            turn_versions=self._turn_versions,
            rewards=dict(outcome.rewards),
            token_advantages_T=self._by_token(outcome.advantages) if outcome.advantages else [],
        )

    def _by_token(self, advantages: Sequence[float | Sequence[float]]) -> list[float]:
        """The environment's value for each answer (checked), at the tokens of the answers; 0.0 at all others."""
        by_answer = zip(advantages, self.answer_lens, strict=True)
        values = itertools.chain.from_iterable(
            [given] * length if isinstance(given, float) else given for given, length in by_answer
        )
        return [next(values) if is_answer else 0.0 for is_answer in self._loss_mask_T]

    def _new_tokens(self, messages: Sequence[Message]) -> list[int]:
        if not self._seen:
            token_ids = self._tokenizer.prompt(messages)
            self._num_prompt_tokens = len(token_ids)
            return token_ids
        num_seen = len(self._seen)
        if list(messages[:num_seen]) != self._seen or len(messages) == num_seen:
            raise RolloutError("the environment changed earlier messages, or added no new one")
        token_ids = self._tokenizer.continuation(messages, num_seen)
        # The end of the turn is already there when the policy sampled it.
        sampled_end = self._ended and token_ids[:1] == self._token_ids_T[-1:]
        return token_ids[1:] if sampled_end else token_ids

    async def _sample(self, prompt_ids: list[int]) -> tuple[int, Completion]:
        seed = derive_seed(self._seed, len(self._turn_versions))
        if self._first_turn is not None and not self._turn_versions:
            return await self._turns.sample_first(
                self._first_turn, self._number, prompt_ids, seed=seed, note_version=self._note_version
            )
        version, (completion,) = await self._turns.sample(
            prompt_ids,
            seed=seed,
            num_prefix=self._num_prompt_tokens,
            version=self._version,
            note_version=self._note_version,
        )
        return version, completion

    def _append(self, token_ids: list[int]) -> None:
        self._token_ids_T += token_ids
        self._loss_mask_T += [False] * len(token_ids)
        self._logprobs_T += [0.0] * len(token_ids)

    def _record(self, completion: Completion, version: int) -> None:
        self._token_ids_T += completion.token_ids
        self._loss_mask_T += [True] * len(completion.token_ids)
        self._logprobs_T += completion.logprobs
        self._turn_versions.append(version)
        self.answer_lens.append(len(completion.token_ids))
        self._ended = completion.finish_reason == "stop"
        self._truncated = self._truncated or not self._ended


@dataclass(frozen=True)
class RolloutWorker:
    """Makes the groups that a run trains on.

    Args:
        is_noted: whether what comes next depends on each group as soon as it is made. On several nodes it depends on
            the groups of all nodes, once these are joined.
    """

    turns: TurnSampler
    tokenizer: ChatTokenizer
    envs: Mapping[str, Environment]
    sampler: ExampleSampler
    rollouts_per_example: int
    seed: int
    is_noted: bool = True

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
            )
            try:
                return await session.rollout(self.envs[pick.env_name], pick.example)
            except ExampleUnusable:
                raise
            except EnvironmentFault as fault:
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


def derive_seed(*parts: object) -> int:
    """A seed that is a pure function of `parts`. 31 bits: every sampler and random generator takes that."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
