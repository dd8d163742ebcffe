"""Ids of sessions, and the keys of sessions and runs.

A key follows from the secret of the workspace and what it is for, so none is stored and no restart loses one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re

from prime_rl.contract.layout import LayoutError, check_run_id

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
