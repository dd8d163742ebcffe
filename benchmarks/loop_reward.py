"""What a run's last policy is worth: many answers to examples that no run ever trains on, the same for every run.

The reward in a run's own metrics is that of the versions that made its batches, which in an asynchronous run are older
ones: it shows less of what was learned. Sampling is that of training.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

from prime_rl.configs.envs import EnvConfig
from prime_rl.configs.orchestrator import EvalConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.layout import RunDir
from prime_rl.orchestrator.envs import load_environments
from prime_rl.orchestrator.evaluate import Evaluator
from prime_rl.orchestrator.policy import ChatTokenizer, PolicyVersions, TurnSampler
from prime_rl.orchestrator.publication import AdapterPublication, base_model, connect

NUM_EXAMPLES, ROLLOUTS_PER_EXAMPLE = 256, 4
SEED, SEQ_LEN = 0, 96


def reward_of(run: RunDir, version: int) -> float:
    """Mean reward of a published version of the run. The run's inference must be up, and nothing else need be."""
    return asyncio.run(_reward_of(run, version))


async def _reward_of(run: RunDir, version: int) -> float:
    config = load_run_config(run.orch_toml)
    env = EnvConfig(id=config.env[0].id, args={**config.env[0].args, "num_eval_examples": NUM_EXAMPLES})
    evaluation = EvalConfig(num_examples=NUM_EXAMPLES, rollouts_per_example=ROLLOUTS_PER_EXAMPLE, env=[env])
    config = config.model_copy(update={"seed": SEED, "eval": evaluation})
    async with AsyncExitStack() as cleanup:
        _, envs = await load_environments(config, None, cleanup, lambda sentence: None)
        adapters = AdapterPublication(run)
        client = connect(config, run, adapters)
        cleanup.push_async_callback(client.close)
        policy = PolicyVersions(adapters, client, await base_model(client, config.model.name))
        cleanup.push_async_callback(policy.close)
        turns = TurnSampler(client, policy, config.sampling, seq_len=SEQ_LEN)
        tokenizer = ChatTokenizer.load(config.model.name)
        evaluator = Evaluator(config, run, turns, tokenizer, policy, envs, step=version)
        if version:
            await policy.switch_to(version)
        await evaluator.evaluate(version)
    return float(
        json.loads(run.orchestrator_metrics.read_text(encoding="utf-8").splitlines()[-1])[f"eval/{env.label}/reward"]
    )
