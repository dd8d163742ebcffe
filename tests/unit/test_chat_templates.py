"""The prompts of orchestrators and of the embedded engine's chats, token for token those of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from daemons.adding import add_run, check_file
from daemons.errors import ActionError
from prime_rl.inference.embedded.server import Text
from prime_rl.inference.guard import ApiError
from prime_rl.inference.vllm.server import render_as_orchestrators
from prime_rl.orchestrator.envs.base import Message
from prime_rl.orchestrator.policy import ChatTokenizer, TokenizerError
from prime_rl.orchestrator.recorder import as_turns
from prime_rl.utils.chat_template import ChatTemplate
from tests.orchestrator_support import CHATML, config_data, make_model

MESSAGES: list[Message] = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "Grüße <unk> & 'ab'?"},
    {"role": "assistant", "content": "  yes  "},
    {"role": "user", "content": "and now\n\n"},
]
ALL, END = "{% for m in messages %}", "{% endfor %}"
EACH = ALL + "{{ m.role }}: {{ m.content }}\n" + END
FORMS = {
    "chatml": CHATML,
    "plain": EACH,
    "llama": "{{ bos_token }}" + ALL + "{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %}{{ m['content'] ~ eos_token }}{% endif %}" + END,
    "no tools": "{% if tools is none %}none{% endif %}" + EACH,
    "tools or not": "{% if tools is defined and tools is not none %}{{ tools | tojson }}{% endif %}" + EACH,
    "length of tools": "{% if tools is not none and tools | length > 0 %}x{% else %}no tools{% endif %}" + EACH,
    "no documents": "{% if documents is none %}none{% endif %}" + EACH,
    "documents defined": "{{ documents is defined }}{{ documents is sameas none }}" + EACH,
    "generation": ALL + "{% generation %}{{ m.content }}{% endgeneration %}\n" + END,
    "generation with minus": ALL + "\n  {%- generation -%}  {{ m.content }} {%- endgeneration -%}\n" + END,
    "generation alone on lines": ALL + "\n  {% generation %}\n{{ m.content }}\n  {% endgeneration %}\n" + END,
    "generation has a scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "generation in a branch": ALL + "{% if m.role == 'assistant' %}{% generation %}{{ loop.index }}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}" + END,
    "unknown token": "{{ unk_token }}|" + EACH,
    "all special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ sep_token }}{{ pad_token }}{{ cls_token }}"
    "{{ mask_token }}",
    "special tokens defined": "{{ sep_token is defined }}{{ extra_special_tokens is defined }}{{ bos_token is none }}",
    "date": "{{ strftime_now('%Y') }} " + EACH,
    "date if there is one": "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}" + EACH,
    "raises never": "{% if messages | length > 9 %}{{ raise_exception('too long') }}{% endif %}" + EACH,
    "break": ALL + "{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}" + END,
    "continue": ALL + "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}" + END,
    "json": "{{ messages | tojson }}",
    "json with indent": "{{ messages | tojson(indent=2) }}",
    "json sorted": "{{ messages | tojson(sort_keys=true, separators=(',', ':')) }}",
    "json in ASCII": "{{ messages | tojson(ensure_ascii=true) }}",
    "filters": ALL + "{{ m.content | trim | upper | replace('A', '-') | default('x') }}" + END,
    "namespace": "{% set ns = namespace(n=0) %}" + ALL + "{% set ns.n = ns.n + 1 %}" + END + "{{ ns.n }}",
    "macro": "{% macro say(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}" + ALL + "{{ say(m) }}" + END,
    "call": "{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}{{ messages[0].content }}{% endcall %}",
    "loop": ALL + "{{ loop.first }}{{ loop.last }}{{ loop.index0 }}{{ m.content }}" + END,
    "system first": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}S:{{ messages[0].content }}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{{ m.content }}{% endfor %}",
    "methods": ALL + "{{ m.content.strip().split(' ')[-1] }}{{ m.content.startswith('B') }}" + END,
    "get and items": ALL + "{{ m.get('name', 'n') }}{% for k, v in m.items() %}{{ k }}{{ v }}{% endfor %}" + END,
    "tests of types": ALL + "{{ m.content is string }}{{ m is mapping }}{{ m.x is defined }}" + END,
    "prompt": EACH + "{% if add_generation_prompt %}assistant:{% endif %}",
    "no prompt": EACH + "{{ add_generation_prompt }}",
    "comments and raw": "{# note #}{% raw %}{{ raw }}{% endraw %}" + EACH,
    "set block": "{% set text %}{{ messages[1].content }}{% endset %}{{ text | length }}{{ text }}",
    "white space": "\n\n  {%- for m in messages -%}\n  {{ m.content }}\n  {%- endfor %}\n\n",
    "filtered loop": "{% for m in messages if m.role != 'system' %}{{ loop.length }}{{ m.content }}{% endfor %}",
    "select and map": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}",
    "an argument of the run": "{% if not enable_thinking | default(true) %}<no>{% endif %}" + EACH,
    "tokens in the text": "<|im_start|><s>a</s> <|im_end|>" + EACH,
    "arithmetic": "{{ messages | length % 2 }}{{ 7 // 2 }}{{ '%s' % 3 }}{{ range(3) | list }}",
}
TOKENS = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": "<|endoftext|>"}
AS_OBJECT = {"__type": "AddedToken", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def write_config(model: Path, template: str, tokens: Mapping[str, Any] = TOKENS, **more: Any) -> None:
    (model / "chat_template.jinja").write_text(template)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **more}
    (model / "tokenizer_config.json").write_text(json.dumps(config))


def check_same(model: Path, messages: list[Message] = MESSAGES, **arguments: Any) -> None:
    """All of ours give the ids that transformers gives."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **arguments)
    assert len(theirs) > 0
    render_as_orchestrators(tokenizer, str(model))  # what vLLM's chat route asks
    asked = {"chat_template": tokenizer.get_chat_template(), "add_generation_prompt": True, "return_dict": False}
    assert tokenizer.apply_chat_template(messages, **asked, **arguments) == theirs
    assert ChatTokenizer.load(str(model), arguments).prompt(as_turns(messages)) == theirs
    assert Text(str(model)).render_chat(messages, arguments) == theirs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.mark.parametrize("form", FORMS)
