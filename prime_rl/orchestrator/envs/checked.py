"""Around every environment: how it asks, a deadline for each of its steps, a check of what it returns.

The system prompt, the examples and the template of the run are put around its questions; it does not see them. What
happens to its rollouts is counted: where they are, for the account of time (`RolloutMeter`), and which failed.

Environment code may raise, hang, or return an invalid reward. Such a rollout is dropped (`EnvironmentFault`), and its
group is completed by another one: see `rollout.RolloutWorker`. An example whose first prompt cannot be sampled from, or
that fails in each of its tries, is unusable (`ExampleUnusable`): it is dropped once and for all. When too large a share
of the newest rollouts is dropped, or of the examples, or when time limits are all that is reached (`TimedOut`),
`EnvironmentBroken` ends the run with the last error. What the policy raises is not the environment's fault and passes
through. A step that never gives control back cannot be timed out here: code that is not ours runs in a process
(`process.ProcessEnvironment`), which can be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import numbers
import re
import socket
from array import array
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from prime_rl.configs.envs import EnvConfig, PromptConfig
from prime_rl.contract.calls import Answer, Call
from prime_rl.orchestrator.envs.base import (
    MAX_REWARDS,
    AnswersCalls,
    Environment,
    Example,
    Message,
    Outcome,
    Policy,
    PolicyError,
    RolloutError,
    Split,
    as_messages,
)
from prime_rl.utils.text import one_line

if TYPE_CHECKING:
    from prime_rl.orchestrator.envs.agent_judge import Judge

logger = logging.getLogger("orchestrator")

# The share of failures is taken over the newest so many rollouts, and not before there are so many.
FAILURE_WINDOW = 100
MIN_ROLLOUTS = 10
# The share of unusable examples is not taken before so many were tried, or all that there are.
MIN_EXAMPLES = 10
# The run ends when rollouts reach so many time limits, each begun after the last, and none succeeds meanwhile, nor can,
# of those begun before the first: a group, given up at the second, and another one. Shares of rollouts take far longer
# where few are made at once.
MAX_TIME_LIMITS = 3
# Of a single reward, which has no `reward_range`: its advantages must have a place in float32.
MAX_REWARD = 1e30
# What to do about drops, which the run's log names one by one.
_TRY = "see the run's log; prl env try FILE tries a change"
# Of what a program has printed, in a reason.
MAX_LAST_CHARS = 300
METRIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
NO_PROMPT = PromptConfig()


class EnvironmentFault(RuntimeError):
    """A rollout that failed in its environment; the message has the reason."""


class Transient(EnvironmentFault):
    """A rollout that failed for a cause that passes: a timeout, a lost connection, a process that died."""


class TimedOut(Transient):
    """A rollout that reached a time limit, which another try seldom changes and waits as long for."""


class Interrupted(Transient):
    """A rollout that was lost through another one's fault: it counts for nothing."""


class ExampleUnusable(EnvironmentFault):
    """No further rollout of the example is made: it would fail too."""


class EnvironmentBroken(RuntimeError):
    """The environment fails too often to go on, or has no examples."""


# By the names that they have in the messages of a process.
FAULTS: Mapping[str, type[EnvironmentFault]] = {
    kind.__name__: kind for kind in (EnvironmentFault, Transient, TimedOut, ExampleUnusable)
}


def fault_of(error: BaseException, *, at_first_turn: bool = False) -> EnvironmentFault:
    """The fault that `error` of an environment's code is. `at_first_turn`: the policy has not answered yet."""
    if isinstance(error, EnvironmentFault):
        return error
    if isinstance(error, PolicyError):
        return Transient(one_line(str(error), 1000))
    if isinstance(error, RolloutError):
        return (ExampleUnusable if at_first_turn else EnvironmentFault)(one_line(str(error), 1000))
    where = "".join(getattr(error, "__notes__", ()))
    text, cause, seen = one_line(f"{type(error).__name__}: {error}{where}", 1000), error, [error]
    while not isinstance(cause, ConnectionError | TimeoutError | socket.gaierror):
        found = cause.__cause__ or cause.__context__
        if found is None or found in seen:
            return EnvironmentFault(text)
        seen.append(cause := found)
    return Transient(text)


