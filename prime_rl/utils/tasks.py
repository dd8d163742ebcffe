"""Small text tasks over generated words: what the built-in environments ask and what the base model was taught.

Both sides import this module, so a base model meets in training exactly the instructions that it was taught. Pure
functions over a `random.Random`. Conversations are `orchestrator.envs`' business, teaching is `base_model`'s.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

CONSONANTS = "bcdfghjklmnpqrstvwxz"
VOWELS = "aeiouy"
# One word in eight belongs to the eval split, whatever the seed: what was ever trained on is never evaluated on.
EVAL_SHARE = 8
MIN_WORD_LEN = 1
MAX_WORD_LEN = 32


@dataclass(frozen=True)
class TextTask:
    """One instruction and its right answer, as a function of the text."""

    id: str
    instruction: str
    solve: Callable[[str], str]

    def prompt(self, text: str) -> str:
        """The user's message: `Reverse: hello`."""
        return f"{self.instruction}: {text}"


REVERSE = TextTask("reverse-text", "Reverse", lambda text: text[::-1])
SORT = TextTask("sort-letters", "Sort", lambda text: "".join(sorted(text)))
UPPER = TextTask("upper-case", "Upper-case", lambda text: text.upper())
COPY = TextTask("copy-text", "Copy", lambda text: text)
# The tasks that a base model is taught. The first three are environments.
TASKS = {task.id: task for task in (REVERSE, SORT, UPPER, COPY)}


def make_word(rng: random.Random, min_len: int, max_len: int) -> str:
    """A word that can be spoken: consonants and vowels take turns, of `min_len` to `max_len` letters."""
    length = rng.randint(min_len, max_len)
    first = rng.randrange(2)
    return "".join(rng.choice((CONSONANTS, VOWELS)[(first + i) % 2]) for i in range(length))


def split_of(word: str) -> Literal["train", "eval"]:
    """The split that a word belongs to, by its letters alone."""
    return "eval" if zlib.crc32(word.encode()) % EVAL_SHARE == 0 else "train"


def make_train_word(rng: random.Random, min_len: int, max_len: int) -> str:
    """A word of the train split, otherwise as `make_word`."""
    word = make_word(rng, min_len, max_len)
    while split_of(word) != "train":
        word = make_word(rng, min_len, max_len)
    return word


def make_words(
    rng: random.Random, count: int, min_len: int, max_len: int, split: Literal["train", "eval"]
) -> list[str]:
    """`count` different words of `split`. Raises ValueError when there are not that many of these lengths."""
    what = f"words of {min_len} to {max_len} letters"
    return draw_distinct(lambda: make_word(rng, min_len, max_len), count, split, what, "longer words")


def draw_distinct(
    draw: Callable[[], str], count: int, split: Literal["train", "eval"], what: str, remedy: str
) -> list[str]:
    """`count` different texts of `split` from `draw`. Raises ValueError when hardly any new one comes before that.

    The message names the texts by `what`, and asks for fewer of them or for the `remedy`.
    """
    # Ten times the draws that are expected when hardly any text comes twice, and room for small counts.
    max_draws = 10 * EVAL_SHARE * count + 1000
    texts: dict[str, None] = {}
    for _ in range(max_draws):
        text = draw()
        if split_of(text) == split:
            texts[text] = None
            if len(texts) == count:
                return list(texts)
    raise ValueError(
        f"found only {len(texts)} different {what} for the {split} split, "
        f"wanted {count}: ask for fewer examples or for {remedy}"
    )


def normalise(text: str) -> str:
    """White space at the ends goes, and between words counts as one blank. Case is part of an answer and stays."""
    return " ".join(text.split())


def similarity(answer: str, wanted: str) -> float:
    """1 - edit distance / length of the longer text: 1.0 for equal texts, 0.0 for texts that share nothing."""
    longest = max(len(answer), len(wanted))
    return 1.0 - edit_distance(answer, wanted) / longest if longest else 1.0


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions and substitutions that make `b` of `a` (Levenshtein), row by row."""
    row = list(range(len(b) + 1))
    for i, char_a in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, char_b in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (char_a != char_b))
    return row[-1]
