"""Ids of sessions, the keys of sessions and runs, and the secret of a workspace of which these are made.

A key follows from the secret and what it is for, so none is stored and no restart loses one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import secrets

from prime_rl.contract.files import closing, open_file, write_atomic
from prime_rl.contract.layout import LayoutError, OutputDir, check_run_id
from prime_rl.utils.secrets import MAX_KEY_BYTES, SecretError

MIN_SECRET_BYTES = 32
_SESSION = re.compile(r"(.+)\.[A-Za-z0-9]{8,64}")


def run_of(session: str) -> str | None:
    """The run of the session with that id; None for a text that is not the id of a session."""
    match = _SESSION.fullmatch(session)
    try:
        return check_run_id(match[1]) if match else None
    except LayoutError:
        return None


def session_key(secret: bytes, session: str) -> str:
    """The key of one session."""
    return _derived(secret, f"session:{session}")


def run_key(secret: bytes, run_id: str) -> str:
    """The key of a run: it opens sessions of that run, and is good for all of them."""
    return _derived(secret, f"run:{run_id}")


def _derived(secret: bytes, purpose: str) -> str:
    digest = hmac.digest(secret, purpose.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


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
