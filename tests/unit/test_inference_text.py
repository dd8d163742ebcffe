"""The work of the tokenizer: in threads of its own, for clients that still wait, whatever a chat has in it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.batch import Job
from prime_rl.inference.embedded.protocol import ChatMessage, ChatRequest, Text, chat_events
from prime_rl.inference.embedded.server import Api
from prime_rl.inference.errors import ApiError
from tests.patience import PATIENCE_S
from tests.request_fuzz import WORDS

TEMPLATE = (
    "{% if upper %}{{ upper.strip() * count }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, ":": 2, ";": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return Text(str(folder))


@pytest.mark.parametrize("content", WORDS)
def test_what_a_message_says_is_text_to_the_template(text: Text, content: str) -> None:
    rendered = text.render_chat([{"role": "a", "content": content}], {})
    assert rendered == text.encode(f"a:{content};", False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"messages": []}, r"may not set \['messages'\]"),
        ({"upper": 3}, "has no attribute 'strip'"),
        ({"upper": "a", "count": {}}, "can't multiply"),
        ({"upper": "a"}, "can't multiply|is undefined"),
        ({"upper": "a", "count": 10**19}, "cannot fit"),
        ({"add_generation_prompt": False}, r"may not set \['add_generation_prompt'\]"),
    ],
)
def test_what_a_template_cannot_take_is_refused_in_one_line(text: Text, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        text.render_chat([{"role": "a", "content": "a"}], arguments)
    assert caught.value.status == 400 and caught.value.param in ("messages", "chat_template_kwargs")


class Asker:
    """A request whose client goes away after so many looks."""

    def __init__(self, num_looks: int, run_id: str = "") -> None:
        self._num_looks = num_looks
        self.scope = {"state": {"run_id": run_id}}

    async def is_disconnected(self) -> bool:
        self._num_looks -= 1
        return self._num_looks < 0


class SlowText:
    """A tokenizer that is done when it is told to be."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.release = threading.Event()

    def encode(self, prompt: str, add_special_tokens: bool) -> list[int]:
        self.encoded.append(prompt)
        assert self.release.wait(PATIENCE_S)
        return [1]


async def test_long_texts_hold_neither_the_loop_nor_the_threads_of_others(tmp_path: Path) -> None:
    slow: Any = SlowText()
    api = Api(None, slow, InferenceConfig(output_dir=tmp_path))  # type: ignore[arg-type]
    asked = [asyncio.create_task(api.complete(Asker(1), {"prompt": ["a", "b"]})) for _ in range(64)]  # type: ignore[arg-type]
    while len(slow.encoded) < 2:
        await asyncio.sleep(0.001)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), PATIENCE_S) == "done"
    assert len(slow.encoded) == 2, "two at a time"
    slow.release.set()
    gone = await asyncio.gather(*asked, return_exceptions=True)
    assert {str(each) for each in gone} == {"The client has closed the connection."}
    assert slow.encoded == ["a"] * 64, "and none for a client that has gone"


async def test_texts_of_a_run_wait_for_no_more_than_one_of_each_other_run(tmp_path: Path) -> None:
    slow: Any = SlowText()
    api = Api(None, slow, InferenceConfig(output_dir=tmp_path))  # type: ignore[arg-type]
    runs = [*["run_a"] * 64, "run_b"]
    asked = [asyncio.create_task(api.complete(Asker(1, each), {"prompt": [each, each]})) for each in runs]  # type: ignore[arg-type]
    while len(slow.encoded) < 2:
        await asyncio.sleep(0.001)
    slow.release.set()
    await asyncio.gather(*asked, return_exceptions=True)
    assert slow.encoded.index("run_b") <= 4


async def test_a_stream_is_decoded_in_a_thread() -> None:
    threads: set[threading.Thread] = set()

    class Letters:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            threads.add(threading.current_thread())
            return "a" * len(token_ids)

    asked = ChatRequest(messages=[ChatMessage(role="user", content="?")], stream=True)
    job, letters = Job([[1]], asked, slot=None, max_length=100), Letters()
    events = chat_events(letters, "m", asked, job, lambda job: None)  # type: ignore[arg-type]
    job.rows[0].token_ids.append(1)
    await anext(events)
    assert b'"content":"a"' in await anext(events)
    await events.aclose()
    assert threads and threading.main_thread() not in threads
