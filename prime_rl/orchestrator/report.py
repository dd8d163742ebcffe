"""The run's face to the outside: its status file, its metrics lines, its log lines, and rollouts for people.

`LearningWatch` reads both metrics files of the run, so the signs that it does not learn outlast a restart.

The rollouts go to `metrics/samples.jsonl`; nothing depends on it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from prime_rl.configs.reports import SamplesConfig
from prime_rl.contract.files import held_async
from prime_rl.contract.layout import RunDir
from prime_rl.contract.metrics import Learning, Sign, parse_metrics
from prime_rl.contract.samples import BatchRewards, Keeping, KeptSample, Sample, SampleFile, SampleTokens, SampleTurn
from prime_rl.contract.status import StatusWriter
from prime_rl.contract.types import TrainingBatch, rollouts_of
from prime_rl.gateway.texts import messages_of
from prime_rl.orchestrator.envs.checked import CheckedEnvironment
from prime_rl.orchestrator.metrics import batch_metrics, bottleneck, teacher_metrics, text_metrics, write_metrics
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.recorder import Branch, pieces
from prime_rl.orchestrator.rollout import Group
from prime_rl.orchestrator.sampler import ExampleSampler
from prime_rl.orchestrator.scheduler import Scheduler
from prime_rl.orchestrator.teacher import Teachers
from prime_rl.orchestrator.texts import Texts
from prime_rl.utils.runtime import TokenRate
from prime_rl.utils.tail import FileTail
from prime_rl.utils.text import one_line, shorten

MAX_TURNS = 64
MIN_TURN_CHARS = 80


class SampleKeeper:
    """Keeps some rollouts of every batch. A disk that does not take them is logged once and costs nothing else.

    Args:
        decode: token ids to text.
    """

    def __init__(self, run: RunDir, config: SamplesConfig, decode: Callable[[Sequence[int]], str]) -> None:
        self._config = config
        self._decode = decode
        self._file: SampleFile | None = None
        self._num_records = 0  # of the batch that had most
        self._path = run.samples
        self._failed = False

    def keep(self, groups: Sequence[Group], batch: TrainingBatch) -> None:
        """Append the chosen rollouts of `batch`, which was assembled from `groups`, all of one size."""
        keeping = Keeping(self._config.per_step, len(groups[0].rollouts_G))
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts_G]
        places = keeping.samples(batch.samples)  # texts come after what was made of the groups
        if not places:
            return
        branches = [(number, at) for number, (_, each) in enumerate(rollouts) for at in range(len(each.branches))]
        records: list[BatchRewards | Sample] = [BatchRewards([each.reward for _, each in rollouts], batch.step)]
        for place in places:
            number, at = branches[place]
            group, rollout = rollouts[number]
            sample = self._sample(batch, place, keeping, group, rollout.branches[at])
            which = {"group": number // keeping.group_size, "branch": at, "num_branches": len(rollout.branches)}
            output = shorten(rollout.output, self._config.max_chars)
            records.append(msgspec.structs.replace(sample, **which, output=output))
        if len(records) > self._num_records:
            self._num_records = len(records)
            self._file = SampleFile(self._path, keep=len(records) * self._config.keep_steps)
        assert self._file is not None, "there are records"
        try:
            self._file.append(records)
        except OSError as error:
            if not self._failed:
                logger.warning("rollouts are not kept as text: %s", error)
            self._failed = True

    def _sample(self, batch: TrainingBatch, place: int, keeping: Keeping, group: Group, branch: Branch) -> KeptSample:
        token_ids, num_before, sample = branch.token_ids_T, branch.num_before, batch.samples[place]
        messages, tools = messages_of(branch.turns), list(branch.tools)
        is_short = len(msgspec.json.encode([messages, tools]).decode()) <= 2 * self._config.max_chars
        return KeptSample(
            step=batch.step,
            env=group.env_name,
            example_id=group.example_id,
            prompt=shorten(self._decode(token_ids[branch.num_shared : num_before]), self._config.max_chars),
            completion=shorten(self._decode(token_ids[num_before:]), self._config.max_chars),
            reward=sample.reward,
            advantage=sample.advantage,
            policy_versions=sorted(set(branch.turn_versions)),
            num_tokens=len(token_ids),
            num_completion_tokens=branch.num_completion_tokens,
            turns=self._turns(branch),
            place=place,
            num_shared=branch.num_shared,
            shared_with=branch.shared_with,
            turn_rewards=branch.turn_rewards,
            tokens=self._tokens(branch, sample.token_advantages, keeping),
            messages=messages if is_short else [],
            tools=tools if is_short else [],
            ended=branch.ended,
        )

    def _tokens(self, branch: Branch, advantages_T: Sequence[float], keeping: Keeping) -> SampleTokens:
        mask, ids = bytes(branch.loss_mask_T), branch.token_ids_T
        positions = keeping.positions(mask)
        head = keeping.max_tokens // 2
        num_left_out = mask.rfind(1) + 1 - positions[0] - len(positions) if positions else 0
        halves = [positions[:head], positions[head:]] if num_left_out else [positions]
        return SampleTokens(
            pieces=[piece for half in halves for piece in pieces([ids[at] for at in half], self._decode)],
            logprobs=[round(branch.logprobs_T[at], 4) if mask[at] and not branch.use else None for at in positions],
            num_left_out=num_left_out,
            advantages=[round(advantages_T[at], 4) for at in positions] if advantages_T else [],
        )

    def _turns(self, branch: Branch) -> list[SampleTurn]:
        """The messages after the prompt; [] for a single turn."""
        start, spans = branch.num_before, []
        for by_policy, mask in itertools.groupby(branch.loss_mask_T[start:]):
            end = start + len(list(mask))
            spans.append((by_policy, branch.token_ids_T[start:end]))
            start = end
        if sum(by_policy for by_policy, _ in spans) < 2:
            return []
        # All turns together may be as long as one completion; what is left of each must still be readable.
        limit = max(self._config.max_chars // len(spans), MIN_TURN_CHARS)
        return [SampleTurn(by_policy, shorten(self._decode(ids), limit)) for by_policy, ids in spans[:MAX_TURNS]]


logger = logging.getLogger("orchestrator")

# How often the status file follows figures that change all the time; a new wait is written at once.
REPORT_S = 2.0
# The status file is written often: of the unusable examples it has so many.
MAX_UNUSABLE_SHOWN = 20
# Several batches may be ready at once and then none for long: the token rate is taken over at least this.
RATE_WINDOW_S = 10.0


def environment_figures(
    envs: Sequence[CheckedEnvironment], told: Sequence[str] = (), texts: Mapping[str, str] | None = None
) -> dict[str, object]:
    """The figures of the environments in the status file: what goes wrong in them, and the unusable examples.

    `told` is what is wrong with all of them; `texts` are unusable ones, with the reasons.
    """
    unusable = {f"{env.name}/{one_line(each, 80)}": one_line(why) for env in envs for each, why in env.unusable.items()}
    unusable |= {one_line(each, 80): one_line(why) for each, why in (texts or {}).items()}
    return {
        "problem": "; ".join([*told, *(problem for env in envs if (problem := env.problem()))]) or None,
        "examples_unusable": len(unusable),
        "unusable": dict(list(unusable.items())[-MAX_UNUSABLE_SHOWN:]),
    }


class RunReporter:
    """Keeps `control/status.json` true: a new wait at once, figures that changed every REPORT_S, nothing else.

    Args:
        waiting_on: the sentence about what is waited for, at a time in Unix seconds; None while nothing is.
        figures: fields that change all the time.
    """

    def __init__(
        self,
        writer: StatusWriter,
        waiting_on: Callable[[float], str | None] = lambda now: None,
        figures: Callable[[], dict[str, object]] = dict,
    ) -> None:
        self._writer = writer
        self._waiting_on = waiting_on
        self._figures = figures
        self._written_s = 0.0
        self._written: dict[str, object] = {}

    def wait_for(self, what: str | Callable[[float], str | None] | None) -> None:
        """Note what is waited for from now on, written at once."""
        self._waiting_on = what if callable(what) else lambda now: what
        self.tick()

    def update(self, **fields: object) -> None:
        """Write `fields` into the status file, together with the present wait and all figures."""
        self._written_s = time.monotonic()
        self._written = self._figures()
        self._writer.update(waiting_on=self._waiting_on(time.time()), **self._written, **fields)

    def tick(self) -> None:
        """One turn of the event loop: a new wait is written at once, figures that changed every REPORT_S."""
        self._writer.turn()
        sentence = self._waiting_on(time.time())
        if sentence != self._writer.status.waiting_on:
            if sentence:
                logger.info("waiting for %s", sentence)
            self.update()
        elif time.monotonic() - self._written_s >= REPORT_S and self._figures() != self._written:
            self.update()


class LearningWatch:
    """The signs that a run does not learn, by all lines that it and the trainer have written of it."""

    def __init__(self, run: RunDir) -> None:
        self._learning = Learning()
        self._tails = (FileTail(run.orchestrator_metrics), FileTail(run.trainer_metrics))

    def look(self) -> list[Sign]:
        """Read on to the end of both files."""
        for tail in self._tails:
            for step, figures in filter(None, map(parse_metrics, tail.lines())):
                self._learning.feed(step, figures)
        return self._learning.signs()


@dataclass(frozen=True)
class BatchReporter:
    """After each batch: one line of metrics, one line of log, and the status file."""

    run: RunDir
    scheduler: Scheduler
    client: InferenceClient
    reporter: RunReporter
    envs: Mapping[str, CheckedEnvironment]
    sampler: ExampleSampler
    learning: LearningWatch
    texts: Texts | None = None
    teachers: Teachers | None = None
    rate: TokenRate = field(default_factory=lambda: TokenRate(RATE_WINDOW_S))

    async def report(self, batch: TrainingBatch, groups: Sequence[Group]) -> dict[str, float]:
        """Returns the figures of the batch, which was assembled from `groups`."""
        time_s, ledger, step = self.scheduler.phases.lap(), self.scheduler.ledger, batch.step
        held_by = bottleneck(time_s, num_ahead=step - 1 - self.scheduler.published)
        if not self.envs and held_by != "trainer":  # nothing is sampled
            held_by = None
        if self.texts is not None and not self.envs:
            values = text_metrics(step, groups, time_s) | {"epoch": (groups[-1].index + 1) / self.texts.num_texts}
        else:
            values = batch_metrics(step, groups, time_s, ledger.num_dropped)
            sampled = batch.samples[: sum(len(each.branches) for group in groups for each in group.rollouts_G)]
            has_signal = [bool(each.advantage or any(each.token_advantages)) for each in sampled]
            with_signal = [any(has_signal[place] for place in places) for places in rollouts_of(sampled)]
            values["signal"] = sum(with_signal) / max(1, len(with_signal))
            values |= {"groups_filtered": ledger.num_filtered, "groups_too_old": ledger.num_too_old}
            values |= {f"env/{name}/dropped": env.num_dropped for name, env in self.envs.items()}
            values |= self.sampler.figures() | teacher_metrics(groups)
            values |= self.teachers.figures() if self.teachers else {}
        num_learned, unusable = (self.texts.num_tokens, self.texts.unusable) if self.texts else (0, {})
        values["examples_unusable"] = sum(len(env.unusable) for env in self.envs.values()) + len(unusable)
        values["tokens_per_s"] = self.rate.per_s(self.client.num_sampled_tokens + num_learned)
        values |= self.client.metrics()
        line: dict[str, float | str] = {**values, "bottleneck": held_by or "none"}
        write = partial(write_metrics, self.run.orchestrator_metrics, step, line, time.time())
        await held_async(write, self.run.path)
        signs = await asyncio.to_thread(self.learning.look)
        self.reporter.update(
            signs=signs,
            step=step,
            reward=values.get("reward/mean"),
            tokens_per_s=values["tokens_per_s"],
            async_level=int(values["async_level/max"]),
            bottleneck=held_by,
        )
        reached = f"reward {values['reward/mean']:.4f}" if self.envs else f"epoch {values['epoch']:.2f}"
        logger.info(
            "step %d: %s, async level %d, %.1f s, %.0f tokens/s",
            step,
            reached,
            values["async_level/max"],
            values["time/step"],
            values["tokens_per_s"],
        )
        return values
