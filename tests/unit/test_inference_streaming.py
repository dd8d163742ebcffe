"""What is streamed of an answer while it is generated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from prime_rl.inference.embedded.batch import Job
from prime_rl.inference.embedded.server import ChatMessage, ChatRequest, chat_events


class Letters:
    """Each token is the code of its letter."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))


def content(event: bytes) -> str:
    text: str = json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"].get("content", "")
    return text


async def test_only_text_that_stays_is_sent_and_a_client_that_goes_away_cancels() -> None:
    asked = ChatRequest(messages=[ChatMessage(role="user", content="?")], stop=["xyz"], stream=True)
    text: Any = Letters()
    # The beginning of a stop string, one that is complete, and a character of which bytes are missing.
    for seen in ("abxy", "abxyz", "ab\N{REPLACEMENT CHARACTER}qq"):
        job = Job([[1]], asked, slot=None, max_length=100)
        cancelled: list[Job] = []
        events = chat_events(text, "m", asked, job, cancelled.append)
        assert content(await anext(events)) == ""
        job.rows[0].token_ids.extend(map(ord, seen))
        assert content(await anext(events)) == "ab"
        await events.aclose()
        assert cancelled == [job]
