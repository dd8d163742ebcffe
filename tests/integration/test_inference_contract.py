"""What both engines must do alike, asked of real servers over HTTP and held against transformers and peft."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.served import LOGPROBS_HEADER, teacher_name
from prime_rl.contract.status import InferenceStatus, is_alive, read_status
from prime_rl.orchestrator.client import Endpoint, RequestRefused, ScoreRequest, ServerClient, UnknownModel
from prime_rl.orchestrator.envs.base import Message
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.orchestrator.recorder import as_turns
from tests.adapter_sets import TARGET_SETS, TrainedAdapter
from tests.inference_support import (
    EOS,
    KEY,
    LOADED,
    RunningServer,
    adapter_dir,
    error_of,
    filled_slots,
    greedy,
    logprob_tolerance,
    make_adapter,
    reference_logprobs,
    status_of,
    token_ids,
    unread_request,
)
from tests.patience import PATIENCE_S
from tests.weights_contract import (  # noqa: F401
    test_a_load_that_nobody_waits_for_leaves_nothing,
    test_a_request_is_answered_by_one_set_of_weights_which_its_answer_names,
    test_adapters_and_other_weights_do_not_meet,
    test_health_costs_next_to_nothing_and_needs_no_key,
    test_weights_that_cannot_be_taken_are_refused_in_one_line,
    test_whole_weights_are_taken_over_and_given_back,
    unladen,
)

A, B = LOADED
PROMPTS = [[9, 6, 13, 13, 16], [20, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51], [7, 30, 7]]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model(served_model: Path) -> Path:
    return served_model


@pytest.fixture(scope="module")
def references(server: RunningServer, model: Path) -> dict[str, PreTrainedModel]:
    """The base model in transformers and both adapters in peft, by their names on the server."""

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    adapted = {name: PeftModel.from_pretrained(base(), adapter_dir(server, name)).eval() for name in (A, B)}
    return {server.model: base().eval(), **adapted}


def test_openai_completions(server: RunningServer) -> None:
    with server.openai() as client:
        result = client.completions.create(
            model=server.model, prompt="hello", max_tokens=6, n=3, seed=5, temperature=0.9, logprobs=2
        )
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    assert len({choice.text for choice in result.choices}) > 1
    assert result.usage is not None and result.usage.prompt_tokens == 5
    for choice in result.choices:
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
        assert choice.finish_reason == "stop" or len(logprobs.tokens) == 6
        for token, value, top in zip(
            logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs, strict=True
        ):
            assert top[token] == pytest.approx(value, abs=1e-4) and len(top) in (2, 3)


def test_openai_chat(server: RunningServer, model: Path) -> None:
    messages = [{"role": "user", "content": "hi there"}]
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer.encode("user: hi there! assistant: ")
    with server.openai() as client:
        result = client.chat.completions.create(
            model=A,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=8,
            temperature=0,
            logprobs=True,
            top_logprobs=1,
            extra_body={"return_token_ids": True},
        )
    choice = result.choices[0]
    assert result.prompt_token_ids == prompt  # type: ignore[attr-defined]
    assert [choice.token_ids] == token_ids(server.complete(prompt, model=A, max_tokens=8, temperature=0))  # type: ignore[attr-defined]
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)  # type: ignore[attr-defined]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    for entry in choice.logprobs.content:
        assert entry.top_logprobs[0].token == entry.token


@pytest.mark.numeric
def test_adapters_on_every_set_of_target_modules_say_what_the_trainer_says(server: RunningServer, model: Path) -> None:
    """Two at a time beside the two of the fixture; logprobs in float32 against the trainer's own forward."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    worst = {}
    for at in range(0, len(TARGET_SETS), 2):
        adapters = {}
        for seed, (name, targets) in enumerate(list(TARGET_SETS.items())[at : at + 2]):
            adapters[f"run_{name.replace(' ', '_')}@v1"] = TrainedAdapter.on(base, targets, seed=seed)
        for name, adapter in adapters.items():
            server.load(name, adapter.publish(adapter_dir(server, name), str(model)))
        with ThreadPoolExecutor(len(adapters)) as pool:
            bodies = list(pool.map(lambda name: server.complete(model=name, seed=1, **settings), adapters))
        for (name, adapter), body in zip(adapters.items(), bodies, strict=True):
            choice = body["choices"][0]
            said, generated = torch.tensor(choice["logprobs"]["token_logprobs"]), choice["token_ids"]
            ours, plain = (torch.tensor(adapter.logprobs(PROMPTS[0], generated, adapted=on)) for on in (True, False))
            worst[name] = float((said - ours).abs().max())
            assert (said - plain).abs().max() > 1e-2, f"{name} was served as the base model"
            server.unload(name)
    assert max(worst.values()) <= logprob_tolerance(base, PROMPTS[0]), worst


