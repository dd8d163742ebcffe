"""A group of nodes over a simulated shared folder: skewed clocks, late and reordered visibility, kills and restarts,
work that takes much longer than a node may be silent, loops that stand still.

What is simulated is the world only: every node is the real `Member`, so what holds here holds for its decisions. Time
is a number; a run of minutes takes milliseconds.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prime_rl.multinode.decide import MASTER_RANK, Exit
from prime_rl.multinode.member import Member, Report
from prime_rl.multinode.records import (
    EXIT_DONE,
    EXIT_TRY_AGAIN,
    GroupRecord,
    GroupSetting,
    NodeRecord,
    Phase,
    Position,
    RlPhase,
    first_position,
)
from prime_rl.multinode.work import Plan, make_plan
from tests.multinode_folder import SharedFolder

MAX_LAG_S = 2.0
# The longest pause of a node (`node.MAX_PAUSE_S`).
POLL_S = 0.5
MENDED_AFTER_S = 60.0
# What a node does itself, with files: nothing cuts it short. In the other phases processes work, which are ended.
OWN_STEPS = (Phase.START, Phase.AGGREGATE, Phase.COPY_CHECKPOINT, Phase.FINAL)
# Of a process that was asked to end.
MAX_END_S = 15.0


@dataclass
class World:
    """One simulated history of `num_nodes` nodes, each started again whenever it exits with "try again" or is killed.

    `slow_s` is the most that one step of work takes beside what is usual. `hang_at`: a rank, a phase, and for how long
    that node's loop stands still there, once. `in_loop` is how a node must not be made: its loop does the work, and
    nothing beats meanwhile.
    """

    seed: int
    num_nodes: int
    num_iterations: int = 2
    elastic: bool = False
    num_kills: int = 0
    chaos_until_s: float = 60.0
    restarts: bool = True
    num_tasks: int = 23
    kill_at: tuple[int, Phase] | None = None
    cut_at: tuple[int, Phase] | None = None
    max_lag_s: float = MAX_LAG_S
    speed: float = 1.0
    slow_s: float = 0.0
    hang_at: tuple[int, Phase, float] | None = None
    in_loop: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(f"world {self.seed}")
        self.now = 0.0
        # In the chaos a cache may also lag so much that living nodes look dead.
        spikes = self.rng.random() < 0.3
        lag = self.max_lag_s
        self.disk = SharedFolder(
            self.rng, lambda at: 12.0 if spikes and at < self.chaos_until_s and self.rng.random() < 0.02 else lag
        )
        self.tasks = [f"task-{number}" for number in range(self.num_tasks)]
        self.weights = [float(self.rng.randint(1, 3)) for _ in range(self.num_nodes)]
        self.nodes: dict[int, Node | None] = dict.fromkeys(range(self.num_nodes))
        self.exits: list[tuple[float, int, Exit]] = []
        self.killed: list[tuple[float, int]] = []
        self.cut: list[tuple[float, int]] = []
        self.hung: tuple[float, int] | None = None
        self.effects: list[tuple[float, str, str]] = []
        self.released: list[tuple[float, str, Position]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        for rank in range(self.num_nodes):
            self.at(self.rng.uniform(0, 3), lambda rank=rank: self.start(rank))
        for _ in range(self.num_kills):
            self.at(self.rng.uniform(0, self.chaos_until_s), self.kill_any)

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, do))

    def run(self, limit_s: float) -> None:
        """Until nothing happens any more. Raises AssertionError when it goes on beyond `limit_s`."""
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            assert self.now < limit_s, f"hangs (seed {self.seed}): {self.describe()}"
            do()

    def describe(self) -> str:
        return "; ".join(
            f"{rank}: {node.member.own.state} {node.member.own.position} on {node.member.waiting_on}"
            for rank, node in self.nodes.items()
            if node
        )

    def start(self, rank: int) -> None:
        self.nodes[rank] = node = Node(self, rank)
        node.live()

    def kill_any(self) -> None:
        self.kill(self.rng.randrange(self.num_nodes))

    def kill(self, rank: int) -> None:
        node = self.nodes[rank]
        if node is None:
            return
        self.killed.append((self.now, rank))
        self.nodes[rank] = None
        node.is_dead = True
        if self.restarts:
            self.at(self.now + self.rng.uniform(0.1, 20.0), lambda: self.start(rank))

    def exited(self, rank: int, exit: Exit) -> None:
        self.exits.append((self.now, rank, exit))
        self.nodes[rank] = None
        if exit.code == EXIT_TRY_AGAIN and self.restarts:
            self.at(self.now + self.rng.uniform(0.1, 5.0), lambda: self.start(rank))

    def effect(self, epoch: str, name: str) -> None:
        self.effects.append((self.now, epoch, name))

    def slow_step_s(self) -> float:
        """Of one step in three; beside what it takes anyway."""
        return self.rng.uniform(0.0, self.slow_s) if self.slow_s and self.rng.random() < 0.3 else 0.0


class Node:
    """One process: a Member with its clock, its view of the folder, and its work."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.is_dead = world, rank, False
        self.busy_until_s = 0.0
        self._rate = world.rng.uniform(0.99, 1.01)
        self._offset = world.rng.uniform(-1e6, 1e6)
        incarnation = f"{world.rng.getrandbits(64):016x}"
        fingerprint = {"--num-nodes": str(world.num_nodes)}
        limit = world.num_iterations
        setting = GroupSetting(
            rank, world.num_nodes, RlPhase.BOTH, fingerprint, elastic=world.elastic, max_iterations=limit
        )
        own = NodeRecord(rank, incarnation, 0, fingerprint=fingerprint, host=f"host{rank}", pid=1000 + rank)
        self.work = SimWork(self)
        self.member = Member(setting, own, self, self.work, clock=self._clock, unreached=self._unreached)

    def _unreached(self, epoch: str) -> int:
        """Failed probes of the master: one at each beat of this node's clock since it was cut off the network."""
        cut_at = next((at for at, rank in self.world.cut if rank in (self.rank, MASTER_RANK)), self.world.now)
        beat_s = self.member.setting.heartbeat_s
        return int(self._clock() // beat_s - self._clock(cut_at) // beat_s)

    def _clock(self, at_s: float | None = None) -> float:
        return (self.world.now if at_s is None else at_s) * self._rate + self._offset

    def live(self) -> None:
        self.world.at(self.world.now, self.wake)
        self.world.at(self.world.now, self.beat)

    def wake(self) -> None:
        world = self.world
        if self.is_dead:
            return
        if world.now < self.busy_until_s:
            world.at(self.busy_until_s, self.wake)
            return
        exit = self.member.tick()
        own = self.member.own
        if world.hang_at and (self.rank, own.position and own.position.phase) == world.hang_at[:2]:
            self.busy_until_s = world.now + world.hang_at[2]
            world.hung, world.hang_at = (world.now, self.rank), None
        if world.kill_at and (self.rank, own.position and own.position.phase) == world.kill_at and not world.killed:
            world.kill(self.rank)
            return
        if world.cut_at and (self.rank, own.position and own.position.phase) == world.cut_at and not world.cut:
            world.cut.append((world.now, self.rank))
            # Somebody mends it.
            world.at(world.now + MENDED_AFTER_S, lambda: world.cut.__setitem__(0, (world.now, -1)))
        if exit is not None:
            self.is_dead = True
            world.exited(self.rank, exit)
        else:
            world.at(world.now + world.speed * world.rng.uniform(0.5, 1.5) * POLL_S, self.wake)

    def beat(self) -> None:
        """What the thread of the heartbeat does."""
        if self.is_dead:
            return
        if not self.world.in_loop or self.world.now >= self.busy_until_s:
            self.member.heartbeat.beat()
        self.world.at(self.world.now + self.member.setting.heartbeat_s / self._rate, self.beat)

    # -- Store ----

    def read_nodes(self) -> Mapping[int, NodeRecord]:
        # As for real: a worker needs the master's record and its own.
        ranks = range(self.world.num_nodes) if self.rank == MASTER_RANK else (MASTER_RANK, self.rank)
        found = {rank: self.read(f"node_{rank}") for rank in ranks}
        return {rank: record for rank, record in found.items() if record is not None}

    def read_group(self) -> GroupRecord | None:
        record: GroupRecord | None = self.read("group")
        return record

    def write_node(self, record: NodeRecord) -> None:
        self.write(f"node_{self.rank}", record)

    def write_group(self, record: GroupRecord) -> None:
        self.write("group", record)
        if record.position and (not self.world.released or self.world.released[-1][2] != record.position):
            self.world.released.append((self.world.now, record.epoch, record.position))

    def read(self, path: str) -> Any:
        return self.world.disk.read(self.rank, path, self.world.now)

    def write(self, path: str, value: Any) -> None:
        self.world.disk.write(self.rank, path, value, self.world.now)

    def resume_position(self) -> Position:
        iteration = 1
        while self.read(f"it{iteration}/done"):
            iteration += 1
        for proof, phase in (
            ("checkpoint", Phase.RESTART_INFERENCE),
            ("update", Phase.CONFIG_READY),
            ("train", Phase.EVAL_ROLLOUT),
        ):
            if self.read(f"it{iteration}/{proof}"):
                return Position(iteration, phase)
        return first_position(RlPhase.BOTH, iteration)


class SimWork:
    """The phases with their effects on the folder: a plan, tasks one by one, and the master's proofs."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.position: Position | None = None
        self.epoch = ""
        self.members: Mapping[int, str] = {}
        self._ordered: tuple[Position, GroupRecord] | None = None
        self._done_at = 0.0
        self._open: list[str] | None = None
        self._has_plan = False
        self._found_at: float | None = None
        self._ended_at: float | None = None

    def resume(self) -> Position | None:
        if self._found_at is None:
            self._found_at = self._takes(self.node.world.slow_step_s())
        if self.node.world.now < self._found_at:
            return None
        self._found_at = None
        return self.node.resume_position()

    def begin(self, position: Position, group: GroupRecord) -> None:
        self._ordered = (position, group)
        self._take_order()

    def stop(self) -> None:
        self.position = self._ordered = None
        if self._ended_at is None:
            self._ended_at = self._takes(min(self.node.world.slow_step_s(), MAX_END_S))

    @property
    def has_ended(self) -> bool:
        return self._ended_at is not None and self.node.world.now >= self._ended_at

    def look(self) -> Report:
        self._take_order()
        position, now = self.position, self.node.world.now
        if position is None or self._ordered is not None:
            return Report(waiting_on="the work that was given up to end")
        if position.phase is Phase.TRAIN_ROLLOUT:
            return self._rollout()
        if position.phase is Phase.TRAIN and any(self._lost(rank) for rank in self.members):
            return Report(error="a peer was lost", is_shared=True)
        if now < self._done_at:
            return Report(progress=int(now))
        return Report(done=self._finish(position))

    def _take_order(self) -> None:
        """The newest one, once nothing of the one before goes on."""
        world, before = self.node.world, self.position
        if self._ordered is None:
            return
        if before is not None and before.phase in OWN_STEPS:
            if world.now < self._done_at:
                return
            self._finish(before)
        (self.position, group), self._ordered = self._ordered, None
        self.epoch, self.members = group.epoch, group.members
        self._done_at = self._takes(world.speed * world.rng.uniform(0.0, 1.0) + world.slow_step_s())
        self._open, self._has_plan = None, False

    def _takes(self, seconds: float) -> float:
        """When work that begins now is done."""
        done_at = self.node.world.now + seconds
        if self.node.world.in_loop:
            self.node.busy_until_s = max(self.node.busy_until_s, done_at)
        return done_at

    def _finish(self, position: Position) -> bool:
        return self._master(position) if self.node.rank == MASTER_RANK else True

    @property
    def _folder(self) -> str:
        assert self.position is not None
        return f"it{self.position.iteration}"

    def _lost(self, rank: int) -> bool:
        node = self.node.world.nodes[rank]
        return node is None or node.member.own.incarnation != self.members[rank]

    def _plan_path(self) -> str:
        assert self.position is not None
        return f"{self._folder}/plan-{self.epoch}-{self.position.round}"

    def _plan(self) -> None:
        finished = {path: self.node.read(path) or () for path in self.node.world.disk.paths(f"{self._folder}/rank")}
        weights = {rank: self.node.world.weights[rank] for rank in self.members}
        plan = make_plan(self.node.world.tasks, finished, weights, seed=7)
        self.node.write(self._plan_path(), plan)
        self.node.write(f"{self._folder}/plan", plan)

    def _rollout(self) -> Report:
        if self.node.rank == MASTER_RANK and not self._has_plan:
            if self.node.world.now < self._done_at:  # it reads all rank files for that
                return Report()
            self._plan()
            self._has_plan = True
        plan: Plan | None = self.node.read(self._plan_path())
        if plan is None:
            return Report()
        own_file = f"{self._folder}/rank{self.node.rank}-{self.node.member.own.incarnation}"
        mine = list(self.node.read(own_file) or ())
        if self._open is None:
            self._open = [task for task in plan.parts[self.node.rank] if task not in mine]
        now, world = self.node.world.now, self.node.world
        if self._open and now >= self._done_at:
            mine.append(self._open.pop(0))
            self.node.write(own_file, tuple(mine))
            self._done_at = self._takes(world.speed * world.rng.uniform(0.1, 1.0))
        return Report(progress=len(mine), done=not self._open)

    def _master(self, position: Position) -> bool:
        names = {
            Phase.AGGREGATE: "train",
            Phase.PREPARE: "update",
            Phase.COPY_CHECKPOINT: "checkpoint",
            Phase.FINAL: "done",
        }
        name = names.get(position.phase)
        if name is None or self.node.read(f"{self._folder}/{name}"):  # done in an earlier round
            return True
        if position.phase is Phase.AGGREGATE:
            return self._aggregate()
        self._prove(name, True)
        return True

    def _aggregate(self) -> bool:
        world, plan = self.node.world, self.node.read(f"{self._folder}/plan")
        chosen = {task: path for path, tasks in plan.taken.items() for task in tasks}
        for rank, part in plan.parts.items():
            found = {
                task: path
                for path in world.disk.paths(f"{self._folder}/rank{rank}-")
                for task in self.node.read(path) or ()
                if task in part
            }
            if set(found) != set(part):
                return False  # not visible yet
            assert not found.keys() & chosen.keys()
            chosen |= found
        assert sorted(chosen) == sorted(world.tasks)
        self._prove("train", chosen)
        return True

    def _prove(self, name: str, value: Any) -> None:
        assert self.node.read(f"{self._folder}/{name}") is None, f"{name} twice"
        self.node.write(f"{self._folder}/{name}", value)
        self.node.world.effect(self.epoch, f"{self._folder}/{name}")


def expected_effects(num_iterations: int) -> list[str]:
    names = ("train", "update", "checkpoint", "done")
    return [f"it{iteration}/{name}" for iteration in range(1, num_iterations + 1) for name in names]


def check_finished(world: World) -> None:
    """All nodes are done, every effect is there once and in order, and no epoch worked beside another."""
    last = {rank: exit.code for _, rank, exit in world.exits}
    assert last == dict.fromkeys(range(world.num_nodes), EXIT_DONE), (world.seed, world.exits[-world.num_nodes :])
    assert [name for _, _, name in world.effects] == expected_effects(world.num_iterations), world.seed
    epochs = [int(epoch.partition("-")[0]) for _, epoch, _ in world.effects]
    assert epochs == sorted(epochs), world.seed
