"""The rollouts of a batch that people get to read, with their tokens.

Written to `metrics/samples.jsonl`; nothing depends on it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from prime_rl.configs.monitors import SamplesConfig
from prime_rl.contract.layout import RunDir
from prime_rl.contract.samples import BatchRewards, Keeping, Sample, SampleFile, SampleTokens, SampleTurn, TokenSample
from prime_rl.contract.types import TrainingBatch
from prime_rl.orchestrator.rollout import Group, Rollout

logger = logging.getLogger(__name__)

MAX_TURNS = 64
MIN_TURN_CHARS = 80
# A character of UTF-8 has at most four bytes, so its first three tokens may be unfinished.
MAX_CHAR_TOKENS = 3


class SampleKeeper:
    """Keeps some rollouts of every batch. A disk that does not take them is logged once and costs nothing else.

    Args:
        decode: token ids to text.
    """

    def __init__(self, run: RunDir, config: SamplesConfig, decode: Callable[[Sequence[int]], str]) -> None:
        self._config = config
        self._decode = decode
        self._file: SampleFile | None = None
        self._path = run.samples
        self._failed = False

    def keep(self, groups: Sequence[Group], batch: TrainingBatch) -> None:
        """Append the chosen rollouts of `batch`, which was assembled from `groups`, all of one size."""
        keeping = Keeping(self._config.per_step, len(groups[0].rollouts_G))
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts_G]
        rewards = [rollout.reward for _, rollout in rollouts]
        places = keeping.places(rewards)
        if not places:
            return
        records: list[BatchRewards | Sample] = [
            BatchRewards(rewards, batch.step),
            *(self._sample(batch, place, keeping, *rollouts[place]) for place in places),
        ]
        if self._file is None:
            self._file = SampleFile(self._path, keep=len(records) * self._config.keep_steps)
        try:
            self._file.append(records)
        except OSError as error:
            if not self._failed:
                logger.warning("rollouts are not kept as text: %s", error)
            self._failed = True

    def _sample(
        self, batch: TrainingBatch, place: int, keeping: Keeping, group: Group, rollout: Rollout
    ) -> TokenSample:
        token_ids, num_prompt = rollout.token_ids_T, rollout.num_prompt_tokens
        return TokenSample(
            step=batch.step,
            env=group.env_name,
            example_id=group.example_id,
            prompt=shorten(self._decode(token_ids[:num_prompt]), self._config.max_chars),
            completion=shorten(self._decode(token_ids[num_prompt:]), self._config.max_chars),
            reward=rollout.reward,
            advantage=batch.samples[place].advantage,
            policy_versions=sorted({rollout.oldest_version, *rollout.turn_versions}),
            num_tokens=len(token_ids),
            num_completion_tokens=rollout.num_completion_tokens,
            turns=self._turns(rollout),
            place=place,
            group=place // keeping.group_size,
            tokens=self._tokens(rollout, batch.samples[place].token_advantages, keeping),
        )

    def _tokens(self, rollout: Rollout, advantages_T: Sequence[float], keeping: Keeping) -> SampleTokens:
        mask, ids = bytes(rollout.loss_mask_T), rollout.token_ids_T
        positions = keeping.positions(mask)
        head = keeping.max_tokens // 2
        num_left_out = mask.rfind(1) + 1 - positions[0] - len(positions) if positions else 0
        halves = [positions[:head], positions[head:]] if num_left_out else [positions]
        return SampleTokens(
            pieces=[piece for half in halves for piece in pieces([ids[at] for at in half], self._decode)],
            logprobs=[round(rollout.logprobs_T[at], 4) if mask[at] else None for at in positions],
            num_left_out=num_left_out,
            advantages=[round(advantages_T[at], 4) for at in positions] if advantages_T else [],
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


def pieces(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token behind the one before it; of a character in several tokens, at the last of them."""
    found, seen, start = [], 0, 0
    for at in range(len(token_ids)):
        before, text = decode(token_ids[start:seen]), decode(token_ids[start : at + 1])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and at - seen < MAX_CHAR_TOKENS and at + 1 < len(token_ids):
            found.append("")
            continue
        found.append(text[len(before) :])
        start, seen = seen, at + 1
    return found


def shorten(text: str, limit: int) -> str:
    """`text`, or its beginning and its end around an ellipsis: questions begin, answers end."""
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]} … {text[len(text) - (limit - head - 3) :]}"
