"""When the console's watcher looks at what: a wake, and the first looks."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.message import Message

from prime_rl.contract.files import append_line, wait_for
from prime_rl.contract.status import RunStatus, read_status
from tests.patience import PATIENCE_S
from tests.tui_support import NOW, build_workspace, frozen_clock, roomy_disk, write_status
from tui.messages import ReadFailed, RunChanged, WorkspaceChanged
from tui.model.snapshot import RunRow, Snapshot
from tui.readers.workspace_metrics import CurvesData, CurvesRequest
from tui.watcher import Rest, RunWatcher, WorkspaceReader, WorkspaceWatcher
from tui.widgets.header import workspace_lines


class WokenMeanwhile(Rest):
    """Asked whether the runs at rest are due: at that very moment another thread wakes the watcher; they are not."""

    def __init__(self) -> None:
        super().__init__()
        self.watcher: WorkspaceWatcher | None = None

    @property
    def is_over(self) -> bool:
        if self.watcher is not None:
            watcher, self.watcher = self.watcher, None
            watcher.wake()
        return False


@pytest.mark.slow
def test_a_wake_between_reading_and_resetting_the_flag_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, rest = build_workspace(tmp_path / "workspace"), WokenMeanwhile()
    watcher = WorkspaceWatcher(workspace.path, lambda message: None, frozen_clock, roomy_disk)
    rest.watcher = watcher
    monkeypatch.setattr(watcher, "_rest", rest)
    looks: list[bool] = []
    real = WorkspaceReader.read

    def read(reader: WorkspaceReader, *, with_configs: bool = True, at_rest: bool = True, **others: object) -> object:
        if with_configs:  # all but the first
            looks.append(at_rest)
        return real(reader, with_configs=with_configs, at_rest=at_rest, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(WorkspaceReader, "read", read)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    try:
        wait_for(lambda: len(looks) >= 3, "three looks", timeout_s=PATIENCE_S)
    finally:
        watcher.stop()
        thread.join(PATIENCE_S)
    assert looks[:3] == [False, True, False], "the look after the wake is at everything, and no other"


def test_the_first_picture_is_of_runs_in_slots_and_the_others_are_read_when_it_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = build_workspace(tmp_path / "workspace")
    monkeypatch.setattr("tui.watcher.FIRST_RUNS", 2)
    monkeypatch.setattr("tui.watcher.FIRST_SLICE_S", PATIENCE_S)
    monkeypatch.setattr("tui.watcher.FIRST_DRAWN_S", 10 * PATIENCE_S)
    shown: list[Snapshot] = []

    def post(message: Message) -> None:
        if isinstance(message, WorkspaceChanged):
            shown.append(message.snapshot)

    watcher = WorkspaceWatcher(workspace.path, post, frozen_clock, roomy_disk)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    try:
        wait_for(lambda: bool(shown), "the first picture", timeout_s=PATIENCE_S)
        assert len(shown) == 1, "more is read before it is drawn"
        watcher.drawn()
        wait_for(lambda: len(shown) >= 2, "all runs", timeout_s=PATIENCE_S)
    finally:
        watcher.stop()
        thread.join(PATIENCE_S)
    first, second = shown[:2]
    assert len(first.rows) == 2 and all(row.tail.rewards for row in first.rows)
    num_left = len(second.rows) - 2
    assert num_left > 2 and f"reading {num_left} more runs" in workspace_lines(first, 120, False)[0].plain
    assert "reading" not in workspace_lines(second, 120, False)[0].plain


def test_a_hint_of_one_run_is_a_look_at_that_run_and_another_is_seen_without_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = build_workspace(tmp_path / "workspace")
    hinted, silent = workspace.run("run_reverse-lr1e-3"), workspace.run("run_sort-rank16")
    looks: list[frozenset[str] | None] = []
    shown: list[Snapshot] = []
    real = WorkspaceReader.read

    def read(reader: WorkspaceReader, *, working: set[str] | None = None, **others: object) -> object:
        looks.append(None if working is None else frozenset(working))
        return real(reader, working=working, **others)  # type: ignore[arg-type]

    def post(message: Message) -> None:
        if isinstance(message, WorkspaceChanged):
            shown.append(message.snapshot)

    def row(run_id: str) -> RunRow:
        found = shown[-1].row(run_id)
        assert found is not None
        return found

    monkeypatch.setattr(WorkspaceReader, "read", read)
    watcher = WorkspaceWatcher(workspace.path, post, frozen_clock, roomy_disk)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    try:
        watcher.drawn()
        wait_for(lambda: watcher.is_caught_up, "a whole look", timeout_s=PATIENCE_S)
        status = read_status(silent.status, RunStatus)
        assert status is not None
        status.waiting_on = "something new"
        write_status(silent.status, status)

        def is_seen(step: int) -> bool:
            append_line(hinted.orchestrator_metrics, json.dumps({"step": step, "time": NOW, "reward/mean": step}))
            wait_for(lambda: row(hinted.path.name).reward == step, f"step {step}", timeout_s=PATIENCE_S)
            return frozenset({hinted.path.name}) in looks and row(silent.path.name).note == "waits for something new"

        steps = itertools.count(1000)
        wait_for(lambda: is_seen(next(steps)), "what no hint reports", timeout_s=PATIENCE_S)
    finally:
        watcher.stop()
        thread.join(PATIENCE_S)


def test_what_the_files_of_a_run_raise_is_told_once_and_the_view_lives_on(tmp_path: Path) -> None:
    """The reader of a tab raises twice, then reads again."""
    looks, posted = itertools.count(), list[Message]()

    class Reader:
        def read(self, request: CurvesRequest, is_wanted: Callable[[], bool]) -> tuple[CurvesData | None, bool]:
            if next(looks) < 2:
                raise OverflowError("integer division result too large for a float")
            return CurvesData(request.run_id), False

    watcher = RunWatcher[CurvesRequest](Reader(), CurvesRequest("run_a"), posted.append, interval_s=0.01)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    try:
        wait_for(lambda: any(isinstance(each, RunChanged) for each in posted), "a look", timeout_s=PATIENCE_S)
    finally:
        watcher.stop()
        thread.join()
    told = [each.why for each in posted if isinstance(each, ReadFailed)]
    assert told == ["OverflowError: integer division result too large for a float"]
