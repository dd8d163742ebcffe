"""Sampling: the right distribution, the right logprobs, and streams that depend on nothing else in the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prime_rl.contract.served import RANGES, refusal
from prime_rl.inference.embedded.batch import BatchParams, Job, Row, SamplingParams, _draw, find_stop, sample

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
EOS = 3


def batch(
    *params: SamplingParams, prompt: Sequence[int] = (), said: Sequence[int] = (), num_vocabulary: int = 40
) -> BatchParams:
    """Each row has the same prompt, and has said the same."""
    num_rows = len(params)
    return BatchParams(
        params, [prompt] * num_rows, [said] * num_rows, eos_ids={EOS}, num_vocabulary=num_vocabulary, device=CPU
    )


def uniforms(num_draws: int) -> list[float]:
    """Those of the first draw of many requests."""
    return [row_of(seed).uniform() for seed in range(num_draws)]


def row_of(seed: int, choice: int = 0) -> Row:
    return Job([()], SamplingParams(n=choice + 1, seed=seed), slot=None, max_length=1).rows[choice]


def test_raw_logprobs_are_those_of_the_logits_as_they_are_and_change_no_token() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    params = batch(
        SamplingParams(temperature=0.5, top_k=5, top_logprobs=2),
        SamplingParams(temperature=0, min_tokens=3, frequency_penalty=2.0),
        SamplingParams(),
        prompt=(1, 2),
        said=(4, 4),
    )
    raw, processed = (sample(logits, params, uniforms(3), raw_logprobs=each) for each in (True, False))
    assert raw.token_ids_R.tolist() == processed.token_ids_R.tolist()
    own_RV = logits.log_softmax(-1)
    assert raw.logprobs_R.tolist() == own_RV.gather(1, raw.token_ids_R[:, None])[:, 0].tolist()
    assert raw.top_logprobs_RK is not None and raw.top_logprobs_RK.tolist() == own_RV.topk(2).values.tolist()
    assert raw.logprobs_R[0] != processed.logprobs_R[0] and raw.logprobs_R[2] == processed.logprobs_R[2]


def test_greedy_takes_the_most_likely_and_reports_unscaled_logprobs() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    sampled = sample(logits, batch(SamplingParams(temperature=0, top_p=0.1), SamplingParams(temperature=0)), [0.9, 0.9])
    assert sampled.token_ids_R.tolist() == [1, 0]
    assert sampled.logprobs_R.tolist() == pytest.approx(logits.log_softmax(-1).amax(-1).tolist())


def test_frequencies_are_the_probabilities_after_temperature() -> None:
    num_draws, temperature = 40_000, 0.7
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    params = batch(*[SamplingParams(temperature=temperature)] * num_draws)
    sampled = sample(logits.expand(num_draws, -1), params, uniforms(num_draws))
    expected = (logits / temperature).softmax(-1)
    found = torch.bincount(sampled.token_ids_R, minlength=5) / num_draws
    sigma = (expected * (1 - expected) / num_draws).sqrt()
    assert ((found - expected).abs() < 4.5 * sigma).all()
    assert torch.allclose(sampled.logprobs_R, expected.log()[sampled.token_ids_R], atol=1e-5)


def test_draws_are_uniform_along_and_across_streams() -> None:
    one = row_of(7)
    for values in (np.array([one.uniform() for _ in range(20_000)]), np.array(uniforms(20_000))):
        assert values.min() >= 0 and values.max() < 1
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        # chi-square with 19 degrees of freedom: beyond 50 once in 10,000 fair draws
        assert ((counts - 1000) ** 2 / 1000).sum() < 50
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_streams_differ_by_seed_choice_and_position_and_come_again() -> None:
    seeds, choices = (-1, 0, 1, 2**63 - 1), range(4)

    def streams() -> list[list[float]]:
        rows = [row_of(seed, choice) for seed in seeds for choice in choices]
        return [[row.uniform() for _ in range(2)] for row in rows]

    assert streams() == streams()
    assert len({value for values in streams() for value in values}) == 2 * len(seeds) * len(choices)


def test_what_has_no_probability_is_never_drawn() -> None:
    logprobs = torch.tensor([[float("-inf"), 0.5, 0.5, float("-inf")]]).log_softmax(-1)
    for value, expected in ((0.0, 1), (0.4999, 1), (0.5001, 2), (1 - 2.0**-52, 2)):
        assert _draw(logprobs, [value]).item() == expected


def test_top_p_keeps_the_smallest_set_that_is_large_enough() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    wanted = {0.4: {0}, 0.5: {0}, 0.6: {0, 1}, 0.9: {0, 1, 2}, 1.0: {0, 1, 2, 3}}
    for top_p, kept in wanted.items():
        params = batch(*[SamplingParams(top_p=top_p)] * 400)
        sampled = sample(logits.expand(400, -1), params, uniforms(400))
        assert set(sampled.token_ids_R.tolist()) == kept, top_p
        total = logits.exp()[sorted(kept)].sum()
        expected = logits[sampled.token_ids_R] - total.log()
        assert torch.allclose(sampled.logprobs_R, expected, atol=1e-5)


def test_top_p_of_one_row_leaves_the_others_alone() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1)).expand(2, -1)
    mixed = sample(logits, batch(SamplingParams(), SamplingParams(top_p=0.01)), uniforms(1) * 2)
    alone = sample(logits[:1], batch(SamplingParams()), uniforms(1))
    assert mixed.token_ids_R[0] == alone.token_ids_R[0]
    assert mixed.logprobs_R[0] == pytest.approx(alone.logprobs_R[0].item(), abs=1e-6)
    assert mixed.token_ids_R[1] == logits[0].argmax()


def test_top_logprobs_are_sorted_and_bounded_by_the_vocabulary() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    sampled = sample(logits, batch(SamplingParams(top_logprobs=20)), [0.5])
    assert sampled.top_ids_RK is not None and sampled.top_ids_RK.tolist() == [[1, 2, 0]]
    assert sample(logits, batch(SamplingParams()), uniforms(1)).top_ids_RK is None


def test_the_earliest_stop_string_counts() -> None:
    assert find_stop("one two three", ["three", "two"]) == (4, "two")
    assert find_stop("one", ["two"]) is None


PROMPT, ANSWER = (5, 9, 9, 30), (7, 7, 5, 12)


def additive(scores_RV: torch.Tensor, presence: float, frequency: float) -> torch.Tensor:
    """OpenAI's penalties, which transformers does not have, by their definition."""
    for token_id in set(ANSWER):
        scores_RV[:, token_id] -= presence + frequency * ANSWER.count(token_id)
    return scores_RV