def test_prompts_are_those_of_transformers(model: Path, form: str) -> None:
    write_config(model, FORMS[form])
    arguments: dict[str, Any] = {"enable_thinking": False} if "enable_thinking" in FORMS[form] else {}
    check_same(model, **arguments)


SPECIALS = "{{ bos_token }}{{ unk_token }}{{ messages[0].content }}{{ eos_token }}{{ sep_token }}<|user|>x<|extra|>"


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"bos_token": {**AS_OBJECT, "content": "<s>"}, "eos_token": "<|im_end|>"}},
        {"special_tokens_map.json": {"bos_token": "<s>", "unk_token": {"content": "<unk>", "lstrip": False}}},
        {"tokenizer_config.json": {"bos_token": "<a>"}, "special_tokens_map.json": {"bos_token": "<s>"}},
        {
            "tokenizer_config.json": {
                "bos_token": "<s>",
                "added_tokens_decoder": {
                    "259": {"content": "<s>", "special": True},
                    "260": {"content": "<|user|>", "special": False, "normalized": False},
                },
            },
            "special_tokens_map.json": {"bos_token": "<other>"},
        },
        {"tokenizer_config.json": {"sep_token": None, "extra_special_tokens": ["<|extra|>", "<|user|>"]}},
        {"tokenizer_config.json": {"additional_special_tokens": ["<|extra|>"], "bos_token": "<s>"}},
        {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": SPECIALS}], "eos_token": "</s>"}},
    ],
)
def test_special_tokens_come_from_each_place_where_models_have_them(
    model: Path, files: Mapping[str, dict[str, Any]]
) -> None:
    write_config(model, SPECIALS)
    if any("chat_template" in content for content in files.values()):
        (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    for name, content in files.items():
        more = {"tokenizer_class": "PreTrainedTokenizerFast"} if name == "tokenizer_config.json" else {}
        (model / name).write_text(json.dumps(content | more))
    check_same(model)


@pytest.mark.parametrize("form", ["chatml", "plain", "filters", "macro", "generation", "llama"])
def test_the_last_message_is_continued_as_transformers_does(model: Path, form: str) -> None:
    from transformers import AutoTokenizer

    write_config(model, FORMS[form])
    text, theirs = Text(str(model)), AutoTokenizer.from_pretrained(model)
    for last in ("So far", "with space \n", " in front"):
        messages = [*MESSAGES[:2], {"role": "assistant", "content": last}]
        try:
            wanted = theirs.apply_chat_template(messages, continue_final_message=True, return_dict=False)
        except ValueError:  # the form changes the message
            with pytest.raises(ApiError, match="the last message"):
                text.render_chat(messages, {}, add_generation_prompt=False, continue_final_message=True)
            continue
        assert text.render_chat(messages, {}, add_generation_prompt=False, continue_final_message=True) == wanted
        render_as_orchestrators(ours := AutoTokenizer.from_pretrained(model), str(model))
        asked = {"chat_template": ours.get_chat_template(), "continue_final_message": True}
        assert ours.apply_chat_template(messages, **asked) == wanted


def test_arguments_of_a_request_stand_over_those_of_the_model(model: Path) -> None:
    write_config(model, "{{ bos_token }}{{ tools | tojson }}{{ messages[0].content }}")
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert (
        ChatTemplate.load(str(model)).render(MESSAGES, {"bos_token": "<b>", "tools": tools}).startswith('<b>[{"type"')
    )
    with pytest.raises(ApiError, match=r"chat_template_kwargs may not set \['add_generation_prompt'\]"):
        Text(str(model)).render_chat(MESSAGES, {"add_generation_prompt": False})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[99].content }}", "has no element 99"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_a_template_refuses_is_told_in_its_own_words(model: Path, template: str, words: str) -> None:
    from transformers import AutoTokenizer

    write_config(model, template)
    with pytest.raises(TokenizerError, match=f"the chat template refuses the conversation: .*{words}"):
        ChatTokenizer.load(str(model)).prompt(as_turns(MESSAGES))
    with pytest.raises(ApiError, match=words):
        Text(str(model)).render_chat(MESSAGES, {})
    render_as_orchestrators(tokenizer := AutoTokenizer.from_pretrained(model), str(model))
    with pytest.raises(TokenizerError, match=words):
        tokenizer.apply_chat_template(MESSAGES, chat_template=template)


