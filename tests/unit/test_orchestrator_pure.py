"""Advantages, example order, batches, progress: what the orchestrator decides without I/O."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.orchestrator import AdvantageConfig, CkptConfig
from prime_rl.contract.files import mark_stable
from prime_rl.contract.layout import RunDir
from prime_rl.contract.types import BadBatchError, read_batch
from prime_rl.orchestrator.batch import (
    CheckpointError,
    Progress,
    SecondOrchestrator,
    assemble_batch,
    checkpoint_is_due,
    find_progress,
    has_signal,
    publish_batch,
    save_state,
)
from prime_rl.orchestrator.envs.checked import EnvironmentBroken
from prime_rl.orchestrator.evaluate import next_due
from prime_rl.orchestrator.metrics import last_eval_step, write_metrics
from prime_rl.orchestrator.orchestrator import FINAL
from prime_rl.orchestrator.recorder import Branch, Rollout, derive_seed
from prime_rl.orchestrator.rollout import Group
from prime_rl.orchestrator.sampler import ExampleSampler
from prime_rl.orchestrator.scheduler import MAX_FILTERED_BATCHES, GroupLedger
from tests.orchestrator_support import TalkEnv, make_run


def a_rollout(reward: float = 0.5, version: int = 0, num_completion: int = 2) -> Rollout:
    branch = Branch(
        token_ids_T=[7] * 3 + [8] * num_completion,
        loss_mask_T=[False] * 3 + [True] * num_completion,
        logprobs_T=[0.0] * 3 + [-1.0] * num_completion,
        num_prompt_tokens=3,
        turn_versions=[version],
    )
    return Rollout([branch], reward, {"exact_match": float(reward == 1)}, truncated=False)


def with_advantages(rollout: Rollout, own_T: list[float]) -> Rollout:
    """The same with its environment's own advantages."""
    (branch,) = rollout.branches
    return replace(rollout, branches=[replace(branch, token_advantages_T=own_T)])


def a_group(index: int, rewards: list[float] | None = None, version: int = 0, env: str = "talk") -> Group:
    return Group(index, env, f"{env}/e{index}", [a_rollout(r, version) for r in rewards or [0.0, 1.0]])