@pytest.mark.parametrize(
    ("params", "theirs"),
    [
        (SamplingParams(top_k=5), [TopKLogitsWarper(5)]),
        (SamplingParams(top_k=1000), []),
        (SamplingParams(top_p=0.6), [TopPLogitsWarper(0.6)]),
        (SamplingParams(min_p=0.2), [MinPLogitsWarper(0.2)]),
        (SamplingParams(temperature=0.7, min_p=0.2), [TemperatureLogitsWarper(0.7), MinPLogitsWarper(0.2)]),
        (SamplingParams(repetition_penalty=1.3), [RepetitionPenaltyLogitsProcessor(1.3)]),
        (SamplingParams(min_tokens=5), [MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, EOS)]),
        (SamplingParams(min_tokens=4), []),
        (
            SamplingParams(min_tokens=9, stop_token_ids=[11, 12]),
            [MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [EOS, 11, 12])],
        ),
        (
            SamplingParams(repetition_penalty=0.8, temperature=1.4, min_p=0.05, top_k=20, top_p=0.9),
            [
                RepetitionPenaltyLogitsProcessor(0.8),
                TemperatureLogitsWarper(1.4),
                MinPLogitsWarper(0.05),
                TopKLogitsWarper(20),
                TopPLogitsWarper(0.9),
            ],
        ),
    ],
    ids=lambda value: None,
)
def test_every_setting_does_what_it_does_in_transformers(params: SamplingParams, theirs: list[LogitsProcessor]) -> None:
    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([PROMPT + ANSWER]).expand(50, -1)
    expected = logits.clone()
    for processor in theirs:
        expected = processor(ids, expected)
    assert_distribution(params, logits, expected)


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.4), (-1.0, 0.3)])
def test_penalties_of_what_was_said(presence: float, frequency: float) -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    assert_distribution(params, logits, additive(logits.clone(), presence, frequency))


