"""What the loop of a node must never wait for: its own work, the end of its processes, its signs of life."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from prime_rl.configs.multinode import RUN_ID, MultinodeConfig
from prime_rl.contract.files import mark_stable, wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.multinode.member import Heartbeat
from prime_rl.multinode.place import WorkSetting
from prime_rl.multinode.records import GroupRecord, NodeRecord, Phase, Position, RlPhase
from prime_rl.multinode.work import PhaseWork
from tests.patience import PATIENCE_S

CONFIG = MultinodeConfig(groups_per_iteration=2, run={"rollouts_per_example": 2, "env": [{"id": "reverse-text"}]})
GROUP = GroupRecord(1, "a", 1, members={0: "a"})


def work_of_a_node(output: OutputDir, **changes: Any) -> PhaseWork:
    setting = WorkSetting(
        rank=0,
        incarnation="a",
        rl_phase=RlPhase.BOTH,
        weights=(1.0,),
        address="",
        master=lambda: None,
        eval_interval=None,
        splits=frozenset({"train", "eval"}),
        max_iterations=1,
    )
    output.multinode.mkdir(parents=True)
    setting = dataclasses.replace(setting, **changes)
    return PhaseWork(setting, CONFIG, output, wake=lambda: None)


@pytest.fixture
def disk_answers(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that copies nothing before the event is set."""
    answers, copy = threading.Event(), shutil.copytree

    def slow_copy(*args: Any, **options: Any) -> Any:
        assert answers.wait(PATIENCE_S), "the copy must not run in the loop"
        return copy(*args, **options)

    monkeypatch.setattr(shutil, "copytree", slow_copy)
    return answers


def test_a_long_copy_holds_up_no_look(tmp_path: Path, disk_answers: threading.Event) -> None:
    output = OutputDir(tmp_path)
    version = output.run(RUN_ID).broadcast_dir(1)
    version.mkdir(parents=True)
    mark_stable(version)
    work = work_of_a_node(output)
    work.begin(Position(1, Phase.COPY_CHECKPOINT), GROUP)
    for _ in range(3):
        assert not work.look().done
    work.begin(Position(1, Phase.FINAL), GROUP)
    assert not work.look().done, "what was under way ends before the next begins"
    assert not output.iteration(1).proof("done").exists()
    disk_answers.set()
    wait_for(lambda: work.look().done, "the work of the last phase", timeout_s=PATIENCE_S)
    assert output.iteration(1).proof("checkpoint").exists() and output.iteration(1).proof("done").exists()


