"""The one file watcher: the system's events where they come, polling where they do not, a slow rescan always.

Events are hints. `Watcher.wait` returns when something may have changed or when the rescan is due; the caller then
looks at the disk itself. So a lost event costs at most `rescan_s`, never a run. Only the output directory and the
`control/` folders (or other folders that the caller names) are watched; step folders are scanned.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch
from watchdog.observers.polling import PollingObserver

logger = logging.getLogger(__name__)

ObserverKind = Literal["auto", "native", "polling"]
POLL_S = 1.0
# A reader's own open and close of a file are events too; they must not wake it.
_CHANGES = frozenset({"created", "deleted", "modified", "moved", "closed"})
# File systems on which inotify tells nothing of what other machines write.
_NO_EVENTS = ("nfs", "cifs", "smb", "lustre", "fuse", "9p", "ceph", "gpfs", "beegfs", "afs")


class _Hint(FileSystemEventHandler):
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def on_any_event(self, event: FileSystemEvent) -> None:
        if event.event_type in _CHANGES:
            self._event.set()


class Watcher:
    """Watch a changing set of folders (not recursive).

    Args:
        rescan_s: longest time between two looks at the disk, whatever the events say.
        kind: "native", "polling", or "auto" (by the mount table, with a fall-back to polling when the system's limit
            of watches is reached).
    """

    def __init__(self, folders: Iterable[Path] = (), *, rescan_s: float = 5.0, kind: ObserverKind = "auto") -> None:
        self.rescan_s = rescan_s
        self._kind = kind
        self._event = threading.Event()
        self._observer: BaseObserver | None = None
        self._watches: dict[Path, ObservedWatch] = {}
        self.watch(folders)

    def watch(self, folders: Iterable[Path]) -> None:
        """Watch exactly `folders` from now on; those that do not exist (yet) are left out until the next call."""
        wanted = {folder for folder in folders if folder.is_dir()}
        gone = set(self._watches) - wanted
        new = wanted - set(self._watches)
        for folder in gone:
            watch = self._watches.pop(folder)
            if self._observer is not None:
                self._observer.unschedule(watch)
        for folder in sorted(new):
            self._schedule(folder)
        if new:
            self._event.set()  # what landed before the watch was set is found by a look

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a hint, the rescan or `timeout_s`; true when it was a hint. Also returns after `wake`."""
        limit = self.rescan_s if timeout_s is None else min(timeout_s, self.rescan_s)
        hinted = self._event.wait(limit)
        self._event.clear()
        return hinted

    def wake(self) -> None:
        """Make the current or next `wait` return at once (from a signal handler or another thread)."""
        self._event.set()

    def close(self) -> None:
        if self._observer is not None and self._observer.is_alive():
            self._observer.stop()
            self._observer.join()
        self._observer = None
        self._watches.clear()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _schedule(self, folder: Path) -> None:
        observer = self._observer or self._start(folder)
        try:
            self._watches[folder] = observer.schedule(_Hint(self._event), str(folder), recursive=False)
        except FileNotFoundError:
            return
        except OSError as error:  # ENOSPC, EMFILE: no more watches
            if self._kind == "polling" or isinstance(observer, PollingObserver):
                raise
            logger.warning("watching %s failed (%s): polling every %g s from now on", folder, error, POLL_S)
            self._fall_back(folder)

    def _start(self, folder: Path) -> BaseObserver:
        polling = self._kind == "polling" or (self._kind == "auto" and not events_come(folder))
        try:
            observer: BaseObserver = PollingObserver(timeout=POLL_S) if polling else Observer()
            observer.start()
        except OSError as error:
            logger.warning("no file events (%s): polling every %g s", error, POLL_S)
            observer = PollingObserver(timeout=POLL_S)
            observer.start()
        self._observer = observer
        return observer

    def _fall_back(self, folder: Path) -> None:
        folders = [*self._watches, folder]
        self.close()
        self._kind = "polling"
        for each in folders:
            self._schedule(each)


def events_come(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether the file system of `folder` delivers events for writes of other processes and machines."""
    kind = file_system_type(folder, mountinfo)
    return kind is None or not kind.startswith(_NO_EVENTS)


def file_system_type(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Type of the file system that holds `folder` (e.g. "ext4"), from the mount table; None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return None
    target = folder.resolve()
    best: tuple[int, str | None] = (-1, None)
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].replace("\\040", " "))
        if (target == mount or mount in target.parents) and len(mount.parts) >= best[0]:
            best = (len(mount.parts), after.split()[0])
    return best[1]


# watchdog 7 warns once a thread for every burst of events it joins; the warning carries nothing to act on.
warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"watchdog(\..*)?")
