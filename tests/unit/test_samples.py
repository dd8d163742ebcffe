"""Rollouts kept as text: which, how long, how many; and that nothing in them or on the disk can disturb the run."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemons.commands.runs import sample_view
from prime_rl.configs.orchestrator import AdvantageConfig
from prime_rl.configs.reports import SamplesConfig
from prime_rl.contract.samples import (
    MAX_KEPT_BRANCHES,
    BatchRatios,
    BatchRewards,
    Keeping,
    RatioFile,
    Sample,
    SampleFile,
    SampleTokens,
    TokenSample,
    read_batches,
    read_ratios,
    read_samples,
    spread,
    token_ratios,
)
from prime_rl.contract.types import read_batch, rollouts_of
from prime_rl.orchestrator.batch import assemble_batch
from prime_rl.orchestrator.policy import ChatTokenizer
from prime_rl.orchestrator.recorder import Branch, Rollout, pieces
from prime_rl.orchestrator.report import SampleKeeper, shorten
from tests.orchestrator_support import make_run
from tests.unit.test_orchestrator_pure import a_group
from tests.unit.test_orchestrator_run import Workspace, workspace  # noqa: F401


def a_sample(step: int, text: str = "text") -> Sample:
    return Sample(step, "talk", "talk/e1", "prompt", text, 0.5, -0.5, [0, 1], 9, 4)


def as_letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(0, 25))
def test_picked_rollouts_span_the_rewards_and_none_comes_twice(rewards: list[float], count: int) -> None:
    places = spread(rewards, count)
    picked = [rewards[place] for place in places]
    assert len(set(places)) == len(places) == min(count, len(rewards))
    assert picked == sorted(picked)
    if picked:
        assert picked[-1] == max(rewards)
    if len(picked) > 1:
        assert picked[0] == min(rewards)


@pytest.mark.parametrize("limit", [16, 17, 99, 100])
def test_long_text_keeps_its_beginning_and_its_end(limit: int) -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 100)))
    short = shorten(text, limit)
    assert len(short) == limit
    head, _, tail = short.partition(" … ")
    assert (short == text) == (limit == 100)
    if limit < 100:
        assert text.startswith(head) and text.endswith(tail) and min(len(head), len(tail)) >= 5


def test_the_kept_rollouts_of_a_batch(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    groups = [a_group(0, [0.0, 1.0], version=1), a_group(1, [0.25, 0.5], version=2, env="other")]
    batch = assemble_batch("run_a", 3, groups, advantage=AdvantageConfig(type="mean"), temperature=1.0)
    SampleKeeper(run, SamplesConfig(per_step=2), as_letters).keep(groups, batch)
    worst, best = read_samples(run.samples, 9)
    assert worst == Sample(3, "talk", "talk/e0", "hhh", "ii", 0.0, -0.5, [1], 5, 2, place=0, group=0)
    assert (best.reward, best.advantage, best.place) == (1.0, 0.5, 1)
    (kept,) = read_batches(run.samples, run.ratios, 9)
    assert (kept.step, kept.rewards, kept.ratios) == (3, (0.0, 1.0, 0.25, 0.5), {})
    logprobs = groups[0].rollouts_G[0].branches[0].logprobs_T[3:]
    assert kept.samples[0].tokens == SampleTokens(["i", "i"], [round(each, 4) for each in logprobs])
    SampleKeeper(run, SamplesConfig(per_step=0), as_letters).keep(groups, batch)
    assert len(read_samples(run.samples, 9)) == 2


def test_kept_tokens_have_the_advantages_that_the_environment_gave(tmp_path: Path) -> None:
    run, group = make_run(tmp_path), a_group(0, [0.0, 1.0])
    (branch,) = group.rollouts_G[0].branches
    branch = dataclasses.replace(branch, token_advantages_T=[0.0, 0.0, 0.0, 2.0, -1.00004])
    own = dataclasses.replace(group.rollouts_G[0], branches=[branch])
    groups = [dataclasses.replace(group, rollouts_G=[own, group.rollouts_G[1]])]
    batch = assemble_batch("run_a", 1, groups, advantage=AdvantageConfig(type="mean"), temperature=1.0)
    SampleKeeper(run, SamplesConfig(per_step=2), as_letters).keep(groups, batch)
    (kept,) = read_batches(run.samples, run.ratios, 9)
    assert [sample.tokens and sample.tokens.advantages for sample in kept.samples] == [[2.0, -1.0], []]
    assert kept.samples[0].advantage == pytest.approx(0.49998)


def test_the_file_keeps_the_newest_and_stays_bounded_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for start in range(0, 40, 8):
        file = SampleFile(path, keep=4)  # as after a restart
        for step in range(start, start + 8):
            file.append([a_sample(step)])
            kept = [sample.step for sample in read_samples(path, 99)]
            assert kept == list(range(step - len(kept) + 1, step + 1)) and min(step + 1, 4) <= len(kept) <= 8
    assert [sample.step for sample in read_samples(path, 2)] == [38, 39]


def test_long_texts_are_bounded_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = SampleFile(path, keep=100, max_bytes=10_000)
    for step in range(50):
        file.append([a_sample(step, "\x1b" * 300)])  # six bytes each in JSON
        assert path.stat().st_size <= 10_000
    assert read_samples(path, 1)[0].step == 49 and len(read_samples(path, 99)) >= 2


def test_any_text_is_stored_as_it_is_in_ascii_and_whole_lines_alone_are_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    nasty = '\x1b]2;owned\x07\n"\\ \u2028\x9b31m [bold] 漢字 \U0001f600'
    SampleFile(path, keep=4).append([a_sample(1, nasty)])
    assert path.read_bytes().isascii() and b"\x1b" not in path.read_bytes()
    with path.open("a") as file:
        file.write('no json\n{"step": "x"}\n[]\n{"step": 2, "env": "to')
    assert read_samples(path, 9) == [a_sample(1, nasty)]
    SampleFile(path, keep=4).append([a_sample(3)])
    assert [sample.step for sample in read_samples(path, 9)] == [1, 3]


def test_a_disk_that_takes_nothing_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(tmp_path)
    run.metrics.write_text("in the way")
    groups = [a_group(0)]
    batch = assemble_batch("run_a", 1, groups, advantage=AdvantageConfig(), temperature=1.0)
    keeper = SampleKeeper(run, SamplesConfig(), as_letters)
    with caplog.at_level(logging.WARNING):
        keeper.keep(groups, batch)
        keeper.keep(groups, batch)
    assert len(caplog.messages) == 1 and "not kept as text" in caplog.messages[0]
    assert read_samples(run.samples, 1) == []


async def test_a_run_keeps_its_rollouts_in_words(workspace: Workspace) -> None:  # noqa: F811
    assert await workspace.run_to_the_end(max_steps=3, samples={"per_step": 2, "keep_steps": 1, "max_chars": 40}) == 0
    samples = read_samples(workspace.run.samples, 99)
    assert [sample.step for sample in samples][-2:] == [3, 3]
    assert all(len(sample.prompt) <= 40 and sample.num_completion_tokens == 3 for sample in samples)
    assert {sample.env for sample in samples} == {"reverse-text"}
    decode = ChatTokenizer.load(str(workspace.model)).decode
    batch = read_batch(workspace.run.rollout_file(3)).samples
    said = {decode([i for i, own in zip(one.token_ids, one.loss_mask, strict=True) if own]) for one in batch}
    assert {sample.completion for sample in samples[-2:]} <= said


def test_a_conversation_keeps_its_turns_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    group = a_group(0, [1.0], version=1)
    (first,) = group.rollouts_G
    (branch,) = first.branches
    mask = [False, False, True, True, False, False, False, True]
    ids = list(range(len(mask)))
    branch = dataclasses.replace(
        branch, token_ids_T=ids, loss_mask_T=mask, logprobs_T=[0.0] * len(ids), num_prompt_tokens=2
    )
    talk = dataclasses.replace(first, branches=[branch])
    groups = [dataclasses.replace(group, rollouts_G=[talk])]
    batch = assemble_batch("run_a", 1, groups, advantage=AdvantageConfig(type="mean"), temperature=1.0)
    SampleKeeper(run, SamplesConfig(per_step=1), as_letters).keep(groups, batch)
    (sample,) = read_samples(run.samples, 9)
    assert sample.prompt == "ab"
    assert [(turn.by_policy, turn.text) for turn in sample.turns] == [(True, "cd"), (False, "efg"), (True, "h")]


def in_branches(rollout: Rollout, num: int) -> Rollout:
    """Three tokens of prompt, then in each branch two of a message and two of an answer; the second goes on from it."""
    first = Branch([0, 1, 2, 3, 4], [False] * 3 + [True] * 2, [0.0] * 3 + [-1.0] * 2, 3, [1])
    more = [
        Branch([0, 1, 2, 3, 4, 5, 6, 7 + at, 8], [False] * 7 + [True] * 2, [0.0] * 7 + [-1.0] * 2, 3, [2], [], 5 + at)
        for at in range(num - 1)
    ]
    return dataclasses.replace(rollout, branches=[first, *more])


def test_each_branch_of_a_kept_rollout_is_a_line_with_what_it_does_not_share(tmp_path: Path) -> None:
    run, group = make_run(tmp_path), a_group(0, [0.0, 1.0], version=1)
    many = in_branches(group.rollouts_G[0], MAX_KEPT_BRANCHES + 2)
    groups = [dataclasses.replace(group, rollouts_G=[many, group.rollouts_G[1]]), a_group(1, [0.5, 0.5], version=1)]
    keeper = SampleKeeper(run, SamplesConfig(per_step=2, keep_steps=2), as_letters)
    for step in (3, 4):
        batch = assemble_batch("run_a", step, groups, advantage=AdvantageConfig(type="mean"), temperature=1.0)
        assert [len(each) for each in rollouts_of(batch.samples)] == [MAX_KEPT_BRANCHES + 2, 1, 1, 1]
        keeper.keep(groups, batch)
    (kept,) = read_batches(run.samples, run.ratios, 9, step=3)
    assert kept.rewards == (0.0, 1.0, 0.5, 0.5), "of each rollout once"
    assert [(each.place, each.branch) for each in kept.samples] == [*((at, at) for at in range(8)), (10, 0)]
    first, second, *_, last = kept.samples
    assert (first.prompt, first.completion, first.num_branches, first.num_shared) == ("abc", "de", 10, 0)
    assert (second.prompt, second.completion, second.num_shared) == ("fg", "hi", 5)
    assert (second.num_completion_tokens, second.num_tokens, second.policy_versions) == (2, 9, [2])
    assert second.tokens is not None and second.tokens.pieces == ["h", "i"]
    assert (last.branch, last.num_branches, last.group) == (0, 1, 0)
    for limit, wanted in ((1, [10]), (2, [*range(8), 10]), (3, [10, *range(8), 10]), (9, [*range(8), 10] * 2)):
        assert [each.place for each in read_samples(run.samples, limit)] == wanted, "so many rollouts, each whole"


def test_a_branch_is_told_as_text() -> None:
    assert "branch" not in sample_view(a_sample(1)) and "output" not in sample_view(a_sample(1))
    branch = msgspec.structs.replace(a_sample(1), branch=1, num_branches=3, num_shared=312, output="x\x1b\ny")
    assert sample_view(branch) == (
        "step 1  talk/e1  reward 0.500  advantage -0.500  policy version 0, 1  4 tokens  branch 2 of 3\n"
        "  the first 312 tokens as in branch 1\n"
        "  prompt:\n    prompt\n  completion:\n    text\n  output:\n    x\n    y"
    )


@given(st.lists(st.floats(0, 1), min_size=8, max_size=8).map(lambda rewards: rewards * 3), st.integers(0, 30))
def test_whole_groups_are_kept(rewards: list[float], per_step: int) -> None:
    places = Keeping(per_step, 4).places(rewards)
    assert len(places) == (0 if not per_step else 4 * min(6, max(1, per_step // 4)))
    assert places == [first + at for first in places[::4] for at in range(4)]
    assert all(first % 4 == 0 for first in places[::4])


def test_one_group_alone_is_that_whose_rewards_differ_most_and_several_span_the_means() -> None:
    rewards = [1.0, 1.0, 0.0, 1.0, 0.4, 0.6, 0.0, 0.0]
    assert Keeping(2, 2).places(rewards) == [2, 3]
    assert Keeping(4, 2).places(rewards) == [0, 1, 6, 7]


@given(st.binary(max_size=40).map(lambda data: bytes(each % 2 for each in data)), st.integers(1, 3))
def test_of_a_long_rollout_the_two_ends_are_kept(mask: bytes, times: int) -> None:
    mask = mask * times * 20
    keeping = Keeping(64, 2)
    found = keeping.positions(mask)
    assert found == sorted(set(found)) and len(found) <= keeping.max_tokens == 256
    if 1 in mask:
        start, end = mask.index(1), mask.rindex(1)
        assert (found[0], found[-1]) == (start, end)
        assert len(found) == min(end + 1 - start, 256)
    else:
        assert found == []


def test_the_text_of_tokens_adds_up_also_where_a_character_has_several() -> None:
    text = "héé 漢😀 x"
    whole = text.encode()
    found = pieces(list(whole), lambda ids: bytes(ids).decode(errors="replace"))
    assert "".join(found) == text and len(found) == len(whole)
    assert found[:3] == ["h", "", "é"]


def test_pieces_of_a_broken_character_end() -> None:
    found = pieces([0xE6, 0xBC, 0x41, 0xFF, 0x42], lambda ids: bytes(ids).decode(errors="replace"))
    assert len(found) == 5 and "A" in "".join(found) and found[-1].endswith("B")


def test_a_batch_that_was_made_again_after_a_rollback_replaces_all_from_there(tmp_path: Path) -> None:
    file, ratios = SampleFile(tmp_path / "s", keep=99), RatioFile(tmp_path / "r", keep=99)
    for step, reward in [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9)]:
        tokens = SampleTokens(["a", "b", "c"], [-1.0, None, -2.0])
        sample = TokenSample(step, "talk", "e", "p", "c", reward, 0.0, [0], 9, 4, place=0, group=0, tokens=tokens)
        file.append([BatchRewards([reward, 1.0], step), sample])
        ratios.append(BatchRatios(step, {0: [reward, float("inf")]}))
    first, second = read_batches(tmp_path / "s", tmp_path / "r", 9)
    assert [(each.step, list(each.rewards), len(each.samples)) for each in (first, second)] == [
        (1, [0.1, 1.0], 1),
        (2, [0.9, 1.0], 1),
    ]
    assert second.samples[0].tokens is not None
    assert token_ratios(second.samples[0].tokens, second.ratios[0]) == [0.9, None, None]
    assert [sample.reward for sample in read_samples(tmp_path / "s", 9)] == [0.1, 0.9]
    assert [each.step for each in read_batches(tmp_path / "s", tmp_path / "r", 1)] == [2]


def test_a_file_is_cut_where_a_batch_begins(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for step in range(9):
        SampleFile(path, keep=4).append([BatchRewards([0.5], step), a_sample(step), a_sample(step)])
        assert path.read_bytes().startswith(b'{"rewards"')
    assert {len(each.samples) for each in read_batches(path, tmp_path / "none", 9)} == {2}


def test_files_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    old = {"step": 1, "env": "talk", "example_id": "e", "prompt": "p", "completion": "c", "reward": 0.5}
    old |= {"advantage": 0.1, "policy_versions": [0], "num_tokens": 5, "num_completion_tokens": 2, "turns": []}
    path.write_text(json.dumps(old) + "\n")
    (batch,) = read_batches(path, tmp_path / "none", 9)
    assert (batch.rewards, batch.samples[0].place, batch.samples[0].tokens) == ((), -1, None)
    assert len(read_samples(path, 9)) == 1 and read_ratios(tmp_path / "none") == {}
