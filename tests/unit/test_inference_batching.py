"""Continuous batching: whatever joins and leaves, every row gets what it would get alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.cache_utils import Cache

from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.batch import (
    MAX_PREFILL_TOKENS,
    Batch,
    BatchParams,
    Job,
    SamplingParams,
    _chunks,
    _same,
)
from prime_rl.inference.embedded.model import SPARE_COLUMNS, Served, load_model, new_cache
from prime_rl.inference.guard import max_model_len
from prime_rl.lora.adapter_state import load_adapter
from prime_rl.trainer.model import adapt_model
from prime_rl.utils.runtime import StartError
from tests.inference_support import adapter_tensors, linear_shapes, make_model

pytestmark = pytest.mark.numeric

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
MAX_LENGTH = 10**6
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES),
    "llama": LlamaConfig(**SIZES),
    "mistral with a window of 6": MistralConfig(**SIZES, sliding_window=6),
    "qwen3 with a window in half of its layers": Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "gemma": GemmaConfig(**SIZES),
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=None
    ),
}


def serve(folder: Path, *, with_lora: bool = True, dtype: str = "auto") -> Served:
    model = {"name": str(folder), "lora": {"rank": 4} if with_lora else None, "dtype": dtype}
    return load_model(InferenceConfig.model_validate({"model": model, "max_concurrent_runs": 1}))


def save(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def job(
    prompt: list[int],
    max_tokens: int,
    slot: int | None = None,
    *,
    num_choices: int = 1,
    model: str = "the base model",
    **params: Any,
) -> Job:
    sampling = SamplingParams(
        **{"n": num_choices, "seed": len(prompt), "temperature": 0.0, "max_tokens": max_tokens, **params}
    )
    return Job([prompt], sampling, slot=slot, max_length=MAX_LENGTH, model=model)


def new_batch(served: Served, *, raw_logprobs: bool = False) -> Batch:
    return Batch(served, lambda ids: "".join(chr(ord("a") + i % 26) for i in ids), raw_logprobs=raw_logprobs)


def run_out(batch: Batch) -> None:
    while batch.num_rows:
        batch.step()


def outputs(jobs: list[Job]) -> list[list[list[int]]]:
    return [[row.token_ids for row in each.rows] for each in jobs]


def staggered(served: Served, jobs: list[Job]) -> list[list[list[int]]]:
    """All jobs together; a new one joins at every second step."""
    batch = new_batch(served)
    for each in jobs:
        batch.add(each.rows)
        batch.step()
        batch.step()
    run_out(batch)
    return outputs(jobs)


def alone(served: Served, each: Job) -> list[list[int]]:
    batch = new_batch(served)
    batch.add(each.rows)
    run_out(batch)
    return outputs([each])[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = make_model(tmp_path_factory.mktemp("batching") / "model")
    served = serve(folder)
    for slot in range(3):
        load_adapter(served.layers, slot, adapter_tensors(linear_shapes(folder), seed=slot, rank=3), 3)
        served.routing.scaling[slot] = 1.0 + slot
    return served


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_trainer_and_engine_round_alike_in_sixteen_bits(name: str, tmp_path: Path) -> None:
    """With the libraries' own norms, MLPs and rotary positions logits of the two differ by 0.02 and more."""
    folder = save(ARCHITECTURES[name], tmp_path)
    served = serve(folder, dtype="bfloat16")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    trained = adapt_model(base, LoRAConfig(rank=4), len(served.routing.scaling))
    for layers in (served.layers, trained.layers):
        load_adapter(layers, 0, adapter_tensors(linear_shapes(folder), seed=3, rank=4), 4)
    ids_RT = torch.randint(64, (3, 20), generator=torch.Generator().manual_seed(0))
    positions_RT = torch.arange(20).expand(3, -1)
    ours_RV = served.forward(ids_RT, torch.ones_like(ids_RT, dtype=torch.bool), positions_RT, new_cache(), [0] * 3)
    with torch.no_grad():
        theirs_RV = trained.logits(ids_RT, torch.tensor([19]), [0] * 3)[:, 0]
    torch.testing.assert_close(ours_RV, theirs_RV, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_staggered_rows_equal_transformers_generate(name: str, tmp_path: Path) -> None:
    folder = save(ARCHITECTURES[name], tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    served = serve(folder, with_lora=False)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 64, (n,), generator=generator).tolist() for n in (3, 17, 1, 9)]
    jobs = [job(prompt, 8 + 5 * idx) for idx, prompt in enumerate(prompts)]
    found = staggered(served, jobs)
    for prompt, each, ids in zip(prompts, jobs, found, strict=True):
        whole = reference.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=each.params.max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert ids == [whole[0, len(prompt) :].tolist()]


