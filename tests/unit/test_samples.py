"""Rollouts kept as text: which, how long, how many; and that nothing in them or on the disk can disturb the run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.configs.monitors import SamplesConfig
from prime_rl.configs.orchestrator import AdvantageConfig
from prime_rl.contract.samples import Sample, SampleFile, read_samples
from prime_rl.contract.types import read_batch
from prime_rl.orchestrator.batch import assemble_batch
from prime_rl.orchestrator.samples import SampleKeeper, shorten, spread
from prime_rl.orchestrator.tokenizer import ChatTokenizer
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
    assert worst == Sample(3, "talk", "talk/e0", "hhh", "ii", 0.0, -0.5, [1], 5, 2)
    assert (best.reward, best.advantage) == (1.0, 0.5)
    SampleKeeper(run, SamplesConfig(per_step=0), as_letters).keep(groups, batch)
    assert len(read_samples(run.samples, 9)) == 2


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
    mask = [False, False, True, True, False, False, False, True]
    ids = list(range(len(mask)))
    talk = dataclasses.replace(
        first, token_ids_T=ids, loss_mask_T=mask, logprobs_T=[0.0] * len(ids), num_prompt_tokens=2
    )
    groups = [dataclasses.replace(group, rollouts_G=[talk])]
    batch = assemble_batch("run_a", 1, groups, advantage=AdvantageConfig(type="mean"), temperature=1.0)
    SampleKeeper(run, SamplesConfig(per_step=1), as_letters).keep(groups, batch)
    (sample,) = read_samples(run.samples, 9)
    assert sample.prompt == "ab"
    assert [(turn.by_policy, turn.text) for turn in sample.turns] == [(True, "cd"), (False, "efg"), (True, "h")]
