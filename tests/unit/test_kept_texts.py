"""The rollouts that a run keeps as texts to learn: which are written, and that they are what was sampled."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from daemons.cli import app
from daemons.errors import ActionError, WrongUseError
from daemons.kept_texts import TextExport, Wanted, choose, export_texts, lines_of
from prime_rl.configs.base import SamplingConfig
from prime_rl.configs.data import DataConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.calls import Call, ToolCall, Turn
from prime_rl.contract.layout import RunDir
from prime_rl.contract.samples import KeptSample, read_kept
from prime_rl.contract.types import read_batch
from prime_rl.gateway.texts import messages_of, read_texts
from prime_rl.orchestrator.envs.base import Outcome
from prime_rl.orchestrator.orchestrator import run_to_the_end
from prime_rl.orchestrator.policy import ChatTokenizer, TurnSampler
from prime_rl.orchestrator.recorder import PolicySession, Rollout
from prime_rl.orchestrator.texts import tokens_of
from tests.orchestrator_support import (
    IM_END,
    FakeInference,
    config_data,
    make_client,
    make_model,
    make_policy,
    make_run,
    serving,
    stand_in_trainer,
    write_toml,
)
from tests.patience import PATIENCE_S

ANSWERS = ["olleh", "Grüße, 漢字 🎉", "two\nlines", "a" * 40]


async def run_it(run: RunDir, fake: FakeInference, **over: Any) -> None:
    async with serving(fake) as url:
        more = {"client": {"base_url": url}, "batch_size": 8, "rollouts_per_example": 4, **over}
        write_toml(run, config_data(Path(fake.model), **more))
        trainer = asyncio.create_task(stand_in_trainer(run))
        try:
            config = load_run_config(run.orch_toml)
            assert await asyncio.wait_for(run_to_the_end(config, run, lambda: False), PATIENCE_S) == 0
        finally:
            trainer.cancel()


def tokens_in(path: Path, model: str) -> list[tuple[list[int], list[bool]]]:
    tokenizer = ChatTokenizer.load(model)
    texts = read_texts(path, DataConfig(path=str(path)))
    return [(each.ids_T, each.mask_T) for text in texts for each in tokens_of(text, tokenizer, "assistant")]


def sampled(ids: list[int], mask: list[bool]) -> list[int]:
    return [token for token, loss in zip(ids, mask, strict=True) if loss]


def beside(workspace: Path) -> Path:
    return workspace.with_name(f"{workspace.name}.jsonl")


async def test_what_is_exported_is_learned_as_it_was_sampled(tmp_path: Path) -> None:
    fake, run = FakeInference(make_model(tmp_path / "model")), make_run(tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    fake.answer = lambda body: [*plain.encode(ANSWERS[len(fake.answered) % 4]).ids, IM_END]
    await run_it(run, fake, samples={"per_step": 8}, ckpt={"keep_rollouts": True}, sampling={"max_tokens": 32})
    made = export_texts(tmp_path, "run_a", beside(tmp_path), Wanted())
    batches = [read_batch(run.rollout_file(step)).samples for step in (1, 2, 3)]
    whole = [(each.token_ids, each.loss_mask) for batch in batches for each in batch if each.token_ids[-1] == IM_END]
    found = tokens_in(beside(tmp_path), fake.model)
    unlike = {(tuple(ids), tuple(mask)) for ids, mask in whole}
    # Behind the end of its turn the template has a line break, which has no loss.
    assert {(tuple(ids[:-1]), tuple(mask[:-1])) for ids, mask in found} == unlike and not any(m[-1] for _, m in found)
    assert made.num_texts == len(found) == len(unlike) and made.num_rollouts == len(whole) == 18
    assert made.left_out == {"cut, or ended by a stop (--truncated takes them)": 6} and made.num_kept == 24
    more = export_texts(tmp_path, "run_a", beside(tmp_path), Wanted(truncated=True, first=2, last=2), force=True)
    assert (more.num_rollouts, more.num_kept, more.left_out) == (8, 8, {})
    (run.samples).write_text(run.samples.read_text() + "{not json\n")
    assert len(read_kept(run.samples)) == 24


def kept(reward: float, example: str = "a", step: int = 1, *said: str, **over: Any) -> KeptSample:
    messages = [{"role": role, "content": each} for role, each in zip(("user", "assistant") * 9, said, strict=False)]
    given = {"ended": True, "place": 0, "messages": messages or [*ASKED, {"role": "assistant", "content": "yes"}]}
    return KeptSample(step, "talk", example, "", "", reward, 0.0, [0], 9, 2, **{**given, **over})


ASKED = [{"role": "user", "content": "so?"}]


def test_rollouts_are_chosen_by_reward_step_and_example() -> None:
    rollouts = [
        [kept(0.5)],
        [kept(0.9)],
        [kept(0.9)],
        [kept(0.2, "b")],
        [kept(1.0, ended=False)],
        [kept(1, messages=[])],
    ]
    chosen, left_out = choose(rollouts, Wanted(best_of=True))
    assert chosen == [rollouts[1], rollouts[3]] and chosen[0] is rollouts[1], "of equals the first"
    assert sorted(left_out.values()) == [1, 1, 2]
    chosen, left_out = choose(rollouts, Wanted(min_reward=0.9, truncated=True))
    assert chosen == [rollouts[1], rollouts[2], rollouts[4]] and left_out["with a reward below 0.9"] == 2
    assert lines_of([kept(1.0, "a", 1, "q", "")]) == [], "an empty answer would be refused"
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "\ufffd"}}]}
    unclear = [[kept(1.0, "a", 1, "q", "\ufffd")], [kept(1.0, messages=[*ASKED, called])]]
    _, left_out = choose([*unclear, [kept(1.0, "a", 1, "\ufffd", "r")]], Wanted())
    assert left_out == {"with bytes that are no text": 2}, "as they would be other tokens"


@pytest.mark.parametrize("message", [{}, {"role": "assistant"}, {"role": "assistant", "content": 3}, {"role": []}])
def test_messages_of_another_form_are_left_out(message: dict[str, Any]) -> None:
    chosen, left_out = choose([[kept(1.0, messages=[*ASKED, message])], [kept(1.0)]], Wanted())
    assert len(chosen) == 1 and left_out == {"without what can be learned": 1}


def test_a_branch_with_which_another_begins_is_written_once() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    branches = [kept(1, "a", 1, "q", "one"), kept(1, "a", 1, "q", "two"), kept(1, "a", 1, "q", "one", "and?", "three")]
    assert [[each["content"] for each in line["messages"]] for line in lines_of(branches)] == [
        ["q", "two"],
        ["q", "one", "and?", "three"],
    ]
    (line,) = lines_of([kept(1, tools=tools)])
    assert line["tools"] == tools


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    write_toml(run, config_data(tmp_path / "model"))
    run.metrics.mkdir()
    return run


def put(run: RunDir, *samples: KeptSample) -> None:
    import msgspec

    lines = [json.dumps(msgspec.to_builtins(each)) for each in samples]
    run.samples.write_text('{"rewards": [1.0], "step": 1}\n' + "".join(f"{line}\n" for line in lines))


def test_nothing_is_written_where_nothing_qualifies_or_a_file_is_there(run: RunDir, tmp_path: Path) -> None:
    out = beside(tmp_path)
    with pytest.raises(ActionError, match="run_a has no rollouts: each batch adds some"):
        export_texts(tmp_path, "run_a", out, Wanted())
    write_toml(run, config_data(tmp_path / "model", samples={"per_step": 0}))
    with pytest.raises(ActionError, match=r"samples\.per_step is 0, so none are kept"):
        export_texts(tmp_path, "run_a", out, Wanted())
    put(run, *(kept(0.1, place=place) for place in range(3)))
    with pytest.raises(
        ActionError, match=r"none of its 3 kept rollouts qualifies \(3 with a reward below 0\.5\): nothing"
    ):
        export_texts(tmp_path, "run_a", out, Wanted(0.5))
    with pytest.raises(ActionError, match="none is of these steps"):
        export_texts(tmp_path, "run_a", out, Wanted(first=2))
    for inside in (tmp_path / "t.jsonl", run.orch_toml):
        with pytest.raises(ActionError, match="is inside the workspace: choose a file outside of it"):
            export_texts(tmp_path, "run_a", inside, Wanted(), force=True)
    assert not out.exists()
    made = export_texts(tmp_path, "run_a", out, Wanted(0.1))
    assert made == TextExport(str(out), 1, 3, 3, 1, 1, {}), "texts that are alike are written once"
    before = out.read_text()
    with pytest.raises(ActionError, match="exists already: choose another file, or replace it with --force"):
        export_texts(tmp_path, "run_a", out, Wanted())
    put(run, kept(1.0, "c", 1, "q", "new\x1b[31m"))
    export_texts(tmp_path, "run_a", out, Wanted(), force=True)
    assert (
        out.read_text() != before and "\x1b" not in out.read_text() and len(read_texts(out, DataConfig(path="t"))) == 1
    )


def prl(run: RunDir, *args: str) -> Any:
    return CliRunner().invoke(app, ["runs", "samples", "run_a", *args, "--output-dir", str(run.path.parent)])


def test_the_command(run: RunDir, tmp_path: Path) -> None:
    put(run, kept(0.2, place=0), kept(0.9, "b", 1, "q", "r", place=1), kept(0.8, "b", 1, "q", "s", place=2))
    out = str(beside(tmp_path))
    answer = json.loads(prl(run, "--export", out, "--best-of", "--min-reward", "0.5", "--step", ":4", "--json").stdout)
    assert answer["export"]["num_texts"] == 1 and answer["export"]["num_examples_kept"] == 2
    done = prl(run, "--export", out, "--force")
    assert done.stdout.startswith(f"{out}: 3 texts of 3 of 3 rollouts and 2 of 2 examples"), done.output
    for words in (["--best-of"], ["--step", "2:3"], ["--export", out, "--step", "x"], ["--export", out, "--step", ""]):
        assert isinstance(prl(run, *words).exception, WrongUseError | SystemExit)
    with pytest.raises(WrongUseError, match="--min-reward nan"):
        export_texts(tmp_path, "run_a", beside(tmp_path), Wanted(math.nan), force=True)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_a_branch_has_what_was_said_where_the_policy_said_it(runner: asyncio.Runner, tmp_path: Path) -> None:
    fake = FakeInference(make_model(tmp_path / "model"))
    plain = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    call_text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    fake.answer = lambda body: [*plain.encode(call_text if len(fake.answered) == 0 else "done").ids, IM_END]
    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)

    async def made() -> Rollout:
        async with serving(fake) as url:
            client = make_client(url, tmp_path)
            turns = TurnSampler(
                client,
                make_policy(client, make_run(tmp_path), tmp_path / "model"),
                SamplingConfig(max_tokens=512),
                seq_len=4096,
            )
            session = PolicySession(turns, ChatTokenizer.load(fake.model), seed=1)
            first = await session.call(Call((Turn("user", "q"),), tools=tools))
            again = Turn("assistant", f" {first.turn.content}\n", calls=first.turn.calls)  # it says the same
            asked = (Turn("user", "q"), again)
            result = Turn("tool", "2", call_id=first.turn.calls[0].id)
            await session.call(Call((*asked, result), tools=tools))
            await session.call(Call((Turn("user", "q"), Turn("assistant", "mine"), Turn("user", "?"))))
            await session.call(Call(prompt="once"))
            await client.close()
            return session.finished(Outcome(1.0))

    own, others, prompt = runner.run(made()).branches
    assert [turn.role for turn in own.turns] == ["user", "assistant", "tool", "assistant"] and own.tools == tools
    assert own.turns[1].calls == (ToolCall(own.turns[2].call_id, "add", own.turns[1].calls[0].arguments),)
    assert not own.turns[1].content.startswith(" "), "as it was sampled"
    assert own.ended and (others.turns, prompt.turns) == ((), ()), "an answer that is not the policy's, a plain prompt"
    line = {"messages": messages_of(own.turns), "tools": list(own.tools)}
    (tmp_path / "t.jsonl").write_text(json.dumps(line))
    (text,) = read_texts(tmp_path / "t.jsonl", DataConfig(path="t"))
    assert (text.turns, text.tools) == (own.turns, own.tools)
    (learned,) = tokens_of(text, ChatTokenizer.load(fake.model), "assistant")
    assert learned.ids_T[:-1] == own.token_ids_T and learned.mask_T[:-1] == own.loss_mask_T
