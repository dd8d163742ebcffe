"""Examples that are always right or always wrong: noted, drawn seldom, and known again after a restart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.orchestrator.batch import CheckpointError, Progress
from prime_rl.orchestrator.orchestrator import make_sampler
from prime_rl.orchestrator.sampler import Curricula, ExampleSampler, Pools
from tests.orchestrator_support import TalkEnv, run_config

NUM_EXAMPLES = 20
RANGE = {"talk": (0.0, 1.0)}


def pools_of(num_examples: int = NUM_EXAMPLES) -> Pools:
    return Pools({"talk": TalkEnv(num_examples)}, RANGE)


def drawn(share: float, settled: int, num: int = 4000) -> Counter[str]:
    """How often each example is drawn when the first `settled` ones are."""
    envs, pools = {"talk": TalkEnv(NUM_EXAMPLES)}, pools_of()
    for number in range(settled):
        pools.note("talk", f"e{number}", [1.0, 1.0])
    sampler = ExampleSampler(envs, 3, None, pools, share)
    return Counter(sampler.pick(index).example.id for index in range(num))


def test_a_group_settles_its_example_until_another_one_says_otherwise() -> None:
    pools = pools_of()
    pools.note("talk", "e1", [1.0, 1.0])
    pools.note("talk", "e2", [0.0, 0.0])
    pools.note("talk", "e3", [0.0, 1.0])
    pools.note("talk", "e4", [0.5, 0.5])
    assert [pools.has("talk", f"e{n}") for n in range(5)] == [False, True, True, False, False]
    assert pools.figures() == {"env/talk/settled_right": 1.0, "env/talk/settled_wrong": 1.0}
    pools.note("talk", "e1", [0.0, 0.0])
    pools.note("talk", "e2", [0.0, 0.2])
    assert pools.figures() == {"env/talk/settled_right": 0.0, "env/talk/settled_wrong": 1.0}


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_settled_examples_are_drawn_by_their_share(share: float) -> None:
    counts = drawn(share, settled=5)
    settled = sum(counts[f"e{n}"] for n in range(5)) / 5
    others = sum(counts[f"e{n}"] for n in range(5, NUM_EXAMPLES)) / (NUM_EXAMPLES - 5)
    # The stand-ins make the others more frequent: of 20 examples 5 give up (1 - share) of their turns to 15.
    assert settled / 200 == pytest.approx(share, rel=0.2)
    assert others / 200 == pytest.approx(1 + (1 - share) * 5 / 15, rel=0.05)


def test_the_order_is_the_same_without_settled_examples_and_with_a_share_of_one() -> None:
    envs = {"talk": TalkEnv(NUM_EXAMPLES)}
    plain = [ExampleSampler(envs, 3).pick(index).example.id for index in range(60)]
    full = pools_of()
    for number in range(NUM_EXAMPLES):
        full.note("talk", f"e{number}", [0.0])
    for pools, share in ((pools_of(), 0.1), (full, 1.0)):
        sampler = ExampleSampler(envs, 3, None, pools, share)
        assert [sampler.pick(index).example.id for index in range(60)] == plain
    assert sum(drawn(0.1, settled=NUM_EXAMPLES, num=100).values()) == 100, "there is always an example"


@given(st.lists(st.tuples(st.integers(0, 36), st.sampled_from([0.0, 0.5, 1.0])), max_size=60))
def test_what_is_known_comes_back_from_its_state(notes: list[tuple[int, float]]) -> None:
    pools = pools_of(37)
    for number, reward in notes:
        pools.note("talk", f"e{number}", [reward, reward])
    again = pools_of(37)
    again.restore(json.loads(json.dumps(pools.state())))
    assert again.state() == pools.state() and again.figures() == pools.figures()


def test_other_examples_than_before_take_what_fits() -> None:
    pools = pools_of(3)
    pools.note("talk", "e0", [1.0])
    pools.note("talk", "e2", [0.0])
    fewer = Pools({"talk": TalkEnv(2), "new": TalkEnv(2)}, {**RANGE, "new": (0.0, 1.0)})
    fewer.restore({**pools.state(), "gone": {"right": "AA=="}})
    assert fewer.figures()["env/talk/settled_right"] == 1.0 and fewer.figures()["env/talk/settled_wrong"] == 0.0


@pytest.mark.parametrize("pools", [{"talk": {"right": "!"}}, {"talk": 3}, {"talk": {"wrong": 5}}])
def test_a_damaged_state_ends_the_run_with_the_reason(pools: dict[str, Any], tmp_path: Path) -> None:
    envs: Any = {"talk": TalkEnv(4)}
    config = run_config(model=tmp_path / "model", env=[{"id": "reverse-text", "name": "talk"}])
    with pytest.raises(CheckpointError, match="the sampler state of step 3: the settled examples cannot be read"):
        make_sampler(config, envs, Progress(3, 9, pools))


def test_a_batch_has_what_was_known_when_it_was_made() -> None:
    envs, pools = {"talk": TalkEnv(3)}, pools_of(3)
    assert ExampleSampler(envs, 0).state(4) == {"next_index": 4}
    pools.note("talk", "e1", [1.0])
    known = {"next_index": 4, "pools": {"talk": {"right": "Ag==", "wrong": "AA=="}}}
    assert ExampleSampler(envs, 0, pools=pools, curricula=Curricula({})).state(4) == known
