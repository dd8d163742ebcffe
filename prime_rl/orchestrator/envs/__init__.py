"""Environments by the id in `[[env]]`."""

from __future__ import annotations

from prime_rl.configs.base import ConfigError, ConfigProblem, build
from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.orchestrator.envs.base import Environment, Example, Message, Outcome, Policy, Split
from prime_rl.orchestrator.envs.text import TEXT_TASKS, TextArgs, TextEnvironment

__all__ = ["Environment", "Example", "Message", "Outcome", "Policy", "Split", "load_environment"]


def load_environment(config: EnvConfig, seed: int) -> Environment:
    """The environment of one `[[env]]`.

    Raises ConfigError (a ValueError) that names the environment, each wrong argument and what is allowed.
    """
    source = f"env {config.id!r}, args"
    args = build(TextArgs, config.args, source)
    try:
        return TextEnvironment(TEXT_TASKS[config.id], args, seed)
    except ValueError as error:
        raise ConfigError(source, [ConfigProblem("", str(error))]) from error
