"""Daemons as actors of a Ray cluster: Ray places them and notices lost nodes, and does nothing else.

Each start has a placement group with a bundle a node, and in each bundle a detached actor that starts an agent. The
agent's records tell how the daemon is. `RayCluster` alone speaks to Ray, in a thread of its own: Ray answers when it
likes, so the thread reports by plain attributes of each `Start`, which the launcher reads and never waits for. Ray is
imported there, when the first start comes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from daemons.launchers.agent import (
    START_MARK,
    AgentLauncher,
    AgentRecord,
    ask_to_stop,
    forget_starts,
    left_of,
    log_of,
    lost_node,
    read_starts,
    worst_of,
)
from daemons.launchers.base import Alive, Ended, Handle, LaunchError, new_start_id
from daemons.process import DEVICES_VARIABLE, daemon_environment
from daemons.specs import INFERENCE, MEETING_PORTS, TRAINER, DaemonSpec, keys_of, on_nodes
from prime_rl.contract.files import make_folder
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.runtime import install_command
from prime_rl.utils.secrets import handed_over, read_secret
from prime_rl.utils.text import one_line

logger = logging.getLogger("supervisor")

NAMESPACE = "prl"
LOOK_S = 0.2
# An agent that is asked to kill does it within moments; later its actor is killed.
LAST_RESORT_S = 5.0
CONNECT_S = 5.0
# How long the end of this process waits for what it still has to remove from the cluster.
FINISH_S = 10.0


class NodeActor:
    """One node of one start: runs an agent, and holds the pipe at whose end the agent ends the daemon."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None

    def endpoint(self) -> str:
        """HOST:PORT of this node where ranks can meet."""
        import ray

        for port in random.sample(MEETING_PORTS, len(MEETING_PORTS)):
            with contextlib.suppress(OSError), socket.socket() as found:
                found.bind(("", port))
                return f"{ray.util.get_node_ip_address()}:{port}"
        raise OSError(f"no port of {MEETING_PORTS.start} to {MEETING_PORTS.stop - 1} is free")

    def run(self, argv: Sequence[str], environ: Mapping[str, str], keys: Mapping[str, str], folder: str) -> int:
        """Start the agent and wait for its end; returns its exit code. Ray has set which GPUs are this actor's.

        Relative paths begin at `folder`, the one of `prl up`, where this node has it.
        """
        gpus = {DEVICES_VARIABLE: os.environ[DEVICES_VARIABLE]} if os.environ.get(DEVICES_VARIABLE) else {}
        self._agent = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**environ, **gpus},
            cwd=folder if os.path.isdir(folder) else None,
        )
        assert self._agent.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._agent.stdin.write(json.dumps(dict(keys)).encode() + b"\n")
            self._agent.stdin.flush()
        return self.wait()

    def wait(self) -> int:
        """The agent's exit code, when it has ended; -1 when it was never started."""
        return self._agent.wait() if self._agent is not None else -1


@dataclass(eq=False)
class Start:
    """One start of one daemon. The launcher makes it, the thread of `RayCluster` fills it in.

    `argv` () : it was started by an earlier supervisor. `num_placed` is the number of its nodes, 0 until it is known;
    `node_ids` and `names` are theirs. `trouble`: why it is over, when Ray reports that first. `dead`: the nodes whose
    actors have died. `returned_at`: when no actor was left that runs an agent.
    """

    name: str
    start_id: str
    argv: tuple[str, ...] = ()
    bundle: Mapping[str, float] = field(default_factory=dict)
    num_nodes: int = 1
    min_nodes: int = 1
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    node_ids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    is_launched: bool = False
    trouble: str | None = None
    returned_at: float | None = None
    release_at: float | None = None
    wanted_nodes: int = 0
    group: Any = None
    actors: list[Any] = field(default_factory=list)
    endpoint: Any = None
    calls: dict[Any, int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)

    @property
    def ref(self) -> str:
        """The name of its placement group; its actors are named REF-0, REF-1 and so on."""
        return f"{self.name}-{self.start_id}"

    @property
    def num_placed(self) -> int:
        """On how many nodes it is; 0 until Ray has placed it."""
        return len(self.node_ids)

    def node_name(self, node: int) -> str:
        """The name that Ray has for one of its nodes; before that is known, the number."""
        return self.names[node] if node < len(self.names) else str(node)

    def release_by(self, grace_s: float) -> None:
        """Release its rest in the cluster when its agents have ended, at last LAST_RESORT_S after `grace_s`."""
        at = time.monotonic() + grace_s + LAST_RESORT_S
        self.release_at = min(at, self.release_at or at)


