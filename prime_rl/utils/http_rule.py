"""The rule of every HTTP server of the project: a page in a browser reaches none but the server that it came from.

A page can send requests to each address that its reader's machine reaches, and give that address a name of its own. So
the name that is asked for (`Host`) must be one of the server's, a page (`Origin`) must come from that name, and a POST
must be declared as JSON: browsers ask before they send that elsewhere.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

from prime_rl.utils.network import is_loopback

_AUTHORITY = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")
_SHOWN = 100


def refusal(
    method: str, headers: Iterable[tuple[str, str]], hosts: Collection[str] | None = ()
) -> tuple[int, str] | None:
    """Return the HTTP status and one line for a request that must not be answered, else None.

    Args:
        headers: name and value of each, one that is sent twice twice.
        hosts: the server's names beside those of the loopback; None: any, since the server asks for a key.
    """
    found = defaultdict(list)
    for name, value in headers:
        found[name.lower()].append(value.strip().lower())
    host = found["host"][0] if len(found["host"]) == 1 else ""
    parts = _AUTHORITY.fullmatch(host)
    asked = parts and (parts["address"] or parts["name"])
    if hosts is not None and (asked is None or not (is_loopback(asked) or asked in hosts)):
        return 403, f"Host {host[:_SHOWN]!r} is not a name of this server: use 127.0.0.1 or localhost."
    if foreign := [origin for origin in found["origin"] if origin.partition("://")[2] != host]:
        return 403, f"Requests from pages of other sites are refused: Origin is {foreign[0][:_SHOWN]!r}."
    kinds = [value.partition(";")[0].strip() for value in found["content-type"]]
    if method == "POST" and kinds != ["application/json"]:
        return 415, "The body must be JSON, with Content-Type: application/json."
    return None
