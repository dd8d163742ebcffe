"""What the run publishes: an adapter, or, where the trainer has none, the whole model.

The one place that distinguishes the two. The run's config may choose; else the trainer decides, in its status file.
Everything else works on the resulting `PolicyVersions`.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import TrainerStatus, read_status
from prime_rl.orchestrator.adapters import AdapterPublication
from prime_rl.orchestrator.guard import MAX_LOOK_S
from prime_rl.orchestrator.policy import PolicyVersions
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.report import Reporter
from prime_rl.orchestrator.whole_weights import WholeWeights, lease


async def trainer_says(run: RunDir, reporter: Reporter, what: str) -> TrainerStatus:
    """The trainer's status, once it contains what it trains; `what` is needed from it."""
    path = OutputDir(run.path.parent).trainer_status
    while (status := read_status(path, TrainerStatus)) is None or not status.max_seq_len:
        reporter.wait_for(f"{path} (for {what})")
        await asyncio.sleep(MAX_LOOK_S)
    return status


async def set_up_versions(
    config: OrchestratorConfig,
    run: RunDir,
    client: InferenceClient,
    base_model: str,
    reporter: Reporter,
    cleanup: AsyncExitStack,
) -> PolicyVersions:
    """The run's policy versions, which are withdrawn by `cleanup`. `base_model` is what inference calls version 0."""
    whole = config.model.trains_whole_model
    if whole is None:
        whole = (await trainer_says(run, reporter, "whether it trains adapters")).max_rank is None
    if whole:
        await cleanup.enter_async_context(lease(OutputDir(run.path.parent).weights_lock, reporter.wait_for))
    kind = WholeWeights if whole else AdapterPublication
    policy = PolicyVersions(kind(client, run, base_model))
    cleanup.push_async_callback(policy.close)
    return policy
