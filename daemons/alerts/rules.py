"""What is wrong in a workspace now: a pure function of a snapshot. It reads no file and sends nothing.

An incident is named by its kind and its subject, so it is the same one as long as both stay. All text is clean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from daemons.workspace import SUPERVISOR, DaemonView, RunView, Workspace
from prime_rl.configs.alerts import AlertKind, RewardRule
from prime_rl.contract.condition import LOST, STALLED
from prime_rl.contract.nodes import PHASE_NAMES, NodeHealth, Sighting, node_health
from prime_rl.contract.status import RunState
from prime_rl.utils.text import one_line

# A daemon that crashed and runs again is an incident for so long, however short its rest was.
CRASH_LASTS_S = 60.0
MAX_TEXT_CHARS = 1000
# How the trainer names what it evicts a run for.
_NOT_FINITE = "are not finite"
_OF_RUN: Mapping[RunState, AlertKind] = {
    RunState.FAILED: "run_failed",
    RunState.INVALID: "run_invalid",
    RunState.EVICTED: "run_evicted",
}


@dataclass(frozen=True)
class Incident:
    """One thing that is wrong. `subject`: a run, a daemon, a node or "disk"; `text`: why, in one line."""

    kind: AlertKind
    subject: str
    text: str

    @property
    def key(self) -> str:
        return f"{self.kind} {self.subject}"


class RewardWatch:
    """Remembers the rewards that snapshots showed of each run, and judges them by the rule.

    It sees the newest batch at each look. After its start it judges no run until it has seen `window` batches of it.
    """

    def __init__(self, rule: RewardRule) -> None:
        self._rule = rule
        self._seen: dict[str, deque[float]] = {}
        self._last: dict[str, tuple[int, float]] = {}
        self._best: dict[str, float] = {}

    def look(self, runs: Iterable[RunView]) -> Iterator[Incident]:
        active = {run.run_id: run for run in runs if run.state is RunState.ACTIVE}
        for kept in (self._seen, self._last, self._best):
            for run_id in kept.keys() - active.keys():
                del kept[run_id]
        for run_id, run in active.items():
            if run.reward is None or self._last.get(run_id) == (run.step, run.reward):
                mean = self._mean(run_id)
            else:
                self._last[run_id] = (run.step, run.reward)
                self._seen.setdefault(run_id, deque(maxlen=self._rule.window)).append(run.reward)
                mean = self._mean(run_id)
                if mean is not None:
                    self._best[run_id] = max(mean, self._best.get(run_id, mean))
            if mean is not None and mean < self._limit(run_id):
                yield Incident(
                    "reward_collapsed",
                    run_id,
                    f"mean reward of {self._rule.window} batches is {mean:.3g}, was {self._best[run_id]:.3g} at best",
                )

    def _mean(self, run_id: str) -> float | None:
        seen = self._seen.get(run_id, ())
        return fmean(seen) if len(seen) == self._rule.window else None

    def _limit(self, run_id: str) -> float:
        best = self._best[run_id]
        return best - self._rule.drop * abs(best)


def incidents(
    workspace: Workspace, nodes: Iterable[Sighting], free_bytes: int | None, min_free_gb: float
) -> list[Incident]:
    """All that is wrong but collapsed rewards, which need a memory (`RewardWatch`)."""
    found = [incident for run in workspace.runs for incident in _of_run(run)]
    found += [Incident("run_invalid", each.name, _line(each.reason)) for each in workspace.refused]
    supervisor = workspace.daemon(SUPERVISOR)
    if supervisor is not None and supervisor.state == LOST:  # then nothing looks at the others
        found.append(Incident("daemon_crashed", SUPERVISOR, _line(f"lost: {supervisor.reason}")))
    else:
        run_ids = {run.run_id for run in workspace.runs}
        found += [
            each
            for daemon in workspace.daemons
            for each in _of_daemon(daemon, workspace.read_at, is_service=daemon.name not in run_ids)
        ]
    found += [incident for seen in nodes for incident in _of_node(seen)]
    if free_bytes is not None and free_bytes < min_free_gb * 1e9:
        found.append(Incident("disk_low", "disk", f"{free_bytes / 1e9:.1f} GB free, less than {min_free_gb:g} GB"))
    return found


def is_well(workspace: Workspace) -> bool:
    """Whether supervisor, trainer and all of inference work. Runs that failed do not count: the others go on."""
    services = [workspace.daemon(name) for name in (SUPERVISOR, "trainer", "inference")]
    services += [each for each in workspace.daemons if each.name.startswith("inference-") and each.state != "done"]
    return workspace.supervisor_alive and all(each is not None and each.state == "running" for each in services)


def _of_run(run: RunView) -> Iterator[Incident]:
    kind = _OF_RUN.get(run.state)
    if kind is not None:
        reason = run.reason or "no reason was given"
        yield Incident("run_not_finite" if _NOT_FINITE in reason else kind, run.run_id, _line(reason))
    elif run.stalled_since is not None:
        waits = f"; it waits for {run.waiting_on}" if run.waiting_on else ""
        yield Incident("run_stalled", run.run_id, _line(f"{run.reason or 'stalled'}{waits}"))


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


def _of_node(seen: Sighting) -> Iterator[Incident]:
    health, status = node_health(seen), seen.status
    where = f"{status.host or 'unknown host'}, phase {status.phase}"
    if 0 <= status.phase < len(PHASE_NAMES):
        where += f" ({PHASE_NAMES[status.phase]})"
    if health is NodeHealth.DEAD:
        yield Incident("node_lost", f"node {status.rank}", _line(f"no heartbeat for {seen.silent_s:.0f} s; {where}"))
    elif health is NodeHealth.STALLED:
        yield Incident("daemon_stalled", f"node {status.rank}", _line(f"stands still; {where}"))


def _line(text: str) -> str:
    return one_line(text, MAX_TEXT_CHARS)
