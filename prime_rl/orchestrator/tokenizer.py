"""Chat messages to token ids, without transformers: `tokenizers` and the model's chat template.

Token-in/token-out: a conversation is never rendered twice for the model. The first turn is rendered whole; each later
turn appends only the new messages, so that the tokens the policy sampled stay exactly as it sampled them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from prime_rl.orchestrator.envs.base import Message
from prime_rl.utils.chat_template import SPECIAL_TOKENS, ChatTemplate, model_file, token_text
from prime_rl.utils.chat_template import TokenizerError as TokenizerError

# All rollouts of a group ask for the same prompt, one after the other; rendering it is a fifth of what a rollout costs.
NUM_PROMPTS_KEPT = 32
TOKEN_FIELDS = {"single_word", "lstrip", "rstrip", "normalized", "special"}


class ChatTokenizer:
    """The tokenizer and the chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._prompts: dict[tuple[tuple[str, str], ...], list[int]] = {}
        # Replaces the policy's message where only the text behind it is needed. Random, so that no message
        # can contain it by intent.
        self._stand_in = f"assistant-turn-{secrets.token_hex(16)}"

    @classmethod
    def load(cls, model: str, template_kwargs: Mapping[str, Any] | None = None) -> ChatTokenizer:
        """Load from a model folder, or from the local hub cache (else the hub) when `model` is not a folder.

        Raises TokenizerError that names the missing file, or the argument of the template that may not be set.
        """
        tokenizer_file = model_file(model, "tokenizer.json")
        if tokenizer_file is None:
            raise TokenizerError(f"model {model!r}: tokenizer.json not found")
        template = ChatTemplate.load(model, template_kwargs)
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        _add_missing(tokenizer, template.config)
        return cls(tokenizer, template)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next turn. Raises TokenizerError."""
        key = tuple((message["role"], message["content"]) for message in messages)
        if key not in self._prompts:
            if len(self._prompts) == NUM_PROMPTS_KEPT:
                self._prompts.clear()
            self._prompts[key] = self._encode(self._template.render(messages))
        return list(self._prompts[key])

    def continuation(self, messages: Sequence[Message], num_seen: int) -> list[int]:
        """Token ids that follow the assistant turn `messages[num_seen - 1]`, up to the assistant's next turn.

        They begin with the end-of-turn tokens of that turn, whether or not the policy sampled those itself.
        """
        masked: list[Message] = [
            {"role": "assistant", "content": self._stand_in} if i == num_seen - 1 else message
            for i, message in enumerate(messages)
        ]
        _, found, rest = self._template.render(masked).partition(self._stand_in)
        if not found:
            raise TokenizerError(
                "the chat template drops earlier assistant turns: environments with several turns need them"
            )
        return self._encode(rest)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _encode(self, text: str) -> list[int]:
        # The template writes every special token itself.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _add_missing(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that only the config has, in transformers' order: else text is split where it is one token."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    listed = [decoder[index] for index in sorted(decoder, key=int)] + [config.get(key) for key in SPECIAL_TOKENS]
    for token in listed + (extra if isinstance(extra, list) else []):
        if (text := token_text(token)) and text not in known:
            known.add(text)
            fields = {"special": True, **(token if isinstance(token, dict) else {})}
            tokenizer.add_tokens([AddedToken(text, **{name: fields[name] for name in TOKEN_FIELDS & fields.keys()})])
