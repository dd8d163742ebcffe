"""What each process does while the workspace's file system takes nothing, and what readers show of it."""

from __future__ import annotations

import errno
import io
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemons import workspace_reader
from daemons.alerts.__main__ import incidents, is_well
from daemons.decide import LOOP_TIMES, Do, Seen, Snapshot, State, decide
from daemons.pidfile import SupervisorLock
from daemons.workspace import SUPERVISOR
from daemons.workspace_reader import read_workspace
from prime_rl.contract import files
from prime_rl.contract.files import holding, wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import LOST_AFTER_S, DaemonStatus, RunStatus, TrainerRunStatus, TrainerStatus
from prime_rl.trainer import publish
from prime_rl.trainer.publish import BackgroundWriter, Publisher
from prime_rl.trainer.runs.manager import RunLife
from prime_rl.utils import runtime as logger_module
from prime_rl.utils.process import ProcessId
from prime_rl.utils.runtime import setup_logger
from tests.patience import PATIENCE_S
from tests.runs_support import add, look, manager_of
from tests.unit.test_daemons_decide import CONFIG, INFERENCE, READY, RUN, TRAINER, History, noted, running
from tests.unit.test_daemons_workspace_reader import NOW, make_run, put
from tui.model.snapshot import make_snapshot

TROUBLE = "no space left on /dev/sda1 (/data): 0 bytes free; free some, training continues by itself"
LATER = NOW + LOST_AFTER_S + 1
FULL = OSError(errno.ENOSPC, "No space left on device")


# The trainer


class FullDisk:
    """A broadcast and a checkpoint manager whose writes fail until there is room."""

    def __init__(self) -> None:
        self.has_room = False
        self.num_tries = 0
        self.published: list[Any] = []

    def publish(self, snapshot: Any) -> None:
        self.num_tries += 1
        if not self.has_room:
            raise FULL
        self.published.append(snapshot)

    def close(self) -> None:
        """Nothing is open."""


def publisher_of(manager: Any, full: FullDisk, reported: list[str]) -> Publisher:
    status = SimpleNamespace(published=lambda run, progress: reported.append(run.run_id))
    nothing: Any = SimpleNamespace(weights=lambda run: None)
    broadcast: Any = full
    return Publisher(manager, nothing, broadcast, nothing, nothing, status, BackgroundWriter())  # type: ignore[arg-type]


def test_a_version_is_published_once_there_is_room_and_no_run_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "RETRY_S", 0.001)
    for run_id in ("run_a", "run_b"):
        add(tmp_path, run_id)
    manager, full, reported = look(manager_of(tmp_path)), FullDisk(), list[str]()
    publisher = publisher_of(manager, full, reported)
    for run in manager.used:
        run.progress.step = 1
        publisher.resume(run)
    wait_for(lambda: full.num_tries > 5 and holding() is not None, "several tries", timeout_s=PATIENCE_S)
    publisher.collect()
    assert not any(run.is_leaving for run in manager.used) and reported == []
    assert not publisher.may_leave(manager.run(0)) and manager.run(0).waits_since is not None
    full.has_room = True
    wait_for(lambda: len(full.published) == 2, "both versions", timeout_s=PATIENCE_S)
    wait_for(lambda: publisher.collect() or len(reported) == 2, "the main thread to learn of it", timeout_s=PATIENCE_S)
    assert manager.idx_2_id == {0: "run_a", 1: "run_b"} and not list(tmp_path.glob("*/control/evicted.txt"))