def test_a_chat_with_vllm_keeps_its_own_way_without_a_template_of_ours(model: Path) -> None:
    from transformers import AutoTokenizer

    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    render_as_orchestrators(tokenizer := AutoTokenizer.from_pretrained(model), str(model))
    with pytest.raises(ValueError, match="chat_template is not set"):
        tokenizer.apply_chat_template(MESSAGES)


def test_another_template_that_vllm_chose_is_rendered_by_its_own_code(model: Path) -> None:
    from transformers import AutoTokenizer

    write_config(model, FORMS["chatml"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    theirs = [tokenizer.apply_chat_template(MESSAGES, chat_template=form, return_dict=False) for form in FORMS.values()]
    render_as_orchestrators(tokenizer, str(model))
    given = [tokenizer.apply_chat_template(MESSAGES, chat_template=form, return_dict=False) for form in FORMS.values()]
    assert given == theirs


def test_an_argument_of_any_name_is_one_for_the_template(model: Path) -> None:
    write_config(model, "{{ name }} {{ messages[0].content }}")
    names = ("self", "loop", "args", "template", "cls", "environment", "0", "a b", "é", "__class__")
    text = Text(str(model))
    expected = text.render_chat(MESSAGES, {"name": "x"})
    assert text.render_chat(MESSAGES, {**{key: {} for key in names}, "name": "x"}) == expected


def test_a_run_is_checked_against_the_template_of_its_model(model: Path, tmp_path: Path) -> None:
    def problems(**over: Any) -> list[str]:
        import tomli_w

        toml = tmp_path / "run.toml"
        data = config_data(model, **over)
        data["model"].pop("full_finetune")
        toml.write_text(tomli_w.dumps(data))
        found = [str(each) for each in check_file(tmp_path / "out", toml)]
        if found:
            with pytest.raises(ActionError, match=r"chat template|must not be set"):
                add_run(tmp_path / "out", toml)
        return found

    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}"
    write_config(model, no_system + EACH)
    assert problems() == []
    with_system = {"id": "reverse-text", "prompt": {"system": "Be brief."}}
    assert problems(env=[{"id": "upper-case"}, with_system]) == [
        "env.1.prompt: the chat template refuses the conversation: no system messages here"
    ]
    assert problems(sampling={"chat_template_kwargs": {"messages": []}}) == [
        "sampling.chat_template_kwargs: messages must not be set here"
    ]
    write_config(model, "{% for m in messages %}")
    (problem,) = problems()
    assert problem.startswith("model.name: the chat template is not valid: Unexpected end of template")
    (model / "tokenizer.json").unlink()
    assert problems() == [], "a model that is not on this machine is checked by its orchestrator"
