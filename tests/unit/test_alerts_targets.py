"""Targets that hang, refuse or do not exist hold nothing else up, and no URL is shown."""

from __future__ import annotations

import http.server
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from daemons.alerts import targets
from daemons.alerts.targets import Message, Target, TargetError, dead_man, message_targets
from prime_rl.configs.reports import AlertsConfig
from prime_rl.contract.files import wait_for
from tests.patience import PATIENCE_S

# It imports a module of Python that is on its way out.
OF_APPRISE = pytest.mark.filterwarnings("ignore:.*imghdr:DeprecationWarning")
NOTE: Message = {"workspace": "/w", "text": "run_a failed: boom", "alerts": []}


class Server:
    """A webhook. It answers with the codes in `answers`, then with 200."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []
        self.answers: list[int] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.got.append((self.path, json.loads(body) if body else None))
                self.send_response(outer.answers.pop(0) if outer.answers else 200)
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *args: object) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def test_a_webhook_gets_the_message_as_json(server: Server) -> None:
    ((name, send),) = message_targets(AlertsConfig(webhooks=["$HOOK"]), {"HOOK": f"{server.url}/secret"})
    send(NOTE)
    assert server.got == [("/secret", NOTE)]
    assert name == "webhook 1 (127.0.0.1)"


def test_the_dead_man_is_asked(server: Server) -> None:
    found = dead_man(AlertsConfig(dead_man_url=f"{server.url}/ping"), {})
    assert found is not None
    found[1]({})
    assert server.got == [("/ping", None)]
    assert dead_man(AlertsConfig(), {}) is None


def test_a_target_that_refuses_is_tried_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(targets, "RETRY_AFTER_S", (0.0, 0.0))
    server.answers = [500, 500]
    ((name, send),) = message_targets(AlertsConfig(webhooks=[f"{server.url}/secret"]), {})
    with caplog.at_level(logging.INFO, "alerts"):
        target = Target(name, send)
        target.put(NOTE)
        wait_for(lambda: len(server.got) == 3, "three tries", timeout_s=PATIENCE_S)
    target.close(PATIENCE_S)
    assert "not sent: HTTPError" in caplog.text and "secret" not in caplog.text


def test_a_message_is_given_up_so_that_newer_ones_are_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "RETRY_AFTER_S", (0.0,))
    server.answers = [500, 500]
    ((name, send),) = message_targets(AlertsConfig(webhooks=[server.url]), {})
    target = Target(name, send)
    for number in (1, 2):
        target.put({**NOTE, "number": number})
    wait_for(lambda: len(server.got) == 3, "the second message", timeout_s=PATIENCE_S)
    assert [body["number"] for _, body in server.got] == [1, 1, 2]
    target.close(PATIENCE_S)


def test_a_target_that_hangs_never_makes_anybody_wait() -> None:
    free, sent = threading.Event(), []

    def send(note: Message) -> None:
        free.wait(PATIENCE_S)
        sent.append(note["number"])

    target = Target("hangs", send, max_waiting=3)
    for number in range(1000):
        target.put({"number": number})  # returns, though nothing is sent
    assert sent == []
    free.set()
    target.close(PATIENCE_S)
    assert sent[-3:] == [997, 998, 999] and len(sent) <= 4, "the oldest ones were dropped"


@OF_APPRISE
@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"webhooks": ["$NOT_THERE"]}, r"\$NOT_THERE: not set; export NOT_THERE"),
        ({"webhooks": ["$A_FILE"]}, r"\$A_FILE: holds no http:// or https:// URL"),
        ({"apprise": ["nonsense://secret"]}, r"apprise 1 \(nonsense\): "),
    ],
)
def test_a_target_that_cannot_be_used_is_one_line_without_its_url(table: dict[str, Any], words: str) -> None:
    with pytest.raises(TargetError, match=words) as error:
        message_targets(AlertsConfig(**table), {"A_FILE": "file:///secret"})
    assert "secret" not in str(error.value)


@OF_APPRISE
def test_apprise_sends_the_text(server: Server) -> None:
    pytest.importorskip("apprise")
    url = server.url.replace("http://", "json://")
    ((name, send),) = message_targets(AlertsConfig(apprise=[url]), {})
    send(NOTE)
    ((_, body),) = server.got
    assert body["message"] == NOTE["text"] and body["title"] == "prl /w"
    assert name == "apprise 1 (json)"
