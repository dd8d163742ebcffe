"""Environments by the id in `[[env]]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prime_rl.configs.base import BaseConfig, ConfigError, ConfigProblem, build
from prime_rl.configs.envs import EnvConfig
from prime_rl.orchestrator.envs import built_in
from prime_rl.orchestrator.envs.base import Environment, Example, Message, Outcome, Policy, Split
from prime_rl.orchestrator.envs.process import ProcessEnvironment

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
    **dict.fromkeys(built_in.TEXT_TASKS, built_in.TextArgs),
    "arithmetic": built_in.ArithmeticArgs,
    "guess-number": built_in.GuessNumberArgs,
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
    built_in.TextArgs: built_in.TextEnvironment,
    built_in.ArithmeticArgs: built_in.ArithmeticEnvironment,
    built_in.GuessNumberArgs: built_in.GuessNumberEnvironment,
}
