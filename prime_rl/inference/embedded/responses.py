"""Completions as OpenAI's JSON, with vLLM's `token_ids` and `prompt_token_ids` on request. Pure; makes plain dicts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.inference.embedded.request import Completion, TopLogprobs
from prime_rl.inference.embedded.text import Text

# JSON has no minus infinity; vLLM writes this too.
MIN_LOGPROB = -9999.0


@dataclass(frozen=True)
class Finished:
    prompt_ids: Sequence[int]
    completions: Sequence[Completion]


def completion_response(
    text: Text, model: str, finished: Sequence[Finished], *, logprobs: bool, token_ids: bool, skip_special: bool
) -> dict[str, Any]:
    """Body of /v1/completions: the choices of all prompts in order."""
    choices: list[dict[str, Any]] = []
    for prompt in finished:
        for completion in prompt.completions:
            choices.append(
                {
                    "index": len(choices),
                    "text": _text(text, completion, skip_special),
                    "logprobs": _legacy_logprobs(text, completion) if logprobs else None,
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                    "token_ids": completion.token_ids if token_ids else None,
                    "prompt_token_ids": prompt.prompt_ids if token_ids else None,
                }
            )
    return _envelope("cmpl", "text_completion", model, choices, finished)


def chat_response(
    text: Text, model: str, finished: Finished, *, logprobs: bool, token_ids: bool, skip_special: bool
) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": _text(text, completion, skip_special)},
            "logprobs": {"content": _chat_logprobs(text, completion)} if logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if token_ids else None,
        }
        for index, completion in enumerate(finished.completions)
    ]
    body = _envelope("chatcmpl", "chat.completion", model, choices, [finished])
    return {**body, "prompt_token_ids": finished.prompt_ids if token_ids else None}


def _envelope(
    prefix: str, kind: str, model: str, choices: list[dict[str, Any]], finished: Sequence[Finished]
) -> dict[str, Any]:
    num_prompt = sum(len(prompt.prompt_ids) for prompt in finished)
    num_generated = sum(len(c.token_ids) for prompt in finished for c in prompt.completions)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        },
    }


def _text(text: Text, completion: Completion, skip_special: bool) -> str:
    decoded = text.decode(completion.token_ids, skip_special_tokens=skip_special)
    return decoded if completion.stop_at is None else decoded[: completion.stop_at]


def _legacy_logprobs(text: Text, completion: Completion) -> dict[str, Any]:
    tokens = [text.token(token_id) for token_id in completion.token_ids]
    offsets, position = [], 0
    for token in tokens:
        offsets.append(position)
        position += len(token)
    top = [
        {text.token(token_id): max(value, MIN_LOGPROB) for token_id, value in [*pairs, (token, logprob)]}
        for pairs, token, logprob in zip(completion.top, completion.token_ids, completion.logprobs, strict=False)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": completion.logprobs,
        "top_logprobs": top or None,
        "text_offset": offsets,
    }


def _chat_logprobs(text: Text, completion: Completion) -> list[dict[str, Any]]:
    tops: Sequence[TopLogprobs] = completion.top or [[]] * len(completion.token_ids)
    return [
        {**_chat_token(text, token_id, logprob), "top_logprobs": [_chat_token(text, *pair) for pair in top]}
        for token_id, logprob, top in zip(completion.token_ids, completion.logprobs, tops, strict=True)
    ]


def _chat_token(text: Text, token_id: int, logprob: float) -> dict[str, Any]:
    token = text.token(token_id)
    return {"token": token, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(token.encode())}
