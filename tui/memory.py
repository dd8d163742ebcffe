"""State that `prl-tui` keeps between two starts: order, filter and pinned runs of each workspace, and the theme.

It is one JSON file below `$XDG_STATE_HOME`, never inside a workspace. A file that is missing, damaged or of another
version is ignored. Without a path nothing is read or written.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import msgspec

from prime_rl.contract.files import UNDECODABLE, write_atomic

VERSION = 1
MAX_WORKSPACES = 50
MAX_BYTES = 1_000_000


class WorkspaceMemory(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of one workspace. `sort` is a column's key."""

    sort: str = "slot"
    descending: bool = False
    filter: str = ""
    pins: list[str] = []


class _File(msgspec.Struct, kw_only=True):
    version: int = VERSION
    theme: str = ""
    workspaces: dict[str, WorkspaceMemory] = {}


def default_path() -> Path:
    """`$XDG_STATE_HOME/prl-tui/state.json`, with the standard's default for the variable."""
    base = os.environ.get("XDG_STATE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "prl-tui" / "state.json"


class Memory:
    """The memory for one workspace. Change `workspace` and `theme`, then `save`."""

    def __init__(self, output_dir: Path, path: Path | None = None) -> None:
        self._key = str(output_dir.resolve())
        # A workspace is changed by its owners' processes and by actions, never by looking at it.
        self._path = path if path is not None and not path.resolve().is_relative_to(self._key) else None
        self._saving = threading.Lock()
        file = self._read()
        self.theme = file.theme
        self.workspace = file.workspaces.get(self._key, WorkspaceMemory())

    def save(self) -> None:
        """Write the file. Another process may have written since, so only this workspace's entry is replaced.

        From any thread: what is saved last is what stands there.
        """
        if self._path is None:
            return
        with self._saving:
            file = self._read()
            file.theme = self.theme
            file.workspaces.pop(self._key, None)
            file.workspaces[self._key] = self.workspace
            for key in list(file.workspaces)[:-MAX_WORKSPACES]:
                del file.workspaces[key]
            with contextlib.suppress(OSError):  # a read-only home must not end the app
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._path, msgspec.json.encode(file))

    def _read(self) -> _File:
        if self._path is None:
            return _File()
        try:
            with self._path.open("rb") as source:
                file = msgspec.json.decode(source.read(MAX_BYTES), type=_File)
        except (OSError, *UNDECODABLE):
            return _File()
        return file if file.version == VERSION else _File()
