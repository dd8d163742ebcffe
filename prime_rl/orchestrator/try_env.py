"""Some rollouts of each environment of a run's config, without a run, as JSON on standard output: `prl env try`.

    python -m prime_rl.orchestrator.try_env FILE NUM [URL MODEL SEQ_LEN]

Environments, prompts and turns are those of the orchestrator. Without a server nothing is sampled: each answer is the
example's own, where that is known, else the last message.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.configs.base import ConfigError
from prime_rl.configs.jsonl import place_of, read_rows
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.calls import Answer, Call, Turn
from prime_rl.contract.layout import RunDir
from prime_rl.orchestrator.client import InferenceError
from prime_rl.orchestrator.envs import load_environments
from prime_rl.orchestrator.envs.base import AnswersCalls, Example, Message, Policy, RolloutError
from prime_rl.orchestrator.envs.checked import CheckedEnvironment, EnvironmentBroken, EnvironmentFault
from prime_rl.orchestrator.guard import RunFailed
from prime_rl.orchestrator.policy import ChatTokenizer, PolicyVersions, TokenizerError, TurnSampler
from prime_rl.orchestrator.publication import AdapterPublication, connect
from prime_rl.orchestrator.recorder import PolicySession, as_turns, derive_seed
from prime_rl.orchestrator.sessions import sessions_here
from prime_rl.utils.chat_template import model_file

# Of one rollout: a server that goes away is waited for.
TRY_TIMEOUT_S = 600.0
# Its requests are nobody's.
_RUN_ID = "run_try"


class Echo:
    """A policy that answers with one text, or without it with the last message. It counts words for tokens."""

    def __init__(self, answer: str) -> None:
        self.answer_lens: list[int] = []
        self._answer = answer

    async def complete(self, messages: Sequence[Message]) -> str:
        """The answer."""
        text = self._answer or messages[-1]["content"]
        self.answer_lens.append(max(1, len(text.split())))
        return text

    async def call(self, call: Call) -> Answer:
        """The same for a call, with no tokens that mean anything."""
        last = call.messages[-1].content if call.messages else call.prompt
        text = await self.complete([{"role": "user", "content": last}])
        num = self.answer_lens[-1]
        return Answer(Turn("assistant", text), "stop", len(last.split()), [0] * num, [0.0] * num, 0)


class Recorder:
    """The policy of one rollout, and what was asked and answered: `prompt`, then `turns` of both sides."""

    def __init__(self, policy: Policy) -> None:
        self.prompt: list[Message] = []
        self.turns: list[Message] = []
        self._policy = policy

    @property
    def answer_lens(self) -> Sequence[int]:
        """Those of the policy."""
        return self._policy.answer_lens

    async def complete(self, messages: Sequence[Message]) -> str:
        """The policy's answer."""
        self.prompt = self.prompt or list(messages)
        text = await self._policy.complete(messages)
        self.turns = [*messages[len(self.prompt) :], {"role": "assistant", "content": text}]
        return text

    async def call(self, call: Call) -> Answer:
        """The policy's answer to a call, of which the text is noted."""
        assert isinstance(self._policy, AnswersCalls)
        answer = await self._policy.call(call)
        said = [_message(turn) for turn in call.messages] or [Message(role="user", content=call.prompt)]
        self.prompt = self.prompt or said
        self.turns = [*said[len(self.prompt) :], _message(answer.turn)]
        return answer


def _message(turn: Turn) -> Message:
    calls = (f"{call.name}({call.arguments})" for call in turn.calls)
    role = "user" if turn.role == "tool" else turn.role
    return {"role": role, "content": "\n".join(filter(None, (turn.content, *calls)))}


