"""`logs/audit.jsonl`: who did what to which run, when and why. One line per action, appended after it was done."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time

from daemons.errors import ActionError
from prime_rl.contract.files import append_line
from prime_rl.contract.layout import OutputDir


def record(output: OutputDir, action: str, run_id: str | None, *, reason: str = "", detail: str = "") -> None:
    """Append one line. `reason` is the person's own, `detail` is what exactly was done.

    Raises ActionError when the line cannot be written; the action itself is done by then.
    """
    line = {"time": time.time(), "who": who(), "action": action, "run_id": run_id, "reason": reason, "detail": detail}
    try:
        append_line(output.audit, json.dumps(line))
    except OSError as error:
        raise ActionError(
            f"{action} {run_id or ''} succeeded, but could not be recorded in {output.audit}: {error.strerror}"
        ) from error


def who() -> str:
    """The person who acts, as `user@host`."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
