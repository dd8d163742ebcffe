"""The daemon `alerts`: looks at the workspace and reports what is wrong, once, and once more when it is over.

    python -m daemons.alerts @ alerts.toml

Files -> snapshot -> `incidents` (pure) -> messages (`targets`). It changes nothing in the workspace but its own files.
Whether a reward has collapsed is judged by all batches in `metrics/orchestrator.jsonl`: that file is the memory, which
a new start reads from its beginning. A look reads little of each, so a reward is unproven until its file is read.

Of a daemon that hangs the stacks of its processes are kept beside the logs, by py-spy where it is installed. A daemon
that has an API key is sealed, also from py-spy: it writes its stacks to its log when it is asked by a signal.

An incident is named by its kind and its subject, so it is the same one as long as both stay. All text is clean. Each
rule has three answers: an incident, no incident, or an unproven one where neither can be told yet, or not from here: of
a node that was seen only once, of a daemon whose supervisor is lost. An unproven one changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import psutil

from daemons.alerts.targets import Target, TargetError, dead_man, message, message_targets
from daemons.launchers.agent import log_of
from daemons.quiet import (
    Named,
    OpenIncident,
    Silence,
    forget,
    is_silenced,
    muting,
    name_of,
    read_open,
    read_silences,
    write_open,
)
from daemons.workspace import SUPERVISOR, DaemonView, RunView, Workspace
from daemons.workspace_reader import WorkspaceReader
from prime_rl.configs.base import ConfigError, parse_argv
from prime_rl.configs.reports import AlertKind, AlertsConfig, RewardRule
from prime_rl.contract.files import open_file, wait_for, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.metrics import REWARD, RewardTrend, parse_metrics
from prime_rl.contract.nodes import PHASE_NAMES, BeatWatch, NodeHealth, SeenNode, is_at_work, node_health
from prime_rl.contract.status import LOST, NOT_FINITE, STALLED, NodeStatus, RunState, Status, StatusWriter, read_status
from prime_rl.utils.process import ProcessId, StopFlag
from prime_rl.utils.runtime import complain, install_command, setup_logger
from prime_rl.utils.secrets import STACKS_SIGNAL, close_handed
from prime_rl.utils.tail import FileTail
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
    """One thing that is wrong. `subject`: a run, a daemon, a node, "disk" or "clocks"; `text`: why, in one line.

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
        found += unproven("clocks", "clocks")  # nobody can write its time
    elif free_bytes is None:
        found += unproven("disk", "disk_low")
    elif free_bytes < min_free_gb * 1e9:
        found.append(Incident("disk_low", "disk", f"{free_bytes / 1e9:.1f} GB free, less than {min_free_gb:g} GB"))
    if workspace.clocks:
        found.append(Incident("clocks", "clocks", _line("; ".join(workspace.clocks))))
    return found


def is_well(workspace: Workspace) -> bool:
    """True when supervisor, trainer and all of inference work, which may not be needed.

    Runs that failed do not count: the others go on.
    """
    needed = ["inference"] * workspace.needs_inference
    services = [workspace.daemon(name) for name in (SUPERVISOR, "trainer", *needed)]
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
    """Of an orchestrator only that it crashed: all else, a restart loop too, is told of its run."""
    is_down = daemon.state == "backoff" or (is_service and daemon.state in ("failed", LOST))
    crashed_lately = daemon.crashed_at is not None and now - daemon.crashed_at < CRASH_LASTS_S
    loop = daemon.crash_loop if is_service else None
    if is_service and daemon.state == STALLED:
        waits = f"; it waits for {daemon.waiting_on}" if daemon.waiting_on else ""
        yield Incident("daemon_stalled", daemon.name, _line(f"{daemon.reason or 'no progress'}{waits}"))
    if is_down or crashed_lately or loop:
        last = f"; its log ends with: {daemon.log_tail[-1]}" if daemon.log_tail else ""
        why = f"{daemon.state}: {loop or daemon.reason or 'it ended'}{last}"
        yield Incident("daemon_crashed", daemon.name, _line(why))
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


