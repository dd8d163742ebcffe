"""The image of deploy/container, built and run where docker or podman is; unit/test_container.py lints the files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract.files import wait_for
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/prl:test"
# The base image, or a package, cannot be had here.
NO_NETWORK = ("dial tcp", "dns error", "error sending request", "NewConnectionError", "Temporary failure")
pytestmark = [pytest.mark.release, pytest.mark.xdist_group("container")]


def engine(*words: str | Path, program: str, exit_code: int = 0) -> str:
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == exit_code, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def program() -> str:
    for name in ("docker", "podman"):
        if shutil.which(name) and not subprocess.run([name, "info"], capture_output=True, check=False).returncode:
            return name
    pytest.skip("neither docker nor podman runs on this machine")


@pytest.fixture(scope="module")
def image(program: str) -> Iterator[str]:
    """The CPU image, with a mirror of torch's index where one is named for `make install` too."""
    mirror = os.environ.get("TORCH_CPU_INDEX")
    words = ["--build-arg", f"TORCH_CPU_INDEX={mirror}"] if mirror else []
    file = ROOT / "deploy" / "container" / "Dockerfile"
    command = [program, "build", "-f", str(file), "--target", "cpu", "-t", IMAGE, *words, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    end = "\n".join(done.stderr.strip().splitlines()[-8:])
    if done.returncode and any(sign in end for sign in NO_NETWORK):
        pytest.skip(f"the image's parts cannot be fetched here: {end}")
    assert done.returncode == 0, done.stderr[-4000:]
    yield IMAGE
    engine("rmi", IMAGE, program=program)


def test_a_workspace_runs_in_it_as_an_ordinary_user_and_goes_on_after_a_stop(
    program: str, image: str, base_model: Path, tmp_path: Path
) -> None:
    """As docs/deploy.md has it, on a folder of the host that has the base model already."""
    name = f"prl-test-{os.getpid()}"
    place = tmp_path / "work"
    shutil.copytree(base_model, place / "models" / "base")
    for folder in (place, place / "models"):  # the user in the container is another one
        folder.chmod(0o777)

    def prl(*words: str) -> str:
        return engine("exec", name, "prl", *words, program=program)

    def run() -> Any:
        (row,) = json.loads(prl("runs", "list", "--json"))["runs"]
        return row

    def lives() -> bool:
        return bool(json.loads(prl("status", "--json"))["supervisor_alive"])

    volumes = ("-v", f"{place}:/workspace", "-v", f"{ROOT / 'configs'}:/configs:ro")
    settings = ("--init", "--shm-size", "2g", "--stop-timeout", "600", "--name", name)
    engine("run", "-d", *settings, *volumes, image, program=program)
    try:
        wait_for(lives, "the supervisor", timeout_s=PATIENCE_S)
        assert engine("exec", name, "id", "-u", program=program) == "1000\n"
        prl("runs", "add", "/configs/demo/reverse.toml", "--set", "max_steps=1000")
        wait_for(lambda: (run()["step"] or 0) >= 2, "the second step", timeout_s=PATIENCE_S)
        assert engine("exec", name, "stat", "-c", "%u", "/workspace/run_reverse", program=program) == "1000\n"
        engine("stop", name, program=program)
        assert engine("inspect", "--format", "{{.State.ExitCode}}", name, program=program) == "0\n"
        engine("start", name, program=program)
        wait_for(lives, "the supervisor after the stop", timeout_s=PATIENCE_S)
        step = run()["step"]
        assert step >= 2
        wait_for(lambda: run()["step"] > step, "a step after the stop", timeout_s=PATIENCE_S)
    finally:
        engine("rm", "-f", name, program=program)
