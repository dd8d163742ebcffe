"""Around every environment: how it asks, a deadline for each of its steps, a check of what it returns.

The system prompt, the examples and the template of the run are put around its questions; it does not see them. What
happens to its rollouts is counted: where they are, for the account of time (`RolloutMeter`), and which failed.

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
from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from prime_rl.configs.envs import QUESTION, EnvConfig, PromptConfig
from prime_rl.orchestrator.envs.base import (
    MAX_REWARDS,
    Environment,
    Example,
    Message,
    Outcome,
    Policy,
    RolloutError,
    Split,
)
from prime_rl.utils.text import one_line

# The share of failures is taken over the newest so many rollouts, and not before there are so many.
FAILURE_WINDOW = 100
MIN_ROLLOUTS = 10
# Of a single reward, which has no `reward_range`: its advantages must have a place in float32.
MAX_REWARD = 1e30
METRIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
NO_PROMPT = PromptConfig()


class EnvironmentFault(RuntimeError):
    """A rollout that failed in its environment; the message has the reason."""


class Interrupted(EnvironmentFault):
    """A rollout that was lost through another one's fault: it counts for nothing."""


class EnvironmentBroken(RuntimeError):
    """The environment fails too often to go on, or has no examples."""


class RolloutMeter:
    """Is called when a rollout enters or leaves the code of an environment or a turn of the policy.

    This one does nothing; `metrics.PhaseClock` accounts for the time.
    """

    def enter_environment(self) -> None:
        """A rollout begins in the environment's code."""

    def leave_environment(self) -> None:
        """A rollout has ended there, however it went."""

    def begin_turn(self) -> None:
        """From the environment's code to the policy."""

    def end_turn(self) -> None:
        """And back."""


class CheckedEnvironment:
    """One `[[env]]` of a run as the rest of the orchestrator uses it. `num_dropped` counts since the start.

    Args:
        max_failure_share: of the newest rollouts; when more were dropped, `EnvironmentBroken` is raised.
        meter: of its rollouts; None where the time is not accounted for.
        reward_names: single rewards that every rollout must have.
    """

    def __init__(
        self,
        env: Environment,
        config: EnvConfig,
        *,
        max_failure_share: float,
        meter: RolloutMeter | None = None,
        reward_names: Collection[str] = (),
    ) -> None:
        self.num_dropped = 0
        self._env = env
        self._config = config
        self._meter = meter or RolloutMeter()
        self._max_failure_share = max_failure_share
        self._reward_names = reward_names
        self._dropped: deque[bool] = deque(maxlen=FAILURE_WINDOW)

    @property
    def id(self) -> str:
        """The id of its `[[env]]` table."""
        return self._env.id

    def examples(self, split: Split) -> Sequence[Example]:
        """The environment's own examples, without what the run puts around their questions."""
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
        asked = _AskedPolicy(policy, self._config, self._meter)
        task = asyncio.current_task()
        assert task is not None
        self._meter.enter_environment()
        try:
            async with asked.deadline:
                outcome = await self._env.rollout(example, asked)
            outcome = check_outcome(outcome, self._config.reward_range, asked.answer_lens)
            check_names(outcome.rewards, self._reward_names)
            return outcome
        except EnvironmentFault:
            raise
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise
            if asked.error is not None and not isinstance(asked.error, RolloutError):
                raise asked.error from None
            if asked.deadline.expired():
                raise EnvironmentFault(f"a step took longer than timeout_s = {self._config.timeout_s:g}") from None
            raise EnvironmentFault(one_line(f"{type(error).__name__}: {error}")) from error
        finally:
            self._meter.leave_environment()

    def _note_dropped(self, fault: EnvironmentFault) -> None:
        self.num_dropped += 1
        self._dropped.append(True)
        num_dropped, num_seen = self._dropped.count(True), len(self._dropped)
        if num_seen >= MIN_ROLLOUTS and num_dropped > self._max_failure_share * num_seen:
            raise EnvironmentBroken(
                f"env {self._config.label}: {num_dropped} of its newest {num_seen} rollouts were dropped, more than "
                f"max_env_failure_share = {self._max_failure_share:g} of them; last: {fault}"
            ) from fault


