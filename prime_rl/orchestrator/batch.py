"""From finished groups to the batch file of one update, step after step; and where the run stands.

The file's appearance is the signal to the trainer. `BatchLoop` goes on until the run's last update is published (and
evaluated), or until the run has its reason to end before that. What it awaits is the scheduler's: groups, and the last
policy version. Advantages come from the rewards of one group; formulas, sources and when to take which are in
docs/advantages.md.

Where a run stands, so that a restarted orchestrator goes on at the next example of the next batch, is in two places on
disk: the newest batch file, and `orchestrator/state.json` in the newest STABLE checkpoint (whose batch files the
trainer has removed). Both hold the same sampler state. A state file without STABLE does not count: it is written before
its batch.

G = rollouts of one example.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from prime_rl.configs.distill import DistillConfig
from prime_rl.configs.orchestrator import AdvantageConfig, AdvantageType, CkptConfig, OrchestratorConfig
from prime_rl.contract.files import UNDECODABLE, held_async, make_folder, read_file, read_text, write_atomic
from prime_rl.contract.layout import RunDir, list_rollout_steps, list_steps
from prime_rl.contract.types import MAX_BATCH_BYTES, TrainingBatch, TrainingSample, read_batch, write_batch
from prime_rl.orchestrator.envs.checked import check_names
from prime_rl.orchestrator.evaluate import Evaluator
from prime_rl.orchestrator.guard import Ending, RunEnded, check_run
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.publication import check_temperature
from prime_rl.orchestrator.recorder import Branch, Rollout
from prime_rl.orchestrator.report import BatchReporter, RunReporter, SampleKeeper
from prime_rl.orchestrator.rollout import Group
from prime_rl.orchestrator.sampler import ExampleSampler
from prime_rl.orchestrator.scheduler import Scheduler
from prime_rl.orchestrator.teacher import Teachers
from prime_rl.orchestrator.texts import Texts


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
    texts: Texts | None = None
    teachers: Teachers | None = None

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
        if self.config.samples_rollouts:  # a restarted server may differ
            check_temperature(self.config.sampling, raw=self.client.reports_raw_logprobs)
        self.sampler.end_batch(groups[-1].index)
        batch = assemble_batch(
            self.run.run_id,
            step,
            groups,
            advantage=self.config.advantage,
            teaching=self.config.teaching,
            temperature=self.config.sampling.temperature,
            sampler=self.sampler,
            texts=self._texts(step),
        )
        if checkpoint_is_due(step, self.config.ckpt, self.config.max_steps):
            await held_async(partial(save_state, self.run, batch), self.run.path)
        await held_async(partial(publish_batch, self.run, batch), self.run.path)
        self.ending.feed(step, await self.batches.report(batch, groups))
        self.samples.keep(groups, batch)

    def _texts(self, step: int) -> list[TrainingSample]:
        """What batch `step` has beside its groups: texts to learn, and those to measure on."""
        if self.texts is None:
            return []
        return [*self.texts.beside(step, self.config.texts_per_batch), *self.texts.held_out(step)]


def assemble_batch(
    run_id: str,
    step: int,
    groups: Sequence[Group],
    *,
    advantage: AdvantageConfig,
    temperature: float,
    teaching: DistillConfig | None = None,
    sampler: ExampleSampler | None = None,
    texts: Sequence[TrainingSample] = (),
) -> TrainingBatch:
    """The batch of update `step`: all rollouts of `groups`, in example order, and what is known of the examples.

    `texts` come after them.

    A group whose rewards are all equal may be among them: its advantage is zero, and it counts in the loss's mean. One
    without rollouts may be among them too.
    """
    made = [group for group in groups if group.rollouts_G]
    advantages = _advantages_of(made, advantage)
    samples = [
        sample
        for group, values_G in zip(made, advantages, strict=True)
        for sample in _samples(group, values_G, advantage, temperature, teaching)
    ]
    next_index = groups[-1].index + 1
    state = sampler.state(next_index) if sampler else {"next_index": next_index}
    return TrainingBatch(run_id, step, [*samples, *texts], state)


def has_signal(group: Group, advantage: AdvantageConfig, teaching: DistillConfig | None = None) -> bool:
    """True when any of the group's advantages is not zero, or may be not beside the other groups of its batch."""
    return advantage.type == "batch" or any(
        not _is_masked(rollout, advantage)
        and any(branch.soft_T or _token_advantages(branch, value, teaching) or [value])
        for rollout, value in zip(group.rollouts_G, _advantages(group, advantage), strict=True)
        for branch in rollout.branches
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


def _samples(
    group: Group,
    advantages_G: Sequence[float],
    advantage: AdvantageConfig,
    temperature: float,
    teaching: DistillConfig | None,
) -> list[TrainingSample]:
    """The samples of each rollout: its branches."""
    samples = []
    for number, (rollout, value) in enumerate(zip(group.rollouts_G, advantages_G, strict=True)):
        rollout_id = f"{group.index}.{number}" if len(rollout.branches) > 1 else ""
        for branch in rollout.branches:
            sample = TrainingSample(
                token_ids=branch.token_ids_T,
                loss_mask=branch.loss_mask_T,
                logprobs=branch.logprobs_T,
                advantage=1.0 if branch.use else value,
                reward=rollout.reward,
                temperature=1.0 if branch.use else temperature,
                policy_version=min(branch.turn_versions),
                example_id=group.example_id,
                turn_versions=branch.turn_versions,
                rollout_id=rollout_id,
                use=branch.use,
                turn_rewards=branch.turn_rewards,
            )
            if _is_masked(rollout, advantage):
                # Without a loss token no term of the loss reaches it, whatever the loss is.
                no_mask, no_logprobs = [False] * len(sample.token_ids), [0.0] * len(sample.token_ids)
                sample = msgspec.structs.replace(sample, loss_mask=no_mask, logprobs=no_logprobs, advantage=0.0)
            elif teaching is not None and branch.soft_T:
                sample = _soft_sample(sample, branch, teaching)
            elif own_T := _token_advantages(branch, value, teaching):
                mean = math.fsum(own_T) / max(1, branch.num_completion_tokens)
                sample = msgspec.structs.replace(sample, advantage=mean, token_advantages=own_T)
            samples.append(sample)
    return samples


def _token_advantages(branch: Branch, value: float, teaching: DistillConfig | None) -> list[float]:
    """T advantages in place of `value`; [] without: those of the environment, and of a teacher (docs/losses.md)."""
    if teaching is None or not branch.teacher_T:
        return branch.token_advantages_T
    rewarded_T = branch.token_advantages_T or [value] * len(branch.token_ids_T)
    told_T = zip(branch.loss_mask_T, branch.teacher_T, branch.logprobs_T, rewarded_T, strict=True)
    coef, weight = teaching.coef, teaching.reward_weight
    return [coef * (of_it - own) + weight * value if is_learned else 0.0 for is_learned, of_it, own, value in told_T]


def _soft_sample(sample: TrainingSample, branch: Branch, teaching: DistillConfig) -> TrainingSample:
    """The sample as a text of which each token that has a loss is what a teacher would have in its place."""
    told_T = [each.told() if each else ([], []) for each in branch.soft_T]
    return msgspec.structs.replace(
        sample,
        logprobs=[0.0] * len(sample.token_ids),
        advantage=teaching.coef,
        use="supervised",
        soft_ids=[token_ids for token_ids, _ in told_T],
        soft_probs=[[math.exp(min(0.0, value)) for value in values] for _, values in told_T],
    )


def _is_masked(rollout: Rollout, advantage: AdvantageConfig) -> bool:
    return advantage.mask_truncated and rollout.truncated


def _advantages_of(groups: Sequence[Group], advantage: AdvantageConfig) -> list[list[float]]:
    """Those of each rollout of each group; with "batch" all rollouts of an environment are one group."""
    if advantage.type != "batch":
        return [_advantages(group, advantage) for group in groups]
    values: dict[str, Iterator[float]] = {}
    for name in {group.env_name for group in groups}:
        together = [rollout for group in groups if group.env_name == name for rollout in group.rollouts_G]
        values[name] = iter(_advantages(Group(0, name, "", together), advantage))
    return [[next(values[group.env_name]) for _ in group.rollouts_G] for group in groups]


def _advantages(group: Group, advantage: AdvantageConfig) -> list[float]:
    """The advantages of each rollout, from the rewards. Raises EnvironmentFault for a reward that one of them lacks."""
    lengths_G = [rollout.num_completion_tokens for rollout in group.rollouts_G]
    if advantage.reward_weights:
        for rollout in group.rollouts_G:  # a node may have made it when the run had other weights
            check_names(rollout.rewards, advantage.reward_weights)
        rewards = {name: [each.rewards[name] for each in group.rollouts_G] for name in advantage.reward_weights}
        return weighted_advantages(rewards, lengths_G, advantage)
    return compute_advantages([rollout.reward for rollout in group.rollouts_G], lengths_G, advantage)


# Keeps a group whose rewards hardly differ from advantages without limit.
EPSILON = 1e-6


def compute_advantages(rewards_G: Sequence[float], lengths_G: Sequence[int], config: AdvantageConfig) -> list[float]:
    """One advantage a rollout (G numbers): how much better than its group it did.

    Args:
        rewards_G: G rewards.
        lengths_G: G numbers of tokens that the policy sampled; looked at only with a length penalty.

    Exactly zero when all rewards (after the penalty) are equal, so also for a group of one.
    """
    if config.length_penalty:
        rewards_G = penalize_length(rewards_G, lengths_G, config.length_penalty)
    if min(rewards_G) == max(rewards_G):
        return [0.0] * len(rewards_G)
    return FORMULAS[config.type](rewards_G)


def weighted_advantages(
    rewards: Mapping[str, Sequence[float]], lengths_G: Sequence[int], config: AdvantageConfig
) -> list[float]:
    """The advantages of several rewards, each taken separately over its group, summed with `config.reward_weights`.

    A reward that varies little then counts as much as one that varies much. GDPO, arXiv 2601.05242, without its last
    normalisation over the batch.

    Args:
        rewards: G numbers for each name in `config.reward_weights`.
        lengths_G: as in `compute_advantages`.
    """
    weighted = [
        [weight * value for value in compute_advantages(rewards[name], lengths_G, config)]
        for name, weight in config.reward_weights.items()
    ]
    return [math.fsum(values) for values in zip(*weighted, strict=True)]


def penalize_length(rewards_G: Sequence[float], lengths_G: Sequence[int], coef: float) -> list[float]:
    """R * (1 - coef * sigmoid((length - mean) / std)) for G rollouts (arXiv 2502.04463, section 4).

    Mean and standard deviation are those of the lengths of the rollouts with a reward above zero: wrong answers
    neither pay nor count, and no reward changes its sign. Where all those are equally long the sigmoid is 1/2.
    """
    counted = [length for reward, length in zip(rewards_G, lengths_G, strict=True) if reward > 0]
    if not counted:
        return list(rewards_G)
    mean = math.fsum(counted) / len(counted)
    std = _std([length - mean for length in counted])
    return [
        reward * (1 - coef * 0.5 * (1 + math.tanh((length - mean) / std / 2 if std else 0.0))) if reward > 0 else reward
        for reward, length in zip(rewards_G, lengths_G, strict=True)
    ]


def centred(rewards_G: Sequence[float]) -> list[float]:
    """R - mean(R). REINFORCE with the group's mean as baseline; Dr. GRPO's advantage (arXiv 2503.20783)."""
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def standardized(rewards_G: Sequence[float]) -> list[float]:
    """(R - mean(R)) / (std(R) + EPSILON), the (population) standard deviation of the group. GRPO, arXiv 2402.03300."""
    centred_G = centred(rewards_G)
    std = _std(centred_G)
    return [value / (std + EPSILON) for value in centred_G]


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """R minus the mean of the G - 1 others: a baseline that does not depend on R. RLOO, arXiv 2402.14740. G > 1."""
    total, num_others = math.fsum(rewards_G), len(rewards_G) - 1
    return [reward - (total - reward) / num_others for reward in rewards_G]


def over_mean(rewards_G: Sequence[float]) -> list[float]:
    """(R - mean(R)) / mean(R): the rarer success is, the more it counts. MaxRL, arXiv 2602.02710.

    Zero where the mean is not above zero: it estimates the chance of success, and there was none.
    """
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards_G]


