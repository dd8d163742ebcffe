"""What the checkpoints tab shows: each step's folder, its size, whether it is complete, since when. No widgets here.

A complete checkpoint does not change, so it is measured once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from prime_rl.contract.layout import RunDir, list_steps, stable_marker
from prime_rl.utils.text import one_line
from tui.readers.tabs import CHECKPOINTS, TabData, changed_at

# One folder is measured up to so many files: a run may hold anything.
MAX_FILES = 2_000


@dataclass(frozen=True)
class Checkpoint:
    """One `checkpoints/step_N`. `saved_at` (Unix seconds) is of STABLE, of the folder while that is missing.

    `parts` are the folders in it ("orchestrator", "trainer").
    """

    step: int
    is_stable: bool
    num_bytes: int
    saved_at: float | None
    parts: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointsData(TabData):
    """One look, ascending by step. `starts_at` is where a restart goes on."""

    tab = CHECKPOINTS
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def starts_at(self) -> int | None:
        """The newest step with a complete checkpoint; None without one."""
        return max((each.step for each in self.checkpoints if each.is_stable), default=None)


class CheckpointsReader:
    """Looks at the folders each time; measures only what is new or not complete."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._run = RunDir(output_dir / run_id)
        self._known: dict[int, Checkpoint] = {}
        self._shown: CheckpointsData | None = None

    def read(self) -> tuple[CheckpointsData | None, bool]:
        """(all checkpoints, or None when nothing changed; False: one look reads all)."""
        try:
            steps = list_steps(self._run.checkpoints)
        except OSError:
            steps = []
        self._known = {step: self._look(step) for step in steps}
        data = CheckpointsData(self._run.run_id, tuple(self._known[step] for step in steps))
        if data == self._shown:
            return None, False
        self._shown = data
        return data, False

    def _look(self, step: int) -> Checkpoint:
        folder = self._run.checkpoint_dir(step)
        marker = changed_at(stable_marker(folder))
        known = self._known.get(step)
        if known is not None and known.is_stable and known.saved_at == marker:
            return known
        num_bytes, parts = measure(folder)
        return Checkpoint(step, marker is not None, num_bytes, marker or changed_at(folder), parts)


def measure(folder: Path) -> tuple[int, tuple[str, ...]]:
    """(bytes of the files below, names of the folders in it). What vanishes meanwhile counts nothing."""
    num_bytes, num_files = 0, 0
    parts: tuple[str, ...] = ()
    for place, folders, names in os.walk(folder):  # follows no link
        if place == str(folder):
            parts = tuple(sorted(one_line(name, 40) for name in folders))
        for name in names:
            try:
                num_bytes += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
        num_files += len(names)
        if num_files > MAX_FILES:
            break
    return num_bytes, parts
