"""How each family of models is offered tools, calls them and is answered.

The templates are short ones in the form of the models' own: what they render is what transformers renders of the same
messages and tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract.calls import ToolCall, Turn
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.orchestrator.tools import MAX_CALLS, ToolForm
from prime_rl.utils.chat_template import ChatTemplate, TokenizerError
from tests.orchestrator_support import make_model

START = "{{ '<|im_start|>' + m.role + '\\n' }}"
END = "<|im_end|>\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OFFER = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n{% endif %}"
)
RESULTS = (
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
)
QWEN25 = (
    OFFER + "{% for m in messages %}{% if m.role in ['user', 'assistant'] or (m.role == 'system' and not tools) %}"
    f"{START}{{{{ m.content }}}}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    + END
    + RESULTS
    + ASK
)
# What was thought before the last question is not shown.
QWEN3 = QWEN25.replace(
    "{{ m.content }}{% for c",
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% for c",
)
CODER = (
    OFFER + "{% for m in messages %}{% if m.role in ['user', 'assistant'] or (m.role == 'system' and not tools) %}"
    f"{START}{{{{ m.content }}}}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}" + END + RESULTS + ASK
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}"
    "<|start|>assistant<|end|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot|>{% elif m.role == 'tool' %}<|start|>ipython<|end|>\n\n{{ m.content | tojson }}<|eot|>"
    "{% else %}<|start|>{{ m.role }}<|end|>\n\n"
    "{% if m.role == 'user' and tools and loop.index0 <= 1 %}Respond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.\n'
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{{ m.content | trim }}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{{ c.function | tojson }}, "id": "{{ c.id }}"{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
    "{% endfor %}"
)
SMOL = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + ASK
)
UNKNOWN = "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.tool_calls }}\n{% endfor %}"
NATIVE = {"Qwen2.5": QWEN25, "Qwen3": QWEN3, "Qwen3-Coder": CODER, "Llama 3.1": LLAMA, "Mistral": MISTRAL}
TEMPLATES = {**NATIVE, "SmolLM2": SMOL, "unknown": UNKNOWN}
FAMILIES = {
    **{"Qwen2.5": "Hermes and Qwen", "Qwen3": "Hermes and Qwen", "Qwen3-Coder": "Qwen3-Coder", "Llama 3.1": "Llama 3"},
    **{"Mistral": "Mistral", "SmolLM2": "Hermes and Qwen", "unknown": "unknown"},
}

PROPERTIES = {"a": {"type": "integer"}, "text": {"type": "string"}, "list": {"type": "array"}, "any": {}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "größe", "description": "how <large> & 'wide'"}},
]
CALL = ToolCall("call_5_1_0", "add", '{"a":  1, "text": "é \\u00fc"}')
TURNS = (
    Turn("system", "Be brief."),
    Turn("user", "add 1 and two, ü"),
    Turn("assistant", "", "so it is", (CALL,)),
    Turn("tool", '{"sum": 3}', call_id=CALL.id),
    Turn("assistant", "3"),
    Turn("user", "again"),
)
TWO = Turn("assistant", "I add.", "", (CALL, ToolCall("b", "größe", "")))
PARALLEL = (TURNS[1], TWO, Turn("tool", "3", call_id=CALL.id), Turn("tool", "4", call_id="b"))


def make_tokenizer(tmp_path: Path, name: str) -> tuple[ChatTokenizer, Any]:
    """Ours, and that of transformers."""
    from transformers import AutoTokenizer

    model = make_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATES[name])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTokenizer.load(str(model)), AutoTokenizer.from_pretrained(model)


def openai(turn: Turn) -> dict[str, Any]:
    """A message as applications hand it to transformers: arguments are objects."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": each.name, "arguments": json.loads(each.arguments or "{}")}}
            for each in turn.calls
        ]
    return message


# -- what the model reads ----


@pytest.mark.parametrize("turns", [TURNS, TURNS[:2], TURNS[1:4], PARALLEL], ids=["all", "asked", "answered", "two"])
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3", "Qwen3-Coder", "Llama 3.1"])
def test_what_is_rendered_is_what_transformers_renders(
    tmp_path: Path, name: str, tools: Sequence[dict[str, Any]], turns: Sequence[Turn]
) -> None:
    ours, theirs = make_tokenizer(tmp_path, name)
    if name == "Llama 3.1" and turns is PARALLEL:
        with pytest.raises(TokenizerError, match="only single tool-calls at once"):
            ours.prompt(turns, tools)
        return
    wanted = theirs.apply_chat_template(
        [openai(turn) for turn in turns], tools=tools or None, add_generation_prompt=True, return_dict=False
    )
    assert ours.prompt(turns, tools) == wanted


