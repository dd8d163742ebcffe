"""The launcher protocol: how the supervisor starts, watches and ends a daemon, whichever engine runs it.

A launcher places daemons and notices their end. It decides nothing: `decide` chooses what is started and ended, `specs`
what a daemon is. Here too, pure: the nodes and their GPUs for a daemon (`Place`), where the engine leaves that to us.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prime_rl.contract.status import DaemonStatus
from prime_rl.contract.status import Handle as Handle
from prime_rl.utils.process import ProcessId

if TYPE_CHECKING:
    from daemons.specs import DaemonSpec

_START_ID_BYTES = 6


@dataclass(frozen=True)
class Alive:
    """The daemon runs, or is on its way; `process` is None until it is known."""

    process: ProcessId | None


@dataclass(frozen=True)
class Ended:
    """The daemon has ended; `exit_code` is None when it is not known. `reason`: what else the engine reports.

    `left`: its processes that still run, though they were killed. `node`: which of its nodes ended it.
    """

    exit_code: int | None
    reason: str | None = None
    left: frozenset[int] = frozenset()
    node: int = 0


class LaunchError(RuntimeError):
    """A workspace or a daemon that cannot be started or stopped.

    The first line has the error, the place and the remedy; a log may follow.
    """

    exit_code = 1


Left = set[ProcessId]


class Launcher(Protocol):
    """One engine in one workspace."""

    def start(self, spec: DaemonSpec) -> Handle:
        """Start a daemon; does not wait until it runs. Raises OSError or LaunchError."""

    def look(self, handle: Handle) -> Alive | Ended:
        """Return the state of a start. Cheap: called at every look, and asks no network.

        A start that has ended is looked at until `stop` has killed what it left behind, and nothing is left.
        """

    def has_news(self) -> bool:
        """True when a start that was looked at may have ended since. Called at every tick: costs a few system calls."""

    def stop(self, handle: Handle, grace_s: float) -> None:
        """Ask a daemon to end; what lives `grace_s` later is killed.

        With infinity never; with 0 now, and all that it left behind. Does not wait, and may be called again.
        """

    def end(self, handles: Sequence[Handle], grace_s: float, drain_s: float, tick: Callable[[], None]) -> Left:
        """End daemons side by side, and prove it: each may finish and save for `drain_s`, then has `grace_s` to end.

        Waits, and calls `tick` meanwhile. Returns what could not be ended.
        """

    def adopt(self, record: DaemonStatus) -> Handle | None:
        """The recorded start, also of an earlier supervisor, if it still lives; a launcher may watch it then."""

    def strays(self, but: Collection[str] = ()) -> set[ProcessId]:
        """All processes that run for daemons of this workspace, recorded or not, except for those named in `but`."""

    def kill(self, strays: Collection[ProcessId], tick: Callable[[], None]) -> Left:
        """SIGKILL some `strays`, and wait until they are gone, calling `tick`. Returns what could not be ended."""

    def logs(self, handle: Handle) -> Path:
        """The daemon's log, in the workspace; `logs.node_log` has those of its other nodes."""


def new_start_id() -> str:
    """An id that no other start has: random, in hexadecimal digits."""
    return os.urandom(_START_ID_BYTES).hex()


# At about 120 MB each: what a node has beside a server or a rank. One node is enough for most workspaces.
ORCHESTRATORS_PER_NODE = 100


@dataclass(frozen=True)
class Place:
    """The nodes of a daemon, first the one of rank 0, and the GPUs that it has on each of them, by number."""

    nodes: tuple[str, ...]
    devices: tuple[int, ...] = ()


def choose(spec: DaemonSpec, up: Sequence[str], taken: Collection[Place], capacity: int | None = None) -> Place:
    """Where a daemon goes, beside what is `taken`.

    The trainer takes as many nodes as are up, `min_nodes` at least; what needs GPUs goes to the nodes with the most
    free ones; other inference servers are spread; orchestrators fill one node after another; all else is on the first.

    Args:
        up: the nodes that can be used, in the allocation's order.
        capacity: GPUs that each node has. None: as many as are asked for.

    Raises LaunchError.
    """
    if not spec.gpus:
        first = _first_for_a_run(up, taken) if spec.run_id else (spec.replica or 0) % max(1, len(up))
        return Place(_in_order(spec, [*up[first:], *up[:first]], up, up))
    used: dict[str, set[int]] = {node: set() for node in up}
    for place in taken:
        for node in place.nodes:
            if node in used:
                used[node].update(place.devices)
    rank = {node: number for number, node in enumerate(up)}
    roomy = [node for node in up if capacity is None or capacity - len(used[node]) >= spec.gpus]
    nodes = _in_order(spec, sorted(roomy, key=lambda node: (len(used[node]), rank[node])), roomy, up)
    busy = set().union(*(used[node] for node in nodes))
    free = [number for number in range(len(busy) + spec.gpus) if number not in busy][: spec.gpus]
    if capacity is not None and free[-1] >= capacity:
        raise LaunchError(f"{spec.name}: no {spec.gpus} GPUs are free on all of {', '.join(nodes)}")
    return Place(nodes, tuple(free))