class RayCluster:
    """The thread.

    Args:
        address: of the cluster, as `ray.init` takes it.
    """

    def __init__(self, output: OutputDir, address: str) -> None:
        self.output = output
        self._address = address
        self._starts: list[Start] = []
        self._thread: threading.Thread | None = None
        self._ray: Any = None
        self._has_signals = False
        self._complaint = ""

    def add(self, start: Start) -> None:
        """Place a start, or look after one of an earlier supervisor."""
        self._starts.append(start)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="ray", daemon=True)
            self._thread.start()

    def keep_signals(self) -> None:
        """Take SIGTERM back. Called in the main thread, which alone may do that: Ray's handler aborts us 3 s later."""
        if self._ray is not None and not self._has_signals and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            self._has_signals = True

    def _loop(self) -> None:
        while True:
            for start in list(self._starts):
                try:
                    self._ray = self._ray or self._connect()
                    self._turn(start)
                except LaunchError as error:
                    self._report(start, str(error))
                except Exception as error:  # the boundary to another system, which may be away
                    self._report(start, f"no answer from the Ray cluster at {self._address}: {one_line(str(error))}")
            time.sleep(LOOK_S)

    def _report(self, start: Start, complaint: str) -> None:
        """A start whose agents run goes on without Ray; what waits for Ray has failed."""
        if complaint != self._complaint:
            self._complaint = complaint
            logger.warning("%s: %s", start.name, complaint)
        if start.release_at is not None and time.monotonic() > start.release_at:
            self._starts.remove(start)
        elif not start.is_launched:
            start.trouble = start.trouble or complaint

    def _connect(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as error:
            raise LaunchError(f"the package ray is not installed: {install_command('ray')}") from error

        host, _, port = self._address.rpartition(":")
        if port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        # Ray complains that its thread here has no handler for SIGTERM: it must not have one.
        logging.getLogger("ray._private.worker").addFilter(lambda each: "SIGTERM handler" not in each.getMessage())
        if not ray.is_initialized():
            ray.init(self._address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        atexit.register(self._finish)
        return ray

    def _finish(self) -> None:
        """At the end of this process: what was asked to end is removed from the cluster first."""
        deadline = time.monotonic() + FINISH_S
        while any(start.release_at is not None for start in list(self._starts)) and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def _turn(self, start: Start) -> None:
        if start.release_at is not None and self._is_over(start):
            if not start.num_placed:
                start.trouble = start.trouble or "stopped before Ray had placed it"
            self._remove(start)
        elif start.trouble is not None or start.returned_at is not None:
            pass  # until the launcher has seen it
        elif start.is_launched:
            self._look_at_calls(start)
        elif not start.argv:
            self._find(start)
        elif start.group is None:
            self._reserve(start)
        elif not start.actors:
            self._fill(start)
        else:
            self._launch(start)

    def _reserve(self, start: Start) -> None:
        """Ask for a bundle on each of as many nodes as there are, `min_nodes` at least."""
        start.wanted_nodes = self._num_fitting(start)
        strategy = "STRICT_SPREAD" if start.wanted_nodes > 1 else "PACK"
        bundles = [dict(start.bundle)] * start.wanted_nodes
        start.group = self._ray.util.placement_group(bundles, strategy=strategy, name=start.ref, lifetime="detached")

    def _num_fitting(self, start: Start) -> int:
        nodes = [each["Resources"] for each in self._ray.nodes() if each["Alive"]]
        fitting = sum(all(node.get(key, 0) >= value for key, value in start.bundle.items()) for node in nodes)
        return max(start.min_nodes, min(start.num_nodes, fitting))

    def _fill(self, start: Start) -> None:
        """When the nodes are there: an actor in each bundle."""
        if not self._has_places(start):
            if self._num_fitting(start) != start.wanted_nodes:
                self._ray.util.remove_placement_group(start.group)
                start.group = None
            return
        strategies = self._ray.util.scheduling_strategies
        kind = self._ray.remote(NodeActor)
        others = {key: value for key, value in start.bundle.items() if key not in ("CPU", "GPU")}
        start.actors = [
            kind.options(
                name=f"{start.ref}-{node}",
                lifetime="detached",
                num_cpus=start.bundle.get("CPU", 0),
                num_gpus=start.bundle.get("GPU", 0),
                resources=others,
                max_restarts=0,
                max_concurrency=8,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(start.group, node),
            ).remote()
            for node in range(start.num_placed)
        ]
        start.endpoint = start.actors[0].endpoint.remote()

    def _has_places(self, start: Start) -> bool:
        """True when its placement group is whole; then its nodes are known."""
        table = self._ray.util.placement_group_table(start.group)
        if table.get("state") != "CREATED":
            return False
        names = {each["NodeID"]: each.get("NodeName") or each["NodeManagerAddress"] for each in self._ray.nodes()}
        places = table["bundles_to_node_id"]
        start.names = [names.get(places[node], places[node]) for node in sorted(places)]
        start.node_ids = [places[node] for node in sorted(places)]
        return True

    def _launch(self, start: Start) -> None:
        """When the first actor has told its address: the agents."""
        if not self._ready([start.endpoint]):
            return
        try:
            endpoint = self._ray.get(start.endpoint)
        except self._ray.exceptions.RayActorError:
            start.trouble = f"its actor on node {start.node_name(0)} has died"
            return
        agent = [sys.executable, "-m", "daemons.launchers.agent", str(self.output.path.resolve())]
        agent += [start.name, start.start_id, "--death-pipe", "--node"]
        argv = start.argv
        if start.num_placed > 1:
            argv = on_nodes(argv, start.num_placed, endpoint, start.start_id)
        for node, actor in enumerate(start.actors):
            command = [*agent, str(node), "--", *argv]
            call = actor.run.remote(command, dict(start.environ), dict(start.keys), os.getcwd())
            start.calls[call] = node
        start.is_launched = True

    def _find(self, start: Start) -> None:
        """The actors of a start that an earlier supervisor made."""
        try:
            start.group = self._ray.util.get_placement_group(start.ref)
            if self._has_places(start):
                start.actors = [self._ray.get_actor(f"{start.ref}-{node}") for node in range(start.num_placed)]
        except ValueError:  # no such name
            start.actors = []
        if not start.actors:
            start.trouble = "its placement group or one of its actors is missing from the Ray cluster"
            return
        start.calls = {actor.wait.remote(): node for node, actor in enumerate(start.actors)}
        start.is_launched = True

    def _look_at_calls(self, start: Start) -> None:
        """See which actors have returned, and which have died, alone or with their node."""
        for call in self._ready(list(start.calls)):
            node = start.calls.pop(call)
            try:
                self._ray.get(call)
            except self._ray.exceptions.ActorUnavailableError:  # the network between: asked again
                start.calls[start.actors[node].wait.remote()] = node
            except self._ray.exceptions.RayError:
                start.dead.add(node)
        alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]} if start.dead else set()
        for node in sorted(start.dead):
            if start.node_ids[node] not in alive:
                start.trouble = f"node {start.node_name(node)} is lost"
        if not start.calls and not start.dead:
            start.returned_at = time.monotonic()

    def _ready(self, calls: list[Any]) -> list[Any]:
        """Those of `calls` that have an answer, or an error."""
        return list(self._ray.wait(calls, num_returns=len(calls), timeout=0)[0]) if calls else []

    def _is_over(self, start: Start) -> bool:
        """True when its group can go: no agent runs any more, or those that were asked to end did not do so in time."""
        records = read_starts(self.output, start.name, start.start_id, start.num_placed)
        ended = {node for node, record in records.items() if record.state == "ended"}
        late = start.release_at is not None and time.monotonic() > start.release_at
        if not start.argv and not start.is_launched and start.trouble is None:
            return late  # an earlier supervisor's: it is looked for first
        return not start.is_launched or late or ended | start.dead >= set(range(start.num_placed))

    def _remove(self, start: Start) -> None:
        """The group, and with it its actors. A bundle that was not placed yet goes too."""
        with contextlib.suppress(ValueError):  # an earlier supervisor's, and gone
            group = start.group or self._ray.util.get_placement_group(start.ref)
            self._ray.util.remove_placement_group(group)
        self._starts.remove(start)


