"""What a rollout records, against what the inference server was asked and answered, over real HTTP.

The tokenizer has merges and the server answers byte by byte, so text that is tokenised again has other tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from prime_rl.configs.base import SamplingConfig
from prime_rl.contract.calls import Answer, Call, ToolCall, Turn
from prime_rl.contract.types import MAX_BRANCHES, sample_bytes
from prime_rl.orchestrator.envs.base import Example, Outcome, Policy, RolloutError, Split
from prime_rl.orchestrator.policy import ChatTokenizer, PolicyVersions, TooLong, TurnSampler
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.recorder import PolicySession, Rollout
from prime_rl.orchestrator.rollout import GroupFailed
from tests.budgets import examples
from tests.orchestrator_support import (
    CHATML,
    IM_END,
    FakeInference,
    make_client,
    make_model,
    make_policy,
    make_run,
    make_worker,
    publish,
    serving,
)

SEQ_LEN = 1 << 17
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
NATIVE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen3's: of a turn before the last question only what was said is shown.
THINKING = NATIVE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
TEMPLATES = {"plain": CHATML, "native": NATIVE, "thinking": THINKING}
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": "x y"}}\n</tool_call>'
TEXTS = (
    "hello",
    "  the letters\n ",
    "",
    "Grüße, 漢字 🎉",
    ADD % 1,
    "I add. " + ADD % 2 + "\n" + ADD % 3,
    '<tool_call>{"name": "add", "arguments": ""}</tool_call>',
    "<tool_call>{broken",
    "<think>hello there</think>\n\nhello",
    "<think>so</think>" + ADD % 4,
    "a STOP b",
)


@dataclass
class Bench:
    """A session, the server that it asks, and what a client has of both."""

    fake: FakeInference
    tokenizer: ChatTokenizer
    session: PolicySession
    policy: PolicyVersions
    publish: Callable[[int], None]
    # What was asked with each answer, in the order in which they came.
    answers: list[tuple[Call, Answer]] = field(default_factory=list)
    # The answers that a later call goes on from.
    parents: set[int] = field(default_factory=set)

    async def ask(self, call: Call) -> Answer:
        answer = await self.session.call(call)
        self.answers.append((call, answer))
        return answer

    def prompt_of(self, answer: Answer) -> list[int]:
        """The tokens that the server was asked with."""
        wanted = answer.num_prompt_tokens, answer.token_ids, answer.logprobs
        found = {
            tuple(body["prompt"])
            for body, choice in self.fake.answered
            if (len(body["prompt"]), choice["token_ids"], choice["logprobs"]["token_logprobs"]) == wanted
        }
        (prompt,) = found  # of several calls that were answered alike, all that were asked the same
        return list(prompt)

    def finish(self, advantages: bool = True) -> Rollout:
        values = tuple(float(number) for number in range(1, len(self.answers) + 1))
        return self.session.finished(Outcome(1.0, advantages=values if advantages else ()))


def odd_model(folder: Path, template: str) -> Path:
    """Its tokenizer joins some letters; the server's answers have them apart."""
    model = make_model(folder)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    vocab, merges = tokenizer.get_vocab(), [("h", "e"), ("l", "l"), ("t", "h"), ("Ġ", "t"), ("a", "d"), ("he", "ll")]
    vocab |= {"".join(pair): len(vocab) + number for number, pair in enumerate(merges)}
    tokenizer.model = models.BPE(vocab=vocab, merges=merges)
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(template)
    return model


