"""Chat messages to token ids, without transformers: `tokenizers` and a sandboxed jinja2 chat template.

Token-in/token-out: a conversation is never rendered twice for the model. The first turn is rendered whole; each later
turn appends only the new messages, so that the tokens the policy sampled stay exactly as it sampled them.
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
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from prime_rl.orchestrator.envs.base import Message

# All rollouts of a group ask for the same prompt, one after the other; rendering it is a fifth of what a rollout costs.
NUM_PROMPTS_KEPT = 32


class TokenizerError(ValueError):
    """A model folder without a usable tokenizer or chat template, or a conversation that the template refuses."""


class ChatTokenizer:
    """The tokenizer and the chat template of one model.

    `arguments` are those of the template other than the conversation: special tokens, and what the run sets.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, arguments: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._arguments = arguments
        self._prompts: dict[tuple[tuple[str, str], ...], list[int]] = {}
        # Replaces the policy's message where only the text behind it is needed. Random, so that no message
        # can contain it by intent.
        self._stand_in = f"assistant-turn-{secrets.token_hex(16)}"
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template is not valid: {error}") from error

    @classmethod
    def load(cls, model: str, template_kwargs: Mapping[str, Any] | None = None) -> ChatTokenizer:
        """Load from a model folder, or from the local hub cache (else the hub) when `model` is not a folder.

        Raises TokenizerError that names the missing file, or the argument of the template that may not be set.
        """
        tokenizer_file = _model_file(model, "tokenizer.json")
        if tokenizer_file is None:
            raise TokenizerError(f"model {model!r}: tokenizer.json not found")
        config = _read_config(_model_file(model, "tokenizer_config.json"))
        template_file = _model_file(model, "chat_template.jinja")
        template = template_file.read_text() if template_file else _template_of(config)
        if template is None:
            raise TokenizerError(
                f"model {model!r}: chat template not found in chat_template.jinja and in the tokenizer config"
            )
        special = {key: text for key in ("bos_token", "eos_token", "pad_token") if (text := _text(config.get(key)))}
        own = template_kwargs or {}
        if taken := sorted(own.keys() & {*special, "messages", "add_generation_prompt"}):
            raise TokenizerError(f"sampling.chat_template_kwargs: {', '.join(taken)} must not be set here")
        return cls(Tokenizer.from_file(str(tokenizer_file)), template, {**own, **special})

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next turn."""
        key = tuple((message["role"], message["content"]) for message in messages)
        if key not in self._prompts:
            if len(self._prompts) == NUM_PROMPTS_KEPT:
                self._prompts.clear()
            self._prompts[key] = self._encode(self._render(messages))
        return list(self._prompts[key])

    def continuation(self, messages: Sequence[Message], num_seen: int) -> list[int]:
        """Token ids that follow the assistant turn `messages[num_seen - 1]`, up to the assistant's next turn.

        They begin with the end-of-turn tokens of that turn, whether or not the policy sampled those itself.
        """
        masked: list[Message] = [
            {"role": "assistant", "content": self._stand_in} if i == num_seen - 1 else message
            for i, message in enumerate(messages)
        ]
        _, found, rest = self._render(masked).partition(self._stand_in)
        if not found:
            raise TokenizerError(
                "the chat template drops earlier assistant turns: environments with several turns need them"
            )
        return self._encode(rest)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._arguments)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template refuses the conversation: {error}") from error

    def _encode(self, text: str) -> list[int]:
        # The template writes every special token itself.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _environment() -> ImmutableSandboxedEnvironment:
    """The jinja2 dialect in which chat templates are written: what model folders expect, and nothing that can act."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _model_file(model: str, name: str) -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download  # a slow import, and most runs train a model in a folder
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError):
        return None


def _read_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _template_of(config: dict[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _text(token: Any) -> str | None:
    """A special token in the config: its text, or an object around it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
