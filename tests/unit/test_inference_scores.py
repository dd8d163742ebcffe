"""Log-probabilities of given tokens: those of the model itself, whatever else the engine does beside them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.batch import MAX_PREFILL_TOKENS, Batch, Job, SamplingParams
from prime_rl.inference.embedded.engine import Waiting
from prime_rl.inference.embedded.model import BLOCK, Served
from prime_rl.inference.embedded.server import Api, ChatRequest, CompletionRequest, Text, parsed, response
from prime_rl.inference.guard import MAX_PROMPT_LOGPROBS, ApiError
from prime_rl.lora import parts
from prime_rl.lora.adapter_state import ADAPTER_FILE, load_adapter
from tests.inference_support import adapter_tensors, linear_shapes, logprob_tolerance, make_adapter, make_model
from tests.unit.test_inference_batching import ARCHITECTURES, SIZES, new_batch, run_out, save, serve
from tests.unit.test_inference_engine import new_engine, out_of_memory, running, until, within
from tests.unit.test_inference_text import Asker

pytestmark = pytest.mark.numeric

BASE, RUN = None, 0
PROMPTS = [[9, 6, 13, 13, 16], [5 + number % 50 for number in range(5 * BLOCK)], [7, 30], [40, 41, 42, 43]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("scores") / "model")


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    """Slot RUN has the adapter of `references`."""
    served = serve(folder)
    load_adapter(served.layers, RUN, adapter_tensors(linear_shapes(folder), seed=1, rank=4), 4)
    served.routing.scaling[RUN] = 2.0
    return served


@pytest.fixture(scope="module")
def references(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, Any]:
    adapter = make_adapter(tmp_path_factory.mktemp("adapter") / "adapter", folder, seed=1)
    base = AutoModelForCausalLM.from_pretrained(folder)
    return {
        BASE: base.eval(),
        RUN: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter).eval(),
    }


def score(prompt: Sequence[int], num_top: int | None = 0, slot: int | None = BASE, **params: Any) -> Job:
    sampling = {"max_tokens": 1, "temperature": 0.0, "seed": 0, "ignore_eos": True, **params}
    model = "the base model" if slot is None else f"run_{slot}@v1"
    return Job([prompt], SamplingParams(**sampling, prompt_logprobs=num_top), slot=slot, max_length=10**6, model=model)


def added(batch: Batch, *jobs: Job) -> None:
    batch.add([row for job in jobs for row in job.rows])
    run_out(batch)


def expected(model: Any, prompt: Sequence[int]) -> Tensor:
    """The log-probabilities `[P, V]` of a plain forward, behind each token but the last."""
    with torch.no_grad():
        logprobs: Tensor = model(torch.tensor([list(prompt)])).logits[0, :-1].float().log_softmax(-1)
    return logprobs


def check(job: Job, model: Any) -> None:
    for row in job.rows:
        scored, ids = row.scored, row.prompt_ids
        assert scored is not None and job.error is None and len(row.token_ids) == job.params.max_tokens
        said_PV, tolerance = expected(model, ids), logprob_tolerance(model, list(ids))
        assert tolerance < 1e-3
        given_P1 = said_PV.gather(1, torch.tensor(ids[1:])[:, None])
        torch.testing.assert_close(scored.logprobs, given_P1[:, 0], rtol=0, atol=tolerance)
        assert ((said_PV > given_P1 + tolerance).sum(-1) < scored.ranks).all()
        assert (scored.ranks <= (said_PV > given_P1 - tolerance).sum(-1)).all()
        top = said_PV.topk(job.params.prompt_logprobs or 0)
        found = scored.top_logprobs[:, : top.values.shape[1]]
        torch.testing.assert_close(found, top.values, rtol=0, atol=tolerance)
        at_ids = said_PV.gather(1, scored.top_ids[:, : top.values.shape[1]])
        torch.testing.assert_close(found, at_ids, rtol=0, atol=tolerance)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_scores_are_those_of_a_plain_forward(
    served: Served, references: dict[int | None, Any], temperature: float
) -> None:
    """All at once: of the base model and an adapter, short and long, with some of the likeliest and without."""
    settings = {"temperature": temperature, "top_p": 0.5, "repetition_penalty": 1.5}
    jobs = [
        score(prompt, num_top, slot, n=n, max_tokens=n, **settings)
        for slot in (BASE, RUN)
        for prompt in PROMPTS
        for num_top, n in ((0, 1), (5, 2))
    ]
    added(new_batch(served), *jobs)
    for job in jobs:
        check(job, references[job.slot])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_of_every_kind_of_model(name: str, tmp_path: Path) -> None:
    folder = save(ARCHITECTURES[name], tmp_path)
    jobs = [score(prompt, 3) for prompt in PROMPTS]
    added(new_batch(serve(folder, with_lora=False)), *jobs)
    for job in jobs:
        check(job, AutoModelForCausalLM.from_pretrained(folder).eval())


def test_a_sampled_text_has_the_logprobs_that_it_was_sampled_with(served: Served) -> None:
    batch = new_batch(served)
    sampled = [score(prompt, None, slot, temperature=1.0, max_tokens=30, n=3) for prompt in PROMPTS for slot in (0, 1)]
    added(batch, *sampled)
    rows = [row for job in sampled for row in job.rows]
    again = [score(row.all_ids, 0, row.job.slot) for row in rows]
    added(batch, *again)
    for row, job in zip(rows, again, strict=True):
        scored = job.rows[0].scored
        assert scored is not None
        torch.testing.assert_close(scored.logprobs[-30:], torch.tensor(row.logprobs), rtol=0, atol=1e-4)


def test_logits_of_a_few_tokens_exist_at_one_time(
    served: Served, references: dict[int | None, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, head = list[int](), served.model.get_output_embeddings()
    forward = head.forward
    monkeypatch.setattr(parts, "CHUNK_BYTES", 4 * 7 * served.num_logits)
    monkeypatch.setattr(head, "forward", lambda read: sizes.append(read.shape[0] * read.shape[1]) or forward(read))
    jobs = [score(PROMPTS[1], 2), score(PROMPTS[0], 2), score(PROMPTS[3], 2)]
    added(new_batch(served), *jobs)
    assert max(sizes) <= 7 and sum(sizes) >= sum(len(prompt) for prompt in PROMPTS) - 3
    for job in jobs:
        check(job, references[BASE])


def test_what_is_known_of_a_beginning_is_computed_again_and_kept_for_others(
    served: Served, references: dict[int | None, Any]
) -> None:
    batch = new_batch(served)
    added(batch, score(PROMPTS[1][: 3 * BLOCK], None))
    first, second = score([*PROMPTS[1], 3], 4, RUN), score([*PROMPTS[1], 3], 4)
    added(batch, first, second)
    check(first, references[RUN])
    check(second, references[BASE])
    assert batch.num_prefix_hits == 0
    added(batch, score(PROMPTS[1], None), score(PROMPTS[1], None, RUN))
    assert batch.num_prefix_hits == 2 * ((len(PROMPTS[1]) - 1) // BLOCK * BLOCK)


def test_tokens_of_others_are_those_that_they_would_get_alone(served: Served) -> None:
    def others() -> list[Job]:
        return [score(prompt, None, slot, temperature=1.0, max_tokens=20) for prompt in PROMPTS for slot in (BASE, RUN)]

    alone, beside, batch = others(), others(), new_batch(served)
    added(new_batch(served), *alone)
    batch.add([row for job in beside[:4] for row in job.rows])
    batch.step()
    batch.add([row for job in (*beside[4:], score(PROMPTS[1]), score(PROMPTS[0], 20, RUN)) for row in job.rows])
    run_out(batch)
    assert [job.rows[0].token_ids for job in beside] == [job.rows[0].token_ids for job in alone]


@pytest.fixture
def overflowing(folder: Path, tmp_path: Path) -> Path:
    broken = make_adapter(tmp_path / "broken", folder, seed=1)
    save_file({name: each * 1e25 for name, each in load_file(broken / ADAPTER_FILE).items()}, broken / ADAPTER_FILE)
    return broken


async def test_scores_that_are_not_finite_are_the_fault_of_the_adapter(folder: Path, overflowing: Path) -> None:
    async with running(new_engine(serve(folder), 8)) as engine:
        await engine.load_adapter("teacher/run_b@v1", overflowing)
        asked = SamplingParams(max_tokens=1, prompt_logprobs=2)
        bad = engine.submit([PROMPTS[0], PROMPTS[1]], asked, adapter="teacher/run_b@v1")
        good = engine.submit([PROMPTS[0], [4]], asked)
        with pytest.raises(ApiError, match="teacher/run_b@v1: logits are not finite") as caught:
            await within(bad.result())
        assert caught.value.status == 422
        rows = await within(good.result())
        assert rows[0].scored is not None and rows[1].scored is None
        await until(lambda: (engine.stats().num_running, engine.stats().num_waiting) == (0, 0))


async def test_what_does_not_fit_into_memory_is_refused_and_the_engine_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(folder)
    monkeypatch.setattr(served, "score", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    async with running(new_engine(served, 8)) as engine:
        other = engine.submit([[5, 6]], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        job = engine.submit([PROMPTS[1]], SamplingParams(max_tokens=1, prompt_logprobs=0))
        with pytest.raises(
            ApiError, match=r"80 tokens do not fit into the memory of inference: ask for fewer"
        ) as caught:
            await within(job.result())
        assert caught.value.status == 400
        assert len((await within(other.result()))[0].token_ids) == 200


async def test_rows_that_are_computed_again_are_scored_once(
    folder: Path, references: dict[int | None, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(folder)
    out_of_memory(served, lambda num_rows: num_rows <= 2, monkeypatch)
    async with running(new_engine(served, 8)) as engine:
        jobs = [
            engine.submit([prompt], SamplingParams(max_tokens=5, prompt_logprobs=2, ignore_eos=True))
            for prompt in (*PROMPTS, *PROMPTS)
        ]
        for job in jobs:
            await within(job.result())
    for job in jobs:
        check(job, references[BASE])


async def test_who_goes_away_takes_nothing_from_the_engine(folder: Path) -> None:
    engine = new_engine(serve(folder), 1)
    jobs = [engine.submit([PROMPTS[1]], SamplingParams(max_tokens=1, prompt_logprobs=0)) for _ in range(9)]
    for job in jobs:
        engine.cancel(job)
        assert job.ended.is_set()
    assert engine.stats().num_waiting == 0 and engine._take_fitting() == []


def test_a_run_pays_for_all_tokens_that_are_scored(served: Served) -> None:
    """And no more of them are read at once than of other prompts."""
    batch = new_batch(served)
    prompt = [5 + number % 50 for number in range(400)]
    added(batch, score(prompt, None))
    waiting = Waiting(batch.prefixes)
    assert waiting.cost(score(prompt, None).rows[0]) <= 1 + BLOCK
    assert waiting.cost(score(prompt, 0).rows[0]) == 401
    engine = new_engine(dataclasses.replace(served), 64)
    engine._batch.prefixes = batch.prefixes
    engine.submit([[number, *prompt] for number in range(40)], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert len(engine._take_fitting()) == MAX_PREFILL_TOKENS // 402


def test_an_answer_has_the_form_of_vllm(served: Served, folder: Path, references: dict[int | None, Any]) -> None:
    asked = parsed({"prompt": [PROMPTS[0], [4]], "prompt_logprobs": 2, "max_tokens": 1}, CompletionRequest)
    job = Job([PROMPTS[0], [4]], asked, slot=None, max_length=10**6)
    added(new_batch(served), job)
    body = json.loads(msgspec.json.encode(response(asked, job, Text(str(folder)), "m")))
    said_PV = expected(references[BASE], PROMPTS[0])
    first, *positions = body["choices"][0]["prompt_logprobs"]
    assert first is None and body["choices"][1]["prompt_logprobs"] == [None]
    text = Text(str(folder))
    for token_id, position, said_V in zip(PROMPTS[0][1:], positions, said_PV, strict=True):
        likeliest = said_V.topk(2).indices.tolist()
        assert next(iter(position)) == str(token_id) and set(map(int, position)) == {token_id, *likeliest}
        for each, entry in position.items():
            assert entry["logprob"] == pytest.approx(float(said_V[int(each)]), abs=1e-4)
            assert entry["rank"] == int((said_V >= said_V[int(each)]).sum())
            assert entry["decoded_token"] == text.token(int(each))
    plain = parsed({"prompt": PROMPTS[0], "max_tokens": 1}, CompletionRequest)
    job = Job([PROMPTS[0]], plain, slot=None, max_length=10**6)
    added(new_batch(served), job)
    assert response(plain, job, text, "m")["choices"][0]["prompt_logprobs"] is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [1], "prompt_logprobs": -1}, "found -1: must be 0 to 20"),
        ({"prompt": [1], "prompt_logprobs": 21}, "found 21: must be 0 to 20"),
        ({"prompt": [1], "prompt_logprobs": "1"}, "found a text"),
        ({"prompt": [1], "prompt_logprobs": True}, "Expected `int | null`, got `bool`"),
        ({"prompt": [1], "prompt_logprobs": 1.5}, "Expected `int | null`, got `float`"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}, "must be asked of /v1/completions"),
        ({"prompt": [[1] * 1000] * 100, "prompt_logprobs": 20}, f"must be at most {MAX_PROMPT_LOGPROBS}"),
        ({"prompt": [1] * 8000, "prompt_logprobs": 0, "n": 256}, f"must be at most {MAX_PROMPT_LOGPROBS}"),
        ({"prompt": ["é" * 1000] * 501, "prompt_logprobs": 1}, f"must be at most {MAX_PROMPT_LOGPROBS}"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(body: dict[str, Any], words: str) -> None:
    kind: Any = ChatRequest if "messages" in body else CompletionRequest
    with pytest.raises(ApiError, match="prompt_logprobs") as caught:
        parsed(body, kind)
    assert words in caught.value.message and (caught.value.status, caught.value.param) == (400, "prompt_logprobs")


async def test_a_model_that_changes_its_logits_after_the_head_is_not_asked(tmp_path: Path) -> None:
    folder = save(Gemma2Config(**SIZES, final_logit_softcapping=30.0), tmp_path)
    api = Api(new_engine(serve(folder, with_lora=False), 8), None, InferenceConfig(output_dir=tmp_path))  # type: ignore[arg-type]
    with pytest.raises(
        ApiError, match=r"prompt_logprobs: not for this model .* sets final_logit_softcapping"
    ) as caught:
        await api.complete(Asker(9), {"prompt": [1, 2], "prompt_logprobs": 0})  # type: ignore[arg-type]
    assert caught.value.status == 400
