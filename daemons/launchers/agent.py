"""The agent: starts one daemon on the machine where it should run, writes down how it is, and ends all of it.

    python -m daemons.launchers.agent OUTPUT_DIR NAME START_ID [--node K] [--devices 0,1] [--death-pipe] -- ARGV...

An engine (a Slurm step, a Ray actor) starts one agent a node. Agent and launcher meet in `daemons/starts/` of the
workspace and nowhere else: the agent writes `NAME.START_ID.K.json` every BEAT_S, and reads `NAME.START_ID.stop`. It
ends its daemon when asked there, on SIGTERM, or when its own parent goes. The first line of its standard input is a
JSON object: the API keys that the daemon is handed, by the names of their variables.

`AgentLauncher` is the common part of the launchers of such engines: daemons are adopted and ended by the agents'
records, whatever the engine. All of them are asked to end, and what does not end in time is killed.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import psutil

from daemons.launchers.base import Alive, Ended, Handle, Left
from daemons.logs import node_log
from daemons.process import (
    DAEMON_MARK,
    DEVICES_VARIABLE,
    NODE_VARIABLE,
    WORKSPACE_MARK,
    daemon_environment,
    log_header,
    visible_devices,
)
from prime_rl.contract.files import WaitTimeout, make_folder, open_append, read_json, read_text, wait_for, write_atomic
from prime_rl.contract.layout import RUN_PREFIX, OutputDir
from prime_rl.contract.status import LOST_AFTER_S, DaemonStatus
from prime_rl.utils.process import (
    ProcessId,
    StopFlag,
    boot_id,
    end_orphans,
    inherit_orphans,
    living,
    orphans,
    send_kill,
    send_signal,
    signal_at_parents_death,
)
from prime_rl.utils.secrets import handed_over, seal

# In the environment of a daemon and all below it: which start they belong to.
START_MARK = "PRL_START"
# Why an agent ended its daemon, where the engine on its node is gone.
ORPHANED = "the process that started it has ended"
BEAT_S = 1.0
# How long an agent may take to its first record: Python and its modules may come from a slow shared folder.
FIRST_BEAT_S = 60.0
# How soon a request to stop is seen, and the death of the parent.
LOOK_S = 0.2
# When no grace is given: Slurm itself kills what lives 30 s after its SIGTERM (KillWait).
DEFAULT_GRACE_S = 25.0
# How long the last record is tried: a shared folder may be away for a moment, and only this file has the exit code.
LAST_RECORD_S = 30.0
MAX_RECORD_BYTES = 20_000
_MAX_KEY_LINE_BYTES = 100_000


class AgentRecord(msgspec.Struct, kw_only=True):
    """The record of the agent of one node about its daemon.

    `state`: running, ended. `pid`, `create_time` and `start` are those of the daemon on `host` since its boot
    `boot_id`; pid 0: it could not be started. `beat` grows every BEAT_S while the agent lives. `exit_code` is negative
    for a signal. `reason`: why the agent could not start it, or ended it although the launcher had not asked.
    """

    version: int = 1
    name: str
    start_id: str
    node: int = 0
    state: str = "running"
    host: str = ""
    boot_id: str = ""
    pid: int = 0
    create_time: float = 0.0
    start: str = ""
    beat: int = 0
    exit_code: int | None = None
    reason: str | None = None
    updated_at: float = 0.0

    @property
    def process(self) -> ProcessId | None:
        """The daemon's first process; None when it could not be started."""
        return ProcessId(self.pid, self.create_time, self.start) if self.pid else None


# What launchers read and write


def read_starts(output: OutputDir, name: str, start_id: str, num_nodes: int | None = None) -> dict[int, AgentRecord]:
    """The records of one start, by node; what is damaged, or of another start, is left out.

    `num_nodes`: how many nodes it has, so that one file a node is opened and no folder with thousands of files is
    listed. None: not known.
    """
    if num_nodes is None:
        found = [path.name.rsplit(".", 2)[1] for path in output.starts.glob(f"{name}.{start_id}.*.json")]
        nodes = sorted(int(node) for node in found if node.isdecimal())
    else:
        nodes = list(range(num_nodes))
    records = ((node, _read_record(output, name, start_id, node)) for node in nodes)
    return {node: record for node, record in records if record is not None}


def _read_record(output: OutputDir, name: str, start_id: str, node: int) -> AgentRecord | None:
    record = read_json(output.agent_record(name, start_id, node), AgentRecord, limit=MAX_RECORD_BYTES)
    is_it = record is not None and (record.name, record.start_id, record.node) == (name, start_id, node)
    return record if is_it else None


def worst_of(ended: Sequence[AgentRecord]) -> AgentRecord:
    """The one of a start's last records that tells most: with a reason, else an exit code; of several the first."""
    return max(ended, key=lambda record: (record.reason is not None, record.exit_code != 0, -record.updated_at))