class _AskedPolicy:
    """The policy as the environment's code has it in one rollout.

    `deadline` runs only while that code works; `error` is what the policy raised.
    """

    def __init__(self, policy: Policy, config: EnvConfig, meter: RolloutMeter) -> None:
        self.deadline = asyncio.timeout(config.timeout_s)
        self.error: Exception | None = None
        self._policy = policy
        self._config = config
        self._meter = meter

    @property
    def answer_lens(self) -> Sequence[int]:
        return self._policy.answer_lens

    async def complete(self, messages: Sequence[Message]) -> str:
        if self._config.prompt != NO_PROMPT:
            messages = shown(messages, self._config.prompt)
        self.deadline.reschedule(None)
        self._meter.begin_turn()
        try:
            return await self._policy.complete(messages)
        except Exception as error:
            self.error = error
            raise
        finally:
            self._meter.end_turn()
            self.deadline.reschedule(asyncio.get_running_loop().time() + self._config.timeout_s)


def shown(messages: Sequence[Message], prompt: PromptConfig) -> list[Message]:
    """A conversation as the policy sees it. Of a longer one the beginning is the same."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = list(messages[:1]) if has_system else []
    rest = list(messages[has_system:])
    if prompt.system is not None:
        system = [{"role": "system", "content": prompt.system}]
    if rest and rest[0]["role"] == "user":
        rest[0] = _asked(rest[0]["content"], prompt)
    examples: list[Message] = []
    for example in prompt.examples:
        examples += [_asked(example.prompt, prompt), {"role": "assistant", "content": example.answer}]
    return [*system, *examples, *rest]


def _asked(question: str, prompt: PromptConfig) -> Message:
    return {"role": "user", "content": prompt.template.replace(QUESTION, question)}


def check_outcome(outcome: object, reward_range: tuple[float, float], answer_lens: Sequence[int]) -> Outcome:
    """`outcome` with plain numbers in it. Raises EnvironmentFault for anything else, or a reward out of range.

    Args:
        answer_lens: tokens of each answer of the policy, which `advantages` must fit.
    """
    if not isinstance(outcome, Outcome):
        raise EnvironmentFault(f"returned {type(outcome).__name__} instead of an Outcome")
    low, high = reward_range
    reward = _number("the reward", outcome.reward)
    if not low <= reward <= high:
        raise EnvironmentFault(f"the reward is {reward:g}, not within reward_range = [{low:g}, {high:g}]")
    metrics, rewards = _named("metric", outcome.metrics), _named("reward", outcome.rewards)
    if len(rewards) > MAX_REWARDS:
        raise EnvironmentFault(f"there are {len(rewards)} rewards, at most {MAX_REWARDS} are allowed")
    if large := [name for name, value in rewards.items() if abs(value) > MAX_REWARD]:
        raise EnvironmentFault(f"the reward {large[0]} is {rewards[large[0]]:g}, at most {MAX_REWARD:g} is allowed")
    num_given = len(outcome.advantages)
    if num_given not in (0, len(answer_lens)):
        raise EnvironmentFault(f"there are advantages of {num_given} turns, but the policy took {len(answer_lens)}")
    given = zip(outcome.advantages, answer_lens, strict=False)
    advantages = tuple(_credit(turn, value, length) for turn, (value, length) in enumerate(given, 1))
    return Outcome(reward, metrics, rewards, advantages)


def check_names(rewards: Mapping[str, float], wanted: Collection[str]) -> None:
    """Raises EnvironmentFault when one of the `wanted` rewards is missing."""
    if missing := [name for name in wanted if name not in rewards]:
        there = ", ".join(sorted(rewards)) or "none"
        raise EnvironmentFault(f"no reward {missing[0]!r}, which advantage.reward_weights names; found: {there}")


def _named(kind: str, values: object) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise EnvironmentFault(f"the {kind}s are {type(values).__name__} instead of dict")
    for name in values:
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise EnvironmentFault(f"{one_line(repr(name), 80)} is not a valid name of a {kind}")
    return {name: _number(name, value) for name, value in values.items()}


def _credit(turn: int, value: Any, length: int) -> float | list[float]:
    """The advantage of all tokens of a turn, or of each: numbers that float32 has a place for."""
    what = f"the advantage of turn {turn}"
    is_one = isinstance(value, numbers.Real)
    try:
        if not is_one and len(value) != length:
            raise EnvironmentFault(f"{what} has length {len(value)}, but its answer has {length} tokens")
        values = array("f", [value] if is_one else iter(value))
    except (TypeError, ValueError, OverflowError):
        raise EnvironmentFault(f"{what} is neither a number nor a number for each token") from None
    if not all(map(math.isfinite, values)):
        raise EnvironmentFault(f"{what} is not finite in float32")
    return values[0] if is_one else values.tolist()


def _number(what: str, value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise EnvironmentFault(f"{what} is {type(value).__name__} instead of a number")
    number = float(value)
    if not math.isfinite(number):
        raise EnvironmentFault(f"{what} is {number}")
    return number