ENGINE = "ray"
# After the actors have returned, what their agents wrote last may still be on its way through a shared folder.
SETTLE_S = 4.0
# What a small daemon (an orchestrator, alerts, monitors) takes of a node: hundreds of them must fit beside the trainer.
_SMALL_CPUS = 0.01


class RayLauncher(AgentLauncher):
    """Launcher on a Ray cluster that this machine belongs to.

    Args:
        address: of the cluster, as `ray.init` takes it; "auto" finds the one of this machine.
        resources: what trainer and inference take of each of their nodes besides their GPUs.
    """

    def __init__(self, output: OutputDir, address: str = "auto", resources: Mapping[str, float] | None = None) -> None:
        super().__init__(output, ENGINE)
        self._resources = dict(resources or {})
        self._starts: dict[str, Start] = {}
        self._cluster = RayCluster(output, address)

    def start(self, spec: DaemonSpec) -> Handle:
        """`Launcher.start`. Returns before Ray has placed the daemon, which counts as alive while it waits for room."""
        start_id = new_start_id()
        make_folder(self.output.starts)
        forget_starts(self.output, spec.name, but=self._starts)
        keys = {each: key for each in keys_of(spec, self.output) if (key := read_secret(each, os.environ))}
        start = Start(
            spec.name,
            start_id,
            argv=spec.argv,
            bundle=self._bundle(spec),
            num_nodes=spec.num_nodes,
            min_nodes=max(1, min(spec.min_nodes, spec.num_nodes)),
            environ=self._environ(spec.name, start_id),
            keys=keys,
        )
        self._watch(start)
        return Handle(engine=ENGINE, name=spec.name, start_id=start_id, ref=start.ref)

    def look(self, handle: Handle) -> Alive | Ended:
        """`Launcher.look`: by the records of the agents, and by what Ray's thread reports.

        Adds a start of an earlier supervisor to those that the thread looks after.
        """
        self._cluster.keep_signals()
        start = self._starts.get(handle.start_id)
        if start is None:  # of an earlier supervisor
            start = Start(handle.name, handle.start_id)
            self._watch(start)
        seen = self._judge(start)
        if isinstance(seen, Ended):
            left = left_of(self._records(start).values(), self._beats)
            seen = replace(seen, left=left)
            if not left:
                self._starts.pop(start.start_id, None)
                self._beats.forget(start.start_id)
            with contextlib.suppress(OSError):  # what is left on other nodes
                ask_to_stop(self.output, start.name, start.start_id, 0.0)
            start.release_by(0.0)
        return seen

    def has_news(self) -> bool:
        """`Launcher.has_news`: whether Ray's thread reports the end of a start, which `look` has not settled yet."""
        return any(start.trouble is not None or start.returned_at is not None for start in self._starts.values())

    def stop(self, handle: Handle, grace_s: float) -> None:
        """`Launcher.stop`: asks the agents. The placement group is removed when they have ended or are late."""
        ask_to_stop(self.output, handle.name, handle.start_id, grace_s)
        if start := self._starts.get(handle.start_id):
            start.release_by(grace_s)

    def _watch(self, start: Start) -> None:
        self._starts[start.start_id] = start
        self._cluster.add(start)

    def _judge(self, start: Start) -> Alive | Ended:
        records = self._records(start)
        ended = [record for record in records.values() if record.state == "ended"]
        failed = [record for record in ended if record.exit_code != 0]
        if failed or (ended and len(ended) == start.num_placed):
            worst = worst_of(ended)
            if start.trouble is not None or worst.node in start.dead:
                reason = start.trouble or f"its actor on node {start.node_name(worst.node)} has died"
                return Ended(None, reason, node=worst.node)
            return Ended(worst.exit_code, worst.reason, node=worst.node)
        if start.trouble is not None:
            return Ended(None, start.trouble)
        if start.returned_at is not None and time.monotonic() - start.returned_at > SETTLE_S:
            log = log_of(self.output, start.name)
            return Ended(None, f"it ended, and its agent left no final record: see {log}")
        num_launched = start.num_placed if start.is_launched else 0
        lost = lost_node(start.start_id, num_launched, records, self._beats)
        if lost is not None:
            return Ended(None, f"node {start.node_name(lost)} is lost: its agent is silent", node=lost)
        return Alive(records[0].process if 0 in records else None)

    def _records(self, start: Start) -> Mapping[int, AgentRecord]:
        """The records of a start; how many nodes that of an earlier supervisor has only Ray's answer tells."""
        num_nodes = start.num_placed if start.argv or start.num_placed else None
        return read_starts(self.output, start.name, start.start_id, num_nodes)

    def _bundle(self, spec: DaemonSpec) -> dict[str, float]:
        """The share of each of its nodes that a daemon takes, by Ray's names."""
        if spec.replica is None and spec.name not in (TRAINER, INFERENCE):
            return {"CPU": _SMALL_CPUS}
        return {"CPU": 1.0, **({"GPU": float(spec.gpus)} if spec.gpus else {}), **self._resources}

    def _environ(self, name: str, start_id: str) -> dict[str, str]:
        """This process's environment, without keys and without what belongs to this machine or to Ray."""
        environ = daemon_environment(self.output.path, name) | {START_MARK: start_id}
        with handed_over(environ, []) as (clean, _):
            return {key: text for key, text in clean.items() if key != DEVICES_VARIABLE and not key.startswith("RAY_")}
