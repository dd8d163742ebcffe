"""Drives a member: looks when something happens, rarely otherwise, and reports which nodes it waits for.

The folder's events are hints where they come; in between the pause grows from milliseconds to half a second with
jitter, so an idle node costs next to nothing and a hundred nodes do not look at the same instant.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from prime_rl.multinode.decide import Exit
from prime_rl.multinode.member import Member
from prime_rl.multinode.records import GroupState, NodeState
from prime_rl.utils.signals import StopFlag
from prime_rl.utils.watch import Watcher

logger = logging.getLogger("node")

FIRST_PAUSE_S = 0.01
# Where no events come (NFS, Lustre, FUSE) a barrier takes about two of these.
MAX_PAUSE_S = 0.5
GROWTH = 1.6
SAY_AGAIN_S = 1.0


def drive(member: Member, watcher: Watcher, stop: StopFlag, *, say: Callable[[str], None] = logger.info) -> Exit:
    """Tick until the member's exit. A signal makes it leave, which ends the group."""
    pause_s = FIRST_PAUSE_S
    before: object = None
    progress_log = ProgressLog(member, say)
    with member.heartbeat.beating():
        while True:
            if stop():
                member.leave(f"asked to end by {stop.signal_name or 'a signal'}")
            if (exit := member.tick()) is not None:
                return exit
            now = (member.own.state, member.own.position, member.own.arrived, member.group and member.group.position)
            pause_s = FIRST_PAUSE_S if now != before else min(pause_s * GROWTH, MAX_PAUSE_S)
            before = now
            progress_log.update()
            watcher.wait(pause_s * random.uniform(0.7, 1.0))


class ProgressLog:
    """The messages of a node: each event once, which nodes it waits for each second, which joined or were lost."""

    def __init__(self, member: Member, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._member = member
        self._say = say
        self._clock = clock
        self._place: object = None
        self._place_since = self._logged_at = clock()
        self._logged = ""
        self._news: str | None = None

    def update(self) -> None:
        """Called after each look."""
        member, now = self._member, self._clock()
        place = (member.own.state, member.own.position, member.own.arrived)
        if place != self._place:
            self._place, self._place_since = place, now
        self._log_members()
        text = member.waiting_on or (f"working: {member.own.position}" if member.own.position else "")
        is_due = bool(member.waiting_on) and now - self._logged_at >= SAY_AGAIN_S
        if text and (text != self._logged or is_due):
            waited_s = now - self._place_since
            again = f" ({waited_s:.0f} s of at most {self._limit_s:g} s)" if waited_s >= SAY_AGAIN_S else ""
            self._say(f"waits for {text}{again}" if member.waiting_on else text)
            self._logged, self._logged_at = text, now

    @property
    def _limit_s(self) -> float:
        setting = self._member.setting
        is_joining = self._member.own.state is NodeState.JOINING
        return setting.gather_timeout_s if is_joining else setting.barrier_timeout_s

    def _log_members(self) -> None:
        group = self._member.group
        if group is None or group.state is not GroupState.RUNNING or group.reason == self._news:
            return
        self._news = group.reason
        self._say(f"the group goes on with nodes {', '.join(map(str, sorted(group.members)))}: {group.reason}")