def test_prompts_of_all_kinds(server: RunningServer, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = ["abc", "hello world"]
    ids = [tokenizer.encode(text) for text in texts]
    settings: dict[str, Any] = {"max_tokens": 5, "temperature": 0}
    alone = [token_ids(server.complete(text, **settings))[0] for text in texts]
    assert token_ids(server.complete(ids[0], **settings)) == alone[:1]
    assert token_ids(server.complete(texts, **settings)) == alone  # type: ignore[arg-type]
    assert token_ids(server.complete(ids, **settings)) == alone  # type: ignore[arg-type]


@pytest.mark.numeric
@pytest.mark.parametrize("which", [0, 1, 2])
def test_greedy_equals_transformers_and_peft(
    server: RunningServer, references: dict[str, PreTrainedModel], which: int
) -> None:
    name = [server.model, A, B][which]
    for prompt in PROMPTS:
        body = server.complete(prompt, model=name, max_tokens=NUM_TOKENS, temperature=0)
        assert token_ids(body) == [greedy(references[name], prompt, NUM_TOKENS)]


@pytest.mark.numeric
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    server: RunningServer, references: dict[str, PreTrainedModel], temperature: float
) -> None:
    for name in (server.model, A):
        body = server.complete(PROMPTS[0], model=name, max_tokens=NUM_TOKENS, temperature=temperature, seed=1)
        choice = body["choices"][0]
        assert choice["prompt_token_ids"] == PROMPTS[0]
        expected = reference_logprobs(references[name], PROMPTS[0], choice["token_ids"], temperature or 1.0)
        tolerance = logprob_tolerance(references[name], PROMPTS[0]) / (temperature or 1.0)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=tolerance)


