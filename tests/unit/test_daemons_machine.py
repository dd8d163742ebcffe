"""What the daemons take of this machine, asked of real processes; a GPU is faked where missing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from daemons.machine import MachineReader
from prime_rl.contract.files import wait_for
from prime_rl.utils.process import ProcessId, boot_id
from tests.patience import PATIENCE_S

BURN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass']).wait()"


def test_a_daemon_counts_with_all_processes_below_it() -> None:
    daemon = subprocess.Popen([sys.executable, "-c", BURN], start_new_session=True)
    try:
        pids = {"daemon": ProcessId.of(daemon.pid), "gone": ProcessId(2**22 + 1)}
        wait_for(lambda: len(psutil.Process(daemon.pid).children()) == 1, "the child", timeout_s=PATIENCE_S)
        reader = MachineReader()
        first = reader.read(pids)
        assert first.busy is None and first.daemons["daemon"].cores is None, "a share needs two looks"
        assert first.daemons.keys() == {"daemon"} and first.daemons["daemon"].num_processes == 2
        assert first.daemons["daemon"].rss_bytes > 5_000_000 and first.total_bytes > first.used_bytes > 0

        def burns() -> bool:
            look = reader.read(pids)
            return (look.daemons["daemon"].cores or 0.0) > 0.01 and 0.0 <= (look.busy or 0.0) <= 1.0

        wait_for(burns, "the child's work to be counted", timeout_s=PATIENCE_S)
        (child,) = psutil.Process(daemon.pid).children()
        apart = reader.read({**pids, "child": ProcessId.of(child.pid)}).daemons
        assert {name: use.num_processes for name, use in apart.items()} == {"daemon": 1, "child": 1}, (
            "none counts twice"
        )
    finally:
        for process in [*psutil.Process(daemon.pid).children(), daemon]:
            process.kill()
        daemon.wait()


def test_a_stranger_with_the_pid_of_a_daemon_is_not_counted() -> None:
    own = ProcessId.of(os.getpid())
    pids = {"me": own, "stranger": replace(own, start=f"{boot_id()}/1")}
    assert MachineReader().read(pids).daemons.keys() == {"me"}


@pytest.mark.parametrize("slices", [False, True])
def test_gpus_are_shown_where_the_bindings_are(monkeypatch: pytest.MonkeyPatch, slices: bool) -> None:
    nvml = ModuleType("pynvml")

    def rates(handle: int) -> SimpleNamespace:
        if slices:
            raise RuntimeError("not supported")
        return SimpleNamespace(gpu=87)

    calls = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"H200",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=1, total=2),
        "nvmlDeviceGetUtilizationRates": rates,
    }
    for name, call in calls.items():
        setattr(nvml, name, call)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (gpu,) = MachineReader().read({}).gpus
    assert (gpu.name, gpu.busy, gpu.used_bytes, gpu.total_bytes) == ("H200", 0.0 if slices else 0.87, 1, 2)