def all_starts(output: OutputDir) -> list[AgentRecord]:
    """The records of all starts of a workspace; damaged ones are left out."""
    found = []
    for path in sorted(output.starts.glob("*.*.*.json")):
        name, start_id, node, _ = path.name.rsplit(".", 3)
        if node.isdecimal() and (record := _read_record(output, name, start_id, int(node))):
            found.append(record)
    return found


def ask_to_stop(output: OutputDir, name: str, start_id: str, grace_s: float) -> None:
    """Ask the agents of one start to end their daemon: SIGTERM, and SIGKILL `grace_s` later. Raises OSError."""
    make_folder(output.starts)
    write_atomic(output.stop_request(name, start_id), f"{grace_s:g}\n")


def forget_starts(output: OutputDir, name: str, *, but: Iterable[str] = ()) -> None:
    """Remove what earlier starts of a daemon left in `daemons/starts/`, except those of the start ids in `but`."""
    kept = set(but)
    for path in output.starts.glob(f"{name}.*"):
        parts = path.name[len(name) + 1 :].split(".")
        if len(parts) in (2, 3) and parts[-1] in ("json", "stop") and parts[0] not in kept:
            path.unlink(missing_ok=True)


class Beats:
    """The silence of each agent, by our own clock: the clocks of machines differ."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[tuple[str, int], tuple[int, float]] = {}

    def silent_s(self, start_id: str, node: int, beat: int) -> float:
        """Seconds since the beat of this node was first seen as it is now."""
        now = self._clock()
        last = self._last.get((start_id, node))
        if last is None or last[0] != beat:
            last = self._last[start_id, node] = (beat, now)
        return now - last[1]

    def forget(self, start_id: str) -> None:
        """Drop what is kept about the nodes of one start."""
        self._last = {key: value for key, value in self._last.items() if key[0] != start_id}


def lost_node(start_id: str, num_nodes: int, records: Mapping[int, AgentRecord], beats: Beats) -> int | None:
    """The first node of a start whose agent has been silent for too long, or None."""
    for node in range(num_nodes):
        record = records.get(node)
        if record is not None and record.state == "ended":
            continue
        beat, limit_s = (record.beat, LOST_AFTER_S) if record else (-1, FIRST_BEAT_S)
        if beats.silent_s(start_id, node, beat) > limit_s:
            return node
    return None


# The agent's own process


POLL_S = 0.2
# An agent kills within moments, and then the engine may be asked to, which takes seconds.
KILLED_WITHIN_S = 30.0


class AgentLauncher(abc.ABC):
    """The common part of engines that start daemons by agents. Each starts them and looks at them in its own way.

    Args:
        engine: its name in handles.
    """

    def __init__(self, output: OutputDir, engine: str) -> None:
        self.output = output
        self._engine = engine
        self._beats = Beats()

    @abc.abstractmethod
    def look(self, handle: Handle) -> Alive | Ended:
        """`Launcher.look`. A living start of an earlier supervisor is looked after from here on."""

    @abc.abstractmethod
    def stop(self, handle: Handle, grace_s: float) -> None:
        """`Launcher.stop`, by the agents."""

    def end(self, handles: Sequence[Handle], grace_s: float, drain_s: float, tick: Callable[[], None]) -> Left:
        """`Launcher.end`, by `stop` and `look`. Agents end all of a daemon once its first process has ended."""
        living: list[Handle] = []

        def all_ended() -> bool:
            tick()
            living[:] = [handle for handle in handles if isinstance(self.look(handle), Alive)]
            return not living

        for handle in handles:
            self.stop(handle, drain_s + grace_s)
        with contextlib.suppress(WaitTimeout):
            wait_for(all_ended, "daemons to end", timeout_s=drain_s + grace_s, poll_s=POLL_S)
        for handle in living:
            self.stop(handle, 0.0)
        with contextlib.suppress(WaitTimeout):
            wait_for(all_ended, "killed daemons to be gone", timeout_s=KILLED_WITHIN_S, poll_s=POLL_S)
        seen = [self.look(handle) for handle in living]
        return {look.process for look in seen if isinstance(look, Alive) and look.process}

    def adopt(self, record: DaemonStatus) -> Handle | None:
        """`Launcher.adopt`; None for a start of another engine."""
        handle = record.handle
        if handle is None or handle.engine != self._engine or not isinstance(self.look(handle), Alive):
            return None
        return handle

    def logs(self, handle: Handle) -> Path:
        """`Launcher.logs`: that of the daemon's first node."""
        return log_of(self.output, handle.name)

    def strays(self, but: Collection[str] = ()) -> set[ProcessId]:
        """`Launcher.strays`, by the agents' records."""
        return strays_of(self.output, but)

    def kill(self, strays: Collection[ProcessId], tick: Callable[[], None]) -> Left:
        """`Launcher.kill`, by the agents of these processes."""
        return kill_strays(self.output, strays, tick)