def assert_distribution(params: SamplingParams, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """In a batch with rows that have no such setting, which are not changed."""
    both = torch.cat([logits, logits])
    params = replace(params, top_logprobs=40)
    rows = [params] * len(logits) + [SamplingParams()] * len(logits)
    sampled = sample(both, batch(*rows, prompt=PROMPT, said=ANSWER), uniforms(len(rows)))
    assert sampled.top_ids_RK is not None and sampled.top_logprobs_RK is not None
    found = torch.empty_like(both).scatter_(1, sampled.top_ids_RK, sampled.top_logprobs_RK)
    torch.testing.assert_close(found, torch.cat([expected, logits]).log_softmax(-1))
    assert (found.gather(1, sampled.token_ids_R[:, None]) > float("-inf")).all()


def test_penalties_and_the_shortest_length_count_what_comes_while_the_batch_runs() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.0, repetition_penalty=1.5, min_tokens=3)
    logits = torch.tensor([[2.0, 1.6, 1.2, 9.0]])  # EOS is the most likely
    running, token_ids = batch(params, prompt=(2,), num_vocabulary=4), list[int]()
    for _ in range(6):
        sampled = sample(logits, running, [0.0])
        fresh = batch(params, prompt=(2,), said=tuple(token_ids), num_vocabulary=4)
        assert torch.equal(sampled.logprobs_R, sample(logits, fresh, [0.0]).logprobs_R)
        running.advance(sampled.token_ids_R)
        token_ids.append(int(sampled.token_ids_R))
    assert token_ids[:4] == [0, 1, 2, EOS]


def test_a_stop_string_before_the_shortest_length_does_not_count() -> None:
    assert find_stop("abab", ["ab"]) == (0, "ab")
    assert find_stop("abab", ["ab"], too_early=2) == (2, "ab")
    assert find_stop("abab", ["aba"], too_early=2) == (0, "aba"), "it ends later"
    assert find_stop("abab", ["ab"], too_early=4) is None


NUM_TOKENS = 12
_NAMES = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def accepted(name: str) -> st.SearchStrategy[float]:
    """Any value that no place refuses, the borders and those next to them more often."""
    limits = RANGES[name]
    inside = st.floats(limits.lowest, limits.highest)
    return st.one_of(inside, st.sampled_from([limits.lowest, limits.highest, *limits.off]))


@st.composite
def any_params(draw: st.DrawFn) -> SamplingParams:
    params = SamplingParams(
        **{name: draw(accepted(name)) for name in _NAMES},
        top_k=draw(st.sampled_from([0, 1, 3, NUM_TOKENS, 2**31 - 1])),
        min_tokens=draw(st.integers(0, 3)),
        top_logprobs=draw(st.sampled_from([0, 5])),
    )
    assert refusal({name: getattr(params, name) for name in RANGES if hasattr(params, name)}) is None
    return params


ROWS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=NUM_TOKENS, max_size=NUM_TOKENS)


