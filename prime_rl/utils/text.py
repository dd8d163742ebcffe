"""Text from runs (names, prompts, errors, logs) made safe to show in a terminal. Knows nothing of who shows it."""

from __future__ import annotations

import re

# One pass removes every ESC and every C1 byte, so what is left after it cannot join to a new sequence.
_CONTROL = re.compile(
    r"""
      (?: \x1b\[ | \x9b ) [0-?]* [ -/]* [@-~]?                                   # CSI: colours, cursor, erase
    | (?: \x1b[\]PX^_] | [\x9d\x90\x98\x9e\x9f] )                                # OSC, DCS, SOS, PM, APC ...
      [^\x07\x1b\x9c\n]* (?: \x07 | \x1b\\ | \x9c )?                             # ... with their string
    | \x1b [ -/]* [0-~]?                                                         # all other escapes
    | [\x00-\x08\x0b-\x1f\x7f-\x9f]                                              # C0 but tab and newline, DEL, C1
    | [\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]                             # marks that turn the writing direction
    """,
    re.VERBOSE,
)
# Half of a pair: cannot be encoded, so printing it would raise.
_SURROGATE = re.compile("[\ud800-\udfff]")


def clean_text(text: str) -> str:
    """`text` without anything that a terminal obeys: escape sequences, control and bidi characters.

    Newlines and tabs stay. Markup of a terminal toolkit stays too: show the result as plain text.
    """
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", _CONTROL.sub("", text))


def one_line(text: str, limit: int = 200) -> str:
    """`clean_text` on one line of at most `limit` characters."""
    line = " ".join(clean_text(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
