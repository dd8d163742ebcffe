"""The helpers of the numeric tests: what counts as rounding and as learning; and the runs by instruction set."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

from prime_rl.contract.files import wait_for
from tests.learning import Ascent
from tests.numeric import check_same, num_terms, rounding
from tests.patience import PATIENCE_S
from tests.trainer_support import tiny_model

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "test_cpus.py"


@pytest.mark.parametrize("num", [10, 1000, 100_000])
def test_sums_in_another_order_are_the_same_and_a_changed_term_is_not(num: int) -> None:
    terms = torch.rand(num, generator=torch.Generator().manual_seed(0))
    one, other = terms.cumsum(0)[-1], terms.flip(0).cumsum(0)[-1]
    check_same(one, other, num)
    with pytest.raises(AssertionError, match="rounding explains"):
        check_same(one * (1 + 2 * rounding(num)), other, num)


def test_the_sums_of_a_model_are_the_inputs_of_its_linear_layers() -> None:
    layer = 3 * 32 + 32 + 2 * 32 + 64  # queries, keys, values; output; gate and up; down
    assert num_terms(tiny_model()) == 2 * layer + 32


@pytest.mark.parametrize(
    ("ascent", "words"),
    [
        (Ascent(rise=-1.0, slope=1.0, noise=0.01), "rises less"),
        (Ascent(rise=1.0, slope=0.04, noise=0.01), "does not follow the gradient"),
        (Ascent(rise=1.0, slope=-1.0, noise=0.01), "does not follow the gradient"),
    ],
)
def test_an_update_that_is_luck_is_not_learning(ascent: Ascent, words: str) -> None:
    Ascent(rise=0.9, slope=1.0, noise=0.01).check()
    with pytest.raises(AssertionError, match=words):
        ascent.check()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_cpus", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_what_the_cpu_lacks_is_skipped(script: ModuleType) -> None:
    flags = script.cpu_flags("processor\t: 0\nflags\t\t: sse4_2 avx2 fma\n\nprocessor\t: 1\nflags\t\t: avx512f\n")
    assert flags == {"sse4_2", "avx2", "fma"} and script.cpu_flags("Features : neon\n") == set()
    assert [variant.name for variant in script.VARIANTS if variant.flags <= flags] == ["avx2", "default"]


ONE = """
import os, pytest, subprocess, sys
@pytest.mark.numeric
def test_a_child_inherits():
    child = subprocess.run([sys.executable, "-c", "import os; print(os.environ['ATEN_CPU_CAPABILITY'])"],
                           capture_output=True, text=True, check=True)
    assert child.stdout.strip() == os.environ["ATEN_CPU_CAPABILITY"] != os.environ["FAILS_ON"]
def test_without_the_marker():
    assert False
"""
HANGS = """
import os, pathlib, pytest, threading
@pytest.mark.numeric
def test_hangs():
    pathlib.Path(os.environ["HERE"]).touch()
    threading.Event().wait()
"""


def command(tmp_path: Path, tests: str) -> list[str]:
    (tmp_path / "test_one.py").write_text(tests)
    return [sys.executable, str(SCRIPT), "--logs", str(tmp_path / "logs"), str(tmp_path / "test_one.py")]


@pytest.mark.release
def test_each_instruction_set_is_run_twice_and_a_failure_is_named(tmp_path: Path) -> None:
    environment = {**os.environ, "FAILS_ON": "default"}
    done = subprocess.run(
        command(tmp_path, ONE), env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    counts = [line.rpartition(" in ")[0] for line in done.stdout.splitlines() if " passed, " in line]
    assert counts[-2:] == [f"default {number}: 0 passed, 1 failed" for number in (1, 2)]
    assert all(line.endswith(": 1 passed, 0 failed") for line in counts[:-2])
    assert len(re.findall(r"failed: \S*test_one::test_a_child_inherits$", done.stdout, re.MULTILINE)) == 2


@pytest.mark.slow
def test_ctrl_c_ends_the_script_and_what_it_runs(tmp_path: Path) -> None:
    here = tmp_path / "here"
    environment = {**os.environ, "HERE": str(here)}
    process = subprocess.Popen(command(tmp_path, HANGS), env=environment, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(here.exists, "the test to begin", timeout_s=PATIENCE_S)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=PATIENCE_S)[0]
        assert output.splitlines()[-1] == "stopped by Ctrl-C" and " passed, " not in output
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
