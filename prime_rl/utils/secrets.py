"""API keys: from an environment variable, or from a file that only its owner may read. Nowhere else, and never shown.

The variable `PRL_API_KEY` holds the key itself, `PRL_API_KEY_FILE` names a file with the key in it; so for every other
name that a config gives. Neither an error nor a config ever has the key in it. A process that has a key is sealed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from typing import IO

FILE_SUFFIX = "_FILE"
DEFAULT_VARIABLE = "PRL_API_KEY"
# For the daemon `monitors` alone.
WANDB_VARIABLE = "WANDB_API_KEY"
_FD_FOLDER = "/dev/fd/"
MAX_KEY_BYTES = 4096
# What an HTTP header may contain.
_KEY = re.compile(r"[\x21-\x7e]+")
# A sealed process writes the stacks of its threads to standard error when it gets this.
STACKS_SIGNAL = signal.SIGUSR2
_PR_SET_DUMPABLE = 4


class SecretError(RuntimeError):
    """A key that cannot be used: one line, without the key."""


def names_of(variable: str) -> list[str]:
    """The environment variables that lead to the key; what must not be seen by code that is not ours."""
    return [variable, variable + FILE_SUFFIX]


@contextlib.contextmanager
def handed_over(environ: Mapping[str, str], needed: Collection[str]) -> Iterator[tuple[dict[str, str], list[int]]]:
    """The environment for a child process, and the file descriptors to pass on to it.

    The child gets the keys of the variables in `needed`, each in a file without a name that `VARIABLE_FILE` leads to,
    so that no key is in the environment of a process. It gets no other keys of `environ`.
    """
    child = dict(environ)
    with contextlib.ExitStack() as closing:
        fds = []
        for variable in {*needed, *_handed_keys(environ), DEFAULT_VARIABLE, WANDB_VARIABLE}:
            key, name = child.pop(variable, None), child.pop(variable + FILE_SUFFIX, None)
            if variable not in needed:
                continue
            if key:
                file = closing.enter_context(nameless_file())
                file.write(key.encode())
                file.flush()
                name = f"{_FD_FOLDER}{file.fileno()}"
            if name:
                child[variable + FILE_SUFFIX] = name
                fds += [int(name.removeprefix(_FD_FOLDER))] if name.startswith(_FD_FOLDER) else []
        yield child, fds


def _handed_keys(environ: Mapping[str, str]) -> list[str]:
    """The variables whose keys this process was handed by `handed_over`."""
    return [
        name.removesuffix(FILE_SUFFIX)
        for name, value in environ.items()
        if name.endswith(FILE_SUFFIX) and value.startswith(_FD_FOLDER)
    ]


def seal() -> None:
    """Let no other process of this account read this one's memory, environment and open files. Linux only.

    No debugger can look at it either, so that it writes its stacks by itself: see STACKS_SIGNAL.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0)
        faulthandler.register(STACKS_SIGNAL, file=2)


def seal_if_handed() -> None:
    """Seal a process that was handed a key: when its first module is imported, as it holds the key from its start."""
    if _handed_keys(os.environ):
        seal()


def close_handed() -> None:
    """Close the files without a name that this process was handed, once it has read all its keys."""
    for variable in _handed_keys(os.environ):
        os.close(int(os.environ.pop(variable + FILE_SUFFIX).removeprefix(_FD_FOLDER)))


def nameless_file() -> IO[bytes]:
    """A file for its owner only, in memory where the system has such files."""
    if not hasattr(os, "memfd_create"):
        return tempfile.TemporaryFile()
    fd = os.memfd_create("key", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return os.fdopen(fd, "wb", buffering=0)


def read_secret(variable: str, environ: Mapping[str, str]) -> str | None:
    """The key of `variable`, or None when neither it nor its file is named. The variable itself stands over the file.

    This process is sealed before it reads one. Raises SecretError for a file that others may read, that is not there,
    or that holds no key.
    """
    key, name = environ.get(variable), environ.get(variable + FILE_SUFFIX)
    if not key and not name:
        return None
    seal()
    return _checked(key, variable) if key else _checked(_read(name or "", variable + FILE_SUFFIX), name or "")


def _read(name: str, variable: str) -> str:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise SecretError(f"{variable}: file not found: {name}") from error
    except OSError as error:
        raise SecretError(f"{variable}: {name} cannot be read: {error.strerror}") from error
    try:
        info = os.fstat(fd)  # of what was opened, so nothing can be swapped in between
        if not stat.S_ISREG(info.st_mode):
            raise SecretError(f"{variable}: {name} is not a file")
        if info.st_mode & 0o077:
            mode = stat.S_IMODE(info.st_mode)
            raise SecretError(f"{variable}: {name} is readable by others (mode {mode:04o}): run chmod 600 {name}")
        return os.read(fd, MAX_KEY_BYTES + 1).decode(errors="replace").strip()
    finally:
        os.close(fd)


def _checked(key: str, where: str) -> str:
    key = key.strip()
    if not _KEY.fullmatch(key) or len(key) > MAX_KEY_BYTES:
        raise SecretError(f"{where} has no valid key: must be one word of visible ASCII characters")
    return key