@pytest.mark.numeric
async def test_given_tokens_are_scored_as_transformers_and_peft_score_them(
    server: RunningServer, references: dict[str, PreTrainedModel], model: Path
) -> None:
    """Through the client of orchestrators; for a teacher under its own name, and for a text that was sampled."""
    sampled = server.complete(PROMPTS[2], model=A, max_tokens=NUM_TOKENS, temperature=1.0, seed=3, ignore_eos=True)
    texts = [*PROMPTS, [*PROMPTS[2], *sampled["choices"][0]["token_ids"]], [7]]
    run_id, folder = "run_taught", server.output_dir / "run_taught" / "teacher" / "step_7"
    teacher = teacher_name(run_id, 7)
    shutil.copytree(adapter_dir(server, B), folder)
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    async with httpx.AsyncClient(headers=headers, timeout=None) as http:
        client = ServerClient(Endpoint(server.output_dir, server.base_url), http, timeout_s=PATIENCE_S)
        await client.load_adapter(teacher, folder)
        for name, plain in ((server.model, server.model), (A, A), (teacher, B)):
            for ids, top_k in itertools.product(texts, (0, 3)):
                scores = await client.score(ScoreRequest(name, ids, top_k))
                with torch.no_grad():
                    said_PV = references[plain](torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
                given_P = said_PV.gather(1, torch.tensor(ids[1:], dtype=torch.long)[:, None])[:, 0]
                tolerance = logprob_tolerance(references[plain], ids)
                assert scores.logprobs_T == pytest.approx([0.0, *given_P.tolist()], abs=tolerance)
                assert len(scores.top_T) == (len(ids) if top_k else 0) and scores.top_T[:1] == [[]][:top_k]
                for top, said_V in zip(scores.top_T[1:], said_PV, strict=bool(top_k)):
                    assert [value for _, value in top] == pytest.approx(said_V.topk(3).values.tolist(), abs=tolerance)
                    assert [value for _, value in top] == pytest.approx(
                        [float(said_V[at]) for at, _ in top], abs=tolerance
                    )
        scored = await client.score(ScoreRequest(A, texts[-2]))
        said = sampled["choices"][0]["logprobs"]["token_logprobs"]
        assert scored.logprobs_T[-NUM_TOKENS:] == pytest.approx(said, abs=logprob_tolerance(references[A], texts[-2]))
        await client.unload_adapter(teacher)
        with pytest.raises(UnknownModel):
            await client.score(ScoreRequest(teacher, [7, 8]))
        for bad in (-1, 21):
            with pytest.raises(RequestRefused, match=f"prompt_logprobs: found {bad}: must be 0 to 20"):
                await client.score(ScoreRequest(server.model, [7, 8], bad))
        with pytest.raises(RequestRefused):  # no room for one more
            await client.score(ScoreRequest(server.model, [7] * 256))
        assert len((await client.score(ScoreRequest(server.model, [7] * 255))).logprobs_T) == 255
    asked = {"max_tokens": 1, "prompt_logprobs": 0}
    generated = server.post("/inference/v1/generate", token_ids=[7, 8], sampling_params=asked).json()
    assert generated["prompt_logprobs"][0] is None and list(generated["prompt_logprobs"][1]) == ["8"]
    chat = {"model": server.model, "messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1}
    refusal = server.post("/v1/chat/completions", **chat)
    assert refusal.status_code == 400 and "must be asked of /v1/completions" in error_of(refusal)


async def test_texts_are_scored_beside_each_other_and_beside_answers(
    server: RunningServer, references: dict[str, PreTrainedModel]
) -> None:
    """Of the base and two adapters, with answers under way: each as when it is alone."""
    names = (server.model, A, B)
    asked = [ScoreRequest(name, text * 3, 2) for text in (*PROMPTS, [7, 8]) for name in names]
    talk: dict[str, Any] = {"prompt": PROMPTS[0], "n": 4, "max_tokens": 60, "ignore_eos": True, "seed": 1}
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    async with httpx.AsyncClient(headers=headers, timeout=None) as http:
        client = ServerClient(Endpoint(server.output_dir, server.base_url), http, timeout_s=PATIENCE_S)
        alone = [await client.score(each) for each in asked]
        answers = [asyncio.to_thread(server.complete, model=name, **talk) for name in names]
        *_, together = await asyncio.gather(*answers, asyncio.gather(*map(client.score, asked)))
    for request, one, other in zip(asked, alone, together, strict=True):
        tolerance = logprob_tolerance(references[request.model], list(request.token_ids))
        assert other.logprobs_T == pytest.approx(one.logprobs_T, abs=tolerance)
        for top, again in zip(one.top_T, other.top_T, strict=True):
            assert [value for _, value in again] == pytest.approx([value for _, value in top], abs=tolerance)


@pytest.mark.slow
@pytest.mark.numeric
def test_mixed_requests_equal_their_solo_outputs(server: RunningServer, model: Path) -> None:
    """Base and two adapters, greedy and seeded, prompts of different lengths: all at the same time and one by one."""
    with filled_slots(server, make_adapter(server.output_dir / "others", model, seed=30)) as others:
        for name in others:  # every slot has held weights: what is left must not reach rows of the base
            server.complete(PROMPTS[0], model=name, max_tokens=1)
    requests = [
        {"model": name, "prompt": prompt, "max_tokens": 4 + 15 * idx, "temperature": temperature, "seed": 11}
        for idx, prompt in enumerate(PROMPTS[::2])
        for name in (server.model, A, B)
        for temperature in (0.0, 1.0)
    ]
    solo = [token_ids(server.complete(**request)) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        mixed = [token_ids(body) for body in pool.map(lambda request: server.complete(**request), requests)]
    assert mixed == solo
    assert len({tuple(ids[0]) for ids in solo}) > len(requests) // 2


@pytest.mark.numeric
def test_choices_of_a_seeded_request_differ_and_come_again(server: RunningServer) -> None:
    first, second = (token_ids(server.complete(PROMPTS[0], max_tokens=12, seed=3, n=4)) for _ in range(2))
    assert first == second
    assert len({tuple(ids) for ids in first}) == 4


def test_end_of_sequence_is_part_of_the_token_ids(server: RunningServer, model: Path) -> None:
    eos = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(EOS)
    body = server.complete(PROMPTS[0], max_tokens=200, temperature=2.0, seed=1, n=8)
    stopped = [choice for choice in body["choices"] if choice["finish_reason"] == "stop"]
    assert stopped
    for choice in body["choices"]:
        assert (choice["token_ids"][-1] == eos) == (choice["finish_reason"] == "stop")
        assert eos not in choice["token_ids"][:-1] and EOS not in choice["text"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) <= 200


@pytest.mark.numeric
def test_top_p_leaves_only_the_likely_tokens(server: RunningServer, references: dict[str, PreTrainedModel]) -> None:
    choice = server.complete(PROMPTS[0], max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.01, seed=2)["choices"][0]
    assert choice["token_ids"] == greedy(references[server.model], PROMPTS[0], NUM_TOKENS)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([0.0] * len(choice["token_ids"]), abs=1e-4)


@pytest.mark.numeric
def test_every_setting_narrows_as_its_definition_says(
    server: RunningServer, references: dict[str, PreTrainedModel]
) -> None:
    """Token by token: the reported logprob is that of the model's logits after the processors of transformers."""
    settings = {"temperature": 0.8, "min_p": 0.02, "top_k": 30, "top_p": 0.95}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    body = server.complete(PROMPTS[0], max_tokens=NUM_TOKENS, seed=5, n=2, ignore_eos=True, **settings, **penalties)
    for choice in body["choices"]:
        said = [list(PROMPTS[0]), choice["token_ids"]]
        for at, logprob in enumerate(choice["logprobs"]["token_logprobs"]):
            token_id = choice["token_ids"][at]
            ids = torch.tensor([said[0] + said[1][:at]])
            with torch.no_grad():
                logits = references[server.model](ids).logits[:, -1].float()
            logits = RepetitionPenaltyLogitsProcessor(1.2)(ids, logits)
            for other in set(said[1][:at]):
                logits[0, other] -= 0.3 + 0.2 * said[1][:at].count(other)
            for warper in (
                TemperatureLogitsWarper(0.8),
                MinPLogitsWarper(0.02),
                TopKLogitsWarper(30),
                TopPLogitsWarper(0.95),
            ):
                logits = warper(ids, logits)
            assert logprob == pytest.approx(float(logits.log_softmax(-1)[0, token_id]), abs=2e-3)


def test_models_are_listed_and_unloaded_ones_are_gone(server: RunningServer, model: Path) -> None:
    assert server.get("/v1/models").headers[LOGPROBS_HEADER] == "processed_logprobs"
    import openai

    folder = make_adapter(adapter_dir(server, "run_c@v2"), model, seed=9)
    server.load("run_c@v2", folder)
    with server.openai() as client:
        assert {entry.id for entry in client.models.list()} == {server.model, A, B, "run_c@v2"}
        server.unload("run_c@v2")
        assert {entry.id for entry in client.models.list()} == {server.model, A, B}
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="run_c@v2", prompt="x", max_tokens=1)
    assert server.post("/v1/unload_lora_adapter", lora_name="run_c@v2").status_code == 404


def test_a_name_loaded_again_serves_the_new_weights(server: RunningServer, model: Path) -> None:
    """A run that was set back publishes other weights under a version and a path that were served before."""
    folder = make_adapter(adapter_dir(server, "run_again@v1"), model, seed=20)
    newer = make_adapter(server.output_dir / "elsewhere", model, seed=21)
    settings: dict[str, Any] = {"model": "run_again@v1", "max_tokens": NUM_TOKENS, "temperature": 0}
    prompt = PROMPTS[2] * 12  # long enough to fill blocks of a prefix cache
    server.load("run_again@v1", folder)
    before = token_ids(server.complete(prompt, **settings))
    server.unload("run_again@v1")
    (newer / "adapter_model.safetensors").replace(folder / "adapter_model.safetensors")
    server.load("run_again@v1", folder)
    after = token_ids(server.complete(prompt, **settings))
    server.unload("run_again@v1")
    reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder).eval()
    assert after == [greedy(reference, prompt, NUM_TOKENS)] != before


def test_loading_what_does_not_fit_is_refused(server: RunningServer, model: Path) -> None:
    load = "/v1/load_lora_adapter"
    assert "already" in error_of(server.post(load, lora_name=A, lora_path=str(adapter_dir(server, A))))

    wide = make_adapter(adapter_dir(server, "run_wide@v1"), model, seed=3, rank=16)
    assert "rank 16" in error_of(server.post(load, lora_name="run_wide@v1", lora_path=str(wide)))
    renamed = make_adapter(adapter_dir(server, "run_r@v1"), model, seed=3)
    weights = renamed / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name.replace("q_proj", "query"): tensor for name, tensor in tensors.items()}, weights)
    message = error_of(server.post(load, lora_name="run_r@v1", lora_path=str(renamed)))
    assert "lora_A.weight is" in message

    fewer = TrainedAdapter.on(AutoModelForCausalLM.from_pretrained(model), ["q_proj"], seed=3)
    partial = fewer.publish(adapter_dir(server, "run_p@v1"))
    config = partial / "adapter_config.json"
    config.write_text(config.read_text().replace('"q_proj"', '"q_proj", "v_proj"'))
    assert "v_proj.lora_A.weight is missing" in error_of(
        server.post(load, lora_name="run_p@v1", lora_path=str(partial))
    )
    config.write_text(config.read_text().replace('"v_proj"', '"lm_head"'))
    message = error_of(server.post(load, lora_name="run_p@v1", lora_path=str(partial)))
    assert "its target_modules are ['lm_head', 'q_proj'], this model takes adapters in ['down_proj'," in message
    weights.write_bytes(b"no safetensors")
    assert server.post(load, lora_name="run_r@v1", lora_path=str(renamed)).status_code == 422
    assert server.post(load, lora_name="../up", lora_path=str(renamed)).status_code == 400
    assert server.post(load, lora_name="run_r@v1").status_code == 400
    with server.openai() as client:
        assert {entry.id for entry in client.models.list()} == {server.model, A, B}


