"""A run's message about the trainer that it waits for. Clocks are numbers; the processes are real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import LOST_AFTER_S, TrainerStatus
from prime_rl.orchestrator.guard import LATE_AFTER_S, TrainerWatch, describe_policy_wait
from prime_rl.utils.process import ProcessId

NOW = 1000.0


@pytest.fixture
def watch(tmp_path: Path) -> TrainerWatch:
    path = OutputDir(tmp_path).trainer_status
    path.parent.mkdir()
    return TrainerWatch(path)


def tell(tmp_path: Path, *, pid: int | None = None, state: str = "waiting", at: float = NOW) -> None:
    """The trainer's last status, of this process unless `pid` is given."""
    pid = pid or os.getpid()
    status = TrainerStatus(state=state, pid=pid, pid_create_time=ProcessId.of(pid).create_time, updated_at=at)
    write_atomic(OutputDir(tmp_path).trainer_status, msgspec.json.encode(status))


def test_the_wait_for_a_policy_is_named() -> None:
    assert describe_policy_wait(7, 6, 1000.0, 1047.0) == "policy version 7 (have 6), trainer last updated 40 s ago"
    assert describe_policy_wait(7, 6, 1000.0, 1003.0).endswith("trainer last updated under 10 s ago")
    assert describe_policy_wait(7, 6, 1000.0, 1725.0).endswith("trainer last updated 12 min ago")
    assert describe_policy_wait(1, 0, None, 5.0) == "policy version 1 (have 0), trainer has not updated yet"
    assert describe_policy_wait(1, 0, None, 5.0, started=False).endswith(", trainer has not started yet")
    down = describe_policy_wait(7, 6, 1000.0, 1047.0, "the trainer is down: it stopped 40 s ago")
    assert down == "policy version 7 (have 6); the trainer is down: it stopped 40 s ago"


def test_a_workspace_without_a_trainer_is_told_from_one_whose_trainer_lives(
    tmp_path: Path, watch: TrainerWatch
) -> None:
    assert not watch.is_known() and watch.trouble(NOW) is None
    tell(tmp_path)
    assert watch.is_known() and watch.trouble(NOW) is None
    assert watch.trouble(NOW + LOST_AFTER_S) is None, "its process is there: a late heartbeat is not a death"


def test_a_trainer_that_stopped_is_down_until_it_starts_again(tmp_path: Path, watch: TrainerWatch) -> None:
    tell(tmp_path, state="stopped")
    assert watch.trouble(NOW) == "the trainer is down: it stopped under 10 s ago"
    assert watch.trouble(NOW + 47) == "the trainer is down: it stopped 40 s ago"
    tell(tmp_path, state="starting", at=NOW + 50)
    assert watch.trouble(NOW + 50) is None


def test_a_killed_trainer_is_down_when_its_heartbeat_is_late(tmp_path: Path, watch: TrainerWatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        tell(tmp_path, pid=child.pid, state="training")
        assert watch.trouble(NOW + LATE_AFTER_S + 1) is None
        child.kill()
    assert watch.trouble(NOW + LATE_AFTER_S) is None, "it wrote a moment ago"
    late = watch.trouble(NOW + LATE_AFTER_S + 4)
    assert late == f"the trainer is down: process {child.pid} gave its last sign of life 10 s ago"


def test_a_trainer_whose_loop_hangs_beside_its_heartbeat_is_named(tmp_path: Path, watch: TrainerWatch) -> None:
    me = ProcessId.of(os.getpid())
    status = TrainerStatus(state="training", loop=7, loop_still_s=700.0, updated_at=NOW)
    status.sign(me)
    write_atomic(OutputDir(tmp_path).trainer_status, msgspec.json.encode(status))
    assert watch.trouble(NOW) == "the trainer is stalled: its main loop has not turned since 1970-01-01 00:05:00 UTC"


def test_a_trainer_that_hangs_without_a_heartbeat_is_down(tmp_path: Path, watch: TrainerWatch) -> None:
    tell(tmp_path)
    assert watch.trouble(NOW + LOST_AFTER_S + 60) == (
        f"the trainer is down: process {os.getpid()} gave its last sign of life 70 s ago"
    )