def test_raw_logprobs_are_the_models_own_whatever_is_sampled(tmp_path: Path) -> None:
    """Of the same tokens as with processed ones: of a prompt's first token and of the later ones."""
    folder = save(next(iter(ARCHITECTURES.values())), tmp_path / "model")
    served, prompt = serve(folder, with_lora=False), [5, 6, 7]
    completions = []
    for raw_logprobs in (True, False):
        each = job(prompt, 6, temperature=0.5, top_k=4, presence_penalty=1.0, ignore_eos=True)
        batch = new_batch(served, raw_logprobs=raw_logprobs)
        batch.add(each.rows)
        run_out(batch)
        completions.append(each.rows[0])
    raw, processed = completions
    assert raw.token_ids == processed.token_ids and raw.logprobs != processed.logprobs
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([prompt + raw.token_ids])).logits[0]
    own = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(raw.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(raw.logprobs), own, atol=1e-4, rtol=1e-4)


def test_adapters_and_sampling_are_the_same_alone_and_staggered(served: Served) -> None:
    def jobs() -> list[Job]:
        return [
            job([5, 6, 7], 30, slot=1),
            job([9] * 20, 6, slot=None, temperature=1.0, num_choices=3),
            job([11, 12], 25, slot=0, temperature=0.8, top_p=0.9),
            job([5, 6, 7], 12, slot=2, num_choices=2, temperature=1.3),
            job([30, 31, 32, 33], 3, slot=1, temperature=1.0),
            job([1, 2], 18, slot=None),
        ]

    together = staggered(served, jobs())
    assert together == [alone(served, each) for each in jobs()]
    assert together[1][0] != together[1][1]
    assert together[0][0][:12] != alone(served, job([5, 6, 7], 30))[0][:12]


def test_logprobs_do_not_depend_on_the_batch(served: Served) -> None:
    single, crowd = job([5, 6, 7], 10, slot=1, temperature=1.0), job([5, 6, 7], 10, slot=1, temperature=1.0)
    alone(served, single)
    staggered(served, [job([4] * 30, 40), crowd, job([2], 9, slot=0)])
    assert crowd.rows[0].logprobs == pytest.approx(single.rows[0].logprobs, abs=1e-4)


def test_a_row_may_outgrow_its_room_many_times(served: Served) -> None:
    long = 2 * SPARE_COLUMNS + 10
    whole = alone(served, job([3, 4, 5], long, ignore_eos=True))[0]
    assert len(whole) == long
    assert staggered(served, [job([8], 5), job([3, 4, 5], long, ignore_eos=True)])[1] == [whole]


def test_rows_that_end_leave_room_and_are_reported_once(served: Served) -> None:
    batch = new_batch(served)
    jobs = [job([idx + 1], idx + 1, ignore_eos=True) for idx in range(10)]
    ended = batch.add([row for each in jobs for row in each.rows])
    counts = [batch.num_rows]
    while batch.num_rows:
        ended += batch.step()
        counts.append(batch.num_rows)
    assert counts == list(range(10, -1, -1))
    assert ended == [row for each in jobs for row in each.rows]
    assert batch.num_generated_tokens == 55


BROKEN, GUILTY = 2, 1  # slots


@pytest.fixture
def with_overflow(served: Served, tmp_path: Path) -> Iterator[Served]:
    """Slot BROKEN has finite weights whose products are not."""
    layers = {name: layer.parameters_of(BROKEN) for name, layer in served.layers.items()}
    kept = {name: [each.detach().clone() for each in pair] for name, pair in layers.items()}
    with torch.no_grad():
        for pair in layers.values():
            for each in pair:
                each.mul_(1e25)
    yield served
    with torch.no_grad():
        for name, pair in layers.items():
            for each, before in zip(pair, kept[name], strict=True):
                each.copy_(before)


def innocent() -> list[Job]:
    return [
        job([5, 6, 7], 12, slot=0, temperature=1.0, num_choices=2, top_logprobs=3),
        job([9] * 20, 9, temperature=0.7, repetition_penalty=1.2, min_tokens=3),
        job([11, 12], 15, slot=0, top_p=0.9, temperature=1.0),
        job([3], 7),
    ]


def guilty(slot: int) -> list[Job]:
    sampling: dict[str, Any] = {"slot": slot, "model": f"run_bad@v{slot}"}
    return [
        job([5, 6, 7], 12, temperature=1.0, **sampling),
        job([5, 6, 7], 12, top_logprobs=5, num_choices=2, presence_penalty=1.0, **sampling),
        job([30, 31], 4, top_k=3, top_p=0.5, min_p=0.1, temperature=0.5, **sampling),
    ]