# For all processes of a daemon.
TIMEOUT_S = 30.0
MAX_BYTES = 1_000_000
# Of what Python writes about the stack of each thread; the last is that of the thread that got the signal.
_FIRST_LINE = b"(most recent call first):"


def keep_stack(output: OutputDir, name: str, process: ProcessId) -> threading.Thread:
    """Keep the stacks of a daemon and what it started in `logs/stacks/NAME.txt`, in a thread that is returned.

    The ranks of a trainer are children of torchrun, the engines of vLLM those of its front.
    """
    path = output.logs / "stacks" / f"{name}.txt"
    thread = threading.Thread(target=_keep, args=(path, name, process, log_of(output, name)), daemon=True)
    thread.start()
    return thread


def _keep(path: Path, name: str, process: ProcessId, log: Path) -> None:
    if process.is_of_another_boot():
        logger.info("%s: no stack is kept: its process %d is on another machine", name, process.pid)
        return
    try:
        dumps = [_told_by_itself(process, log)] if _catches(process.pid, STACKS_SIGNAL) else []
        program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
        if program is None and not dumps:
            logger.info("%s: no stack is kept: py-spy not found; %s", name, install_command("alerts"))
            return
        seen, why = _dumps(program, process.pid, is_sealed=bool(dumps)) if program else ([], "")
        dumps += seen
        if not dumps:
            logger.warning("%s: no stack is kept: %s", name, why)
            return
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, b"\n".join(dumps)[:MAX_BYTES])
    except (OSError, psutil.Error, subprocess.SubprocessError) as error:
        logger.warning("%s: no stack is kept: %s", name, error)
        return
    logger.warning("%s: its stack is in %s", name, path)


