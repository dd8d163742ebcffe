"""Environments by the id in `[[env]]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prime_rl.configs.base import BaseConfig, ConfigError, ConfigProblem, build
from prime_rl.configs.envs import EnvConfig
from prime_rl.orchestrator.envs.arithmetic import ArithmeticArgs, ArithmeticEnvironment
from prime_rl.orchestrator.envs.base import Environment, Example, Message, Outcome, Policy, Split
from prime_rl.orchestrator.envs.guess import GuessNumberArgs, GuessNumberEnvironment
from prime_rl.orchestrator.envs.process import ProcessEnvironment
from prime_rl.orchestrator.envs.text import TEXT_TASKS, TextArgs, TextEnvironment

__all__ = [
    "BUILT_IN_ARGS",
    "Environment",
    "Example",
    "Message",
    "Outcome",
    "Policy",
    "ProcessEnvironment",
    "Split",
    "load_environment",
]

# The arguments of each built-in environment.
BUILT_IN_ARGS: dict[str, type[BaseConfig]] = {
    **dict.fromkeys(TEXT_TASKS, TextArgs),
    "arithmetic": ArithmeticArgs,
    "guess-number": GuessNumberArgs,
}


def load_environment(config: EnvConfig, seed: int, hidden: Sequence[str] = ()) -> Environment:
    """The environment of one `[[env]]`; one that runs in its own process has yet to be started.

    Raises ConfigError (a ValueError) that names the environment, each wrong argument and what is allowed.

    Args:
        hidden: as for ProcessEnvironment.
    """
    if config.id not in BUILT_IN_ARGS:
        return ProcessEnvironment(config, seed, hidden=hidden)
    source = f"env {config.id!r}, args"
    args = build(BUILT_IN_ARGS[config.id], config.args, source)
    try:
        return _MAKERS[type(args)](config.id, args, seed)
    except ValueError as error:
        raise ConfigError(source, [ConfigProblem("", str(error))]) from error


_MAKERS: dict[type[BaseConfig], Callable[..., Environment]] = {
    TextArgs: lambda env_id, args, seed: TextEnvironment(TEXT_TASKS[env_id], args, seed),
    ArithmeticArgs: lambda env_id, args, seed: ArithmeticEnvironment(args, seed),
    GuessNumberArgs: lambda env_id, args, seed: GuessNumberEnvironment(args, seed),
}
