"""From finished groups to the batch file of one update, step after step.

The file's appearance is the signal to the trainer.

`BatchLoop` goes on until the run's last update is published (and evaluated), or until the run has its reason to end
before that. What it awaits is the scheduler's: groups, and the last policy version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import msgspec

from prime_rl.configs.orchestrator import AdvantageConfig, OrchestratorConfig
from prime_rl.contract.disk import held_async
from prime_rl.contract.files import make_folder
from prime_rl.contract.layout import RunDir
from prime_rl.contract.types import TrainingBatch, TrainingSample, read_batch, write_batch
from prime_rl.orchestrator.advantage import compute_advantages, weighted_advantages
from prime_rl.orchestrator.checkpoint import checkpoint_is_due, correct_state, save_state
from prime_rl.orchestrator.ending import Ending
from prime_rl.orchestrator.envs.checked import check_names
from prime_rl.orchestrator.evaluate import Evaluator
from prime_rl.orchestrator.guard import RunEnded, check_run
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.publication import check_temperature
from prime_rl.orchestrator.report import BatchReporter, RunReporter
from prime_rl.orchestrator.rollout import Group, Rollout
from prime_rl.orchestrator.sampler import ExampleSampler
from prime_rl.orchestrator.samples import SampleKeeper
from prime_rl.orchestrator.scheduler import Scheduler


class SecondOrchestrator(RuntimeError):
    """Another orchestrator writes the batches of the run. The message has the place and the remedy."""


@dataclass(frozen=True)
class BatchLoop:
    """Every batch of one run. `evaluator` is null for a run that is not evaluated."""

    config: OrchestratorConfig
    run: RunDir
    client: InferenceClient
    scheduler: Scheduler
    sampler: ExampleSampler
    evaluator: Evaluator | None
    batches: BatchReporter
    samples: SampleKeeper
    reporter: RunReporter
    ending: Ending

    async def make_all(self) -> None:
        """Make the batches of all steps that are left, then wait for what the last one leads to.

        Raises RunEnded when the run has its reason to end before `max_steps`.
        """
        reason = self.ending.reason()
        if reason:
            await self.scheduler.end()  # nothing is sampled for a run that has it from the start
        await self.scheduler.start()
        self.reporter.update(state="running")
        while self.scheduler.ledger.step <= self.config.max_steps:
            check_run(self.run)
            if reason := reason or self.ending.reason():
                await self._end(reason)
            step = self.scheduler.ledger.step
            await self._make_one(step)
            self.ending.note(step)
        last = self.config.max_steps
        await self.scheduler.wait_for_version(last, serve=self.evaluator is not None)
        if self.evaluator is not None:
            self.reporter.wait_for(lambda now: self.client.trouble or f"the evaluation of policy version {last}")
            await self.evaluator.done.wait()

    async def _end(self, reason: str) -> NoReturn:
        """Wait until the trainer has trained on what it was handed, then end the run."""
        await self.scheduler.end()
        await self.scheduler.wait_for_version(self.scheduler.ledger.step - 1, serve=False)
        await held_async(partial(self.ending.write, reason), self.run.path)
        raise RunEnded(reason)

    async def _make_one(self, step: int) -> None:
        groups = await self.scheduler.next_groups()
        check_temperature(self.config.sampling, raw=self.client.reports_raw_logprobs)  # a restarted server may differ
        self.sampler.end_batch(groups[-1].index)
        batch = assemble_batch(
            self.run.run_id,
            step,
            groups,
            advantage=self.config.advantage,
            temperature=self.config.sampling.temperature,
            sampler=self.sampler,
        )
        if checkpoint_is_due(step, self.config.ckpt, self.config.max_steps):
            await held_async(partial(save_state, self.run, batch), self.run.path)
        await held_async(partial(publish_batch, self.run, batch), self.run.path)
        self.ending.feed(step, await self.batches.report(step, groups))
        self.samples.keep(groups, batch)


def assemble_batch(
    run_id: str,
    step: int,
    groups: Sequence[Group],
    *,
    advantage: AdvantageConfig,
    temperature: float,
    sampler: ExampleSampler | None = None,
) -> TrainingBatch:
    """The batch of update `step`: all rollouts of `groups`, in example order, and what is known of the examples.

    A group whose rewards are all equal may be among them: its advantage is zero, and it counts in the loss's mean. One
    without rollouts may be among them too.
    """
    samples = [sample for group in groups if group.rollouts_G for sample in _samples(group, advantage, temperature)]
    next_index = groups[-1].index + 1
    state = sampler.state(next_index) if sampler else {"next_index": next_index}
    return TrainingBatch(run_id, step, samples, state)


def has_signal(group: Group, advantage: AdvantageConfig) -> bool:
    """Whether any of the group's advantages is not zero."""
    return any(
        not _is_masked(rollout, advantage) and any(rollout.token_advantages_T or [value])
        for rollout, value in zip(group.rollouts_G, _advantages(group, advantage), strict=True)
    )


def publish_batch(run: RunDir, batch: TrainingBatch) -> None:
    """Write the batch file; of two orchestrators one succeeds. Raises SecondOrchestrator when it was the other one."""
    path = run.rollout_file(batch.step)
    make_folder(path.parent)
    try:
        write_batch(path, batch)
    except FileExistsError:
        correct_state(run, read_batch(path))
        raise SecondOrchestrator(
            f"{path} was written by another orchestrator of {run.run_id} and is left as it is: this one ends; "
            "look for the other one on all machines that share this folder, and keep only one"
        ) from None
    correct_state(run, batch)


def _samples(group: Group, advantage: AdvantageConfig, temperature: float) -> list[TrainingSample]:
    samples = []
    for rollout, value in zip(group.rollouts_G, _advantages(group, advantage), strict=True):
        sample = TrainingSample(
            token_ids=rollout.token_ids_T,
            loss_mask=rollout.loss_mask_T,
            logprobs=rollout.logprobs_T,
            advantage=value,
            reward=rollout.reward,
            temperature=temperature,
            policy_version=rollout.oldest_version,
            example_id=group.example_id,
            turn_versions=rollout.turn_versions,
        )
        if _is_masked(rollout, advantage):
            # Without a loss token no term of the loss reaches it, whatever the loss is.
            no_mask, no_logprobs = [False] * len(sample.token_ids), [0.0] * len(sample.token_ids)
            sample = msgspec.structs.replace(sample, loss_mask=no_mask, logprobs=no_logprobs, advantage=0.0)
        elif own_T := rollout.token_advantages_T:
            mean = math.fsum(own_T) / max(1, rollout.num_completion_tokens)
            sample = msgspec.structs.replace(sample, advantage=mean, token_advantages=own_T)
        samples.append(sample)
    return samples


def _is_masked(rollout: Rollout, advantage: AdvantageConfig) -> bool:
    return advantage.mask_truncated and rollout.truncated


def _advantages(group: Group, advantage: AdvantageConfig) -> list[float]:
    """What follows from the rewards, for each rollout. Raises EnvironmentFault for a reward that one of them lacks."""
    lengths_G = [rollout.num_completion_tokens for rollout in group.rollouts_G]
    if advantage.reward_weights:
        for rollout in group.rollouts_G:  # a node may have made it when the run had other weights
            check_names(rollout.rewards, advantage.reward_weights)
        rewards = {name: [each.rewards[name] for each in group.rollouts_G] for name in advantage.reward_weights}
        return weighted_advantages(rewards, lengths_G, advantage)
    return compute_advantages([rollout.reward for rollout in group.rollouts_G], lengths_G, advantage)
