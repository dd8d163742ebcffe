"""Attackers: processes of an ordinary account, and what they try to read of others."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# "nobody" on every Linux.
OTHER_UID = 65534
CANARY = "sk-canary-that-nobody-may-see"
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 47, 2
_CAP_DAC_READ_SEARCH = 2
# All that a process of an account may do to read what another one has: `loot(pid)` returns the ways that found a key.
LOOT = f"""
import ctypes, os, re
WORD = {CANARY[:9]!r} + {CANARY[9:]!r}

def _memory(pid):
    with open(f"/proc/{{pid}}/maps") as maps, open(f"/proc/{{pid}}/mem", "rb", 0) as memory:
        for start, end in re.findall(r"^(\\w+)-(\\w+) rw", maps.read(), re.M):
            memory.seek(int(start, 16))
            try:
                if WORD.encode() in memory.read(int(end, 16) - int(start, 16)):
                    return WORD
            except OSError:
                pass
    return ""

def _open_files(pid):
    found = ""
    for fd in os.listdir(f"/proc/{{pid}}/fd"):
        try:
            file = os.open(f"/proc/{{pid}}/fd/{{fd}}", os.O_RDONLY | os.O_NONBLOCK)
            found += os.read(file, 9999).decode(errors="replace")
        except OSError:
            pass
    return found

def _stolen_files(pid):
    libc, found = ctypes.CDLL(None), ""
    pidfd = os.pidfd_open(pid)
    for number in range(64):
        fd = libc.syscall(438, pidfd, number, 0)  # pidfd_getfd
        if fd >= 0:
            try:
                found += os.pread(fd, 9999, 0).decode(errors="replace")
            except OSError:
                pass
            os.close(fd)
    return found

def _traced(pid):
    seized = ctypes.CDLL(None).ptrace(0x4206, pid, None, None) == 0
    return WORD if seized else ""

def _environment(pid):
    with open(f"/proc/{{pid}}/environ") as file:
        return file.read()

WAYS = {{"environment": _environment, "open files": _open_files, "memory": _memory, "stolen files": _stolen_files,
        "ptrace": _traced}}

def loot(pid):
    found = []
    for way, read in WAYS.items():
        try:
            if WORD in read(pid):
                found.append(way)
        except OSError:
            pass
    return found
"""


def _become_ordinary() -> None:
    """Runs before the program: another uid, which may read files (Python may be in a home of root) and no more."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(OTHER_UID)
    os.setuid(OTHER_UID)
    bits = 1 << _CAP_DAC_READ_SEARCH
    libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", bits, bits, bits, 0, 0, 0))
    if libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0):
        raise OSError("no ambient capabilities")


def ordinary(code: str, *args: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start Python code as an ordinary account: this one, or another where this one is root and may look at all."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        preexec_fn=_become_ordinary if os.getuid() == 0 else None,  # noqa: PLW1509 (no thread runs in these tests)
        **options,
    )
