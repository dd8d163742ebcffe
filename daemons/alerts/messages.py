"""What an alert says. Pure."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from daemons.alerts.incident_file import OpenIncident

JSON_VERSION = 1
_WORDS = {
    "run_failed": "failed",
    "run_invalid": "has an invalid config",
    "run_evicted": "was evicted",
    "run_not_finite": "was evicted for values that are not finite",
    "run_stalled": "is stalled",
    "reward_collapsed": "lost its reward",
    "daemon_crashed": "crashed",
    "daemon_stalled": "is stalled",
    "node_lost": "is lost",
    "disk_low": "is nearly full",
    "test": "is a test",
}


def sentence(incident: OpenIncident) -> str:
    """The line that people read: "run_a was evicted: its loss is not finite"."""
    return f"{incident.subject} {_WORDS.get(incident.kind, incident.kind)}: {incident.text}"


def message(
    workspace: Path, opened: Sequence[OpenIncident], over: Sequence[OpenIncident], now: float
) -> dict[str, Any]:
    """One message for all that has changed. `state` is open or over; `since` and `at` are Unix seconds."""
    changes = [*(("open", each) for each in opened), *(("over", each) for each in over)]
    return {
        "version": JSON_VERSION,
        "workspace": str(workspace),
        "host": socket.gethostname(),
        "at": now,
        "text": "\n".join(("over: " if state == "over" else "") + sentence(each) for state, each in changes),
        "alerts": [
            {"kind": each.kind, "subject": each.subject, "state": state, "text": each.text, "since": each.since}
            for state, each in changes
        ],
    }
