"""What keeps this machine or folder from working: the warnings of `prl doctor`, without importing torch or vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.utils.text import CleanText, one_line


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
