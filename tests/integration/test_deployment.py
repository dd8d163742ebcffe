"""The table [deployment] on one machine: a living workspace whose trainer is two ranks and whose servers come and go.

Quicker: `test_daemons_deployment` (commands), `test_daemons_scaling` (settings), `test_orchestrator_replicas`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import psutil
import pytest

from prime_rl.contract.layout import list_steps
from tests.system_support import Workspace, closed, make_workspace

TABLE = """
[deployment.trainer]
ranks_per_node = 2
"""


@pytest.mark.release
def test_inference_servers_come_and_go_while_a_run_trains_on_two_ranks(tmp_path: Path, untaught_model: Path) -> None:
    workspace = make_workspace(tmp_path, untaught_model)
    workspace.system_toml.write_text(workspace.system_toml.read_text() + TABLE)
    for _ in closed(workspace):
        workspace.up()
        workspace.prl("runs", "add", str(workspace.write_run("a", max_steps=100_000)))
        trains(workspace, "two ranks to train")
        assert len(processes(workspace, "prime_rl.trainer.train")) >= 2 + 1, "two ranks and torchrun"

        assert "1 -> 2 inference servers" in workspace.prl("scale", "inference", "2").stdout
        workspace.wait(lambda: len(adapters(workspace)) == 2 and all(adapters(workspace)), "both to have the adapter")
        workspace.wait(lambda: daemon(workspace, "inference-1")["state"] == "running", "the supervisor to see it serve")
        assert "restarted" in workspace.prl("restart", "inference-1").stdout
        workspace.wait(lambda: len(adapters(workspace)) == 2 and all(adapters(workspace)), "the second one again")
        assert "/v1" in workspace.prl("logs", "inference-1").stdout or workspace.prl("logs", "inference-1").stdout

        workspace.prl("scale", "inference", "1")
        workspace.wait(lambda: daemon(workspace, "inference-1")["state"] == "done", "the second one to end")
        trains(workspace, "the run to go on with the first")
        assert workspace.state("run_a") == "active"
        assert workspace.prl("scale", "inference", "0", check=False).returncode == 2
    assert workspace.processes() == []


def trains(workspace: Workspace, what: str) -> None:
    def newest() -> int:
        return max(list_steps(workspace.run_dir("run_a").broadcast, stable_only=True), default=0)

    before = newest()
    workspace.wait(lambda: newest() > before, what)


def adapters(workspace: Workspace) -> list[list[str]]:
    """Those of each server that serves."""
    servers = workspace.json("status")["inference"]
    return [each["adapters"] for each in servers if each["state"] == "serving"]


def daemon(workspace: Workspace, name: str) -> dict[str, Any]:
    (found,) = [each for each in workspace.json("status")["daemons"] if each["name"] == name]
    return dict(found)


def processes(workspace: Workspace, module: str) -> list[int]:
    found = []
    for each in workspace.processes():
        with contextlib.suppress(psutil.Error):  # it has ended since
            found += [each.pid] if module in each.cmdline() else []
    return found
