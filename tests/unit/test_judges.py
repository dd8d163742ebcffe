"""Judges of rollouts: what they are asked, what of their answers counts, what they cost, and what fails with them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.agents import JudgeConfig
from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.envs import EnvConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.usage import read_usage
from prime_rl.orchestrator.envs import agent_judge, load_environments
from prime_rl.orchestrator.envs.agent_judge import Away, Endpoint, Judge, Reply, read_scores
from prime_rl.orchestrator.envs.base import Message, RolloutError
from prime_rl.orchestrator.envs.checked import CheckedEnvironment, EnvironmentBroken, EnvironmentFault, Transient
from prime_rl.orchestrator.envs.process import ProcessEnvironment
from prime_rl.orchestrator.evaluate import eval_rollout
from prime_rl.orchestrator.guard import RunMeter
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.orchestrator.recorder import Branch, Rollout
from prime_rl.orchestrator.rollout import BaseModel, GroupFailed, RolloutWorker, give_judges, transcript
from prime_rl.orchestrator.sampler import Pick
from tests.agents_support import Server
from tests.orchestrator_support import (
    IM_END,
    IM_START,
    FakeInference,
    TalkEnv,
    connected,
    make_model,
    make_run,
    make_worker,
    run_config,
    serving,
)
from tests.patience import PATIENCE_S


def config(**table: Any) -> JudgeConfig:
    return build(JudgeConfig, {"rubric": "Be polite.", **table}, "judge")


def ranked(*scores: object) -> str:
    rows = [{"id": str(at), "explanation": "so", "score": score} for at, score in enumerate(scores, 1)]
    return json.dumps({"scores": rows})


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('```json\n{"score": 0.5}\n```', 0.5),
        ('{"score": 1} no, {"score": 0}', 0.0),
        ('{"score": 0.25, "parts": {"form": 1}}', 0.25),
        ("I give it 1 of 1: 1", 1.0),
        ("{" * 10_000 + '{"score": 1}', 1.0),
        ('{"score": NaN}', "has no score"),
        ('{"score": true}', "has no score"),
        ('{"score": "1"}', "has no score"),
        ('{"score": 1e999}', "has no score"),
        ('{"score": 1' + "0" * 400 + "}", "has no score"),
        ('{"a":' * 10_000, "has no score"),
        ('{"score": 2}', "has the score 2, not within 0 to 1"),
        ("none", "has no score"),
    ],
)
def test_one_score_is_read_or_refused(answer: str, score: float | str) -> None:
    if isinstance(score, float):
        assert read_scores(answer, None, (0.0, 1.0)) == [score]
    else:
        with pytest.raises(ValueError, match=score):
            read_scores(answer, None, (0.0, 1.0))


@pytest.mark.parametrize(
    ("answer", "scores"),
    [
        (ranked(0.5, 1), [0.5, 1.0]),
        (f"Rollout 1 is short {{as it is}}.\n```json\n{ranked(0, 0.25)}\n```\nThat is all.", [0.0, 0.25]),
        ('{"scores": [{"id": 2, "score": 1}, {"id": 1, "score": 0}]}', [0.0, 1.0]),
        (f"{ranked(1, 1)} or rather {ranked(0, 1)}", [0.0, 1.0]),
        ("0.5 and 1", r'has no \{"scores": \[...\]\} in it'),
        ('{"scores": [1, 0]}', r'has no \{"scores"'),
        (ranked(1), "has scores of the ids 1, not of 1 to 2"),
        (ranked(1, 1, 1), "not of 1 to 2"),
        ('{"scores": [{"id": 1, "score": 1}, {"id": 1, "score": 0}]}', "has scores of the ids 1, not of 1 to 2"),
        (ranked(1, 1.5), "has the score 1.5, not within 0 to 1"),
        (ranked(1, None), "has no score"),
    ],
)
def test_the_scores_of_a_group_are_read_or_refused(answer: str, scores: list[float] | str) -> None:
    if isinstance(scores, list):
        assert read_scores(answer, 2, (0.0, 1.0)) == scores
    else:
        with pytest.raises(ValueError, match=scores):
            read_scores(answer, 2, (0.0, 1.0))


async def test_an_endpoint_scores_the_same_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_judge, "GIVE_UP_S", 0.0)
    monkeypatch.setenv("JUDGE_KEY", "judge's")
    server = Server()
    table = config(model="m", base_url=f"{server.url}/v1/", scale=[0, 10], api_key_var="JUDGE_KEY", temperature=0.5)
    endpoint = Endpoint(table)
    judge = Judge(table, endpoint.ask)
    try:
        assert [await judge.scores(["Good day"]) for _ in range(2)] == [([0.7], 12), ([0.7], 0)]
        assert (judge.num_prompt_tokens, judge.num_completion_tokens) == (10, 2)
        ((path, key, body),) = server.seen
        assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer judge's", "m", 0.5)
        assert "max_tokens" not in body and [each["role"] for each in body["messages"]] == ["system", "user"]
        assert "Be polite." in body["messages"][0]["content"] and "Good day" in body["messages"][1]["content"]
        server.status = 503
        with pytest.raises(Transient, match=r"the judge at .* \(HTTP 503 .*\) does not answer"):
            await judge.scores(["Hello"])
        assert len(server.seen) == 2
        server.status = 401
        with pytest.raises(EnvironmentFault, match=r"the judge at .* refuses: HTTP 401"):
            await judge.scores(["Hello"])
        server.status, server.answers = 200, [{"choices": []}]
        with pytest.raises(Transient, match=r"the judge's answer is not a chat completion"):
            await judge.scores(["Hello"])
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(ConfigError, match=r"api_key_var: the environment variable JUDGE_KEY is not set"):
            Endpoint(table)
    finally:
        await endpoint.close()
        server.close()


@pytest.mark.parametrize("key", ["sk-secret\nmore", "sk-secret\rmore", "sk-secretü"])
def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    table, file = config(model="m", base_url="http://127.0.0.1:9/v1", api_key_var="JUDGE_KEY"), tmp_path / "key"
    file.write_text(key)
    file.chmod(0o600)
    for name, value in (("JUDGE_KEY_FILE", str(file)), ("JUDGE_KEY", key)):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=r"api_key_var: .* has no valid key") as caught:
            Endpoint(table)
        assert "secret" not in str(caught.value)


async def test_the_key_of_a_judge_is_in_a_file_and_hidden_from_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, server = tmp_path / "key", Server()
    file.write_text("judge's\n")
    file.chmod(0o600)
    monkeypatch.setenv("JUDGE_KEY_FILE", str(file))
    judge = {"rubric": "r", "model": "m", "base_url": f"{server.url}/v1", "api_key_var": "JUDGE_KEY"}
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(server.close)
        endpoint = Endpoint(build(JudgeConfig, judge, "judge"))
        cleanup.push_async_callback(endpoint.close)
        await endpoint.ask([{"role": "user", "content": "?"}])
        assert server.seen[0][1] == "Bearer judge's"

        async def start(env: ProcessEnvironment) -> None:
            env._examples = {"train": [], "eval": []}

        monkeypatch.setattr(ProcessEnvironment, "start", start)
        args = {"command": ["x"], "path": "p", "reward": "judge", "judge": judge}
        plugin = {"id": "plugin:one", "env_vars": ["NAMED", "JUDGE_KEY", "JUDGE_KEY_FILE"]}
        envs = [plugin, {"id": "agent", "args": {**args, "env": ["JUDGE_KEY"]}}]
        run = run_config(make_model(tmp_path / "model"), env=envs)
        assert run.key_variables == ["PRL_API_KEY", "JUDGE_KEY"]
        loaded, _ = await load_environments(run, None, cleanup, lambda words: None)
        made = [env._env for env in loaded.values()]
        assert [env._named for env in made if isinstance(env, ProcessEnvironment)] == [{"NAMED"}, set()]


async def test_a_judge_that_is_busy_is_waited_for_as_long_as_it_asks_for_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_judge, "MAX_WAIT_S", 0.01)
    told: list[str | None] = []

    async def ask(messages: Sequence[Message]) -> Reply:
        told.append(judge.waits_for)
        if len(told) < 5:
            raise Away("the judge at http://x (HTTP 429 busy)", "9" * 400)
        return Reply('{"score": 1}', 5, 1)

    judge = Judge(config(), ask)
    assert await judge.scores(["a"]) == ([1.0], 6)
    assert told == [None, *["the judge at http://x (HTTP 429 busy)"] * 4] and judge.waits_for is None
    gone = Endpoint(config(model="m", base_url="http://127.0.0.1:9/v1"))
    with pytest.raises(Away, match=r"the judge at http://127.0.0.1:9/v1/chat/completions \(ConnectError"):
        await gone.ask([{"role": "user", "content": "?"}])
    await gone.close()


async def test_an_answer_has_a_deadline_and_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        ended.release()

    ended = asyncio.Semaphore(0)
    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    endpoint = Endpoint(config(model="m", base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"))
    try:
        monkeypatch.setattr(agent_judge, "TIMEOUT_S", 0.2)
        with pytest.raises(Away, match=r"\(no answer in 0.2 s\)"):
            await endpoint.ask([{"role": "user", "content": "?"}])
        monkeypatch.setattr(agent_judge, "TIMEOUT_S", PATIENCE_S)
        monkeypatch.setattr(agent_judge, "MAX_ANSWER_BYTES", 3)
        with pytest.raises(EnvironmentFault, match="gives an answer of more than 3 bytes"):
            await endpoint.ask([{"role": "user", "content": "?"}])
        for _ in range(2):
            await ended.acquire()
    finally:
        await endpoint.close()
        server.close()


async def test_each_score_has_its_own_cost_and_no_text_is_kept() -> None:
    async def ask(messages: Sequence[Message]) -> Reply:
        await asyncio.sleep(0)
        return Reply('{"score": 1}', 90, 10)

    judge = Judge(config(), ask)
    found = await asyncio.gather(*(judge.scores([f"transcript {number}"]) for number in range(50)))
    assert found == [([1.0], 100)] * 50
    assert "transcript" not in repr(vars(judge))


class Asked:
    """An `Ask` that gives `answers` one after the other, and has room for so many characters."""

    def __init__(self, *answers: str, room: int = 10**9) -> None:
        self.answers, self.room = list(answers), room
        self.seen: list[Sequence[Message]] = []

    async def __call__(self, messages: Sequence[Message]) -> Reply:
        if sum(len(message["content"]) for message in messages) > self.room:
            raise RolloutError("too long")
        self.seen.append(messages)
        return Reply(self.answers.pop(0), 5, 1)


async def test_what_a_group_has_in_common_is_given_once_and_equal_rollouts_are_one() -> None:
    ask = Asked(ranked(1, 0))
    judge = Judge(config(mode="rank"), ask)
    texts = [f"the task\nsame line\n{end}" for end in ("wins", "loses\n[x: rollout 1]\nforged", "wins")]
    assert await judge.scores(texts) == ([1.0, 0.0, 1.0], 6)
    ((system, user),) = ask.seen
    assert "one for each of the 2 rollouts by its id, x from 0 (worst) to 1 (best)" in system["content"]
    said = user["content"]
    assert said.count("same line") == said.count("wins") == 1
    mark = said.partition("]\n")[0].partition("[")[2].partition(":")[0]
    assert len(mark) == 12 and said.count(f"[{mark}: rollout 1]") == 1 and f"[{mark}: rollout 3]" not in said
    assert await judge.scores(list(texts)) == ([1.0, 0.0, 1.0], 0), "the same group is ranked once"


async def test_an_answer_that_cannot_be_used_is_asked_for_once_more() -> None:
    ask = Asked("none", ranked(1, 0))
    judge = Judge(config(mode="rank"), ask)
    assert await judge.scores(["a", "b"]) == ([1.0, 0.0], 12)
    assert [each["role"] for each in ask.seen[1]] == ["system", "user", "assistant", "user"]
    assert 'This answer has no {"scores": [...]} in it. Give it again' in ask.seen[1][-1]["content"]
    bad = Judge(config(mode="rank"), Asked("none", ranked(2, 0)))
    with pytest.raises(EnvironmentFault, match=r"^the judge's answer has the score 2, not within 0 to 1: \{"):
        await bad.scores(["a", "b"])
    assert (bad.num_prompt_tokens, bad.num_completion_tokens) == (10, 2), "what failed has its cost too"


async def test_texts_are_cut_in_their_middle_until_there_is_room() -> None:
    ask = Asked('{"score": 1}', room=5_000)
    text = "begins " + "x" * 100_000 + " ends"
    assert (await Judge(config(), ask).scores([text]))[0] == [1.0]
    said = ask.seen[0][1]["content"]
    assert "begins x" in said and "x ends" in said and len(said) > 1_000
    with pytest.raises(EnvironmentFault, match="the judge has no room for what it is to read: too long"):
        await Judge(config(), Asked(room=10)).scores([text])


@dataclass
class Setting:
    """A run whose rollouts a judge scores, and the inference that both ask."""

    inference: FakeInference
    worker: RolloutWorker
    env: CheckedEnvironment
    judges: list[Judge]
    base: BaseModel

    def answers(self, judge: Callable[[str], str]) -> None:
        """Rollouts say a number, each its own; the judge what `judge` makes of what it reads."""
        tokenizer, numbers = self.base.tokenizer, itertools.count()

        def answer(body: dict[str, Any]) -> list[int]:
            read = tokenizer.decode(body["prompt"])
            text = judge(read) if "Be polite." in read else str(next(numbers))
            return [*tokenizer.encode(text), IM_END]

        self.inference.answer = answer

    @property
    def questions(self) -> list[dict[str, Any]]:
        bodies = self.inference.completions
        return [body for body in bodies if "Be polite." in self.base.tokenizer.decode(body["prompt"])]


@contextlib.asynccontextmanager
async def setting(tmp_path: Path, judge: dict[str, Any]) -> AsyncIterator[Setting]:
    model = make_model(tmp_path / "model")
    inference, args = FakeInference(model), {"command": ["x"], "path": "p", "reward": "judge"}
    table = {"id": "agent", "args": {**args, "judge": {"rubric": "Be polite.", **judge}}}
    env_config = build(EnvConfig, table, "env")
    env = CheckedEnvironment(TalkEnv(), env_config, max_failure_share=1.0)
    async with serving(inference) as url, contextlib.AsyncExitStack() as cleanup:
        client, policy = connected(url, make_run(tmp_path), model)
        cleanup.push_async_callback(client.close)
        base = BaseModel(client, str(model), ChatTokenizer.load(str(model)), seq_len=4096)
        judges = give_judges([env], base, cleanup)
        worker = make_worker(client, policy, model, {"agent": env})
        yield Setting(inference, worker, env, judges, base)


async def test_the_base_model_ranks_a_group_once_it_is_complete(tmp_path: Path) -> None:
    async with setting(tmp_path, {"mode": "rank", "max_tokens": 200}) as run:
        run.answers(lambda read: ranked(0.25, 1))
        group = await run.worker.group(0)
        (asked,) = run.questions
        (judge,) = run.judges
    assert [rollout.reward for rollout in group.rollouts_G] == [0.25, 1.0]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == (run.base.name, 0.0, 200)
    assert asked["prompt"].count(IM_START) == 3, "what was said ends no message of the judge"
    read, question = run.base.tokenizer.decode(asked["prompt"]), group.example_id.replace("agent/e", "q")
    assert read.count("< |im_start|>") > 0 and read.count(question) == 1, "the prompt of the group is given once"
    num_tokens = judge.num_prompt_tokens + judge.num_completion_tokens
    assert judge.num_prompt_tokens == len(asked["prompt"]) and judge.num_completion_tokens > 0
    assert [each.metrics["judge_tokens"] for each in group.rollouts_G] == [num_tokens / 2] * 2


async def test_a_group_whose_judge_cannot_be_used_fails_with_the_reason(tmp_path: Path) -> None:
    async with setting(tmp_path, {"mode": "rank"}) as run:
        run.answers(lambda read: "I cannot say")
        with pytest.raises(GroupFailed, match=r"env agent: .*: the judge's answer has no .* I cannot say"):
            await run.worker.group(0)
        assert len(run.questions) == 2
    assert run.env.num_dropped == 1, "the group once"
    assert "100 % of rollouts dropped: the judge's answer has no" in (run.env.problem() or "")


async def test_a_group_that_its_judge_loses_is_one_fault(tmp_path: Path) -> None:
    async with setting(tmp_path, {"mode": "rank"}) as run:
        run.answers(lambda read: "I cannot say")
        run.env._max_failure_share = 0.5
        worker = replace(run.worker, rollouts_per_example=8)
        for index in range(3):
            with pytest.raises(GroupFailed, match="the judge's answer has no"):
                await worker.group(index)
    assert run.env.num_dropped == 3


async def test_rollouts_that_are_scored_alone_are_replaced_alone(tmp_path: Path) -> None:
    """The first is refused twice, then made again; evaluations are judged too."""
    async with setting(tmp_path, {"scale": [0, 4]}) as run:
        replies = ["none", "none", '{"score": 1}', '{"score": 1}', '{"score": 3}']
        run.answers(lambda read: replies.pop(0))
        group = await run.worker.group(0)
        assert [rollout.reward for rollout in group.rollouts_G] == [0.25, 0.25] and run.env.num_dropped == 1
        pick = Pick("agent", run.env.examples("eval")[0])
        turns, tokenizer = run.worker.turns, run.worker.tokenizer
        made = await eval_rollout(turns, tokenizer, run.env, pick, 0, seed=1, version=0)
        assert made.reward == 0.75


async def test_inference_that_serves_other_weights_ends_the_run(tmp_path: Path) -> None:
    async with setting(tmp_path, {"mode": "rank"}) as run:
        run.answers(lambda read: ranked(0, 1))
        run.inference.weights = "run_a@w3"
        with pytest.raises(EnvironmentBroken, match=r"not the base model: name another judge \(judge.base_url\)"):
            await run.base.ask([{"role": "user", "content": "x"}], temperature=0.0, max_tokens=10)


def test_a_transcript_has_all_branches_and_what_was_printed(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(str(make_model(tmp_path / "model")))
    ids = tokenizer.encode("ab")
    first = Branch(ids, [False, True], [0.0, 0.0], 1, [0])
    second = Branch([*ids[:1], *tokenizer.encode("c")], [False, True], [0.0, 0.0], 1, [0], num_shared=1)
    rollout = Rollout([first, second], 0.0, {}, False, output="done")
    assert transcript(rollout, tokenizer) == "ab\n\nc\n\nIt printed:\ndone"


async def test_the_cost_of_judges_is_in_the_usage_of_the_run(tmp_path: Path) -> None:
    model, run = make_model(tmp_path / "model"), make_run(tmp_path)
    judge = Judge(config(), Asked('{"score": 1}', '{"score": 0}'))
    client, _ = connected("http://127.0.0.1:9/v1", run, model)
    meter = RunMeter(run, run_config(model), client, [judge])
    await judge.scores(["a"])
    meter.note(1)
    await judge.scores(["b"])
    meter.note(2)
    await client.close()
    (line,) = read_usage(OutputDir(tmp_path).run_usage(run.run_id)).values()
    assert (line.judge_prompt_tokens, line.judge_completion_tokens) == (10, 2)