def test_a_proof_that_holds_is_not_written_again(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    work, proof = work_of_a_node(output), output.iteration(1).proof("done")
    found: list[int] = []
    for number in range(2):
        work.begin(Position(1, Phase.FINAL, number), GROUP)
        wait_for(lambda: work.look().done, "the proof", timeout_s=PATIENCE_S)
        found.append(proof.stat().st_mtime_ns)
    assert found[0] == found[1], "other nodes may be reading it"


def test_where_the_proofs_say_that_the_group_goes_on_is_found_beside_the_loop(tmp_path: Path) -> None:
    work = work_of_a_node(OutputDir(tmp_path))
    found: list[Position] = []

    def look() -> bool:
        position = work.resume()
        found.extend([position] if position else [])
        return bool(found)

    wait_for(look, "the first position", timeout_s=PATIENCE_S)
    assert found == [Position(1, Phase.START)]


def test_what_fails_in_the_work_reaches_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise OSError("no space left")

    output = OutputDir(tmp_path)
    work = work_of_a_node(output)
    monkeypatch.setattr("prime_rl.multinode.place.write_atomic", broken)
    work.begin(Position(1, Phase.FINAL), GROUP)
    wait_for(lambda: work.look().error is not None, "the error", timeout_s=PATIENCE_S)
    assert work.look().may_heal and "no space left" in (work.look().error or "")
    monkeypatch.undo()
    wait_for(lambda: work.look().done, "the work to be tried again", timeout_s=PATIENCE_S)


def test_a_node_that_leaves_does_not_wait_for_its_processes(tmp_path: Path) -> None:
    work = work_of_a_node(OutputDir(tmp_path))
    child = work.place.child("sleeper", [sys.executable, "-c", "import time; time.sleep(1000)"])
    keeper = psutil.Process(child._process.pid)
    keeper.send_signal(signal.SIGSTOP)
    # Of two signals that wait for a process the one with the lower number comes first.
    wait_for(lambda: keeper.status() == psutil.STATUS_STOPPED, "the keeper to stand still", timeout_s=PATIENCE_S)
    try:
        work.stop()
        assert not work.has_ended
        with pytest.raises(ValueError, match="this node leaves"):
            work.place.child("late", ["true"])
    finally:
        keeper.send_signal(signal.SIGCONT)
    wait_for(lambda: work.has_ended, "the sleeper to end", timeout_s=PATIENCE_S)


def test_a_node_that_leaves_proves_nothing_more(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    work = work_of_a_node(output)
    work.begin(Position(1, Phase.FINAL), GROUP)
    work.stop()
    assert not work.look().done
    wait_for(work.resume, "what the thread was given before", timeout_s=PATIENCE_S)
    assert not output.iteration(1).proof("done").exists() and not work.look().done


def test_a_worker_proves_nothing_and_waits_for_what_the_master_proves(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    version = output.run(RUN_ID).broadcast_dir(1)
    version.mkdir(parents=True)
    mark_stable(version)
    work = work_of_a_node(output, rank=1, weights=(1.0, 1.0))
    for phase in (Phase.START, Phase.PREPARE, Phase.COPY_CHECKPOINT, Phase.FINAL):
        work.begin(Position(1, phase), GROUP)
        wait_for(lambda: work.look().done or bool(work.look().error), f"{phase.label} to pass", timeout_s=PATIENCE_S)
        assert work.look().done, "a worker has nothing to do there, so nothing of it can fail"
    folder = output.iteration(1)
    assert list(folder.path.iterdir()) == [] and not output.run(RUN_ID).orch_toml.exists()
    work.begin(Position(1, Phase.CONFIG_READY), GROUP)
    toml = folder.path / "trainer.toml"
    wait_for(lambda: work.look().waiting_on == f"{toml} to be seen", "a worker to wait", timeout_s=PATIENCE_S)
    folder.proof("update").touch()
    toml.touch()
    wait_for(lambda: work.look().done, "a worker to see the config", timeout_s=PATIENCE_S)


@pytest.fixture
def programs_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a node starts under a keeper does nothing and never ends by itself."""
    python = tmp_path / "python"
    keeper = f'[ "$2" = prime_rl.utils.process ] && exec {sys.executable} "$@"'
    python.write_text(f"#!/bin/sh\n{keeper}\nexec sleep 1000\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def begun(work: PhaseWork, module: str) -> psutil.Process:
    """The keeper of the process of `module` that the node starts in its phase, as soon as that process is there."""
    found: list[psutil.Process] = []

    def look() -> bool:
        work.look()
        # Other tests of this worker may have an inference server of their own.
        marks = {"prime_rl.utils.process", module}
        found[:] = [each for each in psutil.Process().children() if marks <= set(each.cmdline())]
        return bool(found and found[0].children())

    wait_for(look, f"{module} to start", timeout_s=PATIENCE_S)
    return found[0]


@pytest.mark.usefixtures("programs_hang")
@pytest.mark.parametrize(
    ("phase", "module", "following", "waiting_on"),
    [
        (Phase.TRAIN, "torch.distributed.run", Phase.FINAL, "the work that was given up to end"),
        (
            Phase.RESTART_INFERENCE,
            "prime_rl.inference.server",
            Phase.STOP_INFERENCE,
            "this node's inference server to end",
        ),
    ],
)
def test_nothing_begins_beside_a_process_that_was_asked_to_end(
    tmp_path: Path, phase: Phase, module: str, following: Phase, waiting_on: str
) -> None:
    output = OutputDir(tmp_path / "outputs")
    work = work_of_a_node(output, max_iterations=None, master=lambda: "127.0.0.1")
    work.begin(Position(1, phase), GROUP)
    keeper = begun(work, module)
    keeper.send_signal(signal.SIGSTOP)
    try:
        work.begin(Position(1, following), GROUP)
        wait_for(lambda: work.look().done or work.look().waiting_on, "a report", timeout_s=PATIENCE_S)
        assert (work.look().done, work.look().waiting_on) == (False, waiting_on)
        assert not output.iteration(1).proof("done").exists() and keeper.is_running()
    finally:
        keeper.send_signal(signal.SIGCONT)
    wait_for(lambda: work.look().done, "the phase after it", timeout_s=PATIENCE_S)
    assert work.has_ended


@pytest.mark.parametrize(
    ("changes", "iteration", "starts"),
    [
        ({"max_iterations": 2}, 1, True),
        ({"max_iterations": 2}, 2, False),
        ({"max_iterations": None}, 7, True),
        ({"max_iterations": None, "weights": (0.0,)}, 7, False),
        ({"max_iterations": None, "rl_phase": RlPhase.UPDATE}, 7, False),
    ],
)
def test_a_server_starts_again_where_this_node_makes_more_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], iteration: int, starts: bool
) -> None:
    work, started = work_of_a_node(OutputDir(tmp_path), **changes), list[bool]()
    monkeypatch.setattr(work._server, "start", lambda: started.append(True))
    work.place.move(Position(iteration, Phase.RESTART_INFERENCE), GROUP)
    assert work._make_task(Phase.RESTART_INFERENCE).look().done is not starts
    assert started == [True] * starts


def test_what_another_try_cannot_change_does_not_heal(tmp_path: Path) -> None:
    work = work_of_a_node(OutputDir(tmp_path))
    work.begin(Position(1, Phase.PREPARE), GROUP)
    wait_for(lambda: work.look().error is not None, "the error", timeout_s=PATIENCE_S)
    assert "has no rollouts: make them first" in (work.look().error or "") and not work.look().may_heal


class Records:
    """What was written, in order."""

    def __init__(self) -> None:
        self.nodes: list[NodeRecord] = []
        self.groups: list[GroupRecord] = []
        self.write_node: Callable[[NodeRecord], None] = self.nodes.append
        self.write_group: Callable[[GroupRecord], None] = self.groups.append


def test_a_loop_that_stands_still_beats_until_it_is_given_up() -> None:
    now, records, own = [100.0], Records(), NodeRecord(0, "a", 0)
    heartbeat = Heartbeat(records, clock=lambda: now[0], every_s=1.0, silent_after_s=10.0)
    heartbeat.beat()
    assert records.nodes == [], "nothing is said yet"
    heartbeat.look()
    heartbeat.say(own)
    heartbeat.say(replace(own, progress=3))
    heartbeat.say_group(GROUP)
    assert len(records.nodes) == len(records.groups) == 1, "progress alone waits for the next beat"
    for _ in range(20):
        now[0] += 1.0
        heartbeat.beat()
    assert [record.still_s for record in records.nodes] == [*range(12)]
    assert len(records.groups) == 12 and records.nodes[1].progress == 3
    heartbeat.look()
    heartbeat.beat()
    last = records.nodes[-1]
    assert (last.still_s, last.looks) == (0.0, 2), "it came round again"
    numbers = [record.seq for record in records.nodes]
    assert numbers == sorted(set(numbers))
    heartbeat.silence()
    heartbeat.beat()
    assert records.nodes[-1] is last


def test_the_last_record_of_a_loop_that_stands_still_says_so_however_long_a_write_takes() -> None:
    now, records = [0.0], Records()
    heartbeat = Heartbeat(records, clock=lambda: now[0], every_s=1.0, silent_after_s=10.0)
    heartbeat.look()
    heartbeat.say(NodeRecord(0, "a", 0))

    def slow(record: NodeRecord) -> None:
        records.nodes.append(record)
        now[0] += 0.3

    records.write_node = slow
    for _ in range(20):
        now[0] += 0.9
        heartbeat.beat()
    assert 10.0 < records.nodes[-1].still_s < 12.0


def test_beats_come_from_a_thread_of_their_own() -> None:
    records = Records()
    heartbeat = Heartbeat(records, clock=lambda: 0.0, every_s=0.01, silent_after_s=10.0)
    with heartbeat.beating():
        heartbeat.say(NodeRecord(0, "a", 0))
        wait_for(lambda: len(records.nodes) > 3, "three beats beside a loop that does nothing", timeout_s=PATIENCE_S)
