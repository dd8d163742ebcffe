"""The names of metrics in `docs/metrics.md`, as patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"
_PLACEHOLDERS = {
    "avg@K": r"avg@\d+",
    "avg@K_se": r"avg@\d+_se",
    "pass@K": r"pass@\d+",
    "pass@K_se": r"pass@\d+_se",
    "ENV": r"[A-Za-z0-9._-]+",
    "METRIC": r"[A-Za-z0-9._/-]+",
    "NAME": r"[A-Za-z0-9._/-]+",
    "SERVER": r"\d+",
}


def documented(writer: str) -> dict[str, re.Pattern[str]]:
    """What is in the section `## {writer}.jsonl`: the name as written there, and what it stands for."""
    section = DOCUMENT.read_text().partition(f"## {writer}.jsonl\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    assert names, f"{DOCUMENT} has no table of {writer}.jsonl"
    return {
        name: re.compile("/".join(_PLACEHOLDERS.get(part, re.escape(part)) for part in name.split("/")))
        for name in names
    }


def undocumented(writer: str, lines: Iterable[Mapping[str, Any]]) -> set[str]:
    """The names in `lines` that the document does not have."""
    patterns = documented(writer).values()
    return {name for line in lines for name in line if not any(pattern.fullmatch(name) for pattern in patterns)}
