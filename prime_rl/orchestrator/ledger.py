"""The batch that a group goes into, and the groups that may start: the bound on staleness, decided purely.

Groups are numbered by the run's example order and fill the batches in that order, so that a batch depends on no race.
A group that is dropped moves all later ones forward, into an earlier batch at most: what was fresh enough for its batch
when it started stays fresh enough. With `max_async_level` k, batch N holds no token of a version below
`oldest_allowed(N)`, and nothing is started beyond k + 1 batches after the newest version.

Oversampling starts `num_spare` groups more, as if so many before them were dropped. A spare that is not needed keeps
its place in a later batch; once it is too old for the batch that is assembled next, it is started again under its
number. So no example is lost, and none is in two batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from prime_rl.contract.types import oldest_allowed
from prime_rl.orchestrator.rollout import Group

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
    def next_group_step(self) -> int:
        """The batch for which the group that is started next must be fresh enough."""
        position = len(self._groups)
        if self._to_restart:
            position = list(self._groups).index(min(self._to_restart))
        return self.step + max(0, position - self._num_spare) // self._groups_per_batch

    @property
    def version_needed(self) -> int | None:
        """The policy version without which no further group may start; None when no further group is needed."""
        step = self.next_group_step
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
