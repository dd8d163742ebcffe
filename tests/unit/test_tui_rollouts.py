"""What the rollouts tab reads, searches, colours and counts; and the text that it makes of it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from prime_rl.contract.layout import RunDir
from prime_rl.contract.samples import Sample, SampleFile, read_rewards
from tests.rollouts_support import BATCH_SIZE, GROUP_SIZE, add_batches
from tui.app import DARK, text_styles
from tui.model.query import TINTS, make_tint, parse_search, tinted
from tui.readers.rollouts import (
    RolloutsData,
    RolloutsReader,
    RolloutsRequest,
    TokenLine,
    arrange,
    group_of,
    step_rewards,
)
from tui.widgets.rollouts_view import (
    MAX_CHARS,
    MAX_COLUMNS,
    GroupPicture,
    bars,
    count_bins,
    describe,
    draw_group,
    draw_rewards,
    legend,
    level_text,
    list_row,
    next_place,
    reward_range,
)

LINE = TokenLine(("a", "b", "user", "c"), (-0.1, -3.0, None, -5.0), (0.0, 0.3, None, -0.8))


def a_sample(place: int, *, reward: float = 0.5, step: int = 1, group: int = 0, text: str = "answer") -> Sample:
    return Sample(
        step, "math", f"math/{group}", "What is 1+1?", text, reward, reward - 0.5, [0], 9, 4, [], place, group
    )


def read(run: RunDir, step: int | None) -> RolloutsData:
    data, _ = RolloutsReader(run.path.parent, run.run_id).read(RolloutsRequest(step))
    assert data is not None
    return data


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run_a")
    run.metrics.mkdir(parents=True)
    return run


def test_the_tokens_of_the_step_that_is_asked_for_are_read(run: RunDir) -> None:
    add_batches(run, 3)
    reader = RolloutsReader(run.path.parent, run.run_id)
    first, _ = reader.read()
    assert first is not None and (len(first.samples), first.tokens) == (24, {})
    assert {step: len(each) for step, each in first.rewards.items()} == {1: BATCH_SIZE, 2: BATCH_SIZE, 3: BATCH_SIZE}
    second, _ = reader.read(RolloutsRequest(2))
    assert second is not None and second.samples is first.samples and sorted(second.tokens) == list(range(8))
    game = next(each for each in second.samples if each.step == 2 and each.place == GROUP_SIZE)
    line = second.tokens[GROUP_SIZE]
    assert "".join(line.pieces) == game.completion
    known = [(logprob is None, ratio is None) for logprob, ratio in zip(line.logprobs, line.ratios, strict=True)]
    assert known[9:13] == [(False, False), (True, True), (True, True), (False, False)]
    assert second.tokens[2].num_left_out == 120
    assert reader.read(RolloutsRequest(2)) == (None, False)
    run.ratios.write_text("")
    third, _ = reader.read(RolloutsRequest(2))
    assert third is not None and set(third.tokens[GROUP_SIZE].ratios) == {None}


def test_a_file_of_an_earlier_version_has_groups_and_rewards_but_no_tokens(run: RunDir) -> None:
    old = [msgspec.structs.replace(a_sample(-1, reward=reward), group=-1) for reward in (0.25, 0.75)]
    SampleFile(run.samples, keep=9).append(old)
    data = read(run, 1)
    assert (data.rewards, data.tokens, step_rewards(data)) == ({}, {}, {1: (0.25, 0.75)})
    assert len(group_of(data.samples, data.samples[0])) == 2


def test_what_a_file_may_hold_is_bounded_and_links_are_not_followed(run: RunDir, tmp_path: Path) -> None:
    tokens = {"pieces": ["\x1b[2J" + "x" * 5000] * 2000, "logprobs": [-1.0] * 2000, "num_left_out": -5}
    line = msgspec.to_builtins(a_sample(0)) | {"place": 0, "group": 0, "tokens": tokens}
    rewards = [{"rewards": [0.5] * 900, "step": step} for step in range(1, 4)]
    run.samples.write_text("\n".join(map(json.dumps, [*rewards[:1], line, *rewards[1:]])) + "\n")
    found = read(run, 1).tokens[0]
    assert (len(found.pieces), found.num_left_out) == (512, 0)
    assert {len(piece) for piece in found.pieces} == {100} and "\x1b" not in "".join(found.pieces)
    assert list(read_rewards(run.samples, 1000)) == [2, 3]
    other = run.samples.rename(tmp_path / "elsewhere")
    run.samples.symlink_to(other)
    assert read(run, 1).samples == () and read(run, 1).tokens == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {0, 1, 2, 3}),
        ("ANSWER", {0, 1}),
        ('"two words"', {2}),
        ("two far", {2}),
        ("two nowhere", set()),
        ("x=3", {3}),
        ("reward>0.5", {2, 3}),
        ("reward>=0.5 env:math", {1, 2, 3}),
        ("env!=math", set()),
        ("example:/1", {3}),
        ("step:2", {3}),
        ("advantage<0 tokens=4 version:0", {0}),
    ],
)
def test_a_search_finds_what_all_its_terms_fit(text: str, expected: set[int]) -> None:
    samples = [
        a_sample(0, reward=0.0),
        a_sample(1),
        a_sample(2, reward=1.0, text="two words, far"),
        a_sample(3, reward=0.75, step=2, group=1, text="So X=3"),
    ]
    query = parse_search(text)
    assert query.errors == ()
    assert {sample.place for sample in samples if query.matches(sample)} == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [("reward>", "missing value"), ("reward>x", "invalid number"), ('"open', "unclosed"), ("env>a", "is a text")],
)
def test_a_search_says_what_is_wrong_with_it(text: str, error: str) -> None:
    assert error in parse_search(text).errors[0]


def test_levels_of_the_three_colourings() -> None:
    levels = {name: [level for _, level in tinted(LINE, make_tint(name, -0.5, 0.6))] for name in TINTS}
    assert levels == {"advantage": [-3, None, -3], "log-ratio": [0, 2, None, -3], "surprise": [0, 2, None, 3]}
    assert [make_tint("advantage", 0.0, 0.6).level(value) for value in (0.0, 0.1, 0.25, -0.45)] == [0, 1, 2, -3]
    own = replace(LINE, advantages=(0.1, 0.25, 0.0, -0.45))
    assert [level for _, level in tinted(own, make_tint("advantage", -0.5, 0.6))] == [1, 2, None, -3]
    assert make_tint("log-ratio", 0.0, 1.0).level(math.inf) is None
    assert make_tint("advantage", 0.0, 0.0).level(0.0) == 0


def test_neighbours_of_one_level_are_one_piece_and_what_is_left_out_stands_in_the_middle() -> None:
    line = replace(LINE, pieces=("a", "b", "c", "d"), logprobs=(-0.1,) * 4, num_left_out=7)
    assert tinted(line, make_tint("surprise", 0.0, 1.0)) == [
        ("ab", 0),
        ("\n… 7 tokens left out …\n", None),
        ("cd", 0),
    ]


def test_the_strongest_are_seen_without_colour() -> None:
    for tint in TINTS:
        looks = {}
        for level in (-3, -1, 0, 1, 3):
            text = Text()
            level_text(text, "x", level, tint)
            looks[level] = {word for span in text.spans for word in str(span.style).split()} & {"underline", "reverse"}
        assert looks[3] and not looks[0] and not looks[1]
        assert tint != "log-ratio" or looks[3] != looks[-3] != set()


def drawn(picture: GroupPicture, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), theme=text_styles(asdict(DARK)))
    console.print(draw_group(picture, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def picture_of(samples: Sequence[Sample], chosen: int = 0, **changes: Any) -> GroupPicture:
    return replace(GroupPicture(tuple(samples), samples[chosen], {0: LINE}, "surprise", (1, 2)), **changes)


def test_rollouts_stand_beside_each_other_where_there_is_room() -> None:
    samples = [a_sample(place, reward=place / 4, text=f"text of {place}") for place in range(4)]
    wide, narrow = drawn(picture_of(samples, 2), 180), drawn(picture_of(samples, 2), 80)
    heads = [line for line in wide.splitlines() if "reward" in line]
    assert (
        len(heads) == 1 and heads[0].count("reward") == 4 and heads[0].index("▌") == heads[0].index("reward 0.500") - 1
    )
    assert len([line for line in narrow.splitlines() if "reward" in line]) == 4
    for text in (wide, narrow):
        assert "example 1 of 2 · 4 rollouts" in text and "What is 1+1?" in text
        assert "abuserc" in text and "text of 0" not in text and "text of 3" in text


def test_a_huge_group_is_cut_around_the_chosen_one() -> None:
    samples = [a_sample(place, reward=place / 100, text="y" * 100_000) for place in range(60)]
    text = drawn(picture_of(samples, 50), 80)
    assert "reward 0.500" in text and "reward 0.100" not in text and "28 more are in the list" in text
    assert text.count("y") == MAX_COLUMNS * MAX_CHARS and "94000 more characters" in text


def test_the_legend_names_the_colours_or_that_there_are_no_tokens() -> None:
    samples = [a_sample(0, reward=0.8)]
    assert legend(picture_of(samples)).plain == "tokens by surprise, sampled at p<50% p<10% p<1%"
    assert "/2 /1.25 /1.05 *1.05 *1.25 *2" in legend(picture_of(samples, tint="log-ratio")).plain
    assert legend(picture_of(samples, tint="advantage")).plain.endswith("-0.200 -0.100 <0 >0 +0.100 +0.200")
    assert "no tokens of step 1" in legend(picture_of(samples, tokens={})).plain


def branches(place: int, num: int, **more: Any) -> list[Sample]:
    """One rollout, from this place on."""
    return [
        msgspec.structs.replace(
            a_sample(place + at, text=f"answer {at}", **more),
            prompt="What is 1+1?" if not at else f"message {at}",
            branch=at,
            num_branches=num,
            num_shared=312 * bool(at),
            output="[the end]" if at == num - 1 else "",
        )
        for at in range(num)
    ]


def test_branches_stand_below_their_rollout_in_every_order() -> None:
    samples = [a_sample(0, reward=0.1), *branches(1, 3, reward=0.9), a_sample(4, reward=0.5)]
    samples += branches(0, 2, step=2, reward=0.2)
    for order, wanted in (
        ("newest", [(2, 0), (2, 1), (1, 4), (1, 1), (1, 2), (1, 3), (1, 0)]),
        ("highest reward", [(1, 1), (1, 2), (1, 3), (1, 4), (2, 0), (2, 1), (1, 0)]),
        ("lowest advantage", [(1, 0), (2, 0), (2, 1), (1, 4), (1, 1), (1, 2), (1, 3)]),
    ):
        assert [(each.step, each.place) for each in arrange(samples, order)] == wanted
    rows = [list_row(each, wide=False).plain for each in samples[1:4]]
    assert rows == ["     1   0.900   +0.400", "        ├ branch 2 of 3", "        └ branch 3 of 3"]
    wide = list_row(samples[2], wide=True).plain
    assert wide.index("v0") == list_row(samples[0], wide=True).plain.index("v0")


def test_the_beginning_that_a_branch_shares_is_one_line() -> None:
    first, second, third = branches(1, 3)
    assert "branch 1 of 3 · v0" in describe(first).plain and "as in branch" not in describe(first).plain
    text = describe(second).plain
    assert "── the first 312 tokens as in branch 1 ──\n\n── prompt ──\nmessage 1\n" in text and "answer 1" in text
    assert "output of the agent" not in text
    assert describe(third).plain.endswith("── output of the agent ──\n[the end]\n")
    assert parse_search("end]").matches(third) and not parse_search("end]").matches(second)


def test_a_rollout_counts_once_in_its_group_and_among_the_rewards() -> None:
    samples = [a_sample(0, reward=0.1), *branches(1, 3, reward=0.9), a_sample(4, reward=0.5)]
    assert [each.place for each in group_of(samples, samples[0])] == [0, 1, 4]
    assert [each.place for each in group_of(samples, samples[3])] == [0, 3, 4], "the chosen branch of its rollout"
    assert step_rewards(RolloutsData("run_a", samples=tuple(samples))) == {1: (0.1, 0.9, 0.5)}
    text = drawn(picture_of(group_of(samples, samples[2]), 1), 180)
    assert "3 rollouts" in text and "branch 2 of 3" in text and "answer 1" in text and "answer 0" not in text


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], (0.0, 1.0)),
        ([0.5, 0.5], (0.0, 1.0)),
        ([-1.0, 2.0], (-1.0, 2.0)),
        ([3.0], (2.5, 3.5)),
    ],
)
def test_the_scale_of_rewards(rewards: list[float], expected: tuple[float, float]) -> None:
    assert reward_range(rewards) == expected


def test_bins_count_every_reward_once() -> None:
    assert count_bins([0.0, 0.24, 0.25, 0.5, 1.0], 0.0, 1.0, 4) == [2, 1, 1, 1]
    assert sum(count_bins([-1.7e308, 0.0, 1.7e308], -1.7e308, 1.7e308, 10)) == 3


def test_bars_have_the_height_of_their_counts() -> None:
    assert bars([0, 1, 1000, 500], 2, 2) == ["    █   ", "  ▁ █ █ "]
    assert bars([0, 3], 1, 1) == [" █"] and bars([0, 0], 1, 1) == ["  "]


def test_the_rows_of_the_steps_line_up_with_the_histogram() -> None:
    by_step = {step: (0.0, step / 100, 1.0) for step in range(1, 61)}
    for chosen in (60, 30, 1):
        lines = draw_rewards(by_step, chosen, 80, 20).plain.splitlines()
        (row,) = [line for line in lines if line.startswith("▌")]
        assert len(lines) <= 20 and row.lstrip("▌").split()[0] == str(chosen)
        high = lines[5]
        assert [at for at, char in enumerate(high) if char != " "] == [
            at for at, char in enumerate(row[:56]) if char in "▁▂▃▄▅▆▇█"
        ]
        assert "0.000" in lines[6] and "1.000" in lines[6]


@pytest.mark.parametrize(
    ("cursor", "direction", "allowed", "expected"),
    [
        (0, 1, range(6), 2),
        (1, 1, range(6), 2),
        (3, 1, range(6), 4),
        (4, -1, range(6), 2),
        (5, -1, range(6), 2),
        (4, 1, range(6), 4),
        (0, 1, [1, 5], 5),
        (5, -1, [1, 5], 1),
        (2, 1, [1, 5], 5),
        (2, -1, [1, 5], 1),
        (0, 1, [], 0),
    ],
)
def test_the_next_example_is_another_one(cursor: int, direction: int, allowed: Sequence[int], expected: int) -> None:
    assert next_place(["a", "a", "b", "b", "c", "c"], allowed, cursor, direction) == expected


def test_the_next_of_nothing() -> None:
    assert next_place([], [], 0, 1) == 0
