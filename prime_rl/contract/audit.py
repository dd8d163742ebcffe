"""`logs/audit.jsonl`: what was done to which run, by a person or by a daemon, when and why. One line per action."""

from __future__ import annotations

import json
import logging
import time

from prime_rl.contract.files import append_line
from prime_rl.contract.layout import OutputDir, RunDir

logger = logging.getLogger(__name__)


def append(output: OutputDir, who: str, action: str, run_id: str | None, *, reason: str = "", detail: str = "") -> None:
    """Append one line after the action was done: `reason` is why, `detail` what exactly was done. Raises OSError."""
    line = {"time": time.time(), "who": who, "action": action, "run_id": run_id, "reason": reason, "detail": detail}
    append_line(output.audit, json.dumps(line))


def note(run: RunDir, who: str, action: str, reason: str) -> None:
    """`append` for a daemon, which goes on when the line cannot be written."""
    try:
        append(OutputDir(run.path.parent), who, action, run.run_id, reason=reason)
    except OSError as error:
        logger.warning("%s: %s was done, but is not in the audit log: %s", run.run_id, action, error)
