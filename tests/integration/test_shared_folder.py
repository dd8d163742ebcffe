"""A workspace on a folder that two hosts mount: it runs on one, and people work on the other.

No event and no lock crosses, and what a host has seen may be seconds old.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract.files import wait_for
from prime_rl.utils.mounts import events_come
from tests.patience import PATIENCE_S
from tests.shared_folder import LoginNode, shared_folder, why_skipped
from tests.system_support import Workspace, closed, make_workspace

WHY_SKIPPED = why_skipped()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_SKIPPED != "", reason=WHY_SKIPPED or "-")]
ENDLESS = 100_000
DAEMONS = ("trainer", "inference", "supervisor")


@dataclass(frozen=True)
class Shared:
    """The workspace on its own host, and `prl` on the other."""

    workspace: Workspace
    login: LoginNode

    def prl(self, *args: str, check: bool = True) -> str:
        done = self.login.prl(*args, "--output-dir", str(self.workspace.output_dir), check=check)
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.login.prl("status", "--json", "--output-dir", self.place).stdout))

    @property
    def place(self) -> str:
        return str(self.workspace.output_dir)

    def run(self, run_id: str) -> dict[str, Any]:
        found = json.loads(self.login.prl("runs", "list", "--json", "--output-dir", self.place).stdout)["runs"]
        return next((run for run in found if run["run_id"] == run_id), {"state": "none", "step": 0})

    def daemons(self) -> dict[str, str]:
        return {each["name"]: each["state"] for each in self.status()["daemons"]}

    def sees(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_for(condition, what, timeout_s=PATIENCE_S, poll_s=0.5)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.prl('status')}\n{self.workspace.logs()}") from error


@pytest.fixture
def shared(tmp_path: Path, untaught_model: Path) -> Iterator[Shared]:
    with shared_folder(tmp_path) as (folder, login):
        for workspace in closed(make_workspace(folder, untaught_model)):
            yield Shared(workspace, login)


def test_a_workspace_is_steered_from_another_host(shared: Shared) -> None:
    workspace = shared.workspace
    assert not events_come(workspace.output_dir)
    workspace.up()
    short, bad = workspace.write_run("short", max_steps=2), workspace.write_run("bad")
    endless = workspace.write_run("endless", max_steps=ENDLESS)
    for file in (short, endless):
        shared.prl("runs", "add", str(file))
    assert "batch_size" in shared.prl("runs", "add", str(bad), "--set", "batch_size=15", check=False)
    shared.sees(lambda: shared.run("run_short")["state"] == "finished", "the end of run_short")
    shared.sees(lambda: shared.run("run_endless")["step"] > 0, "a step of run_endless")
    assert shared.status()["supervisor_alive"]
    # A status file that has just grown is read with the length that was cached, and does not count in that look.
    shared.sees(lambda: all(shared.daemons().get(name) == "running" for name in DAEMONS), "all daemons to run")
    assert "run_endless" in shared.prl("logs", "trainer", "-n", "200")
    shared.prl("runs", "pause", "run_endless")
    shared.sees(lambda: shared.run("run_endless")["state"] == "paused", "the pause")
    paused_at = shared.run("run_endless")["step"]
    shared.prl("runs", "continue", "run_endless")
    shared.sees(lambda: shared.run("run_endless")["step"] > paused_at, "a step after the pause")
    shared.prl("runs", "evict", "run_endless", "--reason", "enough")
    shared.sees(lambda: shared.run("run_endless")["state"] == "evicted", "the eviction")


def test_the_host_that_dies_is_seen_from_another_and_loses_nothing(shared: Shared) -> None:
    workspace = shared.workspace
    workspace.up()
    shared.prl("runs", "add", str(workspace.write_run("endless", max_steps=ENDLESS)))
    shared.sees(lambda: shared.run("run_endless")["step"] >= 2, "two steps")
    step = shared.run("run_endless")["step"]
    for process in workspace.processes():
        os.kill(process.pid, signal.SIGKILL)
    shared.sees(lambda: not shared.status()["supervisor_alive"], "the silence of the supervisor")
    assert "no heartbeat since" in shared.prl("status")
    workspace.up()
    shared.sees(lambda: shared.run("run_endless")["step"] > step, "a step of the next life")
    for command in ("up", "down"):
        said = shared.prl(command, check=False)
        assert "already running" in said and f"stop it with prl down on {socket.gethostname()}" in said
    workspace.prl("down")
    shared.sees(lambda: not shared.status()["supervisor_alive"], "the end of the supervisor")
    assert shared.run("run_endless")["step"] > step
