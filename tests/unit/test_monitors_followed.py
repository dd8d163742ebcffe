"""Which runs the daemon `monitors` follows: new, finished, deleted, hostile ones; no thread outlives its run."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from daemons.monitors.__main__ import CLOSE_LIMIT_S, SLOW_S, Monitors
from daemons.monitors.services import importing
from prime_rl.configs.base import build
from prime_rl.configs.reports import MonitorsConfig
from prime_rl.contract.files import append_line, wait_for, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import TrainerRunStatus, TrainerStatus
from tests.attack_support import ATTACKS, Outside
from tests.orchestrator_support import config_data, make_run, write_toml
from tests.patience import PATIENCE_S
from tests.ports import free_port

# Quiet only when a test says so, however long a library takes to be imported.
QUIET_S = PATIENCE_S


class Workspace:
    """A workspace without daemons, and `Monitors` whose clock is ahead by as much as a test sets."""

    def __init__(self, path: Path) -> None:
        self.output, self.ahead_s = OutputDir(path), 0.0
        self.monitors: Monitors | None = None

    def start(self, **tables: Any) -> Monitors:
        config = build(MonitorsConfig, tables, "test")
        self.monitors = Monitors(self.output, config, clock=lambda: time.monotonic() + self.ahead_s, quiet_s=QUIET_S)
        return self.monitors

    def run(self, run_id: str, *, step: int = 1, **over: Any) -> RunDir:
        """A run with one line of metrics."""
        run = make_run(self.output.path, run_id)
        write_toml(run, config_data(Path("model"), **over))
        write(run, step)
        return run

    def hold(self, *run_ids: str) -> None:
        """What the trainer writes: the runs in its slots."""
        status = TrainerStatus(runs={run_id: TrainerRunStatus(run_idx=n) for n, run_id in enumerate(run_ids)})
        self.output.trainer_status.parent.mkdir(exist_ok=True)
        write_atomic(self.output.trainer_status, msgspec.json.encode(status))

    def shown(self) -> list[str]:
        """The losses on the page, after a look."""
        assert self.monitors is not None and self.monitors.page is not None
        self.monitors.look()
        lines = httpx.get(self.monitors.page.url, timeout=PATIENCE_S).text.splitlines()
        return sorted(line.removeprefix("prl_trainer_loss") for line in lines if line.startswith("prl_trainer_loss{"))

    def look_until(self, condition: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            assert self.monitors is not None
            self.monitors.look()
            return condition()

        wait_for(look, what, timeout_s=PATIENCE_S)


def write(run: RunDir, step: int) -> None:
    run.metrics.mkdir(exist_ok=True)
    append_line(run.trainer_metrics, json.dumps({"step": step, "loss": float(step)}))


def age(run: RunDir) -> None:
    long_ago = time.time() - 10 * QUIET_S
    os.utime(run.trainer_metrics, (long_ago, long_ago))


def feeds() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if " of run_" in thread.name)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    found = Workspace(tmp_path / "out")
    found.output.path.mkdir()
    yield found
    if found.monitors is not None:
        found.monitors.close()
    wait_for(lambda: feeds() == [], "all threads to end", timeout_s=PATIENCE_S)


def test_one_page_has_all_runs_as_they_come_and_go(workspace: Workspace) -> None:
    run_a, run_b = workspace.run("run_a"), workspace.run("run_b", step=2)
    workspace.hold("run_a", "run_b")
    workspace.start(prometheus={})
    a, b, c = '{run="run_a"} 1.0', '{run="run_b"} 2.0', '{run="run_c"} 3.0'
    wait_for(lambda: workspace.shown() == [a, b], "both runs", timeout_s=PATIENCE_S)
    workspace.run("run_c", step=3)
    workspace.hold("run_a", "run_c")
    wait_for(lambda: workspace.shown() == [a, b, c], "the third", timeout_s=PATIENCE_S)
    run_a.path.rename(workspace.output.path / "deleted")
    wait_for(lambda: workspace.shown() == [b, c], "the deleted one to be gone", timeout_s=PATIENCE_S)
    workspace.run("run_a", step=7)
    wait_for(lambda: workspace.shown() == ['{run="run_a"} 7.0', b, c], "its successor", timeout_s=PATIENCE_S)
    workspace.hold("run_a", "run_c")
    workspace.ahead_s = QUIET_S
    a = '{run="run_a"} 7.0'
    wait_for(lambda: workspace.shown() == [a, c], "the one without a slot to end", timeout_s=PATIENCE_S)
    write(run_b, 8)
    wait_for(lambda: workspace.shown() == [a, '{run="run_b"} 8.0', c], "its new line", timeout_s=PATIENCE_S)


def test_a_finished_run_gets_what_it_missed_and_no_other_old_run_is_passed_on(workspace: Workspace) -> None:
    fed, whole, never = (workspace.run(f"run_{name}") for name in ("fed", "whole", "never"))
    size = fed.trainer_metrics.stat().st_size
    write(fed, 2)
    for run in (fed, whole):
        run.monitors.mkdir()
        (run.monitors / "state.json").write_text(json.dumps({"tensorboard": {"trainer": size}}))
    for run in (fed, whole, never):
        age(run)
    workspace.start(tensorboard={})
    kept = {"tensorboard": {"trainer": fed.trainer_metrics.stat().st_size, "orchestrator": 0}}
    workspace.look_until(lambda: json.loads((fed.monitors / "state.json").read_text()) == kept, "the missed line")
    assert feeds() == ["tensorboard of run_fed"]
    assert not (whole.monitors / "tensorboard").exists() and not never.monitors.exists()
    workspace.ahead_s = QUIET_S
    workspace.look_until(lambda: feeds() == [], "the finished run to end")


def test_a_library_that_hangs_is_named_and_given_up_and_all_else_goes_on(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called, released = threading.Event(), threading.Event()

    def init(**options: object) -> None:
        called.set()
        released.wait()

    hanging = SimpleNamespace(init=init, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", hanging)
    workspace.run("run_a", monitor={"wandb": {}})
    workspace.run("run_b")
    workspace.hold("run_a", "run_b")
    monitors = workspace.start(prometheus={})
    both = ['{run="run_a"} 1.0', '{run="run_b"} 1.0']
    wait_for(lambda: workspace.shown() == both, "the page", timeout_s=PATIENCE_S)
    wait_for(called.is_set, "W&B to be called", timeout_s=PATIENCE_S)
    assert feeds() == ["prometheus of run_a", "prometheus of run_b", "wandb of run_a"]
    assert monitors.slow() is None
    workspace.ahead_s = SLOW_S
    for _ in range(2):
        assert monitors.slow() == "wandb of run_a to answer"
    monitors._clock = Ticking()  # no test waits for CLOSE_LIMIT_S
    monitors.close()
    assert caplog.messages == [
        f"run_a: wandb has not answered for {SLOW_S:g} s",
        f"run_a: wandb did not end within {CLOSE_LIMIT_S:g} s: given up",
    ]
    released.set()


class Ticking:
    """A clock that goes on by a fifth of a second at each look."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        self.now += 0.2
        return self.now


