"""Daemons as processes of this machine, through their launcher."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from daemons.launchers.base import Alive, Ended, Handle
from daemons.launchers.local import Local
from daemons.specs import DaemonSpec
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus
from prime_rl.utils.process import ProcessId
from tests.patience import PATIENCE_S, until_seen

WAITS = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"
SAVES = f"""
import os, signal, sys
def save(*_):
    print('saving', flush=True)
    while not os.path.exists('may_end'): time.sleep(0.01)
    print('saved', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
{WAITS}
"""
LEAVES_A_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]); {WAITS}"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    local = Local(OutputDir(tmp_path))
    yield local
    assert local.kill(local.strays(), lambda: None) == set()


def start(local: Local, code: str, num_ready: int = 1) -> Handle:
    handle = local.start(DaemonSpec("trainer", (sys.executable, "-c", code), local.output.log("trainer")))
    said = local.logs(handle)
    until_seen(lambda: said.read_text().count("\nready") >= num_ready, "the daemon to be ready")
    return handle


def end_of(local: Local, handle: Handle) -> Ended:
    until_seen(lambda: isinstance(local.look(handle), Ended), "the daemon to end")
    seen = local.look(handle)
    assert isinstance(seen, Ended)
    return seen


def test_an_end_is_news_until_it_is_looked_at(local: Local) -> None:
    handle = start(local, WAITS)
    assert not local.has_news()
    local.stop(handle, float("inf"))
    until_seen(local.has_news, "the end to be seen")
    assert end_of(local, handle) == Ended(-signal.SIGTERM)
    local.stop(handle, 0.0)
    assert not local.has_news()


def test_the_end_of_an_adopted_start_is_news_until_it_is_settled(local: Local) -> None:
    handle, other = start(local, WAITS), Local(local.output)
    assert other.adopt(DaemonStatus(name="trainer", state="running", handle=handle)) == handle
    assert isinstance(other.look(handle), Alive) and not other.has_news()
    local.stop(handle, float("inf"))
    until_seen(other.has_news, "the end to be seen")
    assert end_of(other, handle) == Ended(None)
    other.stop(handle, 0.0)
    assert not other.has_news()


def test_what_ignores_sigterm_is_killed_when_its_grace_is_over(local: Local) -> None:
    patient, handle = start(local, STUBBORN), start(local, STUBBORN, 2)
    local.stop(patient, float("inf"))
    local.stop(handle, 0.1)
    local.stop(handle, float("inf"))  # the shortest grace counts
    assert end_of(local, handle).exit_code == -signal.SIGKILL


def test_a_daemon_may_finish_and_save_before_all_of_it_is_killed(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(local.output.path)
    handle, looks = start(local, SAVES), list[bool]()

    def let_it_end() -> None:
        looks.append("saving" in local.logs(handle).read_text())
        if sum(looks) == 10:  # it takes its time
            (local.output.path / "may_end").touch()

    assert local.end([handle], 0.0, PATIENCE_S, let_it_end) == set()
    assert local.logs(handle).read_text().endswith("\nsaved\n") and local.look(handle) == Ended(0)


def test_what_a_dead_daemon_left_behind_is_killed_and_counts_until_it_is_gone(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = start(local, LEAVES_A_CHILD, 2)
    send = ProcessId.send
    monkeypatch.setattr(ProcessId, "send", lambda process, signum: None)  # as what hangs in the kernel
    send(ProcessId(handle.pid, handle.create_time, handle.start), signal.SIGKILL)
    assert end_of(local, handle) == Ended(-signal.SIGKILL)
    local.stop(handle, 0.0)
    seen = local.look(handle)
    assert isinstance(seen, Ended) and len(seen.left) == 1
    monkeypatch.setattr(ProcessId, "send", send)
    assert local.kill(local.strays(), lambda: None) == set()
    assert local.look(handle) == Ended(-signal.SIGKILL)


def test_a_start_is_adopted_by_its_handle(local: Local) -> None:
    handle = start(local, WAITS)
    process = ProcessId(handle.pid, handle.create_time, handle.start)
    data = msgspec.json.decode(msgspec.json.encode(DaemonStatus(name="trainer", state="running", handle=handle)))
    record, other = msgspec.convert(data, DaemonStatus), Local(local.output)
    assert other.adopt(record) == handle and other.look(handle) == Alive(process)
    assert other.end([handle], 1.0, PATIENCE_S, lambda: None) == set()
    assert isinstance(other.look(handle), Ended) and other.adopt(record) is None
    elsewhere = msgspec.structs.replace(handle, host="elsewhere")
    assert other.adopt(DaemonStatus(name="trainer", state="running", handle=elsewhere)) is None
