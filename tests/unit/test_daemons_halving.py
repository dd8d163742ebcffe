"""Successive halving: the rungs, the decision, and whole sweeps on more runs than slots with a stand-in trainer."""

from __future__ import annotations

import errno
import importlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemons import halving
from daemons.halving import (
    MARK,
    Decisions,
    Halving,
    RunFact,
    Rung,
    decide_rung,
    is_due,
    read_decisions,
    rungs_of,
    to_pause,
    write_decisions,
)
from prime_rl.contract.files import mark_stable
from prime_rl.contract.layout import OutputDir, RunDir, stable_marker
from prime_rl.contract.notes import SweepPlan, SweepRun
from tests.budgets import in_full

MAX_STEPS = 27


def plan_of(num_runs: int, **over: Any) -> SweepPlan:
    runs = [SweepRun(f"run_{number}") for number in range(num_runs)]
    return SweepPlan(**{"name": "s", "base": "b.toml", "runs": runs, "halving": 3, **over})


# The rule


@pytest.mark.parametrize(
    ("num_runs", "over", "max_steps", "expected"),
    [
        (9, {}, 27, [(3, 3), (9, 1)]),
        (6, {}, 27, [(3, 2), (9, 1)]),
        (6, {"halving": 2}, 16, [(2, 3), (4, 2), (8, 1)]),
        (3, {}, 10, [(4, 1)]),
        (9, {"min_steps": 5}, 27, [(9, 1)]),
        (9, {}, 2, [(1, 1)]),  # rungs at the same step are one
        (9, {}, 1, []),
        (1, {}, 27, []),
        (9, {"halving": None}, 27, []),
        (9, {"halving": 1}, 27, []),
    ],
)
def test_one_run_is_left_at_the_last_rung(
    num_runs: int, over: dict[str, Any], max_steps: int, expected: list[tuple[int, int]]
) -> None:
    rungs = rungs_of(plan_of(num_runs, **over), max_steps)
    assert [(rung.step, rung.keep) for rung in rungs] == expected
    assert [rung.number for rung in rungs] == list(range(1, len(rungs) + 1))


def test_the_best_are_kept_and_a_run_without_a_value_is_the_worst() -> None:
    values = {"run_0": 0.5, "run_1": None, "run_2": 0.7, "run_3": 0.1}
    most = decide_rung(plan_of(4), Rung(1, 3, 2), values)
    assert (most.kept, most.lost) == (["run_2", "run_0"], ["run_3", "run_1"])
    least = decide_rung(plan_of(4, mode="min"), Rung(1, 3, 2), values)
    assert (least.kept, least.lost) == (["run_3", "run_0"], ["run_2", "run_1"])


def test_ties_fall_by_the_seed_alone() -> None:
    values = dict.fromkeys((f"run_{n}" for n in range(8)), 0.5)
    kept = {seed: tuple(decide_rung(plan_of(8, seed=seed), Rung(1, 3, 2), values).kept) for seed in range(12)}
    other = dict(reversed(values.items()))
    again = {seed: tuple(decide_rung(plan_of(8, seed=seed), Rung(1, 3, 2), other).kept) for seed in kept}
    assert kept == again and len(set(kept.values())) > 3


def test_a_rung_waits_for_all_and_pauses_those_that_are_there() -> None:
    runs = [RunFact("run_0", 3), RunFact("run_1", 5, paused="by a person"), RunFact("run_2", 2)]
    rung = Rung(1, 3, 1)
    assert not is_due(rung, runs)
    assert [run.run_id for run in to_pause(rung, runs)] == ["run_0"]
    assert is_due(rung, [*runs[:2], RunFact("run_2", 3)])
    assert is_due(rung, [*runs[:2], RunFact("run_2", 2, is_over=True)]), "it never gets further"
    assert is_due(Rung(1, 3, 3), runs), "none would be ended"


# Whole sweeps


