"""Faults of a workspace now, and what cannot be told: a pure function of a snapshot. It sends nothing.

An incident is named by its kind and its subject, so it is the same one as long as both stay. All text is clean.

Each rule has three answers: an incident, no incident, or an unproven one where neither can be told yet, or not from
here: of a node that was seen only once, of a daemon whose supervisor is lost. An unproven one changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from daemons.workspace import SUPERVISOR, DaemonView, RunView, Workspace
from prime_rl.configs.reports import AlertKind
from prime_rl.contract.nodes import PHASE_NAMES, NodeHealth, SeenNode, is_at_work, node_health
from prime_rl.contract.status import LOST, NOT_FINITE, STALLED, RunState
from prime_rl.utils.text import one_line

# A daemon that crashed and runs again is an incident for so long, however short its rest was.
CRASH_LASTS_S = 60.0
MAX_TEXT_CHARS = 1000
_OF_RUN: Mapping[RunState, AlertKind] = {
    RunState.FAILED: "run_failed",
    RunState.INVALID: "run_invalid",
    RunState.EVICTED: "run_evicted",
}


@dataclass(frozen=True)
class Incident:
    """One thing that is wrong. `subject`: a run, a daemon, a node or "disk"; `text`: why, in one line.

    Not `is_proven`: it may be wrong or not, so one that is open stays open, and none is opened.
    """

    kind: AlertKind
    subject: str
    text: str
    is_proven: bool = True

    @property
    def key(self) -> str:
        """The kind and the subject, which name one incident over all looks."""
        return f"{self.kind} {self.subject}"


def unproven(subject: str, *kinds: AlertKind) -> Iterator[Incident]:
    """Incidents of which it cannot be told whether they are there."""
    return (Incident(kind, subject, "", is_proven=False) for kind in kinds)


def incidents(
    workspace: Workspace, nodes: Iterable[SeenNode], free_bytes: int | None, min_free_gb: float
) -> list[Incident]:
    """All that is wrong or unproven but collapsed rewards, which need more than a snapshot (`RewardWatch`)."""
    supervisor = workspace.daemon(SUPERVISOR)
    is_watched = supervisor is None or supervisor.state not in (LOST, STALLED)
    run_ids = {run.run_id for run in workspace.runs}
    found = [incident for run in workspace.runs for incident in _of_run(run, is_watched=is_watched)]
    found += [Incident("run_invalid", each.name, _line(each.reason)) for each in workspace.refused]
    for daemon in workspace.daemons:
        if is_watched:
            found += _of_daemon(daemon, workspace.read_at, is_service=daemon.name not in run_ids)
        elif daemon is not supervisor:
            found += unproven(daemon.name, "daemon_crashed", "daemon_stalled")
    if supervisor is not None and not is_watched and (supervisor.state == LOST or workspace.disk is None):
        kind: AlertKind = "daemon_crashed" if supervisor.state == LOST else "daemon_stalled"
        found.append(Incident(kind, SUPERVISOR, _line(f"{supervisor.state}: {supervisor.reason}")))
    found += [incident for seen in nodes for incident in _of_node(seen)]
    if workspace.disk is not None:
        found.append(Incident("disk_low", "disk", _line(workspace.disk)))
    elif free_bytes is None:
        found += unproven("disk", "disk_low")
    elif free_bytes < min_free_gb * 1e9:
        found.append(Incident("disk_low", "disk", f"{free_bytes / 1e9:.1f} GB free, less than {min_free_gb:g} GB"))
    return found


def is_well(workspace: Workspace) -> bool:
    """True when supervisor, trainer and all of inference work. Runs that failed do not count: the others go on."""
    services = [workspace.daemon(name) for name in (SUPERVISOR, "trainer", "inference")]
    services += [each for each in workspace.daemons if each.name.startswith("inference-") and each.state != "done"]
    return workspace.supervisor_alive and all(each is not None and each.state == "running" for each in services)


def _of_run(run: RunView, *, is_watched: bool) -> Iterator[Incident]:
    """Without a trainer that lives, and of stalls without a supervisor, less can be told."""
    kind = _OF_RUN.get(run.state)
    if kind is not None:
        reason = run.reason or "no reason was given"
        yield Incident("run_not_finite" if NOT_FINITE in reason else kind, run.run_id, _line(reason))
    elif run.stalled_since is not None:
        waits = f"; it waits for {run.waiting_on}" if run.waiting_on else ""
        yield Incident("run_stalled", run.run_id, _line(f"{run.reason or 'stalled'}{waits}"))
    elif run.state is RunState.STOPPED:
        yield from unproven(run.run_id, "run_invalid", "run_stalled", "run_trouble")
    elif not is_watched:
        yield from unproven(run.run_id, "run_stalled", "run_trouble")
    # A collapsed reward has a kind of its own, with a rule that can be chosen.
    told = replace(run, signs=tuple(sign for sign in run.signs if sign.name != "reward_collapsed")).troubles
    if told:
        yield Incident("run_trouble", run.run_id, _line("; ".join(told)))


def _of_daemon(daemon: DaemonView, now: float, *, is_service: bool) -> Iterator[Incident]:
    """Of an orchestrator only that it crashed: all else is told of its run."""
    is_down = daemon.state == "backoff" or (is_service and daemon.state in ("failed", LOST))
    crashed_lately = daemon.crashed_at is not None and now - daemon.crashed_at < CRASH_LASTS_S
    if is_down or crashed_lately:
        last = f"; its log ends with: {daemon.log_tail[-1]}" if daemon.log_tail else ""
        yield Incident("daemon_crashed", daemon.name, _line(f"{daemon.state}: {daemon.reason or 'it ended'}{last}"))
    elif is_service and daemon.state == STALLED:
        waits = f"; it waits for {daemon.waiting_on}" if daemon.waiting_on else ""
        yield Incident("daemon_stalled", daemon.name, _line(f"{daemon.reason or 'no progress'}{waits}"))
    elif daemon.state == "starting":
        yield from unproven(daemon.name, "daemon_crashed", "daemon_stalled")


def _of_node(seen: SeenNode) -> Iterator[Incident]:
    health, status = node_health(seen), seen.status
    subject, where = f"node {status.rank}", f"{status.host or 'unknown host'}, phase {status.phase}"
    if 0 <= status.phase < len(PHASE_NAMES):
        where += f" ({PHASE_NAMES[status.phase]})"
    if health is NodeHealth.DEAD:
        yield Incident("node_lost", subject, _line(f"no heartbeat for {seen.silent_s:.0f} s; {where}"))
        yield from unproven(subject, "daemon_stalled")
    elif health is NodeHealth.STALLED:
        yield Incident("daemon_stalled", subject, _line(f"stands still; {where}"))
    elif health in (NodeHealth.UNPROVEN, NodeHealth.SUSPECT):
        yield from unproven(subject, "node_lost", "daemon_stalled")
    elif health is NodeHealth.ALIVE and not is_at_work(seen):
        yield from unproven(subject, "daemon_stalled")


def _line(text: str) -> str:
    return one_line(text, MAX_TEXT_CHARS)
