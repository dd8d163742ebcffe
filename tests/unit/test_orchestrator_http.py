"""Tokenizer, client, policy versions and one rollout, over real HTTP against a server that can be broken."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prime_rl.configs.base import SamplingConfig
from prime_rl.contract.calls import Turn
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, StatusWriter
from prime_rl.orchestrator.client import (
    AccessDenied,
    AdapterRefused,
    CompletionRequest,
    Endpoint,
    InferenceError,
    InferenceUnavailable,
    RequestRefused,
    ScoreRequest,
    Scores,
    ServedModel,
    UnknownModel,
)
from prime_rl.orchestrator.envs.base import Example, Outcome, Policy
from prime_rl.orchestrator.policy import ChatTokenizer, TokenizerError
from prime_rl.orchestrator.pool import START_LIMIT, InferenceClient
from prime_rl.orchestrator.publication import find_base_model
from prime_rl.orchestrator.rollout import GroupFailed
from prime_rl.utils.process import ProcessId
from tests.orchestrator_support import (
    FIRST_BYTE,
    IM_END,
    FakeInference,
    TalkEnv,
    answers,
    make_client,
    make_model,
    make_policy,
    make_run,
    make_worker,
    publish,
    serving,
    until,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


# -- tokenizer ----


def test_prompt_ends_where_the_assistant_begins(model: Path) -> None:
    tokenizer = ChatTokenizer.load(str(model))
    ids = tokenizer.prompt((Turn("user", "hi"),))
    assert ids[0] == 1 and ids.count(IM_END) == 1  # special tokens are single ids
    assert tokenizer.decode(ids) == "user\nhi\nassistant\n"


def test_a_continuation_is_what_was_said_since(model: Path) -> None:
    tokenizer = ChatTokenizer.load(str(model))
    seen = [Turn("user", "hi"), Turn("assistant", "  trimmed by the template ")]
    ids = tokenizer.continuation([*seen, Turn("user", "more")], num_seen=2)
    assert ids[0] == IM_END
    assert tokenizer.decode(ids) == "\nuser\nmore\nassistant\n"


def test_templates_cannot_act(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(TokenizerError, match="refuses"):
        ChatTokenizer.load(str(model)).prompt((Turn("user", "hi"),))


def test_the_template_may_stand_in_the_tokenizer_config(model: Path) -> None:
    template = (model / "chat_template.jinja").read_text()
    expected = ChatTokenizer.load(str(model)).prompt((Turn("user", "x"),))
    (model / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    for form in (template, named):
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": form}))
        assert ChatTokenizer.load(str(model)).prompt((Turn("user", "x"),)) == expected
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="chat template not found"):
        ChatTokenizer.load(str(model))


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"nothing-here.*tokenizer\.json"):
        ChatTokenizer.load(str(tmp_path / "nothing-here"))


# -- client ----


async def sample(client: InferenceClient, model: str, seed: int = 3) -> list[int]:
    (completion,) = await client.complete(CompletionRequest(model, [5, 6], SamplingConfig(), 8, seed))
    return completion.token_ids


async def test_server_errors_are_tried_again_and_named_meanwhile(model: Path, tmp_path: Path) -> None:
    fake = FakeInference(model)
    statuses = [500, 503, 429]
    fake.fault = lambda path, body: statuses.pop(0) if statuses and path == "/v1/completions" else None
    async with serving(fake) as url:
        troubles: list[str | None] = []
        client = make_client(url, tmp_path, on_trouble=troubles.append, backoff_start_s=0.05)
        assert (await sample(client, str(model)))[-1] == IM_END
        await client.close()
    assert client.places.control.limit == START_LIMIT // 4, "halved at 503 and at 429"
    assert [trouble and trouble.split(": ")[1] for trouble in troubles] == [
        "500 injected 500",
        "503 injected 503",
        "429 injected 429",
        None,
    ]
    sent = {json.dumps(body, sort_keys=True) for body in fake.completions}
    assert len(sent) == 1  # the same request, seed and all


async def test_a_logprob_that_is_not_finite_is_the_fault_of_the_version_that_gave_it(
    model: Path, tmp_path: Path
) -> None:
    fake = FakeInference(model)
    fake.adapters["run_a@v3"], fake.logprob = "a folder", None
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        with pytest.raises(AdapterRefused, match=r"^run_a@v3: its log-probabilities are not finite"):
            await sample(client, "run_a@v3")
        with pytest.raises(InferenceError, match="returned an invalid logprob"):
            await sample(client, str(model))
        fake.weights = "run_a/broadcast/step_7"
        with pytest.raises(AdapterRefused, match=r"^run_a/broadcast/step_7: its log-probabilities"):
            await sample(client, str(model))
        await client.close()


async def score(client: InferenceClient, model: str, top_k: int = 2) -> Scores:
    async with client.places.hold(1):
        return await client.score(ScoreRequest(model, [50, 51, 52], top_k))


async def test_given_tokens_are_scored_in_the_form_of_vllm_and_tried_again(model: Path, tmp_path: Path) -> None:
    fake = FakeInference(model)
    statuses = [503, 429]
    fake.fault = lambda path, body: statuses.pop(0) if statuses and path == "/v1/completions" else None
    async with serving(fake) as url:
        client = make_client(url, tmp_path, backoff_start_s=0.05)
        scores = await score(client, str(model))
        assert scores.logprobs_T == [0.0, -9.0, -9.0] and scores.weights == "base"
        assert scores.top_T == [[], [(0, -1.0), (1, -2.0)], [(0, -1.0), (1, -2.0)]]
        assert (await score(client, str(model), 0)).top_T == []
        await client.close()
    expected = {"model": str(model), "prompt": [50, 51, 52], "prompt_logprobs": 2, "max_tokens": 1, "temperature": 0}
    assert fake.completions[:3] == [expected] * 3, "tried again as it is"
    assert client.places.control.limit == START_LIMIT // 4 and client.request_s == client.num_sampled_tokens == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([None, {"51": {"logprob": -1.0}}], "logprobs of 2 tokens, not 3"),
        ([], "logprobs of 0 tokens, not 3"),
        ([None, None, {"52": {"logprob": -1.0}}], "0 logprobs of a position, not token 51 and the likeliest 1"),
        ([None, {"7": {"logprob": -1.0}}, {"52": {"logprob": -1.0}}], "not token 51"),
        ([None, {"51": {"logprob": 0.1}}, {"52": {"logprob": -1.0}}], "invalid logprob"),
        ([None, {"x": {"logprob": -1.0}}, {"52": {"logprob": -1.0}}], "invalid answer"),
        ([None, {"51": {"logprob": "-1"}}, {"52": {"logprob": -1.0}}], "invalid answer"),
        (None, "invalid answer"),
    ],
)
async def test_scores_that_do_not_fit_the_tokens_are_refused(
    model: Path, tmp_path: Path, answer: Any, words: str
) -> None:
    fake = FakeInference(model)
    fake.score = lambda body: answer
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        with pytest.raises(InferenceError, match=words) as caught:
            await score(client, str(model), 1)
        assert type(caught.value) is InferenceError
        await client.close()


async def test_scores_that_are_not_finite_are_the_fault_of_the_adapter(model: Path, tmp_path: Path) -> None:
    fake = FakeInference(model)
    fake.score = lambda body: [None, *({str(each): {"logprob": None}} for each in body["prompt"][1:])]
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        for name in ("run_a@v3", "teacher/run_a@v1"):
            with pytest.raises(UnknownModel):
                await score(client, name)
            fake.adapters[name] = "a folder"
            with pytest.raises(AdapterRefused, match=f"^{name}: its log-probabilities are not finite"):
                await score(client, name, 0)
        with pytest.raises(InferenceError, match="returned an invalid logprob"):
            await score(client, str(model), 0)
        await client.close()


@pytest.mark.parametrize(("status", "kind"), [(400, RequestRefused), (404, UnknownModel), (401, AccessDenied)])
async def test_what_will_not_pass_is_raised_at_once(
    model: Path, tmp_path: Path, status: int, kind: type[Exception]
) -> None:
    fake = FakeInference(model)
    fake.fault = lambda path, body: status
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        with pytest.raises(kind, match=f"{status} injected"):
            await sample(client, str(model))
        await client.close()
    assert len(fake.requests) == 1


async def test_a_request_without_answer_is_given_up_at_its_deadline_and_tried_again(
    model: Path, tmp_path: Path
) -> None:
    fake = FakeInference(model)

    async def hang_once(body: object) -> None:
        if len(fake.requests) == 1:
            await asyncio.Event().wait()

    fake.gate = hang_once
    async with serving(fake) as url:
        troubles: list[str | None] = []
        # A try after the first must not reach it each time.
        client = make_client(url, tmp_path, timeout_s=0.5, on_trouble=troubles.append)
        assert await sample(client, str(model))
        await client.close()
    assert troubles[0] is not None and "no answer in 0.5 s" in troubles[0] and troubles[-1] is None
    assert client.places.control.limit <= START_LIMIT // 2


async def test_the_key_is_sent(model: Path, tmp_path: Path) -> None:
    fake = FakeInference(model)
    fake.api_key = "secret"
    async with serving(fake) as url:
        client = make_client(url, tmp_path, api_key="secret")
        assert await client.list_models() == [ServedModel(str(model))]
        await client.close()
        client = make_client(url, tmp_path)
        with pytest.raises(AccessDenied, match=r"client\.api_key_var"):
            await client.list_models()
        await client.close()


@pytest.mark.slow
async def test_without_a_base_url_the_server_is_found_again_at_its_new_address(model: Path, tmp_path: Path) -> None:
    fake = FakeInference(model)
    client = InferenceClient([Endpoint(tmp_path, None)], answers, backoff_start_s=0.01)
    waiting = asyncio.create_task(client.list_models())
    await until(lambda: client.trouble is not None, "the missing status file to be named")
    assert "inference/status.json (not found" in str(client.trouble)
    path = OutputDir(tmp_path).inference_status
    writer = StatusWriter(path, InferenceStatus(state="starting"))
    for _ in range(2):  # the second time at another port
        async with serving(fake) as url:
            writer.update(state="serving", base_url=url)
            assert await waiting
        waiting = asyncio.create_task(client.list_models())
        await until(lambda: "connection refused" in str(client.trouble), "the lost server to be named")
    writer.close(state="stopped")
    await until(lambda: "its state is 'stopped'" in str(client.trouble), "the stopped server to be named")
    waiting.cancel()
    await client.close()


def test_an_address_counts_as_long_as_the_process_that_wrote_it_runs(tmp_path: Path) -> None:
    path = OutputDir(tmp_path).inference_status
    path.parent.mkdir()
    status = InferenceStatus(state="serving", base_url="http://127.0.0.1:1/v1", updated_at=time.time())
    status.sign(ProcessId(2**22, 1.0))
    path.write_bytes(msgspec.json.encode(status))
    with pytest.raises(InferenceUnavailable, match="its server is not running"):
        Endpoint(tmp_path, None).url()
    status.sign(ProcessId.of(os.getpid()))
    status.updated_at -= 3600.0  # as when the clock was set since
    path.write_bytes(msgspec.json.encode(status))
    assert Endpoint(tmp_path, None).url() == "http://127.0.0.1:1/v1"


# -- policy versions ----


def test_the_base_model_is_found_by_name_or_by_folder(model: Path, tmp_path: Path) -> None:
    served = [ServedModel("base", str(model)), ServedModel("run_a@v1", str(tmp_path))]
    assert find_base_model("base", served) == "base"
    assert find_base_model(str(model.parent / "." / "model"), served) == "base"
    assert find_base_model("run_a@v1", served) is None
    assert find_base_model("other", served) is None
    namesake = tmp_path / "elsewhere" / model.name
    namesake.mkdir(parents=True)
    assert find_base_model(str(namesake), served) is None


async def test_a_version_goes_when_it_is_neither_current_nor_in_use(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fake = FakeInference(model)
    for version in (1, 2, 3):
        publish(run, version)
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        policy = make_policy(client, run, model)
        await policy.switch_to(1)
        with policy.use() as (version, name):
            assert (version, name) == (1, "run_a@v1")
            await policy.switch_to(2)
            with policy.use() as (newer, _):
                assert newer == 2
            await policy.switch_to(3)
            await until(lambda: "run_a@v2" not in fake.adapters, "version 2 to be unloaded")
            assert set(fake.adapters) == {"run_a@v1", "run_a@v3"}
        await until(lambda: set(fake.adapters) == {"run_a@v3"}, "version 1 to be unloaded")
        await policy.close()
        assert fake.adapters == {}
        await client.close()


async def test_leftovers_of_a_killed_orchestrator_go_and_those_of_others_stay(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fake = FakeInference(model)
    fake.adapters = {"run_a@v4": "x", "run_ab@v4": "y"}
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        await make_policy(client, run, model).begin()
        await client.close()
    assert set(fake.adapters) == {"run_ab@v4"}


# -- one rollout ----


async def test_turns_continue_the_same_tokens_and_only_sampled_ones_count(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fake = FakeInference(model)
    publish(run, 1)
    env = TalkEnv(num_turns=2)
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        policy = make_policy(client, run, model)
        worker = make_worker(client, policy, model, {"talk": env}, rollouts_per_example=1)

        async def switch_after_the_first(body: object) -> None:
            if policy.version == 0 and len(fake.requests) == 1:
                asyncio.get_running_loop().create_task(policy.switch_to(1))
                await until(lambda: policy.version == 1, "the switch")

        fake.gate = switch_after_the_first
        (rollout,) = (await worker.group(0)).rollouts_G
        await policy.close()
        await client.close()
    first, second = fake.completions
    assert (first["model"], second["model"]) == (str(model), "run_a@v1")
    assert second["seed"] != first["seed"]
    ids, mask = rollout.branches[0].token_ids_T, rollout.branches[0].loss_mask_T
    n = len(first["prompt"])
    assert ids[:n] == first["prompt"] and ids[: len(second["prompt"])] == second["prompt"]
    assert ids[n : n + 3] == [FIRST_BYTE + 0, ids[n + 1], IM_END]  # version 0, and its end of turn only once
    assert ids[n + 3] != IM_END
    assert [i for i, loss in enumerate(mask) if loss] == [n, n + 1, n + 2, *range(len(ids) - 3, len(ids))]
    assert [p for p, loss in zip(rollout.branches[0].logprobs_T, mask, strict=True) if loss] == [-0.5] * 6
    assert {p for p, loss in zip(rollout.branches[0].logprobs_T, mask, strict=True) if not loss} == {0.0}
    assert (rollout.turn_versions, rollout.num_prompt_tokens, rollout.truncated) == ([0, 1], n, False)


async def test_a_turn_that_was_cut_gets_its_end_appended_but_not_learned(model: Path, tmp_path: Path) -> None:
    fake = FakeInference(model)
    env = TalkEnv(num_turns=2)
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        policy = make_policy(client, make_run(tmp_path), model)
        worker = make_worker(client, policy, model, {"talk": env}, rollouts_per_example=1, max_tokens=2)
        (rollout,) = (await worker.group(0)).rollouts_G
        await client.close()
    n = rollout.num_prompt_tokens
    assert rollout.branches[0].token_ids_T[n + 2] == IM_END and not rollout.branches[0].loss_mask_T[n + 2]
    assert rollout.truncated and rollout.num_completion_tokens == 4


async def test_rollouts_are_reproducible_and_differ_within_a_group(model: Path, tmp_path: Path) -> None:
    fake = FakeInference(model)
    env = TalkEnv(num_turns=2)
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        policy = make_policy(client, make_run(tmp_path), model)
        workers = [make_worker(client, policy, model, {"talk": env}, rollouts_per_example=3) for _ in range(2)]
        groups = [await worker.group(5) for worker in workers]
        await client.close()
    assert groups[0] == groups[1]
    assert len({tuple(rollout.branches[0].token_ids_T) for rollout in groups[0].rollouts_G}) == 3
    # The shared first turn is one request for all, later turns are one each.
    bodies = [(body["n"], body["seed"]) for body in fake.completions]
    assert [n for n, _ in bodies] == [3, 1, 1, 1] * 2
    assert len({seed for _, seed in bodies}) == 4


async def test_rollouts_whose_first_prompts_differ_do_not_share_a_request(model: Path, tmp_path: Path) -> None:
    class Moody(TalkEnv):
        async def rollout(self, example: Example, policy: Policy) -> Outcome:
            self.answers.append("")
            mood = {"role": "system", "content": f"mood {len(self.answers)}"}
            await policy.complete([mood, *example.messages])  # type: ignore[list-item]
            return Outcome(0.0)

    fake = FakeInference(model)
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        policy = make_policy(client, make_run(tmp_path), model)
        worker = make_worker(client, policy, model, {"talk": Moody()}, rollouts_per_example=3)
        group = await worker.group(0)
        await client.close()
    bodies = fake.completions
    prompts = [rollout.branches[0].token_ids_T[: rollout.num_prompt_tokens] for rollout in group.rollouts_G]
    assert sorted(prompts) == sorted(body["prompt"] for body in bodies)
    assert len(bodies) == 3


@pytest.mark.parametrize(
    ("env", "seq_len", "message"),
    [
        (TalkEnv(num_turns=0), 256, "without asking the policy"),
        (TalkEnv(), 20, "leave no room in seq_len = 20"),
        (TalkEnv(on_rollout=lambda example: {}["no such key"]), 256, "KeyError: 'no such key'"),
    ],
)
async def test_a_rollout_that_comes_to_nothing_fails_its_group(
    model: Path, tmp_path: Path, env: TalkEnv, seq_len: int, message: str
) -> None:
    async with serving(FakeInference(model)) as url:
        client = make_client(url, tmp_path)
        policy = make_policy(client, make_run(tmp_path), model)
        with pytest.raises(GroupFailed, match=message):
            await make_worker(client, policy, model, {"talk": env}, seq_len=seq_len).group(0)
        await client.close()


async def test_adapters_that_a_restarted_server_lost_are_loaded_again(model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    publish(run, 1)
    fake = FakeInference(model)
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        policy = make_policy(client, run, model)
        await policy.switch_to(1)
        fake.adapters.clear()
        worker = make_worker(client, policy, model, {"talk": TalkEnv()})
        groups = await asyncio.gather(*(worker.group(index) for index in range(8)))
        await policy.close()
        await client.close()
    assert {group.oldest_version for group in groups} == {1}
    assert fake.num_unknown > 1 and fake.num_loads == 2  # several requests missed it, one load brought it back


async def test_a_server_that_never_has_the_model_fails_the_group(model: Path, tmp_path: Path) -> None:
    fake = FakeInference(model)
    fake.fault = lambda path, body: 404 if path == "/v1/completions" else None
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        policy = make_policy(client, make_run(tmp_path), model)
        with pytest.raises(GroupFailed, match="injected 404"):
            await make_worker(client, policy, model, {"talk": TalkEnv()}).group(0)
        await client.close()