def test_an_adapter_that_is_not_finite_costs_its_own_requests_only(
    server: RunningServer, references: dict[str, PreTrainedModel], model: Path
) -> None:
    """Its numbers are refused when it is loaded; those that overflow in a product there, or when it is first asked."""
    load, name = "/v1/load_lora_adapter", "run_z@v1"
    broken = make_adapter(adapter_dir(server, name), model, seed=3)
    weights = broken / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, **{key: tensors[key] * float("nan") for key in sorted(tensors)[:1]}}, weights)
    response = server.post(load, lora_name=name, lora_path=str(broken))
    assert response.status_code == 422 and f"{sorted(tensors)[0]} is not finite" in error_of(response)

    save_file({key: tensor * 1e25 for key, tensor in tensors.items()}, weights)
    ask = {"prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "temperature": 0}
    expected = greedy(references[B], PROMPTS[0], NUM_TOKENS)
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(server.complete, model=B, **ask) for _ in range(4)]
        response = server.post(load, lora_name=name, lora_path=str(broken))
        if response.status_code == 200:
            response = server.post("/v1/completions", model=name, logprobs=1, **ask)
            server.unload(name)
        good += [pool.submit(server.complete, model=B, **ask) for _ in range(4)]
        assert [token_ids(each.result()) for each in good] == [[expected]] * 8
    assert response.status_code == 422 and name in error_of(response)
    assert "logits are not finite" in error_of(response)


