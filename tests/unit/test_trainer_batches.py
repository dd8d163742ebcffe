"""What makes a batch file unfit, and that the reason names sample, field and numbers. Hostile files included.

Both versions of the file are read: lists (1) and columns (2).
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.types import (
    BYTES_BESIDES,
    MAX_BATCH_BYTES,
    MAX_SOFT_TARGETS,
    BadBatchError,
    BatchColumns,
    TrainingBatch,
    full_batch_bytes,
    max_batch_bytes,
    max_rollout_bytes,
    read_batch,
    sample_bytes,
    write_batch,
)
from prime_rl.trainer import batches
from prime_rl.trainer.batches import BatchLimits, check_batch, take_batch
from prime_rl.trainer.fair_queue import rows_of, to_micro_batch
from prime_rl.trainer.step import Rows
from tests.trainer_support import VOCAB, make_batch, sample, with_soft

LIMITS = BatchLimits("run_a", 3, seq_len=32, vocab_size=VOCAB, max_async_level=1, max_bytes=20_000)
NAN, INF = float("nan"), float("inf")
GOOD = make_batch("run_a", 3)
VERSION_1 = Path(__file__).parent.parent / "files" / "rollouts_version_1.msgpack"


def with_sample(**changes: Any) -> TrainingBatch:
    bad = msgspec.structs.replace(sample(random.Random(1), policy_version=2), **changes)
    return msgspec.structs.replace(GOOD, samples=[GOOD.samples[0], bad])


def as_lists(batch: TrainingBatch) -> bytes:
    """A file of version 1."""
    return msgspec.msgpack.encode(batch)


def as_columns(batch: TrainingBatch) -> bytes:
    """A file of version 2."""
    return msgspec.msgpack.encode(batch.columns())


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(BadBatchError) as error:
        take_batch(path, LIMITS)
    return str(error.value)


def test_a_batch_that_is_only_measured_is_refused(tmp_path: Path) -> None:
    held = msgspec.structs.replace(
        GOOD, samples=[msgspec.structs.replace(each, use="held_out") for each in GOOD.samples]
    )
    assert "have no loss tokens" in refusal(tmp_path / "b", as_columns(held))
    texts = [msgspec.structs.replace(GOOD.samples[0], use="supervised"), *held.samples]
    write_batch(tmp_path / "c", msgspec.structs.replace(GOOD, samples=texts))
    assert take_batch(tmp_path / "c", LIMITS) is not None


@pytest.mark.parametrize("encoded", [as_lists, as_columns])
def test_an_unknown_use_is_refused_by_name(tmp_path: Path, encoded: Callable[[TrainingBatch], bytes]) -> None:
    message = refusal(tmp_path / "b", encoded(with_sample(use="wizard")))
    assert "sample 1" in message and "wizard" in message


def test_a_good_batch_passes_and_keeps_every_value(tmp_path: Path) -> None:
    write_batch(tmp_path / "b", GOOD)
    taken = take_batch(tmp_path / "b", LIMITS)
    assert taken == msgspec.structs.replace(GOOD.columns(), sampler_state={})
    for one, good in zip(taken.samples, GOOD.samples, strict=True):
        assert np.frombuffer(one.token_ids, "<i4").tolist() == good.token_ids
        assert list(one.loss_mask) == good.loss_mask
        assert np.frombuffer(one.logprobs, "<f4").tolist() == np.float32(good.logprobs).tolist()
    for version in (1, 2):
        check_batch(with_sample(policy_version=version).columns(), LIMITS)
    largest = batches.MAX_FLOAT
    check_batch(
        with_sample(advantage=-largest, logprobs=[-largest] * 12, token_advantages=[largest] * 12).columns(), LIMITS
    )


def test_a_file_of_version_1_that_its_own_program_wrote_is_the_same_batch(tmp_path: Path) -> None:
    """The bytes come from the program before version 2; the values beside them are decoded without this project."""
    plain = msgspec.msgpack.decode(VERSION_1.read_bytes())
    assert plain["version"] == 1 and isinstance(plain["samples"][0]["token_ids"], list)
    batch = take_batch(VERSION_1, LIMITS)
    assert batch is not None and (batch.run_id, batch.step, len(batch.samples)) == ("run_a", 3, 8)
    assert len(batch.samples) == len(plain["samples"]) == 8
    for one, values in zip(batch.samples, plain["samples"], strict=True):
        assert np.frombuffer(one.token_ids, "<i4").tolist() == values.pop("token_ids")
        assert list(one.loss_mask) == values.pop("loss_mask")
        assert np.frombuffer(one.logprobs, "<f4").tolist() == np.float32(values.pop("logprobs")).tolist()
        assert {name: getattr(one, name) for name in values} == values and len(values) == 6
    write_batch(tmp_path / "b", read_batch(VERSION_1))
    assert take_batch(tmp_path / "b", LIMITS) == batch, "the same batch in both versions"


def test_advantages_of_tokens_are_a_column_that_other_samples_do_not_have(tmp_path: Path) -> None:
    given = [0.0] * 4 + [0.25 * at for at in range(-4, 4)]
    batch = with_sample(token_advantages=given)
    write_batch(tmp_path / "b", batch)
    assert read_batch(tmp_path / "b").samples[1].token_advantages == given
    taken = take_batch(tmp_path / "b", LIMITS)
    assert taken is not None and taken.samples == batch.columns().samples
    assert np.frombuffer(taken.samples[1].token_advantages, "<f4").tolist() == given
    # A file without them is what it was before there were any, to the last byte.
    first, second = msgspec.msgpack.decode((tmp_path / "b").read_bytes())["samples"]
    assert "token_advantages" not in first and len(second["token_advantages"]) == 12 * 4
    check_batch(with_sample(token_advantages=[3.3e38] * 12).columns(), LIMITS)


def with_soft_sample(**changes: Any) -> TrainingBatch:
    """The second sample has three soft targets at each of its loss tokens, the last eight."""
    soft = with_soft(sample(random.Random(1), policy_version=2), 3)
    return msgspec.structs.replace(GOOD, samples=[GOOD.samples[0], msgspec.structs.replace(soft, **changes)])


def test_soft_targets_are_columns_that_other_samples_do_not_have(tmp_path: Path) -> None:
    batch = with_soft_sample()
    write_batch(tmp_path / "b", batch)
    read = read_batch(tmp_path / "b").samples[1]
    assert read.soft_ids == batch.samples[1].soft_ids
    assert read.soft_probs == [np.float32(each).tolist() for each in batch.samples[1].soft_probs]
    taken = take_batch(tmp_path / "b", LIMITS)
    assert taken is not None and taken.samples == batch.columns().samples
    # A file without them is what it was before there were any, to the last byte.
    first, second = msgspec.msgpack.decode((tmp_path / "b").read_bytes())["samples"]
    assert not {"soft_ids", "soft_probs"} & set(first)
    assert len(second["soft_ids"]) == len(second["soft_probs"]) == 8 * 3 * 4


def test_a_token_with_fewer_soft_targets_is_filled_up_with_what_counts_nothing() -> None:
    text = with_soft_sample().samples[1]
    ids, probs = list(text.soft_ids), list(text.soft_probs)
    ids[5], probs[5] = ids[5][:1], probs[5][:1]
    read = msgspec.structs.replace(text, soft_ids=ids, soft_probs=probs).columns().lists()
    assert read.soft_ids[5] == [*ids[5], 0, 0] and read.soft_probs[5] == [np.float32(probs[5][0]), 0.0, 0.0]
    assert read.soft_ids[6] == ids[6] and read.columns().lists() == read


@given(data=st.data())
def test_any_soft_targets_come_back_and_take_no_more_bytes_than_is_said(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, MAX_SOFT_TARGETS))
    text = with_soft(sample(random.Random(data.draw(st.integers(0, 9))), num_tokens=data.draw(st.integers(6, 32))), num)
    found = text.columns()
    assert found.lists().soft_ids == text.soft_ids
    assert len(msgspec.msgpack.encode(found)) <= sample_bytes(len(text.token_ids), num)
    one = TrainingBatch("run_a", 1, [text], {})
    check_batch(one.columns(), replace(LIMITS, step=1))


def test_room_for_soft_targets() -> None:
    assert sample_bytes(100, 20) == sample_bytes(100) + 100 * 20 * 8
    assert full_batch_bytes(3, 100, 20) == 3 * sample_bytes(100, 20) <= max_batch_bytes(3, 100, 20)
    assert max_batch_bytes(10**6, 10**4, 20) == MAX_BATCH_BYTES
    assert max_rollout_bytes(3, 4, 100, 20) >= 4 * sample_bytes(100, 20)


SOFT_IDS, SOFT_PROBS = with_soft_sample().samples[1].soft_ids, with_soft_sample().samples[1].soft_probs


def at_six(values: list[Any], new: list[Any]) -> list[Any]:
    return [*values[:6], new, *values[7:]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use": ""}, "sample 1: soft_ids in a sample of use '', only 'supervised' ones may have them"),
        ({"use": "held_out"}, "sample 1: soft_ids in a sample of use 'held_out'"),
        (
            {"soft_ids": at_six(SOFT_IDS, [1, VOCAB, 2])},
            f"sample 1: soft_ids[7] is {VOCAB}, the vocabulary has {VOCAB}",
        ),
        ({"soft_ids": at_six(SOFT_IDS, [-1, 1, 2])}, "sample 1: soft_ids[6] is -1, the vocabulary"),
        ({"soft_probs": at_six(SOFT_PROBS, [0.1, 0.1, -0.1])}, "sample 1: soft_probs[8] is -0.1, must be 0 to 1"),
        ({"soft_probs": at_six(SOFT_PROBS, [NAN, 0.1, 0.1])}, "sample 1: soft_probs[6] is nan, must be 0 to 1"),
        ({"soft_probs": at_six(SOFT_PROBS, [INF, 0.1, 0.1])}, "sample 1: soft_probs[6] is inf, must be 0 to 1"),
        (
            {"soft_probs": at_six(SOFT_PROBS, [0.5, 0.5, 0.25])},
            "sample 1: the sum of soft_probs of loss token[2] is 1.25, must be at most 1",
        ),
    ],
)
def test_bad_soft_targets_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    assert reason in refusal(tmp_path / "b", as_columns(with_soft_sample(**changes)))


def test_probabilities_may_be_rounded() -> None:
    check_batch(with_soft_sample(soft_probs=at_six(SOFT_PROBS, [0.5, 0.5, 0.0009])).columns(), LIMITS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"soft_ids": at_six(SOFT_IDS, [1, 2])}, "soft_ids and soft_probs have different lengths"),
        ({"soft_probs": []}, "soft_ids and soft_probs have different lengths"),
        (
            {"soft_ids": at_six(SOFT_IDS, []), "soft_probs": at_six(SOFT_PROBS, [])},
            "soft_ids[6] has 0 ids, expected 1 to 20 at a loss token, else none",
        ),
        (
            {"soft_ids": at_six(SOFT_IDS, [1] * 21), "soft_probs": at_six(SOFT_PROBS, [0.0] * 21)},
            "soft_ids[6] has 21 ids",
        ),
        (
            {"soft_ids": [[1], *SOFT_IDS[1:]], "soft_probs": [[0.5], *SOFT_PROBS[1:]]},
            "soft_ids[0] has 1 ids, expected",
        ),
        ({"soft_ids": SOFT_IDS[:9], "soft_probs": SOFT_PROBS[:9]}, "soft_ids has 9 entries, expected 12 or none"),
        ({"soft_probs": at_six(SOFT_PROBS, [0.1, 1e300, 0.1])}, "soft_probs[7] is 1e+300, which has no place"),
    ],
)
def test_soft_targets_that_make_no_columns_are_not_written(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"sample 1: {reason}")):
        write_batch(tmp_path / "b", with_soft_sample(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"soft_ids": b"\0" * 96, "soft_probs": b"\0" * 92},
        {"soft_ids": b"", "soft_probs": b"\0" * 96},
        {"soft_ids": b"\0" * 96, "soft_probs": b""},
        {"soft_ids": b"\0" * 36, "soft_probs": b"\0" * 36},
        {"soft_ids": b"\0" * 97, "soft_probs": b"\0" * 97},
        {"soft_ids": b"\0" * 4 * 8 * 21, "soft_probs": b"\0" * 4 * 8 * 21},
        {"loss_mask": b"\0" * 12},
    ],
)
def test_columns_of_soft_targets_have_as_many_for_each_loss_token(tmp_path: Path, changes: dict[str, Any]) -> None:
    message = refusal(tmp_path / "b", changed(with_soft_sample().columns(), **changes))
    assert message.startswith("sample 1: soft_ids has ") and ", expected 1 to 20 times 4 for each of " in message


def test_a_file_of_version_1_has_no_soft_targets(tmp_path: Path) -> None:
    """Its lists of lists would take far more memory than the file has bytes: they are refused before they are made."""
    assert "soft_ids" in refusal(tmp_path / "b", as_lists(with_soft_sample()))


def test_a_run_that_masks_what_was_cut_may_have_a_batch_without_a_loss_token() -> None:
    batch = with_sample(loss_mask=[False] * 12)
    nothing = TrainingBatch("run_a", 3, batch.samples[1:], {})
    with pytest.raises(BadBatchError, match="loss_mask is false everywhere"):
        check_batch(nothing.columns(), LIMITS)
    check_batch(nothing.columns(), replace(LIMITS, may_lack_loss=True))
    config = OrchestratorConfig.model_validate(
        {
            "batch_size": 4,
            "rollouts_per_example": 4,
            "seq_len": 32,
            "model": {"name": "m"},
            "env": [{"id": "reverse-text"}],
            "advantage": {"mask_truncated": True},
        }
    )
    assert BatchLimits.of(config, "run_a", 3, VOCAB).may_lack_loss


def test_a_file_without_a_version_has_version_1(tmp_path: Path) -> None:
    plain = msgspec.msgpack.decode(VERSION_1.read_bytes())
    del plain["version"]
    (tmp_path / "b").write_bytes(msgspec.msgpack.encode(plain))
    assert take_batch(tmp_path / "b", LIMITS) == take_batch(VERSION_1, LIMITS)


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
        (with_sample(token_ids=[0] * 11 + [2**31 - 1]), r"sample 1: token_ids\[11\] is 2147483647, the vocabulary has"),
        (with_sample(token_ids=[0] * 11 + [-(2**31)]), r"sample 1: token_ids\[11\] is -2147483648, the vocabulary has"),
        (with_sample(loss_mask=[True] * 12), r"loss_mask\[0\] is true"),
        (with_sample(logprobs=[0.0, NAN] + [0.0] * 10), r"logprobs\[1\] is nan"),
        (with_sample(logprobs=[0.0] * 11 + [-INF]), r"logprobs\[11\] is -inf"),
        (with_sample(logprobs=[3.402e38] + [0.0] * 11), r"sample 1: logprobs\[0\] is 3.402e\+38"),
        (with_sample(advantage=INF), "sample 1: advantage is inf"),
        (with_sample(advantage=NAN), "sample 1: advantage is nan"),
        (with_sample(advantage=1e300), r"sample 1: advantage is 1e\+300"),
        (with_sample(token_advantages=[0.5] * 11), "sample 1: token_advantages has 11 entries, expected 12 or none"),
        (with_sample(token_advantages=[0.5] * 13), "sample 1: token_advantages has 13 entries, expected 12 or none"),
        (with_sample(token_advantages=[0.0] * 11 + [NAN]), r"sample 1: token_advantages\[11\] is nan"),
        (with_sample(token_advantages=[0.0, -INF] + [0.0] * 10), r"sample 1: token_advantages\[1\] is -inf"),
        (with_sample(token_advantages=[3.402e38] + [0.0] * 11), r"sample 1: token_advantages\[0\] is 3.402e\+38"),
        (with_sample(temperature=0.0), "sample 1: temperature is 0.0"),
        (with_sample(temperature=1e-300), "sample 1: temperature is 1e-300"),
        (with_sample(temperature=-1.0), "sample 1: temperature is -1.0"),
        (with_sample(temperature=0.009), "sample 1: temperature is 0.009, must be 0.01 to 2"),
        (with_sample(temperature=2.1), "sample 1: temperature is 2.1, must be 0.01 to 2"),
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
@pytest.mark.parametrize("version", [as_lists, as_columns])
def test_a_bad_batch_is_explained(
    tmp_path: Path, batch: TrainingBatch, reason: str, version: Callable[[TrainingBatch], bytes]
) -> None:
    assert re.search(reason, refusal(tmp_path / "b", version(batch)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": [1, 2**63] + [0] * 10}, "sample 1: token_ids[1] is 9223372036854775808, which has no place"),
        ({"token_ids": [1, -(2**31) - 1] + [0] * 10}, "sample 1: token_ids[1] is -2147483649, which has no place"),
        ({"logprobs": [0.0, NAN, -1e300] + [0.0] * 9}, "sample 1: logprobs[2] is -1e+300, which has no place"),
        ({"token_advantages": [1e300] + [0.0] * 11}, "sample 1: token_advantages[0] is 1e+300, which has no place"),
    ],
)
def test_numbers_of_version_1_that_have_no_place_in_a_column_are_named(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(tmp_path / "b", as_lists(with_sample(**changes)))
    with pytest.raises(ValueError, match=re.escape(reason)):
        write_batch(tmp_path / "c", with_sample(**changes))


def test_the_first_bad_token_of_the_first_bad_sample_is_named(tmp_path: Path) -> None:
    samples = [msgspec.structs.replace(one, token_ids=list(one.token_ids)) for one in GOOD.samples]
    for index, at in ((5, 0), (3, 5), (3, 4)):
        samples[index].token_ids[at] = VOCAB + 10 * index + at
    batch = msgspec.structs.replace(GOOD, samples=samples)
    for version in (as_lists, as_columns):
        assert f"sample 3: token_ids[4] is {VOCAB + 34}, the" in refusal(tmp_path / "b", version(batch))


def encoded(**changes: Any) -> bytes:
    """The good batch (lists) with fields of its second sample replaced by anything."""
    return changed(GOOD, **changes)


def columns(**changes: Any) -> bytes:
    """The good batch (columns) with fields of its second sample, of 12 tokens, replaced by anything."""
    return changed(with_sample().columns(), **changes)


def changed(batch: TrainingBatch | BatchColumns, **changes: Any) -> bytes:
    samples: list[Any] = [msgspec.structs.asdict(sample) for sample in batch.samples]
    samples[1] |= changes
    return msgspec.msgpack.encode({**msgspec.structs.asdict(batch), "samples": samples})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (columns(token_ids=b"\0" * 47), "sample 1: token_ids has 47 bytes, expected 4 for each token"),
        (columns(logprobs=b"\0" * 49), "sample 1: logprobs has 49 bytes, expected 4 for each token"),
        (columns(token_ids=b"\0" * 44), "sample 1: token_ids has 11 entries, loss_mask 12, logprobs 12"),
        (columns(token_advantages=b"\0" * 47), "sample 1: token_advantages has 47 bytes, expected 4 for each token"),
        (columns(token_advantages=b"\0" * 4), "sample 1: token_advantages has 1 entries, expected 12 or none"),
        (columns(token_advantages=b"\xff" * 48), "sample 1: token_advantages[0] is nan"),
        (columns(token_advantages=[0.5] * 12), "sample 1: Expected `bytes`, got `array` - at `$.token_advantages`"),
        (columns(loss_mask=b""), "sample 1: token_ids has 12 entries, loss_mask 0, logprobs 12"),
        (columns(loss_mask=b"\0" * 10 + b"\x02\x01"), "sample 1: loss_mask[10] is 2, must be 0 or 1"),
        (columns(loss_mask=b"\xff" * 12), "sample 1: loss_mask[0] is 255, must be 0 or 1"),
        (columns(token_ids=b"\xff" * 48), "sample 1: token_ids[0] is -1, the vocabulary has"),
        (columns(logprobs=b"\0" * 4 + b"\xff" * 44), "sample 1: logprobs[1] is nan"),
        (columns(token_ids=[1] * 12), "sample 1: Expected `bytes`, got `array` - at `$.token_ids`"),
        (columns(loss_mask="0" * 12), "sample 1: "),
        (columns(logprobs=None), "sample 1: Expected `bytes`, got `None` - at `$.logprobs`"),
        (columns(advantage=b"1"), "sample 1: Expected `float`, got `bytes` - at `$.advantage`"),
        (columns(rollout_id=7), "sample 1: Expected `str`, got `int` - at `$.rollout_id`"),
        (columns(lengths=[12]), "sample 1: Object contains unknown field `lengths`"),
        (as_columns(GOOD)[:-9], "not a batch file: Input data was truncated"),
        (as_columns(GOOD) + b"\x00", "trailing"),
        (as_columns(GOOD).replace(b"\xa7version\x03", b"\xa7version\x01"), "sample 0: Expected `array`, got `bytes`"),
        *(
            (as_lists(GOOD).replace(b"\xa7version\x01", each), "sample 0: Expected `bytes`, got `array`")
            for each in (b"\xa7version\x02", b"\xa7version\x03")
        ),
        (
            as_lists(GOOD).replace(b"\xa7version\x01", b"\xa7version\x63"),
            "format version 99, this program reads 1, 2 and 3",
        ),
        (b"\x82\xa7version\x02\xa7samples\xdd\xff\xff\xff\xff", "truncated"),
        (b"\x82\xa7version\x02\xa6run_id\xc6\xff\xff\xff\xff", "truncated"),
        (as_columns(GOOD).replace(b"reverse-text", b"reverse\xfftext"), "sample 0: 'utf-8' codec can't decode"),
        (as_lists(GOOD).replace(b"run_a", b"ru\xff_a"), "not a batch file: 'utf-8' codec can't decode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_file_of_version_2_is_refused_with_its_sample(tmp_path: Path, data: bytes, reason: str) -> None:
    problem = refusal(tmp_path / "b", data)
    assert reason in problem


@pytest.mark.parametrize("version", [as_lists, as_columns])
def test_what_damage_leaves_is_refused_or_can_be_trained_on(
    tmp_path: Path, version: Callable[[TrainingBatch], bytes]
) -> None:
    """Bytes of a good file changed, cut out and put in, at random places."""
    rng, good, path = random.Random(7), version(make_batch("run_a", 3, by_token=True)), tmp_path / "b"
    num_taken = 0
    for _ in range(1_500):
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 1, 3, 30])):
            at = rng.randrange(len(data))
            data[at : at + rng.choice([0, 1, 1, 1, 8])] = rng.randbytes(rng.choice([0, 1, 1, 1, 8]))
        path.write_bytes(data)
        try:
            batch = take_batch(path, LIMITS)
        except BadBatchError:
            continue
        assert batch is not None
        num_taken += 1
        rows = Rows.of(to_micro_batch(rows_of(0, batch.samples)))
        assert rows.token_ids_RT.min() >= 0 and rows.token_ids_RT.max() < VOCAB
        assert np.isfinite(rows.sampled_logprobs_RK).all() and rows.mask_RK.any()
        assert np.isfinite(rows.advantages_RK).all() and rows.advantages_RK.shape[1] > 1
    assert 50 < num_taken < 1_450


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
    problem = refusal(tmp_path / "b", data)
    assert reason in problem and str(tmp_path / "b") in problem


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


def forward_kl(config: OrchestratorConfig) -> OrchestratorConfig:
    more = {"kind": "distill", "teacher": "base", "distill": {"objective": "forward_kl"}}
    return OrchestratorConfig.model_validate({**config.model_dump(exclude_unset=True), **more})


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
        token_advantages=[0.1234567] * 512,
    )
    for version in (as_lists, as_columns):
        (tmp_path / "b").write_bytes(version(TrainingBatch("run_a", 1, [full] * 64, {"position": 1})))
        assert take_batch(tmp_path / "b", limits) is not None
        assert (tmp_path / "b").stat().st_size < limits.max_bytes <= 2 * BYTES_BESIDES
    taught = BatchLimits.of(forward_kl(config), "run_a", 1, 2**31)
    probs = [[]] + 511 * [[0.05] * 20]
    soft = msgspec.structs.replace(
        full, token_advantages=[], use="supervised", soft_ids=[[]] + 511 * [[2**31 - 1] * 20], soft_probs=probs
    )
    (tmp_path / "b").write_bytes(as_columns(TrainingBatch("run_a", 1, [soft] * 64, {"position": 1})))
    assert take_batch(tmp_path / "b", taught) is not None
    with pytest.raises(BadBatchError, match=r"has \d+ bytes"):
        take_batch(tmp_path / "b", limits)
    os.truncate(tmp_path / "b", 1 << 40)  # a hole: it takes no space on disk
    with pytest.raises(BadBatchError, match="has 1099511627776 bytes"):
        take_batch(tmp_path / "b", limits)