def test_ids_of_calls_have_nine_letters_and_results_the_same(tmp_path: Path) -> None:
    ours, theirs = make_tokenizer(tmp_path, "Mistral")
    messages = ours.form.chat(PARALLEL, TOOLS)
    wanted = theirs.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert ours.prompt(PARALLEL, TOOLS) == wanted
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert ids == [each["tool_call_id"] for each in messages[2:]] and len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_a_model_without_tools_is_offered_them_in_its_messages(tmp_path: Path) -> None:
    ours, theirs = make_tokenizer(tmp_path, "SmolLM2")
    assert not ours.form.native
    text = ours.decode(ours.prompt(TURNS, TOOLS), special=True)
    head, *_ = text.split("<|im_end|>")
    assert head.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n") and json.dumps(TOOLS[1]) in head
    assert f'<tool_call>\n{{"name": "add", "arguments": {CALL.arguments}}}\n</tool_call><|im_end|>' in text
    assert '<|im_start|>user\n<tool_response>\n{"sum": 3}\n</tool_response><|im_end|>' in text
    plain = theirs.apply_chat_template([openai(turn) for turn in TURNS[:2]], add_generation_prompt=True, tokenize=False)
    assert ours.decode(ours.prompt(TURNS[:2]), special=True) == plain
    both = ours.decode(ours.prompt(PARALLEL, TOOLS), special=True)
    assert both.startswith("<|im_start|>system\n# Tools\n")
    assert '{"name": "gr\\u00f6\\u00dfe", "arguments": {}}' in both
    assert (
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>" in both
    )


def test_a_form_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    ours, _ = make_tokenizer(tmp_path, "unknown")
    words = r"offers tools in a form that is not known \(Qwen3-Coder, Hermes and Qwen, Mistral, Llama 3 are\)"
    with pytest.raises(TokenizerError, match=words):
        ours.prompt(TURNS, TOOLS)
    assert ours.prompt(TURNS[:2])
    assert read("unknown", "anything").content == "anything"


@pytest.mark.parametrize("name", NATIVE)
def test_a_result_goes_on_from_the_call(tmp_path: Path, name: str) -> None:
    ours, _ = make_tokenizer(tmp_path, name)
    whole = ours.decode(ours.prompt(TURNS[:4], TOOLS), special=True)
    rest = ours.decode(ours.continuation(TURNS[:4], 3, TOOLS), special=True)
    assert whole.endswith(rest) and '{"sum": 3}' in rest.replace('\\"', '"') and "add" not in rest


# -- what the model writes ----


def read(name: str, text: str, **more: Any) -> Turn:
    form = ToolForm.of(ChatTemplate(TEMPLATES[name], {}))
    assert form.family == FAMILIES[name]
    return form.read(text, TOOLS, **{"may_call": True, "prefix": "p", **more})


def calls(turn: Turn) -> list[tuple[str, Any]]:
    assert [call.id for call in turn.calls] == [f"p{number}" for number in range(len(turn.calls))]
    return [(call.name, json.loads(call.arguments)) for call in turn.calls]


