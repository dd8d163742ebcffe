"""Launchers of daemons that agents start: these are adopted and ended by the agents' records, whatever the engine.

All of them are asked to end, and what does not end in time is killed.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from daemons.launchers.agent import AgentRecord, Beats, all_starts, ask_to_stop, log_of
from daemons.launchers.base import Alive, Ended, Handle, Left
from prime_rl.contract.files import WaitTimeout, wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import LOST_AFTER_S, DaemonStatus
from prime_rl.utils.process import ProcessId

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
