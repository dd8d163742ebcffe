"""The work of the tokenizer: in threads of its own, for clients that still wait, whatever a chat has in it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.batch import Job
from prime_rl.inference.embedded.server import Api, ChatMessage, ChatRequest, Text, chat_events
from prime_rl.inference.guard import ApiError
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


@pytest.mark.parametrize("lacks_memory", [True, False])
async def test_an_engine_without_memory_takes_no_more_rows_and_says_when_to_come_again(
    tmp_path: Path, lacks_memory: bool
) -> None:
    """Beside those that it computes again: not a fault of the request, which is made again."""
    submitted: list[Any] = []
    served = SimpleNamespace(vocab_size=9)

    def submit(prompts: Any, *_: Any, **__: Any) -> Any:
        submitted.append(prompts)
        raise ApiError(503, "the engine has stopped")

    engine: Any = SimpleNamespace(
        lacks_memory=lacks_memory, max_model_len=8, served=served, submit=submit, num_waiting_of=lambda run_id: 0
    )
    api = Api(engine, None, InferenceConfig(output_dir=tmp_path))  # type: ignore[arg-type]
    with pytest.raises(ApiError) as caught:
        await api.complete(Asker(9), {"prompt": [1, 2]})  # type: ignore[arg-type]
    if lacks_memory:
        assert (caught.value.status, submitted) == (429, []) and "out of memory" in caught.value.message
        assert caught.value.retry_after_s and f"again in {caught.value.retry_after_s} s" in caught.value.message
    else:
        assert (caught.value.status, submitted) == (503, [[[1, 2]]])
