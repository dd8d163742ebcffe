"""A server that answers chats beside two runs, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from daemons.chat import Chat, ChatSettings
from prime_rl.contract.files import mark_stable
from tests.daemons_support import RUN_TOML
from tests.inference_support import KEY, RunningServer, adapter_dir, make_adapter, make_model, start

GREEDY = ChatSettings(max_tokens=12, temperature=0.0)
# What two runs of two versions fill beside the slot of chats.
RUNS_VERSIONS = ("run_a@v1", "run_a@v2", "run_b@v1", "run_b@v2")


def chat_server(folder: Path) -> Iterator[RunningServer]:
    """An embedded server with a key, and two runs of two versions each in its workspace."""
    model = make_model(folder / "model")
    running = start("embedded", model, folder / "workspace", env={"PRL_API_KEY": KEY})
    try:
        for seed, name in enumerate(RUNS_VERSIONS):
            made = make_adapter(adapter_dir(running, name), model, seed=seed)
            mark_stable(made)
            control = made.parents[1] / "control"
            control.mkdir(exist_ok=True)
            (control / "orch.toml").write_text(RUN_TOML.format(max_steps=3, model=model))
            metrics = made.parents[1] / "metrics" / "orchestrator.jsonl"
            metrics.parent.mkdir(exist_ok=True)
            metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')
        yield running
        running.stop_and_leave_nothing()
    finally:
        running.process.kill()


def loaded(server: RunningServer) -> list[str]:
    return [model["id"] for model in server.get("/v1/models").json()["data"]][1:]


def ask(chat: Chat, question: str = "hello") -> str:
    return "".join(chat.answer(question))


def answer_of(server: RunningServer, model: str, *contents: str, **fields: Any) -> str:
    """The answer at once, to questions and answers in turn."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]
    body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0, **fields}
    response = server.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text
