"""Levels of examples: when they change, from which example on, and that a restart draws the same ones."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.configs.envs import CurriculumConfig, EnvConfig
from prime_rl.orchestrator.envs import Example
from prime_rl.orchestrator.envs.checked import EnvironmentBroken
from prime_rl.orchestrator.sampler import Curricula, Curriculum, ExampleSampler
from tests.orchestrator_support import TalkEnv

NUM_LEVELS, OF_EACH = 4, 5
BATCH, AHEAD = 3, 4
# Of a policy that learns, level by level: what it solves.
SOLVED = {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.0}


class LevelsEnv(TalkEnv):
    """`OF_EACH` examples of each level."""

    def __init__(self) -> None:
        self._examples = [
            Example(f"{level}-{n}", [], "", level=level) for level in range(NUM_LEVELS) for n in range(OF_EACH)
        ]


def curriculum(**over: Any) -> Curriculum:
    return Curriculum(CurriculumConfig(**{"window": 2, **over}), NUM_LEVELS, full_reward=1.0)


def after(steps: list[float], **over: Any) -> list[int]:
    """The level after each batch of two groups whose rollouts are solved with this share of four."""
    levels, it = [], curriculum(**over)
    for batch, share in enumerate(steps):
        for index in (2 * batch, 2 * batch + 1):
            it.add(index, [float(number < 4 * share) for number in range(4)])
        it.decide(2 * batch + 2)
        levels.append(it.level)
    return levels


def test_the_level_follows_the_share_of_solved_rollouts_within_its_limits() -> None:
    assert after([1, 1, 1, 1, 1]) == [1, 2, 3, 3, 3]
    assert after([1, 0.5, 0.25, 0, 0, 0]) == [1, 1, 1, 0, 0, 0]
    assert after([0.75, 0.75, 0.5], raise_at=0.75, lower_at=0.6) == [1, 2, 1], "at the one, and below the other"
    assert after([1, 1, 1, 1, 1], window=4) == [0, 1, 1, 2, 2], "each level is judged by its own groups"


def test_only_the_full_reward_is_solved() -> None:
    it = curriculum(window=1)
    it.add(0, [0.99, 0.99])
    it.decide(1)
    assert it.level == 0


def test_groups_that_were_drawn_before_a_change_do_not_count_for_the_new_level() -> None:
    it = curriculum()
    for index in (0, 1):
        it.add(index, [1.0])
    it.decide(6)  # 2 to 5 are under way
    assert [it.level_at(index) for index in (0, 5, 6, 99)] == [0, 0, 1, 1]
    for index in (2, 3, 4, 5):
        it.add(index, [1.0])
    it.decide(8)
    assert it.level == 1
    for index in (6, 7):
        it.add(index, [1.0])
    it.decide(9)
    assert it.level == 2


def make_sampler(known: Mapping[str, Any] | None = None) -> ExampleSampler:
    envs = {"sums": LevelsEnv(), "talk": TalkEnv(7)}
    curricula = Curricula({"sums": curriculum(window=3)})
    curricula.restore(known or {})
    return ExampleSampler(envs, 5, curricula=curricula)


def batches(sampler: ExampleSampler, first: int, num: int, seed: int) -> list[tuple[list[str], dict[str, Any]]]:
    """The examples of each batch and the state in it. Groups run ahead and end in any order; every seventh is lost."""
    made, rng, drawn = [], random.Random(seed), {}
    for _ in range(num):
        kept = [index for index in range(first, first + 3 * BATCH) if index % 7][:BATCH]
        for index in range(first, kept[-1] + 1 + AHEAD):
            drawn.setdefault(index, sampler.pick(index))
        done = [index for index in range(first, kept[-1] + 1 + AHEAD) if index % 7]
        rng.shuffle(done)
        for index in done:
            share = SOLVED[drawn[index].example.level]
            rewards = [float(number < 4 * share) for number in range(4)]
            sampler.note(index, drawn[index].env_name, drawn[index].example.id, rewards)
        sampler.end_batch(kept[-1])
        first = kept[-1] + 1
        state = json.loads(json.dumps(sampler.state(first)))
        made.append(([f"{drawn[index].env_name}/{drawn[index].example.id}" for index in kept], state))
    return made


@given(restart=st.integers(1, 29), seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_after_a_restart_the_examples_and_levels_are_those_that_would_have_come(
    restart: int, seeds: tuple[int, int]
) -> None:
    whole = batches(make_sampler(), 0, 30, seeds[0])
    state = whole[restart - 1][1]
    rest = batches(make_sampler(state.get("curricula")), state["next_index"], 30 - restart, seeds[1])
    assert rest == whole[restart:]


def test_a_run_moves_between_the_levels_that_it_can_and_cannot_solve() -> None:
    made = batches(make_sampler(), 0, 40, 0)
    ids = [name for names, _ in made for name in names if name.startswith("sums/")]
    assert {name[5] for name in ids} == {"0", "1"} and all(name.startswith("sums/1") for name in ids[-20:])
    sampler = make_sampler(made[-1][1]["curricula"])
    assert sampler.figures() == {"env/sums/level": 1.0}


def test_a_state_of_other_levels_is_fitted_and_a_damaged_one_refused() -> None:
    curricula = Curricula({"sums": curriculum()})
    curricula.restore({"sums": {"begins": [[0, 3], [9, 12]], "shares": []}, "gone": 3})
    assert [curricula.level_at("sums", index) for index in (0, 9)] == [3, NUM_LEVELS - 1]
    for bad in ({"begins": []}, {"begins": [[3, 1], [2, 0]], "shares": []}, 3, {"begins": [[0]], "shares": []}):
        with pytest.raises(ValueError, match="the levels cannot be read"):
            curricula.restore({"sums": bad})


@pytest.mark.parametrize(
    ("family", "args", "message"),
    [
        ("gsm_symbolic", {"curriculum": {}}, "gsm_symbolic has no levels in reasoning-gym"),
        ("chain_sum", {"curriculum": {"raise": 0.9}}, "curriculum.raise: unknown key; did you mean 'raise_at'"),
        ("chain_sum", {"curriculum": {"lower_at": 0.9}}, "lower_at: found 0.9: must be less than raise_at = 0.8"),
        ("chain_sum", {"curriculum": {"window": 0}}, "greater than or equal to 1"),
    ],
)
def test_an_invalid_curriculum_is_refused_with_the_config(family: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="args") as caught:
        EnvConfig(id=f"reasoning-gym:{family}", args=args)
    assert message in str(caught.value)


def test_an_environment_without_examples_is_left_to_the_sampler() -> None:
    config = EnvConfig(id="reasoning-gym:chain_sum", args={"curriculum": {}})
    envs = {config.label: TalkEnv(num_examples=0)}
    with pytest.raises(EnvironmentBroken, match="its train split has no examples"):
        ExampleSampler(envs, 5, curricula=Curricula.of([config], envs))
