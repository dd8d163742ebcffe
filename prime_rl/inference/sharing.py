"""Requests under way, and who gives way when they and a change of weights or adapters need the same. For one loop.

`Turnstile`: requests that generate go through together, a change of the weights alone, for which those of others than
its run end. `Lanes`: places that runs get by turns. `AdapterUsers`: who uses an adapter that was unloaded gives way to
one that is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator

from starlette.types import Message, Receive

from prime_rl.contract.served import served_run
from prime_rl.inference.errors import ApiError

RETRY_AFTER_S = 1
# How long requests of nobody, or of another run, may hold up the weights of a run that is trained whole: at most so
# long at once, and at most this share of the time since they last did.
GUESTS_S, GUESTS_SHARE = 10.0, 0.2


class StillInUse(RuntimeError):
    """Requests did not end in time; `num_users` of them are left."""

    def __init__(self, num_users: int) -> None:
        super().__init__(f"{num_users} still in use")
        self.num_users = num_users


class Asked:
    """A request of a run. What reads from its client by `listen` is told that it has gone when the request is to `end`.

    Attributes:
        refusal: why it is to end; None while it may go on.
    """

    def __init__(self, run_id: str = "") -> None:
        self.run_id = run_id
        self.refusal: ApiError | None = None
        self.gone = asyncio.Event()
        self._listening: set[asyncio.Timeout] = set()

    def end(self, refusal: ApiError) -> None:
        """Have it end soon."""
        self.refusal = refusal
        for until in self._listening:
            until.reschedule(0.0)
        self._listening.clear()

    async def listen(self, receive: Receive) -> Message:
        """Return the next message of the client."""
        if self.refusal is None:  # whoever only looks gives up at the first wait
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as until:
                    self._listening.add(until)
                    try:
                        return await receive()
                    finally:
                        self._listening.discard(until)
        return {"type": "http.disconnect"}


class Turnstile:
    """Admits no new user while a caller is `alone` or waits for it, so a stream of requests cannot hold up a change."""

    def __init__(self) -> None:
        self._users: set[Asked] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._one_at_a_time = asyncio.Lock()
        self._guests_ended_at = float("-inf")

    async def enter(self, asked: Asked | None = None) -> contextlib.AbstractContextManager[None]:
        """Wait for admission; enter the returned context at once, without an `await` in between."""
        while not self._open.is_set():
            await self._open.wait()
        return self._inside(asked or Asked())

    @contextlib.contextmanager
    def _inside(self, asked: Asked) -> Iterator[None]:
        self._users.add(asked)
        self._empty.clear()
        try:
            yield
        finally:
            self._users.remove(asked)
            if not self._users:
                self._empty.set()

    async def _leave_but(self, run_id: str) -> None:
        loop = asyncio.get_running_loop()
        grace_s = min(GUESTS_S, GUESTS_SHARE * (loop.time() - self._guests_ended_at))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        message = f"The weights of {run_id or 'the start'} are loaded: ask again."
        for asked in [each for each in self._users if each.run_id != run_id]:
            asked.end(ApiError(503, message, retry_after_s=RETRY_AFTER_S))
            self._guests_ended_at = loop.time()

    @contextlib.asynccontextmanager
    async def alone(self, timeout_s: float, run_id: str = "") -> AsyncIterator[None]:
        """Admit no requests, wait until all have left; those of others than `run_id` may take GUESTS_S at most.

        Raises StillInUse after `timeout_s`.
        """
        async with self._one_at_a_time:
            self._open.clear()
            try:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._leave_but(run_id)
                        await self._empty.wait()
                except TimeoutError:
                    raise StillInUse(len(self._users)) from None
                yield
            finally:
                self._open.set()


class Lanes:
    """Some places. Of each run one waiter gets one after the other, those of all runs by turns."""

    def __init__(self, num_places: int = 1) -> None:
        self._num_free = num_places
        self._lanes: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, run_id: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        if not self._num_free:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._lanes.setdefault(run_id, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():  # it was given just now
                    self._pass_on()
                raise
        else:
            self._num_free -= 1
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._lanes:
            run_id = next(iter(self._lanes))
            lane = self._lanes.pop(run_id)
            first = lane.popleft()
            if lane:
                self._lanes[run_id] = lane  # behind those of all others
            if not first.done():
                first.set_result(None)
                return
        self._num_free += 1


class AdapterUsers:
    """Requests under way by the adapter they use. One that was unloaded meanwhile keeps its slot until they have ended.

    Args:
        loaded: names of the adapters that are loaded now.
    """

    def __init__(self, loaded: Callable[[], Collection[str]]) -> None:
        self._loaded = loaded
        self._loads = itertools.count(1)
        self._latest: dict[str, int] = {}
        # By number and name of the load.
        self._users: dict[tuple[int, str], set[Asked]] = {}

    @contextlib.contextmanager
    def using(self, name: str, asked: Asked) -> Iterator[None]:
        """Note a request that uses the adapter `name`, as it is loaded now."""
        load = self._latest.get(name, 0), name
        users = self._users.setdefault(load, set())
        users.add(asked)
        try:
            yield
        finally:
            users.remove(asked)
            if not users:
                del self._users[load]
            asked.gone.set()

    async def make_room(self, name: str, num_slots: int) -> None:
        """End requests until `name` fits, which is about to be loaded: the oldest of whom holds the most slots."""
        while (unloaded := self._unloaded()) and len(self._loaded()) + len(unloaded) >= num_slots:
            held = Counter(served_run(each) for _, each in unloaded)
            oldest = min(unloaded, key=lambda load: (-held[served_run(load[1])], load))
            message = f"The lora adapter {oldest[1]!r} was unloaded, and another one needs its slot."
            users = set(self._users[oldest])
            for asked in users:
                asked.end(ApiError(404, message, param="model"))
            for asked in users:
                await asked.gone.wait()
        self._latest = {each: load for each, load in self._latest.items() if each in self._loaded()}
        self._latest[name] = next(self._loads)

    def _unloaded(self) -> list[tuple[int, str]]:
        here = self._loaded()
        return [load for load in self._users if load[1] not in here or load[0] != self._latest.get(load[1], 0)]
