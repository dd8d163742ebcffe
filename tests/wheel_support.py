"""The package as a wheel in an environment of its own, with no more than what it declares; and what must load there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.install import TORCH_CPU_INDEX

ROOT = Path(__file__).parent.parent
SOURCES = ("Makefile", "README.md", "LICENSE", "pyproject.toml", "configs", "daemons", "prime_rl", "tui")
# Of pip, when the index cannot be reached.
NO_NETWORK = ("NewConnectionError", "name resolution", "Network is unreachable", "timed out")
# Loads every module of the control plane. Arguments: modules that count as not installed.
LOAD_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    sys.modules[name] = None
# A daemon, what `prl-tui --serve` loads, what renders prompts, and what serves over HTTP.
of_extras = ("daemons.monitors.", "tui.serve", "prime_rl.utils.chat_template", "prime_rl.utils.http_server")
num = 0
for package in ("daemons", "tui", "prime_rl.contract", "prime_rl.utils", "prime_rl.configs", "prime_rl.multinode"):
    folder = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(folder, f"{package}."):
        if not module.name.endswith(".__main__") and not module.name.startswith(of_extras):
            importlib.import_module(module.name)
            num += 1
print(num)
"""


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel in it, `num_bytes` large. `work` is a folder outside the checkout."""

    venv: Path
    work: Path
    num_bytes: int

    def command(self, program: str) -> str:
        return str(self.venv / "bin" / program)

    def run(self, program: str, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.command(program), *args],
            cwd=self.work,
            env=clean_environment(),
            capture_output=True,
            text=True,
            check=False,
        )


def clean_environment() -> dict[str, str]:
    """Ours without what leads to the checkout or to a workspace of this machine."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PRL_", "VIRTUAL_ENV"))}


def find_python(version: str) -> str:
    """A Python of that version, as in "3.12": on the PATH, or one of pyenv's. Skips where this machine has none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    named = shutil.which(f"python{version}")
    for each in [*([named] if named else []), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python3")))]:
        ask = [each, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() == version:
            return each
    pytest.skip(f"no Python {version} with ensurepip on this machine")


def install_wheel(folder: Path, extra: str = "", python: str = sys.executable) -> Installed:
    """Build the wheel by `make wheel` from a copy of the sources, and install it. Skips without a network.

    `extra` is one with its brackets, as in "[cpu]"; torch is then the build for CPUs.
    """
    wheel = build_wheel(folder / "sources")
    venv, work = folder / "venv", folder / "work"
    work.mkdir()
    subprocess.run([python, "-m", "venv", str(venv)], check=True)
    before = size_of(venv)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-c", str(ROOT / "constraints.txt"), f"{wheel}{extra}"]
    if extra:
        pip += ["--retries", "0", "--extra-index-url", TORCH_CPU_INDEX]
    done = subprocess.run(pip, capture_output=True, text=True, env=clean_environment(), cwd=work, check=False)
    if done.returncode and any(sign in done.stderr for sign in NO_NETWORK):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return Installed(venv, work, size_of(venv) - before)


def build_wheel(sources: Path) -> Path:
    sources.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            leave_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=leave_out)
        else:
            shutil.copy(ROOT / name, sources / name)
    make = ["make", "--old-file=install", "wheel", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(make, cwd=sources, capture_output=True, text=True, env=clean_environment(), check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (sources / "dist").glob("prl_multirun-*.whl")
    return wheel


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
