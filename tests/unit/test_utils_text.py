"""Text from runs: nothing in it is obeyed by a terminal, nothing in it hides, and any length is cheap."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.utils.text import clean_text, one_line

MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("run\u200b_a", "run<U+200B>_a"),
        ("\ufeffstart", "<U+FEFF>start"),
        ("a\u202egpj.exe", "a<U+202E>gpj.exe"),
        ("\u2066x\u2069", "<U+2066>x<U+2069>"),
        ("word\u2060joined\xad", "word<U+2060>joined<U+00AD>"),
        ("one\u2028line", "one<U+2028>line"),
        ("say \U000e0068\U000e0069!", "say <U+E0068 +1>!"),
        ("x\ufe0f", "x<U+FE0F>"),
        ("😀" + "\ufe0f" * 3 + "\U000e0101" * 5, "😀<U+FE0F +6>"),
        ("a\u200db", "a<U+200D>b"),
        ("👨\u200d👩\u200d👧 ❤\ufe0f 1\ufe0f\u20e3", "👨👩👧 ❤ 1\u20e3"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u062e"),
        ("déjà vu 漢字 ½ “x”", "déjà vu 漢字 ½ “x”"),
        ("\x1b]2;owned\x07\x1b[31mred\x1b[0m\t[bold]x[/]\n\ud800", "red\t[bold]x[/]\n\ufffd"),
        ("\u200b\x1b[\u200b31m", "<U+200B +1>31m"),
    ],
)
def test_what_is_seen(text: str, clean: str) -> None:
    assert clean_text(text) == clean


@given(
    st.text(alphabet=st.one_of(st.characters(), st.sampled_from("\x1b\x9b[]\u200b\u200d\ufe0f\u202e\U000e0041😀1m")))
)
def test_nothing_is_obeyed_or_hidden_whatever_it_is(text: str) -> None:
    clean = clean_text(text)
    assert clean_text(clean) == clean
    for char in clean:
        assert char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs")
        assert unicodedata.bidirectional(char) not in {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
        assert not "\u200b" <= char <= "\u200f" and not "\U000e0000" <= char <= "\U000e0fff"
    assert len(one_line(text, 20)) <= 20 and "\n" not in one_line(text, 20)


@pytest.mark.parametrize("piece", ["x", "\u200b", "a\u200b", "\x1b[", "\x1b]2;", "👨\u200d", "漢"])
def test_a_line_of_a_megabyte_grows_little_and_is_cut_before_it_is_cleaned(piece: str) -> None:
    text = piece * (MEGABYTE // len(piece))
    assert len(clean_text(text)) <= 5 * MEGABYTE
    line = one_line(text)
    assert len(line) <= 200 and line.endswith("…")


def test_one_line_says_that_it_left_something_out() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("abcdef", 4) == "abc…"
    assert one_line("a" + " " * 1000 + "b", 10) == "a…"
