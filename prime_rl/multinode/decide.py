"""The next act of a node and of a group's master: pure functions of what is seen on disk and the reader's own clock.

The master alone moves the group: it gathers the nodes, releases phase after phase when all members have arrived, gives
up dead nodes, and ends the group with a reason and an exit code. A worker follows the newest record of a live master,
and leaves when the record ends or no longer changes. `claim` decides which process owns a rank. Nothing here reads a
file or sleeps.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from prime_rl.contract.nodes import SUSPECT_AFTER_BEATS, NodeHealth, Sighting, judge
from prime_rl.multinode.records import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    EXIT_TRY_AGAIN,
    GroupRecord,
    GroupSetting,
    GroupState,
    NodeRecord,
    NodeState,
    Position,
    first_position,
    next_position,
)

MASTER_RANK = 0
# Failed connections of all workers until the master counts as lost: as many as missed heartbeats until one is suspect.
# A single worker counts as lost after one more: by then the records of the others would show that it is not alone.
CUT_OFF_AFTER_BEATS = SUSPECT_AFTER_BEATS


@dataclass(frozen=True)
class View:
    """The group as one node sees it now. `now` is its own monotonic clock; `since` is when what it waits for began."""

    now: float
    since: float
    nodes: Mapping[int, NodeRecord]
    sightings: Mapping[int, Sighting]
    group: GroupRecord | None = None
    group_sighting: Sighting | None = None


@dataclass(frozen=True)
class Exit:
    """The end of a node: its exit code and why."""

    code: int
    reason: str


@dataclass(frozen=True)
class Step:
    """The next act of a node. `work` is the position whose work it starts now (an earlier one is given up)."""

    state: NodeState
    epoch: str
    work: Position | None = None
    exit: Exit | None = None
    waiting_on: str | None = None


# -- the rank ----


class Claim(enum.Enum):
    """The verdict on a starting node's claim to its rank."""

    OURS = "ours"
    UNKNOWN = "unknown"
    TAKEN = "taken"


def claim(setting: GroupSetting, own: NodeRecord, found: NodeRecord | None, view: View) -> Claim:
    """A rank is ours when it is free or its record no longer moves; it is taken while its record keeps moving.

    A move that is seen soon after the start proves nothing: a cache may show late what a dead node wrote.
    """
    if found is None or found.state.is_final or found.incarnation == own.incarnation:
        return Claim.OURS
    if view.sightings[own.rank].silent_s(view.now) > SUSPECT_AFTER_BEATS * setting.heartbeat_s:
        return Claim.OURS
    return Claim.TAKEN if view.now - view.since > setting.dead_after_s else Claim.UNKNOWN


def yields_to(own: NodeRecord, rival: NodeRecord) -> bool:
    """True when `own` goes, of two living nodes of a rank: the one not at work yet, else of the larger incarnation."""
    mine, other = own.state is NodeState.RUNNING, rival.state is NodeState.RUNNING
    return other if mine != other else rival.incarnation < own.incarnation


# -- the master ----


def decide_master(
    setting: GroupSetting, own: NodeRecord, group: GroupRecord, view: View, resume: Position
) -> GroupRecord:
    """The master's next record. `resume` is where the group goes on, by the proofs on disk."""
    if group.state is GroupState.ENDING:
        return group
    if own.state.is_final:
        code = EXIT_INTERRUPTED if own.state is NodeState.LEFT else EXIT_TRY_AGAIN
        return _end(group, code, _end_text(own))
    for rank, node in sorted(view.nodes.items()):
        if rank != own.rank and node.epoch == group.epoch and node.state in (NodeState.FAILED, NodeState.LEFT):
            code = EXIT_INTERRUPTED if node.state is NodeState.LEFT else EXIT_TRY_AGAIN
            if code == EXIT_INTERRUPTED or not _may_lose(setting, rank):
                return _end(group, code, _end_text(node))
    if group.state is GroupState.GATHERING:
        return _gather(setting, own, group, view, resume)
    return _lead(setting, group, view, resume)


