from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from prime_rl.contract.files import wait_for
from prime_rl.contract.status import (
    LOST_AFTER_S,
    MAX_RUN_STATUS_BYTES,
    RunFacts,
    RunState,
    RunStatus,
    StatusWriter,
    TrainerRunStatus,
    TrainerStatus,
    is_alive,
    is_elsewhere,
    is_there,
    read_status,
    run_state,
)
from prime_rl.utils.process import ProcessId, boot_id
from tests.patience import PATIENCE_S


def facts(**changes: object) -> RunFacts:
    base = {
        "evicted": None,
        "config_error": None,
        "max_steps": 10,
        "published_step": 3,
        "orchestrator": None,
        "trainer_alive": True,
        "in_slot": True,
    }
    return RunFacts(**(base | changes))  # type: ignore[arg-type]


failed = RunStatus(run_id="run_a", state="failed", reason="environment broke")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (RunState.ACTIVE, None)),
        ({"in_slot": False}, (RunState.WAITING, None)),
        ({"trainer_alive": False}, (RunState.STOPPED, None)),
        ({"published_step": 10, "in_slot": False}, (RunState.FINISHED, None)),
        ({"published_step": 10, "trainer_alive": False}, (RunState.FINISHED, None)),
        ({"max_steps": None, "config_error": "line 3"}, (RunState.INVALID, "line 3")),
        ({"evicted": "too big", "config_error": "line 3"}, (RunState.EVICTED, "too big")),
        ({"evicted": ""}, (RunState.EVICTED, "")),
        ({"paused": "by hand"}, (RunState.PAUSED, "by hand")),
        ({"ended": "budget used up", "paused": "by hand"}, (RunState.FINISHED, "budget used up")),
        ({"evicted": "too big", "paused": "by hand"}, (RunState.EVICTED, "too big")),
        ({"orchestrator": failed}, (RunState.FAILED, "environment broke")),
        ({"orchestrator": failed, "evicted": "by hand"}, (RunState.EVICTED, "by hand")),
        ({"supervisor_gave_up": "3 crashes"}, (RunState.FAILED, "3 crashes")),
    ],
)
def test_run_state(changes: dict[str, object], expected: tuple[RunState, str | None]) -> None:
    assert run_state(facts(**changes)) == expected


def test_writer_writes_at_once_on_a_change_of_state_and_rarely_else(tmp_path: Path) -> None:
    now = [1000.0]
    path = tmp_path / "status.json"
    writer = StatusWriter(path, RunStatus(run_id="run_a"), clock=lambda: now[0])
    first = read_status(path, RunStatus)
    assert first is not None and first.state == "starting" and first.pid == os.getpid()
    writer.update(step=1)
    assert read_status(path, RunStatus) == first
    writer.update(state="running")
    second = read_status(path, RunStatus)
    assert second is not None and (second.state, second.step) == ("running", 1)
    now[0] += 1
    writer.update(step=2)
    third = read_status(path, RunStatus)
    assert third is not None and third.step == 2
    now[0] -= 3600
    writer.update(step=3)
    fourth = read_status(path, RunStatus)
    assert fourth is not None and fourth.step == 3, "a clock that was set back holds nothing back"
    writer.close(state="stopped")
    last = read_status(path, RunStatus)
    assert last is not None and last.state == "stopped"