def left_of(records: Iterable[AgentRecord], beats: Beats) -> frozenset[int]:
    """`Ended.left`: daemons of one start whose agents still report them."""
    return frozenset(
        record.pid
        for record in records
        if record.state != "ended" and beats.silent_s(record.start_id, record.node, record.beat) <= LOST_AFTER_S
    )


def running_daemons(output: OutputDir, but: Collection[str] = ()) -> list[AgentRecord]:
    """The agents' records of daemons that have not ended, without the daemons named in `but`."""
    return [record for record in all_starts(output) if record.state != "ended" and record.name not in but]


def strays_of(output: OutputDir, but: Collection[str] = ()) -> set[ProcessId]:
    """`Launcher.strays`: by the agents' records, also those of an agent that is gone."""
    return {record.process for record in running_daemons(output, but) if record.process}


def kill_strays(output: OutputDir, strays: Collection[ProcessId], tick: Callable[[], None]) -> Left:
    """`Launcher.kill`. An agent that has been silent for LOST_AFTER_S is gone with its daemon. Its stop file stays."""
    beats = Beats()
    starts = {(record.name, record.start_id) for record in running_daemons(output) if record.process in strays}
    for name, start_id in starts:
        ask_to_stop(output, name, start_id, 0.0)
    left: Left = set()

    def gone() -> bool:
        tick()
        left.clear()
        for record in running_daemons(output):
            silent_s = beats.silent_s(record.start_id, record.node, record.beat)
            if record.process is not None and record.process in strays and silent_s <= LOST_AFTER_S:
                left.add(record.process)
        return not left

    with contextlib.suppress(WaitTimeout):
        wait_for(gone, "killed daemons to be gone", timeout_s=LOST_AFTER_S + KILLED_WITHIN_S, poll_s=POLL_S)
    for record in all_starts(output):
        if (record.name, record.start_id) in starts and record.process not in left:
            output.agent_record(record.name, record.start_id, record.node).unlink(missing_ok=True)
    return left


class Agent:
    """One daemon on this node, from its start to its end."""

    def __init__(self, output: OutputDir, name: str, start_id: str, node: int) -> None:
        self.output = output
        self.record = AgentRecord(name=name, start_id=start_id, node=node, host=socket.gethostname(), boot_id=boot_id())
        self._parent = os.getppid()
        self._child: subprocess.Popen[bytes] | None = None
        self._deadline: float | None = None
        self._next_beat_s = 0.0

    def start(self, argv: list[str], keys: Mapping[str, str], devices: Sequence[int] = ()) -> bool:
        """Start the daemon; false when it cannot be started, with the reason in the record.

        `devices`: which of the GPUs that this process sees are the daemon's; () for all.
        """
        _end_earlier_starts(self.output, self.record.name, self.record.start_id)
        marks = {START_MARK: self.record.start_id, NODE_VARIABLE: str(self.record.node)}
        environ = {**daemon_environment(self.output.path, self.record.name), **marks, **keys}
        if devices:
            environ[DEVICES_VARIABLE] = visible_devices(environ.get(DEVICES_VARIABLE, ""), devices)
        log = log_of(self.output, self.record.name, self.record.node)
        try:
            make_folder(log.parent)
            with open_append(log) as file, handed_over(environ, list(keys)) as (environ, fds):
                file.write(log_header(self.record.name, argv).encode())
                file.flush()
                self._child = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=environ,
                    pass_fds=fds,
                    preexec_fn=partial(signal_at_parents_death, signal.SIGKILL),  # noqa: PLW1509 (no thread runs here yet)
                )
        except (OSError, ValueError) as error:
            self._close(None, f"cannot start: {error}")
            return False
        process = ProcessId.of(self._child.pid)
        self.record.pid, self.record.create_time, self.record.start = process.pid, process.create_time, process.start
        self.beat()
        return True

    def watch(self, stop: StopFlag, pipe: int | None) -> int:
        """Until the daemon has ended, by itself or as asked, and nothing of it is left; returns its exit code."""
        assert self._child is not None
        poll = select.poll()
        if pipe is not None:
            poll.register(pipe, select.POLLIN)
        with contextlib.suppress(AttributeError, OSError):  # an old kernel, or too many open files
            poll.register(os.pidfd_open(self._child.pid), select.POLLIN)
        while self._child.poll() is None:
            ready = [fd for fd, _ in poll.poll(LOOK_S * 1000)]
            if pipe in ready and not os.read(pipe or 0, 4096):
                poll.unregister(pipe or 0)
                self.end(ORPHANED, DEFAULT_GRACE_S)
            if os.getppid() != self._parent:
                self.end(ORPHANED, DEFAULT_GRACE_S)
            if stop():
                self.end(f"{stop.signal_name} was sent to its agent", DEFAULT_GRACE_S)
            if (grace_s := self._requested()) is not None:
                self.end(None, grace_s)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                for left in living(self._child):
                    send_signal(left, signal.SIGKILL)
            orphans((self._child.pid,))  # reaped; without this each would stay as a zombie
            self.beat()
        self._kill_rest()
        self._close(self._child.returncode, self.record.reason)
        return self._child.returncode

    def end(self, why: str | None, grace_s: float) -> None:
        """SIGTERM to the daemon at the first call, SIGKILL to all of it when the shortest grace has passed.

        `why` is None when the launcher asked for it, which knows why.
        """
        deadline = time.monotonic() + grace_s
        if self._deadline is None and self._child is not None:
            self.record.reason = why
            self._child.send_signal(signal.SIGTERM)
            self._deadline = deadline
        self._deadline = min(deadline, self._deadline or deadline)

    def beat(self) -> None:
        """Write the record if it is time. A folder that is away for a moment must not end the daemon."""
        if time.monotonic() >= self._next_beat_s:
            self._next_beat_s = time.monotonic() + BEAT_S
            with contextlib.suppress(OSError):
                self._write()

    def _requested(self) -> float | None:
        with contextlib.suppress(OSError, ValueError):
            text = read_text(self.output.stop_request(self.record.name, self.record.start_id), limit=100)
            return max(0.0, float(text)) if text else None
        return None

    def _kill_rest(self) -> None:
        """End what the daemon left behind, which is a child of ours now."""
        deadline = time.monotonic() + DEFAULT_GRACE_S
        while end_orphans(patience_s=LOOK_S) and time.monotonic() < deadline:
            self.beat()

    def _close(self, exit_code: int | None, reason: str | None) -> None:
        self.record.state, self.record.exit_code, self.record.reason = "ended", exit_code, reason
        deadline = time.monotonic() + LAST_RECORD_S
        while True:
            try:
                return self._write()
            except OSError as error:
                if time.monotonic() > deadline or not self.output.daemons.is_dir():
                    print(f"{self.record.name}: cannot write its last record: {error}", file=sys.stderr)
                    return None
                time.sleep(BEAT_S)

    def _write(self) -> None:
        record = self.record
        record.beat += 1
        record.updated_at = time.time()
        path = self.output.agent_record(record.name, record.start_id, record.node)
        write_atomic(path, msgspec.json.encode(record), durable=record.state == "ended")


