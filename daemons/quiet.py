"""Alerts on disk: what people have silenced (an incident is acknowledged, a kind or a subject muted), and what is open.

One small file each in `daemons/alerts/said/`, written by `prl` and `prl-tui`, also with the daemons down. The daemon
`alerts` sends nothing of what is silenced; every list still shows it. Each act is in the audit log. The daemon keeps
the open incidents in one file, for its next start and for `prl alerts`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from daemons.errors import ActionError, WrongUseError, one_line_errors, person, printable, record_act
from daemons.specs import ALERTS
from prime_rl.configs.reports import ALERT_KINDS
from prime_rl.contract.files import read_json, write_atomic
from prime_rl.contract.layout import OutputDir, scan_runs
from prime_rl.utils.text import clean_strings, one_line

NONE_SET = "no alerts in the system file of {}: add [alerts] and run prl up again (docs/alerts.md)"
# The daemon reads all of them every few seconds.
MAX_SILENCES = 1_000
MAX_BYTES = 65_536


class Named(Protocol):
    """An incident, open or just found."""

    @property
    def kind(self) -> str:
        """One of `ALERT_KINDS`."""

    @property
    def subject(self) -> str:
        """The subject of the incident: a run, a daemon, `node RANK` or `disk`."""


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """An acknowledgement or a mute. An empty `kind` or `subject` stands for all of them.

    `at` and `until` are Unix seconds; `until` None: no end.
    """

    action: Literal["acknowledged", "muted"]
    kind: str = ""
    subject: str = ""
    at: float
    until: float | None = None
    who: str = ""
    reason: str = ""
    version: int = 1

    @property
    def name(self) -> str:
        """KIND:SUBJECT, or only the one that is set; `unmute` takes it."""
        return ":".join(filter(None, (self.kind, self.subject)))

    def covers(self, incident: Named) -> bool:
        """True when `incident` is one that this stands for. Does not look at `until`."""
        return self.kind in ("", incident.kind) and self.subject in ("", incident.subject)


def name_of(incident: Named) -> str:
    """The name that `acknowledge` and `mute` take."""
    return f"{incident.kind}:{incident.subject}"


def read_silences(output: OutputDir, now: float) -> list[Silence]:
    """The silences that hold at `now`, the oldest first, with clean text; damaged files are skipped."""
    found = [each for each in map(_read, _files(output)) if each is not None and not _is_past(each, now)]
    return sorted(found, key=lambda each: each.at)


def acknowledgement(incident: Named, silences: Iterable[Silence]) -> Silence | None:
    """The first silence that acknowledges `incident`, or None."""
    return next((each for each in silences if each.action == "acknowledged" and each.covers(incident)), None)


def muting(incident: Named, silences: Iterable[Silence]) -> Silence | None:
    """The first silence that mutes `incident`, or None."""
    return next((each for each in silences if each.action == "muted" and each.covers(incident)), None)


def is_silenced(incident: Named, silences: Sequence[Silence]) -> bool:
    """True when it is not reported when it opens."""
    return acknowledgement(incident, silences) is not None or muting(incident, silences) is not None


def acknowledge(output_dir: Path, name: str, *, reason: str = "") -> list[OpenIncident]:
    """Acknowledge the open incident KIND:SUBJECT, or all open ones of a subject; returns those that were not yet.

    Raises ActionError when there is none.
    """
    output, now = OutputDir(Path(output_dir)), time.time()
    with one_line_errors(f"acknowledging {name}"):
        require_alerts(output)
        matching = [each for each in read_open(output).values() if name in (name_of(each), each.key, each.subject)]
        if not matching:
            raise ActionError(f"{name} is not open in {output.path}: prl alerts lists what is")
        silences = read_silences(output, now)
        new = [each for each in matching if acknowledgement(each, silences) is None]
        for each in new:
            _write(output, _silence("acknowledged", each.kind, each.subject, now, None, reason))
            record_act(output, "acknowledge", _run_id(each.subject), reason=reason, detail=name_of(each))
        return new


def mute(output_dir: Path, what: str, *, for_s: float | None = None, reason: str = "") -> Silence:
    """Send nothing of a KIND, a SUBJECT (a run, a daemon, a node, disk) or KIND:SUBJECT, for `for_s` or until `unmute`.

    Raises ActionError when it is neither.
    """
    output, now = OutputDir(Path(output_dir)), time.time()
    with one_line_errors(f"muting {what}"):
        require_alerts(output)
        if for_s is not None and for_s <= 0:
            raise WrongUseError(f"invalid duration {for_s:g} s: must be above 0")
        kind, subject = _parse(output, what)
        for path in _files(output):  # nothing reads them any more
            if (old := _read(path)) is not None and _is_past(old, now):
                path.unlink(missing_ok=True)
        silence = _silence("muted", kind, subject, now, None if for_s is None else now + for_s, reason)
        _write(output, silence)
        how_long = "until it is unmuted" if for_s is None else f"for {for_s:g} s"
        record_act(output, "mute", _run_id(subject), reason=reason, detail=f"{silence.name} {how_long}")
        return silence


def unmute(output_dir: Path, what: str, *, reason: str = "") -> bool:
    """End a mute; false when `what` is not muted."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"unmuting {what}"):
        for each in read_silences(output, time.time()):
            if each.action == "muted" and each.name == what:
                _path(output, each).unlink(missing_ok=True)
                record_act(output, "unmute", _run_id(each.subject), reason=reason, detail=each.name)
                return True
        return False


