"""Runs that share two slots of a living system: paused, preempted, killed amid a pause, and continued, all through prl.

Quicker: `test_trainer_sharing` (who gets a slot), `test_trainer_pausing` (what a run reaches), `test_daemons_pausing`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from daemons.actions import pause_run
from prime_rl.contract.layout import list_steps
from prime_rl.contract.status import InferenceStatus, TrainerStatus, read_status
from prime_rl.utils.process import ProcessId
from tests.system_support import Workspace, closed, make_workspace

FOREVER = 100_000


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory, untaught_model: Path) -> Iterator[Workspace]:
    workspace = make_workspace(tmp_path_factory.mktemp("sharing"), untaught_model)
    for _ in closed(workspace):
        workspace.up()
        yield workspace


@pytest.mark.release
def test_runs_share_two_slots(living: Workspace) -> None:
    add(living, "a")
    add(living, "b")
    living.wait(lambda: min(published(living, "run_a"), published(living, "run_b")) >= 1, "both runs to train")

    assert "run_a: paused" in living.prl("runs", "pause", "run_a", "--reason", "others first").stdout
    assert "already paused" in living.prl("runs", "pause", "run_a").stdout
    wait_until_let_go(living, "run_a")
    run = living.run_dir("run_a")
    assert list_steps(run.checkpoints, stable_only=True)[-1] == published(living, "run_a"), (
        "its newest version is saved"
    )
    assert (living.state("run_a"), living.runs()["run_a"]["reason"]) == ("paused", "others first")

    living.prl("runs", "set", "run_b", "weight=2", "priority=1")
    assert living.runs()["run_b"]["weight"] == 2.0
    add(living, "c", priority=2)
    living.wait(lambda: living.state("run_c") == "active", "run_c to take the free slot")
    add(living, "d", priority=5, preempt=True)
    living.wait(lambda: living.runs()["run_b"]["reason"] is not None, "run_b to give up its slot")
    waits = living.runs()["run_b"]
    assert waits["state"] == "waiting" and waits["reason"].startswith("preempted by run_d")
    wait_until_let_go(living, "run_b")
    # The trainer looks once more before it has the run that left in its queue.
    living.wait(lambda: trainer(living).waiting == ["run_b"], "run_b to be in the queue")
    assert living.state("run_d") == "active"
    living.prl("runs", "evict", "run_d", "--reason", "enough")
    living.wait(lambda: is_training(living, "run_b"), "run_b to come back by itself")
    assert living.runs()["run_b"]["reason"] is None

    living.prl("runs", "evict", "run_c", "--reason", "enough")
    before = published(living, "run_a")
    assert "run_a: continues" in living.prl("runs", "continue", "run_a").stdout
    living.wait(lambda: published(living, "run_a") > before, "run_a to go on where it was")

    number, amid = trainer(living).pid, [process(living, name) for name in ("trainer", "run_a")]
    pause_run(living.output_dir, "run_a")  # prl would take as long as the pause itself
    for each in amid:
        each.send(signal.SIGKILL)
    living.wait(lambda: trainer(living).pid != number and trainer(living).state != "starting", "the trainer's restart")
    wait_until_let_go(living, "run_a")
    before = published(living, "run_a")
    living.prl("runs", "continue", "run_a")
    living.wait(lambda: published(living, "run_a") > before, "run_a to go on after its pause was cut short")
    living.wait(lambda: is_training(living, "run_a"), "run_a to be told of as active")
    assert not living.run_dir("run_a").evicted.exists()


def add(living: Workspace, name: str, **keys: object) -> None:
    path = living.write_run(name, max_steps=FOREVER)
    lines = "".join(f"{key} = {str(value).lower()}\n" for key, value in keys.items())
    path.write_text(lines + path.read_text())
    living.prl("runs", "add", str(path))


def published(living: Workspace, run_id: str) -> int:
    return max(list_steps(living.run_dir(run_id).broadcast, stable_only=True), default=0)


def trainer(living: Workspace) -> TrainerStatus:
    status = read_status(living.paths.trainer_status, TrainerStatus)
    assert status is not None
    return status


def is_training(living: Workspace, run_id: str) -> bool:
    return living.state(run_id) == "active" and processes(living, run_id) != []


def processes(living: Workspace, run_id: str) -> list[int]:
    found = []
    for each in living.processes():
        with contextlib.suppress(psutil.Error):  # it may end meanwhile
            if f"{run_id}/control/orch.toml" in " ".join(each.cmdline()):
                found.append(each.pid)
    return found


def process(living: Workspace, name: str) -> ProcessId:
    """Of a daemon that runs or is about to be started: a run has its slot before its orchestrator."""
    found: list[ProcessId] = []

    def there() -> bool:
        daemons = [each for each in living.json("status")["daemons"] if each["name"] == name and each["pid"]]
        found[:] = [ProcessId(each["pid"], each["pid_create_time"], each["pid_start"]) for each in daemons]
        return bool(found)

    living.wait(there, f"{name} to be started")
    return found[0]


def wait_until_let_go(living: Workspace, run_id: str) -> None:
    """Until it has no slot, no process and no adapter in inference."""

    def adapters() -> list[str]:
        status = read_status(living.paths.inference_status, InferenceStatus)
        assert status is not None
        return [name for name in status.adapters if name.startswith(f"{run_id}@")]

    living.wait(
        lambda: run_id not in trainer(living).runs and not processes(living, run_id) and not adapters(),
        f"trainer, orchestrator and inference to let go of {run_id}",
    )
