"""Texts to learn: lines of files, the tokens of a conversation, and which of them have a loss."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.configs.base import ConfigError, build, merge
from prime_rl.configs.data import MAX_LINE_BYTES, DataConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import TrainerLimits, check_against_trainer, doubts
from prime_rl.contract.calls import ToolCall, Turn
from prime_rl.gateway.texts import Text, read_texts
from prime_rl.orchestrator.envs.checked import EnvironmentBroken, ExampleUnusable
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.orchestrator.texts import Texts, tokens_of
from tests.budgets import examples
from tests.orchestrator_support import IM_END, make_model
from tests.unit.test_recorder import TEMPLATES as SHORT_TEMPLATES
from tests.unit.test_recorder import odd_model
from tests.unit.test_tools import TOOLS, make_tokenizer

CALL = ToolCall("call_1_2_3", "add", '{"a": 1}')
ASKED = (Turn("system", "Be brief."), Turn("user", "add one and two"))
CALLED = (Turn("assistant", "", "so it is", (CALL,)), Turn("tool", '{"sum": 3}', call_id=CALL.id))
TOLD = Text(
    "1", (*ASKED, *CALLED, Turn("assistant", "3"), Turn("user", "more?"), Turn("assistant", "no")), tuple(TOOLS)
)
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
CODED = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>"
# The call, as each family writes it, and the end of a turn.
SAID = {
    "Qwen2.5": (HERMES, "<|im_end|>"),
    "Qwen3": (f"<think>\nso it is\n</think>\n\n{HERMES}", "<|im_end|>"),
    "Qwen3-Coder": (CODED, "<|im_end|>"),
    "Llama 3.1": ('{"name": "add", "parameters": {"a": 1}}<|eot|>', "<|eot|>"),
    "Mistral": ("[TOOL_CALLS]", "<|im_end|>"),
    "SmolLM2": (HERMES, "<|im_end|>"),
}


def learned(text: Text, tokenizer: ChatTokenizer, learn: str) -> list[list[str]]:
    """Of each sample the stretches that have a loss, as text."""
    found = []
    for each in tokens_of(text, tokenizer, learn):
        stretches: list[list[int]] = []
        before = False
        for token_id, has_loss in zip(each.ids_T, each.mask_T, strict=True):
            if has_loss:
                stretches += [[]] if not before else []
                stretches[-1].append(token_id)
            before = has_loss
        found.append([tokenizer.decode(ids, special=True) for ids in stretches])
    return found


@pytest.mark.parametrize("name", SAID)
def test_what_the_assistant_said_is_learned_with_the_end_of_its_turn(tmp_path: Path, name: str) -> None:
    tokenizer, _ = make_tokenizer(tmp_path, name)
    called, end = SAID[name]
    samples = learned(TOLD, tokenizer, "assistant")
    said = [stretch for sample in samples for stretch in sample]
    assert said[1:] == [f"3{end}", f"no{end}"]
    assert said[0].startswith(called) and said[0].endswith(end) and "add" in said[0] and "sum" not in said[0]
    # A template that leaves out what was thought before gives each message as the model read what is before it.
    assert len(samples) == (3 if name == "Qwen3" else 1)
    assert learned(TOLD, tokenizer, "last") == [[f"no{end}"]]
    (whole,) = tokens_of(TOLD, tokenizer, "all")
    assert not whole.mask_T[0] and all(whole.mask_T[1:])
    assert "Be brief." in tokenizer.decode(whole.ids_T, special=True)


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3", "Mistral"])
def test_a_message_is_learned_behind_what_the_policy_would_be_asked_with(tmp_path: Path, name: str) -> None:
    tokenizer, _ = make_tokenizer(tmp_path, name)
    for length in (3, 5, 7):
        (sample,) = tokens_of(Text("1", TOLD.turns[:length], TOLD.tools), tokenizer, "last")
        prompt = tokenizer.prompt(TOLD.turns[: length - 1], TOLD.tools)
        assert sample.ids_T[: len(prompt)] == prompt and sample.mask_T.index(True) == len(prompt)


def test_a_plain_text_is_learned_to_its_end(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(str(make_model(tmp_path / "model")))
    (found,) = tokens_of(Text("1", text="Once, ü."), tokenizer, "assistant")
    assert tokenizer.decode(found.ids_T, special=True) == "Once, ü.<|im_end|>"
    assert found.ids_T[-1] == IM_END and found.mask_T == [False] + [True] * (len(found.ids_T) - 1)
    (ended,) = tokens_of(Text("1", text="Once.<|im_end|>"), tokenizer, "assistant")
    assert ended.ids_T.count(IM_END) == 1


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    """Their tokens join letters, also over the borders of words."""
    folder = tmp_path_factory.mktemp("odd")
    return {
        name: ChatTokenizer.load(str(odd_model(folder / name, template))) for name, template in SHORT_TEMPLATES.items()
    }


PIECES = st.sampled_from(["he", "l", "t", "ad", " ", "\n", "ü", "漢", "🎉", "<"])
WORDS = st.lists(PIECES, min_size=1, max_size=8).map("".join)
ANSWERS = WORDS.map(lambda text: f"{text.strip()}.")
ROUNDS = st.lists(st.tuples(WORDS, ANSWERS), min_size=1, max_size=4)


@given(name=st.sampled_from(list(SHORT_TEMPLATES)), system=st.none() | WORDS, rounds=ROUNDS)
@settings(max_examples=examples(100), deadline=None)
def test_nothing_but_the_assistant_is_learned(
    tokenizers: Mapping[str, ChatTokenizer], name: str, system: str | None, rounds: Sequence[tuple[str, str]]
) -> None:
    turns = [Turn("system", system)] if system else []
    for asked, said in rounds:
        turns += [Turn("user", asked), Turn("assistant", said)]
    samples = learned(Text("1", tuple(turns)), tokenizers[name], "assistant")
    assert [stretch for sample in samples for stretch in sample] == [f"{said}<|im_end|>" for _, said in rounds]


# -- files ----

GOOD = {"prompt": "hello", "completion": "world"}
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]


@pytest.mark.parametrize(
    "row",
    [
        GOOD,
        {"messages": MESSAGES, "tools": None, "id": 3},
        {"prompt": MESSAGES[:1], "completion": "world"},
        {"messages": MESSAGES, "text": "not this"},
    ],
)
def test_a_conversation_has_several_forms(tmp_path: Path, row: Any) -> None:
    (tmp_path / "a.jsonl").write_text(f"\n{json.dumps(row)}\n\n")
    (text,) = read_texts(tmp_path / "a.jsonl", DataConfig(path="a.jsonl"))
    assert text == Text("2", (Turn("user", "hello"), Turn("assistant", "world")))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", "not valid JSON"),
        ("[1]", "must be"),
        (
            '{"question": 1, "answer": 2}',
            "must have 'messages', 'prompt' with 'completion', or 'text'; its keys: quest",
        ),
        ('{"prompt": "a"}', "must have 'messages', 'prompt' with 'completion', or 'text'; its keys: prompt"),
        ('{"text": ""}', "'text' is empty: must be text"),
        ('{"text": 3}', "'text' is int: must be text"),
        ('{"prompt": 3, "completion": "b"}', "'prompt' is int: must be a list of messages"),
        ('{"prompt": "a", "completion": " "}', "'completion' has an empty message of the assistant"),
        ('{"prompt": "a", "completion": 3}', "'completion': "),
        ('{"messages": []}', "'messages' is list: must be a list of messages"),
        ('{"messages": "hello"}', "'messages' is str: must be a list of messages"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "'messages' has no message of the assistant"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', "'messages': "),
        ('{"messages": [{"content": "a"}]}', "'messages': "),
        ('{"messages": [{"role": "assistant", "content": "a"}], "tools": [{"name": "x"}]}', "'messages': "),
        ('{"text": "a\\ud800"}', "has half of a surrogate pair"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "\\udfff": 1}', "has half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps({"text": "x" * 10_000_000}), f"at most {MAX_LINE_BYTES:,} are read"),
    ],
    ids=lambda value: value[:60],
)
def test_a_bad_line_is_told_by_file_and_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        read_texts(path, DataConfig(path="a.jsonl"))
    message = str(error.value)
    assert message.startswith(f"{path} line 2: ")
    assert "\n" not in message and len(message) < 1_000


# -- configs ----

SFT: dict[str, Any] = {"kind": "sft", "batch_size": 4, "model": {"name": "m"}, "data": [{"path": "a.jsonl"}]}


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"data": []}, 'data: must have at least one [[data]] with kind = "sft"'),
        ({"env": [{"id": "reverse-text"}]}, "env: remove it"),
        ({"rollouts_per_example": 2}, "rollouts_per_example: remove it"),
        ({"max_off_policy_steps": 1}, "max_off_policy_steps: remove it"),
        ({"advantage": {"type": "grpo"}}, "advantage: remove it"),
        ({"oversampling_factor": 2.0}, "oversampling_factor: remove it"),
        ({"filter_zero_advantage": True}, "filter_zero_advantage: remove it"),
        ({"loss": {"type": "gspo"}}, "loss: with kind"),
        ({"loss": {"delta": 3.0}}, "loss: with kind"),
        ({"eval": {"interval": 2}}, "eval.env: must name environments"),
        ({"stop": {"metric": "reward/mean"}}, "stop.metric: with kind"),
        ({"data": [{"path": "a.jsonl"}, {"path": "b/a.jsonl"}]}, "data: duplicate names ['a', 'a']"),
        ({"data": [{"path": "a.jsonl", "weight": 0}]}, "weight"),
        ({"data": [{"path": "a.jsonl", "num_held_out": 1001}]}, "num_held_out"),
        ({"data": [{"path": "a.jsonl", "learn": "user"}]}, "learn"),
        ({"sft": {"share": 0}}, "share"),
        ({"kind": "dpo"}, "kind"),
    ],
)
def test_a_key_without_a_meaning_is_refused_by_name(over: dict[str, Any], words: str) -> None:
    build(OrchestratorConfig, SFT, "test")
    with pytest.raises(ConfigError) as error:
        build(OrchestratorConfig, merge(SFT, over), "test")
    assert words in str(error.value)


def test_a_run_without_rollouts_is_not_measured_by_their_rules() -> None:
    config = build(OrchestratorConfig, merge(SFT, {"batch_size": 1}), "test")
    limits = TrainerLimits("m", 64, 16, 32.0, None)
    assert not check_against_trainer(config, limits) and not doubts(config, limits), (
        "sampling.max_tokens, groups of one"
    )
    held = merge(SFT, {"seq_len": 32_768, "data": [{"path": "a.jsonl", "num_held_out": 1000}]})
    many = build(OrchestratorConfig, merge(held, {"batch_size": 2000}), "test")
    (problem,) = check_against_trainer(many, TrainerLimits("m", 32_768, 16, 32.0, None))
    assert problem.key == "batch_size" and "and 1000 texts beside it" in problem.message


# -- the texts of a run ----


def make_texts(tmp_path: Path, rows: Sequence[Any], seq_len: int = 64, *, over: Any = None, **data: Any) -> Texts:
    tokenizer = ChatTokenizer.load(str(make_model(tmp_path / "model")))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = build(OrchestratorConfig, merge(SFT, {"data": [{"path": "a.jsonl", **data}], **(over or {})}), "test")
    return Texts(config, lambda name: tmp_path / name, tokenizer, seq_len)


def rows_of(lengths: Sequence[int]) -> list[dict[str, str]]:
    return [{"text": "abcdefgh"[at % 8] * length} for at, length in enumerate(lengths)]


def test_long_texts_are_cut_or_dropped(tmp_path: Path) -> None:
    """A text has its end as a token beside its letters."""
    texts = make_texts(tmp_path, rows_of([63, 64]), num_held_out=0, too_long="cut")
    (fits,), (longer,) = ([group.rollouts_G[0] for group in [texts.group(at, 0)]] for at in order(texts, 2))
    assert [len(each.branches[0].token_ids_T) for each in (fits, longer)] == [64, 64]
    assert [each.truncated for each in (fits, longer)] == [False, True]
    texts = make_texts(tmp_path, rows_of([63, 64, 1]), num_held_out=0, too_long="drop")
    fits_at, longer_at, _ = order(texts, 3)
    assert texts.group(fits_at, 0)
    with pytest.raises(ExampleUnusable, match="line 2: 65 tokens: longer than seq_len = 64"):
        texts.group(longer_at, 0)
    assert texts.unusable == {"a/2": "65 tokens: longer than seq_len = 64"}


def order(texts: Texts, num: int) -> list[int]:
    """The indexes of lines 1 to `num` in the first epoch."""
    by_line = {int(texts.sampler.pick(index).example.id): index for index in range(num)}
    return [by_line[line] for line in range(1, num + 1)]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_run_whose_texts_cannot_be_learned_ends_with_one_line(tmp_path: Path, share: float) -> None:
    row = {"prompt": "p" * 100, "completion": "never reached"}
    texts = make_texts(tmp_path, [row] * 4, num_held_out=0, over={"max_env_failure_share": share})
    num_survived = 2 if share == 0.5 else 3
    for index in range(num_survived):
        with pytest.raises(ExampleUnusable):
            texts.group(index, 0)
    words = rf"^{num_survived + 1} of 4 texts cannot be learned; the last: a.jsonl line \d: nothing to learn"
    with pytest.raises(EnvironmentBroken, match=words):
        texts.group(num_survived, 0)


def test_texts_that_are_measured_are_never_learned(tmp_path: Path) -> None:
    texts = make_texts(
        tmp_path, rows_of([3] * 8), num_held_out=3, over={"sft": {"held_out_interval": 2, "weight": 2.0}}
    )
    learned_ids = {texts.group(index, 0).example_id for index in range(10)}
    assert learned_ids == {f"a/{line}" for line in range(4, 9)} and texts.num_texts == 5
    held = [texts.held_out(step) for step in (1, 2, 3)]
    assert [len(each) for each in held] == [3, 0, 3]
    assert {each.example_id for each in held[0]} == {"a/1", "a/2", "a/3"}
    assert [(each.use, each.policy_version, each.turn_versions) for each in held[2]] == [("held_out", 2, [2])] * 3


def test_a_file_without_a_text_to_learn_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.0\.path: num_held_out = 2 leaves none of the 2 texts to learn"):
        make_texts(tmp_path, rows_of([3, 3]), num_held_out=5)


def test_texts_beside_rollouts_are_those_of_their_step(tmp_path: Path) -> None:
    over = {"kind": "rl", "rollouts_per_example": 2, "env": [{"id": "reverse-text"}], "sft": {"weight": 0.5}}
    texts = make_texts(tmp_path, rows_of([3] * 6), num_held_out=0, over=over)
    batches = [[each.example_id for each in texts.beside(step, 2)] for step in (1, 2, 3)]
    assert sorted(itertools.chain(*batches)) == [f"a/{line}" for line in range(1, 7)], "an epoch has each of them once"
    again = make_texts(tmp_path, rows_of([3] * 6), num_held_out=0, over=over)
    (one, _) = again.beside(2, 2)
    assert [each.example_id for each in again.beside(2, 2)] == batches[1]
    assert (one.use, one.advantage, one.policy_version, set(one.logprobs)) == ("supervised", 0.5, 1, {0.0})
    assert texts.num_tokens == 6 * 4
