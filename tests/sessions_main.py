"""An application with many users at once: `python -m tests.sessions_main URL KEY LOG STOP`.

Each user is a thread that opens a session, asks a few times with OpenAI's or Anthropic's own client, posts a reward
that no other session has, and begins again until the file STOP is there. What happens goes into LOG, a JSON object a
line. A user whose client has given up with an error that asks to try again tries again, as a program of long life does.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import httpx
import openai

NUM_USERS = 50
NUM_TURNS = 3
# A user thinks for so long between two turns, and before trying again.
PAUSE_S = 0.5
T = TypeVar("T")
FAILURES = (openai.APIConnectionError, anthropic.APIConnectionError, httpx.TransportError)
REFUSALS = (openai.APIStatusError, anthropic.APIStatusError, httpx.HTTPStatusError)


class Refused(Exception):
    """An answer that trying again does not change."""


class Log:
    """Lines of JSON from several threads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")


def opened(http: httpx.Client, url: str, name: str) -> dict[str, Any]:
    answer = http.post(url, json={"example": name})
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def with_openai(session: dict[str, Any], said: list[str]) -> tuple[str, dict[str, Any]]:
    with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
        messages: Any = turns(said)
        choice = client.chat.completions.create(model="", messages=messages).choices[0]
    return choice.message.content or "", choice.model_extra or {}


def with_anthropic(session: dict[str, Any], said: list[str]) -> tuple[str, dict[str, Any]]:
    with anthropic.Anthropic(base_url=session["anthropic_base_url"], api_key=session["api_key"]) as client:
        messages: Any = turns(said)
        message = client.messages.create(model="any", max_tokens=64, messages=messages)
    text = "".join(block.text for block in message.content if block.type == "text")
    return text, message.model_extra or {}


def turns(said: list[str]) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]


def reward_of(name: str) -> float:
    """Another one for each session, which no rounding changes."""
    number, round_ = map(int, name.split())
    return (number + NUM_USERS * round_) / 2**20


class User:
    def __init__(self, number: int, url: str, key: str, log: Log, stop: Path) -> None:
        self._number, self._url, self._log, self._stop = number, url, log, stop
        self._http = httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False)
        self._ask = with_openai if number % 2 else with_anthropic

    def run(self) -> None:
        for round_ in itertools.count():
            name = f"{self._number} {round_}"
            try:
                self.work(name)
            except Refused:
                continue
            except TimeoutError:
                return

    def work(self, name: str) -> None:
        session = self.insist(name, "open", lambda: opened(self._http, self._url, name))
        self._log.write("opened", name=name, session=session["session"])
        said = [f"{name} "]

        def ask() -> tuple[str, dict[str, Any]]:
            return self._ask(session, said)

        for _ in range(NUM_TURNS):
            text, extra = self.insist(name, "ask", ask)
            self._log.write("answered", name=name, number=extra["answer"], token_ids=extra["token_ids"])
            said += [text, "and?"]
            time.sleep(PAUSE_S)
        where = session["anthropic_base_url"] + "/reward"

        def post() -> None:
            self._http.post(where, json={"reward": reward_of(name)}).raise_for_status()

        self.insist(name, "reward", post)
        self._log.write("rewarded", name=name)

    def insist(self, name: str, what: str, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, made again where that may help. Raises Refused, TimeoutError once it is to stop."""
        while not self._stop.exists():
            try:
                return attempt()
            except FAILURES as error:
                self._log.write("failed", name=name, what=what, error=repr(error))
            except REFUSALS as error:
                response = error.response
                fields = {"status": response.status_code, "retry": response.headers.get("x-should-retry")}
                self._log.write("refused", name=name, what=what, body=response.text, **fields)
                if fields["retry"] != "true":
                    raise Refused from error
            time.sleep(PAUSE_S)
        raise TimeoutError


def main(url: str, key: str, log: str, stop: str) -> None:
    shared = Log(Path(log))
    users = [User(number, url, key, shared, Path(stop)) for number in range(NUM_USERS)]
    threads = [threading.Thread(target=user.run) for user in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
