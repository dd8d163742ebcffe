"""The tokenizer of the base model: as transformers, the orchestrator and the teaching each see it."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from prime_rl.base_model.teach import TURN_END, TURN_START, PromptEncoder, build_tokenizer
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.orchestrator.recorder import as_turns

TEXTS = ["Reverse: banal", "", "  two  blanks \n\n and lines\t", "Größe, 漢字, 😀", "{{ 7 * 7 }} {% raw %}", "\x00\x7f"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(512).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back(loaded: PreTrainedTokenizerFast, text: str) -> None:
    ids = loaded.encode(text)
    assert len(ids) == len(text.encode())
    assert loaded.decode(ids) == text


def test_special_tokens(loaded: PreTrainedTokenizerFast) -> None:
    assert len(loaded) == 256 + 3
    assert (loaded.pad_token_id, loaded.eos_token, loaded.eos_token_id) == (0, TURN_END, 2)
    assert loaded.encode(f"{TURN_START}a{TURN_END}")[::2] == [1, 2]
    assert loaded.decode(loaded.encode(f"{TURN_START}a{TURN_END}"), skip_special_tokens=True) == "a"


@pytest.mark.parametrize("text", TEXTS)
def test_three_renderings_agree(folder: Path, loaded: PreTrainedTokenizerFast, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    ids = loaded.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ChatTokenizer.load(str(folder)).prompt(as_turns(messages)) == ids
    assert PromptEncoder(loaded).prompt(text) == ids


@pytest.mark.parametrize("strip", [False, True])
def test_the_template_means_the_same_in_plain_jinja(folder: Path, loaded: PreTrainedTokenizerFast, strip: bool) -> None:
    environment = jinja2.Environment(trim_blocks=strip, lstrip_blocks=strip, autoescape=False)
    template = environment.from_string((folder / "chat_template.jinja").read_text())
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "\n Sort: cab \n"},
        {"role": "assistant", "content": "abc"},
        {"role": "user", "content": "Again"},
    ]
    for ask in (False, True):
        text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        assert template.render(messages=messages, add_generation_prompt=ask) == text
        assert text.count(TURN_END + "\n") == 4
        assert text.endswith(f"{TURN_START}assistant\n") == ask


def test_an_answer_ends_its_turn(loaded: PreTrainedTokenizerFast) -> None:
    assert loaded.decode(PromptEncoder(loaded).answer("lanab")) == f"lanab{TURN_END}"
