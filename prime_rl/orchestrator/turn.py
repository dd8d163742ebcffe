"""One turn of the policy: prompt tokens in, completions and their version out, whatever inference goes through.

All rollouts of a group begin with the same prompt, so their first turn is one request with as many choices: the prompt
is read once instead of once a rollout, which the embedded engine answers about twice as fast.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

from prime_rl.configs.sampling import SamplingConfig
from prime_rl.orchestrator.client import Completion, UnknownModel
from prime_rl.orchestrator.envs.base import RolloutError
from prime_rl.orchestrator.policy import PolicyVersions
from prime_rl.orchestrator.pool import InferenceClient

# A server that keeps losing what it has just loaded is broken, not restarted.
MAX_RESTORES = 5


class TurnSampler:
    """Samples turns with the policy version of the moment, or with a given one."""

    def __init__(
        self, client: InferenceClient, policy: PolicyVersions, sampling: SamplingConfig, *, seq_len: int
    ) -> None:
        self._client = client
        self._policy = policy
        self._sampling = sampling
        self._seq_len = seq_len

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        num_choices: int = 1,
        num_prefix: int = 0,
        version: int | None = None,
        note_version: Callable[[int], None] = lambda version: None,
    ) -> tuple[int, list[Completion]]:
        """The version that answered (default: the current one) and its completions, from one seed.

        `num_prefix` tokens of the prompt are those of the whole conversation and of its group.
        `note_version` gets the version before the request; the answer's may be newer, unless `version` was given. What
        a restarted server has lost is loaded again. Raises RolloutError when the prompt fills `seq_len`.
        """
        max_tokens = min(self._sampling.max_tokens, self._seq_len - len(prompt_ids))
        if max_tokens < 1:
            raise RolloutError(f"{len(prompt_ids)} prompt tokens leave no room in seq_len = {self._seq_len}")
        async with self._client.places.hold(num_choices):
            for attempt in itertools.count():
                with self._policy.use(version) as (used, model):
                    note_version(used)
                    try:
                        completions = await self._client.complete(
                            model,
                            prompt_ids,
                            self._sampling,
                            max_tokens=max_tokens,
                            seed=seed,
                            num_choices=num_choices,
                            num_prefix=num_prefix,
                        )
                        exactly = version is not None
                        return self._policy.answered_by(used, completions[0].weights, exactly=exactly), completions
                    except UnknownModel:
                        if attempt == MAX_RESTORES:
                            raise
                    await self._policy.restore(version)
        raise AssertionError("unreachable")


class SharedFirstTurn:
    """The first turn of `num_rollouts` rollouts of one example. The first caller asks for all."""

    def __init__(self, num_rollouts: int) -> None:
        self._num_rollouts = num_rollouts
        self._prompt_ids: Sequence[int] = ()
        self._answer: asyncio.Future[tuple[int, list[Completion]]] | None = None

    async def take(
        self,
        number: int,
        prompt_ids: Sequence[int],
        sample: Callable[[int], Awaitable[tuple[int, list[Completion]]]],
    ) -> tuple[int, Completion] | None:
        """The completion of rollout `number`, or None when its prompt is not the one that the others share.

        `sample(n)` samples n completions of `prompt_ids`; its error is raised in every rollout.
        """
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            self._prompt_ids = prompt_ids
            await self._ask(self._answer, sample)
        elif prompt_ids != self._prompt_ids:
            return None
        # Shielded: a rollout that is cancelled must not take the answer from the others.
        version, completions = await asyncio.shield(self._answer)
        return version, completions[number]

    async def _ask(
        self,
        answer: asyncio.Future[tuple[int, list[Completion]]],
        sample: Callable[[int], Awaitable[tuple[int, list[Completion]]]],
    ) -> None:
        try:
            answer.set_result(await sample(self._num_rollouts))
        except Exception as error:
            answer.set_exception(error)
        except BaseException:
            answer.cancel()
            raise
