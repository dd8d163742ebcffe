"""Rollouts of tests/tasksets/word_box.py by `verifiers` alone, with its training client against any server.

Prints what a trainer would get, one JSON object a task: token ids, which of them were sampled, their logprobs, reward.

    python -m tests.train_client_main BASE_URL MODEL TOKENIZER
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import verifiers.v1 as vf
from renderers.configs import Qwen3RendererConfig

from prime_rl.orchestrator.envs.verifiers_env import HARNESS_ID


async def main(base_url: str, model: str, tokenizer: str) -> None:
    # The chat program of verifiers would be a process for each rollout.
    agent: dict[str, Any] = {
        "runtime": {"type": "subprocess"},
        "harness": {"id": HARNESS_ID},
    }
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "word-box", "num_tasks": 8}, "agent": agent}))
    client = vf.TrainClientConfig(
        base_url=base_url, api_key_var="NO_KEY", renderer=Qwen3RendererConfig(), renderer_model_name=tokenizer
    )
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=40)
    context = vf.ModelContext(model=model, client=client, sampling=sampling)
    async with env.serving():
        episodes = await asyncio.gather(*(env.run_episode(task, context) for task in env.taskset))
    for episode in episodes:
        (trace,) = episode.traces
        assert not episode.errors and not trace.errors, [*episode.errors, *trace.errors]
        (branch,) = trace.branches
        told = {"token_ids": branch.token_ids, "loss_mask": branch.sampled_mask, "logprobs": branch.logprobs}
        print(json.dumps({**told, "reward": trace.reward, "num_turns": trace.num_turns}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
