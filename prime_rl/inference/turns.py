"""Work, noted before it begins, and after a death the runs that were in work then, each apart. For one loop.

Such a suspect shares the engine with nothing until its first PROOFS requests were answered, four times as many after
each further death, and all others wait, so a note with a suspect in it names the one that ended the engine. A request
that was refused proves nothing. Turns are short, and go to who waited for its own longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from prime_rl.contract.notes import Item, WorkNote
from prime_rl.inference.errors import ApiError

# A batch of a small run: what ends an engine does so with one of its first requests, or with the sum of many.
PROOFS = 16
PROOFS_FACTOR = 4
MOST_PROOFS = 4096
# A server that lives so long has forgiven those that were cleared.
FORGIVES_S = 3600.0
# Long enough to decode requests together, short enough for all to be served within a client's patience.
TURN_S = 10.0
WAIT_S = 30.0
RETRY_AFTER_S = 1
# What has ended stays in the note for so long, or requests of two runs by turns would each write it.
RECENT_S = 10.0


class Turns:
    """See the module.

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
