"""Where the watcher's hints come from: inotify, through watchdog, or a thread that looks again and again.

Both watch a set of folders, not recursive, and call `on_change(folder, name)` from their own thread: `name` in
`folder` changed; without a name the folder itself; without a folder anything may have changed. Temporary and hidden
files (a leading dot) are left out: what is renamed into place is reported under its final name.

watchdog's own observer has a thread a folder and holds unpaired renames back for half a second. Here its inotify
reader is used directly: one thread and one inotify instance for all folders.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from watchdog.observers.inotify_c import InotifyEvent, WatchDescriptor

OnChange = Callable[[Path | None, str], None]
POLL_S = 1.0
# A poll may take at most this share of one core, whatever the number of folders and the speed of the file system.
POLL_SHARE = 20
# What a folder looks like: names with their inode and, for files, time of change and size. None: not there.
Picture = frozenset[tuple[str, int, int, int]] | None

# watchdog may log this for each of many short-lived folders; there is nothing to act on.
warnings.filterwarnings("ignore", message="Callback with id", category=RuntimeWarning)


class Backend(Protocol):
    """A changing set of watched folders."""

    def add(self, folder: Path) -> bool | None:
        """Watch what is at `folder` now: false when it was watched, None when there is nothing. OSError at a limit."""

    def remove(self, folder: Path) -> None:
        """Watch `folder` no longer."""

    def lives(self) -> bool:
        """Whether hints still come."""

    def close(self) -> None:
        """End the thread."""


def native_events(on_change: OnChange) -> Backend:
    """Events of the operating system. OSError where it has none, or no more of them."""
    if sys.platform != "linux":
        raise OSError("this system has no inotify")
    return NativeEvents(on_change)


class NativeEvents:
    """inotify: one instance, one watch a folder."""

    def __init__(self, on_change: OnChange) -> None:
        # Loads the C library's inotify calls, which only Linux has.
        from watchdog.observers.inotify_c import InotifyConstants as Event
        from watchdog.observers.inotify_c import InotifyFD, Mask

        self._on_change = on_change
        changes = Event.IN_CREATE | Event.IN_MODIFY | Event.IN_ATTRIB | Event.IN_CLOSE_WRITE | Event.IN_DELETE
        self._mask = Mask(changes | Event.IN_MOVE | Event.IN_DELETE_SELF | Event.IN_MOVE_SELF | Event.IN_ONLYDIR)
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._watches: dict[Path, tuple[WatchDescriptor, int]] = {}
        self._folders: dict[WatchDescriptor, Path] = {}
        self._reader = InotifyFD()
        self._reader.start()

    def add(self, folder: Path) -> bool | None:
        from watchdog.observers.inotify_c import CallbackId

        new_id = CallbackId(next(self._ids))
        try:
            wd = self._reader.add_callback(os.fsencode(folder), self._mask, self, new_id)
        except (FileNotFoundError, NotADirectoryError):
            self.remove(folder)
            return None
        with self._lock:
            old = self._watches.pop(folder, None)
            if wd != -1:  # no permission
                self._watches[folder] = (wd, new_id)
                self._folders[wd] = folder
        if old is not None:
            self._drop(*old, is_replaced=old[0] == wd)
        if wd == -1:
            self._drop(wd, new_id)
            return None
        return old is None or old[0] != wd

    def remove(self, folder: Path) -> None:
        with self._lock:
            old = self._watches.pop(folder, None)
        if old is not None:
            self._drop(*old)

    def lives(self) -> bool:
        return self._reader.is_alive()

    def close(self) -> None:
        self._reader.stop()
        self._reader.join()

    def _drop(self, wd: WatchDescriptor, old_id: int, *, is_replaced: bool = False) -> None:
        from watchdog.observers.inotify_c import CallbackId

        if not is_replaced:
            with self._lock:
                self._folders.pop(wd, None)
        with contextlib.suppress(OSError):  # its folder is gone, and the watch with it
            self._reader.remove_callbacks([(wd, CallbackId(old_id))])

    # What watchdog's reader calls, in its thread.

    def on_event(self, event: InotifyEvent) -> None:
        name = os.fsdecode(event.name)
        folder = self._folders.get(event.wd)
        if folder is not None and not name.startswith("."):
            self._on_change(folder, name)

    def on_watch_deleted(self, wd: WatchDescriptor) -> None:
        with self._lock:
            folder = self._folders.pop(wd, None)
            if folder is not None and self._watches.get(folder, (None, 0))[0] == wd:
                del self._watches[folder]
        if folder is not None:
            self._on_change(folder, "")

    def on_queue_overflow(self) -> None:
        self._on_change(None, "")


class PollingEvents:
    """One thread that takes a picture of each folder every `interval_s`, or as often as it can afford."""

    def __init__(self, on_change: OnChange, interval_s: float = POLL_S) -> None:
        self._on_change = on_change
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._pictures: dict[Path, Picture] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-poll", daemon=True)
        self._thread.start()

    def add(self, folder: Path) -> bool | None:
        if folder in self._pictures:  # what changed since the last look at it must still be reported
            return False if folder.is_dir() else None
        picture = picture_of(folder)
        with self._lock:
            self._pictures[folder] = picture
        return None if picture is None else True

    def remove(self, folder: Path) -> None:
        with self._lock:
            self._pictures.pop(folder, None)

    def lives(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._interval_s
        while not self._stopped.wait(pause_s):
            start = time.thread_time()
            self._look()
            pause_s = max(self._interval_s, POLL_SHARE * (time.thread_time() - start))

    def _look(self) -> None:
        with self._lock:
            known = list(self._pictures.items())
        for folder, before in known:
            now = picture_of(folder)
            if now == before or self._stopped.is_set():
                continue
            with self._lock:
                if folder not in self._pictures:
                    continue
                self._pictures[folder] = now
            changed = {name for name, *_ in (before or frozenset()) ^ (now or frozenset())}
            for name in changed or {""}:
                self._on_change(folder, name)


def picture_of(folder: Path) -> Picture:
    """What there is in `folder` now. Of a folder in it only whether it is the same one."""
    seen = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    seen.append((entry.name, entry.inode(), 0, 0))
                    continue
                with contextlib.suppress(OSError):  # deleted meanwhile
                    stat = entry.stat(follow_symlinks=False)
                    seen.append((entry.name, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    except OSError:
        return None
    return frozenset(seen)
