"""What `prl-tui` remembers between two starts: order, filter and pinned runs of each house, and the theme.

It lies in one JSON file below `$XDG_STATE_HOME`, never inside a house. A file that is missing, damaged or of another
version is no memory, and never an error. Without a path nothing is read or written.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from prime_rl.contract.files import write_atomic

VERSION = 1
MAX_HOUSES = 50
MAX_BYTES = 1_000_000


class HouseMemory(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of one house. `sort` is a column's key."""

    sort: str = "slot"
    descending: bool = False
    filter: str = ""
    pins: list[str] = []


class _File(msgspec.Struct, kw_only=True):
    version: int = VERSION
    theme: str = ""
    houses: dict[str, HouseMemory] = {}


def default_path() -> Path:
    """`$XDG_STATE_HOME/prl-tui/state.json`, with the standard's default for the variable."""
    base = os.environ.get("XDG_STATE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "prl-tui" / "state.json"


class Memory:
    """The memory for one house. Change `house` and `theme`, then `save`."""

    def __init__(self, output_dir: Path, path: Path | None = None) -> None:
        self._key = str(output_dir.resolve())
        # A house is changed by its owners' processes and by actions, never by looking at it.
        self._path = path if path is not None and not path.resolve().is_relative_to(self._key) else None
        file = self._read()
        self.theme = file.theme
        self.house = file.houses.get(self._key, HouseMemory())

    def save(self) -> None:
        """Write it down. Others may have written since, so only our own part is replaced."""
        if self._path is None:
            return
        file = self._read()
        file.theme = self.theme
        file.houses.pop(self._key, None)
        file.houses[self._key] = self.house
        for key in list(file.houses)[:-MAX_HOUSES]:
            del file.houses[key]
        with contextlib.suppress(OSError):  # a home that cannot be written is no reason to fail
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, msgspec.json.encode(file))

    def _read(self) -> _File:
        if self._path is None:
            return _File()
        try:
            with self._path.open("rb") as source:
                file = msgspec.json.decode(source.read(MAX_BYTES), type=_File)
        except (OSError, msgspec.MsgspecError, RecursionError):
            return _File()
        return file if file.version == VERSION else _File()