@given(params=any_params(), logits=ROWS, uniform=st.integers(0, 2**52 - 1), raw=st.booleans())
def test_accepted_parameters_always_give_a_token_with_a_finite_logprob(
    params: SamplingParams, logits: list[float], uniform: int, raw: bool
) -> None:
    rows = batch(params, prompt=(1, 2, 2), said=(4, 4), num_vocabulary=NUM_TOKENS)
    sampled = sample(torch.tensor([logits]), rows, [uniform * 2.0**-52], raw_logprobs=raw)
    assert 0 <= int(sampled.token_ids_R) < NUM_TOKENS
    assert -1e5 < float(sampled.logprobs_R) <= 1e-6, "to be the logprob of a token that may be sampled"


NOT_FINITE = (float("nan"), float("inf"), float("-inf"), 3.4e38)


@given(
    params=st.lists(any_params(), min_size=3, max_size=3),
    bad=st.lists(st.sampled_from([*NOT_FINITE, 0.0]), min_size=NUM_TOKENS, max_size=NUM_TOKENS),
    raw=st.booleans(),
)
@example(
    [SamplingParams(min_tokens=1)] * 3, [math.nan if token_id == EOS else 0.0 for token_id in range(NUM_TOKENS)], False
)
def test_a_row_that_is_not_finite_is_marked_and_changes_no_other(
    params: list[SamplingParams], bad: list[float], raw: bool
) -> None:
    good = torch.randn(1, NUM_TOKENS, generator=torch.Generator().manual_seed(3))
    logits = torch.cat([good, torch.tensor([bad]), good.flip(1)])
    draws = uniforms(3)
    together = sample(logits, batch(*params, num_vocabulary=NUM_TOKENS), draws, raw_logprobs=raw)
    assert all(0 <= token_id < NUM_TOKENS for token_id in together.token_ids_R.tolist())
    for row in (0, 2):
        rows = batch(params[row], num_vocabulary=NUM_TOKENS)
        alone = sample(logits[row : row + 1], rows, [draws[row]], raw_logprobs=raw)
        assert together.token_ids_R[row] == alone.token_ids_R[0]
        assert together.logprobs_R[row] == pytest.approx(alone.logprobs_R[0].item(), abs=1e-6)
    if any(value == float("inf") or math.isnan(value) for value in bad) or all(value == float("-inf") for value in bad):
        assert not together.logprobs_R[1].isfinite()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[(name, value) for name in ("temperature", "top_p", "min_p", "repetition_penalty") for value in (1e-320, -1)],
        *[(name, value) for name in RANGES for value in (float("nan"), 2**70, -(2**70))],
        *[("temperature", 1e-39), ("temperature", 0.009), ("repetition_penalty", 0), ("top_p", 0), ("n", 257)],
        *[("top_k", -2), ("max_tokens", 0), ("min_tokens", -1), ("seed", 2**63), ("presence_penalty", 2.1)],
    ],
)
def test_what_breaks_an_engine_is_outside_of_the_ranges(name: str, bad: float) -> None:
    found = refusal({"prompt": "x", name: bad})
    assert found is not None and found[0] == name and f"{name}: found {bad}: must be" in found[1]


class Made(TorchDispatchMode):
    """Counts the operations, each of which is a launch or a copy on a GPU."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_the_tables_of_penalties_take_as_many_copies_for_many_rows_as_for_two() -> None:
    numbers = []
    for num_rows in (2, 32):
        penalized = [SamplingParams(min_tokens=3, frequency_penalty=0.5 + row / 100) for row in range(num_rows)]
        with Made() as made:
            params = batch(*penalized, prompt=(1, 2, 2, 99), said=(4, 4, 5))
        numbers.append(made.number)
        assert params.counts_RV is not None and params.prompt_RV is not None and params.ends_RV is not None
        assert params.counts_RV.tolist() == [[2 if i == 4 else 1 if i == 5 else 0 for i in range(40)]] * num_rows
        assert params.prompt_RV.nonzero().tolist() == [[row, i] for row in range(num_rows) for i in (1, 2)]
        assert params.ends_RV.nonzero().tolist() == [[row, EOS] for row in range(num_rows)]
    assert numbers[0] == numbers[1]
