"""Some rollouts of each environment of a run's config, without a run, as JSON on standard output: `prl env try`.

    python -m prime_rl.orchestrator.try_env FILE NUM [URL MODEL SEQ_LEN]

Environments, prompts and turns are those of the orchestrator. Without a server nothing is sampled: each answer is the
example's own, where that is known, else the last message.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
from prime_rl.orchestrator.envs.base import AnswersCalls, Example, Message, Outcome, Policy, RolloutError
from prime_rl.orchestrator.envs.checked import CheckedEnvironment, EnvironmentBroken, EnvironmentFault
from prime_rl.orchestrator.guard import RunFailed
from prime_rl.orchestrator.policy import ChatTokenizer, PolicyVersions, TokenizerError, TurnSampler
from prime_rl.orchestrator.publication import AdapterPublication, base_model, connect
from prime_rl.orchestrator.recorder import Branch, PolicySession, as_turns, derive_seed
from prime_rl.orchestrator.rollout import BaseModel, give_judges, judged
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
    """The policy of one rollout, and every conversation that it was asked in, each with its answer, as they came."""

    def __init__(self, policy: Policy) -> None:
        self.said: list[list[Message]] = []
        self._policy = policy

    @property
    def answer_lens(self) -> Sequence[int]:
        """Those of the policy."""
        return self._policy.answer_lens

    async def complete(self, messages: Sequence[Message]) -> str:
        """The policy's answer."""
        text = await self._policy.complete(messages)
        self.said.append([*messages, {"role": "assistant", "content": text}])
        return text

    def branches(self) -> list[dict[str, Any]]:
        """The conversations that no later one goes on from, without tokens."""
        ends = [
            said for at, said in enumerate(self.said) if not any(o[: len(said)] == said for o in self.said[at + 1 :])
        ]
        none = {"num_tokens": None, "reward": None}
        shared = {"num_tokens": None, "num_shared": 0, "shared_with": 0}
        return [{**shared, "turns": [{**message, **none} for message in said]} for said in ends]

    async def call(self, call: Call) -> Answer:
        """The policy's answer to a call, of which the text is noted."""
        assert isinstance(self._policy, AnswersCalls)
        answer = await self._policy.call(call)
        asked = [_message(turn) for turn in call.messages] or [Message(role="user", content=call.prompt)]
        self.said.append([*asked, _message(answer.turn)])
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
    base: BaseModel | None = None,
) -> list[dict[str, Any]]:
    """The first `num` examples of each environment, one rollout each. Raises ConfigError.

    Args:
        turns, base: of a server; None answers as Echo, and has no judge.
    """
    start_s = time.monotonic()
    sessions = await sessions_here(config, _RUN_ID, tokenizer, config.seq_len, cleanup)
    envs, _ = await load_environments(config, None, cleanup, lambda words: None, place, sessions)
    give_judges(envs.values(), base, cleanup)
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
            policy: Echo | PolicySession = Echo(example.answer or known.get(example.id, ""))
            if turns is not None and tokenizer is not None:
                policy = PolicySession(turns, tokenizer, seed=seed)
            tried.append(await _rollout(env, example, policy, tokenizer))
        counts = {f"num_{split}": len(each) for split, each in examples.items()}
        found.append({"env": env_config.label, "id": env.id, **counts, "load_s": load_s, "rollouts": tried})
    return found


