"""An environment whose questions come with a system prompt, examples and a template of the run's own."""

from __future__ import annotations

from collections.abc import Sequence

from prime_rl.configs.envs import QUESTION, PromptConfig
from prime_rl.orchestrator.envs.base import Environment, Example, Message, Outcome, Policy, WrappedEnvironment


class PromptedEnvironment(WrappedEnvironment):
    """`environment`, asked as `config` says; it does not see that itself."""

    def __init__(self, environment: Environment, config: PromptConfig) -> None:
        super().__init__(environment)
        self._config = config

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        return await self._environment.rollout(example, _PromptedPolicy(policy, self._config))


class _PromptedPolicy:
    def __init__(self, policy: Policy, config: PromptConfig) -> None:
        self._policy = policy
        self._config = config

    async def complete(self, messages: Sequence[Message]) -> str:
        return await self._policy.complete(shown(messages, self._config))


def shown(messages: Sequence[Message], config: PromptConfig) -> list[Message]:
    """A conversation as the policy sees it. Of a longer one the beginning is the same."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = list(messages[:1]) if has_system else []
    rest = list(messages[has_system:])
    if config.system is not None:
        system = [{"role": "system", "content": config.system}]
    if rest and rest[0]["role"] == "user":
        rest[0] = _asked(rest[0]["content"], config)
    examples: list[Message] = []
    for example in config.examples:
        examples += [_asked(example.prompt, config), {"role": "assistant", "content": example.answer}]
    return [*system, *examples, *rest]


def _asked(question: str, config: PromptConfig) -> Message:
    return {"role": "user", "content": config.template.replace(QUESTION, question)}
