"""Drives a member for real: looks as often as something happens, rarely when nothing does, and says whom it waits for.

The folder's events are hints where they come; in between the pause grows from milliseconds to half a second with
jitter, so an idle node costs next to nothing and a hundred nodes do not look at the same instant.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from prime_rl.multinode.decide import Exit
from prime_rl.multinode.member import Member
from prime_rl.utils.signals import StopFlag
from prime_rl.utils.watch import Watcher

logger = logging.getLogger("node")

FIRST_PAUSE_S = 0.01
# Where no events come (NFS, Lustre, FUSE) a barrier takes about two of these.
MAX_PAUSE_S = 0.5
GROWTH = 1.6


def drive(member: Member, watcher: Watcher, stop: StopFlag, *, say: Callable[[str], None] = logger.info) -> Exit:
    """Tick until the member's exit. A signal makes it leave, which ends the group."""
    pause_s = FIRST_PAUSE_S
    before: object = None
    said = ""
    while True:
        if stop():
            member.leave(f"{stop.signal_name or 'a signal'}")
        if (exit := member.tick()) is not None:
            return exit
        now = (member.own.word, member.own.position, member.own.arrived, member.group and member.group.position)
        pause_s = FIRST_PAUSE_S if now != before else min(pause_s * GROWTH, MAX_PAUSE_S)
        before = now
        said = _say_new(member, said, say)
        watcher.wait(pause_s * random.uniform(0.7, 1.0))


def _say_new(member: Member, said: str, say: Callable[[str], None]) -> str:
    """One line for each new thing that is waited for."""
    words = member.waiting_on or (f"working: {member.own.position}" if member.own.position else "")
    if words and words != said:
        say(f"waits for {words}" if member.waiting_on else words)
    return words
