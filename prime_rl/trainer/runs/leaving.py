"""Who gets a slot, who gives one up for a more urgent run, and why a run may not hold one.

Runs are admitted by priority, highest first, then first come, first served. A run that may preempt takes the slot of
the run with the lowest priority, of several the youngest, if that priority is lower than its own. So two runs never
take a slot from each other in turn. Why a run may not hold a slot is one rule for those in slots and those that wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.run_state import read_mark
from prime_rl.contract.status import DaemonStatus, RunStatus, read_status


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


@dataclass(frozen=True)
class Leave:
    """Why a run leaves its slot, or gets none.

    Attributes:
        outcome: the list of `Findings` that has the run while it has no slot for this reason.
        saves: the run leaves after a checkpoint of its last update.
    """

    reason: str
    outcome: str
    saves: bool = False


def leave_reason(*, evicted: bool, ended: str | None, paused: str | None, given_up: str | None) -> Leave | None:
    """What the marks in a run's folder come to; None: it may have a slot. What a person did comes first.

    Args:
        ended, paused: the texts of `finished.txt` and `paused.txt`.
        given_up: why the run gets no more batches.
    """
    if evicted:
        return Leave("it was evicted", "evicted")
    if ended is not None:
        return Leave(f"it is finished: {ended}", "finished", saves=True)
    if paused is not None:
        return Leave(f"it is paused: {paused}", "paused", saves=True)
    if given_up is not None:
        return Leave(given_up, "failed")
    return None


def find_leave(run: RunDir) -> Leave | None:
    """`leave_reason` of what is on disk."""
    return leave_reason(
        evicted=read_mark(run.evicted) is not None,
        ended=read_mark(run.finished),
        paused=read_mark(run.paused),
        given_up=given_up(run),
    )


def given_up(run: RunDir) -> str | None:
    """Why the run gets no more batches: the final state of its orchestrator or daemon; else None.

    A run without batches would hold its slot forever while others wait.
    """
    status = read_status(run.status, RunStatus)
    if status is not None and status.state == "failed":
        return f"its orchestrator failed: {status.reason}"
    daemon = read_status(OutputDir(run.path.parent).daemon_status(run.run_id), DaemonStatus)
    if daemon is not None and daemon.state == "failed":
        return f"its orchestrator is not started again: {daemon.reason}"
    return None