def test_the_trainer_tells_at_once_who_has_a_slot_and_who_waits(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    writer = StatusWriter(path, TrainerStatus(state="training"), clock=lambda: 1000.0)

    def told(**fields: object) -> tuple[list[str], list[str], int]:
        writer.update(**fields)
        status = read_status(path, TrainerStatus)
        assert status is not None
        return list(status.runs), status.waiting, status.num_updates

    a, b = TrainerRunStatus(run_idx=0), TrainerRunStatus(run_idx=1)
    assert told(runs={"run_a": a}) == (["run_a"], [], 0)
    assert told(runs={"run_a": a, "run_b": b}) == (["run_a", "run_b"], [], 0)
    assert told(waiting=["run_c"]) == (["run_a", "run_b"], ["run_c"], 0)
    assert told(num_updates=1) == (["run_a", "run_b"], ["run_c"], 0), "a number has time"
    assert told(runs={"run_b": b}, waiting=[]) == (["run_b"], [], 1)
    writer.close()


def test_writer_outlives_a_deleted_folder(tmp_path: Path) -> None:
    path = tmp_path / "control" / "status.json"
    writer = StatusWriter(path, RunStatus(run_id="run_a"))
    path.unlink()
    path.parent.rmdir()
    tmp_path.rmdir()
    writer.update(state="running")
    assert isinstance(writer.error, FileNotFoundError)
    writer.close()
    assert not tmp_path.exists()


def test_alive_needs_a_fresh_file_and_that_very_process(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        status = TrainerStatus(state="training", updated_at=1000.0)
        status.sign(ProcessId.of(child.pid))
        assert is_alive(status, 1000.0)
        assert is_alive(status, 1000.0 - LOST_AFTER_S), "a clock that is a little behind invents no death"
        assert not is_alive(status, 999.9 - LOST_AFTER_S), "a time in the future is not fresh"
        assert not is_alive(status, 1000.1 + LOST_AFTER_S)
        earlier = msgspec.structs.replace(status, pid_start="")
        assert is_alive(earlier, 1000.0), "earlier versions did not write it"
        other = msgspec.structs.replace(earlier, pid_create_time=status.pid_create_time - 100)
        assert not is_alive(other, 1000.0), "a recycled pid is another process"
        assert not is_alive(msgspec.structs.replace(status, state="stopped"), 1000.0)
    finally:
        child.communicate()
    assert not is_alive(status, 1000.0)
    assert not is_alive(None, 1000.0)


def test_a_writer_of_another_machine_is_judged_by_its_heartbeat() -> None:
    now = time.time()
    far = TrainerStatus(state="training", updated_at=now, pid=os.getpid(), pid_start="another-boot/1", host="elsewhere")
    assert is_elsewhere(far) and is_there(far) and is_alive(far, now)
    silent = msgspec.structs.replace(far, updated_at=now - LOST_AFTER_S - 1)
    assert not is_there(silent) and not is_alive(silent, now)
    ahead = msgspec.structs.replace(far, updated_at=now + 365 * 86_400)
    assert not is_there(ahead) and not is_alive(ahead, now), "or a made-up time would be life for a year"
    assert not is_there(msgspec.structs.replace(far, state="stopped"))
    rebooted = msgspec.structs.replace(far, host=socket.gethostname())
    assert not is_elsewhere(rebooted) and not is_there(rebooted), "no process outlives the boot of its machine"
    assert not is_there(msgspec.structs.replace(far, host="")), "earlier versions did not write it"
    here = msgspec.structs.replace(far, pid_start=f"{boot_id()}/1")
    assert not is_elsewhere(here) and not is_there(here), "one of this boot is judged by its pid"


def test_a_status_names_the_machine_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusWriter(path, RunStatus(run_id="run_a")).close()
    status = read_status(path, RunStatus)
    assert status is not None and status.host == socket.gethostname() and not is_elsewhere(status)


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = ProcessId.of(child.pid)
    wait_for(lambda: not process.is_running(), "the child to end", timeout_s=PATIENCE_S)
    assert child.poll() is not None or child.wait() == 0


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"state": 3}', b"\xff"])
def test_a_damaged_status_is_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(data)
    assert read_status(path, TrainerStatus) is None
    assert read_status(tmp_path / "none", TrainerStatus) is None


def test_a_newer_writers_extra_fields_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(b'{"state": "waiting", "brand_new": 1}')
    status = read_status(path, TrainerStatus)
    assert status is not None and status.state == "waiting"


def test_a_status_of_a_run_is_read_up_to_what_a_run_needs_and_one_of_a_daemon_further(tmp_path: Path) -> None:
    """Each daemon reads that of a run at each look at it, and the run may write what it likes."""
    path, text = tmp_path / "status.json", "x" * (MAX_RUN_STATUS_BYTES - 1_000)
    path.write_bytes(msgspec.json.encode(RunStatus(run_id="run_a", reason=text)))
    assert read_status(path, RunStatus) is not None
    path.write_bytes(msgspec.json.encode(RunStatus(run_id="run_a", reason=text + "x" * 1_000)))
    assert read_status(path, RunStatus) is None
    path.write_bytes(msgspec.json.encode(TrainerStatus(waiting_on=text * 3)))
    assert read_status(path, TrainerStatus) is not None