def test_each_epoch_has_every_example_once_and_its_own_order() -> None:
    sampler = ExampleSampler({"talk": TalkEnv(num_examples=12)}, seed=5)
    epochs = [[sampler.pick(e * 12 + i).example.id for i in range(12)] for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_example_order_is_a_function_of_seed_and_index() -> None:
    envs = {"a": TalkEnv(num_examples=7), "b": TalkEnv(num_examples=3)}
    first = [ExampleSampler(envs, 9).pick(i) for i in range(40)]
    sampler = ExampleSampler(envs, 9)
    assert [sampler.pick(i) for i in reversed(range(40))] == first[::-1]  # whatever was asked before
    assert [ExampleSampler(envs, 10).pick(i) for i in range(40)] != first


def test_environments_are_sampled_in_equal_parts() -> None:
    sampler = ExampleSampler({"a": TalkEnv(num_examples=50), "b": TalkEnv(num_examples=2)}, seed=0)
    names = [sampler.pick(i).env_name for i in range(20)]
    assert names.count("a") == names.count("b") == 10


@pytest.mark.parametrize("weights", [{"a": 3.0, "b": 1.0}, {"a": 0.2, "b": 0.5, "c": 0.3}, {"a": 1, "b": 10, "c": 1}])
def test_weights_are_shares_of_any_stretch_and_skip_no_example(weights: dict[str, float]) -> None:
    envs = {name: TalkEnv(7) for name in weights}
    picks = [ExampleSampler(envs, 1, weights).pick(index) for index in range(400)]
    total = sum(weights.values())
    for name, weight in weights.items():
        for start in range(0, 400, 37):
            stretch = [pick for pick in picks[start : start + 100] if pick.env_name == name]
            assert abs(len(stretch) - weight / total * len(picks[start : start + 100])) < len(weights)
        own = [pick.example.id for pick in picks if pick.env_name == name]
        assert all(len(set(own[at : at + 7])) == 7 for at in range(0, len(own) - 7, 7)), "epochs are whole"
    late = ExampleSampler(envs, 1, weights)
    assert [late.pick(index) for index in (399, 12, 200)] == [picks[index] for index in (399, 12, 200)]


def test_an_environment_without_examples_ends_its_run() -> None:
    with pytest.raises(EnvironmentBroken, match=r"^env b: its train split has no examples"):
        ExampleSampler({"a": TalkEnv(), "b": TalkEnv(num_examples=0)}, seed=0)
    assert EnvironmentBroken in FINAL


def test_seeds_differ_by_every_part() -> None:
    seeds = {derive_seed(run, "train", index, number) for run in (1, 2) for index in range(50) for number in range(4)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed(1, "train", 3, 0) == derive_seed(1, "train", 3, 0)


def test_a_batch_holds_all_samples_in_order_with_advantages_of_their_own_group() -> None:
    groups = [a_group(4, [0.0, 1.0]), a_group(6, [0.5, 0.5], version=1)]
    batch = assemble_batch("run_a", 3, groups, advantage=AdvantageConfig(type="mean"), temperature=0.7)
    assert [sample.advantage for sample in batch.samples] == [-0.5, 0.5, 0.0, 0.0]
    assert [sample.example_id for sample in batch.samples] == ["talk/e4", "talk/e4", "talk/e6", "talk/e6"]
    assert [sample.policy_version for sample in batch.samples] == [0, 0, 1, 1]
    assert batch.samples[0].loss_mask == [False, False, False, True, True]
    assert batch.samples[0].temperature == 0.7
    assert batch.sampler_state == {"next_index": 7}


def test_a_truncated_rollout_may_be_scored_and_not_learned_from() -> None:
    whole = a_group(4, [0.0, 1.0, 0.5])
    cut = replace(whole, rollouts_G=[replace(whole.rollouts_G[0], truncated=True), *whole.rollouts_G[1:]])
    advantages = {}
    for masks in (False, True):
        advantage = AdvantageConfig(type="mean", mask_truncated=masks)
        batch = assemble_batch("run_a", 3, [cut], advantage=advantage, temperature=1.0)
        advantages[masks] = [sample.advantage for sample in batch.samples]
        # Without a loss token no term of a loss can reach it: not its KL to the base either.
        assert [any(sample.loss_mask) for sample in batch.samples] == [not masks, True, True]
        (branch,) = cut.rollouts_G[0].branches
        assert batch.samples[0].logprobs == ([0.0] * 5 if masks else branch.logprobs_T)
        assert batch.samples[0].token_ids == branch.token_ids_T and batch.samples[0].reward == 0.0
    assert advantages == {False: [-0.5, 0.5, 0.0], True: [0.0, 0.5, 0.0]}
    hopeless = replace(whole, rollouts_G=[replace(rollout, truncated=True) for rollout in whole.rollouts_G])
    assert has_signal(hopeless, AdvantageConfig()) and not has_signal(hopeless, AdvantageConfig(mask_truncated=True))


def test_a_batch_is_never_written_twice(tmp_path: Path) -> None:
    run = ready_run(tmp_path)
    batch = assemble_batch("run_a", 1, [a_group(0)], advantage=AdvantageConfig(), temperature=1.0)
    publish_batch(run, batch)
    written = run.rollout_file(1).read_bytes()
    other = assemble_batch("run_a", 1, [a_group(9)], advantage=AdvantageConfig(), temperature=1.0)
    with pytest.raises(SecondOrchestrator, match="written by another orchestrator of run_a"):
        publish_batch(run, other)
    assert run.rollout_file(1).read_bytes() == written
    assert read_batch(run.rollout_file(1)) == batch
    publish_batch(run, batch)
    assert [path.name for path in run.rollout_dir(1).iterdir()] == ["rollouts.msgpack"], "no leftover of any attempt"


def test_the_state_of_a_checkpoint_is_that_of_the_batch_that_was_published(tmp_path: Path) -> None:
    run = ready_run(tmp_path)
    mine, other = (
        assemble_batch("run_a", 1, [a_group(index)], advantage=AdvantageConfig(), temperature=1.0) for index in (0, 9)
    )

    def state() -> Any:
        return json.loads((run.orchestrator_checkpoint(1) / "state.json").read_text())["sampler_state"]

    save_state(run, mine)
    save_state(run, other)  # by a second orchestrator, a moment later
    publish_batch(run, mine)
    assert state() == mine.sampler_state
    save_state(run, other)
    with pytest.raises(SecondOrchestrator):
        publish_batch(run, other)
    assert state() == mine.sampler_state


def test_a_batch_that_appears_while_another_is_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ready_run(tmp_path)
    first, second = (
        assemble_batch("run_a", 1, [a_group(index)], advantage=AdvantageConfig(), temperature=1.0) for index in (0, 9)
    )
    sync = os.fsync

    def publish_meanwhile(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        publish_batch(run, second)
        sync(fd)

    monkeypatch.setattr(os, "fsync", publish_meanwhile)
    with pytest.raises(SecondOrchestrator):
        publish_batch(run, first)
    assert read_batch(run.rollout_file(1)) == second


# -- the ledger: which group goes into which batch, which may start ----


def a_ledger(k: int = 0, groups_per_batch: int = 2, max_steps: int = 3, **over: Any) -> GroupLedger:
    settings = {"step": 1, "next_index": 0, "groups_per_batch": groups_per_batch, "max_steps": max_steps, **over}
    return GroupLedger(max_async_level=k, **settings)


def fill(ledger: GroupLedger, version: int) -> list[int]:
    started = []
    while ledger.may_start(version):
        started.append(ledger.start().index)
    return started


@pytest.mark.parametrize("k", [0, 1, 3])
def test_no_more_than_k_plus_one_batches_are_started_ahead(k: int) -> None:
    ledger = a_ledger(k, groups_per_batch=2, max_steps=100)
    assert len(fill(ledger, version=0)) == 2 * (k + 1)
    assert ledger.version_needed == 1
    assert len(fill(ledger, version=5)) == 2 * 5


def test_nothing_is_started_for_batches_beyond_the_last_and_no_version_is_needed_for_them() -> None:
    ledger = a_ledger(k=9, groups_per_batch=2, max_steps=3)
    assert len(fill(ledger, version=0)) == 6
    assert ledger.version_needed is None and not ledger.may_start(9)


def test_batches_take_groups_in_example_order_whichever_finishes_first() -> None:
    ledger = a_ledger(k=1)
    fill(ledger, 0)
    for index in (3, 1, 2):
        ledger.finish(a_group(index))
    assert ledger.take() is None
    ledger.finish(a_group(0))
    assert [group.index for group in ledger.take() or []] == [0, 1]
    assert [group.index for group in ledger.take() or []] == [2, 3]
    assert ledger.step == 3


def test_a_dropped_group_is_replaced_by_a_later_one() -> None:
    ledger = a_ledger(k=0)
    fill(ledger, 0)
    ledger.drop(0)
    assert fill(ledger, 0) == [2]
    ledger.finish(a_group(1))
    ledger.finish(a_group(2))
    assert [group.index for group in ledger.take() or []] == [1, 2]
    assert ledger.num_dropped == 1


def test_what_no_batch_can_take_any_more_is_started_again_never_put_into_a_batch() -> None:
    ledger = a_ledger(k=1, step=4, max_steps=9)
    assert fill(ledger, version=3)[:4] == [0, 1, 2, 3]
    for index, version in enumerate([1, 2, 1, 3]):
        ledger.finish(a_group(index, version=version))
    assert ledger.take() is None and ledger.num_too_old == 1
    assert fill(ledger, version=3) == [0]
    ledger.finish(a_group(0, version=3))
    assert [group.index for group in ledger.take() or []] == [0, 1]
    assert ledger.restart_too_old(policy_version=3) == [2]
    assert (ledger.num_too_old, ledger.num_dropped) == (2, 0)


def test_what_falls_too_far_behind_under_way_is_started_again_under_its_number() -> None:
    ledger = a_ledger(k=3, groups_per_batch=2, max_steps=2, max_off_policy_steps=1)
    flights = [ledger.start() for _ in range(4)]
    for flight, version in zip(flights, [0, 1, 2], strict=False):
        for asked in (2, version, 2):
            flight.note(asked)
    assert [flight.oldest_version for flight in flights] == [0, 1, 2, None]  # the last has not asked yet
    ledger.finish(a_group(0, version=0))
    assert ledger.restart_too_old(policy_version=2) == [], "what is finished is fresh enough for its batch"
    assert ledger.restart_too_old(policy_version=3) == [1]
    assert (ledger.num_in_flight, ledger.num_too_old) == (2, 1)
    assert fill(ledger, version=3) == [1]
    for index in (1, 2, 3):
        ledger.finish(a_group(index, version=3))
    assert [[group.index for group in ledger.take() or []] for _ in range(2)] == [[0, 1], [2, 3]]


def test_nothing_is_too_old_by_default_as_long_as_the_trainer_only_takes_what_is_there() -> None:
    ledger = a_ledger(k=2, groups_per_batch=1, max_steps=9)
    for step in range(1, 9):
        version = step - 1  # all batches so far are trained
        while ledger.may_start(version):
            ledger.start().note(version)
        assert ledger.restart_too_old(version) == []
        ledger.finish(a_group(step - 1, version=max(0, step - 3)))
        assert ledger.take() is not None


def test_spares_are_started_beyond_the_batches_and_stand_in_for_dropped_groups() -> None:
    ledger = a_ledger(k=0, groups_per_batch=2, max_steps=2, num_spare=3)
    assert fill(ledger, version=0) == [0, 1, 2, 3, 4]
    ledger.drop(1)
    for index in (0, 2, 3):
        ledger.finish(a_group(index))
    assert [group.index for group in ledger.take() or []] == [0, 2]
    ledger.start().note(0)
    assert ledger.restart_too_old(0) == [3, 5], "the rest is too old for the next batch, or has not asked yet"
    assert ledger.version_needed == 1
    assert fill(ledger, version=1) == [3, 5, 6, 7], "in example order, under their own numbers; none for a batch 3"


def test_groups_without_signal_are_dropped_up_to_a_bound_for_each_batch() -> None:
    ledger = a_ledger(k=0, groups_per_batch=2, max_steps=2)
    taken = []
    while ledger.take() is None:
        taken += [ledger.finish(a_group(index), has_signal=False) for index in fill(ledger, 0)]
    assert taken == [False] * 2 * MAX_FILTERED_BATCHES + [True, True]
    assert (ledger.num_filtered, ledger.num_dropped, ledger.num_in_flight) == (2 * MAX_FILTERED_BATCHES, 0, 0)
    fill(ledger, 1)
    assert not ledger.finish(a_group(ledger.next_index - 1), has_signal=False), "the next batch has its own"


# -- where a run goes on ----


def ready_run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    for folder in (run.rollouts, run.checkpoints, run.metrics):
        folder.mkdir()
    return run


def write_step(run: RunDir, step: int, next_index: int, *, checkpoint: bool = False) -> None:
    batch = assemble_batch("run_a", step, [a_group(next_index - 1)], advantage=AdvantageConfig(), temperature=1.0)
    if checkpoint:
        save_state(run, batch)
    publish_batch(run, batch)


def test_a_new_run_starts_at_the_beginning(tmp_path: Path) -> None:
    assert find_progress(make_run(tmp_path), 2) == Progress(0, 0)


def test_goes_on_after_the_newest_batch(tmp_path: Path) -> None:
    run = ready_run(tmp_path)
    write_step(run, 1, 2)
    write_step(run, 2, 5)
    run.rollout_dir(3).mkdir()  # made, not filled
    assert find_progress(run, 2) == Progress(2, 5)


def test_goes_on_after_a_stable_checkpoint_whose_batches_are_gone(tmp_path: Path) -> None:
    run = ready_run(tmp_path)
    write_step(run, 4, 9, checkpoint=True)
    run.rollout_file(4).unlink()
    mark_stable(run.checkpoint_dir(4))
    assert find_progress(run, 2) == Progress(4, 9)


def test_a_checkpoint_without_stable_says_nothing(tmp_path: Path) -> None:
    run = ready_run(tmp_path)
    write_step(run, 3, 6)
    write_step(run, 4, 9, checkpoint=True)
    run.rollout_file(4).unlink()  # killed between the state file and the batch file
    assert find_progress(run, 2) == Progress(3, 6)


@pytest.mark.parametrize("text", ["", "{}", '{"version": 99, "step": 4, "sampler_state": {"next_index": 1}}'])
def test_a_damaged_state_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    run = ready_run(tmp_path)
    write_step(run, 4, 9, checkpoint=True)
    run.rollout_file(4).unlink()
    mark_stable(run.checkpoint_dir(4))
    (run.orchestrator_checkpoint(4) / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        find_progress(run, 2)


def test_goes_on_from_a_checkpoint_that_only_the_trainer_wrote(tmp_path: Path) -> None:
    run = ready_run(tmp_path)
    run.checkpoint_dir(3).mkdir()
    mark_stable(run.checkpoint_dir(3))
    assert find_progress(run, groups_per_batch=2) == Progress(3, 6)
    write_step(run, 3, 7)  # its batch file is there and comes first
    assert find_progress(run, groups_per_batch=2) == Progress(3, 7)


def test_a_damaged_batch_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    run = ready_run(tmp_path)
    run.rollout_dir(1).mkdir()
    run.rollout_file(1).write_bytes(b"\x93")
    with pytest.raises(BadBatchError, match=r"rollouts\.msgpack"):
        find_progress(run, 2)


def test_checkpoints_are_due_at_the_interval_and_at_the_end() -> None:
    config = CkptConfig(interval=4)
    assert [step for step in range(1, 11) if checkpoint_is_due(step, config, 10)] == [4, 8, 10]


# -- figures ----


def test_metrics_lines_are_json_and_the_newest_evaluation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "orchestrator.jsonl"
    assert last_eval_step(path, at_most=9) is None
    write_metrics(path, 5, {"eval/talk/reward": 0.5}, now=1.0)
    write_metrics(path, 6, {"reward/mean": float("nan")}, now=2.0)
    assert json.loads(path.read_text().splitlines()[1]) == {"step": 6, "time": 2.0, "reward/mean": None}
    with path.open("ab") as file:  # no line of ours
        file.write(b'{"eval/talk/reward": 1}\n' + b"[" * 100_000 + b'\n{"step": "\xff", "eval/talk/reward": 1}\n7\n')
    assert last_eval_step(path, at_most=9) == 5
    assert last_eval_step(path, at_most=4) is None


def test_evaluations_are_due_at_zero_at_the_interval_and_at_the_end() -> None:
    due = [next_due(None, 4, 10)]
    while due[-1] < 10:
        due.append(next_due(due[-1], 4, 10))
    assert due == [0, 4, 8, 10]
    assert next_due(5, 4, 10) == 8  # version 4 was skipped, 5 made up for it