@pytest.mark.parametrize("kind", ["pipe", "folder", "link outside", "sparse file"])
def test_a_hostile_run_holds_up_no_other(workspace: Workspace, tmp_path: Path, kind: str) -> None:
    outside = Outside(tmp_path / "outside")
    bad, worse = workspace.run("run_bad"), workspace.run("run_worse")
    workspace.run("run_good")
    bad.trainer_metrics.unlink()
    ATTACKS[kind](bad.trainer_metrics, outside.copy("metrics", None))
    decoy = tmp_path / "decoy"
    decoy.mkdir()
    (worse.path / "monitors").symlink_to(decoy)
    workspace.hold("run_bad", "run_worse", "run_good")
    workspace.start(prometheus={}, tensorboard={})
    expected = ['{run="run_good"} 1.0', '{run="run_worse"} 1.0']
    wait_for(lambda: workspace.shown() == expected, "the others", timeout_s=PATIENCE_S)
    workspace.look_until(lambda: "tensorboard of run_worse" not in feeds(), "the link to be refused")
    assert outside.touched() == [] and list(decoy.iterdir()) == []
    outside.close()


def test_a_page_of_one_run_is_ignored_beside_the_workspaces_and_served_without(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    workspace.run("run_a", monitor={"prometheus": {}})
    workspace.hold("run_a")
    monitors = workspace.start(prometheus={})
    with caplog.at_level(logging.INFO, logger="monitors"):
        wait_for(lambda: workspace.shown() != [], "the page of the workspace", timeout_s=PATIENCE_S)
        assert monitors.page is not None
        page = monitors.page.url
        assert caplog.messages == [
            f"prometheus: {page}",
            f"run_a: [monitor.prometheus] is ignored: its metrics are at {page}; remove it",
        ]
        monitors.close()
        caplog.clear()
        workspace.start()
        workspace.look_until(lambda: len(caplog.messages) == 2, "the page of the run")
    text = "ends with the next version: set [monitors.prometheus] in the system file, one page for all runs"
    warned, opened = caplog.messages
    assert warned == f"run_a: [monitor.prometheus] {text}" and opened.startswith("prometheus: http://127.0.0.1:")
    url = opened.removeprefix("prometheus: ")
    wait_for(lambda: "prl_trainer_loss" in httpx.get(url, timeout=PATIENCE_S).text, "its figures", timeout_s=PATIENCE_S)


def test_monitors_follow_the_config_and_an_invalid_one_changes_nothing(workspace: Workspace) -> None:
    run = workspace.run("run_a")
    workspace.hold("run_a")
    workspace.start()
    assert workspace.monitors is not None
    workspace.monitors.look()
    assert feeds() == []
    write_toml(run, config_data(Path("model"), monitor={"tensorboard": {}}))
    workspace.look_until(lambda: feeds() == ["tensorboard of run_a"], "TensorBoard")
    run.orch_toml.write_text("[monitor")
    workspace.monitors.look()
    assert feeds() == ["tensorboard of run_a"]
    write_toml(run, config_data(Path("model")))
    workspace.look_until(lambda: feeds() == [], "TensorBoard to end")


def test_a_port_that_is_taken_is_tried_again(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    first = workspace.start(prometheus={"port": port})
    first.look()
    second = workspace.start(prometheus={"port": port})
    for _ in range(2):
        second.look()
    assert caplog.messages == ["prometheus: OSError: [Errno 98] Address already in use; trying again"]
    first.close()
    second.look()
    assert httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S).status_code == 200


def test_libraries_are_imported_one_after_another() -> None:
    entered = threading.Event()

    def import_another() -> None:
        with importing("b"):
            entered.set()

    with importing("a"):
        thread = threading.Thread(target=import_another)
        thread.start()
        assert not entered.wait(0.1)
    assert entered.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