async def _rollout(
    env: CheckedEnvironment, example: Example, policy: Echo | PolicySession, tokenizer: ChatTokenizer | None
) -> dict[str, Any]:
    """One rollout, with the reason where it has no reward."""
    recorder, start_s = Recorder(policy), time.monotonic()
    result: dict[str, Any] = {"reward": None, "rewards": {}, "metrics": {}, "error": None, "output": ""}
    outcome, prompt_ids = Outcome(0.0), None
    try:
        async with asyncio.timeout(TRY_TIMEOUT_S):
            outcome = await env.rollout(example, recorder)
            result |= {"rewards": dict(outcome.rewards), "metrics": outcome.metrics, "output": outcome.output}
            if isinstance(policy, PolicySession) and tokenizer is not None:
                (made,) = await judged(env, example, [policy.finished(outcome)], tokenizer)
                result |= {"reward": made.reward, "metrics": made.metrics}
            elif env.judge_config:
                result["error"] = "a judge reads what a model says: try it with --model base, or a run"
            else:
                result["reward"] = outcome.reward
    except TimeoutError:
        result["error"] = f"no answer within {TRY_TIMEOUT_S:g} s"
    except (EnvironmentFault, EnvironmentBroken, RolloutError, InferenceError) as error:
        result["error"] = str(error)
    time_s, branches = time.monotonic() - start_s, recorder.branches()
    if isinstance(policy, PolicySession) and tokenizer is not None:
        with contextlib.suppress(RolloutError):  # it has asked nothing
            branches = [_branch(each, tokenizer) for each in policy.finished(outcome).branches]
    first, last = (recorder.said[0][:-1], recorder.said[-1]) if recorder.said else ([], [])
    try:
        prompt_ids = tokenizer.prompt(as_turns(first)) if tokenizer and first else None
    except TokenizerError as error:
        result["error"] = result["error"] or str(error)
    text = tokenizer.decode(prompt_ids, special=True) if tokenizer and prompt_ids else None
    turns = last[len(first) :]
    prompt = {"prompt": first, "prompt_text": text, "prompt_tokens": prompt_ids, "turns": turns}
    answers = {"answer_tokens": None if isinstance(policy, Echo) else list(policy.answer_lens), "time_s": time_s}
    return {"example_id": example.id, **prompt, "branches": branches, **answers, **result}


def _branch(branch: Branch, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """A branch with its tokens as text: what the policy read and what it wrote, after what it shares with another."""
    at, turns, rewards = branch.num_shared, [], iter(branch.turn_rewards)
    for by_policy, mask in itertools.groupby(branch.loss_mask_T[at:]):
        ids = branch.token_ids_T[at : (at := at + len(list(mask)))]
        told = {"role": "assistant" if by_policy else "read", "content": tokenizer.decode(ids, special=True)}
        turns.append({**told, "num_tokens": len(ids), "reward": next(rewards, None) if by_policy else None})
    shared = {"num_shared": branch.num_shared, "shared_with": branch.shared_with}
    return {"num_tokens": len(branch.token_ids_T), **shared, "turns": turns}


async def at_server(
    config: OrchestratorConfig,
    tokenizer: ChatTokenizer,
    url: str,
    model: str,
    seq_len: int,
    cleanup: AsyncExitStack,
) -> tuple[TurnSampler, BaseModel]:
    """Turns of `model` at the server at `url`, sampled as the run samples, and its base model as a judge.

    Raises RunFailed without a key.
    """
    run = RunDir(Path(_RUN_ID))
    publication = AdapterPublication(run)
    config = config.replace(client={**config.client.model_dump(), "base_url": url})
    client = connect(config, run, publication)
    cleanup.push_async_callback(client.close)
    turns = TurnSampler(client, PolicyVersions(publication, client, model), config.sampling, seq_len=seq_len)
    has_judge = any(env.agent and env.agent.judge for env in config.env)
    base = await base_model(client, config.model.name) if has_judge else model
    return turns, BaseModel(client, base, tokenizer, seq_len)


async def run(file: Path, num: int, server: Sequence[str]) -> Mapping[str, Any]:
    """The answer: `envs`, or `error` with the reason."""
    try:
        config = load_run_config(file)
        name, kwargs = config.model.name, config.sampling.chat_template_kwargs
        async with AsyncExitStack() as cleanup:
            is_here = bool(server) or model_file(name, "tokenizer.json", local_only=True)
            tokenizer = ChatTokenizer.load(name, kwargs) if is_here else None
            turns, base = None, None
            if server and tokenizer:
                turns, base = await at_server(config, tokenizer, server[0], server[1], int(server[2]), cleanup)
            return {"envs": await try_all(config, num, place_of(file), tokenizer, turns, cleanup, base)}
    except (ConfigError, TokenizerError, RunFailed, EnvironmentBroken) as error:
        return {"error": str(error)}


def main(argv: Sequence[str]) -> None:
    """`argv`: the file, the number of examples, and a server's address, model and longest sequence."""
    with contextlib.suppress(KeyboardInterrupt):  # which `prl env try` gets too, and reports
        answer = asyncio.run(run(Path(argv[0]), int(argv[1]), argv[2:]))
        sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