def test_a_run_keeps_its_slot_while_the_disk_is_full_and_a_stop_gives_up_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is evicted for neither."""
    monkeypatch.setattr(files, "RETRY_S", PATIENCE_S)
    monkeypatch.setattr(publish, "DISK_TIMEOUT_S", 1e-9)
    add(tmp_path, "run_a")
    manager, full, reported = look(manager_of(tmp_path)), FullDisk(), list[str]()
    publisher = publisher_of(manager, full, reported)
    run = manager.run(0)
    run.progress.step = 1
    publisher.resume(run)
    wait_for(lambda: holding() is not None, "the version to be held", timeout_s=PATIENCE_S)
    assert [publisher.may_leave(run) for _ in range(3)] == [False] * 3, "however long it takes"
    publisher._writer.finish("run_a")
    publisher.collect()
    assert (reported, run.is_leaving, run.dir.evicted.exists(), holding()) == ([], False, False, None)


def test_a_run_that_cannot_be_admitted_for_the_disk_waits_for_its_slot(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a")
    manager = manager_of(tmp_path)
    faults: list[Exception] = [FULL, OSError(errno.ENOENT, "gone")]

    class Life(RunLife):
        def admitted(self, run: Any) -> None:
            if faults:
                raise faults.pop(0)

    manager.life = Life()
    look(manager)
    assert manager.used_idxs == set() and not run.evicted.exists(), "it is tried again"
    look(manager)
    assert "it cannot be admitted" in run.evicted.read_text(), "and any other error is its own"


# The supervisor


def see(
    history: History, seen: Seen | None, *, trouble: str | None, after_s: float = 0.0, asked: bool = False
) -> list[Do]:
    history.now += after_s
    name = history.spec.name
    requests = frozenset({name} if asked else ())
    snapshot = Snapshot(
        {name: history.spec}, dict(history.daemons), {name: seen} if seen else {}, requests, CONFIG, trouble
    )
    actions = decide(snapshot, history.now)
    for action in actions:
        history._apply(action)
    return [action.do for action in actions]


@pytest.mark.parametrize("exit_code", [1, -9])
def test_a_start_on_a_full_disk_has_no_deadline_and_a_crash_there_does_not_count(exit_code: int) -> None:
    history = History(TRAINER)
    assert see(history, None, trouble=TROUBLE) == [], "it could not write its status"
    assert see(history, None, trouble=None) == [Do.START]
    for _ in range(5):
        assert see(history, Seen(lives=True), trouble=TROUBLE, after_s=CONFIG.start_timeout_s) == [Do.NOTE]
    assert see(history, Seen(lives=True), trouble=None, after_s=CONFIG.start_timeout_s - 1) == []
    for _ in range(LOOP_TIMES * CONFIG.max_early_crashes + 1):
        assert see(history, Seen(exit_code=exit_code), trouble=TROUBLE) == [Do.CLEAN]
        assert history.daemon.state is State.BACKOFF
        assert Do.START not in see(history, Seen(), trouble=TROUBLE, after_s=60)
        assert see(history, Seen(), trouble=None) == [Do.START]


def test_a_person_who_asks_for_what_has_failed_is_remembered_until_the_disk_takes_something() -> None:
    history = History(TRAINER)
    assert history.see() == [Do.START]
    history.crash(after_s=1, exit_code=2)
    assert history.daemon.state is State.FAILED
    assert see(history, Seen(), trouble=TROUBLE, asked=True) == [Do.NOTE]
    assert Do.START not in see(history, Seen(), trouble=TROUBLE, after_s=60)
    assert see(history, Seen(), trouble=None) == [Do.START]


def test_no_run_is_evicted_for_what_ends_on_a_full_disk() -> None:
    history = running(INFERENCE)
    died = Seen(exit_code=1, work=noted("run_a", run_a=1))
    for trouble, evicts in ((TROUBLE, []), (None, ["run_a"])):
        snapshot = Snapshot(
            {"inference": INFERENCE}, dict(history.daemons), {"inference": died}, frozenset(), CONFIG, trouble
        )
        (action,) = decide(snapshot, history.now)
        assert [each[0] for each in (action.evicts,) if each] == evicts


def test_a_daemon_that_works_stays_and_one_that_is_evicted_is_stopped() -> None:
    history = running(RUN)
    assert see(history, READY, trouble=TROUBLE) == [] and history.daemon.state is State.RUNNING
    see(history, replace(READY, evicted=True), trouble=TROUBLE)
    assert see(history, replace(READY, evicted=True), trouble=TROUBLE, after_s=CONFIG.grace_s) == [Do.TERM]


# Readers


def at_work(output: Path) -> None:
    """A workspace of this process, whose files were written long before LATER."""
    lock = SupervisorLock.acquire(OutputDir(output))
    assert lock is not None
    lock.write_info(NOW)
    put(make_run(output, "run_a").status, RunStatus(run_id="run_a", state="running"))
    slots = {"run_a": TrainerRunStatus(run_idx=0, step=2)}
    put(OutputDir(output).trainer_status, TrainerStatus(state="training", max_runs=2, runs=slots))
    for name in (SUPERVISOR, "trainer", "run_a"):
        status = DaemonStatus(name=name, state="running")
        status.child = ProcessId.of(os.getpid())
        put(OutputDir(output).daemon_status(name), status)


def test_what_cannot_write_its_heartbeat_is_held_and_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work(tmp_path)
    monkeypatch.setattr(workspace_reader, "find_trouble", lambda output: TROUBLE)
    seen = read_workspace(tmp_path, now=LATER)
    assert (seen.disk, seen.bottleneck, seen.supervisor_alive, seen.num_used) == (TROUBLE, TROUBLE, True, 1)
    for daemon in seen.daemons:
        assert daemon.state == "stalled" and daemon.stalled_since == NOW
        assert (daemon.reason or "").startswith("does not respond, last heartbeat ")
        assert (daemon.reason or "").endswith(f" UTC: {TROUBLE}")
    (run,) = seen.runs
    assert (run.state, run.stalled_since, run.waiting_on) == ("active", None, f"the disk ({TROUBLE})")
    found = [each for each in incidents(seen, [], 10**12, 5.0) if each.is_proven]
    assert [(each.kind, each.subject, each.text) for each in found] == [("disk_low", "disk", TROUBLE)]
    assert not is_well(seen)
    shown = make_snapshot(seen, {}, LATER)
    assert [(row.state, row.note) for row in shown.rows] == [("active", f"waits for the disk ({TROUBLE})")]
    assert ("disk", TROUBLE) in [(problem.name, problem.text) for problem in shown.problems]


def test_a_disk_that_only_the_trainer_finds_full_is_told_by_its_status(tmp_path: Path) -> None:
    at_work(tmp_path)
    slots = {"run_a": TrainerRunStatus(run_idx=0, step=2)}
    put(OutputDir(tmp_path).trainer_status, TrainerStatus(state="waiting", max_runs=2, runs=slots, disk=TROUBLE))
    seen = read_workspace(tmp_path, now=NOW)
    assert (seen.disk, seen.runs[0].waiting_on) == (TROUBLE, f"the disk ({TROUBLE})")
    assert {daemon.state for daemon in seen.daemons} == {"running"}


def test_a_supervisor_that_is_there_does_not_respond_and_one_that_is_gone_is_lost(tmp_path: Path) -> None:
    at_work(tmp_path)
    seen = read_workspace(tmp_path, now=LATER)
    assert seen.disk is None and seen.trainer is not None
    supervisor, trainer = seen.daemon(SUPERVISOR), seen.daemon("trainer")
    assert supervisor is not None and trainer is not None and (supervisor.state, trainer.state) == ("stalled", "lost")
    assert f"kill -CONT {os.getpid()}; prl down ends it" in (supervisor.reason or "")
    assert (trainer.reason or "").endswith(f"; process {os.getpid()} still runs")
    found = [each for each in incidents(seen, [], 10**12, 5.0) if each.is_proven]
    assert [(each.kind, each.subject) for each in found] == [("daemon_stalled", SUPERVISOR)]
    put(OutputDir(tmp_path).daemon_status(SUPERVISOR), DaemonStatus(name=SUPERVISOR, state="running"), alive=False)
    gone = read_workspace(tmp_path, now=LATER).daemon(SUPERVISOR)
    assert gone is not None and (gone.state, gone.reason) == ("lost", "its process is gone")


def test_a_workspace_where_nothing_runs_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one on a medium that is read-only on purpose."""
    make_run(tmp_path, "run_a", published=2)
    monkeypatch.setattr(workspace_reader, "find_trouble", lambda output: TROUBLE)
    seen = read_workspace(tmp_path, now=NOW)
    assert (seen.disk, seen.bottleneck, seen.runs[0].state) == (None, None, "stopped")


# Logs


def test_the_same_warning_is_logged_once_a_minute_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [1000.0]
    before = logging.getLogger().handlers[:], logging.getLogger().level
    monkeypatch.setattr(time, "time_ns", lambda: int(now[0] * 1e9))
    monkeypatch.setattr(time, "time", lambda: now[0])
    try:
        log = setup_logger("supervisor", stream=stream)
        for _ in range(241):
            log.warning("no space left on %s", "/data")
            log.info("a step")
            now[0] += 0.25
        log.error("no space left on %s", "/home")
    finally:
        logging.getLogger().handlers[:] = before[0]
        logging.getLogger().setLevel(before[1])
    lines = [line.partition("supervisor: ")[2] for line in stream.getvalue().splitlines()]
    assert lines.count("a step") == 241
    assert [line for line in lines if line != "a step"] == [
        "no space left on /data",
        "no space left on /data (239 more times since)",
        "no space left on /home",
    ]
    assert logger_module.REPEAT_S == 60.0
