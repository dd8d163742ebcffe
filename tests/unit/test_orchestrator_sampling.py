"""What a run's `[sampling]` and `[env.prompt]` make of requests and of conversations."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from pathlib import Path
from typing import Any

import pytest

from daemons.chat import ChatSettings
from daemons.errors import WrongUseError
from prime_rl.configs.base import ConfigError, EvalSamplingConfig, SamplingConfig, build
from prime_rl.configs.envs import EnvConfig, PromptConfig, ShotConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import list_rollout_steps
from prime_rl.contract.served import RANGES
from prime_rl.contract.status import RunStatus, read_status
from prime_rl.orchestrator.envs.base import Message
from prime_rl.orchestrator.envs.checked import CheckedEnvironment
from prime_rl.orchestrator.guard import RunFailed
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.policy import ChatTokenizer, TokenizerError
from prime_rl.orchestrator.publication import check_temperature, warn_of_narrow_sampling
from prime_rl.orchestrator.recorder import as_turns
from tests.orchestrator_support import (
    FIRST_BYTE,
    FakeInference,
    TalkEnv,
    make_client,
    make_model,
    make_policy,
    make_run,
    make_worker,
    publish,
    run_config,
    serving,
    stand_in_trainer,
    until,
)
from tests.patience import PATIENCE_S

MINIMAL = {"batch_size": 8, "rollouts_per_example": 4, "model": {"name": "m"}, "env": [{"id": "reverse-text"}]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "STABLE").touch()  # the folder that all adapters are loaded from
    return make_model(tmp_path / "model")


def config_of(**changes: Any) -> OrchestratorConfig:
    return build(OrchestratorConfig, {**MINIMAL, **changes}, "orch.toml")


def test_a_request_says_what_is_set_and_nothing_else() -> None:
    assert SamplingConfig().request_fields == {"temperature": 1.0}
    fields = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "stop": ["\n\n"], "stop_token_ids": [7]}
    fields |= {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    given = SamplingConfig(
        **fields, max_tokens=9, min_tokens=2, seed=3, chat_template_kwargs={"enable_thinking": False}
    )
    assert given.request_fields == fields


def test_evaluations_sample_as_the_run_does_where_they_say_nothing() -> None:
    config = config_of(
        sampling={"top_p": 0.9, "top_k": 20, "stop": ["x"], "seed": 5},
        eval={"sampling": {"temperature": 0.0, "top_k": 0}},
    )
    sampling = config.eval_sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.0, 0.9, 0, ["x"])
    assert config.sampling_seed == 5 and config_of(seed=9).sampling_seed == 9


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sampling": {"min_tokens": 70}}, "min_tokens: found 70: must be at most max_tokens = 64"),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
        ({"sampling": {"stop": [""]}}, "sampling.stop"),
        ({"env": [{"id": "reverse-text", "prompt": {"template": "Reverse it"}}]}, "must contain {prompt}"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(**changes)
    assert problem in str(refused.value)


@pytest.mark.parametrize("kind", [SamplingConfig, EvalSamplingConfig, ChatSettings])
def test_runs_evaluations_and_chats_have_the_ranges_of_requests(kind: type) -> None:
    """So that nothing is accepted which inference refuses later."""
    names = RANGES.keys() & inspect.signature(kind).parameters.keys()
    assert {"temperature", "max_tokens"} <= names
    for name in names:
        limits = RANGES[name]
        for bad in (limits.lowest - 1, limits.lowest / 2, limits.highest * 2 + 1, math.nan):
            if limits.problem(bad):
                with pytest.raises((ValueError, WrongUseError), match=name):
                    kind(**{name: bad})
        for good in (limits.highest, max(limits.lowest, 0) if name == "seed" else limits.lowest):
            kind(**{name: good}, **({"max_tokens": good} if name == "min_tokens" and good else {}))


def test_a_run_is_told_which_settings_move_the_importance_ratio(caplog: pytest.LogCaptureFixture) -> None:
    for raw in (False, True):
        warn_of_narrow_sampling(SamplingConfig(temperature=0.5, stop=["x"], seed=1), raw=raw)
    assert not caplog.records
    for raw in (False, True):
        warn_of_narrow_sampling(SamplingConfig(top_p=0.9, frequency_penalty=0.1), raw=raw)
    processed, raw_too = (record.getMessage() for record in caplog.records)
    assert all("sampling.top_p, sampling.frequency_penalty: " in message for message in (processed, raw_too))
    assert "begin away from 1" in processed
    assert "raw_logprobs" in raw_too and "begin at 1 and do not correct for that" in raw_too


@pytest.mark.parametrize(("temperature", "raw", "fits"), [(1.0, True, True), (0.7, False, True), (0.7, True, False)])
def test_raw_logprobs_need_a_temperature_of_one(temperature: float, raw: bool, fits: bool) -> None:
    with contextlib.nullcontext() if fits else pytest.raises(RunFailed, match=r"temperature: found 0\.7.*raw_logprobs"):
        check_temperature(SamplingConfig(temperature=temperature), raw=raw)


@pytest.mark.parametrize("begins_as", ["processed_logprobs", None, "raw_logprobs"])
async def test_a_run_whose_server_has_raw_logprobs_of_another_temperature_ends(
    model: Path, tmp_path: Path, begins_as: str | None
) -> None:
    """Before its first rollout; or before the batch in which a restarted server has them."""
    run, fake = make_run(tmp_path), FakeInference(model)
    fake.logprobs_mode = begins_as
    changes = {"max_async_level": 0, "sampling": {"temperature": 0.7, "max_tokens": 8}}
    async with serving(fake) as url:
        config = run_config(model, **changes, client={"base_url": url})
        task = asyncio.create_task(run_to_the_end(config, run, lambda: False))
        if begins_as != "raw_logprobs":
            await until(lambda: list_rollout_steps(run) == [1], "the first batch")
            fake.logprobs_mode = "raw_logprobs"
            publish(run, 1)
        assert await asyncio.wait_for(task, PATIENCE_S) == 1
    status = read_status(run.status, RunStatus)
    assert status is not None and status.state == "failed"
    assert "sampling.temperature: found 0.7: must be 1" in (status.reason or "")
    assert list_rollout_steps(run) == ([] if begins_as == "raw_logprobs" else [1])
    assert bool(fake.completions) == (begins_as != "raw_logprobs")


async def test_a_run_trains_on_raw_logprobs_of_its_own_temperature(model: Path, tmp_path: Path) -> None:
    run, fake = make_run(tmp_path), FakeInference(model)
    fake.logprobs_mode = "raw_logprobs"
    async with serving(fake) as url:
        trainer = asyncio.create_task(stand_in_trainer(run))
        config = run_config(model, max_steps=1, client={"base_url": url})
        assert await asyncio.wait_for(run_to_the_end(config, run, lambda: False), PATIENCE_S) == 0
        trainer.cancel()
    assert list_rollout_steps(run) == [1]


async def test_every_setting_reaches_the_server_and_a_stop_text_is_learned_but_not_read(
    model: Path, tmp_path: Path
) -> None:
    fake, env = FakeInference(model), TalkEnv(num_turns=2)
    fake.letter = ord("Z")
    sampling = SamplingConfig(max_tokens=8, min_tokens=6, stop=["Z"], top_k=3, temperature=0.5)
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        policy = make_policy(client, make_run(tmp_path), model)
        worker = make_worker(client, policy, model, {"talk": env}, rollouts_per_example=1, sampling=sampling)
        (rollout,) = (await worker.group(0)).rollouts_G
        await client.close()
    first, second = fake.completions
    asked = {"temperature": 0.5, "top_k": 3, "stop": ["Z"], "min_tokens": 6, "max_tokens": 8}
    assert {name: first[name] for name in asked} == asked and "top_p" not in first
    n = rollout.num_prompt_tokens
    (branch,) = rollout.branches
    assert branch.token_ids_T[n : n + 2] == [FIRST_BYTE, FIRST_BYTE + ord("Z")] and all(branch.loss_mask_T[n : n + 2])
    assert not rollout.truncated
    assert len(env.answers) == 2 and not any("Z" in answer for answer in env.answers), "nor read by the environment"
    assert second["prompt"][: n + 2] == rollout.branches[0].token_ids_T[: n + 2]


def test_arguments_of_the_chat_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ 'think ' if enable_thinking else '' }}{{ messages[0].content }}")
    message: list[Message] = [{"role": "user", "content": "hi"}]
    for arguments, text in (({}, "hi"), ({"enable_thinking": True}, "think hi"), ({"enable_thinking": False}, "hi")):
        tokenizer = ChatTokenizer.load(str(model), arguments)
        assert tokenizer.decode(tokenizer.prompt(as_turns(message))) == text
    with pytest.raises(TokenizerError, match=r"sampling\.chat_template_kwargs: messages must not be set here"):
        ChatTokenizer.load(str(model), {"messages": []})


PROMPT = PromptConfig(system="Be brief.", template="Q: {prompt}\nA:", examples=[ShotConfig(prompt="1 + 1", answer="2")])
SHOWN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Q: 1 + 1\nA:"},
    {"role": "assistant", "content": "2"},
]


def test_a_question_comes_with_system_prompt_examples_and_template() -> None:
    question: list[Message] = [{"role": "user", "content": "2 + {x}"}]
    first = [*SHOWN, {"role": "user", "content": "Q: 2 + {x}\nA:"}]
    assert PROMPT.shown(question) == first
    assert PROMPT.shown([{"role": "system", "content": "its own"}, *question]) == first
    more: list[Message] = [{"role": "assistant", "content": "3"}, {"role": "user", "content": "no"}]
    assert PROMPT.shown([*question, *more]) == [*first, *more], "only the first question is put into the template"
    assert PromptConfig().shown([{"role": "system", "content": "its own"}, *question]) == [
        {"role": "system", "content": "its own"},
        *question,
    ]


async def test_an_environment_does_not_see_how_it_is_asked(model: Path, tmp_path: Path) -> None:
    fake, env = FakeInference(model), TalkEnv(num_turns=2)
    async with serving(fake) as url:
        client = make_client(url, tmp_path)
        policy = make_policy(client, make_run(tmp_path), model)
        asked = CheckedEnvironment(env, EnvConfig(id="plugin:talk", prompt=PROMPT), max_failure_share=1.0)
        worker = make_worker(client, policy, model, {"talk": asked}, rollouts_per_example=1)
        (rollout,) = (await worker.group(0)).rollouts_G
        await client.close()
    tokenizer = ChatTokenizer.load(str(model))
    text = tokenizer.decode(rollout.branches[0].token_ids_T)
    assert text.startswith("system\nBe brief.\nuser\nQ: 1 + 1\nA:\nassistant\n2\nuser\nQ: ")
    assert text.count("Q: ") == 2 and text.endswith("more 0\nassistant\n" + env.answers[-1])
