"""Runs with equal work share a living trainer by their weights. The packer alone: `test_trainer_fairness`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prime_rl.contract.layout import RunDir
from prime_rl.trainer import publish
from prime_rl.trainer.batches import BatchReader
from prime_rl.trainer.runs import get_multi_run_manager
from tests.patience import PATIENCE_S
from tests.trainer_support import put_batches, train_until, trainer_config, write_run

WEIGHTS = {"run_a": 1.0, "run_b": 2.0, "run_c": 4.0}
# Updates of the heaviest run, 140 of all three. The lightest has a quarter: one more or less of it is a twentieth.
NUM_UPDATES = 80


@pytest.mark.slow
def test_tokens_are_shared_by_weight(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No disk decides: one that is slow to write holds up the heaviest run most, one that is slow to read any run."""
    monkeypatch.setattr(publish, "MAX_WAITING_PER_RUN", 1_000)
    take = BatchReader.take
    monkeypatch.setattr(BatchReader, "take", lambda self, timeout_s=0.0: take(self, PATIENCE_S))
    runs = {
        run_id: write_run(tmp_path, run_id, tiny, weight=weight, max_steps=2 * NUM_UPDATES)
        for run_id, weight in WEIGHTS.items()
    }
    for run in runs.values():
        put_batches(run, NUM_UPDATES + 10)  # the same for all, and more than any of them gets through

    def done() -> bool:
        heaviest = get_multi_run_manager().run_of("run_c")
        return heaviest is not None and heaviest.progress.step >= NUM_UPDATES

    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=96), done)
    counts = {run_id: tokens_of(run) for run_id, run in runs.items()}
    for run_id, weight in WEIGHTS.items():
        share = counts[run_id] / sum(counts.values())
        assert share == pytest.approx(weight / sum(WEIGHTS.values()), rel=0.1), counts


def tokens_of(run: RunDir) -> int:
    return sum(json.loads(line)["tokens"] for line in run.trainer_metrics.read_text().splitlines())