def forget(output: OutputDir, silence: Silence) -> None:
    """Of the daemon: an acknowledged incident has been over for long enough. Raises OSError."""
    _path(output, silence).unlink(missing_ok=True)


def require_alerts(output: OutputDir) -> None:
    """Raises WrongUseError for a workspace without the daemon `alerts`."""
    if not output.component_config(ALERTS).exists():
        raise WrongUseError(NONE_SET.format(output.path))


def _parse(output: OutputDir, what: str) -> tuple[str, str]:
    """Kind and subject of what is muted; one may be empty."""
    kind, colon, subject = what.partition(":")
    if not colon:
        kind, subject = (what, "") if what in ALERT_KINDS else ("", what)
    if kind and kind not in ALERT_KINDS:
        raise WrongUseError(f"invalid kind {kind!r}: must be one of {', '.join(ALERT_KINDS)}")
    if subject and subject not in subjects(output):
        expected = f"expected a run, a daemon or a kind ({', '.join(ALERT_KINDS)})"
        raise ActionError(f"{subject!r} not found in {output.path}: {expected}")
    if not (kind or subject):
        raise WrongUseError("nothing to mute: give a kind, a run or KIND:RUN")
    return kind, subject


def subjects(output: OutputDir) -> set[str]:
    """Everything in the workspace that an incident may be about."""
    runs, refused = scan_runs(output.path)
    return {
        *("disk", "clocks"),
        "supervisor",
        *(run.run_id for run in runs),
        *(one_line(each.name) for each in refused),
        *(path.stem for path in output.daemons.glob("*.json")),
        *(f"node {rank}" for rank in output.list_nodes()),
        *(each.subject for each in read_open(output).values()),
    }


def _silence(
    action: Literal["acknowledged", "muted"], kind: str, subject: str, now: float, until: float | None, reason: str
) -> Silence:
    text = printable(reason).strip()
    return Silence(action=action, kind=kind, subject=subject, at=now, until=until, who=person(), reason=text)


def _run_id(subject: str) -> str | None:
    return subject if subject.startswith("run_") else None


def _is_past(silence: Silence, now: float) -> bool:
    return silence.until is not None and silence.until <= now


def _path(output: OutputDir, silence: Silence) -> Path:
    """A subject may be any name of a file, so its digest stands in the name of this one."""
    digest = hashlib.blake2b(f"{silence.kind}\0{silence.subject}".encode(errors="surrogateescape"), digest_size=12)
    return output.alert_said(f"{silence.action}-{digest.hexdigest()}")


def _write(output: OutputDir, silence: Silence) -> None:
    path = _path(output, silence)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(silence))


def _files(output: OutputDir) -> list[Path]:
    try:
        names = sorted(name for name in os.listdir(output.alerts_said) if name.endswith(".json"))
    except OSError:
        return []
    return [output.alerts_said / name for name in names[:MAX_SILENCES]]


def _read(path: Path) -> Silence | None:
    return clean_strings(read_json(path, Silence, limit=MAX_BYTES), one_line)


MAX_OPEN_BYTES = 10_000_000


class OpenIncident(msgspec.Struct, frozen=True):
    """`since` in Unix seconds: when it was first seen. `quiet`: it was silenced then, and is not reported yet."""

    kind: str
    subject: str
    text: str
    since: float
    quiet: bool = False

    @property
    def key(self) -> str:
        """The kind and the subject: the same as `Incident.key`, by which both are matched."""
        return f"{self.kind} {self.subject}"


class _File(msgspec.Struct):
    version: int
    open: list[OpenIncident]


def read_open(output: OutputDir) -> dict[str, OpenIncident]:
    """By key; {} when there is no file, or a damaged one."""
    found = read_json(output.alerts_open, _File, limit=MAX_OPEN_BYTES)
    return {each.key: each for each in found.open} if found else {}


def write_open(output: OutputDir, incidents: Mapping[str, OpenIncident]) -> None:
    """Replace the incidents in the file. Raises OSError."""
    output.alerts_open.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output.alerts_open, msgspec.json.encode(_File(1, list(incidents.values()))))