class World:
    """One server and one event loop for all that is tried with one template."""

    def __init__(self, runner: asyncio.Runner, folder: Path, template: str) -> None:
        self.run = runner.run
        self.model = odd_model(folder / "model", template)
        self.fake = FakeInference(self.model)
        self.fake.answer = self._answer
        self.tokenizer = ChatTokenizer.load(str(self.model))
        self._plain = Tokenizer.from_file(str(make_model(folder / "plain") / "tokenizer.json"))
        self._folder, self._serving = folder, serving(self.fake)
        self._client: InferenceClient = make_client(runner.run(self._serving.__aenter__()), folder)
        self.texts: Sequence[str] = TEXTS
        self._number = 0

    def close(self) -> None:
        self.run(self._client.close())
        self.run(self._serving.__aexit__(None, None, None))

    def _answer(self, body: dict[str, Any]) -> list[int]:
        text = random.Random(body["seed"]).choice(self.texts)
        return [*self._plain.encode(text).ids, IM_END]

    def bench(self, seed: int = 1, **more: Any) -> Bench:
        self._number += 1
        self.fake.answered.clear()
        run = make_run(self._folder, f"run_{self._number}")
        policy = make_policy(self._client, run, self.model)
        turns = TurnSampler(self._client, policy, SamplingConfig(max_tokens=2048), seq_len=SEQ_LEN)
        session = PolicySession(turns, self.tokenizer, seed=seed, **more)
        return Bench(self.fake, self.tokenizer, session, policy, lambda version: publish(run, version))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(params=TEMPLATES)
def world(request: pytest.FixtureRequest, runner: asyncio.Runner, tmp_path: Path) -> Iterator[World]:
    world = World(runner, tmp_path, TEMPLATES[request.param])
    yield world
    world.close()


@pytest.fixture
def native(runner: asyncio.Runner, tmp_path: Path) -> Iterator[World]:
    world = World(runner, tmp_path, NATIVE)
    yield world
    world.close()


def user(text: str) -> Turn:
    return Turn("user", text)


def replies(answer: Turn, text: str) -> list[Turn]:
    """What an agent says to an answer: results of its calls, and maybe more."""
    results = [Turn("tool", f"{text} {number}", call_id=call.id) for number, call in enumerate(answer.calls)]
    return results or [user(text)]


# -- what is recorded ----


def check_recorded(bench: Bench, rollout: Rollout) -> None:
    """Each sampled token has a loss once, behind what the server was asked with; and what follows from that."""
    found = []
    for branch in rollout.branches:
        spans = loss_spans(branch.loss_mask_T)
        assert len(spans) == len(branch.turn_versions)
        for (start, end), version in zip(spans, branch.turn_versions, strict=True):
            values = branch.token_advantages_T[start:end]
            (value,) = set(values)
            ids = branch.token_ids_T
            found.append((value, ids[:start], ids[start:end], branch.logprobs_T[start:end], version))
        beside = [p for p, loss in zip(branch.logprobs_T, branch.loss_mask_T, strict=True) if not loss]
        assert not any(beside) and not any(
            value for value, loss in zip(branch.token_advantages_T, branch.loss_mask_T, strict=True) if not loss
        )
        first = branch.loss_mask_T.index(True)
        earlier = rollout.branches[: rollout.branches.index(branch)]
        alike = [num_alike(branch.token_ids_T[:first], each.token_ids_T) for each in earlier]
        assert branch.num_shared == max(alike, default=0)
        assert not branch.num_shared or alike[branch.shared_with] == branch.num_shared
    wanted = [
        (float(number), bench.prompt_of(answer), answer.token_ids, answer.logprobs, answer.version)
        for number, (_, answer) in enumerate(bench.answers, 1)
    ]
    assert sorted(found) == wanted
    assert len(bench.fake.answered) == len(bench.answers)
    assert rollout.oldest_version == min(answer.version for _, answer in bench.answers)
    assert rollout.num_completion_tokens == sum(bench.session.answer_lens)
    assert bench.session.answer_lens == [len(answer.token_ids) for _, answer in bench.answers]
    for _, answer in bench.answers:
        assert answer.num_prompt_tokens == len(bench.prompt_of(answer))
    ids = [call.id for _, answer in bench.answers for call in answer.turn.calls]
    assert len(set(ids)) == len(ids)


