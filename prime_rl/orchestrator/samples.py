"""Which rollouts of a batch people get to read, as text. Written to `metrics/samples.jsonl`; nothing depends on it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from prime_rl.configs.monitors import SamplesConfig
from prime_rl.contract.layout import RunDir
from prime_rl.contract.samples import Sample, SampleFile, SampleTurn
from prime_rl.contract.types import TrainingBatch
from prime_rl.orchestrator.rollout import Group, Rollout

logger = logging.getLogger(__name__)

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
        self._file = SampleFile(run.samples, keep=config.per_step * config.keep_steps)
        self._failed = False

    def keep(self, groups: Sequence[Group], batch: TrainingBatch) -> None:
        """Append the chosen rollouts of `batch`, which was assembled from `groups`."""
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts_G]
        picked = spread([rollout.reward for _, rollout in rollouts], self._config.per_step)
        samples = [self._sample(batch.step, *rollouts[i], batch.samples[i].advantage) for i in picked]
        try:
            self._file.append(samples)
        except OSError as error:
            if not self._failed:
                logger.warning("rollouts are not kept as text: %s", error)
            self._failed = True

    def _sample(self, step: int, group: Group, rollout: Rollout, advantage: float) -> Sample:
        token_ids, num_prompt = rollout.token_ids_T, rollout.num_prompt_tokens
        return Sample(
            step=step,
            env=group.env_name,
            example_id=group.example_id,
            prompt=shorten(self._decode(token_ids[:num_prompt]), self._config.max_chars),
            completion=shorten(self._decode(token_ids[num_prompt:]), self._config.max_chars),
            reward=rollout.reward,
            advantage=advantage,
            policy_versions=sorted({rollout.oldest_version, *rollout.turn_versions}),
            num_tokens=len(token_ids),
            num_completion_tokens=rollout.num_completion_tokens,
            turns=self._turns(rollout),
        )

    def _turns(self, rollout: Rollout) -> list[SampleTurn]:
        """The messages after the prompt; [] for a single turn."""
        start, spans = rollout.num_prompt_tokens, []
        for by_policy, mask in itertools.groupby(rollout.loss_mask_T[start:]):
            end = start + len(list(mask))
            spans.append((by_policy, rollout.token_ids_T[start:end]))
            start = end
        if sum(by_policy for by_policy, _ in spans) < 2:
            return []
        # All turns together may be as long as one completion; what is left of each must still be readable.
        limit = max(self._config.max_chars // len(spans), MIN_TURN_CHARS)
        return [SampleTurn(by_policy, shorten(self._decode(ids), limit)) for by_policy, ids in spans[:MAX_TURNS]]


def spread(rewards: Sequence[float], count: int) -> list[int]:
    """The places of `count` rewards, evenly from the lowest to the highest; of one alone, the highest."""
    order = sorted(range(len(rewards)), key=lambda place: (rewards[place], place))
    last, count = len(order) - 1, min(count, len(order))
    if count <= 1:
        return order[-1:] * count
    return [order[round(number * last / (count - 1))] for number in range(count)]


def shorten(text: str, limit: int) -> str:
    """`text`, or its beginning and its end around an ellipsis: questions begin, answers end."""
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]} … {text[len(text) - (limit - head - 3) :]}"
