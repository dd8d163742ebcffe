"""Processes as the supervisor holds them: adopted ones, inherited orphans, memory of GPUs that is given back late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from daemons.launchers import local
from daemons.launchers.local import AdoptedChild, gpu_processes, wait_for_gpus
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.process import ProcessId, boot_id
from tests.patience import PATIENCE_S

# As the first process of a container: it gets a child that it did not start as a daemon, and one that is a daemon.
FIRST_PROCESS = """
import os, subprocess, sys, time
from daemons.launchers.local import OwnChild, any_ended
orphan = subprocess.Popen(["true"])
daemon = subprocess.Popen(["sleep", "600"])
children, own = {"daemon": OwnChild(daemon)}, frozenset({daemon.pid})
while os.path.exists(f"/proc/{orphan.pid}"):
    assert not any_ended(children.values(), own), "an orphan is not a daemon"
    time.sleep(0.01)
daemon.kill()
while not any_ended(children.values(), own):
    time.sleep(0.01)
assert not children["daemon"].lives() and children["daemon"].exit_code == -9
assert not any_ended(children.values(), own)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        yield child
        child.kill()


def test_an_adopted_daemon_lives_until_it_dies_whichever_process_reaps_it(sleeper: subprocess.Popen[bytes]) -> None:
    adopted = AdoptedChild(ProcessId.of(sleeper.pid))
    assert adopted.lives() and adopted.exit_code is None
    os.kill(sleeper.pid, signal.SIGKILL)
    wait_for(lambda: not adopted.lives(), "the end to be seen before it is reaped", timeout_s=PATIENCE_S)
    sleeper.wait()
    assert not adopted.lives() and adopted.exit_code is None
    adopted.close()


def test_a_stranger_with_the_pid_of_an_adopted_daemon_is_not_that_daemon(sleeper: subprocess.Popen[bytes]) -> None:
    real = ProcessId.of(sleeper.pid)
    assert not AdoptedChild(replace(real, start=f"{boot_id()}/1")).lives()


def test_inherited_orphans_are_reaped_and_daemons_are_noticed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PROCESS], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# As a supervisor that ends: below its daemon is a process that has left its session and cleared its environment.
LAST_ACT = """
import os, subprocess, sys, time
from pathlib import Path
from daemons.launchers.local import Local
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.process import inherit_orphans

inherit_orphans()
left = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True)
pid = int(left.stdout.readline())
left.wait()
assert Path(f"/proc/{pid}").exists()
assert Local(OutputDir(Path(sys.argv[2]))).kill(set(), lambda: None) == set()
assert not Path(f"/proc/{pid}").exists(), "what no mark leads to is ended too"
"""
LEAVES = """
import os
if (pid := os.fork()) == 0:
    os.setsid()
    os.close(1)
    os.execve("/bin/sleep", ["sleep", "600"], {})
print(pid, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are inherited on Linux only")
def test_what_has_no_mark_is_ended_with_the_last_daemon(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAST_ACT, LEAVES, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_of_a_gpu_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = tmp_path / "held"
    held.write_text("4711\n12\n[N/A]\n")
    tool = tmp_path / "nvidia-smi"
    # Asked a second time, the driver has given the memory back.
    tool.write_text(f'#!/bin/sh\ncat "{held}"; echo 12 > "{held}"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    looks: list[int] = []
    assert wait_for_gpus({ProcessId(4711, 1.0)}, lambda: looks.append(1)) == set()
    assert len(looks) == 2
    assert gpu_processes() == {12}


def test_a_process_belongs_to_a_daemon_by_its_mark_or_its_parent_and_never_is_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere, first = str(tmp_path.resolve()), "/of/another", 5_000_000
    table = {
        "trainer": (first, 1, here, "trainer"),
        "its child": (first + 1, first, None, None),
        "its child's child": (first + 2, first + 1, None, None),
        "inference": (first + 3, 1, here, "inference"),
        "another's trainer": (first + 4, 1, elsewhere, "trainer"),
        "no daemon": (first + 5, 1, here, None),
        "this test": (os.getpid(), first, here, "trainer"),
    }
    rows = [
        local._Row(ProcessId(pid, 1.0), parent, pid, workspace, daemon)
        for pid, parent, workspace, daemon in table.values()
    ]
    monkeypatch.setattr(local, "_process_table", lambda: rows)

    def found(names: set[str] | None, *but: str) -> list[str]:
        pids = {each.pid for each in local.find_members(tmp_path, [], names, but=but)}
        return [name for name, row in table.items() if row[0] in pids]

    family = ["trainer", "its child", "its child's child"]
    assert found({"trainer"}) == family and found({"inference"}) == ["inference"]
    assert found(None) == [*family, "inference"] and found(None, "inference") == family


def test_the_session_of_a_dead_leader_counts_only_for_whom_saw_it_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its number may be another's by now."""
    leader, unmarked = ProcessId(5_000_000, 1.0), ProcessId(5_000_001, 1.0)
    monkeypatch.setattr(local, "_process_table", lambda: [local._Row(unmarked, 1, leader.pid, None, None)])
    assert local.find_members(tmp_path, [leader], set()) == set()
    assert local.find_members(tmp_path, [leader], set(), trust_sessions=True) == {unmarked}
    monkeypatch.setattr(ProcessId, "is_running", lambda self: True)
    assert local.find_members(tmp_path, [leader], set()) == {unmarked}


@pytest.mark.parametrize(("uid", "is_ours"), [(os.getuid(), True), (os.getuid() + 1, False)])
def test_a_command_line_tells_whose_a_sealed_process_is_only_where_it_is_of_our_account(
    tmp_path: Path, uid: int, is_ours: bool
) -> None:
    def environ() -> dict[str, str]:
        raise psutil.AccessDenied

    run = OutputDir(tmp_path).run("run_a")
    command = [sys.executable, "-m", "prime_rl.orchestrator.orchestrator", "@", str(run.orch_toml)]
    process: Any = SimpleNamespace(environ=environ, uids=lambda: SimpleNamespace(real=uid), cmdline=lambda: command)
    assert local._marks(process) == ((str(tmp_path), "run_a") if is_ours else (None, None))
