"""The note of what is in work, and the turns of runs that were in work when a server died."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.contract.notes import Item, Work, WorkNote, read_work
from prime_rl.inference import sharing as module
from prime_rl.inference.guard import ApiError
from prime_rl.inference.sharing import PROOFS, RECENT_S, TURN_S, AdapterUsers, Asked, Lanes, Turns
from prime_rl.utils.process import ProcessId
from tests.budgets import examples
from tests.patience import PATIENCE_S
from tests.unit.test_daemons_decide import INFERENCE, READY, dies, running
from tests.unit.test_inference_front import Clock


def served(run_id: str) -> Item:
    return Item(run_id, f"served {run_id}@v3")


@dataclass
class Server:
    """One life of a server, as far as it takes turns. `hostile`: runs whose requests end its engine."""

    path: Path
    hostile: Collection[str] = ()
    clock: Clock = field(default_factory=Clock)
    lives: bool = True
    broken: bool = False
    num_writes: int = 0

    def __post_init__(self) -> None:
        note = WorkNote(self.path)
        write = note.write

        def counted(items: Collection[Item]) -> None:
            self.num_writes += 1
            write(items)

        note.write = counted  # type: ignore[method-assign,assignment]
        self.num_checks = 0
        self.turns = Turns(note, lambda: self.lives, self.check, self.clock)
        self.open: list[str] = []
        self.most_open = 0

    async def check(self) -> None:
        assert self.open == []
        self.num_checks += 1
        if self.broken:
            self.lives = False
            raise ApiError(503, "The engine does not generate.")

    async def answer(self, run_id: str, until: asyncio.Event | None = None) -> None:
        async with self.turns.work(served(run_id)):
            self.open.append(run_id)
            await (until.wait() if until else asyncio.sleep(0))
            self.lives = self.lives and run_id not in self.hostile
            self.open.remove(run_id)

    def noted(self) -> list[str]:
        work = read_work(self.path)
        return [item.run_id for item in work.items] if work else []


async def passed() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def leave(path: Path, *run_ids: str, **suspects: int) -> None:
    """What a server that was killed has left."""
    work = Work(writer=ProcessId(1), items=[served(run_id) for run_id in run_ids], suspects=suspects)
    path.write_text(
        json.dumps(
            {"version": 1, "writer": {"pid": 1}, "items": [vars_of(i) for i in work.items]} | {"suspects": suspects}
        ),
        encoding="utf-8",
    )


def vars_of(item: Item) -> dict[str, str]:
    return {"run_id": item.run_id, "what": item.what}


async def test_what_is_in_work_is_noted_before_and_not_again_while_it_goes_on(tmp_path: Path) -> None:
    server = Server(tmp_path / "work.json")
    until = asyncio.Event()
    first = asyncio.create_task(server.answer("run_a", until))
    await passed()
    assert server.noted() == ["run_a"] and server.open == ["run_a"]
    for _ in range(50):
        await asyncio.gather(server.answer("run_a"), server.answer("run_b"))
        server.clock.now += 0.1
    assert server.noted() == ["run_a", "run_b"] and server.num_writes == 2
    until.set()
    await first
    server.clock.now += RECENT_S
    await server.answer("run_c")
    assert server.noted() == ["run_c"], "what is idle leaves the note when that is written next"
    work = read_work(server.path)
    assert work is not None and work.writer.is_running() and work.items == [served("run_c")]


async def test_a_server_that_is_idle_soon_names_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path / "work.json")
    until = asyncio.Event()
    slow = asyncio.create_task(server.answer("run_slow", until))
    await asyncio.gather(server.answer("run_a"), server.answer("run_b"))
    for _ in range(20):  # however long it takes
        server.clock.now += RECENT_S
        server.turns.tick()
    assert server.noted() == ["run_slow"]
    until.set()
    await slow
    server.turns.tick()
    assert server.noted() == ["run_slow"], "what has just ended may be what ended it"
    server.clock.now += RECENT_S
    writes = server.num_writes
    assert server.turns.tick() is None and server.noted() == [] and server.num_writes == writes + 1
    assert server.turns.tick() is None and server.num_writes == writes + 1


async def test_the_note_of_an_engine_that_has_failed_stays_as_it_is(tmp_path: Path) -> None:
    server = Server(tmp_path / "work.json", hostile={"run_bad"})
    await server.answer("run_bad")
    await server.answer("run_a")
    assert server.noted() == ["run_bad"]


async def test_suspects_are_served_apart_and_by_turns_until_each_is_proven_harmless(tmp_path: Path) -> None:
    leave(tmp_path / "work.json", "run_a", "run_b")
    server = Server(tmp_path / "work.json")
    ends = {run_id: asyncio.Event() for run_id in ("run_a", "run_b", "run_c", "run_d")}
    tasks = [asyncio.create_task(server.answer(run_id, end)) for run_id, end in ends.items()]
    tasks += [asyncio.create_task(server.answer("run_a", ends["run_a"])) for _ in range(3)]
    await passed()
    assert server.open == ["run_a"] * 4 and server.noted() == ["run_a"]
    assert server.turns.tick() == (
        "run_a to be answered: run_a, run_b get turns, since inference ended while it served them"
    )
    ends["run_a"].set()
    await passed()
    assert server.open == ["run_b"] and server.noted() == ["run_b"]
    again = [asyncio.create_task(server.answer("run_a")) for _ in range(PROOFS)]
    ends["run_b"].set()
    await passed()
    assert server.open == ["run_c", "run_d"], "who is no suspect is served together, and in turn"
    assert not {"run_a", "run_b"} & set(server.noted())
    ends["run_c"].set()
    ends["run_d"].set()
    await asyncio.gather(*tasks, *again)
    left = read_work(server.path)
    assert left is not None and left.suspects == {"run_b": 1}, "run_a is proven harmless"
    await asyncio.gather(*(server.answer("run_b") for _ in range(PROOFS)))
    assert server.turns.tick() is None
    together = asyncio.Event()
    tasks = [asyncio.create_task(server.answer(run_id, together)) for run_id in ends]
    await passed()
    assert server.open == list(ends) and server.num_checks == 1
    together.set()
    await asyncio.gather(*tasks)


async def test_a_suspect_is_no_proof_while_one_of_its_first_requests_runs(tmp_path: Path) -> None:
    leave(tmp_path / "work.json", "run_a")
    server = Server(tmp_path / "work.json")
    until = asyncio.Event()
    slow = asyncio.create_task(server.answer("run_a", until))
    await passed()
    for _ in range(3 * PROOFS):
        await server.answer("run_a")
    left = read_work(server.path)
    assert left is not None and left.suspects == {"run_a": 1}
    until.set()
    await slow
    await server.answer("run_b")
    left = read_work(server.path)
    assert left is not None and left.suspects == {}


async def test_a_request_that_was_refused_or_left_alone_proves_nothing(tmp_path: Path) -> None:
    leave(tmp_path / "work.json", "run_a")
    server = Server(tmp_path / "work.json")
    for _ in range(PROOFS):
        with pytest.raises(ValueError, match="refused"):
            async with server.turns.work(served("run_a")):
                raise ValueError("refused")
        async with server.turns.work(served("run_a")) as outcome:
            outcome.is_refused = True
        gone = asyncio.create_task(server.answer("run_a", asyncio.Event()))
        await passed()
        gone.cancel()
    left = read_work(server.path)
    assert left is not None and left.suspects == {"run_a": 1}
    for _ in range(PROOFS):
        await server.answer("run_a")
    left = read_work(server.path)
    assert left is not None and (left.suspects, left.cleared) == ({}, {"run_a": 1})


class HarmsLate(Server):
    """Hostile runs end the engine with the first request after their first PROOFS."""

    async def answer(self, run_id: str, until: asyncio.Event | None = None) -> None:
        for _ in range(PROOFS):
            async with self.turns.work(served(run_id)):
                await asyncio.sleep(0)
        await super().answer(run_id)


async def test_a_run_that_harms_later_than_its_proofs_is_named_by_the_third_death(tmp_path: Path) -> None:
    path, history = tmp_path / "work.json", running(INFERENCE)
    evicted: list[tuple[str, str]] = []
    for number in range(3):
        assert evicted == [], number
        server = HarmsLate(path, {"run_bad"})
        await asyncio.gather(*map(server.answer, ("run_a", "run_bad", "run_b")))
        assert not server.lives
        evicted = dies(history, read_work(path))
    assert [run_id for run_id, _ in evicted] == ["run_bad"]
    assert evicted[0][1].startswith("inference ended 3 times in a row while it served run_bad@v3")


async def test_a_server_that_lives_for_long_forgives_who_was_cleared(tmp_path: Path) -> None:
    leave(tmp_path / "work.json", "run_a")
    server = Server(tmp_path / "work.json")
    for _ in range(PROOFS):
        await server.answer("run_a")
    server.turns.tick()
    assert (read_work(server.path) or Work()).cleared == {"run_a": 1}
    server.clock.now += module.FORGIVES_S
    server.turns.tick()
    assert (read_work(server.path) or Work()).cleared == {}


async def test_an_engine_that_fails_by_itself_is_no_suspects_fault(tmp_path: Path) -> None:
    leave(tmp_path / "work.json", "run_a", "run_b")
    server = Server(tmp_path / "work.json", broken=True)
    with pytest.raises(ApiError, match="does not generate"):
        await server.answer("run_a")
    assert server.num_writes == 0 and WorkNote(server.path).suspects == {"run_a": 1, "run_b": 1}


async def test_a_turn_ends_in_time_however_much_its_run_asks(tmp_path: Path) -> None:
    leave(tmp_path / "work.json", "run_a", "run_b")
    server = Server(tmp_path / "work.json")
    ends = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(server.answer("run_a", ends[0]))]
    await passed()
    tasks += [asyncio.create_task(server.answer(run_id, ends[1])) for run_id in ("run_b", "run_a")]
    await passed()
    assert server.open == ["run_a", "run_a"], "within its turn"
    server.clock.now += TURN_S
    tasks.append(asyncio.create_task(server.answer("run_a", ends[2])))
    await passed()
    assert server.open == ["run_a", "run_a"]
    ends[0].set()
    ends[1].set()
    await asyncio.gather(*tasks[:3])
    await passed()
    assert server.open == ["run_a"]
    ends[2].set()
    await asyncio.gather(*tasks)
    assert server.noted() == []


async def test_a_turn_goes_to_who_has_had_none_for_longest_and_not_to_who_asked_first(tmp_path: Path) -> None:
    leave(tmp_path / "work.json", "run_a", "run_b")
    server = Server(tmp_path / "work.json")
    server.clock.now = 100.0
    await server.answer("run_c")
    until = asyncio.Event()
    tasks = [asyncio.create_task(server.answer("run_a", until))]
    await passed()
    ends = {run_id: asyncio.Event() for run_id in ("run_c", "run_b")}
    tasks += [asyncio.create_task(server.answer(run_id, end)) for run_id, end in ends.items()]
    await passed()
    until.set()
    await passed()
    assert server.open == ["run_b"]
    ends["run_b"].set()
    await passed()
    assert server.open == ["run_c"]
    ends["run_c"].set()
    await asyncio.gather(*tasks)


class SlowAtFirst(Server):
    async def check(self) -> None:
        await super().check()
        if self.num_checks == 1:
            await asyncio.Event().wait()


async def test_who_goes_away_before_its_turn_lets_the_next_one_have_it_at_once(tmp_path: Path) -> None:
    leave(tmp_path / "work.json", "run_a", "run_b")
    server = SlowAtFirst(tmp_path / "work.json")
    first = asyncio.create_task(server.answer("run_a"))
    await passed()
    until = asyncio.Event()
    second = asyncio.create_task(server.answer("run_b", until))
    await passed()
    assert server.open == [], "run_a came first"
    first.cancel()
    await passed()
    assert server.open == ["run_b"]
    until.set()
    await second


async def test_who_waits_too_long_is_refused_with_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    leave(tmp_path / "work.json", "run_a", "run_b")
    server = Server(tmp_path / "work.json")
    until = asyncio.Event()
    slow = asyncio.create_task(server.answer("run_a", until))
    await passed()
    with pytest.raises(ApiError, match=r"^run_b waits for run_a to be answered: run_a, run_b get turns, ") as caught:
        await server.answer("run_b")
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    until.set()
    await slow
    await server.answer("run_b")


def test_a_note_that_cannot_be_written_or_read_names_no_run(tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    leave(path, "run_a")
    note = WorkNote(path)
    assert note.suspects == {"run_a": 1}
    for damage in (b"", b"{", b"[" * 100_000, b'{"items": 3}'):
        path.write_bytes(damage)
        assert WorkNote(path).suspects == {} and read_work(path) is None
    path.unlink()
    path.mkdir()
    note.write([served("run_a")])
    assert read_work(path) is None, "and the work goes on"


def test_a_note_that_the_disk_does_not_take_leaves_none_that_names_what_has_ended(tmp_path: Path) -> None:
    note = WorkNote(tmp_path / "work.json")
    note.write([served("run_a")])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        note.write([served("run_b")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert WorkNote(tmp_path / "work.json").suspects == {}, "run_a is not in work any more"
    note.write([served("run_b")])
    assert WorkNote(tmp_path / "work.json").suspects == {"run_b": 1}


def test_suspects_of_the_last_death_alone_are_kept(tmp_path: Path) -> None:
    leave(tmp_path / "work.json", "run_b", "run_new", run_a=1, run_b=1)
    assert WorkNote(tmp_path / "work.json").suspects == {"run_b": 2}
    leave(tmp_path / "work.json", "run_new", run_a=1, run_b=1)
    assert WorkNote(tmp_path / "work.json").suspects == {"run_new": 1}


RUNS = ("run_a", "run_b", "run_c", "run_d", "run_e")


@settings(max_examples=examples(40), deadline=None)
@given(hostile=st.sets(st.sampled_from(RUNS), min_size=1, max_size=4), order=st.permutations(RUNS))
def test_every_hostile_run_is_evicted_and_no_other_ever(
    tmp_path_factory: pytest.TempPathFactory, hostile: set[str], order: list[str]
) -> None:
    """Whatever ends it when: the server lives, dies and starts again with what its note holds, until it lives on."""
    path = tmp_path_factory.mktemp("life") / "work.json"
    history, runs = running(INFERENCE), list(order)

    async def live() -> bool:
        server = Server(path, hostile)
        work = [server.answer(run_id) for _ in range(2 * PROOFS) for run_id in runs]
        await asyncio.gather(*work)
        return server.lives

    for _ in range(2 * len(hostile) + 1):
        if asyncio.run(live()):
            break
        for run_id, _ in dies(history, read_work(path), uptime_s=20.0):
            assert run_id in hostile
            runs.remove(run_id)
    assert set(runs) == set(RUNS) - hostile
    assert history.see(READY) == [] and history.daemon.num_restarts <= 2 * len(hostile)


async def test_a_lock_goes_to_each_run_in_turn_however_many_one_has() -> None:
    lanes, order = Lanes(), list[str]()

    async def want(run_id: str, name: str) -> None:
        async with lanes.turn(run_id):
            order.append(name)
            await asyncio.sleep(0)

    async with lanes.turn("run_a"):
        waiting = [asyncio.create_task(want("run_a", f"a{number}")) for number in range(100)]
        await asyncio.sleep(0)
        waiting += [asyncio.create_task(want(run_id, run_id[-1])) for run_id in ("run_b", "run_c")]
        await asyncio.sleep(0)
        waiting[1].cancel()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["a0", "b", "c", *(f"a{number}" for number in range(2, 100))]
    waiting = [asyncio.create_task(want("run_a", "late"))]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*waiting)


async def test_a_lock_that_was_given_to_who_has_just_gone_goes_on_to_the_next() -> None:
    lanes, held = Lanes(), asyncio.Event()

    async def hold() -> None:
        async with lanes.turn("run_b"):
            held.set()

    async with lanes.turn("run_a"):
        gone, next_one = asyncio.create_task(hold()), asyncio.create_task(hold())
        await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await next_one
    assert held.is_set() and gone.cancelled()


async def test_the_oldest_requests_of_whom_holds_the_most_unloaded_adapters_make_room() -> None:
    loaded, ended = list[str](), list[str]()
    users = AdapterUsers(lambda: loaded)

    async def use(name: str) -> None:
        asked = Asked()
        with users.using(name, asked):
            await asked.listen(asyncio.Event().wait)  # type: ignore[arg-type]
            assert asked.refusal is not None and asked.refusal.status == 404 and name in str(asked.refusal)
            ended.append(name)

    async def load(name: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await users.make_room(name, 5)
        loaded.append(name)

    tasks = []
    for name in ("run_a@v1", "run_bad@v1", "run_bad@v2", "run_bad@v1"):
        await load(name)
        tasks.append(asyncio.create_task(use(name)))
        await asyncio.sleep(0)
        loaded.remove(name)
    await load("run_b@v1")
    assert ended == [], "five slots, four of them unloaded but in use"
    await load("run_c@v1")
    await load("run_c@v2")
    assert ended == ["run_bad@v1", "run_bad@v2"], "not the older one of another run, nor a later load of the name"
    for task in tasks:
        task.cancel()