def _gather(setting: GroupSetting, own: NodeRecord, group: GroupRecord, view: View, resume: Position) -> GroupRecord:
    members = {own.rank: own.incarnation}
    for rank, node in sorted(view.nodes.items()):
        if rank == own.rank or not _is_living(setting, view, rank):
            continue
        if words := differences(setting.fingerprint, node.fingerprint):
            return _end(group, EXIT_REFUSED, f"{node} was started with {words}")
        if node.epoch == group.epoch and not node.state.is_final:
            members[rank] = node.incarnation
    missing = [rank for rank in range(setting.num_nodes) if rank not in members]
    if not missing:
        # Nothing is done in an epoch before all its members have met at its first barrier, so no epoch can split.
        opening = first_position(setting.rl_phase, resume.iteration)
        return replace(group, state=GroupState.RUNNING, members=members, position=opening, awaited=())
    awaited = tuple(map(_to_join, missing))
    if view.now - view.since > setting.gather_timeout_s:
        return _end(
            group, EXIT_TRY_AGAIN, f"timed out after {setting.gather_timeout_s:g} s waiting for {', '.join(awaited)}"
        )
    return replace(group, awaited=awaited)


def _to_join(rank: int) -> str:
    return f"node {rank} to join"


def _lead(setting: GroupSetting, group: GroupRecord, view: View, resume: Position) -> GroupRecord:
    lost = {rank: why for rank in sorted(group.members) if (why := _why_lost(setting, group, view, rank))}
    if words := _own_cut(setting, group, view):
        return _end(group, EXIT_TRY_AGAIN, words)
    if lost:
        return _without(setting, group, lost)
    here = (True, group.position, group.epoch)
    nodes = {rank: view.nodes[rank] for rank in sorted(group.members)}
    late = [rank for rank, node in nodes.items() if (node.arrived, node.position, node.epoch) != here]
    if not late:
        return _release(setting, group, view, resume)
    awaited = tuple(_describe(setting, view, rank) for rank in late)
    if view.now - view.since > setting.barrier_timeout_s:
        words = f"timed out after {setting.barrier_timeout_s:g} s at {group.position} waiting for {'; '.join(awaited)}"
        return _end(group, EXIT_TRY_AGAIN, words)
    return replace(group, awaited=awaited)


def _release(setting: GroupSetting, group: GroupRecord, view: View, resume: Position) -> GroupRecord:
    assert group.position is not None
    following = max(next_position(group.position, setting.rl_phase), resume)
    if setting.max_iterations is not None and following.iteration > setting.max_iterations:
        return _end(group, EXIT_DONE, all_done(setting))
    if not setting.elastic or following != first_position(setting.rl_phase, following.iteration):
        return replace(group, position=following, awaited=())
    back = _returning(setting, group, view)
    reason = f"{', '.join(str(view.nodes[rank]) for rank in sorted(back))} joined" if back else group.reason
    return replace(group, members={**group.members, **back}, position=following, awaited=(), reason=reason)


def _returning(setting: GroupSetting, group: GroupRecord, view: View) -> dict[int, str]:
    """Nodes that wait to rejoin: only at the start of an iteration."""
    return {
        rank: node.incarnation
        for rank, node in view.nodes.items()
        if rank not in group.members
        and rank < setting.num_nodes
        and node.state is NodeState.JOINING
        and node.epoch == group.epoch
        and node.unreached < CUT_OFF_AFTER_BEATS
        and not differences(setting.fingerprint, node.fingerprint)
        and _is_living(setting, view, rank)
    }


def _without(setting: GroupSetting, group: GroupRecord, lost: Mapping[int, str]) -> GroupRecord:
    """Go on without the lost nodes where that is allowed, in a new round of the same phase; else end the group."""
    assert group.position is not None
    if not all(_may_lose(setting, rank) for rank in lost):
        return _end(group, EXIT_TRY_AGAIN, "; ".join(lost.values()))
    members = {rank: word for rank, word in group.members.items() if rank not in lost}
    position = group.position._replace(round=group.position.round + 1)
    return replace(group, members=members, position=position, awaited=(), reason="; ".join(lost.values()))


def _may_lose(setting: GroupSetting, rank: int) -> bool:
    """The master's death ends every group: no other node can be the master."""
    return setting.elastic and rank != MASTER_RANK


def _why_lost(setting: GroupSetting, group: GroupRecord, view: View, rank: int) -> str | None:
    if rank == setting.rank:
        return None
    node, sighting = view.nodes[rank], view.sightings[rank]
    if node.incarnation != group.members[rank]:
        return f"{node} was started again while the group was at {group.position}"
    if node.epoch != group.epoch:
        return f"{node} went to the group of epoch {node.epoch or 'none'}"
    if node.state.is_final:
        return _end_text(node)
    where = node.position or "no phase yet"
    if _has_stood_still(setting, node):
        return f"{node} {_stands_still(node)} (limit {setting.loop_timeout_s:g} s), last in {where}"
    if node.unreached > CUT_OFF_AFTER_BEATS:
        return f"{node} is cut off: {node.unreached} failed connections to the master's address, last in {where}"
    if _health(setting, sighting, view.now) is NodeHealth.DEAD:
        return f"{node} is dead: no heartbeat for {sighting.silent_s(view.now):.1f} s, last in {where}"
    return None


