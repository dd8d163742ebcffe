"""Requests under way, and who gives way when they and a change of weights or adapters need the same. For one loop.

`ReadWriteLock`: requests that generate go through together, a change of the weights alone, for which those of others
than its run end. `Lanes`: places that runs get by turns. `AdapterUsers`: who uses an adapter that was unloaded gives
way to one that is loaded. `Turns`: work is noted before it begins, and after a death the runs that were in work then
are each apart.

Such a suspect shares the engine with nothing until its first PROOFS requests were answered, four times as many after
each further death, and all others wait, so a note with a suspect in it names the one that ended the engine. A request
that was refused proves nothing. Turns are short, and go to who waited for its own longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass

from starlette.types import Message, Receive

from prime_rl.contract.notes import Item, WorkNote
from prime_rl.contract.served import served_run
from prime_rl.inference.guard import RETRY_AFTER_S, ApiError

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


class ReadWriteLock:
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


# A batch of a small run: what ends an engine does so with one of its first requests, or with the sum of many.
PROOFS = 16
PROOFS_FACTOR = 4
MOST_PROOFS = 4096
# A server that lives so long has forgiven those that were cleared.
FORGIVES_S = 3600.0
# Long enough to decode requests together, short enough for all to be served within a client's patience.
TURN_S = 10.0
WAIT_S = 30.0
# What has ended stays in the note for so long, or requests of two runs by turns would each write it.
RECENT_S = 10.0


class Turns:
    """Requests of suspects by turns with those of all others.

    Args:
        alive: whether the engine works. The note of one that has failed stays as it is.
        check: generates a token with the base model. An engine that dies of that is the fault of no suspect.
    """

    def __init__(
        self,
        note: WorkNote,
        alive: Callable[[], bool],
        check: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._note = note
        self._alive = alive
        self._check = check
        self._is_checked = False
        self._clock = clock
        self._forgives_at = clock() + FORGIVES_S
        self._suspects = note.suspects
        self._open: Counter[Item] = Counter()
        self._used_at: dict[Item, float] = {}
        self._noted: set[Item] = set()
        self._begun: Counter[str] = Counter()  # of each suspect
        self._proofs: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        # A turn is that of a suspect, or None: of all others together.
        self._served_at: dict[str | None, float] = {}
        self._turn: tuple[str | None, float] = (None, 0.0)
        self._changed = asyncio.Event()

    def tick(self) -> str | None:
        """Take out of the note what ended long ago. Returns what requests wait for, in words; None while none waits."""
        if forgiven := bool(self._note.cleared) and self._clock() >= self._forgives_at:
            self._note.cleared.clear()
        self._write_note(forgiven)
        return self._waits_for()

    def _waits_for(self) -> str | None:
        if not self._waiting:
            return None
        served = self._turn[0] or "requests of other runs"
        suspects = ", ".join(sorted(run_id or "the base model" for run_id in self._suspects))
        return f"{served} to be answered: {suspects} get turns, since inference ended while it served them"

    @contextlib.asynccontextmanager
    async def work(self, item: Item) -> AsyncIterator[Outcome]:
        """Wait for the turn of the item's run, and note it. Raises ApiError (503) when the turn does not come soon."""
        run_id, outcome, is_answered = item.run_id, Outcome(), False
        if self._suspects:
            await self._wait_for_turn(run_id)
        needed = min(PROOFS * PROOFS_FACTOR ** (self._suspects.get(run_id, 1) - 1), MOST_PROOFS)
        if is_early := run_id in self._suspects and self._begun[run_id] < needed:
            self._begun[run_id] += 1
        self._open[item] += 1
        self._write_note()
        try:
            yield outcome
            is_answered = not outcome.is_refused
        finally:
            self._open[item] -= 1
            if is_early and not is_answered:
                self._begun[run_id] -= 1
            elif is_early and self._alive():
                self._proofs[run_id] += 1
            if is_harmless := is_early and self._proofs[run_id] == needed:
                self._note.cleared[run_id] = self._suspects.pop(run_id)
            self._write_note(is_harmless)
            self._changed.set()

    def _write_note(self, suspects_changed: bool = False) -> None:
        """Write it, unless it names what is open already, and beside that only what no suspect ended just now."""
        if not self._alive():
            return
        now, self._open = self._clock(), +self._open
        self._used_at |= dict.fromkeys(self._open, now)
        self._used_at = {
            each: at
            for each, at in self._used_at.items()
            if each in self._open or (now - at < RECENT_S and each.run_id not in self._suspects)
        }
        if suspects_changed or self._noted != self._used_at.keys():
            self._noted = set(self._used_at)
            self._note.write(self._noted)

    async def _wait_for_turn(self, run_id: str) -> None:
        self._waiting[run_id] += 1
        try:
            if not self._is_checked:
                await self._check()
                self._is_checked = True
            async with asyncio.timeout(WAIT_S):
                while not self._has_turn(run_id):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            message = f"{run_id or 'This request'} waits for {self._waits_for()}."
            raise ApiError(503, message, retry_after_s=RETRY_AFTER_S) from None
        finally:
            self._waiting -= Counter([run_id])
            self._changed.set()  # it may have been the next

    def _has_turn(self, run_id: str) -> bool:
        now, whose = self._clock(), self._whose(run_id)
        if any(self._whose(each.run_id) != whose for each in +self._open):
            return False
        last, since = self._turn
        if whose != last or now - since >= TURN_S:
            waiting = dict.fromkeys(map(self._whose, self._waiting))  # the longest in it first
            if whose != min(waiting, key=lambda each: self._served_at.get(each, 0.0)):
                return False
            self._turn = whose, now
        self._served_at[whose] = now
        return True

    def _whose(self, run_id: str) -> str | None:
        """Whose turn is that of a run."""
        return run_id if run_id in self._suspects else None


@dataclass
class Outcome:
    """Of one request, set by who answers it."""

    is_refused: bool = False
