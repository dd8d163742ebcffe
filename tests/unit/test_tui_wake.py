"""A wake of the console's watcher is followed by a look at everything, whenever it comes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from prime_rl.contract.files import wait_for
from tests.tui_support import build_workspace, frozen_clock, roomy_disk
from tui.watcher import Rest, WorkspaceReader, WorkspaceWatcher

TIMEOUT_S = 60.0


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


def test_a_wake_between_reading_and_resetting_the_flag_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, rest = build_workspace(tmp_path / "workspace"), WokenMeanwhile()
    watcher = WorkspaceWatcher(workspace.path, lambda message: None, frozen_clock, roomy_disk)
    rest.watcher = watcher
    monkeypatch.setattr(watcher, "_rest", rest)
    looks: list[bool] = []
    real = WorkspaceReader.read

    def read(reader: WorkspaceReader, *, with_configs: bool, at_rest: bool) -> object:
        if with_configs:  # all but the first
            looks.append(at_rest)
        return real(reader, with_configs=with_configs, at_rest=at_rest)

    monkeypatch.setattr(WorkspaceReader, "read", read)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    try:
        wait_for(lambda: len(looks) >= 3, "three looks", timeout_s=TIMEOUT_S)
    finally:
        watcher.stop()
        thread.join(TIMEOUT_S)
    assert looks[:3] == [False, True, False], "the look after the wake is at everything, and no other"
