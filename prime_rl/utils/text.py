"""Text from runs (names, prompts, errors, logs) made safe to show in a terminal.

Readers call it where text enters; what they hand on is a `CleanText`, or a struct that went through `clean_strings`.
Errors, file names and sizes in words are here too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NewType, TypeVar

import msgspec

T = TypeVar("T")
CleanText = NewType("CleanText", str)
"""Text with nothing in it that a terminal obeys. Made by `clean_text` and `one_line` alone."""

# One pass removes every ESC and every C1 byte, so what is left after it cannot join to a new sequence.
_CONTROL = re.compile(
    r"""
      (?: \x1b\[ | \x9b ) [0-?]* [ -/]* [@-~]?                                   # CSI: colours, cursor, erase
    | (?: \x1b[\]PX^_] | [\x9d\x90\x98\x9e\x9f] )                                # OSC, DCS, SOS, PM, APC ...
      [^\x07\x1b\x9c\n]* (?: \x07 | \x1b\\ | \x9c )?                             # ... with their string
    | \x1b [ -/]* [0-~]?                                                         # all other escapes
    | [\x00-\x08\x0b-\x1f\x7f-\x9f]                                              # C0 but tab and newline, DEL, C1
    """,
    re.VERBOSE,
)
# What a terminal draws as nothing, or draws the rest of the line the other way round for: two names that look alike
# would not be, and lines would not be as wide as they are counted. Joiners and variants belong to a letter or an emoji.
_UNSEEN = re.compile(
    r"""
      (?P<part> (?<=[^\x00-\xa8\u2000-\u206f\ufe00-\ufe0f]) [\u200c\u200d\ufe0e\ufe0f]    # of an emoji, of a script
              | (?<=[0-9\#*]) \ufe0f (?=\u20e3) )                                         # of a key cap
    | (?: [\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164]
        | [\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff] )+
    """,
    re.VERBOSE,
)
# Half of a pair: cannot be encoded, so printing it would raise.
_SURROGATE = re.compile("[\ud800-\udfff]")
# For one line of `limit` characters no more than this many times as many are looked at: lines may be of megabytes.
_LOOK = 50
# Of a field with such a value, or None, nothing is to be made clean: most of a struct's.
_PLAIN = (int, float, type(None))


def clean_text(text: str, limit: int | None = None) -> CleanText:
    """`text` without anything that a terminal obeys, and with nothing that hides; at most `limit` characters.

    Escape sequences and control characters but newlines and tabs are left out. Characters that are not seen, and those
    that turn the writing direction, stand as `<U+200B>`, many in a row as `<U+200B +7>`. Markup of a terminal toolkit
    stays: show the result as plain text.
    """
    if limit is not None:
        text = text[: _LOOK * limit]
    if not (text.isascii() and text.isprintable()):
        text = _CONTROL.sub("", text)
        text = text if text.isascii() else _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", _UNSEEN.sub(_mark, text))
    return CleanText(text if limit is None else text[:limit])


def _mark(found: re.Match[str]) -> str:
    if found["part"]:
        return ""
    unseen = found[0]
    return f"<U+{ord(unseen[0]):04X}{f' +{len(unseen) - 1}' if len(unseen) > 1 else ''}>"


def one_line(text: str, limit: int = 200) -> CleanText:
    """`clean_text` on one line of at most `limit` characters."""
    line = " ".join(clean_text(text[: _LOOK * limit]).split())
    return CleanText(line if len(line) <= limit and len(text) <= _LOOK * limit else line[: limit - 1] + "…")


def clean_strings(value: T, clean: Callable[[str], str] = clean_text) -> T:
    """A copy of `value` with every string in it made clean: of structs, lists, and dictionaries with their keys."""
    result: Any = value
    if isinstance(value, str):
        result = clean(value)
    elif isinstance(value, msgspec.Struct):
        fields = zip(value.__struct_fields__, msgspec.structs.astuple(value), strict=True)
        texts = {name: clean_strings(each, clean) for name, each in fields if not isinstance(each, _PLAIN)}
        result = msgspec.structs.replace(value, **texts)
    elif isinstance(value, dict):
        result = {clean_strings(key, clean): clean_strings(each, clean) for key, each in value.items()}
    elif isinstance(value, list | tuple):
        result = type(value)(clean_strings(each, clean) for each in value)
    return result  # type: ignore[no-any-return]


def shorten(text: str, limit: int) -> str:
    """`text`, or its beginning and its end around an ellipsis: questions begin, answers end."""
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]} … {text[len(text) - (limit - head - 3) :]}"


def printable(text: str) -> str:
    """`text` with what cannot be encoded (bytes of a file name that are not UTF-8) written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def error_text(error: Exception) -> str:
    """An error as part of a sentence; the type is named unless the text was written for people."""
    text = str(error)
    return text if isinstance(error, ValueError | OSError) and text else f"{type(error).__name__}: {text}"


def counted(num: int, word: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{num} {word}{'' if num == 1 else 's'}"


def size_text(num_bytes: int) -> str:
    """`512 B`, `1.4 MiB`: of files, disks and memory alike."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
