"""Evaluation beside generation: the eval split, one policy version at a time, pinned for as long as it takes.

It has its own sampling, and may have its own environments. Versions 0, `interval`, 2 `interval`, ... and `max_steps`
are due. A due version that was skipped, or that came while an evaluation ran, is made up for by the version that is
current then. Where a new version would take the place of the pinned one (the run trains the whole model), it comes when
the evaluation is done. Evaluation shares the limit of requests of the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

from prime_rl.configs.orchestrator import EvalConfig, OrchestratorConfig
from prime_rl.contract.files import held_async
from prime_rl.contract.layout import RunDir
from prime_rl.orchestrator.client import AccessDenied, AdapterRefused
from prime_rl.orchestrator.envs.base import Environment
from prime_rl.orchestrator.envs.checked import EnvironmentBroken
from prime_rl.orchestrator.metrics import eval_metrics, last_eval_step, write_metrics
from prime_rl.orchestrator.policy import ChatTokenizer, PolicyVersions, TurnSampler
from prime_rl.orchestrator.recorder import PolicySession, Rollout, derive_seed
from prime_rl.orchestrator.rollout import judged, together
from prime_rl.orchestrator.sampler import Pick

logger = logging.getLogger(__name__)


def next_due(after: int | None, interval: int, max_steps: int) -> int:
    """The version to evaluate after `after` (None: nothing evaluated yet)."""
    return 0 if after is None else min(after // interval * interval + interval, max_steps)


async def eval_rollout(
    turns: TurnSampler, tokenizer: ChatTokenizer, env: Environment, pick: Pick, number: int, *, seed: int, version: int
) -> Rollout:
    """Rollout `number` of an example of the eval split; `seed` is the run's. It has the same seed at every version."""
    own_seed = derive_seed(seed, "eval", pick.env_name, pick.example.id, number)
    rollout = await PolicySession(turns, tokenizer, seed=own_seed, version=version).rollout(env, pick.example)
    return (await judged(env, pick.example, [rollout], tokenizer))[0]


class Evaluator:
    """Evaluates the run's policy when it is due. `done` is set when version `max_steps` has been evaluated.

    Args:
        turns: samples as evaluations do.
        envs: of evaluations.
        on_figures: called with the version and the figures of each evaluation.
        step: where the run goes on; evaluations of later versions are void.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        run: RunDir,
        turns: TurnSampler,
        tokenizer: ChatTokenizer,
        policy: PolicyVersions,
        envs: Mapping[str, Environment],
        *,
        step: int,
        on_figures: Callable[[int, Mapping[str, float]], None] = lambda version, figures: None,
    ) -> None:
        self.done = asyncio.Event()
        self._config = config.eval or EvalConfig()
        self._run = run
        self._turns = turns
        self._tokenizer = tokenizer
        self._policy = policy
        self._envs = envs
        self._on_figures = on_figures
        self._pass_rewards = config.pass_rewards
        self._seed = config.seed
        self._max_steps = config.max_steps
        self._last_step = last_eval_step(run.orchestrator_metrics, at_most=step)

    async def loop(self) -> None:
        """Until the last version has been evaluated."""
        while self._last_step is None or self._last_step < self._max_steps:
            due = next_due(self._last_step, self._config.interval, self._max_steps)
            async with self._policy.pin(due) as version:
                await self.evaluate(version)
            self._last_step = version
        self.done.set()

    async def evaluate(self, version: int) -> None:
        """Evaluate `version`, which is pinned, in all environments and write one line of metrics."""
        values: dict[str, float] = {}
        start_s = time.monotonic()
        for env_name in self._envs:
            values |= await self._evaluate_env(env_name, version)
        if values:
            logger.info("eval of version %d: %s", version, {name: round(value, 4) for name, value in values.items()})
            values["time/eval"] = time.monotonic() - start_s
            write = partial(write_metrics, self._run.orchestrator_metrics, version, values, time.time())
            await held_async(write, self._run.path)
            self._on_figures(version, values)

    async def _evaluate_env(self, env_name: str, version: int) -> dict[str, float]:
        examples = self._envs[env_name].examples("eval")[: self._config.num_examples]
        results = await together(
            self._one(Pick(env_name, example), number, version)
            for example in examples
            for number in range(self._config.rollouts_per_example)
        )
        each = self._config.rollouts_per_example
        of_example = (results[at : at + each] for at in range(0, len(results), each))
        by_example = [[rollout for rollout in tried if rollout is not None] for tried in of_example]
        succeeded = [rollouts for rollouts in by_example if rollouts]
        if not succeeded:
            logger.warning("eval of version %d: no rollout of %s succeeded", version, env_name)
            return {}
        num_failed = len(results) - sum(map(len, succeeded))
        figures = eval_metrics(env_name, succeeded, self._pass_rewards[env_name])
        return {f"eval/{env_name}/num_failed": num_failed, **figures}

    async def _one(self, pick: Pick, number: int, version: int) -> Rollout | None:
        """One rollout; None when it failed, which the run survives."""
        env = self._envs[pick.env_name]
        try:
            return await eval_rollout(self._turns, self._tokenizer, env, pick, number, seed=self._seed, version=version)
        except (AccessDenied, AdapterRefused, EnvironmentBroken):
            raise
        except Exception as error:  # whatever an environment raises is its own affair
            logger.warning("eval of version %d, %s: %s", version, pick.example.id, error)
            return None
