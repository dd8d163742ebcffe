"""The one file watcher: the system's events where they come, polling where they do not, a slow rescan always.

Events are hints. `Watcher.wait` returns when something may have changed or when the rescan is due; the caller then
looks at the disk itself, at the folders that `take_changed` names or at all. So a lost event costs at most `rescan_s`,
never a run. The trainer watches the output directory and the `control/` folders, the others a few folders each; step
folders are scanned by the caller.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from prime_rl.utils.mounts import MOUNT_TABLE, events_come
from prime_rl.utils.watch_backends import POLL_S, Backend, OnChange, PollingEvents, native_events

logger = logging.getLogger(__name__)

ObserverKind = Literal["auto", "native", "polling"]
_CURES = {
    errno.ENOSPC: "sudo sysctl fs.inotify.max_user_watches=1048576",
    errno.EMFILE: "sudo sysctl fs.inotify.max_user_instances=1024, or a higher ulimit -n",
}


class Watcher:
    """Watch a changing set of folders (not recursive). One thread calls it; any may call `wake`.

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
        make_native: Callable[[OnChange], Backend] = native_events,
    ) -> None:
        self.rescan_s = rescan_s
        self._kind = kind
        self._poll_s = poll_s
        self._mount_table = mount_table
        self._make_native = make_native
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self._watched: set[Path] = set()
        self._changed: set[Path] = set()
        self._all_changed = False
        self._listed: list[Path] = []
        self._parents: set[Path] = set()
        # Names that came or went in a watched folder: a folder of that name, or in it, may be another one now.
        self._suspects: set[Path] = set()
        self._verified_at = time.monotonic()
        self.watch(folders)

    @property
    def is_polling(self) -> bool:
        return isinstance(self._backend, PollingEvents)

    @property
    def folders(self) -> frozenset[Path]:
        return frozenset(self._watched)

    def watch(self, folders: Iterable[Path]) -> None:
        """Watch exactly `folders` from now on; those that do not exist (yet) are left out until the next call."""
        listed = list(folders)
        self._check_backend()
        with self._lock:
            suspects, self._suspects = self._suspects, set()
        concerned = any(path in self._watched or path in self._parents for path in suspects)
        is_due = time.monotonic() - self._verified_at >= self.rescan_s
        # Thousands of folders, the same ones as at the last call: the rule while runs write into their folders.
        if listed == self._listed and len(listed) == len(self._watched) and not (concerned or is_due):
            return
        wanted, self._listed = set(listed), listed
        self._parents = {folder.parent for folder in wanted}
        for folder in self._watched - wanted:
            self._watched.discard(folder)
            if self._backend is not None:
                self._backend.remove(folder)
        if is_due:  # folders may have been replaced without an event
            self._verified_at, unsure = time.monotonic(), wanted
        else:
            unsure = {folder for folder in wanted if folder in suspects or folder.parent in suspects}
        for folder in sorted((wanted - self._watched) | unsure):
            if self._add(folder):
                self._hint(folder)  # what landed before the watch was set is found by a look

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
        if self._backend is not None:
            self._backend.close()
        self._backend = None
        self._watched.clear()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _on_change(self, folder: Path | None, name: str) -> None:
        """From a thread of the backend."""
        if folder is not None:
            with self._lock:
                self._suspects.add(folder / name if name else folder)
        self._hint(folder)

    def _hint(self, folder: Path | None) -> None:
        with self._lock:
            if folder is None:
                self._all_changed = True
            else:
                self._changed.add(folder)
        self._event.set()

    def _add(self, folder: Path) -> bool:
        """Whether `folder` is watched from now on, and was not before, or another folder was in its place."""
        backend = self._backend or self._start(folder)
        try:
            added = backend.add(folder)
        except OSError as error:  # ENOSPC, EMFILE: no more watches
            self._fall_back(error)
            return folder in self._watched or self._add(folder)
        is_new = added is True or (added is False and folder not in self._watched)
        (self._watched.discard if added is None else self._watched.add)(folder)
        return is_new

    def _start(self, folder: Path) -> Backend:
        if self._kind == "auto" and not events_come(folder, self._mount_table):
            self._kind = "polling"
        try:
            self._backend = self._make_native(self._on_change) if self._kind != "polling" else self._polling()
        except OSError as error:
            self._fall_back(error)
        assert self._backend is not None
        return self._backend

    def _check_backend(self) -> None:
        if self._backend is not None and not self._backend.lives():
            self._fall_back(OSError("the thread that reads events has ended"))

    def _fall_back(self, error: OSError) -> None:
        """From events to polling, for good."""
        cure = _CURES.get(error.errno or 0)
        logger.warning(
            "no more file events (%s): polling the folders every %g s from now on%s",
            error,
            self._poll_s,
            f"; to restore events: {cure}, then restart" if cure else "",
        )
        folders = list(self._watched)
        self.close()
        self._kind = "polling"
        self._backend = self._polling()
        for folder in folders:
            self._add(folder)
        self._on_change(None, "")

    def _polling(self) -> PollingEvents:
        return PollingEvents(self._on_change, self._poll_s)
