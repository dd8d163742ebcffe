"""The link between the gateway and the orchestrators: one TCP connection a run, over which the gateway asks.

The orchestrator dials (`sessions.Link`). Each end proves to the other that it knows the workspace's secret. A newer
connection of a run replaces the older one. Messages are frames (`utils.frames`): the gateway's `Challenge`, the
orchestrator's `Hello`, the gateway's `Welcome`; then `Ask` and `Cancel`, `Replied`, and from both ends `Beat`. `key` is
a request. Whatever is wrong with a connection ends that one only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import msgspec

from prime_rl.contract.calls import Call, Open, Refusal, Reply, Request
from prime_rl.contract.files import UNDECODABLE
from prime_rl.gateway.keys import run_of
from prime_rl.utils.frames import frame, read_payload
from prime_rl.utils.text import one_line

logger = logging.getLogger("gateway")

# Far above any conversation as text: an answer has its tokens in it too.
MAX_MESSAGE_BYTES = 64 * 2**20
# Before it is known who is there.
HELLO_TIMEOUT_S = 10.0
MAX_HELLO_BYTES = 4 * 2**10
# Connections that have not said who they are; of more the oldest is closed.
MAX_STRANGERS = 64
# An end that is silent for LOST_AFTER_S is gone.
BEAT_S = 5.0
LOST_AFTER_S = 30.0
# What an end that does not read may leave unread.
MAX_UNREAD_BYTES = 4 * MAX_MESSAGE_BYTES


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """Prove that you know the secret, with this in the proof."""

    nonce: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The gateway's own proof: the orchestrator answers nothing before it."""

    proof: str


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A request in a session, or for `Open` of a run. `Replied` follows."""

    key: int
    session: str
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for that reply any more."""

    key: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The sender lives, and has so many open sessions."""

    num_sessions: int = 0


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Who this is, the proof, what the gateway is to prove itself with, and the longest sequence of the run."""

    run_id: str
    proof: str
    nonce: str
    max_model_len: int | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """As `calls.Refusal` has it."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class Replied(msgspec.Struct, frozen=True, tag=True):
    """The reply to an `Ask`, or its refusal."""

    key: int
    reply: Reply | Refused


decode_asked = msgspec.msgpack.Decoder(Challenge | Welcome | Ask | Cancel | Beat).decode
decode_replied = msgspec.msgpack.Decoder(Hello | Replied | Beat).decode


def prove(secret: bytes, end: Literal["gateway", "orchestrator"], run_id: str, nonce: str) -> str:
    """The proof of one end that it knows `secret`, over the nonce of the other one, whose own proof is no use here."""
    return hmac.digest(secret, f"{end}:{run_id}:{nonce}".encode(), "sha256").hex()


def is_proof(given: str, secret: bytes, end: Literal["gateway", "orchestrator"], run_id: str, nonce: str) -> bool:
    """True when `given` is that proof."""
    return hmac.compare_digest(given.encode(), prove(secret, end, run_id, nonce).encode())


class Lost(ConnectionError):
    """The other end is gone, or sent what it must not."""


class Wire:
    """One end of a connection: reads messages with a deadline, writes them without waiting."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, decode: Callable[[bytes], Any], timeout_s: float, limit: int = MAX_MESSAGE_BYTES) -> Any:
        """The next message. Raises Lost."""
        try:
            async with asyncio.timeout(timeout_s):
                return decode(await read_payload(self._reader, limit))
        except TimeoutError:
            raise Lost(f"nothing came for {timeout_s:g} s") from None
        except asyncio.IncompleteReadError:
            raise Lost("it was closed") from None
        except (OSError, ValueError, *UNDECODABLE) as error:
            raise Lost(one_line(str(error), 200)) from error

    def send(self, message: Any) -> None:
        """Write a message, unless the connection is closed. Raises ValueError for one that is too large."""
        data = frame(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.close()
        if not self._writer.is_closing():
            self._writer.write(data)

    def close(self) -> None:
        """Close it at once, with what is unsent."""
        self._writer.transport.abort()


class _Peer:
    """The orchestrator of one run, while it is connected."""

    def __init__(self, hello: Hello, wire: Wire) -> None:
        self.max_model_len = hello.max_model_len
        self.wire = wire
        self.num_sessions = 0
        self._run_id = hello.run_id
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._keys = itertools.count()

    async def ask(self, session: str, request: Request) -> Reply:
        """The reply of the orchestrator. Raises Refusal."""
        key = next(self._keys)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[key] = reply
        try:
            self.wire.send(Ask(key, session, request))
            return await reply
        except ValueError as error:
            raise Refusal(413, "invalid_request", str(error)) from error
        except asyncio.CancelledError:
            self.wire.send(Cancel(key))
            raise
        finally:
            del self._waiting[key]

    def take(self, message: Replied | Beat) -> None:
        """Hand out what the orchestrator said."""
        if isinstance(message, Beat):
            self.num_sessions = message.num_sessions
        elif (waiting := self._waiting.get(message.key)) is not None and not waiting.done():
            reply = message.reply
            if isinstance(reply, Refused):
                waiting.set_exception(Refusal(reply.status, reply.code, reply.message, reply.retry_after_s))
            else:
                waiting.set_result(reply)

    def end(self) -> None:
        """Refuse what waits: asked again, it joins what is still being answered."""
        self.wire.close()
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(_away(self._run_id))


class LinkServer:
    """The gateway's end: a `contract.calls.Backend` that asks the orchestrators that are connected.

    Attributes:
        num_calls: those asked since the start.
    """

    def __init__(self, secret: bytes) -> None:
        self.num_calls = 0
        self._secret = secret
        self._peers: dict[str, _Peer] = {}
        self._strangers: dict[Wire, None] = {}

    @property
    def num_runs(self) -> int:
        """Runs whose orchestrators are connected."""
        return len(self._peers)

    @property
    def num_sessions(self) -> int:
        """Their open sessions."""
        return sum(peer.num_sessions for peer in self._peers.values())

    @contextlib.asynccontextmanager
    async def listening(self, sock: socket.socket) -> AsyncIterator[None]:
        """Take connections at a bound socket for as long as the block runs."""
        server = await asyncio.start_server(self._connected, sock=sock, limit=2**20)
        try:
            yield
        finally:
            server.close()
            for peer in list(self._peers.values()):
                peer.end()

    def max_model_len(self, session: str) -> int | None:
        """The longest sequence of its run, while that is connected."""
        peer = self._peers.get(run_of(session) or "")
        return peer.max_model_len if peer else None

    async def ask(self, session: str, request: Request) -> Reply:
        """The reply of the run's orchestrator. Raises Refusal."""
        run_id = session if isinstance(request, Open) else run_of(session) or ""
        self.num_calls += isinstance(request, Call)
        if (peer := self._peers.get(run_id)) is None:
            raise _away(run_id)
        return await peer.ask(session, request)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire, hello = Wire(reader, writer), None
        try:
            hello = await self._greeted(wire)
            await self._serve(hello.run_id, _Peer(hello, wire))
        except Lost as error:
            logger.info("the link of %s ended: %s", hello.run_id if hello else "a stranger", error)
        finally:
            wire.close()

    async def _greeted(self, wire: Wire) -> Hello:
        """Who dialled. Raises Lost for one without proof."""
        self._strangers[wire] = None
        if len(self._strangers) > MAX_STRANGERS:
            next(iter(self._strangers)).close()
        try:
            nonce = secrets.token_urlsafe()
            wire.send(Challenge(nonce))
            hello = await wire.read(decode_replied, HELLO_TIMEOUT_S, MAX_HELLO_BYTES)
        finally:
            del self._strangers[wire]
        if not isinstance(hello, Hello):
            raise Lost("its first message is no Hello")
        if not is_proof(hello.proof, self._secret, "orchestrator", hello.run_id, nonce):
            raise Lost(f"its proof for {one_line(hello.run_id, 80)} is wrong: it has another secret")
        wire.send(Welcome(prove(self._secret, "gateway", hello.run_id, hello.nonce)))
        return hello

    async def _serve(self, run_id: str, peer: _Peer) -> None:
        if older := self._peers.get(run_id):
            older.end()
        self._peers[run_id] = peer
        logger.info("%s is connected", run_id)
        beating = asyncio.create_task(beat(peer.wire, Beat))
        try:
            while True:
                message = await peer.wire.read(decode_replied, LOST_AFTER_S)
                if isinstance(message, Hello):
                    raise Lost("it says Hello a second time")
                peer.take(message)
        finally:
            beating.cancel()
            peer.end()
            if self._peers.get(run_id) is peer:
                del self._peers[run_id]


def _away(run_id: str) -> Refusal:
    what = f"{one_line(run_id, 80)}'s orchestrator is not connected (is it running? prl status)"
    return Refusal(503, "unavailable", what, retry_after_s=1)


async def beat(wire: Wire, made: Callable[[], Beat]) -> None:
    """Send a `Beat` again and again, until it is cancelled."""
    while True:
        wire.send(made())
        await asyncio.sleep(BEAT_S)