def loss_spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    edges = [at for at, (a, b) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def said(turns: Sequence[Turn], tools: Sequence[Any]) -> str:
    """What two histories that say the same have in common."""
    plain = [[t.role, t.content.strip(), [[c.name, json.loads(c.arguments or "{}")] for c in t.calls]] for t in turns]
    return json.dumps([tools, plain], sort_keys=True)


def parent_of(bench: Bench, before: Sequence[tuple[Call, Answer]], call: Call) -> int | None:
    """Which answer `call` goes on from: that of the longest history that agrees, the newest of equals."""
    if not call.messages:
        known = [
            (asked.prompt + bench.tokenizer.decode(answer.token_ids), number)
            for number, (asked, answer) in enumerate(before)
            if not asked.messages and (answer.stop is not None or answer.finish == "length")
        ]
        found = [(text, number) for text, number in known if call.prompt.startswith(text) and call.prompt != text]
        return max(found, key=lambda each: (len(each[0]), each[1]), default=("", None))[1]
    for num in range(len(call.messages), 0, -1):
        history = said(call.messages[:num], call.tools)
        for number, (asked, answer) in reversed(list(enumerate(before))):
            if asked.messages and said((*asked.messages, answer.turn), asked.tools) == history:
                return number
    return None


def check_goes_on(bench: Bench, parent: int | None, call: Call, answer: Answer) -> None:
    """The request begins with the tokens of what it goes on from; only what is new is made into tokens."""
    asked, fresh = bench.prompt_of(answer), bench.tokenizer.encode(call.prompt)
    if call.messages:
        fresh = bench.tokenizer.prompt(call.messages, call.tools)
    if parent is None:
        assert asked == fresh
        return
    bench.parents.add(parent)
    _, last = bench.answers[parent]
    before = [*bench.prompt_of(last), *last.token_ids]
    assert asked[: len(before)] == before
    new = bench.tokenizer.decode(asked[len(before) :], special=True)
    assert new and bench.tokenizer.decode(fresh, special=True).endswith(new)
    if call.messages:
        has_end = last.token_ids[-1] == IM_END
        assert new.startswith("\n<|im_start|>" if has_end else "<|im_end|>\n<|im_start|>")


# -- by chance ----

TEXT = st.sampled_from(["hello", "the other", " tell \n", "Grüße", ""])
# What an agent makes of an assistant turn that still says the same, and what says something else.
SAME: dict[str, Callable[[Turn], Turn]] = {
    "as it was": lambda turn: turn,
    "stripped": lambda turn: msgspec.structs.replace(turn, content=turn.content.strip()),
    "thought dropped": lambda turn: msgspec.structs.replace(turn, reasoning=""),
    "respaced": lambda turn: with_arguments(turn, lambda text: json.dumps(json.loads(text or "{}"), indent=3)),
    "no arguments": lambda turn: with_arguments(turn, lambda text: "" if text == "{}" else text),
    "other ids": lambda turn: msgspec.structs.replace(
        turn, calls=tuple(ToolCall(f"x{call.id}", call.name, call.arguments) for call in turn.calls)
    ),
}
OTHER: dict[str, Callable[[Turn], Turn]] = {
    "rewritten": lambda turn: msgspec.structs.replace(turn, content=f"{turn.content} </code>"),
    "calls as text": lambda turn: Turn("assistant", f"Calling tools: {turn.calls}"),
    "other arguments": lambda turn: with_arguments(turn, lambda text: '{"a": 77}'),
}


def with_arguments(turn: Turn, change: Callable[[str], str]) -> Turn:
    return msgspec.structs.replace(
        turn, calls=tuple(ToolCall(call.id, call.name, change(call.arguments)) for call in turn.calls)
    )


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "kind": draw(
            st.sampled_from(["go on"] * 6 + ["drop", "edit", "anew", "again", "text", "more text", "version"])
        ),
        "of": draw(st.integers(0, 99)),
        "changes": draw(st.lists(st.sampled_from([*SAME, *OTHER]), min_size=3, max_size=3)),
        "is_changed": draw(st.integers(0, 3)) == 0,
        "text": draw(TEXT),
        "tools": draw(st.sampled_from([(), (TOOL,)])),
        "num_parallel": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "max_tokens": draw(st.sampled_from([None, None, None, 1, 9])),
        "stop": draw(st.sampled_from([(), (), ("STOP",)])),
    }


