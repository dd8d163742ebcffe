"""What makes a batch file unfit, and that the reason names sample, field and numbers."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from prime_rl.contract.types import BadBatchError, TrainingBatch
from prime_rl.trainer.packer import BatchLimits, check_batch
from tests.trainer_support import VOCAB, make_batch, sample

LIMITS = BatchLimits("run_a", 3, seq_len=32, vocab_size=VOCAB)


def with_sample(**changes: Any) -> TrainingBatch:
    good = make_batch("run_a", 3)
    bad = msgspec.structs.replace(sample(random.Random(1)), **changes)
    return msgspec.structs.replace(good, samples=[good.samples[0], bad])


def test_a_good_batch_passes() -> None:
    check_batch(make_batch("run_a", 3), LIMITS)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (make_batch("run_b", 3), "run_id is 'run_b', expected 'run_a'"),
        (make_batch("run_a", 4), "step is 4, expected 3"),
        (TrainingBatch("run_a", 3, [], {}), "no samples"),
        (with_sample(token_ids=[1] * 11), "sample 1: token_ids has 11 entries, loss_mask 12, logprobs 12"),
        (with_sample(token_ids=[1] * 33, loss_mask=[False] * 33, logprobs=[0.0] * 33), "33 entries.*seq_len = 32"),
        (with_sample(token_ids=[1], loss_mask=[False], logprobs=[0.0]), "1 entries, allowed are 2 to"),
        (with_sample(token_ids=[1, 2, VOCAB] + [0] * 9), rf"token_ids\[2\] is {VOCAB}, the vocabulary has {VOCAB}"),
        (with_sample(token_ids=[1, -1] + [0] * 10), r"token_ids\[1\] is -1"),
        (with_sample(loss_mask=[True] * 12), r"loss_mask\[0\] is true"),
        (with_sample(logprobs=[0.0, float("nan")] + [0.0] * 10), r"logprobs\[1\] is nan"),
        (with_sample(logprobs=[0.0] * 11 + [float("-inf")]), r"logprobs\[11\] is -inf"),
        (with_sample(advantage=float("inf")), "sample 1: advantage is inf"),
        (with_sample(temperature=0.0), "sample 1: temperature is 0.0"),
        (
            TrainingBatch("run_a", 3, [msgspec.structs.replace(sample(random.Random(1)), loss_mask=[False] * 12)], {}),
            "loss_mask is false everywhere",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_batch_is_explained(batch: TrainingBatch, reason: str) -> None:
    with pytest.raises(BadBatchError, match=reason):
        check_batch(batch, LIMITS)
