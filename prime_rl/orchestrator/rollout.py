"""One rollout: an environment talks to the policy, every token is recorded, and out comes a training sample.

`PolicySession` is the `Policy` that an environment sees: text in, text out. Behind it a conversation is one growing
sequence of token ids: what the policy sampled is kept as sampled (with its logprobs and its version), what the
environment said in between is appended and masked out of the loss.

Legend: T = tokens of the whole sequence, G = rollouts of one example.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prime_rl.configs.orchestrator import SamplingConfig
from prime_rl.orchestrator.client import AccessDenied, Completion, InferenceClient, UnknownModel
from prime_rl.orchestrator.envs.base import Environment, Example, Message, Outcome
from prime_rl.orchestrator.policy import PolicyVersions
from prime_rl.orchestrator.sampler import ExampleSampler, Pick
from prime_rl.orchestrator.tokenizer import ChatTokenizer

# A server that says again and again that it does not have what it has just loaded is broken, not restarted.
MAX_RESTORES = 5


ResultT = TypeVar("ResultT")


class RolloutError(RuntimeError):
    """A rollout that came to nothing; the message says why."""


class GroupFailed(RuntimeError):
    """No group came of an example: one of its rollouts failed. The message names the environment and the error."""


@dataclass(frozen=True)
class Rollout:
    """One finished conversation. The lists over T have equal length."""

    token_ids_T: list[int]
    loss_mask_T: list[bool]
    logprobs_T: list[float]
    reward: float
    metrics: dict[str, float]
    oldest_version: int
    num_prompt_tokens: int
    truncated: bool

    @property
    def num_completion_tokens(self) -> int:
        return sum(self.loss_mask_T)


@dataclass(frozen=True)
class Group:
    """All G rollouts of the example at `index` of the run's example order."""

    index: int
    env_name: str
    example_id: str
    rollouts_G: list[Rollout]

    @property
    def oldest_version(self) -> int:
        return min(rollout.oldest_version for rollout in self.rollouts_G)


class PolicySession:
    """One conversation with the policy.

    Args:
        seed: of this rollout; every turn derives its own.
        version: the policy version for all turns; None takes the current one at each turn.
    """

    def __init__(
        self,
        client: InferenceClient,
        policy: PolicyVersions,
        tokenizer: ChatTokenizer,
        sampling: SamplingConfig,
        *,
        seq_len: int,
        seed: int,
        version: int | None = None,
    ) -> None:
        self._client = client
        self._policy = policy
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._seq_len = seq_len
        self._seed = seed
        self._version = version
        self._seen: list[Message] = []
        self._stopped_by_eos = False
        self._num_turns = 0
        self._token_ids_T: list[int] = []
        self._loss_mask_T: list[bool] = []
        self._logprobs_T: list[float] = []
        self._oldest_version: int | None = None
        self._num_prompt_tokens = 0
        self._truncated = False

    async def complete(self, messages: Sequence[Message]) -> str:
        """One assistant turn that follows `messages`, which must begin with the conversation so far."""
        new_ids = self._new_tokens(messages)
        prompt_ids = self._token_ids_T + new_ids
        max_tokens = min(self._sampling.max_tokens, self._seq_len - len(prompt_ids))
        if max_tokens < 1:
            raise RolloutError(f"{len(prompt_ids)} prompt tokens leave no room in seq_len = {self._seq_len}")
        version, completion = await self._sample(prompt_ids, max_tokens)
        self._append(new_ids)
        text = self._tokenizer.decode(completion.token_ids)
        self._record(completion, version)
        self._seen = [*messages, {"role": "assistant", "content": text}]
        return text

    def finish(self, outcome: Outcome) -> Rollout:
        """The rollout with its score. Raises RolloutError when it cannot be trained on."""
        if self._oldest_version is None:
            raise RolloutError("the environment ended without asking the policy")
        if not 0 <= outcome.reward <= 1:
            raise RolloutError(f"reward {outcome.reward!r} is not within 0 and 1")
        return Rollout(
            token_ids_T=self._token_ids_T,
            loss_mask_T=self._loss_mask_T,
            logprobs_T=self._logprobs_T,
            reward=outcome.reward,
            metrics=outcome.metrics,
            oldest_version=self._oldest_version,
            num_prompt_tokens=self._num_prompt_tokens,
            truncated=self._truncated,
        )

    def _new_tokens(self, messages: Sequence[Message]) -> list[int]:
        if not self._seen:
            token_ids = self._tokenizer.prompt(messages)
            self._num_prompt_tokens = len(token_ids)
            return token_ids
        num_seen = len(self._seen)
        if list(messages[:num_seen]) != self._seen or len(messages) == num_seen:
            raise RolloutError("the environment changed what was said before, or added nothing to it")
        token_ids = self._tokenizer.continuation(messages, num_seen)
        # The end of the turn is already there when the policy sampled it.
        sampled_end = self._stopped_by_eos and token_ids[:1] == self._token_ids_T[-1:]
        return token_ids[1:] if sampled_end else token_ids

    async def _sample(self, prompt_ids: list[int], max_tokens: int) -> tuple[int, Completion]:
        """One completion, and the version that made it. What a restarted server has lost is loaded again."""
        seed = derive_seed(self._seed, self._num_turns)
        temperature = self._sampling.temperature
        async with self._client.slots:
            for attempt in itertools.count():
                with self._policy.use(self._version) as (version, model):
                    try:
                        completion = await self._client.complete(
                            model, prompt_ids, max_tokens=max_tokens, temperature=temperature, seed=seed
                        )
                        return version, completion
                    except UnknownModel:
                        if attempt == MAX_RESTORES:
                            raise
                    await self._policy.restore(self._version)
        raise AssertionError("unreachable")

    def _append(self, token_ids: list[int]) -> None:
        self._token_ids_T += token_ids
        self._loss_mask_T += [False] * len(token_ids)
        self._logprobs_T += [0.0] * len(token_ids)

    def _record(self, completion: Completion, version: int) -> None:
        self._token_ids_T += completion.token_ids
        self._loss_mask_T += [True] * len(completion.token_ids)
        self._logprobs_T += completion.logprobs
        self._oldest_version = version if self._oldest_version is None else min(self._oldest_version, version)
        self._stopped_by_eos = completion.finish_reason == "stop"
        self._truncated = self._truncated or not self._stopped_by_eos
        self._num_turns += 1