def next_call(bench: Bench, step: dict[str, Any]) -> Call:
    """What an agent asks next, of what it knows."""
    known = [(call, answer) for call, answer in bench.answers if bool(call.messages) == (step["kind"] != "more text")]
    limits = {"max_tokens": step["max_tokens"], "stop": step["stop"]}
    if step["kind"] == "text" or (step["kind"] == "more text" and not known):
        return Call(prompt=f"once {step['text']}", **limits)
    if step["kind"] == "anew" or not known:
        return Call((Turn("system", "Be brief."), user(step["text"])), tools=step["tools"], **limits)
    call, answer = known[step["of"] % len(known)]
    if step["kind"] == "more text":
        return Call(prompt=f"{call.prompt}{answer.turn.content}{answer.stop or ''} {step['text']}!", **limits)
    messages = [*call.messages, answer.turn, *replies(answer.turn, step["text"])]
    if step["kind"] == "again":
        messages = list(call.messages)
    elif step["kind"] == "drop":
        messages = [*call.messages, user("that cannot be read")]
    elif step["kind"] == "edit":
        messages[step["of"] % len(call.messages)] = user("edited")
    changes = iter(step["changes"])
    for at, turn in enumerate(messages):
        if turn.role == "assistant" and (name := next(changes, None)):
            change = SAME.get(name) or (OTHER[name] if step["is_changed"] else SAME["as it was"])
            messages[at] = change(turn)
    return Call(tuple(messages), tools=call.tools, **limits)


async def follow(bench: Bench, script: Sequence[dict[str, Any]]) -> None:
    for step in script:
        if step["kind"] == "version":
            bench.publish(bench.policy.version + 1)
            await bench.policy.switch_to(bench.policy.version + 1)
            continue
        call = next_call(bench, step)
        parent = parent_of(bench, bench.answers, call)
        for answer in await asyncio.gather(*(bench.ask(call) for _ in range(step["num_parallel"]))):
            check_goes_on(bench, parent, call, answer)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(script=st.lists(steps(), min_size=1, max_size=10), seed=st.integers(0, 2**31 - 1))
def test_every_sampled_token_has_a_loss_once_behind_what_it_was_sampled_after(
    world: World, script: list[dict[str, Any]], seed: int
) -> None:
    bench = world.bench(seed)
    world.run(follow(bench, script))
    if bench.answers:
        rollout = bench.finish()
        check_recorded(bench, rollout)
        assert len(rollout.branches) == len(bench.answers) - len(bench.parents)
    else:
        with pytest.raises(RolloutError, match="without asking"):
            bench.finish()


# -- one by one ----

ALL_AT_ONCE = "<think>so it is</think>\n\n  I add it. " + ADD % 1 + "\n" + '<tool_call>{"name": "add"}</tool_call>'


async def three_turns(bench: Bench, change: Callable[[Turn], Turn]) -> tuple[Answer, Answer, Answer]:
    """The second call has the first answer as it was, the third has the second one changed."""
    opening = (Turn("system", "Be brief."), user("q"))
    first = await bench.ask(Call(opening, tools=(TOOL,)))
    seen = (*opening, first.turn, *replies(first.turn, "3"))
    second = await bench.ask(Call(seen, tools=(TOOL,)))
    third = await bench.ask(Call((*seen, change(second.turn), *replies(second.turn, "4")), tools=(TOOL,)))
    return first, second, third