def test_a_request_of_many_choices_holds_up_no_other_run(server: RunningServer) -> None:
    """Whoever asks by the thousand waits for places, and whoever asks for few has them first."""
    many = {"model": B, "prompt": [[5 + each] for each in range(16)], "n": 256, "max_tokens": 240, "ignore_eos": True}
    with unread_request(server, **many):
        wait_for(lambda: status_of(server).num_waiting > 1000, "choices to wait", timeout_s=PATIENCE_S)
        answered = server.complete(PROMPTS[0], model=A, n=4, max_tokens=8, ignore_eos=True)
        # All that wait in turn are thousands of choices of 240 tokens.
        assert len(answered["choices"]) == 4 and status_of(server).num_waiting > 1000
    wait_for(lambda: status_of(server).num_waiting == 0, "the client's choices to be forgotten", timeout_s=PATIENCE_S)


def test_who_uses_an_unloaded_adapter_gives_way_to_one_that_is_loaded(server: RunningServer, model: Path) -> None:
    """Who loads, asks for much and unloads, again and again, keeps no slot from others."""
    folder = make_adapter(adapter_dir(server, "run_q@v1"), model, seed=6)
    many = {"prompt": [[5 + each] for each in range(16)], "n": 128, "max_tokens": 240, "ignore_eos": True}
    talk = {"messages": [{"role": "user", "content": "on and on"}], "stream": True, "max_tokens": 200}
    with filled_slots(server, folder), ThreadPoolExecutor(1) as pool, server.http() as client:
        server.load("chat/run_q@v1", folder)
        asked = pool.submit(server.post, "/v1/completions", model="chat/run_q@v1", **many)
        wait_for(lambda: status_of(server).num_waiting > 1000, "choices to wait", timeout_s=PATIENCE_S)
        talk["model"] = "chat/run_q@v1"
        with client.stream("POST", "/v1/chat/completions", json=talk) as streamed:  # the head comes, the text waits
            server.unload("chat/run_q@v1")
            assert not asked.done(), "its slot is the last"
            server.load("chat/run_q@v2", folder)
            refused, text = asked.result(PATIENCE_S), streamed.read().decode()
        assert refused.status_code == 404 and "another one needs its slot" in error_of(refused)
        assert "another one needs its slot" in text
        wait_for(lambda: status_of(server).num_waiting == 0, "its choices to be forgotten", timeout_s=PATIENCE_S)
        assert server.complete(PROMPTS[0], model="chat/run_q@v2", max_tokens=2)["choices"]


