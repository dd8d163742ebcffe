"""Where other machines reach this one, and the ports on which it listens."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

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
