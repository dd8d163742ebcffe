"""How much a feed passes on: all that is there when it is stopped, and only so many figures of a writer."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from daemons.monitors import __main__ as feed_module
from daemons.monitors.__main__ import MAX_FIGURES, Feed, Positions
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import RunDir
from tests.orchestrator_support import make_run
from tests.patience import PATIENCE_S


class Waits:
    """A monitor that begins when the feed was stopped; it keeps what it is given."""

    name, wants_all = "waits", True

    def __init__(self) -> None:
        self.begins = threading.Event()
        self.steps: list[int] = []
        self.names: set[str] = set()

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        assert self.begins.wait(PATIENCE_S)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.names.update(metrics)

    def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    run.metrics.mkdir()
    return run


def passed_on(run: RunDir) -> Waits:
    """What a feed passes on that is stopped before its first turn."""
    monitor = Waits()
    feed = Feed(run, monitor, {}, Positions(run))
    feed.stop()
    monitor.begins.set()
    wait_for(lambda: feed.is_over, "the feed to end", timeout_s=PATIENCE_S)
    assert not feed.failed
    return monitor


def test_a_feed_that_is_stopped_passes_on_all_that_is_there(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what it does not read in one turn."""
    monkeypatch.setattr(feed_module, "READS_PER_TURN", 1)
    lines = [json.dumps({"step": step, "x" * 1000: "no number", "loss": 0.5}) for step in range(3000)]
    run.trainer_metrics.write_text("\n".join(lines) + "\n")
    assert passed_on(run).steps == [*range(3000)]


def test_a_writer_has_so_many_names_and_takes_none_of_the_others(run: RunDir) -> None:
    many = [{f"{step}/{number}": 0.5 for number in range(MAX_FIGURES // 2)} for step in (1, 2, 3)]
    run.orchestrator_metrics.write_text("".join(json.dumps({"step": 1, **figures}) + "\n" for figures in many))
    run.trainer_metrics.write_text('{"step": 1, "loss": 0.5}\n')
    names = passed_on(run).names
    assert names == {f"orchestrator/{name}" for figures in many[:2] for name in figures} | {"trainer/loss"}
