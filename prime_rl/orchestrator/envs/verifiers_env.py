"""Any taskset of `verifiers` as an `Environment`. Imported only in the process of such an environment (`child`).

verifiers runs the whole episode: it starts tool servers, lets a harness talk to the model, and scores. The model that
it talks to is the rollout's session at the gateway, so the tokens that are trained on are recorded where all tokens
are, and verifiers sees text. A conversation that begins anew (compaction, sub-agents) becomes a branch. A role without
its own harness is played by `ChatHarness` inside this process, as the program that verifiers would start for each
rollout takes seconds to start. The reward is the weighted sum that verifiers makes of its rewards; each of them and
each metric becomes one of the run's metrics.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import SubprocessConfig, provision_runtime
from verifiers.v1.utils.loaders import load_harness

from prime_rl.configs.base import BaseConfig, build
from prime_rl.orchestrator.envs.base import Example, Outcome, Policy, Split
from prime_rl.orchestrator.envs.checked import Transient

# verifiers finds a harness by the name of one top-level module and its `__all__`, so this one gets such a name.
HARNESS_ID = "prime_rl_chat"
sys.modules[HARNESS_ID] = sys.modules[__name__]
__all__ = ["ChatHarness"]
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
        """Serve what lasts as long as the process: the tool servers that rollouts share.

        First the programs of harnesses that run here get their environments, so that no rollout waits for a download.
        """
        default = default_agent_harness(self._env.config.taskset.id)
        for role in agent_config_fields(self._env.config).values():
            if isinstance(role.runtime, SubprocessConfig):
                async with provision_runtime(role.runtime) as runtime:
                    await load_harness(role.harness or default).setup(runtime)
        async with self._env.serving():
            yield

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """One episode of verifiers. Raises the first error in it."""
        endpoint = getattr(policy, "endpoint", None)
        assert endpoint is not None, "the orchestrator opens a session for each rollout"
        variable = KEY_VAR.format(next(self._numbers))
        os.environ[variable] = endpoint[1]
        # The run's id, under which the endpoint tells how long a conversation may be; other roles have other models.
        model = endpoint[0].split("/")[-2].rpartition(".")[0]
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


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """No fields."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """A chat with tools: turns until the model calls no tool.

    verifiers asks of a harness only that every call of the model goes through its endpoint. Tools are the MCP servers
    that verifiers has started; a call that cannot be made is answered with the reason, as the model can learn from it.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """One segment of the conversation. A turn that is refused (a limit, a stop) ends it with exit code 1."""
        messages = self._opening(data)
        config = {"mcpServers": {n: {"url": u, "timeout": self.config.tool_timeout} for n, u in mcp_urls.items()}}
        async with contextlib.AsyncExitStack() as stack:
            # Plain HTTP on the loopback: no certificates need to be read.
            headers = {"Authorization": f"Bearer {secret}"}
            http = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=None, verify=False))
            tools, dispatch, servers = await connect_mcp(config, stack)
            body: dict[str, Any] = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while True:
                response = await http.post(f"{endpoint}/chat/completions", json=body)
                if response.status_code != 200:
                    return vf.ProgramResult(1, "", response.text[-2000:])
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(0, message.get("content") or "", "")
                for call in calls:
                    result = await _result(call["function"], dispatch, servers)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or [])]


async def _result(function: dict[str, str], dispatch: dict[str, Any], servers: dict[str, Any]) -> Any:
    """A tool's output, or why it was not called."""
    name = function["name"]
    if name not in dispatch:
        return f"error: unknown tool {name!r}; tools: {', '.join(sorted(dispatch))}"
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        return f"error: the arguments of {name!r} are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"error: the arguments of {name!r} are not an object"
    return await call_mcp(servers, dispatch, name, arguments)
