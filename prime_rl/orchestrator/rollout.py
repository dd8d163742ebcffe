"""The rollouts of one example: each is a session with the policy (`recorder`), lost ones are made again.

Where the environment has a judge (`envs.agent_judge`), the reward is set here: of each rollout when it is made, or of
all of them when the group is complete.

Legend: G = rollouts of one example.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from prime_rl.configs.base import SamplingConfig
from prime_rl.contract.served import BASE_WEIGHTS
from prime_rl.contract.types import MAX_BATCH_BYTES
from prime_rl.orchestrator.client import AccessDenied, AdapterRefused, CompletionRequest, RequestRefused
from prime_rl.orchestrator.envs.agent_judge import Endpoint, Judge, Reply
from prime_rl.orchestrator.envs.base import Environment, Example, Message, RolloutError
from prime_rl.orchestrator.envs.checked import (
    CheckedEnvironment,
    EnvironmentBroken,
    EnvironmentFault,
    ExampleUnusable,
    Interrupted,
    TimedOut,
)
from prime_rl.orchestrator.guard import RunFailed
from prime_rl.orchestrator.policy import ChatTokenizer, FirstTurn, TokenizerError, TooLong, TurnSampler
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.recorder import PolicySession, Rollout, as_turns, derive_seed
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
        num_soft: tokens of a teacher for each of a rollout's in a batch, at most.
        teach: has a rollout of an environment read by its teacher.
    """

    turns: TurnSampler
    tokenizer: ChatTokenizer
    envs: Mapping[str, Environment]
    sampler: ExampleSampler
    rollouts_per_example: int
    seed: int
    is_noted: bool = True
    max_rollout_bytes: int = MAX_BATCH_BYTES
    num_soft: int = 0
    teach: Callable[[str, Rollout], Awaitable[Rollout]] | None = None

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
            rollouts = await judged(self.envs[pick.env_name], pick.example, rollouts, self.tokenizer, ranks=True)
        except (AccessDenied, AdapterRefused, EnvironmentBroken, RunFailed, ExampleUnusable):
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
                num_soft=self.num_soft,
            )
            try:
                env = self.envs[pick.env_name]
                rollout = await session.rollout(env, pick.example)
                rollout = (await judged(env, pick.example, [rollout], self.tokenizer, ranks=False))[0]
                return await self.teach(pick.env_name, rollout) if self.teach else rollout
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
        kinds = (AccessDenied, AdapterRefused, EnvironmentBroken, RunFailed, ExampleUnusable, Exception)
        raise next(error for kind in kinds for error in errors.exceptions if isinstance(error, kind)) from None
    return [task.result() for task in running]


# Of one answer of the base model as a judge, unless `judge.max_tokens` is set; at most half of `seq_len`.
MAX_JUDGE_TOKENS = 1024


@dataclass(frozen=True)
class BaseModel:
    """The run's base model, for judges: the model `name` of the run's inference, without an adapter."""

    client: InferenceClient
    name: str
    tokenizer: ChatTokenizer
    seq_len: int

    async def ask(self, messages: Sequence[Message], *, temperature: float, max_tokens: int) -> Reply:
        """Its answer. Raises TooLong, and EnvironmentBroken where inference does not have the base model."""
        # What was said must not end the message that it stands in.
        plain: list[Message] = [
            {**each, "content": self.tokenizer.without_special(each["content"])} for each in messages
        ]
        max_tokens = min(max_tokens, self.seq_len // 2)
        try:
            prompt = self.tokenizer.prompt(as_turns(plain))
        except TokenizerError as error:  # of a template without a system prompt, for one
            raise EnvironmentBroken(f"the base model cannot judge: {error}") from error
        if self.seq_len - len(prompt) < max_tokens:
            raise TooLong(f"{len(prompt)} tokens to read and {max_tokens} to write, in seq_len = {self.seq_len}")
        sampling = SamplingConfig().model_copy(update={"temperature": temperature})
        request = CompletionRequest(self.name, prompt, sampling, max_tokens, seed=derive_seed(*prompt))
        try:
            async with self.client.places.hold(1):
                (found,) = await self.client.complete(request)
        except RequestRefused as error:  # the server's longest sequence may be shorter
            raise TooLong(str(error)) from error
        if found.weights not in (None, BASE_WEIGHTS):
            words = f"inference serves {found.weights}, not the base model: name another judge (judge.base_url)"
            raise EnvironmentBroken(words)
        return Reply(self.tokenizer.decode(found.token_ids), len(prompt), len(found.token_ids))


def give_judges(envs: Iterable[CheckedEnvironment], base: BaseModel | None, cleanup: AsyncExitStack) -> list[Judge]:
    """Give the environments whose arguments name a judge theirs. Raises ConfigError.

    Args:
        base: None where nothing is sampled: then it does not judge.
    """
    judges = []
    for env in envs:
        config = env.judge_config
        if config is not None and config.base_url:
            endpoint = Endpoint(config)
            cleanup.push_async_callback(endpoint.close)
            env.judge = Judge(config, endpoint.ask)
        elif config is not None and base is not None:
            max_tokens = config.max_tokens or MAX_JUDGE_TOKENS
            ask = functools.partial(base.ask, temperature=config.temperature or 0.0, max_tokens=max_tokens)
            env.judge = Judge(config, ask)
        judges += [env.judge] if env.judge else []
    return judges


async def judged(
    env: Environment, example: Example, rollouts: list[Rollout], tokenizer: ChatTokenizer, ranks: bool | None = None
) -> list[Rollout]:
    """The rollouts with the rewards of the environment's judge, if it has one. Raises EnvironmentFault.

    `ranks`: only by a judge that ranks groups, or only by one that does not.
    """
    if not isinstance(env, CheckedEnvironment) or env.judge is None or ranks not in (None, env.judge.ranks):
        return rollouts
    try:
        scores, num_tokens = await env.judge.scores([transcript(each, tokenizer) for each in rollouts])
    except EnvironmentFault as fault:
        env.note_lost(example.id, fault, len(rollouts))
        raise
    cost = {"judge_tokens": num_tokens / len(rollouts)}
    pairs = zip(rollouts, scores, strict=True)
    return [replace(each, reward=score, metrics={**each.metrics, **cost}) for each, score in pairs]


def transcript(rollout: Rollout, tokenizer: ChatTokenizer) -> str:
    """All that was said in a rollout, branch by branch, and what its program printed."""
    parts = [tokenizer.decode(each.token_ids_T[each.num_shared :], special=True) for each in rollout.branches]
    return "\n\n".join([*parts, *(["It printed:\n" + rollout.output] if rollout.output else [])])
