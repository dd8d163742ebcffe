"""A workspace on a folder that two hosts mount: it runs on one, and people work on the other.

No event and no lock crosses, and what a host has seen may be seconds old.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from prime_rl.utils.watch import events_come
from tests.shared_folder import shared_folder, why_skipped
from tests.system_support import Workspace, closed, make_workspace

WHY_SKIPPED = why_skipped()
pytestmark = [pytest.mark.release, pytest.mark.skipif(WHY_SKIPPED != "", reason=WHY_SKIPPED or "-")]
ENDLESS = 100_000
DAEMONS = ("trainer", "inference", "supervisor")


@pytest.fixture
def workspace(tmp_path: Path, untaught_model: Path) -> Iterator[tuple[Workspace, Workspace]]:
    """One workspace twice: `prl` on the host of the daemons, and on the other."""
    with shared_folder(tmp_path) as (folder, enter):
        for here in closed(make_workspace(folder, untaught_model)):
            yield here, replace(here, enter=enter)


def daemons(workspace: Workspace) -> dict[str, str]:
    return {each["name"]: each["state"] for each in workspace.json("status")["daemons"]}


def step_of(workspace: Workspace, run_id: str) -> int:
    return int(workspace.runs()[run_id]["step"])


def is_up(workspace: Workspace) -> bool:
    return bool(workspace.json("status")["supervisor_alive"])


@pytest.mark.release
def test_a_workspace_is_steered_from_another_host(workspace: tuple[Workspace, Workspace]) -> None:
    here, there = workspace
    assert not events_come(here.output_dir)
    here.up()
    short, bad = here.write_run("short", max_steps=2), here.write_run("bad")
    endless = here.write_run("endless", max_steps=ENDLESS)
    for file in (short, endless):
        there.prl("runs", "add", str(file))
    assert "batch_size" in there.prl("runs", "add", str(bad), "--set", "batch_size=15", check=False).stderr
    there.wait(lambda: there.state("run_short") == "finished", "the end of run_short")
    there.wait(lambda: step_of(there, "run_endless") > 0, "a step of run_endless")
    # A status file that has just grown is read with the length that was cached, and does not count in that look.
    there.wait(lambda: is_up(there), "the supervisor to be seen")
    there.wait(lambda: all(daemons(there).get(name) == "running" for name in DAEMONS), "all daemons to run")
    assert "run_endless" in there.prl("logs", "trainer", "-n", "200").stdout
    there.prl("runs", "pause", "run_endless")
    there.wait(lambda: there.state("run_endless") == "paused", "the pause")
    paused_at = step_of(there, "run_endless")
    there.prl("runs", "continue", "run_endless")
    there.wait(lambda: step_of(there, "run_endless") > paused_at, "a step after the pause")
    there.prl("runs", "evict", "run_endless", "--reason", "enough")
    there.wait(lambda: there.state("run_endless") == "evicted", "the eviction")


def test_the_host_that_dies_is_seen_from_another_and_loses_nothing(workspace: tuple[Workspace, Workspace]) -> None:
    here, there = workspace
    here.up()
    there.prl("runs", "add", str(here.write_run("endless", max_steps=ENDLESS)))
    there.wait(lambda: step_of(there, "run_endless") >= 2, "two steps")
    step = step_of(there, "run_endless")
    for process in here.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that another took with it
            process.kill()
    # Not merely a look that does not have its supervisor: see above.
    there.wait(lambda: "no heartbeat since" in there.prl("status").stdout, "the silence of the supervisor")
    assert not is_up(there)
    here.up()
    there.wait(lambda: step_of(there, "run_endless") > step, "a step of the next life")
    for command in ("up", "down"):
        said = there.prl(command, check=False).stderr
        assert "already running" in said and f"stop it with prl down on {socket.gethostname()}" in said
    here.prl("down")
    there.wait(lambda: not is_up(there), "the end of the supervisor")
    assert step_of(there, "run_endless") > step
