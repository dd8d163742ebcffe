"""Between text and token ids: the tokenizer of the model. Used by the HTTP side and, for stop strings, the engine.

Only reads the tokenizer, so it may be called from several threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import AutoTokenizer

from prime_rl.inference.errors import ApiError
from prime_rl.utils.chat_template import RESERVED, ChatTemplate, TokenizerError


class Text:
    """Tokenizer and chat template of the model in folder (or of hub name) `name`."""

    def __init__(self, name: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        self._template: ChatTemplate | str
        try:
            self._template = ChatTemplate.load(name)
        except TokenizerError as error:  # a model without one has completions
            self._template = str(error)
        self._token_texts: dict[int, str] = {}

    def vocabulary(self) -> Collection[str]:
        """All tokens, as the tokenizer writes them."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids` together; special tokens are left out unless asked for."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str:
        """One token as text, special tokens too."""
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return self._token_texts[token_id]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], **flags: bool
    ) -> list[int]:
        """Token ids of a chat; `flags` are those of `ChatTemplate.render`. Raises ApiError 400."""
        if isinstance(self._template, str):
            raise ApiError(400, f"{self._template}: use /v1/completions.", param="messages")
        if taken := sorted(RESERVED & arguments.keys()):
            raise ApiError(400, f"chat_template_kwargs may not set {taken}", param="chat_template_kwargs")
        try:
            return self.encode(self._template.render(messages, arguments, **flags), False)
        except TokenizerError as error:
            raise ApiError(400, str(error), param="messages") from error
