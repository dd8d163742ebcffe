"""How many requests a run has under way: the decision against a modelled server, and which requests wait."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.orchestrator.pool import ROUNDS_ON_PLATEAU, START_LIMIT, ConcurrencyControl, Places


def play_round(control: ConcurrencyControl, capacity: int, *, is_full: bool = True) -> None:
    """A server that samples `capacity` rollouts at a time, 32 tokens each in one second; the others queue."""
    for _ in range(control.limit):
        control.note_answer(1, 32, max(1.0, control.limit / capacity), is_full=is_full)


@pytest.mark.parametrize("capacity", [24, 100, 400])
def test_the_limit_rises_to_what_the_server_can_do_and_stays_near(capacity: int) -> None:
    control = ConcurrencyControl(maximum=4096)
    limits = []
    for _ in range(5 * ROUNDS_ON_PLATEAU):
        play_round(control, capacity)
        limits.append(control.limit)
    assert limits[0] == 2 * START_LIMIT, "quickly at first"
    assert capacity <= limits[-1] <= 2 * capacity
    assert max(limits) <= 4 * capacity


def test_the_limit_never_passes_its_maximum_nor_rises_unasked() -> None:
    control = ConcurrencyControl(maximum=40)
    for _ in range(5):
        play_round(control, 1000, is_full=False)
    assert control.limit == START_LIMIT
    for _ in range(9):
        play_round(control, 1000)
    assert control.limit == 40


def test_an_overload_halves_the_limit_once_for_all_that_were_under_way_together() -> None:
    control = ConcurrencyControl(maximum=64, start=64)
    epoch = control.epoch
    for _ in range(64):
        control.note_overload(epoch)
    assert control.limit == 32
    control.note_overload(control.epoch)
    assert control.limit == 16
    play_round(control, 1000)
    assert control.limit == 18, "in small steps from now on"


@given(st.lists(st.booleans(), max_size=80), st.integers(1, 100))
def test_the_limit_stays_between_one_and_its_maximum(overloads: list[bool], maximum: int) -> None:
    control = ConcurrencyControl(maximum)
    for overload in overloads:
        control.note_overload(control.epoch) if overload else play_round(control, 50)
        assert 1 <= control.limit <= maximum


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_as_many_as_the_limit_are_let_in_in_the_order_of_asking() -> None:
    places, inside = Places(5), []
    go_on = asyncio.Event()

    async def request(name: str, num_rollouts: int) -> None:
        async with places.hold(num_rollouts):
            inside.append(name)
            await go_on.wait()

    tasks = [asyncio.create_task(request(name, n)) for name, n in [("a", 3), ("b", 2), ("c", 4), ("d", 1), ("e", 9)]]
    await settle()
    assert (inside, places.num_used) == (["a", "b"], 5)
    tasks[1].cancel()  # two are free: d would fit, but c has come before
    await settle()
    assert (inside, places.num_used) == (["a", "b"], 3)
    tasks[2].cancel()
    await settle()
    assert (inside, places.num_used) == (["a", "b", "d"], 4)
    go_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (inside[-1], places.num_used) == ("e", 0), "what is larger than the limit goes alone"


async def test_one_that_is_cancelled_at_its_turn_gives_its_place_back() -> None:
    places = Places(1)
    async with places.hold(1):
        waiting = asyncio.create_task(places.hold(1).__aenter__())
        await settle()
    waiting.cancel()  # it has been let in, and has not run yet
    await asyncio.gather(waiting, return_exceptions=True)
    assert places.num_used == 0
    async with places.hold(1):
        assert places.num_used == 1
