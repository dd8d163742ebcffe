"""What makes a batch file unfit, and that the reason names sample, field and numbers. Hostile files included."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.types import BYTES_BESIDES, BadBatchError, TrainingBatch, write_batch
from prime_rl.trainer.intake import BatchLimits, check_batch, take_batch
from tests.trainer_support import VOCAB, make_batch, sample

LIMITS = BatchLimits("run_a", 3, seq_len=32, vocab_size=VOCAB, max_async_level=1, max_bytes=20_000)
NAN, INF = float("nan"), float("inf")
GOOD = make_batch("run_a", 3)


def with_sample(**changes: Any) -> TrainingBatch:
    bad = msgspec.structs.replace(sample(random.Random(1), policy_version=2), **changes)
    return msgspec.structs.replace(GOOD, samples=[GOOD.samples[0], bad])


def test_a_good_batch_passes(tmp_path: Path) -> None:
    check_batch(GOOD, LIMITS)
    write_batch(tmp_path / "b", GOOD)
    assert take_batch(tmp_path / "b", LIMITS) == GOOD
    for version in (1, 2):
        check_batch(with_sample(policy_version=version), LIMITS)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (make_batch("run_b", 3), "run_id is 'run_b', expected 'run_a'"),
        (make_batch("run_a", 4), "step is 4, expected 3"),
        (TrainingBatch("run_a", 3, [], {}), "no samples"),
        (with_sample(token_ids=[1] * 11), "sample 1: token_ids has 11 entries, loss_mask 12, logprobs 12"),
        (with_sample(loss_mask=[False] * 13), "sample 1: token_ids has 12 entries, loss_mask 13, logprobs 12"),
        (with_sample(logprobs=[]), "sample 1: token_ids has 12 entries, loss_mask 12, logprobs 0"),
        (with_sample(token_ids=[1] * 33, loss_mask=[False] * 33, logprobs=[0.0] * 33), "33 entries.*seq_len = 32"),
        (with_sample(token_ids=[1], loss_mask=[False], logprobs=[0.0]), "1 entries, expected 2 to"),
        (with_sample(token_ids=[], loss_mask=[], logprobs=[]), "sample 1: token_ids has 0 entries"),
        (with_sample(token_ids=[1, 2, VOCAB] + [0] * 9), rf"token_ids\[2\] is {VOCAB}, the vocabulary has {VOCAB}"),
        (with_sample(token_ids=[1, -1] + [0] * 10), r"token_ids\[1\] is -1"),
        (with_sample(token_ids=[2**63] + [0] * 11), r"token_ids\[0\] is 9223372036854775808"),
        (with_sample(loss_mask=[True] * 12), r"loss_mask\[0\] is true"),
        (with_sample(logprobs=[0.0, NAN] + [0.0] * 10), r"logprobs\[1\] is nan"),
        (with_sample(logprobs=[0.0] * 11 + [-INF]), r"logprobs\[11\] is -inf"),
        (with_sample(logprobs=[-1e300] + [0.0] * 11), r"logprobs\[0\] is -1e\+300"),
        (with_sample(advantage=INF), "sample 1: advantage is inf"),
        (with_sample(advantage=NAN), "sample 1: advantage is nan"),
        (with_sample(advantage=1e300), r"sample 1: advantage is 1e\+300"),
        (with_sample(temperature=0.0), "sample 1: temperature is 0.0"),
        (with_sample(temperature=1e-300), "sample 1: temperature is 1e-300"),
        (with_sample(temperature=-1.0), "sample 1: temperature is -1.0"),
        (with_sample(temperature=NAN), "sample 1: temperature is nan"),
        (with_sample(policy_version=0), "sample 1: policy_version is 0, batch 3 may hold versions 1 to 2 with max_as"),
        (with_sample(policy_version=3), "sample 1: policy_version is 3, batch 3 may hold"),
        (with_sample(policy_version=-1), "sample 1: policy_version is -1"),
        (
            TrainingBatch("run_a", 3, [with_sample(loss_mask=[False] * 12).samples[1]], {}),
            "loss_mask is false everywhere: the 1 samples have no loss tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_batch_is_explained(batch: TrainingBatch, reason: str) -> None:
    with pytest.raises(BadBatchError, match=reason):
        check_batch(batch, LIMITS)


def encoded(**changes: Any) -> bytes:
    """The good batch with fields of its second sample replaced by anything."""
    plain: dict[str, Any] = msgspec.to_builtins(GOOD)
    plain["samples"][1] |= changes
    return msgspec.msgpack.encode(plain)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a batch file: Input data was truncated"),
        (msgspec.msgpack.encode(GOOD)[:-9], "not a batch file: Input data was truncated"),
        (msgspec.msgpack.encode(GOOD) + b"\x00", "trailing"),
        (b"\x91" * 10_000, "Expected `object`, got `array`"),
        (b"\xdf\xff\xff\xff\xff", "truncated"),
        (b"\x81\xa7samples\xdd\xff\xff\xff\xff", "truncated"),
        (b"\x81\xa6run_id\xdb\xff\xff\xff\xff", "truncated"),
        (encoded(token_ids="all"), "sample 1: Expected `array`, got `str` - at `$.token_ids`"),
        (encoded(token_ids=[1.5]), "sample 1: Expected `int`, got `float`"),
        (encoded(logprobs=[None]), "sample 1: Expected `float`, got `None`"),
        (encoded(loss_mask=[1]), "sample 1: Expected `bool`, got `int`"),
        (encoded(advantage="nan"), "sample 1: Expected `float`, got `str` - at `$.advantage`"),
        (encoded(more=1), "sample 1: Object contains unknown field `more`"),
        (msgspec.msgpack.encode({"run_id": "run_a", "step": 3}), "missing required field `samples`"),
        (encoded(example_id="x" * 20_000), "bytes, expected at most 20000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_file_is_refused_with_its_sample(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "rollouts.msgpack"
    path.write_bytes(data)
    with pytest.raises(BadBatchError) as error:
        take_batch(path, LIMITS)
    assert reason in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("place", ["sampler_state", "sample"])
def test_nesting_without_end_is_refused(tmp_path: Path, place: str) -> None:
    data = msgspec.msgpack.encode({**msgspec.to_builtins(GOOD), "sampler_state": {"x": "HERE"}})
    if place == "sample":
        data = encoded(example_id="HERE")
    path = tmp_path / "b"
    path.write_bytes(data.replace(b"\xa4HERE", b"\x91" * 15_000 + b"\x00"))
    with pytest.raises(BadBatchError, match=r"not a batch file: .*(recursion|Expected `str`)"):
        take_batch(path, LIMITS)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.mkdir(), "must be a regular file"),
        (os.mkfifo, "must be a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "must be a regular file"),
        (lambda path: path.symlink_to("/nowhere"), "must be a regular file"),
        (lambda path: path.symlink_to(path), "must be a regular file"),
    ],
    ids=["folder", "pipe", "link to a device", "link to nothing", "link to itself"],
)
def test_what_is_no_file_is_neither_followed_nor_waited_for(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(tmp_path / "b")
    with pytest.raises(BadBatchError, match=reason):
        take_batch(tmp_path / "b", LIMITS)


def test_nothing_yet_is_no_fault(tmp_path: Path) -> None:
    assert take_batch(tmp_path / "b", LIMITS) is None
    (tmp_path / "step_1").write_text("a file in the place of the folder")
    assert take_batch(tmp_path / "step_1" / "b", LIMITS) is None


def test_the_allowed_size_follows_from_what_the_run_asked_for(tmp_path: Path) -> None:
    """The largest batch that the config allows fits; what is far larger is not read into memory."""
    config = OrchestratorConfig.model_validate(
        {
            "batch_size": 64,
            "rollouts_per_example": 4,
            "seq_len": 512,
            "model": {"name": "m"},
            "env": [{"id": "reverse-text"}],
        }
    )
    limits = BatchLimits.of(config, "run_a", 1, 2**31)
    full = msgspec.structs.replace(
        sample(random.Random(0)),
        token_ids=[2**31 - 1] * 512,
        loss_mask=[False] + [True] * 511,
        logprobs=[-0.1234567] * 512,
    )
    write_batch(tmp_path / "b", TrainingBatch("run_a", 1, [full] * 64, {"position": 1}))
    assert take_batch(tmp_path / "b", limits) is not None
    assert (tmp_path / "b").stat().st_size < limits.max_bytes < 2 * BYTES_BESIDES
    os.truncate(tmp_path / "b", 1 << 40)  # a hole: it takes no space on disk
    with pytest.raises(BadBatchError, match="has 1099511627776 bytes"):
        take_batch(tmp_path / "b", limits)
