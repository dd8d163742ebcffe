"""`make gpu-check` in tiny shapes on this CPU: all is measured, and a stage that ends early costs its own figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import STAGES
from benchmarks.gpu.report import ASKED
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
FAULTS = """
import os, signal, sys, time

class Hangs:
    def find_spec(name, *_):
        if name == "benchmarks.gpu.passes":
            time.sleep(3600)

sys.meta_path.insert(0, Hangs)
if {"benchmarks.gpu.stage", "correct"} <= {*sys.orig_argv}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=PATIENCE_S, check=False
    )


def test_a_tiny_check_measures_all(tmp_path: Path) -> None:
    done = gpu_check("--out", str(tmp_path), "--limit", "3000", "--stage-limit", "600")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {f"gpu_{name}.json" for name in STAGES if name != "vllm"}
    found = {path.stem.removeprefix("gpu_"): json.loads(path.read_text()) for path in tmp_path.iterdir()}
    for name, stage in found.items():
        assert stage["stage"] == name and stage["tiny"] and stage["machine"]["torch"] and not stage["errors"]
    for asked in ASKED:
        assert asked.needs_gpu or isinstance(found[asked.stage]["entries"][asked.entry][asked.figure], float), asked
    assert found["correct"]["entries"]["isolation_float32"]["difference"] <= 1e-4
    assert found["engine"]["entries"]["mismatch"]["mismatch_kl"] <= 1e-5
    assert "they say nothing of a card" in done.stdout and "tokens/s by runs" in done.stdout


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage "correct" is killed before it begins, and those of passes hang."""
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))


@pytest.mark.usefixtures("faults")
def test_a_stage_that_is_killed_leaves_what_others_found(tmp_path: Path) -> None:
    done = gpu_check("--out", str(tmp_path), "--only", "correct", "env", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["stages"]
    assert found["correct"]["problem"] == "ended by SIGKILL" and found["env"]["problem"] is None
    assert [json.loads((tmp_path / f"gpu_{name}.json").read_text()) == found[name] for name in found] == [True, True]
    assert found["env"]["entries"]["grouped_rank_64"]["grad_A"] <= 0.02


@pytest.mark.usefixtures("faults")
def test_a_stage_that_hangs_shows_its_stacks(tmp_path: Path) -> None:
    done = gpu_check("--out", str(tmp_path), "--only", "pass06", "--stage-limit", "20")
    assert done.returncode == 1 and "(most recent call first)" in done.stderr, done.stderr
    assert json.loads((tmp_path / "gpu_pass06.json").read_text())["problem"] == "took more than 20 s"
