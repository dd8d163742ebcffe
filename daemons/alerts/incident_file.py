"""The incidents that are open, on disk: for a new start of the daemon, and for `prl alerts`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from prime_rl.contract.files import read_file, write_atomic
from prime_rl.contract.layout import OutputDir

MAX_BYTES = 10_000_000


class OpenIncident(msgspec.Struct, frozen=True):
    """`since` in Unix seconds: when it was first seen. `quiet`: it was silenced then, and is not reported yet."""

    kind: str
    subject: str
    text: str
    since: float
    quiet: bool = False

    @property
    def key(self) -> str:
        """The kind and the subject: the same as `Incident.key`, by which both are matched."""
        return f"{self.kind} {self.subject}"


class _File(msgspec.Struct):
    version: int
    open: list[OpenIncident]


def read_open(output: OutputDir) -> dict[str, OpenIncident]:
    """By key; {} when there is no file, or a damaged one."""
    try:
        found = msgspec.json.decode(read_file(output.alerts_open, limit=MAX_BYTES), type=_File)
    except (OSError, msgspec.MsgspecError):
        return {}
    return {each.key: each for each in found.open}


def write_open(output: OutputDir, incidents: Mapping[str, OpenIncident]) -> None:
    """Replace the incidents in the file. Raises OSError."""
    output.alerts_open.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output.alerts_open, msgspec.json.encode(_File(1, list(incidents.values()))))
