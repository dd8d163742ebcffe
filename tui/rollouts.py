"""What the rollouts tab shows: the samples that a run keeps of its batches, ordered, and one of them turn by turn.

The texts of environment and policy are clean. No widgets here.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prime_rl.contract.layout import RunDir
from prime_rl.contract.samples import Sample, read_samples
from prime_rl.utils.text import clean_strings, one_line
from tui.run_config import file_stamp
from tui.tabs import ROLLOUTS, TabData

# The list shows at most so many of the newest; the file itself is bounded by its writer.
MAX_SAMPLES = 2_000
ORDERS = ("newest", "highest reward", "lowest reward", "highest advantage", "lowest advantage")


@dataclass(frozen=True)
class RolloutsData(TabData):
    """One look: the newest samples, oldest first, all their text clean."""

    tab = ROLLOUTS
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One turn: its speaker ("prompt", "policy", "environment") and its text."""

    speaker: str
    text: str


class RolloutsReader:
    """Reads the samples file again whenever it changed."""

    tab = ROLLOUTS

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._run = RunDir(output_dir / run_id)
        self._shown: object = None

    def read(self) -> tuple[RolloutsData | None, bool]:
        stamp = file_stamp(self._run.samples)
        if stamp == self._shown:
            return None, False
        self._shown = stamp
        return RolloutsData(self._run.run_id, tuple(self._samples())), False

    def _samples(self) -> Sequence[Sample]:
        path = self._run.samples
        try:
            return list(map(clean, read_samples(path, MAX_SAMPLES))) if stat.S_ISREG(path.stat().st_mode) else []
        except OSError:
            return []


def clean(sample: Sample) -> Sample:
    """With all its text clean, its names on one line."""
    names = {"env": one_line(sample.env), "example_id": one_line(sample.example_id)}
    return msgspec.structs.replace(clean_strings(sample), **names)


def arrange(samples: Sequence[Sample], order: str) -> list[Sample]:
    """In one of ORDERS; equals stay newest first."""
    newest_first = list(reversed(samples))
    if order == "newest":
        return newest_first
    sign = -1.0 if order.startswith("highest") else 1.0
    if order.endswith("reward"):
        return sorted(newest_first, key=lambda sample: sign * sample.reward)
    return sorted(newest_first, key=lambda sample: sign * sample.advantage)


def turns(sample: Sample) -> list[Turn]:
    found = [Turn("prompt", sample.prompt.strip("\n"))]
    if not sample.turns:
        return [*found, Turn("policy", sample.completion)]
    return found + [Turn("policy" if turn.by_policy else "environment", turn.text.strip("\n")) for turn in sample.turns]


def versions(sample: Sample) -> str:
    """`v41`, or `v40 v41` when its turns came from several."""
    return " ".join(f"v{version}" for version in sample.policy_versions) or "-"
