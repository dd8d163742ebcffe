"""The chat template of a model: from messages to the text that the model reads, as transformers renders it.

Orchestrators, the chat routes of both engines and `prl runs validate` render here, without torch and transformers.
Those who call make token ids of the text.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The special tokens that templates know by name.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Set by whoever renders.
RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message"})
# What the code of a template may raise on messages that it was not written for.
TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)


class TokenizerError(ValueError):
    """A model folder without a usable tokenizer or chat template, or a conversation that cannot be rendered."""


class ChatTemplate:
    """The template of one model, from its `source`. `config` is its tokenizer's config.

    `arguments` are those of the template other than the conversation: special tokens, and what the run sets.
    """

    def __init__(self, source: str, arguments: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        self.source, self.config = source, config or {}
        self._arguments = {"tools": None, "documents": None, **arguments}  # templates ask whether they are none
        # Marks the end of a message that goes on; random, so that no message can contain it by intent.
        self._mark = f"end-of-message-{secrets.token_hex(16)} "
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template is not valid: {error}") from error

    @classmethod
    def load(cls, model: str, own: Mapping[str, Any] | None = None, *, local_only: bool = False) -> ChatTemplate:
        """The template of a model folder or hub name, with the run's `own` arguments. Raises TokenizerError."""
        config = _tokenizer_config(model, local_only)
        file = model_file(model, "chat_template.jinja", local_only=local_only)
        source = file.read_text(encoding="utf-8") if file else _template_of(config)
        if source is None:
            raise TokenizerError(
                f"model {model!r}: chat template not found in chat_template.jinja and in the tokenizer config"
            )
        special = {key: text for key in SPECIAL_TOKENS if (text := token_text(config.get(key)))}
        if taken := sorted((own or {}).keys() & {*special, *RESERVED}):
            raise TokenizerError(f"sampling.chat_template_kwargs: {', '.join(taken)} must not be set here")
        return cls(source, {**(own or {}), **special}, config)

    def takes(self, name: str) -> bool:
        """True when the template looks at the argument `name`."""
        return name in meta.find_undeclared_variables(_environment().parse(self.source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation. Raises TokenizerError with the template's own words.

        Args:
            arguments: more of the template's arguments, which stand over those of the model.
            add_generation_prompt: the text ends with the head of the assistant's next turn.
            continue_final_message: the text ends where the last message ends, without the end of its turn.
        """
        if continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1].get('content')}{self._mark}"}]
        try:
            text = self._template.render(  # one mapping: an argument may have any name
                {
                    **self._arguments,
                    **(arguments or {}),
                    "messages": list(messages),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TEMPLATE_ERRORS as error:
            raise TokenizerError(f"the chat template refuses the conversation: {error}") from error
        if not continue_final_message:
            return text
        before, mark, after = text.rpartition(self._mark.strip())
        if not mark:
            raise TokenizerError("the chat template leaves out the last message, so that cannot be continued")
        return before if after.startswith(" ") else before.rstrip()  # it may strip messages


def model_file(model: str, name: str, *, local_only: bool = False) -> Path | None:
    """A file of a model folder, or of the hub's cache (else the hub, unless `local_only`); None when there is none."""
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download  # a slow import, and most runs train a model in a folder
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name, local_files_only=local_only))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError):
        return None


def token_text(token: Any) -> str | None:
    """The text of a special token in a config, which has its text or an object around it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def content_text(content: Any) -> Any:
    """The text of a message whose content is in OpenAI's text parts, joined as vLLM joins them; others as they are."""
    if not isinstance(content, list | tuple):
        return content
    texts = [part["text"] for part in content if isinstance(part, Mapping) and part.keys() == {"type", "text"}]
    is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "\n".join(texts) if is_text else content


class _Generation(Extension):
    """`{% generation %}` around what the assistant wrote: of use for masks in training, without effect on the text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements in between, in a scope of their own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The jinja2 dialect in which chat templates are written: what model folders expect, and nothing that can act."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tokenizer_config(model: str, local_only: bool) -> dict[str, Any]:
    """tokenizer_config.json; in older models the special tokens are in a file of their own, which stands over it."""
    config = _read_json(model_file(model, "tokenizer_config.json", local_only=local_only))
    if "added_tokens_decoder" in config:
        return config
    return {**config, **_read_json(model_file(model, "special_tokens_map.json", local_only=local_only))}


def _read_json(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _template_of(config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
