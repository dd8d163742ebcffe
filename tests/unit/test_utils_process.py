"""Which process a pid means, also after the machine's clock was set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.utils.process import ProcessId, boot_id
from tests.daemons_support import step_clock

ASK_BOOT = "from prime_rl.utils.process import boot_id; print(boot_id(), end='')"


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[int]:
    """A process whose name looks like the fields behind it: those of a zombie that started at the boot."""
    odd = tmp_path / "x) Z 1 (y) Z 1"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "600"]) as child:
        yield child.pid
        child.kill()


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_process_stays_itself_when_the_clock_is_set(
    sleeper: int, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ProcessId.of(sleeper)
    step_clock(monkeypatch, step_s)
    after = ProcessId.of(sleeper)
    assert after.create_time - before.create_time == pytest.approx(step_s)
    assert before.is_running() and after.is_running() and before.is_same(after)


def test_another_process_with_the_same_pid_is_a_stranger(sleeper: int) -> None:
    own = ProcessId.of(sleeper)
    later = replace(own, start=own.start + "0")
    elsewhere = replace(own, start=own.start.replace(boot_id(), "0e5a6e4c-another-boot"))
    for stranger in (later, elsewhere):
        assert not stranger.is_running() and not stranger.is_same(own)
    assert not own.is_same(ProcessId.of(os.getpid()))


def test_where_no_start_is_known_the_time_decides(sleeper: int) -> None:
    own = replace(ProcessId.of(sleeper), start="")
    assert own.is_running() and own.is_same(ProcessId.of(sleeper))
    assert not replace(own, create_time=own.create_time - 10).is_running()


def test_no_process_has_a_pid_that_is_free_or_absurd() -> None:
    for pid in (2**22 + 1, 2**70, -1):
        assert not ProcessId.of(pid).is_running()


def test_a_start_that_is_no_number_is_that_of_no_later_process() -> None:
    one = ProcessId(1, 0.0, "boot/9")
    found = [ProcessId(2, 0.0, f"boot/{ticks}").is_started_after(one) for ticks in ("10", "8", "x", "", "9" * 5_000)]
    assert found == [True, False, False, False, True]


def test_containers_of_one_machine_do_not_share_their_pids() -> None:
    alone = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    try:
        inside = [subprocess.check_output([*alone, ASK_BOOT], text=True, stderr=subprocess.PIPE) for _ in range(2)]
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no pid namespaces here: {error}")
    boots = {boot_id(), *inside}
    assert len({boot.partition(":")[0] for boot in boots}) == 1 and len(boots) >= 2
    for boot in inside:
        stranger = ProcessId(1, start=f"{boot}/{ProcessId.of(1).start.partition('/')[2]}")
        assert stranger.is_of_another_boot() and not stranger.is_running()


def test_a_closed_terminal_is_a_request_to_stop_and_nohup_stands() -> None:
    code = """
import os, signal
from prime_rl.utils.process import StopFlag
stop = StopFlag().install()
os.kill(os.getpid(), signal.SIGHUP)
print(stop(), stop.signal_name)
"""
    for shell, said in ((["nohup"], "False None\n"), ([], "True SIGHUP\n")):
        done = subprocess.run([*shell, sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == said
