"""Where other machines reach this one, the ports on which it listens, and the rule of every HTTP server of the project.

A page in a browser reaches none but the server that it came from. It can send requests to each address that its
reader's machine reaches, and give that address a name of its own. So the name that is asked for (`Host`) must be one of
the server's, a page (`Origin`) must come from that name, and a POST must be declared as JSON: browsers ask before they
send that elsewhere.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections import defaultdict
from collections.abc import Collection, Iterable

import psutil

LOOPBACK = "127.0.0.1"
# Reserved for documents: nothing is there, and nothing is sent. It only makes the kernel choose a way out.
OUTSIDE = ("192.0.2.1", 9)


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`, or None when none of this machine's has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`: "localhost", or a loopback address. Looks up no name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_address() -> str:
    """The IPv4 address of the interface that leads outside, else of any that is not the loopback, else loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(OUTSIDE)
        return str(probe.getsockname()[0])
    every = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    outside = [each.address for each in every if each.family == socket.AF_INET and not each.address.startswith("127.")]
    return min(outside, default=LOOPBACK)


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet. Raises OSError when the port is taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, though there is but one: asyncio switches Nagle's delay off only where it is, and with that
    # delay an answer on a kept connection can be 40 ms late.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # Without it a restart would fail while old connections are in TIME_WAIT.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


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
