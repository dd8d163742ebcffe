"""What the daemon `alerts` reports, what people have said about it, and the warnings of `prl doctor`. Clean text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.contract.layout import OutputDir
from prime_rl.utils.text import CleanText, one_line

if TYPE_CHECKING:
    from daemons.quiet import Silence


@dataclass(frozen=True)
class Alert:
    """One open incident.

    Attributes:
        name: KIND:SUBJECT, as it is acknowledged and muted; `subject` is a run, a daemon, a node or "disk".
        since: Unix seconds.
        note: who acknowledged or muted it, and why; "" when no person has.
    """

    name: CleanText
    subject: CleanText
    text: CleanText
    since: float
    note: CleanText


def read_alerts(output: OutputDir, now: float) -> list[Alert]:
    """[] in a workspace without alerts, at the cost of one look for a file."""
    if not output.alerts_open.exists():
        return []
    from daemons import quiet
    from daemons.alerts.incident_file import read_open
    from daemons.alerts.targets import sentence

    silences = quiet.read_silences(output, now)
    found = []
    for incident in read_open(output).values():
        said = quiet.acknowledgement(incident, silences), quiet.muting(incident, silences)
        name, subject = one_line(quiet.name_of(incident)), one_line(incident.subject)
        found.append(Alert(name, subject, one_line(sentence(incident)), incident.since, _note(filter(None, said))))
    return found


def _note(said: Iterable[Silence]) -> CleanText:
    reasons = ((each, f": {each.reason}" if each.reason else "") for each in said)
    return one_line("; ".join(f"{each.action} by {each.who}{reason}" for each, reason in reasons))


@dataclass(frozen=True)
class Finding:
    """One line: what is wrong and what to do. `is_broken`: the workspace will not start."""

    text: CleanText
    is_broken: bool


def find(output_dir: Path) -> Sequence[Finding]:
    """The broken first. Takes tenths of a second."""
    from daemons.doctor import examine

    checks = [each for each in examine(output_dir, say=lambda words: None, import_libraries=False) if each.advice]
    checks.sort(key=lambda each: each.level != "broken")
    return [Finding(one_line(f"{each.name}: {each.message}: {each.advice}"), each.level == "broken") for each in checks]
