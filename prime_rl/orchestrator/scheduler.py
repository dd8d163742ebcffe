"""Keeps groups in flight, and the policy that makes them fresh.

`update_policy_loop` notices what the trainer publishes, has inference load it and switches over without stopping
generation. Groups start as soon as the ledger allows and the request limit has room; the entry file takes finished ones
batch by batch. What is being waited for is always known (`wait`), for the status file and for the time account.

The batch that a group goes into, and the groups that may start, are decided purely (`GroupLedger`): the bound on
staleness. Groups are numbered by the run's example order and fill the batches in that order, so that a batch depends on
no race. A group that is dropped moves all later ones forward, into an earlier batch at most: what was fresh enough for
its batch when it started stays fresh enough. With `max_async_level` k, batch N holds no token of a version below
`oldest_allowed(N)`, and nothing is started beyond k + 1 batches after the newest version.

Oversampling starts `num_spare` groups more, as if so many before them were dropped. A spare that is not needed keeps
its place in a later batch; once it is too old for the batch that is assembled next, it is started again under its
number. So no example is lost, and none is in two batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from prime_rl.contract.layout import RunDir, list_steps, stable_marker
from prime_rl.contract.types import oldest_allowed
from prime_rl.orchestrator.client import RequestRefused
from prime_rl.orchestrator.envs.checked import ExampleUnusable
from prime_rl.orchestrator.guard import RunFailed, TrainerWatch, describe_policy_wait
from prime_rl.orchestrator.metrics import PhaseClock
from prime_rl.orchestrator.policy import PolicyVersions
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.rollout import Group, GroupFailed
from prime_rl.utils.runtime import Background
from prime_rl.utils.watch import Watcher

# Groups without signal that are dropped for one batch, in batches. A policy that solves each of its examples always or
# never would be filtered forever; where all but one in five groups have no signal, the batch still gets full.
MAX_FILTERED_BATCHES = 4


@dataclass
class Flight:
    """A group under way; `oldest_version` is the oldest policy version that it asked, None when it asked none yet."""

    index: int
    oldest_version: int | None = None

    def note(self, version: int) -> None:
        """A request of the group goes to `version`."""
        self.oldest_version = version if self.oldest_version is None else min(self.oldest_version, version)


class GroupLedger:
    """The groups between the example order and the batches. No I/O, no clock.

    Args:
        step: the batch that is assembled next.
        next_index: where the example order goes on.
        max_off_policy_steps: versions that a group may fall behind while it is under way; None: `max_async_level`.
        num_spare: groups that are started beyond those that the batches need.
    """

    def __init__(
        self,
        *,
        step: int,
        next_index: int,
        groups_per_batch: int,
        max_steps: int,
        max_async_level: int,
        max_off_policy_steps: int | None = None,
        num_spare: int = 0,
    ) -> None:
        self.step = step
        self.next_index = next_index
        self.max_steps = max_steps
        self.num_in_flight = 0
        self.num_dropped = 0
        self.num_filtered = 0
        self.num_too_old = 0
        self._groups_per_batch = groups_per_batch
        self._max_async_level = max_async_level
        self._max_off_policy_steps = max_async_level if max_off_policy_steps is None else max_off_policy_steps
        self._num_spare = num_spare
        self._num_filtered_now = 0  # since the last batch
        self._groups: dict[int, Group | Flight | None] = {}  # by index, ascending; None must be started again
        self._to_restart: set[int] = set()  # where those are

    @property
    def version_needed(self) -> int | None:
        """The policy version without which no further group may start; None when no further group is needed."""
        position = len(self._groups)
        if self._to_restart:
            position = list(self._groups).index(min(self._to_restart))
        step = self.step + max(0, position - self._num_spare) // self._groups_per_batch  # the batch of the next group
        return None if step > self.max_steps else oldest_allowed(step, self._max_async_level)

    def may_start(self, policy_version: int) -> bool:
        """True when a group may start with `policy_version`."""
        needed = self.version_needed
        return needed is not None and policy_version >= needed

    def start(self) -> Flight:
        """Note a group as under way: the lowest that must be started again, else the next example's."""
        if self._to_restart:
            index = min(self._to_restart)
            self._to_restart.remove(index)
        else:
            index = self.next_index
            self.next_index += 1
        flight = self._groups[index] = Flight(index)
        self.num_in_flight += 1
        return flight

    def finish(self, group: Group, *, has_signal: bool = True) -> bool:
        """Take in a finished group; false when it was dropped for having no signal."""
        if not has_signal and self._num_filtered_now < MAX_FILTERED_BATCHES * self._groups_per_batch:
            self.skip(group.index)
            self.num_filtered += 1
            self._num_filtered_now += 1
            return False
        self.num_in_flight -= 1
        self._groups[group.index] = group
        return True

    def drop(self, index: int) -> None:
        """Give up on a group; a later one takes its place."""
        self.skip(index)
        self.num_dropped += 1

    def skip(self, index: int) -> None:
        """Leave out a group of which no example can be made; a later one takes its place."""
        self.num_in_flight -= isinstance(self._groups.pop(index), Flight)

    def restart_too_old(self, policy_version: int) -> list[int]:
        """Note which groups must be started again; returns their indexes, for their generation to be stopped.

        Too old is what the next batch could not take, and what fell too far behind `policy_version` under way.
        """
        bound = oldest_allowed(self.step, self._max_async_level)
        bound_in_flight = max(bound, policy_version - self._max_off_policy_steps)
        too_old = [
            index
            for index, group in self._groups.items()
            if group is not None
            and group.oldest_version is not None
            and group.oldest_version < (bound_in_flight if isinstance(group, Flight) else bound)
        ]
        for index in too_old:
            self._restart(index)
        return too_old

    def take(self) -> list[Group] | None:
        """The groups of batch `step` if they are complete, and on to the next batch; else None."""
        bound = oldest_allowed(self.step, self._max_async_level)
        groups: list[Group] = []
        for index, group in list(islice(self._groups.items(), self._groups_per_batch)):
            if not isinstance(group, Group):
                continue
            # None is too old by the way it was started; whatever goes wrong, none gets into a batch.
            if group.oldest_version < bound:
                self._restart(index)
            else:
                groups.append(group)
        if len(groups) < self._groups_per_batch:
            return None
        for group in groups:
            del self._groups[group.index]
        self.step += 1
        self._num_filtered_now = 0
        return groups

    def end(self) -> None:
        """No further groups: what is under way, and what no batch has, is given up."""
        self.max_steps = self.step - 1
        self.num_in_flight = 0
        self._groups.clear()
        self._to_restart.clear()

    def _restart(self, index: int) -> None:
        self.num_in_flight -= isinstance(self._groups[index], Flight)
        self._groups[index] = None
        self._to_restart.add(index)
        self.num_too_old += 1


