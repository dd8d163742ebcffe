"""Who gets a slot, and who gives one up for a more urgent run. Pure: no files, no clock.

Runs are admitted by priority, highest first, then first come, first served. A run that may preempt takes the slot of
the run with the lowest priority, of several the youngest, if that priority is lower than its own. So two runs never
take a slot from each other in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A run that has a slot or may have one. `landed_ns` is the time of its config file."""

    run_id: str
    priority: int
    landed_ns: int
    preempts: bool = False

    @property
    def order(self) -> tuple[int, int, str]:
        """Runs are admitted from the smallest."""
        return -self.priority, self.landed_ns, self.run_id


def preempted(waiting: Sequence[Claim], held: Sequence[Claim], num_free: int) -> dict[str, str]:
    """The ids of the runs that give up their slots, each with that of the run that takes it.

    Args:
        waiting: in the order of admission.
        held: the runs that would keep their slots.
        num_free: slots that are free, or will be; the first of `waiting` get these.
    """
    found: dict[str, str] = {}
    keep = sorted(held, key=lambda claim: claim.order)
    for claim in waiting[num_free:]:
        if claim.preempts and keep and keep[-1].priority < claim.priority:
            found[keep.pop().run_id] = claim.run_id
    return found
