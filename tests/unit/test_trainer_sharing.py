"""Who gets a slot: priority, preemption and pauses; and what of a changed config counts while a run has its slot."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract.layout import RunDir
from prime_rl.contract.notes import pending_request
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.discovery import Claim, leave_reason, preempted
from prime_rl.trainer.runs.run import Leaving
from prime_rl.trainer.runs.sync import ReadyRun
from tests.runs_support import BASE, add, look, manager_of
from tests.trainer_support import write_config


def claims(*rows: tuple[str, int, int], preempts: bool = False) -> list[Claim]:
    return sorted((Claim(*row, preempts) for row in rows), key=lambda claim: claim.order)


HELD = claims(("run_old", 0, 1), ("run_young", 0, 5), ("run_high", 3, 9))
URGENT = claims(("run_urgent", 2, 7), preempts=True)


@pytest.mark.parametrize(
    ("waiting", "num_free", "expected"),
    [
        (URGENT, 0, {"run_young": "run_urgent"}),
        (URGENT, 1, {}),
        (claims(("run_patient", 9, 7)), 0, {}),
        (claims(("run_equal", 0, 7), preempts=True), 0, {}),
        (claims(("run_x", 1, 7), ("run_y", 1, 8), ("run_z", 1, 9), preempts=True), 0,
         {"run_young": "run_x", "run_old": "run_y"}),
        (claims(("run_x", 5, 7), ("run_y", 1, 8), preempts=True), 1, {"run_young": "run_y"}),
        ([*claims(("run_patient", 9, 7)), *URGENT], 0, {"run_young": "run_urgent"}),
        ([*claims(("run_patient", 9, 7)), *URGENT], 1, {"run_young": "run_urgent"}),
        (claims(("run_top", 9, 7), ("run_next", 9, 8), ("run_last", 9, 9), preempts=True), 0,
         {"run_young": "run_top", "run_old": "run_next", "run_high": "run_last"}),
    ],
)  # fmt: skip
def test_the_least_urgent_and_youngest_run_gives_up_its_slot(
    waiting: list[Claim], num_free: int, expected: dict[str, str]
) -> None:
    assert preempted(waiting, HELD, num_free) == expected


def test_who_was_preempted_never_takes_the_slot_back() -> None:
    """For all priorities of three runs that all may preempt: at most two exchanges until the slots are at rest."""
    for priorities in itertools.product(range(3), repeat=3):
        runs = [Claim(f"run_{number}", priority, number, True) for number, priority in enumerate(priorities)]
        slots, queue = runs[:2], runs[2:]
        for _ in range(2):
            for gives, takes in preempted(sorted(queue, key=lambda claim: claim.order), slots, 0).items():
                ids = {claim.run_id: claim for claim in runs}
                slots = [claim for claim in slots if claim.run_id != gives] + [ids[takes]]
                queue = [claim for claim in queue if claim.run_id != takes] + [ids[gives]]
        assert preempted(queue, slots, 0) == {}, priorities


def test_reasons_to_leave_in_their_order() -> None:
    facts: dict[str, Any] = {"evicted": True, "ended": "budget", "paused": "later", "given_up": "crashed"}
    outcomes = []
    for fact in facts:
        leave = leave_reason(**facts)
        assert leave is not None
        outcomes.append((leave.outcome, leave.saves))
        facts[fact] = False if fact == "evicted" else None
    assert outcomes == [("evicted", False), ("finished", True), ("paused", True), ("failed", False)]
    assert leave_reason(**facts) is None


def test_slots_are_given_by_priority_then_by_age(tmp_path: Path) -> None:
    for run_id, landed, priority in (
        ("run_a", 1, 0),
        ("run_b", 2, 5),
        ("run_c", 3, 5),
        ("run_d", 4, 9),
        ("run_e", 5, -1),
    ):
        add(tmp_path, run_id, landed, priority=priority)
    manager = look(manager_of(tmp_path))
    assert manager.idx_2_id == {0: "run_d", 1: "run_b"}
    assert manager.waiting == ["run_c", "run_a", "run_e"], "the order of admission, which all programs show"


def test_an_urgent_run_takes_the_slot_of_the_least_urgent_which_comes_back(tmp_path: Path) -> None:
    low, high = add(tmp_path, "run_low", 1), add(tmp_path, "run_high", 2, priority=1)
    manager = look(manager_of(tmp_path))
    add(tmp_path, "run_patient", 3, priority=9)
    urgent = add(tmp_path, "run_urgent", 4, priority=1, preempt=True)
    slots_after(manager, 2)
    assert set(manager.id_2_idx) == {"run_high", "run_urgent"}, "the freed slot goes to the run that took it"
    assert manager.waiting == ["run_patient", "run_low"]
    assert low.preempted.read_text().startswith("preempted by run_urgent") and not high.preempted.exists()
    (line,) = map(json.loads, (tmp_path / "logs" / "audit.jsonl").read_text().splitlines())
    assert [line[key] for key in ("who", "action", "run_id", "reason")] == [
        *("trainer", "preempt", "run_low", "preempted by run_urgent")
    ]
    slots_after(manager, 3)
    assert set(manager.id_2_idx) == {"run_high", "run_urgent"}, "nobody takes it back"
    for run in (urgent, high):
        run.evicted.write_text("enough")
    slots_after(manager, 2)
    assert set(manager.id_2_idx) == {"run_low", "run_patient"} and not low.preempted.exists()


def test_of_equal_runs_the_one_that_was_added_last_gives_its_slot(tmp_path: Path) -> None:
    """By the time that was recorded, not by that of its file, which was written again."""
    young, old = add(tmp_path, "run_a", 200), add(tmp_path, "run_b", 100)
    look(manager_of(tmp_path))
    os.utime(old.orch_toml, ns=(300 * 10**9, 300 * 10**9))
    manager = look(manager_of(tmp_path))
    assert set(manager.id_2_idx) == {"run_a", "run_b"}
    add(tmp_path, "run_urgent", 400, priority=1, preempt=True)
    slots_after(manager, 2)
    assert set(manager.id_2_idx) == {"run_b", "run_urgent"} and young.preempted.exists()


def test_a_run_that_is_to_be_saved_finishes_its_batch_and_takes_no_other(tmp_path: Path) -> None:
    """Whether it is paused or preempted; an eviction does not wait."""
    paused, low = add(tmp_path, "run_a", 1), add(tmp_path, "run_b", 2)
    manager = look(manager_of(tmp_path))
    runs = [manager.run(0), manager.run(1)]
    for run in runs:
        run.in_work = ReadyRun(run.run_idx, 10, 1)
    paused.paused.write_text("later")
    add(tmp_path, "run_urgent", 3, priority=1, preempt=True)
    slots_after(manager, 3)
    assert set(manager.id_2_idx) == {"run_a", "run_b"} and not manager.needs_discovery
    assert (runs[0].leaving, runs[0].reason) == (Leaving.AFTER_BATCH, "it is paused: later")
    assert runs[1].leaving is Leaving.NO, "the paused run's slot is enough"
    runs[0].in_work = None
    assert manager.needs_discovery
    slots_after(manager, 1)
    assert set(manager.id_2_idx) == {"run_urgent", "run_b"} and manager.findings.paused == ["run_a"]
    add(tmp_path, "run_most", 4, priority=2, preempt=True)
    slots_after(manager, 2)
    assert (runs[1].leaving, runs[1].reason) == (Leaving.AFTER_BATCH, "preempted by run_most")
    assert not low.preempted.exists()
    low.evicted.write_text("enough")
    slots_after(manager, 1)
    assert set(manager.id_2_idx) == {"run_urgent", "run_most"} and not low.preempted.exists()


def test_a_pause_that_is_taken_back_in_time_costs_nothing(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a", 1)
    manager = look(manager_of(tmp_path))
    held = manager.run(0)
    held.in_work = ReadyRun(0, 10, 1)
    run.paused.write_text("")
    slots_after(manager, 1)
    assert held.leaving is Leaving.AFTER_BATCH
    run.paused.unlink()
    slots_after(manager, 1)
    assert held.leaving is Leaving.NO and manager.run(0) is held and not manager.needs_discovery


def test_a_preemption_that_cannot_be_written_down_does_not_happen(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a", 1)
    manager = look(manager_of(tmp_path, max_runs=1))
    run.control.rename(tmp_path / "aside")
    run.control.symlink_to(tmp_path / "aside")
    add(tmp_path, "run_urgent", 2, priority=1, preempt=True)
    manager.discover_runs([tmp_path])
    assert manager.run(0).run_id == "run_a" and not manager.run(0).is_leaving


@pytest.mark.parametrize("resume_step", [-1, 0])
def test_live_keys_are_taken_and_all_others_wait(tmp_path: Path, resume_step: int) -> None:
    """And nothing goes back to a checkpoint again because of it."""
    run = add(tmp_path, "run_a", 1, ckpt={"resume_step": resume_step})
    manager = look(manager_of(tmp_path, max_runs=1))
    held = manager.run(0)
    note_first_request(run, resume_step)
    live = {"weight": 2.0, "priority": 3, "preempt": True, "tags": ["a"], "budget": {"max_tokens": 5}}
    write_config(run, BASE, ckpt={"resume_step": resume_step}, optim={"lr": 0.5}, **live)
    slots_after(manager, 2)
    assert manager.run(0) is held
    config = held.config
    assert (config.weight, config.priority, config.tags, config.budget.max_tokens) == (2.0, 3, ["a"], 5)
    assert config.preempt and config.optim.lr != 0.5 and config.model.lora.rank == 16
    assert pending_request(run, resume_step) is None
    write_config(run, BASE, ckpt={"resume_step": resume_step}, weight=-1.0)
    slots_after(manager, 2)
    assert manager.run(0) is held and held.config is config, "an invalid one changes nothing"


def note_first_request(run: RunDir, resume_step: int) -> None:
    """As the trainer does when it admits a run."""
    if request := pending_request(run, resume_step):
        import msgspec

        run.resumed.write_bytes(msgspec.json.encode(request))


def test_a_changed_priority_counts_at_once(tmp_path: Path) -> None:
    first = add(tmp_path, "run_first", 1, priority=5)
    manager = look(manager_of(tmp_path, max_runs=1))
    add(tmp_path, "run_urgent", 2, priority=3, preempt=True)
    slots_after(manager, 2)
    assert set(manager.id_2_idx) == {"run_first"}
    write_config(first, BASE, priority=1)
    slots_after(manager, 3)
    assert set(manager.id_2_idx) == {"run_urgent"} and manager.waiting == ["run_first"]


def slots_after(manager: MultiRunManager, num_looks: int) -> None:
    for _ in range(num_looks):
        look(manager)
