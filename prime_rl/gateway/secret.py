"""The secret of a workspace, of which all keys of the gateway are made (`keys`): a file for its owner only."""

from __future__ import annotations

import contextlib
import os
import secrets

from prime_rl.contract.files import closing, open_file, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.secrets import MAX_KEY_BYTES, SecretError

MIN_SECRET_BYTES = 32


def workspace_secret(output: OutputDir) -> bytes:
    """The workspace's secret, made now when there is none. Raises SecretError when others may read it, and OSError."""
    path = output.gateway_secret
    if not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):  # another process was quicker
            write_atomic(path, new_secret(), mode=0o600, exclusive=True)
    with closing(open_file(path)) as fd:
        mode, secret = os.fstat(fd).st_mode & 0o777, os.read(fd, MAX_KEY_BYTES)
    if mode & 0o077:
        raise SecretError(f"{path} is readable by others (mode {mode:04o}): delete it, and a new one is made")
    if len(secret) < MIN_SECRET_BYTES:
        raise SecretError(f"{path} has no secret in it: delete it, and a new one is made")
    return secret


def new_secret() -> bytes:
    """A secret that is good for one process, or to be saved."""
    return secrets.token_urlsafe(MIN_SECRET_BYTES).encode()
