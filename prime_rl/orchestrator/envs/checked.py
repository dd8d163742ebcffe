"""Around every environment: a deadline for each of its steps, a check of what it returns, a count of what went wrong.

Environment code may raise, hang, or return an invalid reward. Such a rollout is dropped (`EnvironmentFault`), and its
group is completed by another one: see `rollout.RolloutWorker`. When too large a share of the newest rollouts is
dropped, `EnvironmentBroken` ends the run with the last error. What the policy raises is not the environment's fault and
passes through. A step that never gives control back cannot be timed out here: code that is not ours runs in a process
(`process.ProcessEnvironment`), which can be killed.
"""

from __future__ import annotations

import asyncio
import math
import numbers
import re
from collections import deque
from collections.abc import Sequence

from prime_rl.configs.envs import EnvConfig
from prime_rl.orchestrator.envs.base import Environment, Example, Message, Outcome, Policy, Split
from prime_rl.orchestrator.turn import RolloutError
from prime_rl.utils.text import one_line

# The share of failures is taken over the newest so many rollouts, and not before there are so many.
FAILURE_WINDOW = 100
MIN_ROLLOUTS = 10
METRIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")


class EnvironmentFault(RuntimeError):
    """A rollout that failed in its environment; the message has the reason."""


class Interrupted(EnvironmentFault):
    """A rollout that was lost through another one's fault: it counts for nothing."""


class EnvironmentBroken(RuntimeError):
    """The environment fails too often to go on."""


class CheckedEnvironment:
    """One `[[env]]` of a run as the rest of the orchestrator uses it. `num_dropped` counts since the start."""

    def __init__(self, env: Environment, config: EnvConfig, *, max_failure_share: float) -> None:
        self.num_dropped = 0
        self._env = env
        self._name = config.label
        self._timeout_s = config.timeout_s
        self._reward_range = config.reward_range
        self._max_failure_share = max_failure_share
        self._dropped: deque[bool] = deque(maxlen=FAILURE_WINDOW)

    @property
    def id(self) -> str:
        return self._env.id

    def examples(self, split: Split) -> Sequence[Example]:
        return self._env.examples(split)

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """The environment's rollout. Raises EnvironmentFault, EnvironmentBroken, and what the policy raises."""
        try:
            outcome = await self._bounded(example, policy)
        except Interrupted:
            raise
        except EnvironmentFault as fault:
            self._note_dropped(fault)
            raise
        self._dropped.append(False)
        return outcome

    async def _bounded(self, example: Example, policy: Policy) -> Outcome:
        timed = _TimedPolicy(policy, self._timeout_s)
        task = asyncio.current_task()
        assert task is not None
        try:
            async with timed.deadline:
                outcome = await self._env.rollout(example, timed)
            return check_outcome(outcome, self._reward_range)
        except EnvironmentFault:
            raise
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise
            if timed.error is not None and not isinstance(timed.error, RolloutError):
                raise timed.error from None
            if timed.deadline.expired():
                raise EnvironmentFault(f"a step took longer than timeout_s = {self._timeout_s:g}") from None
            raise EnvironmentFault(one_line(f"{type(error).__name__}: {error}")) from error

    def _note_dropped(self, fault: EnvironmentFault) -> None:
        self.num_dropped += 1
        self._dropped.append(True)
        num_dropped, num_seen = self._dropped.count(True), len(self._dropped)
        if num_seen >= MIN_ROLLOUTS and num_dropped > self._max_failure_share * num_seen:
            raise EnvironmentBroken(
                f"env {self._name}: {num_dropped} of its newest {num_seen} rollouts were dropped, more than "
                f"max_env_failure_share = {self._max_failure_share:g} of them; last: {fault}"
            ) from fault


class _TimedPolicy:
    """The policy, with a clock that runs only while the environment works. `error` is what the policy raised."""

    def __init__(self, policy: Policy, timeout_s: float) -> None:
        self.deadline = asyncio.timeout(timeout_s)
        self.error: Exception | None = None
        self._policy = policy
        self._timeout_s = timeout_s

    async def complete(self, messages: Sequence[Message]) -> str:
        self.deadline.reschedule(None)
        try:
            return await self._policy.complete(messages)
        except Exception as error:
            self.error = error
            raise
        finally:
            self.deadline.reschedule(asyncio.get_running_loop().time() + self._timeout_s)


def check_outcome(outcome: object, reward_range: tuple[float, float]) -> Outcome:
    """`outcome` with plain numbers in it. Raises EnvironmentFault for anything else, or a reward out of range."""
    if not isinstance(outcome, Outcome):
        raise EnvironmentFault(f"returned {type(outcome).__name__} instead of an Outcome")
    low, high = reward_range
    reward = _number("the reward", outcome.reward)
    if not low <= reward <= high:
        raise EnvironmentFault(f"the reward is {reward:g}, not within reward_range = [{low:g}, {high:g}]")
    if not isinstance(outcome.metrics, dict):
        raise EnvironmentFault(f"the metrics are {type(outcome.metrics).__name__} instead of dict")
    for name in outcome.metrics:
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise EnvironmentFault(f"{one_line(repr(name), 80)} is not a valid name of a metric")
    return Outcome(reward, {name: _number(name, value) for name, value in outcome.metrics.items()})


def _number(what: str, value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise EnvironmentFault(f"{what} is {type(value).__name__} instead of a number")
    number = float(value)
    if not math.isfinite(number):
        raise EnvironmentFault(f"{what} is {number}")
    return number
