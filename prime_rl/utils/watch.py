"""The one file watcher: the system's events where they come, polling where they do not, a slow rescan always.

Events are hints. `Watcher.wait` returns when something may have changed or when the rescan is due; the caller then
looks at the disk itself, at the folders that `take_changed` names or at all. So a lost event costs at most `rescan_s`,
never a run. The trainer watches the output directory and the `control/` folders, the others a few folders each; step
folders are scanned by the caller.

Hints come from inotify, through watchdog, or from a thread that looks again and again: one thread for all folders,
which are not watched recursively. Whether inotify reports what other machines write depends on the file system of a
folder (`/proc/self/mountinfo`; without it events are trusted). Temporary and hidden files (a leading dot) are left out:
what is renamed into place is reported under its final name.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from prime_rl.contract.layout import RUN_FOLDERS, RUN_PREFIX

MOUNT_TABLE = Path("/proc/self/mountinfo")
# Shared or served by a process: inotify reports only writes of this machine.
_NO_EVENTS = (
    "nfs",
    "cifs",
    "smb",
    "ncpfs",
    "afs",
    "coda",
    "9p",
    "virtiofs",
    "vboxsf",
    "vmhgfs",
    "prl_fs",
    "fuse",
    "davfs",
    "lustre",
    "ceph",
    "gpfs",
    "beegfs",
    "glusterfs",
    "orangefs",
    "pvfs2",
    "panfs",
    "wekafs",
    "gfs2",
    "ocfs2",
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


def events_come(folder: Path, table: Path = MOUNT_TABLE) -> bool:
    """True when the file system of `folder` delivers events for writes of other processes and machines."""
    kind = file_system_type(folder, table)
    return kind is None or not kind.startswith(_NO_EVENTS)


class Mount(NamedTuple):
    """One mounted file system: where, its type (e.g. "ext4"), and its device or what the table has for it."""

    point: Path
    kind: str
    source: str


def file_system_type(folder: Path, table: Path = MOUNT_TABLE) -> str | None:
    """Type of the file system that holds `folder` (e.g. "ext4"); None when not in the table."""
    mount = mount_of(folder, table)
    return mount.kind if mount else None


def mount_of(folder: Path, table: Path = MOUNT_TABLE) -> Mount | None:
    """The mounted file system that holds `folder`; None when not in the table."""
    try:
        text = table.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    target = folder.resolve()
    found: Mount | None = None
    for mount in parse_mounts(text):
        # Of several mounts over one place the last one is what is seen.
        depth = len(found.point.parts) if found else 0
        if target.is_relative_to(mount.point) and len(mount.point.parts) >= depth:
            found = mount
    return found


def parse_mounts(text: str) -> list[Mount]:
    """The mount of every whole line, in the order of the table."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, source, *_) = before.split(" "), [*after.split(" "), "", ""]
        if len(fields) >= 6 and kind:
            mounts.append(Mount(Path(_unescape(fields[4])), kind, _unescape(source)))
    return mounts