class RolloutMeter:
    """Is called when a rollout enters or leaves the code of an environment or a turn of the policy.

    This one does nothing; `metrics.PhaseClock` accounts for the time.
    """

    def move(self, *, in_environment: int, in_turn: int = 0) -> None:
        """So many rollouts more are in the code of their environment, and in a turn of the policy; or fewer."""


@runtime_checkable
class Waits(Protocol):
    """An environment whose rollouts need something that may be away."""

    async def ready(self) -> None:
        """Returns once a rollout can begin."""


class CheckedEnvironment:
    """One `[[env]]` of a run as the rest of the orchestrator uses it.

    Args:
        max_failure_share: of the newest rollouts, and of the examples; when more failed, `EnvironmentBroken` is raised.
        meter: of its rollouts; None where the time is not accounted for.
        reward_names: single rewards that every rollout must have.
        name: what people call it; None: its label.
        num_examples: how many there are to be tried; None: more than MIN_EXAMPLES.
        num_tries: rollouts of an example that may fail before it is unusable, if none has succeeded.

    Attributes:
        judge_config, judge: of what sets the rewards of its rollouts once they are made, in place of the environment.
        num_dropped: rollouts since the start.
        unusable: the reason of each unusable example, by its id.
    """

    def __init__(
        self,
        env: Environment,
        config: EnvConfig,
        *,
        max_failure_share: float,
        meter: RolloutMeter | None = None,
        reward_names: Collection[str] = (),
        name: str | None = None,
        num_examples: int | None = None,
        num_tries: int = 1,
    ) -> None:
        self.id = env.id
        self.judge_config = config.agent.judge if config.agent else None
        self.judge: Judge | None = None
        self.num_dropped = 0
        self.unusable: dict[str, str] = {}
        self.name = name or config.label
        self._num_examples = num_examples
        self._num_tries = num_tries
        self._num_rollouts = 0
        # By example: how many of its rollouts have failed while none has succeeded; None once one has.
        self._failures: dict[str, int | None] = {}
        self._last_drop = (0, "")  # at which rollout, and what
        self._at_work: dict[_AskedPolicy, str] = {}
        self._env = env
        self._config = config
        self._meter = meter or RolloutMeter()
        self._max_failure_share = max_failure_share
        self._reward_names = reward_names
        self._dropped: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        # Time limits reached one after the other since a rollout succeeded, and when the first and the last of them was
        # (of the event loop).
        self._num_limits, self._first_limit_s, self._limit_at_s = 0, math.inf, -math.inf

    def examples(self, split: Split) -> Sequence[Example]:
        """The environment's own examples, without what the run puts around their questions."""
        return self._env.examples(split)

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """The environment's rollout. Raises EnvironmentFault, EnvironmentBroken, and what the policy raises."""
        if example.id in self.unusable:
            raise ExampleUnusable(self.unusable[example.id])
        self._failures.setdefault(example.id, 0)
        if isinstance(self._env, Waits):
            await self._env.ready()
        asked = _AskedPolicy(policy, self._config, self._meter)
        try:
            outcome = await self._bounded(example, asked)
        except Interrupted:
            raise
        except EnvironmentFault as fault:
            if isinstance(fault, TimedOut) and asked.began_s >= self._limit_at_s:
                self._num_limits, self._limit_at_s = self._num_limits + 1, asyncio.get_running_loop().time()
                self._first_limit_s = min(self._first_limit_s, self._limit_at_s)
            self._note_dropped(example.id, fault)
            raise
        self._num_rollouts += 1
        self._num_limits, self._first_limit_s = 0, math.inf
        self._dropped.extend([True] * (self._failures[example.id] or 0))  # by chance, as it turns out
        self._failures[example.id] = None
        self._dropped.append(False)
        return outcome

    def note_lost(self, example_id: str, fault: EnvironmentFault, num_rollouts: int) -> None:
        """Count rollouts as dropped that had counted as made: their judge failed. Raises as `rollout` does."""
        for _ in range(num_rollouts):
            self._num_rollouts -= 1
            with contextlib.suppress(ValueError):
                self._dropped.remove(False)
            self._note_dropped(example_id, fault)

    def problem(self) -> str | None:
        """The trouble in it, in words; None while there is none. A drop is told for FAILURE_WINDOW rollouts."""
        half_s = self._config.timeout_s / 2
        hanging = {each.step_s(): example_id for each, example_id in self._at_work.items() if each.step_s() > half_s}
        if hanging:
            step_s = max(hanging)
            return (
                f"env {self.name}: a step of example {one_line(hanging[step_s], 80)} takes {step_s:.0f} s already "
                f"(timeout_s = {self._config.timeout_s:g}); find what it waits for, or raise timeout_s"
            )
        at, last = self._last_drop
        if not self.unusable and (not last or self._num_rollouts - at >= FAILURE_WINDOW):
            return None
        share = max(0.1, round(100 * self.num_dropped / self._num_rollouts, 1))
        num, plural = len(self.unusable), "s" * (len(self.unusable) > 1)
        examples = f", {num} example{plural} unusable" if num else ""
        return f"env {self.name}: {share:g} % of rollouts dropped{examples}: {last}; {_TRY}"

    async def _bounded(self, example: Example, asked: _AskedPolicy) -> Outcome:
        task = asyncio.current_task()
        assert task is not None
        self._meter.move(in_environment=1)
        self._at_work[asked] = example.id
        try:
            async with asked.deadline:
                outcome = await self._env.rollout(example, asked)
            outcome = check_outcome(outcome, self._config.reward_range, asked.answer_lens)
            check_names(outcome.rewards, self._reward_names)
            if self._config.agent and not asked.answer_lens:
                raise EnvironmentFault(f"the program ended without asking the policy{last_lines(outcome.output)}")
            return outcome
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise
            if asked.error is not None and not isinstance(asked.error, RolloutError):
                raise asked.error from None
            if asked.deadline.expired():
                raise TimedOut(f"a step took longer than timeout_s = {self._config.timeout_s:g}") from None
            if isinstance(error, EnvironmentFault):
                raise
            raise fault_of(asked.error or error, at_first_turn=not asked.answer_lens) from error
        finally:
            self._meter.move(in_environment=-1)
            del self._at_work[asked]

    def _note_dropped(self, example_id: str, fault: EnvironmentFault) -> None:
        """Count a rollout, and judge by it. Raises ExampleUnusable and EnvironmentBroken."""
        self.num_dropped += 1
        self._num_rollouts += 1
        last = f"{fault} in example {one_line(example_id, 80)}"
        self._last_drop = self._num_rollouts, last
        num_failed = self._failures[example_id]
        if num_failed is None or isinstance(fault, Transient):
            self._dropped.append(True)
            num_dropped, num_seen = self._dropped.count(True), len(self._dropped)
            if num_seen >= MIN_ROLLOUTS and num_dropped > self._max_failure_share * num_seen:
                raise self._broken(f"{num_dropped} of its newest {num_seen} rollouts were dropped", last)
            may_succeed = any(each.began_s < self._first_limit_s for each in self._at_work)
            if self._num_limits >= MAX_TIME_LIMITS and not may_succeed and self._max_failure_share < 1:
                found = f"{self._num_limits} time limits in a row were reached, and no rollout succeeded"
                raise EnvironmentBroken(f"env {self.name}: {found}; last: {last}")
            return
        self._failures[example_id] = num_failed + 1
        if num_failed < self._num_tries and not isinstance(fault, ExampleUnusable):
            return
        self.unusable[example_id] = str(fault)
        logger.warning("env %s: unusable from now on: %s", self.name, last)
        num_unusable, num_tried = len(self.unusable), len(self._failures)
        if num_unusable == self._num_examples:
            raise EnvironmentBroken(f"env {self.name}: all {num_unusable} examples are unusable; last: {last}")
        if num_tried >= MIN_EXAMPLES and num_unusable > self._max_failure_share * num_tried:
            raise self._broken(f"{num_unusable} of the {num_tried} examples tried are unusable", last)
        raise ExampleUnusable(str(fault)) from fault

    def _broken(self, what: str, last: str) -> EnvironmentBroken:
        limit = f"max_env_failure_share = {self._max_failure_share:g}"
        return EnvironmentBroken(f"env {self.name}: {what}, more than {limit} of them; last: {last}")


