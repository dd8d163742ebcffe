"""The jobs that acknowledge and mute alerts, as `prl alerts` does it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from daemons import quiet
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.clock import parse_duration_s
from prime_rl.utils.text import CleanText, one_line
from tui.actions.jobs import Job, Progress, each, prl_command

DURATIONS = ("1h", "8h", None)


def ack_job(output_dir: Path, names: Sequence[str]) -> Job:
    """Acknowledge incidents; each name is KIND:SUBJECT, or a subject for all of its open ones."""

    def act(name: str, progress: Progress) -> str:
        new = quiet.acknowledge(output_dir, name)
        return f"{name}: acknowledged" if new else f"{name}: already acknowledged"

    return Job(prl_command(output_dir, "alerts", "ack", *names), each(names, "acknowledged", act))


def mute_job(output_dir: Path, what: str, duration: str | None = None) -> Job:
    """`duration` as people write it; None: until it is unmuted."""
    words = ["--for", duration] if duration else []

    def work(progress: Progress) -> str:
        quiet.mute(output_dir, what, for_s=parse_duration_s(duration) if duration else None)
        return f"{what}: muted {f'for {duration}' if duration else 'until it is unmuted'}"

    return Job(prl_command(output_dir, "alerts", "mute", what, *words), work)


def unmute_job(output_dir: Path, what: str) -> Job:
    """End the mute of a kind, a subject or KIND:SUBJECT."""

    def work(progress: Progress) -> str:
        return f"{what}: {'unmuted' if quiet.unmute(output_dir, what) else 'not muted'}"

    return Job(prl_command(output_dir, "alerts", "unmute", what), work)


def mute_choices(output_dir: Path, subject: str, names: Sequence[str]) -> list[tuple[CleanText, Callable[[], Job]]]:
    """(label, job) of each way to mute a subject and the kinds of its incidents `names`; first, to end such mutes."""
    kinds = dict.fromkeys(name.partition(":")[0] for name in names)
    silences = quiet.read_silences(OutputDir(output_dir), time.time())
    muted = [each.name for each in silences if each.action == "muted" and each.name in (subject, *kinds, *names)]
    found: list[tuple[CleanText, Callable[[], Job]]] = [
        (one_line(f"end the mute of {what}"), functools.partial(unmute_job, output_dir, what)) for what in muted
    ]
    for what in (subject, *kinds):
        for duration in DURATIONS:
            how_long = f"for {duration}" if duration else "until it is unmuted"
            label = one_line(f"{what}{' of all runs and daemons' if what in kinds else ''} {how_long}")
            found.append((label, functools.partial(mute_job, output_dir, what, duration)))
    return found