def mixed(good: list[Job], bad: list[Job]) -> list[Job]:
    return [*good[:1], *bad[:2], *good[1:3], *bad[2:], *good[3:]]


def assert_ended_alone(served: Served, good: list[Job], bad: list[Job], problem: str) -> None:
    assert outputs(good) == [alone(served, each) for each in innocent()]
    assert all(each.error is None for each in good)
    for each in bad:
        assert {row.finish_reason for row in each.rows} <= {"error", "abort"}
        assert each.error is not None and each.error.status == 422 and problem in each.error.message


@pytest.mark.parametrize("raw_logprobs", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_row_whose_logits_are_not_finite_ends_alone(with_overflow: Served, raw_logprobs: bool, at_once: bool) -> None:
    good, bad = innocent(), guilty(BROKEN)
    if at_once:
        batch = new_batch(with_overflow, raw_logprobs=raw_logprobs)
        batch.add([row for each in mixed(good, bad) for row in each.rows])
        run_out(batch)
    else:
        staggered(with_overflow, mixed(good, bad))
    assert_ended_alone(with_overflow, good, bad, "run_bad@v2: logits are not finite")
    assert all(math.isfinite(logprob) for each in good for row in each.rows for logprob in row.logprobs)


def half_way(served: Served, fails: Callable[[Sequence[int | None]], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward for which `fails`, by the slots of its rows, raises when its first layer is through."""
    forward = served.forward

    def breaking(
        ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache, slots: Sequence[int | None], *read: Any
    ) -> Tensor:
        logits = forward(ids, mask, positions, cache, slots, *read)
        if fails(slots):
            for layer in cache.layers[1:]:
                layer.num_columns -= ids.shape[1]
            raise RuntimeError("a kernel has failed")
        return logits

    monkeypatch.setattr(served, "forward", breaking)


@pytest.mark.parametrize("in_prefill", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_an_exception_ends_the_rows_that_cause_it_and_costs_the_others_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch, in_prefill: bool, at_once: bool
) -> None:
    good, bad = innocent(), guilty(GUILTY)
    with monkeypatch.context() as patch:
        if in_prefill:
            prefill = served.prefill
            prefilling: list[bool] = []

            def noted(*args: Any) -> Cache:
                prefilling.append(True)
                try:
                    return prefill(*args)
                finally:
                    prefilling.pop()

            patch.setattr(served, "prefill", noted)
            half_way(served, lambda slots: bool(prefilling) and GUILTY in slots, patch)
        else:
            half_way(served, lambda slots: GUILTY in slots, patch)
        if at_once:
            batch = new_batch(served)
            batch.add([row for each in mixed(good, bad) for row in each.rows])
            run_out(batch)
        else:
            staggered(served, mixed(good, bad))
    assert_ended_alone(served, good, bad, "run_bad@v1: this request cannot be computed: RuntimeError: a kernel has")


def test_an_exception_after_some_tokens_leaves_what_was_said(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = innocent(), guilty(GUILTY)
    batch = new_batch(served)
    batch.add([row for each in mixed(good, bad) for row in each.rows])
    for _ in range(2):
        batch.step()
    with monkeypatch.context() as patch:
        half_way(served, lambda slots: GUILTY in slots, patch)
        ended = batch.step()
    assert {row.job for row in ended} == set(bad) and all(len(row.token_ids) == 2 for row in ended)
    run_out(batch)
    assert_ended_alone(served, good, bad, "cannot be computed")
    assert batch.num_generated_tokens == sum(len(row.token_ids) for each in good + bad for row in each.rows)


def test_settings_that_cannot_be_taken_up_end_their_own_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(BatchParams):
        def __init__(self, params: Sequence[SamplingParams], *args: Any, **kwargs: Any) -> None:
            if any(each.min_p == 0.125 for each in params):
                raise OverflowError("too picky")
            super().__init__(params, *args, **kwargs)

    good, bad = innocent(), [job([5, 6, 7], 5, min_p=0.125), job([8], 5, min_p=0.125, num_choices=2)]
    with monkeypatch.context() as patch:
        patch.setattr("prime_rl.inference.embedded.batch.BatchParams", Picky)
        staggered(served, [*good[:2], *bad, *good[2:]])
    assert_ended_alone(served, good, bad, "the base model: this request cannot be computed: OverflowError: too picky")


def test_a_text_that_cannot_be_decoded_ends_its_own_row(served: Served) -> None:
    whole = alone(served, job([5, 6, 7], 12, ignore_eos=True))[0]

    def decode(ids: Sequence[int]) -> str:
        if whole[3] in ids:
            raise UnicodeError("no such character")
        return ""

    good, bad = innocent(), [job([5, 6, 7], 12, ignore_eos=True, stop=["never"])]
    batch = Batch(served, decode)
    batch.add([row for each in [*bad, *good] for row in each.rows])
    run_out(batch)
    assert_ended_alone(served, good, bad, "its text cannot be decoded: UnicodeError: no such character")
    assert len(bad[0].rows[0].token_ids) == whole.index(whole[3]) + 1


def test_when_the_base_model_fails_too_no_row_is_at_fault(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = new_batch(served)
    batch.add([row for each in innocent() for row in each.rows])
    half_way(served, lambda slots: True, monkeypatch)
    with pytest.raises(RuntimeError, match="a kernel has failed"):
        batch.step()
    assert not any(row.job.error for row in batch.rows)


def test_rows_that_are_computed_again_get_the_same_tokens(served: Served) -> None:
    jobs, batch = innocent(), new_batch(served)
    rows = [row for each in jobs for row in each.rows]
    batch.add(rows)
    for num_steps in (1, 4, 3):
        for _ in range(num_steps):
            batch.step()
        batch.release()
        assert batch.num_rows == 0
        batch.add([row for row in rows if row.finish_reason is None])
    run_out(batch)
    assert outputs(jobs) == [alone(served, each) for each in innocent()]


def test_cancelled_rows_leave_and_the_others_go_on(served: Served) -> None:
    batch = new_batch(served)
    stays, goes = job([5, 6, 7], 20, slot=1), job([9, 9], 20, slot=0, num_choices=3)
    batch.add([*stays.rows, *goes.rows])
    batch.step()
    goes.is_cancelled = True
    assert set(batch.step()) == set(goes.rows) and {row.finish_reason for row in goes.rows} == {"abort"}
    assert batch.num_rows == 1
    run_out(batch)
    assert outputs([stays])[0] == alone(served, job([5, 6, 7], 20, slot=1))


def test_stop_strings_end_a_row_where_they_are_complete(served: Served) -> None:
    whole = alone(served, job([5, 6, 7], 20, ignore_eos=True))[0]
    letters = "".join(chr(ord("a") + i % 26) for i in whole)
    stopped = job([5, 6, 7], 20, ignore_eos=True, stop=[letters[9:12]])
    ids = alone(served, stopped)[0]
    at = letters.index(letters[9:12])
    completion = stopped.rows[0]
    assert ids == whole[: at + 3] and completion.stop_at == at and completion.finish_reason == "stop"


def test_end_of_sequence_ends_a_row(served: Served) -> None:
    whole = alone(served, job([5, 6, 7], 20, ignore_eos=True))[0]
    batch = new_batch(replace(served, eos_ids=frozenset({whole[4]})))
    each = job([5, 6, 7], 20)
    batch.add(each.rows)
    run_out(batch)
    completion = each.rows[0]
    assert completion.token_ids == whole[: whole.index(whole[4]) + 1] and completion.finish_reason == "stop"


def test_equal_prompts_of_one_adapter_share_a_prefill() -> None:
    rows = [row for slot in (1, None, 1) for row in job([1, 2], 4, slot=slot, num_choices=2).rows]
    rows += job([3], 4, slot=1).rows
    [chunk] = _chunks(_same(rows), lambda row: len(row.prompt_ids))
    assert chunk == [rows[2:4], rows[6:], [*rows[:2], *rows[4:6]]], "by adapter, then by length"


def test_prefill_is_cut_into_pieces_of_bounded_size() -> None:
    lengths = [1, 1, *[10] * 3000, MAX_PREFILL_TOKENS + 5]
    rows = [job([number, *[0] * (length - 1)], 1).rows[0] for number, length in enumerate(lengths)]
    chunks = _chunks(_same(rows), lambda row: len(row.prompt_ids))
    assert [row for chunk in chunks for same in chunk for row in same] == rows
    for chunk in chunks:
        longest = max(len(same[0].prompt_ids) for same in chunk)
        assert len(chunk) == 1 or len(chunk) * longest <= MAX_PREFILL_TOKENS
    assert len(chunks) == 5, "no more than are needed"


def test_models_with_a_recurrent_state_are_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0)
    folder = save(config, tmp_path / "mamba")
    assert AutoConfig.from_pretrained(folder).model_type == "mamba"
    with pytest.raises(StartError, match=r"recurrent.*vllm"):
        serve(folder, with_lora=False)


def test_no_more_positions_than_the_model_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_model(tmp_path / "model")

    def limit(wanted: int) -> int:
        return max_model_len(InferenceConfig.model_validate({"model": {"name": str(folder), "max_model_len": wanted}}))

    assert (limit(100), limit(512), limit(2048)) == (100, 512, 512)
    assert "2048 reduced to the 512 positions" in caplog.text
