"""What each test costs, measured so that a busy machine changes little: recorded and listed, never a failure.

A plugin of pytest, loaded by `conftest.py`. `build/durations.json` keeps the figures; the output ends with the dearest.

The cost of a test is `max(CPU seconds, seconds - pressure)`. CPU seconds are those of the test's process and of all
that it started; other programs do not add to them. Daemons that have left their parent count where a control group of
version 1 may be made, as root may. The pressure is the time during the test in which
some process of this machine waited for a CPU (/proc/pressure/cpu): a test can be late in it without being slow, so it
does not count. On an idle machine the cost is the time that the test took; on a busy one it is less or the same,
never more.

Counted are a test and its own fixtures. Fixtures that several tests share (module, session) are listed for
themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE = Path(os.environ.get("PRL_TEST_DURATIONS", ROOT / "build" / "durations.json"))
NUM_SHOWN = 10
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PRESSURE = Path("/proc/pressure/cpu")
GROUPS = Path("/sys/fs/cgroup/cpuacct")


@dataclass(frozen=True)
class Reading:
    """Clocks at one moment, in seconds. Without /proc/pressure only CPU time counts: `pressure_s` is then the time."""

    time_s: float
    cpu_s: float
    pressure_s: float

    @classmethod
    def now(cls) -> Reading:
        time_s, cpu = time.perf_counter(), os.times()
        try:
            found = re.search(r"^some .*total=(\d+)", PRESSURE.read_text(encoding="utf-8"), re.MULTILINE)
        except OSError:
            found = None
        group = _own_group()
        cpu_s = int(group.read_bytes()) / 1e9 if group else sum(cpu[:4]) + _living_s("self")
        return cls(time_s, cpu_s, int(found[1]) / 1e6 if found else time_s)


@functools.cache
def _own_group() -> Path | None:
    """The file with the CPU time of this process and of all that it starts from now on; None where there is none."""
    with contextlib.suppress(OSError, StopIteration):
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
        parent = GROUPS / next(path for _, kinds, path in groups if "cpuacct" in kinds.split(",")).strip("/")
        group = parent / f"prl-tests-{os.getpid()}"
        group.mkdir()
        (group / "cgroup.procs").write_text(f"{os.getpid()}")
        atexit.register(_leave, group)
        return group / "cpuacct.usage"
    return None


def _leave(group: Path) -> None:
    with contextlib.suppress(OSError):  # what is in it still keeps it
        (group.parent / "cgroup.procs").write_text(f"{os.getpid()}")
        group.rmdir()


def _living_s(pid: str) -> float:
    """CPU seconds of the children of `pid` that have not been waited for, of their children, and so on.

    Of the children of a child those that it has waited for are in its own figures, like in `os.times`.
    """
    total_s = 0.0
    for child in _children(Path("/proc", pid, "task")):
        with contextlib.suppress(OSError):  # it has ended
            fields = Path("/proc", child, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total_s += sum(map(int, fields[11:15])) / TICKS_PER_S + _living_s(child)
    return total_s


def _children(threads: Path) -> list[str]:
    """Of all threads of a process; both may end at any moment, also between two steps of a glob."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(threads):
            with contextlib.suppress(OSError):
                found += (threads / thread / "children").read_text().split()
    return found


def cost_s(start: Reading, end: Reading) -> float:
    return max(end.cpu_s - start.cpu_s, end.time_s - start.time_s - (end.pressure_s - start.pressure_s))


_shared = pytest.StashKey[list[float]]()
_cost = pytest.StashKey[float]()
_costs: dict[str, float] = {}
_fixtures: dict[str, float] = {}
_depth = 0


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    """What is forked from now on counts."""
    _own_group()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Iterator[None]:
    """Takes the cost of a shared fixture out of the test that happens to need it first."""
    global _depth
    if fixturedef.scope in ("function", "class") or _depth:
        return (yield)
    start, _depth = Reading.now(), _depth + 1
    try:
        return (yield)
    finally:
        _depth -= 1
        spent_s = cost_s(start, Reading.now())
        item = request._pyfuncitem
        item.stash.setdefault(_shared, []).append(spent_s)
        item.user_properties.append(("fixture", [f"{fixturedef.baseid}::{fixturedef.argname}", round(spent_s, 2)]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    start = Reading.now()
    try:
        return (yield)
    finally:
        item.stash[_cost] = cost_s(start, Reading.now()) - sum(item.stash.get(_shared, []))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    start = Reading.now()
    try:
        return (yield)
    finally:
        item.stash[_cost] += cost_s(start, Reading.now())
        item.user_properties.append(("cost_s", round(item.stash[_cost], 2)))


def without_group(nodeid: str) -> str:
    """xdist puts `@group` at the end of the ids of tests that stay together."""
    test, _, _ = nodeid.rpartition("@")
    return test if nodeid.rfind("@") > nodeid.rfind("]") and test else nodeid


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Also of other workers' tests, in the process that reports."""
    if report.when == "call":
        for name, value in report.user_properties:
            if name == "cost_s":
                _costs[without_group(report.nodeid)] = value
            elif name == "fixture":
                _fixtures[value[0]] = max(value[1], _fixtures.get(value[0], 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """In the process that reports; after it, the file holds the newest figure of every test that was ever run."""
    if not _costs:
        return
    for title, costs in (("tests", _costs), ("shared fixtures", _fixtures)):
        terminalreporter.section(f"dearest {title} (seconds of CPU, or of waiting on an idle machine)")
        for name, value in sorted(costs.items(), key=lambda each: -each[1])[:NUM_SHOWN]:
            terminalreporter.write_line(f"{value:8.1f}  {name}")
    terminalreporter.write_line(f"all tests {sum(_costs.values()):.0f} s; {FILE}")
    _save()


def _save() -> None:
    try:
        before = json.loads(FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    found = {"tests": _costs, "fixtures": _fixtures}
    merged = {name: dict(sorted({**before.get(name, {}), **costs}.items())) for name, costs in found.items()}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    part = FILE.with_name(f"{FILE.name}.{os.getpid()}")
    part.write_text(json.dumps(merged, indent=1) + "\n")
    part.replace(FILE)
