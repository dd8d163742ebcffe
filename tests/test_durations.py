"""The cost of a test: measured, listed, and never a reason to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations
from tests.budgets import in_full
from tests.durations import ROOT, Reading, cost_s, without_group

START = Reading(time_s=100.0, cpu_s=10.0, pressure_s=50.0)


def test_waiting_on_an_idle_machine_counts() -> None:
    assert cost_s(START, Reading(time_s=112.0, cpu_s=10.5, pressure_s=50.0)) == pytest.approx(12.0)


def test_a_late_test_on_a_busy_machine_costs_its_cpu_time() -> None:
    """Two hundred seconds later, and never without others that waited for a CPU."""
    assert cost_s(START, Reading(time_s=300.0, cpu_s=14.0, pressure_s=250.0)) == pytest.approx(4.0)


def test_work_counts_however_busy_the_machine_is() -> None:
    assert cost_s(START, Reading(time_s=300.0, cpu_s=25.0, pressure_s=250.0)) == pytest.approx(15.0)


def test_the_work_of_children_counts_when_it_is_done_and_not_when_they_are_waited_for() -> None:
    work = "import sys, time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\nsys.stdin.read()"
    before = Reading.now()
    command = [sys.executable, "-c", work]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        done = Reading.now()
    after = Reading.now()
    assert done.cpu_s - before.cpu_s > 0.35 and after.cpu_s - done.cpu_s < 0.2


@pytest.mark.skipif(durations._own_group() is None, reason="no control group of version 1 may be made")
def test_the_work_of_a_daemon_that_has_left_its_parent_counts() -> None:
    work = "while time.process_time() < 0.4: pass"
    work = f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    {work}\n    print(flush=True)"
    before = Reading.now()
    with subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.PIPE) as child:
        assert child.wait() == 0 and child.stdout is not None and child.stdout.readline()
    assert Reading.now().cpu_s - before.cpu_s > 0.35


def test_without_pressure_figures_only_cpu_time_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(durations, "PRESSURE", tmp_path / "missing")
    start = Reading.now()
    end = Reading(start.time_s + 60.0, start.cpu_s + 1.0, start.pressure_s + 60.0)
    assert start.pressure_s == start.time_s and cost_s(start, end) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("nodeid", "test"),
    [("t.py::a@group", "t.py::a"), ("t.py::a[x@v1]", "t.py::a[x@v1]"), ("t.py::a[x@v1]@g", "t.py::a[x@v1]")],
)
def test_the_group_is_not_in_the_name(nodeid: str, test: str) -> None:
    assert without_group(nodeid) == test


TESTS = """
import time
import pytest

def work():
    start = time.process_time()
    while time.process_time() - start < 0.3:
        pass

@pytest.fixture(scope="module")
def shared():
    work()

@pytest.fixture
def own():
    work()

def test_quick(shared): pass
def test_late(): work()
def test_late_in_its_fixture(own): pass
@pytest.mark.slow
def test_marked(): work()
"""


@pytest.mark.parametrize("workers", ["0", *in_full("1")])
def test_what_tests_cost_is_listed_and_fails_none(tmp_path: Path, workers: str) -> None:
    """In its own pytest; also when a worker runs the tests."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: is slow\n")
    file = tmp_path / "build" / "durations.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-p", "tests.durations", "-n", workers]
    environment = {**os.environ, "PRL_TEST_DURATIONS": str(file), "PYTHONPATH": str(ROOT)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run([*command, "."], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr
    assert "dearest tests" in done.stdout and "dearest shared fixtures" in done.stdout
    assert done.stdout.index("test_late") < done.stdout.index("test_quick")  # the dearest first
    found = json.loads(file.read_text())
    assert found["tests"].keys() == {f"test_some.py::{name}" for name in NAMES}
    assert found["tests"]["test_some.py::test_quick"] < 0.25 < found["tests"]["test_some.py::test_marked"]
    assert found["fixtures"]["test_some.py::shared"] > 0.25


NAMES = ("test_quick", "test_late", "test_late_in_its_fixture", "test_marked")
