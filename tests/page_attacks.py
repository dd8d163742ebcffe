"""What a page in a browser can have its reader's machine send. No server of the project answers any of it."""

from __future__ import annotations

import http.client
from typing import NamedTuple

from tests.patience import PATIENCE_S

JSON = {"Content-Type": "application/json"}


class Attack(NamedTuple):
    """A request of a page, and the status with which it is refused."""

    what: str
    method: str
    headers: dict[str, str]
    status: int


def attacks(port: int) -> list[Attack]:
    """Return all of them, for a server that listens on `port` of the loopback without a key."""
    return [*bent_names(port), *foreign_pages(port), *simple_posts(port)]


def bent_names(port: int) -> list[Attack]:
    """Return requests under names of other sites that lead to the loopback."""
    names = (
        *("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", f"localhost.evil.example:{port}"),
        *(f"evil.example@127.0.0.1:{port}", f"0.0.0.0:{port}", f"127.0.0.1:{port}, evil.example", "", "[::1", "::1"),
    )
    return [Attack(f"host {name!r}", "GET", {"Host": name}, 403) for name in names]


def foreign_pages(port: int) -> list[Attack]:
    """Return requests of pages of other sites: another name, another port, a page without an origin."""
    own = {"Host": f"127.0.0.1:{port}"}
    origins = ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}", f"http://localhost:{port}", "file://")
    return [
        Attack(f"{method} from {origin}", method, {**own, **JSON, "Origin": origin}, 403)
        for origin in origins
        for method in ("GET", "POST", "OPTIONS")
    ]


def simple_posts(port: int) -> list[Attack]:
    """Return what a browser sends to another site without asking it, and kinds that only look like JSON."""
    kinds = (
        *("text/plain", "text/plain; x=json", "text/plain;application/json", "multipart/form-data; boundary=json"),
        *("application/x-www-form-urlencoded", "application/jsonp", "application/merge-patch+json", "json", "*/json"),
        *("text/plain, application/json", "application/json, text/plain", "application/json x", ""),
    )
    own = {"Host": f"127.0.0.1:{port}"}
    posts = [Attack(f"a POST of {kind!r}", "POST", {**own, "Content-Type": kind}, 415) for kind in kinds]
    return [Attack("a POST without a kind", "POST", own, 415), *posts]


def ask(port: int, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, bytes]:
    """Send exactly these headers to 127.0.0.1; return the status and the body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if method == "POST":
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def answered(port: int, path: str, key: str | None = None) -> list[str]:
    """Return the attacks on `path` that were not refused as they should be. With a key any name will do."""
    found = []
    with_key = {"Authorization": f"Bearer {key}"} if key else {}
    for attack in [*foreign_pages(port), *simple_posts(port)] if key else attacks(port):
        status, _ = ask(port, attack.method, path, attack.headers | with_key)
        if status != attack.status:
            found.append(f"{attack.what}: {status}, not {attack.status}")
    return found