class Sweep:
    """A workspace with a sweep, and a trainer that does one step of every run in a slot at each turn.

    A run's reward at any step is its quality. `lags`: what the supervisor misses between two looks. Of runs that learn
    `texts` it is the loss of what is held out, which is measured at every other step.
    """

    def __init__(
        self, folder: Path, qualities: list[float], *, slots: int = 2, texts: bool = False, **over: Any
    ) -> None:
        self.texts = texts
        self.output = OutputDir(folder)
        self.plan = plan_of(len(qualities), **over)
        self.qualities = {run.run_id: quality for run, quality in zip(self.plan.runs, qualities, strict=True)}
        self.slots = slots
        self.held: list[str] = []
        self.halving = Halving(self.output)
        self.turns = 0
        for run_id in self.qualities:
            run = self.run(run_id)
            run.control.mkdir(parents=True)
            run.broadcast.mkdir()
            run.metrics.mkdir()
            of_kind = '[[env]]\nid = "reverse-text"\n' if not texts else '[[data]]\npath = "a.jsonl"\n'
            head = 'kind = "sft"' if texts else "rollouts_per_example = 4"
            (run.control / "orch.toml").write_text(
                f'{head}\nbatch_size = 4\nmax_steps = {MAX_STEPS}\nmodel = {{name = "m"}}\n{of_kind}'
            )
        (folder / "sweeps").mkdir()
        self.output.sweep("s").write_bytes(msgspec.json.encode(self.plan))

    def run(self, run_id: str) -> RunDir:
        return RunDir(self.output.path / run_id)

    def step(self, run_id: str) -> int:
        return max((int(path.name[5:]) for path in self.run(run_id).broadcast.iterdir()), default=0)

    def may_train(self, run_id: str) -> bool:
        run = self.run(run_id)
        marks = (run.evicted, run.finished, run.paused)
        return self.step(run_id) < MAX_STEPS and not any(mark.exists() for mark in marks)

    def turn(self) -> None:
        self.turns += 1
        self.held = [run_id for run_id in self.held if self.may_train(run_id)]
        waiting = [run_id for run_id in self.qualities if self.may_train(run_id) and run_id not in self.held]
        self.held += waiting[: self.slots - len(self.held)]
        for run_id in self.held:
            run, step = self.run(run_id), self.step(run_id) + 1
            figures = {"step": step, "time": 0.0, "reward/mean": self.qualities[run_id]}
            if self.texts:  # before it has learned anything all are alike
                figures = {"step": step, "time": 0.0, "supervised/loss": 1.0}
                figures |= {"held_out/loss": self.qualities[run_id] if step > 1 else 9.0} if step % 2 else {}
            with (run.trainer_metrics if self.texts else run.orchestrator_metrics).open("a") as file:
                file.write(json.dumps(figures) + "\n")
            run.broadcast_dir(step).mkdir()
            mark_stable(run.broadcast_dir(step))

    def go(self, *, looks_every: int = 1, at: Callable[[int], None] = lambda turn: None) -> None:
        """Until nothing trains any more."""
        for turn in range(2_000):
            at(turn)
            self.turn()
            if turn % looks_every == 0:
                self.halving.look()
            if not any(self.may_train(run_id) for run_id in self.qualities):
                self.halving.look()
                if not any(self.may_train(run_id) for run_id in self.qualities):
                    return
        raise AssertionError(f"the sweep stands still at { ({r: self.step(r) for r in self.qualities}) }")

    @property
    def ends(self) -> dict[str, int]:
        return {run_id: self.step(run_id) for run_id in self.qualities}

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.audit.read_text().splitlines()]


def test_six_runs_on_two_slots_end_with_one_winner(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, [0.1, 0.5, 0.9, 0.3, 0.8, 0.2])
    sweep.go()
    assert sweep.ends == {"run_0": 3, "run_1": 3, "run_2": MAX_STEPS, "run_3": 3, "run_4": 9, "run_5": 3}
    ended = {run_id: sweep.run(run_id).finished for run_id in sweep.qualities}
    assert {run_id for run_id, mark in ended.items() if mark.exists()} == set(ended) - {"run_2"}
    assert not any(sweep.run(run_id).paused.exists() for run_id in ended)
    assert ended["run_4"].read_text() == (
        "ended by halving at rung 2 of sweep s, step 9: reward/mean = 0.8, place 2 of 2, 0.9 was needed"
    )
    lines = [line for line in sweep.audit() if line["run_id"] == "run_1"]
    assert [line["action"] for line in lines] == ["halving", "halving"]
    assert lines[0]["reason"] == "halving: waits for rung 1 of sweep s (step 3)"
    assert lines[1]["reason"] == ended["run_1"].read_text() and "run_5 0.2" in lines[1]["detail"]
    least = 4 * 3 + 9 + MAX_STEPS
    assert sum(sweep.ends.values()) == least, "no step beyond a rung is wasted when the looks are frequent"


