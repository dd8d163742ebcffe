"""Packing: every row once, bounded, in turn."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.configs.losses import LossConfig, LossMean
from prime_rl.contract.types import TOKEN_BYTES, TOKEN_DTYPE, SampleColumns, TrainingSample
from prime_rl.trainer.fair_queue import Row, RowQueue, blank_micro_batch, deal, rows_of, to_micro_batch
from prime_rl.trainer.loss import LossInputs, compute_loss
from prime_rl.trainer.step import Rows
from tests.budgets import examples
from tests.loss_support import EVERY_LOSS, name_of
from tests.trainer_support import sample


def batch(lengths: list[int], seed: int = 0) -> list[SampleColumns]:
    rng = random.Random(seed)
    return [sample(rng, num_tokens=length).columns() for length in lengths]


def with_mask(one: TrainingSample, loss_mask: list[bool]) -> SampleColumns:
    return msgspec.structs.replace(one, loss_mask=loss_mask).columns()


def drain(queue: RowQueue, limit: int = 10_000) -> list[list[Row]]:
    passes = []
    while queue:
        passes.append(queue.next_rows())
        assert passes[-1] and len(passes) < limit
    assert queue.next_rows() == []
    return passes


@settings(max_examples=examples(60))
@given(
    runs=st.lists(st.lists(st.integers(6, 60), min_size=1, max_size=12), min_size=1, max_size=5),
    max_tokens=st.sampled_from([8, 40, 200, 5_000]),
    packs=st.booleans(),
)
def test_every_row_is_handed_out_once_within_the_limit(runs: list[list[int]], max_tokens: int, packs: bool) -> None:
    queue = RowQueue(max_tokens, packs)
    for run_idx, lengths in enumerate(runs):
        queue.add(run_idx, rows_of(run_idx, batch(lengths)))
    passes = drain(queue)
    seen = Counter((row.run_idx, row.order) for rows in passes for row in rows)
    assert seen == Counter((idx, order) for idx, lengths in enumerate(runs) for order in range(len(lengths)))
    for rows in passes:
        longest = max(row.num_positions for row in rows)
        if packs:
            assert len(rows) == 1 or sum(row.num_positions for row in rows) <= max_tokens
            continue
        assert len(rows) == 1 or longest * len(rows) <= max_tokens
        assert all(2 * row.num_positions > longest for row in rows), "more than half of a row may not be padding"


def test_the_scale_is_that_of_the_whole_batch() -> None:
    rows = rows_of(3, batch([10, 14, 8]))
    assert [row.num_tokens for row in rows] == [8, 10, 14]
    assert {row.loss_scale for row in rows} == {1 / (6 + 10 + 4)}


@pytest.mark.parametrize(
    ("mean", "scales"),
    [
        ("token", [1 / 17, 1 / 17, 1 / 17]),
        ("sequence", [1 / (4 * 1), 1 / (4 * 6), 1 / (4 * 10)]),
        ("constant", [1 / (4 * 32)] * 3),
    ],
)
def test_each_mean_has_its_scale_and_a_sample_without_loss_tokens_is_a_sample(
    mean: LossMean, scales: list[float]
) -> None:
    """Loss tokens by sample, shortest first: none, 1, 6, 10."""
    none = with_mask(sample(random.Random(0), num_tokens=9), [False] * 9)
    rows = rows_of(0, [*batch([10, 14, 5]), none], mean, length=32)
    assert [row.loss_scale for row in rows] == pytest.approx(scales)


def loss_of_pass(config: LossConfig, rows: list[Row]) -> float:
    """The model is left out: pi is mu and a little that depends on the token alone."""
    given = Rows.of(to_micro_batch(rows))
    mu_RK = torch.from_numpy(given.sampled_logprobs_RK).double()
    log_pi_RK = mu_RK + 0.4 * torch.from_numpy(given.token_ids_RT[:, given.columns_K]).double().sin()
    others = [torch.from_numpy(array) for array in (given.advantages_RK, given.mask_RK, given.scales_R)]
    inputs = LossInputs(log_pi_RK, mu_RK, *others, mu_RK)
    return float(compute_loss(config, inputs).loss_R.sum())


@pytest.mark.numeric
@pytest.mark.parametrize("max_tokens", [16, 60])
@pytest.mark.parametrize("config", EVERY_LOSS, ids=name_of)
def test_any_split_of_a_batch_over_passes_sums_to_one_loss(config: LossConfig, max_tokens: int) -> None:
    rows = rows_of(0, batch([6, 20, 9, 15, 7, 24, 11, 8]), config.mean, length=16)
    queue = RowQueue(max_tokens)
    queue.add(0, rows)
    passes = drain(queue)
    assert len(passes) > 2
    assert sum(loss_of_pass(config, taken) for taken in passes) == pytest.approx(loss_of_pass(config, rows)) != 0


def test_rows_end_with_their_last_loss_token_and_rows_without_one_are_left_out() -> None:
    full = sample(random.Random(0), num_tokens=10)
    tail = with_mask(full, [False] * 4 + [True] * 3 + [False] * 3)
    none = with_mask(full, [False] * 10)
    rows = rows_of(0, [none, tail, full.columns()])
    assert [(row.order, row.num_tokens) for row in rows] == [(1, 7), (2, 10)]
    micro_batch = to_micro_batch(rows)
    assert micro_batch.num_tokens == 10
    tokens = [np.frombuffer(ids, TOKEN_DTYPE).tolist() for ids in micro_batch.token_ids]
    assert tokens == [full.token_ids[:7], full.token_ids]
    assert [len(mask) for mask in micro_batch.loss_mask] == [7, 10]
    assert [len(logprobs) // TOKEN_BYTES for logprobs in micro_batch.logprobs] == [7, 10]


def test_columns_become_the_arrays_of_a_pass_without_a_change() -> None:
    """Compared with the lists that they came from, value by value."""
    rng = random.Random(3)
    one, two = sample(rng, num_tokens=9, advantage=-0.5), sample(rng, num_tokens=6, advantage=2.0)
    two = msgspec.structs.replace(two, temperature=0.7)
    rows = Rows.of(to_micro_batch([*rows_of(4, [one.columns()]), *rows_of(1, [two.columns()])], base_pass=True))
    assert rows.token_ids_RT.tolist() == [two.token_ids + [0] * 3, one.token_ids]
    assert rows.mask_RT.tolist() == [two.loss_mask + [False] * 3, one.loss_mask]
    assert rows.seen_R == (5, 8), "nothing is predicted from the last token"
    assert rows.columns_K.tolist() == list(range(4, 9))
    expected_RK = np.array([two.logprobs[4:] + [0.0] * 3, one.logprobs[4:]], dtype=np.float32)
    assert rows.sampled_logprobs_RK.tolist() == expected_RK.tolist()
    assert rows.advantages_RK.tolist() == [[2.0], [-0.5]]
    assert rows.temperatures_R.tolist() == pytest.approx([0.7, 1.0])
    assert torch.from_numpy(rows.token_ids_RT).dtype == torch.int64


def test_a_row_with_advantages_of_its_tokens_gives_the_others_theirs_at_every_token() -> None:
    rng = random.Random(3)
    one, two = sample(rng, num_tokens=9, advantage=-0.5), sample(rng, num_tokens=6, advantage=2.0)
    own = [0.0] * 4 + [1.0, -2.0, 3.0, -4.0, 5.0]
    with_own = msgspec.structs.replace(one, loss_mask=[False] * 4 + [True] * 4 + [False], token_advantages=own)
    micro_batch = to_micro_batch([*rows_of(4, [with_own.columns()]), *rows_of(1, [two.columns()])])
    assert [len(column) // TOKEN_BYTES for column in micro_batch.token_advantages] == [0, 8], "cut as the row is"
    rows = Rows.of(micro_batch)
    assert rows.columns_K.tolist() == [4, 5, 6, 7]
    assert rows.advantages_RK.tolist() == [[2.0] * 4, [1.0, -2.0, 3.0, -4.0]]
    assert rows.advantages_RK.dtype == np.float32
    blank = blank_micro_batch(rows_of(4, [with_own.columns()]))
    assert Rows.of(blank).advantages_RK.shape == (1, 0)


def test_a_batch_in_which_everything_is_masked_is_one_row_without_a_loss_token() -> None:
    masked = [with_mask(sample(random.Random(0), num_tokens=length), [False] * length) for length in (9, 14)]
    (row,) = rows_of(3, masked)
    assert (row.num_tokens, row.loss_scale) == (2, 0.0)
    assert not Rows.of(to_micro_batch([row])).mask_RT.any()
    whole = batch([10, 14])
    assert rows_of(3, [*whole, *masked]) == rows_of(3, whole), "beside others it does not count"


def test_micro_batches_are_sorted_by_slot() -> None:
    rows = [*rows_of(2, batch([10, 10])), *rows_of(0, batch([10])), *rows_of(1, batch([10]))]
    assert to_micro_batch(rows).run_idxs == [0, 1, 2, 2]


def test_a_small_batch_is_not_held_up_by_a_large_one() -> None:
    queue = RowQueue(max_tokens=400)
    queue.add(0, rows_of(0, batch([11] * 2_000)))
    queue.add(1, rows_of(1, batch([11] * 40)))
    passes = 0
    while queue.num_waiting(1):
        queue.next_rows()
        passes += 1
    assert passes == 2, "half of each pass belongs to each of two runs"
    assert queue.num_waiting(0) == 2_000 - 40


@pytest.mark.parametrize("lengths", [(60, 10), (60, 40), (25, 24)])
def test_runs_share_in_tokens_whatever_their_rows_are(lengths: tuple[int, int]) -> None:
    queue = RowQueue(max_tokens=240)
    for run_idx, length in enumerate(lengths):
        queue.add(run_idx, rows_of(run_idx, batch([1 + length] * (24_000 // length))))
    tokens = Counter[int]()
    for _ in range(60):
        for row in queue.next_rows():
            tokens[row.run_idx] += row.num_positions
    assert abs(tokens[0] - tokens[1]) <= 2 * 240


def test_a_dropped_run_leaves_nothing_behind() -> None:
    queue = RowQueue(max_tokens=40)
    queue.add(0, rows_of(0, batch([10] * 8)))
    queue.add(1, rows_of(1, batch([10] * 8)))
    queue.next_rows()
    queue.drop(0)
    queue.drop(0)
    assert {row.run_idx for rows in drain(queue) for row in rows} == {1}
    queue.add(0, rows_of(0, batch([10])))
    assert len(drain(queue)) == 1


def test_a_run_that_takes_a_slot_has_had_nothing_of_what_the_one_before_it_had() -> None:
    queue = RowQueue(max_tokens=10)
    queue.add(0, rows_of(0, batch([10] * 5)))
    queue.add(1, rows_of(1, batch([10])))
    drain(queue)
    queue.drop(0)
    for run_idx in (0, 1):
        queue.add(run_idx, rows_of(run_idx, batch([10] * 2)))
    assert [rows[0].run_idx for rows in drain(queue)] == [0, 1, 0, 1]


@settings(max_examples=examples(25))
@given(lengths=st.lists(st.integers(20, 39), min_size=1, max_size=40), num_ranks=st.integers(1, 8))
def test_rows_are_dealt_evenly(lengths: list[int], num_ranks: int) -> None:
    rows = rows_of(0, batch(lengths))
    num_ranks = min(num_ranks, len(rows))
    hands = deal(rows, num_ranks)
    assert sorted(row.order for hand in hands for row in hand) == list(range(len(rows)))
    counts, tokens = [len(hand) for hand in hands], [sum(row.num_tokens for row in hand) for hand in hands]
    assert len(hands) == num_ranks and max(counts) - min(counts) <= 1
    assert max(tokens) - min(tokens) <= 2 * max(lengths)


def test_no_rank_is_dealt_more_rows_than_its_share_however_short_they_are() -> None:
    hands = deal(rows_of(0, batch([60, 8, 8, 8, 8, 8])), 2)
    assert [[row.num_tokens for row in hand] for hand in hands] == [[60, 8, 8], [8, 8, 8]]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_pack_has_rows_for_every_rank_while_there_are_as_many(num_ranks: int) -> None:
    """Also when one row is far longer than all others."""
    queue = RowQueue(max_tokens=60)
    queue.add(0, rows_of(0, batch([60])))
    queue.add(1, rows_of(1, batch([10] * 29)))
    seen = 0
    while queue:
        left = queue.num_waiting(0) + queue.num_waiting(1)
        hands = queue.next_pack(num_ranks)
        assert len(hands) == min(num_ranks, left) and all(hands)
        assert all(len(hand) == 1 or len(hand) * hand[0].num_tokens <= 60 for hand in hands)
        seen += sum(map(len, hands))
    assert seen == 30 and queue.next_pack(num_ranks) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_packed_passes_are_full_while_rows_wait_and_even_at_the_end(num_ranks: int) -> None:
    queue = RowQueue(max_tokens=60, packs=True)
    queue.add(0, rows_of(0, batch([40, 20, 20, 7])))
    queue.add(1, rows_of(1, batch([10] * 29)))
    total, packs = 87 + 290, []
    while queue:
        packs.append([sum(row.num_tokens for row in hand) for hand in queue.next_pack(num_ranks)])
    assert sum(map(sum, packs)) == total and all(size <= 60 for pack in packs for size in pack)
    # No row is longer than 40, so a pass that could take no further row has more than 20.
    full, last = packs[:-1], packs[-1]
    assert all(len(pack) == num_ranks and min(pack) > 60 - 2 * 10 for pack in full)
    assert max(last) - min(last) <= 2 * 10


def test_a_packed_pass_takes_rows_of_any_length() -> None:
    queue = RowQueue(max_tokens=100, packs=True)
    queue.add(0, rows_of(0, batch([60])))
    queue.add(1, rows_of(1, batch([8, 12, 20])))
    assert [row.num_tokens for row in queue.next_rows()] == [60, 20, 12, 8]


def test_a_blank_row_trains_nothing() -> None:
    blank = blank_micro_batch([*rows_of(2, batch([30, 12])), *rows_of(5, batch([20]))])
    assert (blank.run_idxs, blank.num_tokens, blank.loss_scales) == ([2], 12, [0.0])
    assert len(blank.token_ids[0]) == 12 * TOKEN_BYTES and blank.loss_mask == [bytes(12)]