def _first_for_a_run(up: Sequence[str], taken: Collection[Place]) -> int:
    """The number of the first node that has the fewest orchestrators, in hundreds: a node is filled before the next."""
    counts = Counter(place.nodes[0] for place in taken if not place.devices)
    return min(range(len(up)), key=lambda number: counts[up[number]] // ORCHESTRATORS_PER_NODE, default=0)


def _in_order(spec: DaemonSpec, preferred: Sequence[str], fitting: Sequence[str], up: Sequence[str]) -> tuple[str, ...]:
    """The first of `preferred`, as many as the daemon can have, in the allocation's order. Raises LaunchError."""
    num_nodes = min(spec.num_nodes, len(fitting))
    if num_nodes < max(1, spec.min_nodes):
        room = f" with {spec.gpus} free GPUs" if spec.gpus else ""
        found = f"{len(fitting)} of {len(up)}: {compact(up) or 'none'}"
        raise LaunchError(f"{spec.name}: expected at least {spec.min_nodes} nodes that are up{room}, found {found}")
    rank = {node: number for number, node in enumerate(up)}
    return tuple(sorted(preferred[:num_nodes], key=rank.__getitem__))


def find_place(
    spec: DaemonSpec, up: Sequence[str], taken: Mapping[str, Place], trainer: DaemonSpec, capacity: int | None = None
) -> Place:
    """As `choose`, beside the daemons `taken` (by name), and beside what the trainer needs while it has no place.

    Raises LaunchError.
    """
    others = list(taken.values())
    if spec.name != trainer.name and trainer.name not in taken and trainer.gpus:
        others.append(choose(trainer, up, others, capacity))
    return choose(spec, up, others, capacity)


def place_all(specs: Sequence[DaemonSpec], up: Sequence[str], capacity: int | None = None) -> dict[str, Place]:
    """The places of all services of a workspace that starts, by name. Raises LaunchError."""
    trainer = next(spec for spec in specs if spec.name == "trainer")
    found: dict[str, Place] = {}
    for spec in specs:
        found[spec.name] = find_place(spec, up, found, trainer, capacity)
    return found


def nodes_needed(specs: Sequence[DaemonSpec], capacity: int | None = None) -> int:
    """Of how many nodes a workspace needs: those of the trainer, and more while the GPUs do not suffice.

    Raises LaunchError when no number suffices.
    """
    num_gpus = sum(spec.gpus * spec.num_nodes for spec in specs)
    least = max(*(spec.num_nodes for spec in specs), -(-num_gpus // capacity) if capacity else 1)
    for number in range(least, least + len(specs)):
        try:
            place_all(specs, [str(each) for each in range(number)], capacity)
        except LaunchError:
            continue
        return number
    most = max(spec.gpus for spec in specs)
    raise LaunchError(f"a daemon needs {most} GPUs of one node, which has {capacity}: see [deployment]")


def compact(names: Sequence[str]) -> str:
    """Names of nodes as Slurm writes them: `node[1-4],node7`."""
    groups: list[list[tuple[str, str]]] = []
    for name in names:
        match = re.fullmatch(r"(.*?)(\d*)", name, re.DOTALL)
        stem, digits = (match[1], match[2]) if match else (name, "")
        number = int(digits or 0)
        if groups and digits == str(number) and groups[-1][-1] == (stem, str(number - 1)):
            groups[-1].append((stem, digits))
        else:
            groups.append([(stem, digits)])
    return ",".join(
        f"{group[0][0]}[{group[0][1]}-{group[-1][1]}]" if len(group) > 1 else "".join(group[0]) for group in groups
    )