logger = logging.getLogger(__name__)

# A run whose groups mostly fail learns nothing; a few failures in a window of this many are survived.
FAILURE_WINDOW = 20
# A server that is full takes an adapter as soon as another run releases one; one that refuses for this long never will.
LOAD_REFUSED_LIMIT_S = 120.0
LOAD_RETRY_S = 1.0


class Scheduler:
    """The run's groups from start to batch, and its policy version.

    Args:
        make_group: makes the group of one index, and notes the version of each of its requests; raises GroupFailed
            and ExampleUnusable.
        phases: takes account of where the time goes, from `start` on; `client` reports trouble to it.
        max_groups: groups in flight at one time.
        has_signal: whether a group is worth training on.
    """

    def __init__(
        self,
        run: RunDir,
        ledger: GroupLedger,
        make_group: Callable[[int, Callable[[int], None]], Awaitable[Group]],
        client: InferenceClient,
        policy: PolicyVersions,
        watcher: Watcher,
        trainer: TrainerWatch,
        *,
        phases: PhaseClock,
        max_groups: int,
        has_signal: Callable[[Group], bool] = lambda group: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = ledger
        self.phases = phases
        self.published = policy.version
        self._run = run
        self._make_group = make_group
        self._client = client
        self._policy = policy
        self._watcher = watcher
        self._trainer = trainer
        self._max_groups = max_groups
        self._has_signal = has_signal
        self._clock = clock
        self._tasks = Background()
        self._task_of: dict[int, asyncio.Task[None]] = {}
        self._outcomes: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self._failure: BaseException | None = None
        self._changed = asyncio.Condition()
        self._refused_since: float | None = None
        self._refusal: str | None = None
        self._final_version: int | None = None
        self._serve_final = False
        self._closed = False

    async def start(self) -> None:
        """Begin with the newest policy that there is, not with the base model."""
        self.phases.lap()
        await self._policy.begin()
        await self.notice_published()
        if self._switch_is_due():
            await self.switch_policy()

    # -- the policy ----

    async def watch_loop(self) -> None:
        """Look at the broadcast folder at every hint and every rescan."""
        while True:
            await self.notice_published()
            await asyncio.to_thread(self._watcher.wait)

    async def notice_published(self) -> None:
        """Look once which version the trainer has published."""
        steps = list_steps(self._run.broadcast, stable_only=True)
        if steps and steps[-1] > self.published:
            self.published = steps[-1]
            await self._notify()

    async def update_policy_loop(self) -> None:
        """Switch to the newest published version whenever there is one, as long as something is generated with it."""
        while True:
            async with self._changed:
                await self._changed.wait_for(self._switch_is_due)
            await self.switch_policy()

    async def switch_policy(self) -> None:
        """Have inference load the newest published version and use it from now on. Raises RunFailed in the end."""
        version = self.published
        try:
            await self._policy.switch_to(version)
        except RequestRefused as error:
            self._note_refusal(version, str(error))
            await asyncio.sleep(LOAD_RETRY_S)
            return
        self._refused_since = self._refusal = None
        self._stop_too_old()
        self._fill()
        await self._notify()

    async def wait_for_version(self, version: int, *, serve: bool) -> None:
        """After the last batch: until the trainer has published `version` and, with `serve`, inference serves it."""
        self._final_version = version
        self._serve_final = serve
        self._note_phase()
        await self._notify()
        async with self._changed:
            await self._changed.wait_for(lambda: (self._policy.version if serve else self.published) >= version)

    def _switch_is_due(self) -> bool:
        needed = self._serve_final or self.ledger.step <= self.ledger.max_steps
        return needed and self.published > self._policy.version

    def _note_refusal(self, version: int, error: str) -> None:
        self._refused_since = self._refused_since or self._clock()
        self._refusal = f"inference to take {self._policy.label(version)} ({error})"
        if self._clock() - self._refused_since > LOAD_REFUSED_LIMIT_S:
            raise RunFailed(f"timed out after {LOAD_REFUSED_LIMIT_S:g} s waiting for {self._refusal}")
        logger.warning("waiting for %s", self._refusal)
        self._note_phase()

    # -- groups ----

    async def next_groups(self) -> list[Group]:
        """The groups of the next batch, in example order. Raises RunFailed, or what is wrong with the whole run."""
        self._fill()
        async with self._changed:
            while (groups := self.ledger.take()) is None:
                if self._failure is not None:
                    raise self._failure
                self._fill()  # a group may have come out too old
                await self._changed.wait()
        self._stop_too_old()
        self._fill()
        return groups

    async def end(self) -> None:
        """No further batches: what is being generated is stopped, and the policy is not switched any more."""
        await self.close()
        self._task_of.clear()
        self.ledger.end()

    async def close(self) -> None:
        """Stop all groups that are being generated; no group is started after that."""
        self._closed = True  # a group that fails just now starts no other in its place
        await self._tasks.cancel()

    def _fill(self) -> None:
        while (
            not self._closed
            and self.ledger.num_in_flight < self._max_groups
            and self.ledger.may_start(self._policy.version)
        ):
            flight = self.ledger.start()
            self._task_of[flight.index] = self._tasks.start(self._run_group(flight), f"group {flight.index}")
        self._note_phase()

    def _stop_too_old(self) -> None:
        """Stop the generation of groups that no batch can take any longer; they are started again by `_fill`."""
        for index in self.ledger.restart_too_old(self._policy.version):
            logger.info("group %d is too old for policy version %d: restarting it", index, self._policy.version)
            if task := self._task_of.pop(index, None):
                task.cancel()

    async def _run_group(self, flight: Flight) -> None:
        result: Group | Exception
        try:
            result = await self._make_group(flight.index, flight.note)
        except Exception as error:  # a task has no caller: next_groups raises what fails here and below
            result = error
        if self._task_of.get(flight.index) is not asyncio.current_task():
            return  # it was stopped, and what it waited on swallowed that
        del self._task_of[flight.index]
        try:
            self._judge(flight.index, result)
            self._fill()
        except Exception as error:
            self._failure = error
        await self._notify()

    def _judge(self, index: int, result: Group | Exception) -> None:
        if isinstance(result, Group):
            self._finish(result)
        elif isinstance(result, GroupFailed):
            self._drop_failed(index, result)
        elif isinstance(result, ExampleUnusable):
            self.ledger.skip(index)
        else:
            self._failure = result

    def _finish(self, group: Group) -> None:
        self._outcomes.append(True)
        has_signal = self._has_signal(group)
        if self.ledger.finish(group, has_signal=has_signal) and not has_signal:
            logger.warning(
                "batch %d: too many groups have advantages of zero, so %s is used anyway",
                self.ledger.step,
                group.example_id,
            )

    def _drop_failed(self, index: int, error: GroupFailed) -> None:
        logger.warning("group %d dropped: %s", index, error)
        self.ledger.drop(index)
        self._outcomes.append(False)
        num_failed = self._outcomes.count(False)
        if num_failed > FAILURE_WINDOW / 2:
            self._failure = RunFailed(f"{num_failed} of the last {len(self._outcomes)} groups failed; last: {error}")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # -- what is waited for ----

    def _note_phase(self) -> None:
        if self.ledger.num_in_flight:
            self.phases.switch("generate")
        else:
            self.phases.switch("wait_for_inference" if self._refusal else "wait_for_policy")

    def waiting_on(self, now: float) -> str | None:
        """The sentence for the status file; None while groups are being made. `now` is Unix seconds."""
        if self._client.trouble:
            return self._client.trouble
        if self.ledger.num_in_flight:
            return None
        if self._refusal:
            return self._refusal
        needed = self._final_version or self.ledger.version_needed
        if needed is None or needed <= self.published:
            return None
        return describe_policy_wait(
            needed,
            self.published,
            _published_at(self._run.broadcast_dir(self.published)),
            now,
            self._trainer.trouble(now),
            started=self._trainer.is_known(),
        )


def _published_at(step_dir: Path) -> float | None:
    try:
        return stable_marker(step_dir).stat().st_mtime
    except OSError:
        return None