def log_of(output: OutputDir, name: str, node: int = 0) -> Path:
    """The log of one node of a daemon."""
    return node_log(output.run(name).log if name.startswith(RUN_PREFIX) else output.log(name), node)


def _end_earlier_starts(output: OutputDir, name: str, start_id: str) -> None:
    """A killed agent may have left processes of an earlier start on this machine: a daemon has no twin."""
    workspace = str(output.path.resolve())
    me = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            marks = psutil.Process(pid).environ()
            other = marks.get(START_MARK) not in (None, start_id)
            if other and (marks.get(WORKSPACE_MARK), marks.get(DAEMON_MARK)) == (workspace, name) and pid not in me:
                found.add(ProcessId.of(pid))
    send_kill(found)


def _read_keys() -> dict[str, str]:
    """The first line of standard input, byte by byte: what comes after it belongs to others. Raises MsgspecError."""
    line = b""
    while len(line) < _MAX_KEY_LINE_BYTES and (byte := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
        line += byte
    return msgspec.json.decode(line, type=dict[str, str]) if line.strip() else {}


def _node(text: str) -> int:
    """A number, or the environment variable that has it."""
    return int(os.environ.get(text, text))


def main(args: list[str]) -> int:
    """Returns the exit code: that of the daemon, 128 + N after signal N, 1 when it could not be started."""
    stop = StopFlag().install()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="daemons.launchers.agent")
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("name")
    parser.add_argument("start_id")
    parser.add_argument("--node", type=_node, default=0, help="its number, or the variable that has it")
    parser.add_argument("--devices", default="", help="of the GPUs that are visible here, by number: 0,1")
    parser.add_argument("--death-pipe", action="store_true", help="end the daemon at the end of standard input")
    mine, argv = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
    options = parser.parse_args(mine)
    if not argv:
        parser.error("the daemon's command must follow --")
    inherit_orphans()
    seal()  # before the keys come
    output = OutputDir(options.output_dir)
    make_folder(output.starts)
    agent = Agent(output, options.name, options.start_id, options.node)
    if not agent.start(argv, _read_keys(), [int(number) for number in options.devices.split(",") if number]):
        return 1
    code = agent.watch(stop, sys.stdin.fileno() if options.death_pipe else None)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