async def try_all(
    config: OrchestratorConfig,
    num: int,
    place: Callable[[str], Path],
    tokenizer: ChatTokenizer | None,
    turns: TurnSampler | None,
    cleanup: AsyncExitStack,
) -> list[dict[str, Any]]:
    """The first `num` examples of each environment, one rollout each. Raises ConfigError.

    Args:
        turns: of a server; None answers as Echo.
    """
    start_s = time.monotonic()
    sessions = await sessions_here(config, _RUN_ID, tokenizer, config.seq_len, cleanup)
    envs, _ = await load_environments(config, None, cleanup, lambda words: None, place, sessions)
    load_s = time.monotonic() - start_s
    found = []
    for env_config in config.env:
        env = envs[env_config.label]
        args = env_config.rows
        known = {row.id: row.answer for row in read_rows(place(args.path), args)} if args and args.path else {}
        examples = {split: env.examples(split) for split in ("train", "eval")}
        tried = []
        for example in (examples["train"] or examples["eval"])[:num]:
            seed = derive_seed(config.seed, "try", env_config.label, example.id)
            policy: Policy = Echo(example.answer or known.get(example.id, ""))
            if turns is not None and tokenizer is not None:
                policy = PolicySession(turns, tokenizer, seed=seed)
            tried.append(await _rollout(env, example, policy, tokenizer))
        counts = {f"num_{split}": len(each) for split, each in examples.items()}
        found.append({"env": env_config.label, "id": env.id, **counts, "load_s": load_s, "rollouts": tried})
    return found


async def _rollout(
    env: CheckedEnvironment, example: Example, policy: Policy, tokenizer: ChatTokenizer | None
) -> dict[str, Any]:
    """One rollout, with the reason where it has no reward."""
    recorder, start_s = Recorder(policy), time.monotonic()
    result: dict[str, Any] = {"reward": None, "rewards": {}, "metrics": {}, "error": None, "output": ""}
    prompt_ids: list[int] | None = None
    try:
        async with asyncio.timeout(TRY_TIMEOUT_S):
            outcome = await env.rollout(example, recorder)
        result |= {"reward": outcome.reward, "rewards": dict(outcome.rewards), "metrics": outcome.metrics}
        result["output"] = outcome.output
    except TimeoutError:
        result["error"] = f"no answer within {TRY_TIMEOUT_S:g} s"
    except (EnvironmentFault, EnvironmentBroken, RolloutError, InferenceError) as error:
        result["error"] = str(error)
    time_s = time.monotonic() - start_s
    try:
        prompt_ids = tokenizer.prompt(as_turns(recorder.prompt)) if tokenizer and recorder.prompt else None
    except TokenizerError as error:
        result["error"] = result["error"] or str(error)
    text = tokenizer.decode(prompt_ids, special=True) if tokenizer and prompt_ids else None
    prompt = {"prompt": recorder.prompt, "prompt_text": text, "prompt_tokens": prompt_ids, "turns": recorder.turns}
    answers = {"answer_tokens": None if isinstance(policy, Echo) else list(policy.answer_lens), "time_s": time_s}
    return {"example_id": example.id, **prompt, **answers, **result}


def sampler_of(config: OrchestratorConfig, url: str, model: str, seq_len: int, cleanup: AsyncExitStack) -> TurnSampler:
    """Turns of `model` at the server at `url`, sampled as the run samples. Raises RunFailed without a key."""
    run = RunDir(Path(_RUN_ID))
    publication = AdapterPublication(run)
    config = config.replace(client={**config.client.model_dump(), "base_url": url})
    client = connect(config, run, publication)
    cleanup.push_async_callback(client.close)
    return TurnSampler(client, PolicyVersions(publication, client, model), config.sampling, seq_len=seq_len)


async def run(file: Path, num: int, server: Sequence[str]) -> Mapping[str, Any]:
    """The answer: `envs`, or `error` with the reason."""
    try:
        config = load_run_config(file)
        name, kwargs = config.model.name, config.sampling.chat_template_kwargs
        async with AsyncExitStack() as cleanup:
            is_here = bool(server) or model_file(name, "tokenizer.json", local_only=True)
            tokenizer = ChatTokenizer.load(name, kwargs) if is_here else None
            turns = sampler_of(config, server[0], server[1], int(server[2]), cleanup) if server else None
            return {"envs": await try_all(config, num, place_of(file), tokenizer, turns, cleanup)}
    except (ConfigError, TokenizerError, RunFailed, EnvironmentBroken) as error:
        return {"error": str(error)}


def main(argv: Sequence[str]) -> None:
    """`argv`: the file, the number of examples, and a server's address, model and longest sequence."""
    with contextlib.suppress(KeyboardInterrupt):  # which `prl env try` gets too, and reports
        answer = asyncio.run(run(Path(argv[0]), int(argv[1]), argv[2:]))
        sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
