"""Words, splits, answers and the score."""

from __future__ import annotations

import functools
import itertools
import random
import string

import pytest

from prime_rl.utils.tasks import (
    COPY,
    REVERSE,
    SORT,
    TASKS,
    UPPER,
    edit_distance,
    make_train_word,
    make_words,
    normalise,
    similarity,
    split_of,
)


@pytest.mark.parametrize(
    ("task", "prompt", "answer"),
    [
        (REVERSE, "Reverse: banal", "lanab"),
        (SORT, "Sort: banal", "aabln"),
        (UPPER, "Upper-case: banal", "BANAL"),
        (COPY, "Copy: banal", "banal"),
    ],
)
def test_prompt_and_answer(task: object, prompt: str, answer: str) -> None:
    assert task in TASKS.values()
    assert task.prompt("banal") == prompt  # type: ignore[attr-defined]
    assert task.solve("banal") == answer  # type: ignore[attr-defined]


def test_words_are_different_lower_case_and_of_every_length() -> None:
    words = make_words(random.Random(1), 400, 3, 6, "train")
    assert len(set(words)) == len(words) == 400
    assert {len(word) for word in words} == {3, 4, 5, 6}
    assert set("".join(words)) <= set(string.ascii_lowercase)
    assert not any(a in "aeiouy" and b in "aeiouy" for word in words for a, b in itertools.pairwise(word))


def test_splits_share_no_word_whatever_the_seeds() -> None:
    train = {word for seed in range(4) for word in make_words(random.Random(seed), 300, 2, 4, "train")}
    held = {word for seed in range(4, 8) for word in make_words(random.Random(seed), 30, 2, 4, "eval")}
    assert train and held and not train & held
    rng = random.Random(3)
    assert all(split_of(make_train_word(rng, 1, 3)) == "train" for _ in range(300))


def test_same_generator_same_words() -> None:
    first, again, other = (make_words(random.Random(seed), 50, 3, 6, "train") for seed in ("a", "a", "b"))
    assert first == again != other


def test_more_words_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"only \d+ different words of 1 to 1 letters for the train split, wanted 30"):
        make_words(random.Random(0), 30, 1, 1, "train")


def slow_edit_distance(a: str, b: str) -> int:
    @functools.cache
    def rest(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return len(a) - i + len(b) - j
        if a[i] == b[j]:
            return rest(i + 1, j + 1)
        return 1 + min(rest(i + 1, j), rest(i, j + 1), rest(i + 1, j + 1))

    return rest(0, 0)


def test_edit_distance_is_levenshtein() -> None:
    rng = random.Random(0)
    for _ in range(300):
        a, b = ("".join(rng.choices("abc", k=rng.randrange(8))) for _ in range(2))
        assert edit_distance(a, b) == slow_edit_distance(a, b), (a, b)


def test_similarity() -> None:
    assert similarity("abcd", "abcd") == similarity("", "") == 1.0
    assert similarity("abcx", "abcd") == similarity("abc", "abcd") == 0.75
    assert similarity("wxyz", "abcd") == similarity("", "abcd") == 0.0
    assert similarity("abcd" * 8, "abcd") == 0.125


def test_normalise_touches_only_white_space() -> None:
    assert normalise("  aB\t c\n") == "aB c"
