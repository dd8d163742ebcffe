"""The file system of a folder, from the mount table, and whether inotify reports what other machines write.

Reads `/proc/self/mountinfo` and nothing else; without it events are trusted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

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
        text = table.read_text(errors="surrogateescape")
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
