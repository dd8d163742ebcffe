"""People's actions in the audit log; daemons write theirs by `prime_rl.contract.audit`."""

from __future__ import annotations

import getpass
import os
import socket

from daemons.errors import ActionError
from prime_rl.contract import audit
from prime_rl.contract.layout import OutputDir


def record(
    output: OutputDir,
    action: str,
    run_id: str | None,
    *,
    reason: str = "",
    detail: str = "",
    actor: str | None = None,
) -> None:
    """Append one line. `reason` is the person's own, `detail` is what exactly was done; `actor`: default the person.

    Raises ActionError when the line cannot be written; the action itself is done by then.
    """
    try:
        audit.append(output, actor or who(), action, run_id, reason=reason, detail=detail)
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