def _catches(pid: int, signum: signal.Signals) -> bool:
    """True when a signal would be handled; any other ends the process."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.M)
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


def _told_by_itself(process: ProcessId, log: Path) -> bytes:
    """The lines that a sealed process adds to its log when asked for its stacks. Raises OSError, WaitTimeout too."""
    with os.fdopen(open_file(log), "rb") as file:
        file.seek(0, os.SEEK_END)
        told = b""
        process.send(STACKS_SIGNAL)

        def is_complete() -> bool:
            nonlocal told
            before, told = told, told + file.read(MAX_BYTES - len(told))
            return _FIRST_LINE in told and told == before

        wait_for(is_complete, f"the stacks of process {process.pid} in {log}", timeout_s=TIMEOUT_S)
    return told


def _dumps(program: str, pid: int, *, is_sealed: bool) -> tuple[list[bytes], str]:
    """A dump of each Python process from `pid` downwards, without `pid` where it is sealed, and the last error.

    One call for each: with --subprocesses py-spy ends at the first that is not Python, without those after it.
    """
    dumps: list[bytes] = []
    why, deadline = "", time.monotonic() + TIMEOUT_S
    root = psutil.Process(pid)
    for each in [*([] if is_sealed else [root]), *root.children(recursive=True)]:
        left_s = max(0.0, deadline - time.monotonic())
        command = [program, "dump", "--pid", str(each.pid)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=left_s, stdin=subprocess.DEVNULL, check=False)
        except subprocess.TimeoutExpired as error:
            return dumps, str(error)
        if done.returncode == 0:
            dumps.append(done.stdout)
        else:
            why = f"py-spy: {done.stderr.decode(errors='replace').partition(chr(10))[0] or done.returncode}"
    return dumps, why


logger = logging.getLogger("alerts")

# What is wrong at two looks in a row is reported, what is right at two is over: no alert for a half-written config.
# What is unproven at one of them stays as it is, so a new start calls nothing over before it has proved that.
LOOK_EVERY_S = 5.0
# For what still waits to be sent at the end; below the supervisor's grace.
CLOSE_WITHIN_S = 5.0
# What was acknowledged and comes back within this time after its end is not reported again.
ACKNOWLEDGED_FOR_S = 600.0


class Alerts:
    """Compares each look with the last one.

    Args:
        clock: Unix seconds.
        steady: seconds of a clock that never jumps.
        keep_stack: called with the name and the process of a daemon that stalls.
    """

    def __init__(
        self,
        config: AlertsConfig,
        targets: Sequence[Target],
        heart: Target | None = None,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        keep_stack: Callable[[str, ProcessId], object] = lambda name, process: None,
    ) -> None:
        self.config = config
        self.output = OutputDir(config.output_dir)
        self._targets, self._heart, self._keep_stack = targets, heart, keep_stack
        self._clock, self._steady = clock, steady
        self._reader = WorkspaceReader(config.output_dir)
        self._rewards = RewardWatch(self.output, config.reward)
        self._beats = BeatWatch()
        self._open = read_open(self.output)
        # Keys of what the last look found wrong, and of what it could not call right.
        self._wrong = set[str]()
        self._not_right = set(self._open)
        self._over_since: dict[str, float] = {}
        self._beat_at = -config.dead_man_s

    def look(self) -> None:
        """Read the workspace once, write down and send what opened or ended since the last look.

        While the workspace is well, also send a message to the dead man's switch every `dead_man_s`.
        """
        now = self._clock()
        workspace = self._reader.read(now=now)
        judged = [each for each in self._judge(workspace) if each.kind in self.config.kinds]
        found = {each.key: each for each in judged if each.is_proven}
        not_right = {each.key for each in judged}
        silences = read_silences(self.output, now)
        opened = [each for key, each in found.items() if key in self._wrong and key not in self._open]
        new = [OpenIncident(each.kind, each.subject, each.text, now, is_silenced(each, silences)) for each in opened]
        waiting = [each for key, each in self._open.items() if each.quiet and key in found]
        new += [msgspec.structs.replace(each, quiet=False) for each in waiting if not is_silenced(each, silences)]
        over = [each for key, each in self._open.items() if key not in not_right | self._not_right]
        self._wrong, self._not_right = set(found), not_right
        if new or over:
            # Where the beginning was reported, and it was not muted meanwhile.
            told = [each for each in over if not each.quiet and muting(each, silences) is None]
            self._note(new, over)
            self._send([each for each in new if not each.quiet], told, now)
        for each in opened:
            daemon = workspace.daemon(each.subject)
            if each.kind in ("run_stalled", "daemon_stalled") and daemon is not None and daemon.process is not None:
                self._keep_stack(daemon.name, daemon.process)
        self._forget(silences, found, now)
        if self._heart is not None and is_well(workspace) and not 0 <= now - self._beat_at < self.config.dead_man_s:
            self._beat_at = now
            self._heart.put({})

    def _send(self, new: Sequence[OpenIncident], over: Sequence[OpenIncident], now: float) -> None:
        if not new and not over:
            return
        note = message(self.config.output_dir, new, over, now)
        for line in note["text"].splitlines():
            logger.warning("%s", line)
        for target in self._targets:
            target.put(note)

    def _note(self, new: Sequence[OpenIncident], over: Sequence[OpenIncident]) -> None:
        """Before they are sent: what has arrived is not sent again by the next start, however soon this one ends."""
        for incident in over:
            del self._open[incident.key]
        self._open |= {each.key: each for each in new}
        try:
            write_open(self.output, self._open)
        except OSError as error:  # a full disk is a reason for an alert
            logger.warning("a restart may report again what is open: %s", error)

    def _forget(self, silences: Sequence[Silence], found: Mapping[str, Incident], now: float) -> None:
        """Drop the acknowledgements of what has been over for so long that it would be something new."""
        ended = {each.name: each for each in silences if each.action == "acknowledged"}
        here: list[Named] = [*self._open.values(), *found.values()]
        for incident in here:
            ended.pop(name_of(incident), None)
        self._over_since = {name: self._over_since.get(name, now) for name in ended}
        for name, silence in ended.items():
            if now - self._over_since[name] >= ACKNOWLEDGED_FOR_S:
                with contextlib.suppress(OSError):
                    forget(self.output, silence)

    def _judge(self, workspace: Workspace) -> list[Incident]:
        try:
            free_bytes = shutil.disk_usage(self.config.output_dir).free
        except OSError:
            free_bytes = None
        found = incidents(workspace, self._nodes(), free_bytes, self.config.min_free_gb)
        return [*found, *self._rewards.look(workspace.runs)]

    def _nodes(self) -> list[SeenNode]:
        ranks = self.output.list_nodes()
        self._beats.forget(ranks)
        statuses = [read_status(self.output.node_status(rank), NodeStatus) for rank in ranks]
        return [self._beats.see(status, self._steady()) for status in statuses if status is not None]


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 stopped as asked, 1 failed, 2 wrong use."""
    stop = StopFlag().install()
    try:
        config = parse_argv(AlertsConfig, argv)
        setup_logger("alerts", config.log.level)
        targets = [Target(name, send) for name, send in message_targets(config, os.environ)]
        heart = dead_man(config, os.environ)
        close_handed()
    except (ConfigError, TargetError) as error:
        complain("alerts", error)
        return 2
    beating = Target(heart[0], heart[1], max_waiting=1) if heart else None
    alerts = Alerts(config, targets, beating, keep_stack=partial(keep_stack, OutputDir(config.output_dir)))
    path = alerts.output.own_status("alerts")
    path.parent.mkdir(parents=True, exist_ok=True)
    status = StatusWriter(path, Status(state="running"))
    names = [target.name for target in [*targets, *([beating] if beating else [])]]
    logger.info("watching %s for %s", config.output_dir, ", ".join(names) or "no target: alerts go to this log only")
    while not stop():
        status.turn()
        try:
            alerts.look()
        except Exception:  # one bad look must not end the alarms
            logger.exception("a look at the workspace failed; next one in %g s", LOOK_EVERY_S)
        stop.wait(LOOK_EVERY_S)
    deadline = time.monotonic() + CLOSE_WITHIN_S
    for target in targets:
        target.close(deadline - time.monotonic())
    status.close(state="stopped")
    return 0


