"""An environment whose rollouts are counted while they are in its own code, for the account of where time goes."""

from __future__ import annotations

from collections.abc import Sequence

from prime_rl.orchestrator.envs.base import Environment, Example, Message, Outcome, Policy, WrappedEnvironment
from prime_rl.orchestrator.metrics import RolloutMeter


class MeteredEnvironment(WrappedEnvironment):
    """`environment`; `meter` counts every rollout that enters its code or asks the policy."""

    def __init__(self, environment: Environment, meter: RolloutMeter) -> None:
        super().__init__(environment)
        self._meter = meter

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        self._meter.enter_environment()
        try:
            return await self._environment.rollout(example, _MeteredPolicy(policy, self._meter))
        finally:
            self._meter.leave_environment()


class _MeteredPolicy:
    def __init__(self, policy: Policy, meter: RolloutMeter) -> None:
        self._policy = policy
        self._meter = meter

    async def complete(self, messages: Sequence[Message]) -> str:
        self._meter.begin_turn()
        try:
            return await self._policy.complete(messages)
        finally:
            self._meter.end_turn()
