"""Daemons as actors of a Ray cluster: Ray places them and notices lost nodes, and does nothing else.

Each start has a placement group with a bundle a node, and in each bundle a detached actor that starts an agent. The
agent's records tell how the daemon is. `ray_cluster` speaks to Ray in a thread of its own; nothing here waits for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import replace

from daemons.launchers.agent import (
    START_MARK,
    AgentRecord,
    ask_to_stop,
    forget_starts,
    log_of,
    lost_node,
    read_starts,
    worst_of,
)
from daemons.launchers.base import Alive, Ended, Handle, new_start_id
from daemons.launchers.ending import AgentLauncher, left_of
from daemons.launchers.ray_cluster import GPUS_VARIABLE, RayCluster, Start
from daemons.process import daemon_environment
from daemons.specs import INFERENCE, TRAINER, DaemonSpec, keys_of
from prime_rl.contract.files import make_folder
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.secrets import handed_over, read_secret

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
            return {key: value for key, value in clean.items() if key != GPUS_VARIABLE and not key.startswith("RAY_")}