def _own_cut(setting: GroupSetting, group: GroupRecord, view: View) -> str | None:
    """If all of several workers fail to connect at the same time, the master is cut off."""
    others = [view.nodes[rank] for rank in sorted(group.members) if rank != setting.rank]
    misses = [node.unreached for node in others]
    # When the first gives up the others are one probe behind, and the record of it may be one look behind.
    if len(others) < 2 or max(misses) < CUT_OFF_AFTER_BEATS or min(misses) < CUT_OFF_AFTER_BEATS - 2:
        return None
    callers = "; ".join(map(str, others))
    master = f"{view.nodes[setting.rank]}, the master"
    return f"{master}, is cut off: all workers failed to connect ({callers}), at {group.position}"


def _end(group: GroupRecord, code: int, reason: str) -> GroupRecord:
    return replace(group, state=GroupState.ENDING, exit_code=code, reason=reason, awaited=())


def all_done(setting: GroupSetting) -> str:
    """The reason of a group that ends because all work is done."""
    return f"done: {setting.max_iterations} iteration{'s' * (setting.max_iterations != 1)}"


def may_leave(setting: GroupSetting, group: GroupRecord, view: View) -> bool:
    """True when the master of an ending group may go: all members have ended, are dead, or had the time for it."""
    if view.now - view.since > setting.dead_after_s:
        return True
    others = [rank for rank in group.members if rank != setting.rank and not view.nodes[rank].state.is_final]
    return all(_health(setting, view.sightings[rank], view.now) is NodeHealth.DEAD for rank in others)


# -- every node ----


def decide_node(setting: GroupSetting, own: NodeRecord, view: View) -> Step:
    """A node's next step; the master's own node follows the group's record like all others."""
    if own.state is NodeState.JOINING:
        return _join(setting, own, view)
    group = view.group
    assert group is not None and view.group_sighting is not None, "a node that runs has seen its group"
    if group.epoch != own.epoch:
        return _leave(own, EXIT_TRY_AGAIN, f"another master took over with epoch {group.epoch}")
    if group.state is GroupState.ENDING:
        return _leave(own, group.exit_code, group.reason or "the group ended")
    if _health(setting, view.group_sighting, view.now) is NodeHealth.DEAD or _has_stood_still(setting, _master(view)):
        return _leave(own, EXIT_TRY_AGAIN, _master_is_lost(setting, view, group))
    if group.members.get(own.rank) != own.incarnation:
        # A node that slept through it may find a later reason there.
        why = f": {group.reason}" if group.reason and str(own) in group.reason else ""
        return _leave(own, EXIT_TRY_AGAIN, f"this node was given up as lost{why}")
    if group.position != own.position:
        return Step(NodeState.RUNNING, own.epoch, work=group.position)
    stalled_master = _stalled_master(setting, view)
    if not own.arrived:
        return Step(NodeState.RUNNING, own.epoch, waiting_on=stalled_master)
    # When the master last wrote, it may have been waiting for this node.
    others = [words for words in group.awaited if not words.startswith(str(own))]
    awaited = stalled_master or "; ".join(others) or "the master's release"
    waiting_on = f"{group.position}: {awaited}"
    # The master decides first; this is for one that beats but no longer leads.
    if view.now - view.since > setting.barrier_timeout_s + setting.dead_after_s:
        return _leave(own, EXIT_TRY_AGAIN, f"timed out after {setting.barrier_timeout_s:g} s waiting for {waiting_on}")
    return Step(NodeState.RUNNING, own.epoch, waiting_on=waiting_on)


def _join(setting: GroupSetting, own: NodeRecord, view: View) -> Step:
    master = view.nodes.get(MASTER_RANK)
    is_led = master is not None and own.rank != MASTER_RANK and _is_living(setting, view, MASTER_RANK)
    if master is not None and is_led and (words := differences(setting.fingerprint, master.fingerprint)):
        return _leave(own, EXIT_REFUSED, f"the master, {master}, was started with {words}")
    group, sighting = view.group, view.group_sighting
    leads = sighting is not None and sighting.has_moved and _health(setting, sighting, view.now) is not NodeHealth.DEAD
    if group is not None and leads:
        is_ours = own.epoch == group.epoch or group.exit_code == EXIT_REFUSED
        if group.state is GroupState.ENDING and is_ours:
            return _leave(own, group.exit_code, group.reason or "the group ended")
        if group.state is GroupState.GATHERING:
            others = [words for words in group.awaited if words != _to_join(own.rank)]
            return _wait(setting, own, view, group.epoch, ", ".join(others) or "the master to begin")
        if group.state is GroupState.RUNNING:
            # A group of one begins before its only node could take its epoch.
            if group.members.get(own.rank) == own.incarnation:
                return Step(NodeState.RUNNING, group.epoch, work=group.position)
            epoch = group.epoch if setting.elastic else own.epoch
            return _wait(setting, own, view, epoch, f"the group at {group.position} to let this node in")
    return _wait(setting, own, view, own.epoch, "the master (node 0) to start a group")


