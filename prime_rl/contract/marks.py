"""Text files in a run's `control/` whose presence decides about the run: `evicted.txt`, `paused.txt`, `finished.txt`.

Whatever is in the place of such a file counts as it, also a pipe or a link, whose refusal is then the text.
"""

from __future__ import annotations

import os
from pathlib import Path

from prime_rl.contract.files import read_text

# People read one line.
MAX_MARK_CHARS = 2_000
_MAX_BYTES = 10_000


def read_mark(path: Path, *, empty: str = "no reason given") -> str | None:
    """The text of a mark on one line, `empty` when it has none; None when the mark is not there. Never raises."""
    if not os.path.lexists(path):
        return None
    try:
        text = read_text(path, limit=_MAX_BYTES)
    except OSError as error:  # FileRefused is a sentence
        text = str(error)
    return None if text is None else " ".join(text.split())[:MAX_MARK_CHARS] or empty
