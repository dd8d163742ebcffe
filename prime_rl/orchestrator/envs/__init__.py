"""Environments by the id in `[[env]]`: all of a run from its config, each loaded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from prime_rl.configs.base import BaseConfig, ConfigError, ConfigProblem, build
from prime_rl.configs.envs import EnvConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.envs import built_in
from prime_rl.orchestrator.envs.base import Environment, Example, Message, Outcome, Policy, Split
from prime_rl.orchestrator.envs.checked import CheckedEnvironment, RolloutMeter
from prime_rl.orchestrator.envs.process import ProcessEnvironment, Sessions
from prime_rl.orchestrator.envs.sessions_env import SessionsEnvironment
from prime_rl.utils.secrets import names_of

__all__ = [
    "BUILT_IN",
    "Environment",
    "Example",
    "Message",
    "Outcome",
    "Policy",
    "ProcessEnvironment",
    "Split",
    "load_environment",
]

# The arguments of each built-in environment, and what makes it.
BUILT_IN: dict[str, tuple[type[BaseConfig], Callable[..., Environment]]] = {
    **dict.fromkeys(built_in.TEXT_TASKS, (built_in.TextArgs, built_in.TextEnvironment)),
    "arithmetic": (built_in.ArithmeticArgs, built_in.ArithmeticEnvironment),
    "guess-number": (built_in.GuessNumberArgs, built_in.GuessNumberEnvironment),
}


def load_environment(
    config: EnvConfig, seed: int, hidden: Sequence[str] = (), sessions: Sessions | None = None
) -> Environment:
    """The environment of one `[[env]]`; one that runs in its own process has yet to be started.

    Raises ConfigError (a ValueError) that names the environment, each wrong argument and what is allowed.

    Args:
        hidden, sessions: as for ProcessEnvironment.
    """
    if config.id not in BUILT_IN:
        return ProcessEnvironment(config, seed, hidden=hidden, sessions=sessions)
    source, (args, make) = f"env {config.id!r}, args", BUILT_IN[config.id]
    try:
        return make(config.id, build(args, config.args, source), seed)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(source, [ConfigProblem("", str(error))]) from error


Environments = dict[str, CheckedEnvironment]


async def load_environments(
    config: OrchestratorConfig,
    meter: RolloutMeter | None,
    cleanup: AsyncExitStack,
    say: Callable[[str | None], None],
    place: Callable[[str], Path] = Path,
    sessions: Sessions | None = None,
) -> tuple[Environments, Environments]:
    """The environments to train on and those to evaluate on, by their names in metrics. Raises ConfigError.

    An `[[env]]` that is both is one environment with two counts of faults; what evaluation does stays out of `meter`.
    `say` gets what is waited for. `place` has the files that the config names. `sessions` are for `needs_gateway`.
    """
    loaded: dict[str, Environment] = {}
    for env in [*config.env, *config.eval_envs]:
        if _key(env) not in loaded:
            loaded[_key(env)] = await _load(env.placed(place), config, cleanup, say, sessions)
    say(None)

    def use(env: EnvConfig, **more: Any) -> CheckedEnvironment:
        return CheckedEnvironment(loaded[_key(env)], env, max_failure_share=config.max_env_failure_share, **more)

    def to_train(env: EnvConfig) -> CheckedEnvironment:
        num_examples, num_tries = len(loaded[_key(env)].examples("train")), config.rollouts_per_example
        names = config.advantage.reward_weights
        return use(env, meter=meter, reward_names=names, num_examples=num_examples, num_tries=num_tries)

    num_tries = config.eval.rollouts_per_example if config.eval else 1
    eval_envs = {env.label: use(env, name=f"eval/{env.label}", num_tries=num_tries) for env in config.eval_envs}
    return {env.label: to_train(env) for env in config.env}, eval_envs


async def _load(
    env: EnvConfig,
    config: OrchestratorConfig,
    cleanup: AsyncExitStack,
    say: Callable[[str | None], None],
    sessions: Sessions | None,
) -> Environment:
    if env.sessions:
        assert sessions is not None, "a run that needs the gateway has sessions"
        return SessionsEnvironment(env, sessions, is_compared=config.rollouts_per_example > 1)
    # The key of inference is not for code that is not ours.
    made = load_environment(env, config.seed, hidden=names_of(config.client.api_key_var), sessions=sessions)
    if isinstance(made, ProcessEnvironment):
        say(f"env {env.label} (loading {env.id}, takes seconds)")
        cleanup.push_async_callback(made.close)
        await made.start()
    return made


def _key(env: EnvConfig) -> str:
    return env.model_dump_json()