# Each takes rewards that are not all equal.
FORMULAS: dict[AdvantageType, Callable[[Sequence[float]], list[float]]] = {
    "mean": centred,
    "grpo": standardized,
    "rloo": leave_one_out,
    "dr_grpo": centred,
    "maxrl": over_mean,
    "batch": leave_one_out,
}


def _std(centred: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in centred) / len(centred))


logger = logging.getLogger(__name__)

STATE_FORMAT_VERSION = 1
# It holds a number, two bits for each example, and a thousand shares for each curriculum.
MAX_STATE_BYTES = 1 << 20


class CheckpointError(RuntimeError):
    """The place to go on from cannot be read; the message names the file."""


@dataclass(frozen=True)
class Progress:
    """The newest batch that is done with, where the example order goes on after it, and what is known of examples."""

    step: int
    next_index: int
    pools: dict[str, Any] = field(default_factory=dict)
    curricula: dict[str, Any] = field(default_factory=dict)


class _State(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    step: int
    sampler_state: dict[str, Any]


def checkpoint_is_due(step: int, config: CkptConfig, max_steps: int) -> bool:
    """True when the run is checkpointed at `step`: every `config.interval` steps, and at the last."""
    return step % config.interval == 0 or step == max_steps


def save_state(run: RunDir, batch: TrainingBatch) -> None:
    """Write the orchestrator's part of checkpoint `batch.step`; before the batch file, which lets the trainer go on."""
    make_folder(run.checkpoint_dir(batch.step))
    write_atomic(_state_file(run, batch.step), _state_of(batch))


def correct_state(run: RunDir, batch: TrainingBatch) -> None:
    """Once `batch` is on disk: make the state of its step, if there is one, that of this batch.

    Two orchestrators may both have written the state before one of them wrote the batch.
    """
    path, right = _state_file(run, batch.step), _state_of(batch)
    if read_text(path) not in (None, right):
        write_atomic(path, right)


def _state_file(run: RunDir, step: int) -> Path:
    return run.orchestrator_checkpoint(step) / "state.json"


def _state_of(batch: TrainingBatch) -> str:
    return json.dumps({"version": STATE_FORMAT_VERSION, "step": batch.step, "sampler_state": batch.sampler_state})


def find_progress(run: RunDir, groups_per_batch: int, *, max_bytes: int = MAX_BATCH_BYTES) -> Progress:
    """Where to go on: after the newest batch file (of at most `max_bytes`) or STABLE checkpoint.

    Raises CheckpointError or BadBatchError. A trainer that stops saves itself at any step, so a checkpoint may lack our
    part. Its batch file is then still there, unless the run was rolled back from a later one: the example order goes on
    as if no group had been dropped.
    """
    newest_batch = max(list_rollout_steps(run), default=0)
    newest_checkpoint = max(list_steps(run.checkpoints, stable_only=True), default=0)
    if newest_batch == newest_checkpoint == 0:
        return Progress(0, 0)
    if newest_batch >= newest_checkpoint:
        batch = read_batch(run.rollout_file(newest_batch), limit=max_bytes)
        return progress_of(newest_batch, batch.sampler_state)
    path = _state_file(run, newest_checkpoint)
    if not os.path.lexists(path):
        logger.warning("%s not found: the example order continues as if no group had been dropped", path)
        return Progress(newest_checkpoint, newest_checkpoint * groups_per_batch)
    return progress_of(newest_checkpoint, _load_state(path).sampler_state)


def _load_state(path: Path) -> _State:
    try:
        state = msgspec.json.decode(read_file(path, limit=MAX_STATE_BYTES), type=_State)
    except (OSError, *UNDECODABLE) as error:
        raise CheckpointError(f"{path}: cannot resume from this checkpoint: {error}") from error
    if state.version != STATE_FORMAT_VERSION:
        raise CheckpointError(f"{path}: format version {state.version}, this program reads {STATE_FORMAT_VERSION}")
    return state


def progress_of(step: int, state: Mapping[str, Any]) -> Progress:
    """After batch `step`, which has the sampler state `state`. Raises CheckpointError."""
    try:
        known = dict(state.get("pools", {})), dict(state.get("curricula", {}))
        return Progress(step, int(state["next_index"]), *known)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"sampler state {str(state)[:200]} cannot be used: {error!r}") from error
