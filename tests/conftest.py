"""What every test gets: no hub, no inherited workspace, a place among the workers, and no process left behind."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx._transports.default
import psutil
import pytest
import typer.main
from hypothesis import HealthCheck, settings

from tests.budgets import examples
from tests.warm import close_all, fork_parents

pytest_plugins = ["tests.durations"]

# No test depends on being quick.
settings.register_profile(
    "prl", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples(100)
)
settings.load_profile("prl")
# What the tests import stays: the collector of garbage need not look through it again and again, now and later.
gc.disable()

# Each call of `prl` within this process would make the tree of all its commands again.
typer.main.get_command = functools.cache(typer.main.get_command)
# Each client of HTTP would read the authorities of TLS again: 30 ms.
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Each process that loads pydantic would read the metadata of all packages for them.
os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
# Workers share the cores: threads that wait for each other across processes cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes import the same modules: each would compile them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell starts its background jobs with Ctrl-C ignored, nohup its command with SIGHUP, and every process that is
# tested would inherit that.
for _signal, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _handler)
for _name in ("PRL_OUTPUT_DIR", "PRL_API_KEY"):
    os.environ.pop(_name, None)

# Inherited by every process that these tests start, also by those that leave their session and their parent.
_MARK = "PRL_TEST_SESSION"
os.environ.setdefault(_MARK, uuid.uuid4().hex)


# What was told to end may still be at it when the last test is over, on a busy machine for some seconds.
LEAVING_S = 30.0
_before = pytest.StashKey[set[threading.Thread]]()
# Fixtures of tests/integration/conftest.py that one worker makes, which has the tests of all files that use them.
ONE_WORKER = ("lives", "server")
# Those that are made once for all workers.
ONCE = {"base_model", "untaught_model", "number_model", "tool_model", "tiny", "model", "alone"}


def processes_of_this_session() -> list[psutil.Process]:
    """Living processes with the mark, other than those that run the tests."""
    me = psutil.Process()
    testers = {me.pid, *(parent.pid for parent in me.parents())}
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(_MARK) == os.environ[_MARK]
            command = process.cmdline()
        except psutil.Error:
            continue
        if marked and process.pid not in testers and not any("resource_tracker" in word for word in command):
            found.append(process)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deals tests out to the workers: those that share an expensive fixture stay together; what is slow begins first.

    What hypothesis draws has a budget.

    Only for `--dist loadgroup`, and before xdist reads the groups. Within a group tests keep their order; a seed in
    PRL_TEST_ORDER gives the groups an order of their own.
    """
    slow: dict[str, bool] = {}
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.budget)
        if not item.get_closest_marker("xdist_group") and _shares(item):
            item.add_marker(pytest.mark.xdist_group(_one_worker(item) or item.path.stem))
        is_slow = any(item.get_closest_marker(name) for name in ("slow", "release"))
        slow[_group(item)] = slow.get(_group(item), False) or is_slow
    groups = list(slow)
    if "PRL_TEST_ORDER" in os.environ:
        random.Random(os.environ["PRL_TEST_ORDER"]).shuffle(groups)
    place = {group: number for number, group in enumerate(groups)}
    items.sort(key=lambda item: (not slow[_group(item)], place[_group(item)]))


def _group(item: pytest.Item) -> str:
    found = item.get_closest_marker("xdist_group")
    return str(found.args[0]) if found else item.nodeid


def _fixtures(item: pytest.Item) -> list[Any]:
    info: Any = getattr(item, "_fixtureinfo", None)
    return [found[-1] for found in info.name2fixturedefs.values()] if info else []


def _one_worker(item: pytest.Item) -> str | None:
    """The first of ONE_WORKER that a test uses."""
    of_all = {each.argname for each in _fixtures(item) if each.baseid == "tests/integration"}
    return next((name for name in ONE_WORKER if name in of_all), None)


def _shares(item: pytest.Item) -> bool:
    """Whether a fixture of these tests is made once a worker for several tests, this one among them."""
    once = {("tests/integration", name) for name in ONCE}
    return any(
        each.scope in ("module", "session")
        and each.baseid.startswith("tests")
        and (each.baseid, each.argname) not in once
        for each in _fixtures(item)
    )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # triton reports what is not collected at the end


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """In each process that runs tests: pytest has set nothing for a test of its own yet."""
    if not session.config.option.collectonly:
        fork_parents()


def _working() -> set[threading.Thread]:
    """Threads that write a status file, or serve at a port, until they are told to end."""
    return {
        each for each in threading.enumerate() if each.name.startswith("heartbeat ") or "serve_forever" in each.name
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_before] = _working()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Threads that a test leaves would go on as long as the worker lives, beside tests that limit its files."""
    result = yield
    left = sorted(thread.name for thread in _working() - item.stash[_before])
    assert not left, f"the test left these threads: {left}"
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The main process looks, after its workers have ended."""
    close_all()
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    deadline = time.monotonic() + LEAVING_S
    while (left := processes_of_this_session()) and time.monotonic() < deadline:
        time.sleep(0.1)
    commands = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            commands.append(" ".join(process.cmdline()))
            process.kill()
    if commands:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\ntests left these processes: {commands}")
