"""Rollouts that programs outside make: an application opens a session, works with it, and posts its reward.

Each rollout of the run waits for somebody to take it, so the run makes as many at a time as it makes of any other
environment: that is the back-pressure. A session that is given up, that nobody uses for `expire_s`, or that ends
without a reward counts for nothing, and its place is free again. Sessions that are to be compared with each other have
the same group, or else the same example, by the names that the application gives them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from prime_rl.configs.envs import EnvConfig
from prime_rl.contract.calls import Open, Opened, Refusal, Reward
from prime_rl.orchestrator.envs.base import AnswersCalls, Example, Outcome, Policy, Posted, Split
from prime_rl.orchestrator.envs.checked import Interrupted
from prime_rl.orchestrator.envs.process import Sessions

# The run knows its examples by numbers; so many are more than are in work at one time.
NUM_EXAMPLES = 4096
# Of a client that finds no place.
RETRY_S = 5.0
# The gateway notes within moments that a client has its session. One whose opening was cut off by a kill has none.
UNDELIVERED_S = 30.0


@dataclass(eq=False)
class _Place:
    """A rollout that waits for somebody to take it."""

    example_id: str
    taken: asyncio.Future[Open] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    opened: asyncio.Future[Opened] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    posted: Posted = field(default_factory=Posted)


class SessionsEnvironment:
    """`[[env]] id = "sessions"`. `is_compared`: a group has several rollouts, so each needs to be told which."""

    def __init__(self, config: EnvConfig, sessions: Sessions, *, is_compared: bool) -> None:
        assert config.sessions is not None
        self.id = config.id
        self._expire_s = config.sessions.expire_s
        self._limits = config.session_limits
        self._range = config.reward_range
        self._sessions = sessions
        self._is_compared = is_compared
        self._examples = [Example(str(number), [], "") for number in range(NUM_EXAMPLES)]
        self._waiting: list[_Place] = []
        # By the name that its clients give a group: its example; and how many rollouts of each example there are.
        self._groups: dict[str, str] = {}
        self._num_rollouts: Counter[str] = Counter()
        # In which order the run needs its examples: one that is made again is needed before all later ones.
        self._order: dict[str, int] = {}
        self._numbers = itertools.count()
        sessions.on_open = self.open

    def examples(self, split: Split) -> Sequence[Example]:
        """Numbers; what a session is about is its client's affair. None to evaluate on."""
        return self._examples if split == "train" else []

    async def open(self, request: Open) -> Opened:
        """A session for a client outside, which takes the place of a waiting rollout. Raises Refusal."""
        name = request.group or request.example
        if self._is_compared and not name:
            raise Refusal(
                400, "invalid_request", 'give "group" or "example": the run compares rollouts of one with each other'
            )
        place = self._place(name if self._is_compared else secrets.token_hex(8))
        if place is None:
            raise Refusal(429, "busy", "all rollouts that the run makes at a time are taken: try again later", RETRY_S)
        self._waiting.remove(place)
        self._note()
        place.taken.set_result(request)
        try:
            return await asyncio.shield(place.opened)
        except asyncio.CancelledError:
            if place.opened.cancelled():  # its rollout was stopped at that moment
                raise Refusal(429, "busy", "the run starts this rollout again: try again", RETRY_S) from None
            place.posted.take(Reward(error="it went away while its session was opened"))
            raise

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """Wait for a client, then for its reward. Raises Interrupted for a session that comes to nothing."""
        place = _Place(example.id)
        self._order.setdefault(example.id, next(self._numbers))
        self._waiting.append(place)
        self._waiting.sort(key=lambda each: self._order[each.example_id])
        self._note()
        self._num_rollouts[example.id] += 1
        try:
            request = await place.taken
            outcome = await self._session(place, request, policy)
            if self._num_rollouts[example.id] == 1:
                self._order.pop(example.id, None)
            return outcome
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
            self._note()
            place.opened.cancel()
            self._num_rollouts[example.id] -= 1
            if not self._num_rollouts[example.id]:
                self._groups = {name: each for name, each in self._groups.items() if each != example.id}

    def _note(self) -> None:
        self._sessions.num_places = len(self._waiting)

    def _place(self, name: str) -> _Place | None:
        """A waiting rollout of the group, or of an example that no group has yet."""
        taken = set(self._groups.values())
        for place in self._waiting:
            if self._groups.get(name) == place.example_id:
                return place
            if name not in self._groups and place.example_id not in taken:
                self._groups[name] = place.example_id
                return place
        return None

    async def _session(self, place: _Place, request: Open, policy: Policy) -> Outcome:
        assert isinstance(policy, AnswersCalls)
        posted, (low, high) = place.posted, self._range

        def take(reward: Reward) -> None:
            total = posted.total_with(reward)
            is_whole = reward.closes and not reward.error  # the parts before it may come to anything
            if is_whole and total is not None and not low <= total <= high:
                words = f"the reward comes to {total:g}: reward_range of the run is [{low:g}, {high:g}]"
                raise Refusal(400, "invalid_request", words)
            posted.take(reward)

        async with self._sessions.open(policy, self._limits, take, request.example or place.example_id) as session:
            place.opened.set_result(Opened(session.id, {"example": request.example, "group": request.group}))
            while not posted.closed.is_set():
                is_known = session.num_requests > 0
                limit_s = self._expire_s if is_known else min(self._expire_s, UNDELIVERED_S)
                if (left_s := limit_s - session.idle_s) <= 0:
                    what = f"was not used for expire_s = {limit_s:g}" if is_known else "did not come to its client"
                    raise Interrupted(f"its session {what}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(posted.closed.wait(), left_s)
        if posted.error:
            raise Interrupted(f"its client gave it up: {posted.error}")
        value = posted.total
        if value is None or not policy.answer_lens:
            raise Interrupted(f"its session was closed without {'a call' if value is not None else 'a reward'}")
        turns = {"turns": float(len(policy.answer_lens))}
        return Outcome(value, turns, dict(posted.rewards), answer_rewards=posted.by_answer)
