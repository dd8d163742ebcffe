"""Where alerts are sent. Each target has a thread of its own: one that hangs delays no other.

A message is one look's worth of alerts. Nothing here shows a URL, for it may hold a secret.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from daemons.quiet import OpenIncident
from prime_rl.configs.reports import AlertsConfig, variable_of
from prime_rl.utils.runtime import install_command
from prime_rl.utils.secrets import SecretError, read_secret
from prime_rl.utils.text import one_line

logger = logging.getLogger("alerts")

TIMEOUT_S = 10.0
# Waits between the tries to send one message; then it is given up, so that newer ones are sent.
RETRY_AFTER_S = (2.0, 5.0, 15.0)
MAX_WAITING = 100
MAX_ANSWER_BYTES = 1 << 16

# {"version", "workspace", "host", "text", "alerts": [{"kind", "subject", "state", "text", "at"}]}; `text` for people.
Message = Mapping[str, Any]
Send = Callable[[Message], None]


class TargetError(RuntimeError):
    """A target that cannot be used: one line, without its URL."""


class Target:
    """Sends messages in order, in a thread.

    Args:
        name: for the log; without secrets.
        send: sends one message or raises.
        max_waiting: messages kept while it does not answer; the oldest one is dropped for a new one.
    """

    def __init__(self, name: str, send: Send, *, max_waiting: int = MAX_WAITING) -> None:
        self.name, self.send = name, send
        self._waiting: queue.Queue[Message] = queue.Queue(max_waiting)
        self._stopping = threading.Event()
        threading.Thread(target=self._work, name=f"alerts to {name}", daemon=True).start()

    def put(self, message: Message) -> None:
        """Never waits."""
        while True:
            try:
                return self._waiting.put_nowait(message)
            except queue.Full:
                try:
                    self._waiting.get_nowait()
                    self._waiting.task_done()
                    logger.warning("%s: does not keep up, its oldest message is dropped", self.name)
                except queue.Empty:
                    pass

    def close(self, timeout_s: float) -> None:
        """Give it a last chance to send what waits."""
        deadline = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.05)
        self._stopping.set()

    def _work(self) -> None:
        while not self._stopping.is_set():
            message = self._waiting.get()
            for wait_s in (*RETRY_AFTER_S, None):
                try:
                    self.send(message)
                    break
                except Exception as error:  # whatever a target's library raises
                    logger.warning("%s: not sent: %s", self.name, type(error).__name__)
                    logger.debug("%s: %s", self.name, one_line(str(error)))
                    if wait_s is None or self._stopping.wait(wait_s):
                        break
            self._waiting.task_done()


def message_targets(config: AlertsConfig, environ: Mapping[str, str]) -> list[tuple[str, Send]]:
    """Names and senders of all targets. Raises TargetError."""
    targets: list[tuple[str, Send]] = []
    for number, target in enumerate(config.webhooks, start=1):
        url = _web_url(target, environ)
        targets.append((f"webhook {number} ({_host(url)})", partial(_request, url)))
    for number, target in enumerate(config.apprise, start=1):
        name = f"apprise {number} ({_resolve(target, environ).partition('://')[0]})"
        targets.append((name, _apprise(_resolve(target, environ), name)))
    return targets


def dead_man(config: AlertsConfig, environ: Mapping[str, str]) -> tuple[str, Send] | None:
    """Return the call that asks the dead man's URL, whatever the message."""
    if config.dead_man_url is None:
        return None
    url = _web_url(config.dead_man_url, environ)
    return f"dead man's switch ({_host(url)})", lambda message: _request(url)


def _resolve(target: str, environ: Mapping[str, str]) -> str:
    name = variable_of(target)
    if name is None:
        return target
    try:
        url = read_secret(name, environ)
    except SecretError as error:
        raise TargetError(str(error)) from error
    if not url:
        raise TargetError(f"${name}: not set; export {name} before prl up")
    return url


def _web_url(target: str, environ: Mapping[str, str]) -> str:
    url = _resolve(target, environ)
    if urlsplit(url).scheme not in ("http", "https"):
        raise TargetError(f"{target}: holds no http:// or https:// URL")
    return url


def _request(url: str, message: Message | None = None) -> None:
    """Raises OSError for a target that does not answer, or with an error."""
    headers, body = ({"Content-Type": "application/json"}, json.dumps(message).encode()) if message else ({}, None)
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=TIMEOUT_S) as reply:
        reply.read(MAX_ANSWER_BYTES)


def _host(url: str) -> str:
    return one_line(urlsplit(url).hostname or "no host")


def _apprise(url: str, name: str) -> Send:
    try:
        import apprise
    except ImportError as error:
        raise TargetError(f"{name}: package apprise not found; {install_command('alerts')}") from error
    service = apprise.Apprise()
    if not service.add(url):
        raise TargetError(f"{name}: not a URL that apprise knows")

    def send(message: Message) -> None:
        if not service.notify(title=f"prl {message['workspace']}", body=message["text"]):
            raise RuntimeError("apprise could not send it")

    return send


JSON_VERSION = 1
_WORDS = {
    "run_failed": "failed",
    "run_invalid": "has an invalid config",
    "run_evicted": "was evicted",
    "run_not_finite": "was evicted for values that are not finite",
    "run_stalled": "is stalled",
    "reward_collapsed": "lost its reward",
    "run_trouble": "needs a look",
    "daemon_crashed": "crashed",
    "daemon_stalled": "is stalled",
    "node_lost": "is lost",
    "disk_low": "is nearly full",
    "clocks": "differ",
    "test": "is a test",
}


def sentence(incident: OpenIncident) -> str:
    """The line that people read: "run_a was evicted: its loss is not finite"."""
    return f"{incident.subject} {_WORDS.get(incident.kind, incident.kind)}: {incident.text}"


def message(
    workspace: Path, opened: Sequence[OpenIncident], over: Sequence[OpenIncident], now: float
) -> dict[str, Any]:
    """One message for all that has changed. `state` is open or over; `since` and `at` are Unix seconds."""
    changes = [*(("open", each) for each in opened), *(("over", each) for each in over)]
    return {
        "version": JSON_VERSION,
        "workspace": str(workspace),
        "host": socket.gethostname(),
        "at": now,
        "text": "\n".join(("over: " if state == "over" else "") + sentence(each) for state, each in changes),
        "alerts": [
            {"kind": each.kind, "subject": each.subject, "state": state, "text": each.text, "since": each.since}
            for state, each in changes
        ],
    }