def _unescape(text: str) -> str:
    """Space, tab, newline and backslash are written in octal."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


if TYPE_CHECKING:
    from watchdog.observers.inotify_c import InotifyEvent, WatchDescriptor

logger = logging.getLogger(__name__)

ObserverKind = Literal["auto", "native", "polling"]
# Called from the thread of a backend: the folder with a hint (None: any may have changed), and one that may be another
# folder now: that one or one in it.
OnChange = Callable[[Path | None, Path | None], None]
POLL_S = 1.0
# A poll may take at most this share of one core, whatever the number of folders and the speed of the file system.
POLL_SHARE = 20
# A folder with more events than this in a second is not watched for so many seconds; then a hint about it comes.
MAX_EVENTS, STORM_S = 5_000, 2.0
# What a folder looks like: names with their inode and, for files, time of change and size.
Picture = frozenset[tuple[str, int, int, int]]
_CURES = {
    errno.ENOSPC: "sudo sysctl fs.inotify.max_user_watches=1048576",
    errno.EMFILE: "sudo sysctl fs.inotify.max_user_instances=1024, or a higher ulimit -n",
}
# Of the system; any other error is one folder's.
_LIMITS = frozenset({*_CURES, errno.ENFILE, errno.ENOMEM})

# watchdog may log this for each of many short-lived folders; there is nothing to act on.
warnings.filterwarnings("ignore", message="Callback with id", category=RuntimeWarning)


class Backend(Protocol):
    """A changing set of watched folders."""

    @property
    def folders(self) -> set[Path]:
        """Those that are watched; one that was deleted may still be among them until it is added again."""

    def add(self, folder: Path) -> bool:
        """Watch what is at `folder` now; whether there is something that was not watched before. OSError at a limit."""

    def remove(self, folder: Path) -> None:
        """Watch `folder` no longer."""

    def lives(self) -> bool:
        """True when hints still come."""

    def close(self) -> None:
        """End the thread."""


class NativeEvents:
    """inotify, one watch a folder. OSError where the system has none, or no more of them.

    watchdog's own observer has a thread a folder and holds unpaired renames back for half a second. Here its inotify
    reader is used directly: one thread and one inotify instance for all folders.
    """

    def __init__(self, on_change: OnChange) -> None:
        if sys.platform != "linux":
            raise OSError("this system has no inotify")
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
        # When the present second of a folder began, and its events since; when one that had too many is watched again.
        self._rates: dict[Path, tuple[float, int]] = {}
        self._rests: dict[Path, float] = {}
        self._reader = InotifyFD()
        self._reader.start()

    @property
    def folders(self) -> set[Path]:
        """Those that have a watch."""
        with self._lock:
            return set(self._watches)

    def add(self, folder: Path) -> bool:
        """Watch what is at `folder` now; False when it is watched already, not a readable folder, or has a storm.

        Raises OSError when the system has no more watches.
        """
        from watchdog.observers.inotify_c import CallbackId, Mask
        from watchdog.observers.inotify_c import InotifyConstants as Event

        if time.monotonic() < self._rests.get(folder, 0.0):
            return False
        self._rests.pop(folder, None)
        new_id = CallbackId(next(self._ids))
        # A link to the folder of another run would take its events, as a system's watch has one path.
        is_of_run = folder.name in RUN_FOLDERS and folder.parent.name.startswith(RUN_PREFIX)
        mask = Mask(self._mask | Event.IN_DONT_FOLLOW) if is_of_run else self._mask
        try:
            wd = self._reader.add_callback(os.fsencode(folder), mask, self, new_id)
        except OSError as error:
            if error.errno in _LIMITS:
                raise
            self.remove(folder)
            return False
        with self._lock:
            old = self._watches.pop(folder, None)
            if wd != -1:  # no permission
                self._watches[folder], self._folders[wd] = (wd, new_id), folder
        if old is not None:
            self._drop(folder, *old)
        if wd == -1:
            self._drop(folder, wd, new_id)
        return wd != -1 and (old is None or old[0] != wd)

    def remove(self, folder: Path) -> None:
        """Watch `folder` no longer; one that is not watched is no error."""
        with self._lock:
            old = self._watches.pop(folder, None)
            self._rates.pop(folder, None)
        if old is not None:
            self._drop(folder, *old)

    def lives(self) -> bool:
        """True when the reader's thread runs."""
        return self._reader.is_alive()

    def close(self) -> None:
        """End the reader's thread, and wait for it."""
        self._reader.stop()
        self._reader.join()

    def _drop(self, folder: Path, wd: WatchDescriptor, old_id: int) -> None:
        """End one request for a watch. A folder that was moved keeps its watch, which may be that of its new place."""
        from watchdog.observers.inotify_c import CallbackId

        with self._lock:
            is_watched = self._watches.get(folder, (None, 0))[0] == wd
            if not is_watched and self._folders.get(wd) == folder:
                del self._folders[wd]
        with contextlib.suppress(OSError):  # its folder is gone, and the watch with it
            self._reader.remove_callbacks([(wd, CallbackId(old_id))])

    # What watchdog's reader calls, in its thread.

    def on_event(self, event: InotifyEvent) -> None:
        """Report the folder of a change, and where a folder itself changed also its path; hidden names are left out."""
        name, folder = os.fsdecode(event.name), self._folders.get(event.wd)
        if folder is None:
            return
        now = time.monotonic()
        began, num_events = self._rates.get(folder, (now, 0))
        self._rates[folder] = (began, num_events + 1) if now < began + 1.0 else (now, 1)
        if num_events >= MAX_EVENTS:  # whoever writes there would have this thread take the time of all
            self._rests[folder] = now + STORM_S
            self.remove(folder)
            again = threading.Timer(STORM_S, self._on_change, (folder, folder))
            again.daemon = True
            again.start()
        if not name.startswith("."):
            self._on_change(folder, folder / name if event.is_directory or not name else None)

    def on_watch_deleted(self, wd: WatchDescriptor) -> None:
        """Forget a watch that the system has ended, and report its folder as changed."""
        with self._lock:
            folder = self._folders.pop(wd, None)
            if folder is not None and self._watches.get(folder, (None, 0))[0] == wd:
                del self._watches[folder]
        if folder is not None:
            self._on_change(folder, folder)

    def on_queue_overflow(self) -> None:
        """Report that events were lost, so any folder may have changed."""
        self._on_change(None, None)


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

    @property
    def folders(self) -> set[Path]:
        """Those that the thread looks at."""
        with self._lock:
            return set(self._pictures)

    def add(self, folder: Path) -> bool:
        """Look at `folder` from now on; False when that is done already or it cannot be listed."""
        # Of one that is watched, what changed since the last look at it must still be reported.
        picture = None if folder in self.folders else picture_of(folder)
        if picture is not None:
            with self._lock:
                self._pictures[folder] = picture
        return picture is not None

    def remove(self, folder: Path) -> None:
        """Look at `folder` no longer; one that is not watched is no error."""
        with self._lock:
            self._pictures.pop(folder, None)

    def lives(self) -> bool:
        """True when the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._interval_s
        while not self._stopped.wait(pause_s):
            start_s = time.thread_time()
            with self._lock:
                known = list(self._pictures.items())
            for folder, before in known:
                now = picture_of(folder)
                if now == before or self._stopped.is_set():
                    continue
                with self._lock:
                    if self._pictures.pop(folder, None) is None:
                        continue
                    if now is not None:
                        self._pictures[folder] = now
                self._on_change(folder, None)
            pause_s = max(self._interval_s, POLL_SHARE * (time.thread_time() - start_s))


def picture_of(folder: Path) -> Picture | None:
    """A picture of `folder` as it is now, None without it. Of a folder in it only whether it is the same one."""
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


class Watcher:
    """Watch a changing set of folders. One thread calls it; any may call `wake`.

    Args:
        rescan_s: longest time between two looks at the disk, whatever events arrive.
        kind: "native", "polling", or "auto" (by the mount table). Where the system gives no more events both fall back
            to polling, with one warning.
        poll_s: time between two looks of the polling.
        make_native: makes the source of events.
    """

    def __init__(
        self,
        folders: Iterable[Path] = (),
        *,
        rescan_s: float = 5.0,
        kind: ObserverKind = "auto",
        poll_s: float = POLL_S,
        mount_table: Path = MOUNT_TABLE,
        make_native: Callable[[OnChange], Backend] = NativeEvents,
    ) -> None:
        self.rescan_s = rescan_s
        self._kind = kind
        self._poll_s = poll_s
        self._mount_table = mount_table
        self._make_native = make_native
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self._wanted: set[Path] = set()
        self._changed: set[Path] = set()
        self._all_changed = False
        # Folders that may be others now.
        self._suspects: set[Path] = set()
        self._verified_at = time.monotonic()
        self.watch(folders)

    @property
    def is_polling(self) -> bool:
        """True when it polls instead of getting events; False while it watches nothing yet."""
        return isinstance(self._backend, PollingEvents)

    @property
    def folders(self) -> frozenset[Path]:
        """The folders that are watched now."""
        return frozenset(self._backend.folders if self._backend else ())

    def watch(self, folders: Iterable[Path]) -> None:
        """Watch exactly `folders` from now on; those that do not exist (yet) are left out until the next call."""
        wanted = self._wanted = set(folders)
        if not wanted and self._backend is None:
            return
        backend = self._backend or self._start(min(wanted))
        if not backend.lives():
            backend = self._fall_back(OSError("the thread that reads events has ended"))
        with self._lock:
            suspects, self._suspects = self._suspects, set()
        unsure = {each for each in wanted if each in suspects or each.parent in suspects} if suspects else set()
        if time.monotonic() - self._verified_at >= self.rescan_s:  # folders may have been replaced without an event
            self._verified_at, unsure = time.monotonic(), wanted
        watched = backend.folders
        for folder in watched - wanted:
            backend.remove(folder)
        try:
            for folder in sorted((wanted - watched) | unsure):
                if backend.add(folder):
                    self._hint(folder)  # what landed before the watch was set is found by a look
        except OSError as error:
            self._fall_back(error)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a hint, the rescan or `timeout_s`; true when it was a hint. Also returns after `wake`."""
        limit = self.rescan_s if timeout_s is None else min(timeout_s, self.rescan_s)
        hinted = self._event.wait(limit)
        self._event.clear()
        return hinted

    def take_changed(self) -> frozenset[Path] | None:
        """Watched folders with a hint since the last call; None when events were lost and any may have changed."""
        with self._lock:
            changed, self._changed = frozenset(self._changed), set()
            everything, self._all_changed = self._all_changed, False
        return None if everything else changed

    def wake(self) -> None:
        """Make the current or next `wait` return at once (from a signal handler or another thread)."""
        self._event.set()

    def close(self) -> None:
        """End the thread of hints; the next `watch` starts one again."""
        if self._backend is not None:
            self._backend.close()
        self._backend = None

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _hint(self, folder: Path | None, suspect: Path | None = None) -> None:
        with self._lock:
            if suspect is not None:
                self._suspects.add(suspect)
            if folder is None:
                self._all_changed = True
            else:
                self._changed.add(folder)
        self._event.set()

    def _start(self, folder: Path) -> Backend:
        if self._kind == "auto" and not events_come(folder, self._mount_table):
            self._kind = "polling"
        try:
            is_polling = self._kind == "polling"
            self._backend = PollingEvents(self._hint, self._poll_s) if is_polling else self._make_native(self._hint)
        except OSError as error:
            return self._fall_back(error)
        return self._backend

    def _fall_back(self, error: OSError) -> Backend:
        """From events to polling, for good. All folders are watched then, and each may have changed."""
        cure = _CURES.get(error.errno or 0)
        logger.warning(
            "no more file events (%s): polling the folders every %g s from now on%s",
            error,
            self._poll_s,
            f"; to restore events: {cure}, then restart" if cure else "",
        )
        self.close()
        self._kind = "polling"
        self._backend = PollingEvents(self._hint, self._poll_s)
        for folder in self._wanted:
            self._backend.add(folder)
        self._hint(None)
        return self._backend
