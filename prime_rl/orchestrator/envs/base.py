"""An environment, as the orchestrator sees it: examples, and a rollout that ends in a reward.

The orchestrator hands each rollout a `Policy` that talks to inference and records every token; the environment only
sees text. It never sees tokens, log-probabilities, adapters or other rollouts, so one that is written here serves
training and evaluation alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

from prime_rl.contract.calls import Answer, Call, Reward
from prime_rl.utils.chat_template import content_text

Split = Literal["train", "eval"]
# Each name of a reward is a metric of the run.
MAX_REWARDS = 16


class Message(TypedDict):
    """One turn of a chat, as chat templates take it. An environment may also give `content` in text parts."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Example:
    """One problem. `id` is unique in its environment and split; `info` is the environment's own.

    `level` is how hard it is, from 0 on, where a run goes from easy to hard ones (`curriculum`).
    """

    id: str
    messages: list[Message]
    answer: str
    info: dict[str, Any] = field(default_factory=dict)
    level: int = 0


@dataclass(frozen=True)
class Outcome:
    """The result of a rollout.

    Attributes:
        reward: within `reward_range`.
        metrics: named figures, averaged into the metrics of the run.
        rewards: what `reward` is made of, by name, for runs with `advantage.reward_weights`; at most `MAX_REWARDS`.
        advantages: the environment's own, in place of those that follow from the rewards; () without them. One entry
            for each answer of the policy: a number for all its tokens, or a number for each of them.
        output: the end of what its program printed, for people.
        answer_rewards: those that were posted for single answers, by their numbers, for reports.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    advantages: Sequence[float | Sequence[float]] = ()
    output: str = ""
    answer_rewards: Mapping[int, float] = field(default_factory=dict)


class RolloutError(RuntimeError):
    """A request to the policy that cannot be a part of a rollout; the message has the reason."""


class PolicyError(RolloutError):
    """The policy itself is at fault, and no example: its adapter is refused."""


def as_messages(messages: Any) -> list[Message]:
    """`messages` of an environment with what is sent of them; text parts of OpenAI's form become one text.

    Raises RolloutError for what is not a message, or has a role or content that is not text.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RolloutError(f"the messages are {type(messages).__name__}: must be a list")
    return [_as_message(f"message {number}", message) for number, message in enumerate(messages)]


def _as_message(what: str, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise RolloutError(f"{what} is {type(message).__name__}: must be a dict with role and content")
    role: Any = message.get("role")
    content = content_text(message.get("content"))
    if problem := text_problem(f"the role of {what}", role) or text_problem(f"the content of {what}", content):
        raise RolloutError(problem)
    return {"role": role, "content": content}


def text_problem(what: str, text: Any) -> str | None:
    """Why `text` cannot be sent: it is not text, or has half of a surrogate pair in it. None when it can."""
    if not isinstance(text, str):
        return f"{what} is {type(text).__name__}: must be a string"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{what} has a surrogate at character {error.start}, which cannot be encoded"
    return None


class Policy(Protocol):
    """The model as an environment sees it."""

    @property
    def answer_lens(self) -> Sequence[int]:
        """Tokens of each answer so far, with the token that ended it."""

    async def complete(self, messages: Sequence[Message]) -> str:
        """One assistant turn that follows `messages`. Raises RolloutError, and what inference raises."""


class Posted:
    """The rewards that were posted to the session of a rollout so far.

    Attributes:
        value: of the whole rollout; None: none yet.
        by_answer: that of single answers, by their numbers in the session.
        error: what the client says went wrong.
        closed: set once the session takes no more calls.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self.rewards: dict[str, float] = {}
        self.by_answer: dict[int, float] = {}
        self.error = ""
        self.closed = asyncio.Event()

    def take(self, reward: Reward) -> None:
        """Note one more: of two for the same the later one counts."""
        if reward.number is not None and reward.value is not None:
            self.by_answer[reward.number] = reward.value
        elif reward.value is not None:
            self.value = reward.value
        self.rewards |= reward.rewards
        self.error = reward.error or self.error
        if reward.closes:
            self.closed.set()

    @property
    def total(self) -> float | None:
        """The reward of the whole rollout, or without one the sum of those of its answers; None: there is neither."""
        return self.total_with(Reward())

    def total_with(self, reward: Reward) -> float | None:
        """The same once `reward` is taken."""
        value, by_answer = self.value, dict(self.by_answer)
        if reward.number is None:
            value = reward.value if reward.value is not None else value
        elif reward.value is not None:
            by_answer[reward.number] = reward.value
        return sum(by_answer.values()) if value is None and by_answer else value


@runtime_checkable
class AnswersCalls(Protocol):
    """The model as the gateway's clients see it."""

    async def call(self, call: Call) -> Answer:
        """The turn as a call asks for it. Raises RolloutError, and what inference raises."""


class HasExamples(Protocol):
    """Examples in two splits."""

    def examples(self, split: Split) -> Sequence[Example]:
        """All examples of a split, always the same ones in the same order; the splits share no example."""


class Environment(HasExamples, Protocol):
    """Examples, and how a rollout of one of them goes. `id` is that of its `[[env]]` table."""

    @property
    def id(self) -> str:
        """The `id` of its `[[env]]` table."""

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """Let `policy` work on `example` and score what it did."""