@pytest.mark.parametrize("text", [ALL_AT_ONCE, "  the letters\n "], ids=["calls", "words"])
@pytest.mark.parametrize("name", SAME)
def test_a_turn_that_says_the_same_goes_on_from_its_tokens(
    runner: asyncio.Runner, tmp_path: Path, name: str, text: str
) -> None:
    world = World(runner, tmp_path, THINKING)
    world.texts = (text,)
    bench = world.bench()
    _, second, third = world.run(three_turns(bench, SAME[name]))
    if text == ALL_AT_ONCE:
        assert second.turn.reasoning == "so it is" and second.turn.content == "I add it."
        assert [call.arguments for call in second.turn.calls] == ['{"a": 1, "b": "x y"}', "{}"]
    (branch,) = bench.finish().branches
    tokens = [*bench.prompt_of(second), *second.token_ids]
    assert bench.prompt_of(third)[: len(tokens)] == tokens == branch.token_ids_T[: len(tokens)]
    new = bench.tokenizer.decode(bench.prompt_of(third)[len(tokens) :], special=True)
    assert new.startswith("\n<|im_start|>"), "the end of the turn is there once"
    world.close()


@pytest.mark.parametrize("name", OTHER)
def test_a_turn_that_came_back_changed_opens_a_branch_at_the_last_one_that_agrees(native: World, name: str) -> None:
    native.texts = (ADD % 1,)
    bench = native.bench()
    first, second, third = native.run(three_turns(bench, OTHER[name]))
    one, other = bench.finish().branches
    tokens = [*bench.prompt_of(first), *first.token_ids]
    assert bench.prompt_of(third)[: len(tokens)] == tokens
    assert len(loss_spans(one.loss_mask_T)) == 2 and len(loss_spans(other.loss_mask_T)) == 1
    assert other.num_shared >= len(tokens) and other.token_ids_T == [*bench.prompt_of(third), *third.token_ids]
    assert one.token_ids_T == [*bench.prompt_of(second), *second.token_ids]


def test_a_history_without_a_new_message_goes_on_too(native: World) -> None:
    native.texts = ("hello",)

    async def talk(bench: Bench) -> None:
        first = await bench.ask(Call((user("q"),)))
        await bench.ask(Call((user("q"), first.turn)))

    bench = native.bench()
    native.run(talk(bench))
    check_recorded(bench, bench.finish())
    assert len(bench.finish().branches) == 1


# It shows the last question and what follows.
FORGETS = NATIVE.replace("for m in messages", "for m in messages[-1:]")
REFUSES = NATIVE.replace("{{ m.content }}", "{{ raise_exception('no tools') if m.role == 'tool' else m.content }}")


def test_a_template_that_drops_earlier_turns_is_asked_for_all_again(runner: asyncio.Runner, tmp_path: Path) -> None:
    world = World(runner, tmp_path, FORGETS)
    world.texts = ("hello",)
    bench = world.bench()
    answers = world.run(three_turns(bench, SAME["as it was"]))
    rollout = bench.finish()
    check_recorded(bench, rollout)
    assert len(rollout.branches) == 3
    for answer, (call, _) in zip(answers, bench.answers, strict=True):
        assert bench.prompt_of(answer) == bench.tokenizer.prompt(call.messages, call.tools)
    world.close()


def test_what_the_template_refuses_is_refused_and_the_rest_stays(runner: asyncio.Runner, tmp_path: Path) -> None:
    world = World(runner, tmp_path, REFUSES)
    world.texts = (ADD % 1,)
    bench = world.bench()
    with pytest.raises(RolloutError, match="the chat template refuses the conversation: no tools"):
        world.run(three_turns(bench, SAME["as it was"]))
    check_recorded(bench, bench.finish())
    world.close()


DEEP = "[" * 5_000


@pytest.mark.parametrize("text", [DEEP, '{"a": ' * 990 + "1" + "}" * 990, '{"a": "\\ud800"}', "{", "NaN", "9" * 5000])
def test_arguments_that_are_no_json_are_compared_as_they_are(native: World, text: str) -> None:
    native.texts = ("hello",)
    asked = (user("q"), Turn("assistant", calls=(ToolCall("a", "add", text),)), Turn("tool", "3", call_id="a"))

    async def talk(bench: Bench) -> None:
        first = await bench.ask(Call(asked))
        await bench.ask(Call((*asked, first.turn, user("more"))))

    bench = native.bench()
    native.run(talk(bench))
    check_recorded(bench, bench.finish())
    assert len(bench.finish().branches) == 1