def _wait(setting: GroupSetting, own: NodeRecord, view: View, epoch: str, waiting_on: str) -> Step:
    waiting_on = _stalled_master(setting, view) or waiting_on
    if view.now - view.since > setting.gather_timeout_s + setting.dead_after_s:
        return _leave(own, EXIT_TRY_AGAIN, f"timed out after {setting.gather_timeout_s:g} s waiting for {waiting_on}")
    return Step(NodeState.JOINING, epoch, waiting_on=waiting_on)


def _leave(own: NodeRecord, code: int, reason: str) -> Step:
    return Step(NodeState.ENDED, own.epoch, exit=Exit(code, reason))


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The settings of two nodes that must be equal and differ, as text; None when all are equal."""
    keys = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    return "; ".join(f"{key} {theirs.get(key, 'unset')} (here: {ours.get(key, 'unset')})" for key in keys) or None


# -- life ----


def _health(setting: GroupSetting, sighting: Sighting, now: float) -> NodeHealth:
    return judge(sighting.silent_s(now), sighting.still_s(now), setting.heartbeat_s)


def _is_living(setting: GroupSetting, view: View, rank: int) -> bool:
    sighting = view.sightings.get(rank)
    if sighting is None or not sighting.has_moved or _has_stood_still(setting, view.nodes.get(rank)):
        return False
    return _health(setting, sighting, view.now) is not NodeHealth.DEAD


def _describe(setting: GroupSetting, view: View, rank: int) -> str:
    node, sighting = view.nodes[rank], view.sightings[rank]
    if _is_stalled(setting, node):
        return f"{node} {_stands_still(node)}"
    words = {
        NodeHealth.SUSPECT: f", suspect: no beat for {sighting.silent_s(view.now):.0f} s",
        NodeHealth.STALLED: f", stalled: no progress for {sighting.still_s(view.now):.0f} s",
    }
    return f"{node}" + ("" if rank == setting.rank else words.get(_health(setting, sighting, view.now), ""))


def _end_text(node: NodeRecord) -> str:
    where = f" in {node.position}" if node.position else ""
    verb = {NodeState.LEFT: "left", NodeState.FAILED: "failed"}.get(node.state, "ended")
    return f"{node} {verb}{where}" + (f": {node.reason}" if node.reason else "")


def _is_stalled(setting: GroupSetting, node: NodeRecord | None) -> bool:
    return node is not None and node.still_s > setting.loop_limit_s


def _has_stood_still(setting: GroupSetting, node: NodeRecord | None) -> bool:
    """True when it counts as lost although it is alive."""
    return node is not None and node.still_s > setting.loop_timeout_s


def _stands_still(node: NodeRecord) -> str:
    return f"is alive but its loop has stood still for {node.still_s:.0f} s"


def _master(view: View) -> NodeRecord | None:
    """The master of the group in the view; a later one may have taken over."""
    master = view.nodes.get(MASTER_RANK)
    is_its = master is not None and view.group is not None and master.incarnation == view.group.incarnation
    return master if is_its else None


def _stalled_master(setting: GroupSetting, view: View) -> str | None:
    master = _master(view)
    return f"{master}, the master, {_stands_still(master)}" if master and _is_stalled(setting, master) else None


def _master_is_lost(setting: GroupSetting, view: View, group: GroupRecord) -> str:
    assert view.group_sighting is not None
    master = _master(view)
    how = f"is dead: no heartbeat for {view.group_sighting.silent_s(view.now):.1f} s"
    if master is not None and _is_stalled(setting, master):
        how = f"{_stands_still(master)} (limit {setting.loop_timeout_s:g} s)"
    name = view.nodes.get(MASTER_RANK) or "node 0"
    where = group.position or "the start"
    words = f"{name}, the master, {how}, last at {where}"
    return words + ("; --elastic goes on without workers, never without the master" if setting.elastic else "")