def test_runs_that_learn_texts_are_ended_by_what_is_held_out(tmp_path: Path) -> None:
    losses = [0.9, 0.5, 0.1, 0.7, 0.2, 0.8]
    sweep = Sweep(tmp_path, losses, texts=True, metric="held_out/loss", mode="min")
    sweep.go()
    assert sweep.ends == {"run_0": 3, "run_1": 3, "run_2": MAX_STEPS, "run_3": 3, "run_4": 9, "run_5": 3}
    assert sweep.run("run_4").finished.read_text() == (
        "ended by halving at rung 2 of sweep s, step 9: held_out/loss = 0.2, place 2 of 2, 0.1 was needed"
    )


@pytest.mark.parametrize("seed", [0, 4, *in_full(1, 2, 3, 5)])
def test_slots_looks_and_kills_change_nothing_but_the_time(tmp_path: Path, seed: int) -> None:
    """However many slots there are, however rarely it looks, and with a new supervisor at every look."""
    rng = random.Random(seed)
    qualities = [rng.randrange(5) / 10 for _ in range(rng.randrange(2, 10))]
    every = Sweep(tmp_path / "every", qualities, slots=len(qualities), seed=seed)
    other = Sweep(tmp_path / "other", qualities, slots=rng.randrange(1, 4), seed=seed)
    every.go()

    def new_supervisor(turn: int) -> None:
        other.halving = Halving(other.output)

    other.go(looks_every=rng.randrange(1, 4), at=new_supervisor)
    decisions = [read_decisions(sweep.output, "s").rungs for sweep in (every, other)]
    one, two = ([(d.step, d.kept, d.lost) for d in of] for of in decisions)
    assert one == two
    assert decisions[1] and all(decision.carried_out for decision in decisions[1])
    assert [run_id for run_id, step in other.ends.items() if step == MAX_STEPS] == decisions[0][-1].kept


