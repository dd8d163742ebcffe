"""Which `run_*` entries an output directory has, and which of them may have changed since the last look.

With a hint only the named folders count. Without one everything does: then each run's prints (inodes and times of a few
paths) are compared, which takes a tenth of what judging the run would. What changed within the clock of a file system
may leave the same times behind, so young prints are not trusted, nor old ones forever.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.contract.layout import RUN_PREFIX, LayoutError, OutputDir, RunDir, check_run_id, refusal

# Some file systems count whole seconds.
YOUNG_NS = 2 * 10**9
# Of this many looks at everything, one takes a closer look at a run whose prints are the same.
CLOSE_LOOKS = 12
# Of one path: inode, times of content and of attributes, size. None: not there.
Print = tuple[int, int, int, int] | None


@dataclass
class Entry:
    """One `run_*` entry.

    Attributes:
        inode: of the folder; another one means another run.
        refusal: why it may not be used, else None.
        folder: what to watch: the folder in which the next change is expected.
    """

    run: RunDir
    inode: int
    is_dir: bool
    refusal: str | None = None
    folder: Path = field(default_factory=Path)
    prints: tuple[Print, ...] = ()


class Presence:
    def __init__(self, output_dir: Path, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._output = OutputDir(output_dir)
        self._wall_ns = wall_ns
        self._num_looks = 0
        self._run_of: dict[Path, str] = {}
        self.entries: dict[str, Entry] = {}

    def look(self, changed: Collection[Path] | None = None) -> set[str]:
        """Bring `entries` up to date; the ids of those that may be other than before. `changed` None: any may be."""
        suspects: set[str] = set()
        if changed is None or self._output.path in changed:
            suspects |= self._list()
        if changed is None:
            suspects |= self._compare()
        else:
            suspects |= {self._run_of[folder] for folder in changed if folder in self._run_of}
        for run_id in suspects & self.entries.keys():
            self._look_at(self.entries[run_id])
        return suspects

    def _list(self) -> set[str]:
        """Entries that came; those that went, or became others, are forgotten."""
        seen: dict[str, Entry] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._output.path) as entries:
            for entry in entries:
                if entry.name.startswith(RUN_PREFIX):
                    run = RunDir(self._output.path / entry.name)
                    seen[entry.name] = Entry(run, entry.inode(), entry.is_dir(follow_symlinks=False))
        came = set()
        for run_id in sorted(seen.keys() | self.entries.keys()):
            old, new = self.entries.get(run_id), seen.get(run_id)
            if old is not None and (new is None or (old.inode, old.is_dir) != (new.inode, new.is_dir)):
                self._run_of.pop(self.entries.pop(run_id).folder, None)
                old = None
            if old is None and new is not None:
                self.entries[run_id] = new
                came.add(run_id)
        return came

    def _compare(self) -> set[str]:
        """Entries whose prints changed, are too young to be trusted, or have their turn."""
        self._num_looks += 1
        daemons = self._daemon_prints()
        old_ns = self._wall_ns() - YOUNG_NS
        suspects = set()
        for index, (run_id, entry) in enumerate(self.entries.items()):
            prints = (*_prints(entry.run), daemons.get(f"{run_id}.json"))
            young = any(each is not None and max(each[1], each[2]) > old_ns for each in prints)
            if young or prints != entry.prints or (index + self._num_looks) % CLOSE_LOOKS == 0:
                suspects.add(run_id)
            entry.prints = prints
        return suspects

    def _daemon_prints(self) -> dict[str, Print]:
        """The supervisor's status of each run's orchestrator is not in the run's folder."""
        prints: dict[str, Print] = {}
        with contextlib.suppress(OSError), os.scandir(self._output.daemons) as entries:
            for entry in entries:
                if entry.name.startswith(RUN_PREFIX):
                    prints[entry.name] = _print_of(entry.path)
        return prints

    def _look_at(self, entry: Entry) -> None:
        self._run_of.pop(entry.folder, None)
        try:
            check_run_id(entry.run.run_id)
            entry.refusal = refusal(self._output.path, entry.run.path)
        except LayoutError as error:
            entry.refusal = str(error)
        except OSError as error:
            entry.refusal = f"{entry.run.path} cannot be looked at: {error.strerror}"
        entry.folder = _next_change_in(entry.run)
        self._run_of[entry.folder] = entry.run.run_id


def _next_change_in(run: RunDir) -> Path:
    """`control/`, or the folder in which it will be made; the older place of configs is one such folder."""
    older = run.orch_toml.parent
    return next((folder for folder in (run.control, older) if os.path.isdir(folder)), run.path)


def _prints(run: RunDir) -> tuple[Print, ...]:
    """Of what decides about a run: its folder, `control/`, config and `broadcast/`."""
    path = str(run.path)
    config = _print_of(f"{path}/control/orch.toml")
    return (
        _print_of(path),
        _print_of(f"{path}/control"),
        config or _print_of(str(run.orch_toml)),
        _print_of(f"{path}/broadcast"),
    )


def _print_of(path: str) -> Print:
    try:
        stat = os.lstat(path)
    except OSError:
        return None
    return (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