class _AskedPolicy:
    """The policy as the environment's code has it in one rollout.

    `deadline` runs only while that code works; `error` is what the policy raised; `began_s`: of the event loop.
    """

    def __init__(self, policy: Policy, config: EnvConfig, meter: RolloutMeter) -> None:
        # Whoever makes the rollouts of sessions takes the time that they take.
        self._limit_s = None if config.sessions else config.timeout_s
        self.deadline = asyncio.timeout(self._limit_s)
        self.began_s = asyncio.get_running_loop().time()
        self.error: Exception | None = None
        self._num_turns = 0
        self._policy = policy
        self._config = config
        self._meter = meter

    @property
    def answer_lens(self) -> Sequence[int]:
        return self._policy.answer_lens

    def step_s(self) -> float:
        """Seconds since the environment's present step began; 0 while the policy has its turn."""
        end_s = self.deadline.when()
        return 0.0 if end_s is None else asyncio.get_running_loop().time() - end_s + self._config.timeout_s

    async def complete(self, messages: Sequence[Message]) -> str:
        with self._turn():
            messages = as_messages(messages)
            if self._config.prompt != NO_PROMPT:
                messages = self._config.prompt.shown(messages)
            return await self._policy.complete(messages)

    async def call(self, call: Call) -> Answer:
        """The same for a call, around which nothing is put. Several may be at once."""
        with self._turn():
            if not isinstance(self._policy, AnswersCalls):
                raise RolloutError(f"{type(self._policy).__name__} answers no calls")
            return await self._policy.call(call)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The deadline is off, and the time is the policy's, until the last turn of those under way has ended."""
        if self.deadline.expired():
            raise RolloutError("its time is over")
        self._num_turns += 1
        if self._num_turns == 1:
            self.deadline.reschedule(None)
            self._meter.move(in_environment=-1, in_turn=1)
        try:
            yield
        except Exception as error:
            self.error = error
            raise
        finally:
            self._num_turns -= 1
            if not self._num_turns:
                self._meter.move(in_environment=1, in_turn=-1)
                limit_s = self._limit_s
                self.deadline.reschedule(None if limit_s is None else asyncio.get_running_loop().time() + limit_s)


