"""API keys: from an environment variable, or from a file that only its owner may read. Nowhere else, and never shown.

The variable `PRL_API_KEY` holds the key itself, `PRL_API_KEY_FILE` names a file with the key in it; so for every other
name that a config gives. Neither an error nor a config ever has the key in it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping

FILE_SUFFIX = "_FILE"
MAX_KEY_BYTES = 4096
# What may stand in an HTTP header.
_KEY = re.compile(r"[\x21-\x7e]+")


class SecretError(RuntimeError):
    """A key that cannot be used: one line, without the key."""


def names_of(variable: str) -> list[str]:
    """The environment variables that lead to the key; what must not be seen by code that is not ours."""
    return [variable, variable + FILE_SUFFIX]


def read_secret(variable: str, environ: Mapping[str, str]) -> str | None:
    """The key of `variable`, or None when neither it nor its file is named. The variable itself stands over the file.

    Raises SecretError for a file that others may read, that is not there, or that holds no key.
    """
    if key := environ.get(variable):
        return _checked(key, variable)
    name = environ.get(variable + FILE_SUFFIX)
    return _checked(_read(name, variable + FILE_SUFFIX), name) if name else None


def _read(name: str, variable: str) -> str:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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
