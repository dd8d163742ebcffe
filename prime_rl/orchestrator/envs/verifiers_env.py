"""Any taskset of `verifiers` as an `Environment`. Imported only in the process of such an environment (`child`).

verifiers runs the whole episode: it starts tool servers, lets a harness talk to the model, and scores. The model that
it talks to is the rollout's session at the gateway, so the tokens that are trained on are recorded where all tokens
are, and verifiers sees text. A conversation that begins anew (compaction, sub-agents) becomes a branch. A role without
its own harness is played by `verifiers_chat` inside this process, as the program that verifiers would start for each
rollout takes seconds to start. The reward is the weighted sum that verifiers makes of its rewards; each of them and
each metric becomes one of the run's metrics.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.configs.agent import agent_config_fields

from prime_rl.configs.base import BaseConfig, build
from prime_rl.gateway.keys import run_of
from prime_rl.orchestrator.envs import verifiers_chat
from prime_rl.orchestrator.envs.base import Example, Outcome, Policy, Split
from prime_rl.orchestrator.envs.checked import Transient

# verifiers finds a harness by the name of one top-level module, so ours gets such a name.
HARNESS_ID = "prime_rl_chat"
# The defaults of verifiers: its own chat program, and a rented sandbox.
DEFAULT_HARNESS_ID = "bash"
# verifiers reads the key of an endpoint from a variable, and does not hand on those that have API_KEY in their names.
KEY_VAR = "PRL_SESSION_{}_API_KEY"
# verifiers keeps errors as text. Those of a connection, of a sandbox or of another model are no fault of the task; that
# our endpoint refuses what it is asked is one.
PASSES = re.compile(
    r"\b\w*(Connect|Connection\w*|Timeout|Pipe|Sandbox|Interception|Tunnel)Error\b|timed out"
    r"|\bProviderError\b(?!: upstream 4(00|13))"
)


class VerifiersArgs(BaseConfig):
    """`[env.args]` of `verifiers:TASKSET`."""

    taskset: dict[str, Any] = Field(default_factory=dict)
    """The taskset's own settings."""

    env: dict[str, Any] = Field(default_factory=dict)
    """Further settings of verifiers' environment, for example `agent = {max_turns = 4}`."""

    num_examples: int = Field(1000, ge=1, le=1_000_000)
    """Most examples to train on: the tasks after those of the evaluation."""

    num_eval_examples: int = Field(16, ge=0, le=1_000_000)
    """Examples to evaluate on: the first tasks of the taskset."""


class VerifiersEnvironment:
    """One taskset. Raises what verifiers raises for an unknown one or for settings that it does not have."""

    def __init__(self, name: str, args: dict[str, Any], seed: int) -> None:
        config = build(VerifiersArgs, args, f"env 'verifiers:{name}', args")
        sys.modules.setdefault(HARNESS_ID, verifiers_chat)
        # `uv`, which makes the environment of verifiers' own programs, may be installed beside this interpreter alone.
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)))
        self.id = f"verifiers:{name}"
        self._numbers = itertools.count()
        self._env = vf.load_environment(_env_config({**config.env, "taskset": {**config.taskset, "id": name}}))
        num_eval = config.num_eval_examples
        tasks = list(itertools.islice(iter(self._env.taskset), num_eval + config.num_examples))
        self._tasks = {f"task-{number}": task for number, task in enumerate(tasks)}
        self._splits: dict[Split, list[Example]] = {
            "eval": [Example(task_id, [], "") for task_id in list(self._tasks)[:num_eval]],
            "train": [Example(task_id, [], "") for task_id in list(self._tasks)[num_eval:]],
        }
        if not self._splits["train"]:
            raise ValueError(f"the taskset has {len(tasks)} tasks, and num_eval_examples = {num_eval} takes them all")

    def examples(self, split: Split) -> Sequence[Example]:
        """The tasks of a split by their ids; their content stays with verifiers."""
        return self._splits[split]

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve what lasts as long as the process: the tool servers that rollouts share."""
        async with self._env.serving():
            yield

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """One episode of verifiers. Raises the first error in it."""
        endpoint = getattr(policy, "endpoint", None)
        assert endpoint is not None, "the orchestrator opens a session for each rollout"
        variable = KEY_VAR.format(next(self._numbers))
        os.environ[variable] = endpoint[1]
        # As the endpoint lists it, so that a harness finds how long its conversations may be; other roles have others.
        model = run_of(endpoint[0].split("/")[-2])
        try:
            client = vf.EvalClientConfig(base_url=endpoint[0], api_key_var=variable)
            episode = await self._env.run_episode(self._tasks[example.id], vf.ModelContext(model=model, client=client))
        finally:
            del os.environ[variable]
        traces = [trace for trace in episode.traces if trace.agent and trace.agent.config.model == model]
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        if errors or len(traces) != 1:
            reason = f"{errors[0].type}: {errors[0].message}" if errors else f"{len(traces)} roles asked the policy"
            raise (Transient if PASSES.search(reason) else RuntimeError)(reason)
        trace = traces[0]
        # Scores, without the weights that verifiers gives them.
        rewards = _named({name: reward.score for name, reward in trace.rewards.items() if reward is not None})
        metrics = {**rewards, **_named({**trace.metrics, "turns": trace.num_turns})}
        return Outcome(trace.reward, metrics, rewards, _advantages(trace))


def _env_config(data: dict[str, Any]) -> vf.EnvConfig:
    """The config of verifiers, with roles that run here where nothing else is asked for."""
    taskset_id = data["taskset"]["id"]
    ours: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    if vf.default_harness_id(taskset_id) == DEFAULT_HARNESS_ID:
        ours["harness"] = {"id": HARNESS_ID}
    for role in agent_config_fields(vf.resolve_env_config(dict(data))):
        data[role] = {**ours, **data.get(role, {})}
    return vf.resolve_env_config(data)


def _named(values: Mapping[str, float | None]) -> dict[str, float]:
    """Under names that ours may have. What has no value has none."""
    return {
        re.sub(r"[^A-Za-z0-9._-]", "_", name)[:60].lstrip("._-") or "unnamed": float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def _advantages(trace: vf.Trace) -> list[float | list[float]]:
    """The advantages that the taskset assigned to the nodes of the policy's turns; [] when it assigned none.

    verifiers keeps a list for the sampled tokens of a node. A list of one number is for the whole turn, since a taskset
    gets no tokens from our endpoint, only how many there are (`usage`). A turn without a list has 0.0, as in verifiers.
    """
    given = [node.advantages for node in trace.nodes if node.sampled]
    if all(each is None for each in given):
        return []
    return [0.0 if each is None else each[0] if len(each) == 1 else each for each in given]