def check_outcome(
    outcome: object,
    reward_range: tuple[float, float] = (-math.inf, math.inf),
    answer_lens: Sequence[int] | None = None,
) -> Outcome:
    """`outcome` with plain numbers in it. Raises EnvironmentFault for anything else, or a reward out of range.

    Args:
        answer_lens: tokens of each answer of the policy, which `advantages` must fit; None where that is not known.
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
    lens = [None] * num_given if answer_lens is None else answer_lens
    if num_given not in (0, len(lens)):
        raise EnvironmentFault(f"there are advantages of {num_given} turns, but the policy took {len(lens)}")
    given = zip(outcome.advantages, lens, strict=False)
    advantages = tuple(_credit(turn, value, length) for turn, (value, length) in enumerate(given, 1))
    return replace(outcome, reward=reward, metrics=metrics, rewards=rewards, advantages=advantages)


def last_lines(output: str) -> str:
    """The end of what a program has printed, as the end of a reason; "" without output."""
    words = one_line(" | ".join(output.strip().splitlines()[-3:])[-MAX_LAST_CHARS:], MAX_LAST_CHARS)
    return f"; its last output: {words}" if words else ""


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


def _credit(turn: int, value: Any, length: int | None) -> float | list[float]:
    """The advantage of all tokens of a turn, or of each: numbers that float32 has a place for."""
    what = f"the advantage of turn {turn}"
    is_one = _is_number(value)
    try:
        if not is_one and length is not None and len(value) != length:
            raise EnvironmentFault(f"{what} has length {len(value)}, but its answer has {length} tokens")
        values = array("f", [value] if is_one else iter(value))
    except (TypeError, ValueError, OverflowError):
        raise EnvironmentFault(f"{what} is neither a number nor a number for each token") from None
    if not all(map(math.isfinite, values)):
        raise EnvironmentFault(f"{what} is not finite in float32")
    return values[0] if is_one else values.tolist()


def _is_number(value: object) -> bool:
    """True when it is a real number. numpy's truth values are, as Python's are."""
    dtype = getattr(value, "dtype", None)
    return isinstance(value, numbers.Real) or (getattr(dtype, "kind", "") == "b" and getattr(value, "ndim", 1) == 0)


def _number(what: str, value: object) -> float:
    if not _is_number(value):
        raise EnvironmentFault(f"{what} is {type(value).__name__} instead of a number")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise EnvironmentFault(f"{what} is {number}")
    return number