ONE = [("add", {"a": 1})]
BOTH = [*ONE, ("add", {"a": 2})]
HERMES_1 = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HERMES_2 = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>'
XML_1 = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
XML_2 = "<function=add><parameter=a>2</parameter></function>\n</tool_call>"
LLAMA_1, LLAMA_2 = '{"name": "add", "parameters": {"a": 1}}', '{"name": "add", "arguments": {"a": 2}}'
MISTRAL_2 = '[TOOL_CALLS]add[ARGS]{"a": 2}'
GOOD: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("Qwen2.5", HERMES_1, "", ONE),
    ("Qwen2.5", f"I add.\n{HERMES_1}\n{HERMES_2}", "I add.", BOTH),
    ("Qwen2.5", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "", ONE),
    ("Qwen2.5", '<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    ("Qwen2.5", '<tool_call>{"name": "add", "arguments": null}</tool_call> end', "end", [("add", {})]),
    ("SmolLM2", f"{HERMES_1} and {HERMES_1}", "and", [*ONE, *ONE]),
    ("Qwen3-Coder", XML_1, "", ONE),
    ("Qwen3-Coder", f"I add.\n{XML_1}\n{XML_2}", "I add.", BOTH),
    (
        "Qwen3-Coder",
        "<function=add><parameter=text>\n12\n\n</parameter><parameter=list>[1, {}]</parameter>"
        "<parameter=any>true</parameter><parameter=new>1</parameter></function>",
        "",
        [("add", {"text": "12\n", "list": [1, {}], "any": "true", "new": "1"})],
    ),
    (
        "Qwen3-Coder",
        "<tool_call><function=add><parameter=a>null</parameter><parameter=list>none</parameter></function></tool_call>",
        "",
        [("add", {"a": None, "list": "none"})],
    ),
    ("Qwen3-Coder", "<function=größe>\n</function>", "", [("größe", {})]),
    ("Llama 3.1", LLAMA_1, "", ONE),
    ("Llama 3.1", f"<|python_tag|>{LLAMA_1}", "", ONE),
    ("Llama 3.1", f" \n{LLAMA_2};\n", "", [("add", {"a": 2})]),
    ("Mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "", ONE),
    (
        "Mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]',
        "",
        BOTH,
    ),
    ("Mistral", f'I add.[TOOL_CALLS]add[CALL_ID]x12[ARGS]{{"a": 1}}{MISTRAL_2}', "I add.", BOTH),
]


@pytest.mark.parametrize(("name", "text", "content", "wanted"), GOOD)
def test_calls_are_read(name: str, text: str, content: str, wanted: list[tuple[str, Any]]) -> None:
    turn = read(name, text)
    assert (turn.content, calls(turn)) == (content, wanted)
    for given in ({"may_call": False}, {"tools": ()}):
        form = ToolForm.of(ChatTemplate(TEMPLATES[name], {}))
        as_text = form.read(text, given.get("tools", TOOLS), may_call=given.get("may_call", True), prefix="p")
        assert as_text == Turn("assistant", text), "who is offered no tools, or may not call, gets text"


DEEP = '{"a": ' * 200_000
BAD_JSON = ["{", '{"name": "add", "arguments": [1]}', '{"name": 1}', '{"name": ""}', "[]", '"add"', "", DEEP]
BAD_JSON += ['{"name": "add", "arguments": {"a": NaN}}', '{"name": "a\\nb"}', '{"name": "\\ud800"}']
BAD_JSON += ['{"name": "add", "arguments": {"a": "\\ud800"}}', '{"name": "add", "arguments": "{"}']
BAD_JSON += [f'{{"name": "add", "arguments": {DEEP}', f'{{"name": "{"x" * 200}"}}']
BAD = [
    *(("Qwen2.5", f"{HERMES_1}<tool_call>{text}</tool_call>") for text in BAD_JSON),
    *(("Llama 3.1", text) for text in BAD_JSON),
    *(
        ("Llama 3.1", text)
        for text in (f"so: {LLAMA_1}", f"{LLAMA_1} so", f"{LLAMA_1}; {LLAMA_2}", "12", "<|python_tag|>")
    ),
    *(("Mistral", f"[TOOL_CALLS]{text}") for text in (*BAD_JSON, "add[ARGS]", "add[ARGS][1]", "add{}", "[[]]")),
    ("Qwen3-Coder", "<tool_call></tool_call>"),
    ("Qwen3-Coder", "<function=></function>"),
    ("Qwen3-Coder", "<function=add<parameter=a>1</parameter></function>"),
    ("Qwen3-Coder", "<function=add><parameter=a>1</function>"),
    ("Qwen3-Coder", "<function=add><parameter=a1</parameter></function>"),
    ("Qwen3-Coder", '<function=add>{"a": 1}</function>'),
    ("Qwen3-Coder", f"{XML_1}<function=add><parameter=a>"),
    ("Qwen2.5", HERMES_1 * (MAX_CALLS + 1)),
]


@pytest.mark.parametrize(("name", "text"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_read_as_calls_is_content(name: str, text: str) -> None:
    assert read(name, text) == Turn("assistant", text)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nso it is\n</think>\n\nhello ", "so it is", "hello "),
        ("the template began it\n</think>hello", "the template began it", "hello"),
        ("<think>it is cut", "it is cut", ""),
        ("<think></think>\n\nhello", "", "hello"),
        (" hello <think>", "", " hello <think>"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_what_the_model_thought_stands_apart(text: str, reasoning: str, content: str) -> None:
    assert read("Qwen3", text) == Turn("assistant", content, reasoning)
    assert read("Qwen2.5", text) == Turn("assistant", text), "a model that does not think may write anything"
    both = read("Qwen3", f"{text}{HERMES_1}")
    if "cut" not in text:
        assert (both.reasoning, both.content, calls(both)) == (reasoning, content.strip(), ONE)


HUGE = 1 << 20
ENDLESS = ("<tool_call>", "<function=", "<function=a>", "<parameter=", "<parameter=a>", "[TOOL_CALLS]", "a[ARGS]", "\n")
ENDLESS += (
    "</think>",
    "<think>",
    "<tool_call>{",
    "<function=a><parameter=b>",
    "[CALL_ID]a",
    '{"name": "a"};',
    "[",
    '"',
)
ENDLESS += (
    "<function=a></function>",
    "<function=a><parameter=b></parameter></function>",
    "<tool_call></tool_call>",
    "a",
)


@pytest.mark.parametrize("unit", ENDLESS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_megabyte_of_anything_is_read_in_one_pass(name: str, unit: str) -> None:
    """A parser that begins again at each of so many places would take 10^11 steps and not end."""
    heads = {"Mistral": "[TOOL_CALLS]", "Llama 3.1": '{"name": "', "Qwen3-Coder": "<tool_call><function=a>"}
    for text in (unit * (HUGE // len(unit)), heads.get(name, "<tool_call>") + unit * (HUGE // len(unit))):
        turn = read(name, text)
        assert not turn.calls and len(turn.content) + len(turn.reasoning) <= len(text)


@pytest.mark.parametrize(
    "function",
    [
        {"parameters": []},
        {"parameters": {"properties": [1]}},
        {"parameters": {"properties": {"a": "integer"}}},
        [],
        None,
    ],
)
def test_a_schema_that_is_none_makes_text_of_every_value(function: Any) -> None:
    form = ToolForm.of(ChatTemplate(CODER, {}))
    named = {**function, "name": "add"} if isinstance(function, dict) else function
    turn = form.read(XML_1, [{"function": named}], may_call=True, prefix="p")
    assert calls(turn) == [("add", {"a": "1"})]