def test_tools_that_are_nested_without_end_and_an_empty_prompt_are_refused(native: World) -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    bench = native.bench()
    for call, problem in ((Call((user("q"),), tools=(deep,)), "too deeply"), (Call(), "the prompt is empty")):
        with pytest.raises(RolloutError, match=problem):
            native.run(bench.ask(call))
    assert not bench.fake.answered


def test_a_stop_that_is_a_special_token_takes_no_text_away(native: World) -> None:
    native.texts = ("hello<|endoftext|>",)
    answer = native.run(native.bench().ask(Call((user("q"),), stop=("<|endoftext|>",))))
    assert answer.turn.content == "hello"


@pytest.mark.parametrize("num_soft", [0, 20])
def test_a_rollout_has_room_for_so_many_branches_and_bytes(native: World, num_soft: int) -> None:
    native.texts = ("hello",)

    async def ask(bench: Bench, num: int) -> None:
        for _ in range(num):
            await bench.ask(Call((user("q"),)))

    bench = native.bench()
    native.run(ask(bench, 2))
    sizes = (len(bench.prompt_of(each)) + len(each.token_ids) for _, each in bench.answers)
    size = sum(sample_bytes(each, num_soft) for each in sizes)
    bench = native.bench(max_bytes=size, num_soft=num_soft)
    native.run(ask(bench, 2))
    with pytest.raises(TooLong, match="2 branches, as many as a batch has room for: lower max_turns"):
        native.run(ask(bench, 1))
    assert len(bench.finish().branches) == 2, "what was sampled before is trained on"
    bench = native.bench(max_bytes=size - 1, num_soft=num_soft)
    native.run(ask(bench, 2))  # its last answer is what there was no room for
    with pytest.raises(RolloutError, match=r"bytes of a batch, in which each rollout has [\d,]+: lower max_turns"):
        bench.finish()
    bench = native.bench()
    native.run(ask(bench, MAX_BRANCHES))
    with pytest.raises(TooLong, match="256 branches, as many as a batch has room for"):
        native.run(ask(bench, 1))
    assert len(bench.finish().branches) == MAX_BRANCHES


class Forks:
    """An environment that begins so many conversations in each of its rollouts, the numbers one after the other."""

    id = "forks"

    def __init__(self, *numbers: int) -> None:
        self._numbers = iter(numbers)
        self._example = Example("e", [{"role": "user", "content": "q"}], "")

    def examples(self, split: Split) -> list[Example]:
        return [self._example]

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        for number in range(next(self._numbers)):
            await policy.complete([{"role": "user", "content": f"q{number}"}])
        return Outcome(0.5)


async def test_a_rollout_that_no_batch_has_room_for_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path / "model")
    async with serving(FakeInference(model)) as url:
        client = make_client(url, tmp_path)
        policy = make_policy(client, make_run(tmp_path), model)
        settings: dict[str, Any] = {"rollouts_per_example": 1, "max_rollout_bytes": 2 * sample_bytes(64)}
        worker = make_worker(client, policy, model, {"forks": Forks(0, 9, 3, 2)}, **settings)
        (rollout,) = (await worker.group(0)).rollouts_G
        worker = make_worker(client, policy, model, {"forks": Forks(*[9] * 9)}, **settings)
        with pytest.raises(GroupFailed, match="RolloutError: its 9 branches take"):
            await worker.group(0)
        await client.close()
    assert len(rollout.branches) == 2
    for words in ("the environment ended without asking the policy", "its 9 branches take", "its 3 branches take"):
        assert f"env forks, e: rollout dropped: {words}" in caplog.text