# Of 1 MiB each, of one run: thousands of batches, and no file is so large that the other runs wait for it.
READS_PER_LOOK = 8
# A run that has ended gets no better reward, so its incident is over; one that waits or is paused may go on.
_ENDED = (RunState.FINISHED, RunState.FAILED, RunState.EVICTED)


class RewardWatch:
    """The rewards of the runs that hold a slot."""

    def __init__(self, output: OutputDir, rule: RewardRule) -> None:
        self._output, self._rule = output, rule
        self._rewards: dict[str, _Rewards] = {}

    def look(self, runs: Sequence[RunView]) -> Iterator[Incident]:
        """Read what is new, and judge."""
        active = [run.run_id for run in runs if run.state is RunState.ACTIVE]
        self._rewards = {run_id: self._rewards.get(run_id) or self._begin(run_id) for run_id in active}
        for run_id, rewards in self._rewards.items():
            is_read, trend = rewards.read(), rewards.trend
            if not is_read or trend.mean is None:
                yield from unproven(run_id, "reward_collapsed")
            elif trend.has_collapsed(self._rule.drop):
                what = f"mean reward of {self._rule.window} batches"
                why = f"{what} is {trend.mean:.3g}, was {trend.best:.3g} at best"
                yield Incident("reward_collapsed", run_id, why)
        for run in runs:
            if run.state not in (RunState.ACTIVE, *_ENDED):
                yield from unproven(run.run_id, "reward_collapsed")

    def _begin(self, run_id: str) -> _Rewards:
        return _Rewards(self._output.run(run_id).orchestrator_metrics, self._rule.window)


class _Rewards:
    """Of one run."""

    def __init__(self, path: Path, window: int) -> None:
        self._tail, self._window = FileTail(path), window
        self.trend = RewardTrend(window)

    def read(self) -> bool:
        """Read on; whether that was all."""
        for _ in range(READS_PER_LOOK):
            found = self._tail.read()
            if found.reset:
                self.trend = RewardTrend(self._window)
            for step, figures in filter(None, map(parse_metrics, found.lines)):
                if REWARD in figures:
                    self.trend.feed(step, figures[REWARD])
            if not found.more:
                return True
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
