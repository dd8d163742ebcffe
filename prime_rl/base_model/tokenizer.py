"""The base model's tokenizer: one token a byte, three special tokens, and a chat template.

Bytes, because nothing has to be learnt and any text comes back unchanged; for ASCII a token is a character.
"""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)

# Every tag strips the white space around it and line ends are written out, so that the template means the same
# whatever a renderer's `trim_blocks` and `lstrip_blocks` are.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant' + '\\n' -}}
{%- endif -%}
"""


def build_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a model with room for `max_positions` tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *letters))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=PAD,
        extra_special_tokens=[TURN_START],
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class PromptEncoder:
    """Token ids of one-turn prompts, without rendering the template for each of thousands."""

    _STAND_IN = "@"

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        message = {"role": "user", "content": self._STAND_IN}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        before, after = text.split(self._STAND_IN)
        self._tokenizer = tokenizer
        self._before, self._after = self._ids(before), self._ids(after)
        self._end = self._ids(TURN_END)

    def prompt(self, content: str) -> list[int]:
        """A user turn, ready for the assistant's."""
        return self._before + self._ids(content) + self._after

    def answer(self, content: str) -> list[int]:
        """The assistant's message, with the token that ends its turn."""
        return self._ids(content) + self._end

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
