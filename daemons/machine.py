"""The use of this machine by the daemons of a workspace, and what is left: processor, memory, GPUs, disk.

Counts a daemon together with all processes below it. One look walks the process table once, however many daemons there
are. GPUs are seen where NVIDIA's Python bindings are installed; they are optional. Sizes on the disk are allocated
sizes, as `du` counts; a walk of a large workspace on a slow file server takes long, so it ends at a deadline and is
marked as not complete. Links are not followed. It reads no file of the workspace.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil

from prime_rl.contract.layout import RUN_PREFIX, OutputDir
from prime_rl.utils.process import ProcessId
from prime_rl.utils.watch import file_system_type

# One walk may take so long, and is repeated after so long.
WALK_LIMIT_S = 2.0
WALK_EVERY_S = 30.0
# The time is looked at in each folder, and after so many names of one.
_LOOK_EVERY = 1000
# A forecast needs a while to mean something.
MIN_FORECAST_S = 60.0


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
        times = psutil.cpu_times()  # of all cores, since boot
        all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy_s = all_s - times.idle - getattr(times, "iowait", 0.0)
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
    with contextlib.suppress(Exception):  # a GPU that fell off the bus must not hide the others
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetName(handle)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            busy = 0.0
            with contextlib.suppress(Exception):  # not available for a slice of a GPU
                busy = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
            text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
            found.append(GpuView(text, busy, int(memory.used), int(memory.total)))
    return tuple(found)


@dataclass(frozen=True)
class Use:
    """`num_bytes` of everything below a folder; at least that when not `complete`."""

    num_bytes: int
    complete: bool = True


@dataclass(frozen=True)
class DiskView:
    """The disk of a workspace.

    `full_in_s` is None when unknown: the workspace does not grow, or was observed for less than a minute.
    """

    free_bytes: int
    total_bytes: int
    workspace_bytes: int
    workspace_complete: bool
    file_system: str | None
    full_in_s: float | None


def disk_use(
    folder: Path,
    *,
    limit_s: float = WALK_LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
    stop: Callable[[], bool] = lambda: False,
    is_workspace: bool = False,
    as_stored: bool = True,
) -> Use:
    """The size of everything below `folder`, until `stop()`. A folder that vanishes or cannot be read counts as 0.

    Without `as_stored` it is the size of the files, holes included. Of a workspace, other workspaces below it are left
    out: folders with daemons of their own, outside of its runs.
    """
    deadline = clock() + limit_s
    total, todo = 0, [str(folder)]
    runs = f"{folder}/{RUN_PREFIX}"
    seen: set[tuple[int, int]] = set()
    while todo:
        if clock() > deadline or stop():
            return Use(total, complete=False)
        path = todo.pop()
        is_own = not is_workspace or path == str(folder) or path.startswith(runs)
        if not is_own and os.path.isdir(OutputDir(Path(path)).daemons):
            continue
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for number, entry in enumerate(entries, start=1):
                if number % _LOOK_EVERY == 0 and (clock() > deadline or stop()):
                    return Use(total, complete=False)
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                is_dir = entry.is_dir(follow_symlinks=False)
                if is_dir:
                    todo.append(entry.path)
                elif info.st_nlink > 1:  # a hard link is stored once
                    if (info.st_dev, info.st_ino) in seen:
                        continue
                    seen.add((info.st_dev, info.st_ino))
                total += info.st_blocks * 512 if as_stored else info.st_size * (not is_dir)
    return Use(total)


class DiskReader:
    """Looks at the disk of a workspace; measures the workspace itself at most once in WALK_EVERY_S.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, output_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._output_dir = output_dir
        self._clock = clock
        self._use: Use | None = None
        self._walked_at = 0.0
        self._first: tuple[float, int] | None = None

    def read(self, *, walk: bool = True) -> DiskView | None:
        """None when the folder does not exist or its file system gives no answer.

        Without `walk` the workspace's own size is not measured.
        """
        try:
            space = shutil.disk_usage(self._output_dir)
        except OSError:
            return None
        now = self._clock()
        if not walk:
            self._use = self._use or Use(0, complete=False)
        elif self._use is None or now - self._walked_at >= WALK_EVERY_S:
            self._use = disk_use(self._output_dir, is_workspace=True)
            self._walked_at = now
        return DiskView(
            free_bytes=space.free,
            total_bytes=space.total,
            workspace_bytes=self._use.num_bytes,
            workspace_complete=self._use.complete,
            file_system=file_system_type(self._output_dir),
            full_in_s=self._forecast(now, space.free),
        )

    def _forecast(self, now: float, free_bytes: int) -> float | None:
        """Seconds until the disk is full, by the loss of free space since the first look, whatever caused it."""
        if self._first is None:
            self._first = (now, free_bytes)
        passed_s, gone_bytes = now - self._first[0], self._first[1] - free_bytes
        if passed_s < MIN_FORECAST_S or gone_bytes <= 0:
            return None
        return free_bytes / (gone_bytes / passed_s)
