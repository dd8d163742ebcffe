"""Alive and progress are two things: a main loop that hangs beside its heartbeat is stalled, for every reader."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from prime_rl.contract.files import wait_for
from prime_rl.contract.status import (
    LOST_AFTER_S,
    Condition,
    DaemonStatus,
    InferenceStatus,
    RunStatus,
    Status,
    StatusWriter,
    TrainerStatus,
    condition,
    read_status,
    stalled_since,
)
from prime_rl.utils.process import ProcessId
from tests.patience import PATIENCE_S

NOW = 1_000_000.0
HANGS = """
import sys, time
from pathlib import Path
from prime_rl.contract.status import StatusWriter, TrainerStatus
writer = StatusWriter(Path(sys.argv[1]), TrainerStatus(state="training", loop_limit_s=0.5))
for _ in range(3):
    writer.turn()
while True:
    time.sleep(0.01)  # the main loop is stuck in a turn, and the heartbeat thread runs
"""


def signed(status: Status) -> Status:
    status.sign(ProcessId.of(os.getpid()))
    return status


@pytest.mark.parametrize(
    "status", [TrainerStatus(), InferenceStatus(), RunStatus(run_id="run_a"), DaemonStatus(name="x")]
)
def test_a_loop_that_stands_still_for_longer_than_it_may_is_stalled_since_its_last_turn(status: Status) -> None:
    status = signed(msgspec.structs.replace(status, state="running", loop=7, updated_at=NOW))
    limit_s = status.loop_limit_s
    status.loop_still_s = limit_s
    assert condition(status, NOW) == Condition("running")
    status.loop_still_s = limit_s + 1.0
    assert condition(status, NOW) == Condition("stalled", NOW - limit_s - 1.0)
    assert condition(status, NOW + 1.0).since == NOW - limit_s - 1.0, "whenever it is read"
    assert condition(status, NOW + LOST_AFTER_S + 1.0) == Condition("lost", NOW), "silence is worse than a standstill"
    status.state = "stopped"
    assert condition(status, NOW + LOST_AFTER_S + 1.0) == Condition("stopped")


def test_a_writer_that_counts_no_turns_and_one_of_an_earlier_version_are_judged_by_their_life_alone() -> None:
    old = msgspec.json.decode(b'{"state": "training", "progress": 3, "updated_at": 1000000.0}', type=TrainerStatus)
    assert condition(signed(old), NOW) == Condition("training")
    assert condition(signed(TrainerStatus(state="starting", updated_at=NOW)), NOW) == Condition("starting")


def test_a_writer_tells_how_long_its_loop_has_not_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    writer = StatusWriter(path, TrainerStatus())
    first = read_status(path, TrainerStatus)
    assert first is not None and first.loop is None, "while a model is loaded there is no loop yet"
    writer.turn()
    writer.turn()
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 1000.0)
    writer.update(state="training")
    still = read_status(path, TrainerStatus)
    assert still is not None and still.loop == 2 and still.loop_still_s >= 1000.0
    since = stalled_since(still)
    assert since is not None and since == still.updated_at - still.loop_still_s
    writer.turn()
    writer.update(state="waiting")
    turned = read_status(path, TrainerStatus)
    assert turned is not None and turned.loop == 3 and stalled_since(turned) is None
    writer.close(state="stopped")


def test_a_process_whose_main_thread_hangs_is_stalled_and_never_lost_nor_what_it_said_last(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with subprocess.Popen([sys.executable, "-c", HANGS, str(path)]) as child:
        try:
            seen: list[str] = []

            def is_stalled() -> bool:
                status = read_status(path, TrainerStatus)
                if status is not None:
                    seen.append(condition(status, time.time()).state)
                return "stalled" in seen

            wait_for(is_stalled, "the hanging loop to be stalled", timeout_s=PATIENCE_S)
            status = read_status(path, TrainerStatus)
            assert status is not None and (status.state, status.loop) == ("training", 3)
        finally:
            child.kill()
    assert condition(status, time.time()).state == "lost"