class RolloutWorker:
    """Makes rollouts: single ones for evaluation, whole groups for training."""

    def __init__(
        self,
        client: InferenceClient,
        policy: PolicyVersions,
        tokenizer: ChatTokenizer,
        envs: Mapping[str, Environment],
        sampler: ExampleSampler,
        sampling: SamplingConfig,
        *,
        seq_len: int,
        rollouts_per_example: int,
        seed: int,
    ) -> None:
        self._client = client
        self._policy = policy
        self._tokenizer = tokenizer
        self._envs = envs
        self._sampler = sampler
        self._sampling = sampling
        self._seq_len = seq_len
        self._rollouts_per_example = rollouts_per_example
        self._seed = seed

    async def group(self, index: int) -> Group:
        """All rollouts of the example at `index`. Raises GroupFailed when one fails: half a group has no baseline."""
        pick = self._sampler.pick(index)
        seeds = [derive_seed(self._seed, "train", index, number) for number in range(self._rollouts_per_example)]
        try:
            rollouts = await together(self.rollout(pick, seed) for seed in seeds)
        except AccessDenied:
            raise
        except Exception as error:  # whatever an environment raises is its own affair
            raise GroupFailed(f"env {pick.env_name}: {type(error).__name__}: {error}") from error
        return Group(index, pick.env_name, f"{pick.env_name}/{pick.example.id}", rollouts)

    async def rollout(self, pick: Pick, seed: int, version: int | None = None) -> Rollout:
        """One rollout of one example; see `PolicySession` for `seed` and `version`."""
        session = PolicySession(
            self._client,
            self._policy,
            self._tokenizer,
            self._sampling,
            seq_len=self._seq_len,
            seed=seed,
            version=version,
        )
        return session.finish(await self._run_env(pick.env_name, pick.example, session))

    async def _run_env(self, env_name: str, example: Example, session: PolicySession) -> Outcome:
        return await self._envs[env_name].rollout(example, session)


async def together(parts: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Run all of `parts` at once. The first error cancels the rest; a refused key goes before any other error."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(part) for part in parts]
    except ExceptionGroup as errors:
        denied = [error for error in errors.exceptions if isinstance(error, AccessDenied)]
        raise (denied or errors.exceptions)[0] from None
    return [task.result() for task in running]


def derive_seed(*parts: object) -> int:
    """A seed that is a pure function of `parts`. 31 bits: every sampler and random generator takes that."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