def test_a_kill_between_the_decision_and_the_deed_repeats_the_deed(tmp_path: Path, monkeypatch: Any) -> None:
    sweep = Sweep(tmp_path, [0.1, 0.5, 0.9], slots=3)
    for _ in range(9):
        sweep.turn()
    killed: list[str] = []

    def killed_at_the_second(output: OutputDir, run: RunDir, *rest: Any, **more: Any) -> bool:
        if killed:
            raise KeyboardInterrupt
        killed.append(run.run_id)
        return end_run(output, run, *rest, **more)

    end_run = halving.end_run
    monkeypatch.setattr(halving, "end_run", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        sweep.halving.look()
    monkeypatch.undo()
    (decision,) = read_decisions(sweep.output, "s").rungs
    assert not decision.carried_out and killed == decision.lost[:1]
    sweep.run("run_2").orchestrator_metrics.write_text('{"step": 1, "reward/mean": -5}\n')  # it is not decided again
    Halving(sweep.output).look()
    assert sweep.run("run_0").finished.exists() and sweep.run("run_1").finished.exists()
    assert not sweep.run("run_2").finished.exists()
    assert len([line for line in sweep.audit() if line["run_id"] == decision.lost[0]]) == 1, "said once"


def test_out_runs_are_not_waited_for_and_paused_ones_are(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, [0.9, 0.8, 0.1, 0.2], slots=4)
    sweep.run("run_0").evicted.write_text("a person")
    sweep.run("run_1").paused.write_text("a person")

    for _ in range(40):
        sweep.turn()
        sweep.halving.look()
    assert sweep.ends == {"run_0": 0, "run_1": 0, "run_2": 3, "run_3": 3}, "they wait for run_1"
    sweep.run("run_1").paused.unlink()
    sweep.go()
    assert sweep.ends == {"run_0": 0, "run_1": MAX_STEPS, "run_2": 3, "run_3": 9}


def test_a_pause_of_a_person_outlasts_the_rung_and_a_readmitted_loser_is_left_alone(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, [0.9, 0.1, 0.2], slots=3)
    for _ in range(9):
        sweep.turn()
    sweep.run("run_0").paused.write_text("by a person")
    sweep.halving.look()
    assert sweep.run("run_0").paused.exists() and sweep.run("run_1").finished.exists()
    sweep.run("run_1").finished.unlink()
    for look in (sweep.halving, Halving(sweep.output)):
        look.look()
    assert not sweep.run("run_1").finished.exists()


def test_a_run_whose_metrics_are_no_file_of_its_own_keeps_no_other_waiting(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, [0.9, 0.1, 0.2], slots=3)
    (tmp_path / "elsewhere").touch()
    sweep.run("run_0").orchestrator_metrics.symlink_to(tmp_path / "elsewhere")
    sweep.go()
    assert sweep.ends["run_2"] == MAX_STEPS and sweep.run("run_0").finished.exists()


def test_a_run_whose_version_has_a_mark_of_no_name_is_one_like_the_others(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, [0.1, 0.9, 0.2], slots=3)
    for _ in range(2):
        sweep.turn()
    mark = stable_marker(sweep.run("run_0").broadcast_dir(2))
    mark.unlink()
    mark.symlink_to("a" * 300)  # no file system has such a name
    sweep.go()
    assert sweep.ends == {"run_0": 9, "run_1": MAX_STEPS, "run_2": 9}


def test_a_run_that_cannot_be_looked_at_takes_no_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sweep = Sweep(tmp_path, [0.9, 0.1, 0.2], slots=3)
    shutil.rmtree(sweep.run("run_0").control)
    sweep.run("run_0").control.symlink_to("a" * 300)
    del sweep.qualities["run_0"]
    sweep.go()
    assert sweep.ends == {"run_1": 9, "run_2": MAX_STEPS}
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == ["sweep s, run_0"], "said once"


@pytest.mark.parametrize("name", ["read_end", "list_steps"])
def test_what_the_disk_does_not_give_for_now_decides_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = Sweep(tmp_path, [0.9, 0.1, 0.2], slots=3)
    for _ in range(9):
        sweep.turn()
    module = "daemons.halving" if name == "read_end" else "daemons.workspace_reader"
    real = getattr(importlib.import_module(module), name)

    def fails(path: Path, *given: Any, **more: Any) -> Any:
        if "run_0" in path.parts:
            raise OSError(errno.EIO, "input/output error")
        return real(path, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.{name}", fails)
        sweep.halving.look()
    assert not read_decisions(sweep.output, "s").rungs and "input/output error" in caplog.text
    sweep.halving.look()
    sweep.go()
    assert sweep.ends == {"run_0": MAX_STEPS, "run_1": 9, "run_2": 9}, "the best has won"


def test_a_pause_for_the_next_rung_outlasts_that_the_one_before_is_told_again(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, [0.9, 0.8, 0.7, 0.1, 0.2, 0.3], slots=6)
    while not (decisions := read_decisions(sweep.output, "s")).rungs:
        sweep.turn()
        sweep.halving.look()
    lost = decisions.rungs[0].lost[0]
    write_decisions(
        sweep.output, "s", Decisions(rungs=[msgspec.structs.replace(decisions.rungs[0], carried_out=False)])
    )
    shutil.rmtree(sweep.run(lost).control)
    sweep.run(lost).control.symlink_to("/proc/self")  # it takes no file
    kept = decisions.rungs[0].kept[0]
    sweep.run(kept).paused.write_text(waiting := f"{MARK}waits for rung 2 of sweep s (step 9)")
    Halving(sweep.output).look()
    assert sweep.run(kept).paused.read_text() == waiting


def test_a_run_that_cannot_be_told_keeps_no_other_paused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder of one that lost takes no file any more, between the decision and the deed."""
    sweep = Sweep(tmp_path, [0.9, 0.1, 0.2], slots=3)
    while not (decisions := read_decisions(sweep.output, "s")).rungs:
        sweep.turn()
        sweep.halving.look()
    (decision,) = decisions.rungs
    (lost, *_), (kept, *_) = decision.lost, decision.kept
    write_decisions(sweep.output, "s", Decisions(rungs=[msgspec.structs.replace(decision, carried_out=False)]))
    sweep.run(kept).paused.write_text(f"{MARK}waits for rung 1 of sweep s (step {decision.step})")
    shutil.rmtree(sweep.run(lost).control)
    sweep.run(lost).control.symlink_to("/proc/self")

    sweep.halving = Halving(sweep.output)  # the supervisor has started again
    for _ in range(2):
        sweep.halving.look()
    assert not sweep.run(kept).paused.exists()
    assert [r.getMessage().split(": ")[0] for r in caplog.records] == [f"sweep s, {lost}"], "said once"
    sweep.run(lost).control.unlink()
    sweep.go()
    assert sweep.ends[kept] == MAX_STEPS


def test_a_bad_sweep_costs_the_others_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sweep = Sweep(tmp_path, [0.1, 0.9, 0.5], slots=3)
    folder = sweep.output.sweep("s").parent
    (folder / "a.json").write_text("{not json")
    (folder / "b.json").write_bytes(msgspec.json.encode(plan_of(3, name="b")))
    sweep.output.sweep_decisions("b").parent.mkdir()
    sweep.output.sweep_decisions("b").write_text('{"version": 99}')
    sweep.go()
    assert sweep.ends["run_1"] == MAX_STEPS and sweep.ends["run_0"] == 9
    assert len([r for r in caplog.records if "sweep b" in r.getMessage()]) == 1, "said once"
