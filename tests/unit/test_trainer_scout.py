"""Rank 0's loop of hints, looks and rescans, with a real watcher and real folders; 5,000 runs that come at once."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import pytest

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import RunDir
from prime_rl.trainer.loop import POLL_S, Scout
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.discovery import Discovery
from prime_rl.utils.watch import Backend, OnChange, Watcher
from tests.patience import PATIENCE_S
from tests.runs_support import BASE, add, manager_of
from tests.trainer_support import write_config

# Far above any delay of the system: a test that needs it fails, it does not pass slowly.


class Deaf:
    """Watches and reports nothing."""

    def __init__(self, on_change: OnChange) -> None:
        self.folders: set[Path] = set()

    def add(self, folder: Path) -> bool:
        is_new = folder.is_dir() and folder not in self.folders
        self.folders |= {folder} if is_new else set()
        return is_new

    def remove(self, folder: Path) -> None:
        self.folders.discard(folder)

    def lives(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Idle:
    """The trainer while it has nothing to train, until told otherwise."""

    def __init__(self, workspace: Path, watcher: Watcher, max_runs: int = 2) -> None:
        self.manager: MultiRunManager = manager_of(workspace, max_runs)
        self.discovered: list[str] = []
        self.manager.register_discovered_hook(self._discovered)
        self.scout = Scout(self.manager, watcher)

    def _discovered(self, run_idx: int, run_id: str, config: OrchestratorConfig) -> None:
        self.discovered.append(run_id)

    def until(self, run_id: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while run_id not in self.discovered:
            assert time.monotonic() < deadline, f"{run_id} was not discovered"
            self.scout.wait(POLL_S)
            self.scout.look()


def deaf(on_change: OnChange) -> Backend:
    return Deaf(on_change)


@pytest.mark.parametrize("how", ["native", "polling", "deaf"])
def test_a_run_is_discovered_by_hint_by_polling_or_by_rescan(tmp_path: Path, how: str) -> None:
    watcher = {
        "native": lambda: Watcher(rescan_s=PATIENCE_S, kind="native"),
        "polling": lambda: Watcher(rescan_s=PATIENCE_S, kind="polling", poll_s=0.02),
        "deaf": lambda: Watcher(rescan_s=0.1, make_native=deaf),
    }[how]()
    with watcher:
        idle = Idle(tmp_path, watcher)
        idle.scout.look()
        add(tmp_path, "run_a")
        idle.until("run_a")
        (tmp_path / "run_b").mkdir()
        for _ in range(3):
            idle.scout.wait(POLL_S)
            idle.scout.look()
        run = RunDir(tmp_path / "run_b")
        run.control.mkdir()
        for _ in range(3):
            idle.scout.wait(POLL_S)
            idle.scout.look()
        write_config(run, BASE)
        idle.until("run_b")
        assert watcher.folders == {tmp_path, *(tmp_path / name / "control" for name in ("run_a", "run_b"))}


def test_an_eviction_and_a_readmission_by_a_person_are_noticed(tmp_path: Path) -> None:
    with Watcher(rescan_s=PATIENCE_S, kind="native") as watcher:
        idle = Idle(tmp_path, watcher, max_runs=1)
        first = add(tmp_path, "run_a", 1)
        add(tmp_path, "run_b", 2)
        idle.until("run_a")
        write_atomic(first.evicted, "enough")
        idle.until("run_b")
        idle.discovered.clear()
        write_atomic(RunDir(tmp_path / "run_b").evicted, "enough")
        first.evicted.unlink()
        idle.until("run_a")


def test_a_config_that_comes_to_rest_needs_no_hint(tmp_path: Path) -> None:
    with Watcher(rescan_s=PATIENCE_S, make_native=deaf) as watcher:
        idle = Idle(tmp_path, watcher)
        idle.manager = idle.scout._manager = MultiRunManager(tmp_path, 2, settle_s=0.2)
        idle.manager.register_discovered_hook(idle._discovered)
        add(tmp_path, "run_a")
        idle.scout.look()
        assert idle.manager.findings.settling == ["run_a"]
        idle.until("run_a")


@pytest.mark.slow
def test_of_5000_runs_at_once_none_is_lost(tmp_path: Path) -> None:
    num_runs = 5000
    text = f'batch_size = 8\nrollouts_per_example = 4\nmodel.name = "{BASE}"\nenv = [{{ id = "reverse-text" }}]\n'

    def place() -> None:
        for number in range(num_runs):
            run = RunDir(tmp_path / f"run_{number}")
            run.control.mkdir(parents=True)
            (run.control / "new").write_text(text)
            (run.control / "new").rename(run.control / "orch.toml")

    discovery = Discovery(tmp_path, lambda config: None)
    writer = threading.Thread(target=place)
    found, due = 0, math.inf
    with Watcher([tmp_path], rescan_s=PATIENCE_S, kind="native") as watcher:
        writer.start()
        while found < num_runs:
            # One that was dear to read, by chance or not, rests and is looked at when it is due, as the loop does.
            hinted = watcher.wait(max(0.0, min(PATIENCE_S, due - time.monotonic())))
            assert hinted or due < math.inf, f"{found} were found, and no hint of the others came"
            findings = discovery.scan({}, watcher.take_changed())
            discovery.judge(findings)
            watcher.watch(findings.folders)
            found, due = len(findings.candidates), findings.due
        writer.join()
        assert len(watcher.folders) == num_runs + 1
