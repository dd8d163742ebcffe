"""The paths of daemons: their status files, configs, starts, requests. `contract.layout` has all others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# Replica 0 is found without a folder.
_REPLICA = re.compile(r"[1-9][0-9]{0,4}")


@dataclass(frozen=True)
class DaemonPaths:
    """See the module. `path` is the workspace."""

    path: Path

    @property
    def trainer_status(self) -> Path:
        """The trainer's slots, steps and waiting runs now; written by it alone."""
        return self.path / "trainer" / "status.json"

    @property
    def trainer_work(self) -> Path:
        """The file that the trainer reads now (`contract.work`); written by it alone."""
        return self.path / "trainer" / "work.json"

    @property
    def pass_limit(self) -> Path:
        """The size of a pass that may fit, where a larger one ended a trainer of several ranks; written by it."""
        return self.path / "trainer" / "pass_limit.json"

    @property
    def inference(self) -> Path:
        """Status files of the inference servers."""
        return self.path / "inference"

    @property
    def inference_status(self) -> Path:
        """Of the first inference server, replica 0."""
        return self.inference / "status.json"

    def replica_status(self, replica: int) -> Path:
        """Written by the inference server of that number only."""
        return self.inference / str(replica) / "status.json"

    def replica_work(self, replica: int) -> Path:
        """The work of that inference server now (`contract.work`); written by it alone."""
        return self.inference / str(replica) / "work.json"

    def inference_statuses(self) -> dict[int, Path]:
        """The status file of each inference server that ever was, by its number, ascending; always that of replica 0.

        What replica 0 writes to both of its files is read from `inference_status`, which any engine may write.
        """
        others = sorted(int(path.name) for path in self.inference.glob("*") if _REPLICA.fullmatch(path.name))
        return {0: self.inference_status} | {number: self.replica_status(number) for number in others}

    @property
    def weights_lock(self) -> Path:
        """Held by the orchestrator whose run's whole weights the inference servers have."""
        return self.inference / "weights.lock"

    @property
    def daemons(self) -> Path:
        """Records of the supervisor about each daemon, and requests to it."""
        return self.path / "daemons"

    def daemon_status(self, name: str) -> Path:
        """State, process and restarts of one daemon; written by the supervisor alone."""
        return self.daemons / f"{name}.json"

    def own_status(self, name: str) -> Path:
        """Written by a daemon that has no other place for its status: alerts, monitors."""
        return self.daemons / name / "status.json"

    @property
    def alerts_open(self) -> Path:
        """The incidents that the daemon `alerts` reports now, written by it alone."""
        return self.daemons / "alerts" / "open.json"

    @property
    def alerts_said(self) -> Path:
        """The acknowledged and muted alerts. One file each, written by `prl` and `prl-tui`."""
        return self.daemons / "alerts" / "said"

    def alert_said(self, name: str) -> Path:
        """One acknowledgement, or one mute."""
        return self.alerts_said / f"{name}.json"

    @property
    def starts(self) -> Path:
        """Records of agents about daemons that they started on other machines, and requests to them."""
        return self.daemons / "starts"

    def agent_record(self, name: str, start_id: str, node: int) -> Path:
        """Written by the agent of that node only."""
        return self.starts / f"{name}.{start_id}.{node}.json"

    def stop_request(self, name: str, start_id: str) -> Path:
        """Asks the agents of one start to end their daemon; holds the grace in seconds."""
        return self.starts / f"{name}.{start_id}.stop"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the living supervisor: there is one for each workspace."""
        return self.daemons / "supervisor.lock"

    @property
    def supervisor_pidfile(self) -> Path:
        """The process that is the supervisor; for people, never proof."""
        return self.daemons / "supervisor.pid"

    def start_request(self, name: str) -> Path:
        """Requests the restart of a daemon; the supervisor removes it when it has read it."""
        return self.daemons / "requests" / name

    def component_config(self, name: str) -> Path:
        """The resolved config that the supervisor hands to a daemon."""
        return self.daemons / "configs" / f"{name}.toml"
