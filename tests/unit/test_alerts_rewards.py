"""A collapsed reward is judged by the batches in the run's metrics file, however many came between two looks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from daemons.alerts import __main__ as alerts
from daemons.alerts.__main__ import RewardWatch
from prime_rl.configs.reports import RewardRule
from prime_rl.contract.files import append_line
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import RunState
from prime_rl.utils import tail
from tests.unit.test_alerts_rules import RUN

RULE = RewardRule(window=2, drop=0.5)
COLLAPSED = "mean reward of 2 batches is 0.1, was 0.8 at best"


class Run:
    """A run with a slot, whose orchestrator is the test."""

    def __init__(self, output: OutputDir) -> None:
        self.output, self.step = output, 0
        self.file = output.run(RUN.run_id).orchestrator_metrics
        self.file.parent.mkdir(parents=True)

    def train(self, *values: float, step: int | None = None) -> None:
        self.step = self.step if step is None else step
        for value in values:
            append_line(self.file, f'{{"step": {self.step}, "time": 1.0, "reward/mean": {value}}}')
            append_line(self.file, f'{{"step": {self.step}, "time": 1.0, "eval/sums/reward": 0.0}}')
            self.step += 1

    def watch(self) -> RewardWatch:
        return RewardWatch(self.output, RULE)


def judged(watch: RewardWatch, state: RunState = RunState.ACTIVE) -> str | None:
    """Why it is wrong; "" when that cannot be told; None when it is right."""
    found = list(watch.look([replace(RUN, state=state)]))
    return found[0].text if found else None


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(OutputDir(tmp_path))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.1, 0.8, 0.8, 0.45, 0.4), None),
        ((0.1, 0.8, 0.8, 0.4, 0.3), "mean reward of 2 batches is 0.35, was 0.8 at best"),
        ((0.8, 0.0), None),  # a first window is no fall
        ((-1.0, -1.0, -1.6, -1.6), "mean reward of 2 batches is -1.6, was -1 at best"),
        ((0.8, 0.8, 0.1, 0.1, 0.8, 0.8), None),  # it has risen again
        ((0.8,), ""),
        ((1e308, 1e308, -1e308, -1e308), "mean reward of 2 batches is -1e+300, was 1e+300 at best"),  # sums stay finite
    ],
)
def test_it_has_collapsed_when_the_mean_fell_by_the_share_of_the_best(
    run: Run, values: tuple[float, ...], expected: str | None
) -> None:
    run.train(*values)
    at_one_look = judged(run.watch())
    watch, file = run.watch(), run.file.read_text().splitlines()
    run.file.unlink()
    for line in file:
        append_line(run.file, line)
        judged(watch)
    assert at_one_look == judged(watch) == judged(watch) == expected, "batches count, not looks"


def test_a_new_start_and_a_run_that_comes_back_are_judged_by_all_batches(run: Run) -> None:
    assert judged(run.watch()) == "", "no batch"
    run.train(0.8, 0.8, *[0.1] * 1000)
    watch = run.watch()
    assert judged(watch) == COLLAPSED == judged(run.watch())
    assert judged(watch, RunState.PAUSED) == judged(watch, RunState.WAITING) == "", "it may go on"
    assert judged(watch) == COLLAPSED
    assert judged(watch, RunState.FINISHED) is None and list(watch.look([])) == []


def test_a_file_is_read_in_steps_and_nothing_is_told_before_its_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "READS_PER_LOOK", 1)
    run.train(0.8, 0.8, *[0.1] * (tail.CHUNK_BYTES // 80))
    assert run.file.stat().st_size > tail.CHUNK_BYTES
    watch = run.watch()
    assert [judged(watch) for _ in range(3)] == ["", COLLAPSED, COLLAPSED]


def test_what_a_run_went_back_behind_and_what_another_run_had_do_not_count(run: Run) -> None:
    run.train(0.8, 0.8, 0.1, 0.1)
    watch = run.watch()
    assert judged(watch) == COLLAPSED
    run.train(0.8, step=2)
    assert judged(watch) == "", "one batch since its checkpoint"
    run.train(0.8)
    assert judged(watch) is None
    run.file.unlink()
    run.train(0.1, 0.1)
    assert judged(watch) is None, "a run that was added again"
