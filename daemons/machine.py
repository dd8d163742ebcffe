"""What the daemons of a workspace use of this machine, and what is left: processor, memory, GPUs.

Counts a daemon together with all processes below it. One look walks the process table once, however many daemons there
are. GPUs are seen where NVIDIA's Python bindings are installed; they are optional. It reads no file of the workspace.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from types import ModuleType

import psutil

from prime_rl.utils.process import ProcessId


@dataclass(frozen=True)
class DaemonUse:
    """One daemon with all its processes, other daemons below it left out.

    `cores` is in processor cores (1.5: one and a half), null at the first look.
    """

    cores: float | None
    rss_bytes: int
    num_processes: int
    started_at: float


@dataclass(frozen=True)
class GpuView:
    """`busy` from 0 to 1."""

    name: str
    busy: float
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class MachineView:
    """One look. `busy` is the share of all cores since the look before (null at the first)."""

    busy: float | None
    num_cores: int
    load_1m: float
    used_bytes: int
    total_bytes: int
    gpus: tuple[GpuView, ...]
    daemons: Mapping[str, DaemonUse]


class MachineReader:
    """Watches this machine. Called from one thread."""

    def __init__(self) -> None:
        self._cores_s: dict[psutil.Process, float] = {}
        self._machine_s: tuple[float, float] | None = None
        self._nvml = _load_nvml()

    def read(self, processes: Mapping[str, ProcessId]) -> MachineView:
        """`processes` are those of the daemons, by name.

        A daemon's child processes count with it, unless they are daemons themselves.
        """
        busy_s, all_s = _machine_seconds()
        before = self._machine_s
        passed_s = all_s - before[1] if before else 0.0
        self._machine_s = (busy_s, all_s)
        num_cores = psutil.cpu_count() or 1
        children = _children({process.pid for process in processes.values()})
        seen: dict[psutil.Process, float] = {}
        daemons = {}
        for name, process in processes.items():
            is_it = process.is_running()  # else its pid may be a stranger's
            if is_it and (use := self._daemon(process.pid, children, seen, passed_s / num_cores)):
                daemons[name] = use
        self._cores_s = seen
        memory = psutil.virtual_memory()
        return MachineView(
            busy=(busy_s - before[0]) / passed_s if before and passed_s > 0 else None,
            num_cores=num_cores,
            load_1m=psutil.getloadavg()[0],
            used_bytes=memory.total - memory.available,
            total_bytes=memory.total,
            gpus=_gpus(self._nvml),
            daemons=daemons,
        )

    def _daemon(
        self,
        pid: int,
        children: Mapping[int, list[int]],
        seen: dict[psutil.Process, float],
        wall_s: float,
    ) -> DaemonUse | None:
        todo, rss_bytes, num, cores, known = [pid], 0, 0, 0.0, False
        started_at = 0.0
        while todo:
            each = todo.pop()
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(each)
                with process.oneshot():
                    used = process.cpu_times()
                    rss_bytes += process.memory_info().rss
                num += 1
                started_at = process.create_time() if each == pid else started_at
                total_s = seen[process] = used.user + used.system
                if process in self._cores_s and wall_s > 0:
                    known = True
                    cores += max(total_s - self._cores_s[process], 0.0) / wall_s
            todo += children.get(each, [])
        return DaemonUse(cores if known else None, rss_bytes, num, started_at) if num else None


def _machine_seconds() -> tuple[float, float]:
    """(seconds of all cores that were busy, all their seconds) since boot."""
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return all_s - idle_s, all_s


def _children(daemons: Container[int]) -> dict[int, list[int]]:
    """pid -> pids of its children, those of `daemons` left out."""
    found: dict[int, list[int]] = {}
    for pid in psutil.pids():  # not `process_iter`, which keeps what it knew of a pid that another process has now
        if pid not in daemons:
            with contextlib.suppress(psutil.Error):
                found.setdefault(psutil.Process(pid).ppid(), []).append(pid)
    return found


def _load_nvml() -> ModuleType | None:
    """NVIDIA's bindings, started; None where there is no GPU, driver or binding."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the bindings have many error classes, and each means: no GPU to show
        return None
    return nvml


def _gpus(nvml: ModuleType | None) -> tuple[GpuView, ...]:
    if nvml is None:
        return ()
    found = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetName(handle)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            busy = _gpu_busy(nvml, handle)
            text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
            found.append(GpuView(text, busy, int(memory.used), int(memory.total)))
    except Exception:  # a GPU that fell off the bus must not hide the others
        return tuple(found)
    return tuple(found)


def _gpu_busy(nvml: ModuleType, handle: object) -> float:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except Exception:  # not available for a slice of a GPU
        return 0.0