def test_adapters_come_from_below_output_dir_only(server: RunningServer, model: Path, tmp_path: Path) -> None:
    load = "/v1/load_lora_adapter"
    outside = make_adapter(tmp_path / "outside", model, seed=4)
    link = server.output_dir / "link"
    link.symlink_to(outside)
    half = server.output_dir / "half"
    half.mkdir()
    (half / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for path in (outside, link, half, server.output_dir / "run_a" / ".." / ".." / outside.name, Path("/etc")):
        response = server.post(load, lora_name="run_x@v1", lora_path=str(path))
        assert response.status_code == 403 and "outside" in error_of(response), path
    assert server.post(load, lora_name="run_x@v1", lora_path=str(server.output_dir / "none")).status_code == 400


def test_no_more_adapters_than_slots(server: RunningServer, model: Path) -> None:
    folder = make_adapter(adapter_dir(server, "run_m@v1"), model, seed=5)
    with filled_slots(server, folder):
        response = server.post("/v1/load_lora_adapter", lora_name="run_m@v1", lora_path=str(folder))
        assert response.status_code == 400 and "slots" in error_of(response)
    server.load("run_m@v1", folder)
    server.unload("run_m@v1")


def test_a_chat_is_rendered_by_the_code_of_orchestrators(server: RunningServer) -> None:
    messages: list[Message] = [{"role": "user", "content": " a b"}, {"role": "assistant", "content": "c"}]
    chat = {"model": server.model, "messages": messages, "max_tokens": 1, "return_token_ids": True}
    response = server.post("/v1/chat/completions", **chat)
    assert response.status_code == 200, response.text
    assert response.json()["prompt_token_ids"] == ChatTokenizer.load(server.model).prompt(as_turns(messages))
    refused = server.post("/v1/chat/completions", **chat, chat_template_kwargs={"messages": []})
    assert refused.status_code == 400 and "may not set ['messages']" in error_of(refused)


def test_bad_requests_are_refused_in_openais_shape(server: RunningServer) -> None:
    def status(**body: Any) -> int:
        response = server.post("/v1/completions", **{"model": server.model, "prompt": "x", "max_tokens": 1, **body})
        error_of(response)
        return response.status_code

    def chat_status(**body: Any) -> int:
        response = server.post("/v1/chat/completions", **{"model": server.model, "max_tokens": 1, **body})
        error_of(response)
        return response.status_code

    assert status(model="run_nobody@v1") == 404
    assert chat_status(model="run_nobody@v1", messages=[{"role": "user", "content": "x"}]) == 404
    assert status(prompt=[5] * 300) == 400
    assert status(prompt=[5] * 256) == 400
    assert status(prompt=[5, 100_000]) == 400
    assert status(prompt=[]) == 400
    assert status(temperature=-1) == 400
    assert status(temperature=2.5) == 400
    assert status(temperature=1e-320) == status(min_p=1e-320) == status(repetition_penalty=1e-39) == 400
    assert status(n=0) == 400
    assert chat_status(messages="hello") == 400
    json_type = {"content-type": "application/json"}
    with server.http() as client:
        assert client.post("/v1/completions", content=b"{", headers=json_type).status_code == 400
        assert client.get("/v1/completions").status_code == 405
        assert client.get("/docs").status_code == 404
        assert client.post("/v1/completions", content=b"x" * (17 * 2**20), headers=json_type).status_code == 413


def test_key_is_needed_everywhere_but_for_health(server: RunningServer) -> None:
    with server.http(headers={}) as client:
        assert client.get("/health").status_code == 200
        for route in ("/v1/models", "/metrics", "/nowhere"):
            assert client.get(route).status_code == 401
        assert {client.post(f"/{name}_weights", json={}).status_code for name in ("update", "reload")} == {401}
        body = {"model": server.model, "prompt": "x", "max_tokens": 1}
        for header in ({}, *({"Authorization": value} for value in ("Bearer wrong", KEY, f"Basic {KEY}"))):
            response = client.post("/v1/completions", json=body, headers=header)
            assert response.status_code == 401
            error_of(response)
    import openai

    with pytest.raises(openai.AuthenticationError), server.openai(api_key="wrong") as client:
        client.models.list()


def test_metrics_and_status_tell_the_truth(server: RunningServer) -> None:
    def status() -> InferenceStatus:
        found = read_status(OutputDir(server.output_dir).inference_status, InferenceStatus)
        assert found is not None
        return found

    wait_for(lambda: status().adapters == [A, B], "the status to list both adapters", timeout_s=PATIENCE_S)
    assert status().state == "serving" and status().pid == server.process.pid and is_alive(status(), time.time())
    assert status().model == server.model and status().base_url == server.base_url

    def is_measured() -> bool:  # in the last seconds: asked for again, should they be over before that is seen
        assert len(server.complete(PROMPTS[0], max_tokens=200, ignore_eos=True, n=8, temperature=1.0)["choices"]) == 8
        return status().tokens_per_s > 0

    wait_for(is_measured, "the status to show tokens per second", timeout_s=PATIENCE_S)
    wait_for(lambda: status().num_running == 0, "the status to show that nothing runs", timeout_s=PATIENCE_S)
    assert all(name in server.get("/metrics").text for name in ("requests_running", "tokens_total"))
