"""Which group goes into which batch, and which may start: the bound on staleness, decided purely.

Groups are numbered by the run's example order and fill the batches in that order, so that a batch depends on no race.
A group that is dropped moves all later ones forward, into an earlier batch at most: what was fresh enough for its batch
when it started stays fresh enough. With `max_async_level` k, batch N holds no token of a version below
`oldest_allowed(N)`, and nothing is started beyond k + 1 batches after the newest version.
"""

from __future__ import annotations

from collections.abc import Iterable

from prime_rl.contract.types import oldest_allowed
from prime_rl.orchestrator.rollout import Group


class GroupLedger:
    """The groups between the example order and the batches. No I/O, no clock.

    Args:
        step: the batch that is assembled next.
        next_index: where the example order goes on.
    """

    def __init__(
        self, *, step: int, next_index: int, groups_per_batch: int, max_steps: int, max_async_level: int
    ) -> None:
        self.step = step
        self.next_index = next_index
        self.num_dropped = 0
        self._groups_per_batch = groups_per_batch
        self.max_steps = max_steps
        self._max_async_level = max_async_level
        self._groups: dict[int, Group | None] = {}  # by index, ascending; None while it is being made

    @property
    def num_in_flight(self) -> int:
        """Groups that have started and not finished."""
        return sum(group is None for group in self._groups.values())

    @property
    def next_group_step(self) -> int:
        """The batch that a group started now would go into."""
        return self.step + len(self._groups) // self._groups_per_batch

    @property
    def all_started(self) -> bool:
        """Nothing more needs to be started for the run, unless a group is dropped."""
        return self.next_group_step > self.max_steps

    @property
    def version_needed(self) -> int | None:
        """The policy version without which no further group may start; None when no further group is needed."""
        return None if self.all_started else oldest_allowed(self.next_group_step, self._max_async_level)

    def may_start(self, policy_version: int) -> bool:
        """Whether a group may start with `policy_version`."""
        needed = self.version_needed
        return needed is not None and policy_version >= needed

    def start(self) -> int:
        """Start the next group; returns its index."""
        index = self.next_index
        self._groups[index] = None
        self.next_index += 1
        return index

    def finish(self, group: Group) -> None:
        self._groups[group.index] = group

    def drop(self, index: int) -> None:
        """Give up on a group; a later one takes its place."""
        del self._groups[index]
        self.num_dropped += 1

    def take(self) -> list[Group] | None:
        """The groups of batch `step` if they are complete, and on to the next batch; else None."""
        self._drop_stale()
        first = list(self._groups.values())[: self._groups_per_batch]
        if len(first) < self._groups_per_batch:
            return None
        groups = [group for group in first if group is not None]
        if len(groups) < self._groups_per_batch:
            return None
        self._remove(group.index for group in groups)
        self.step += 1
        return groups

    def _drop_stale(self) -> None:
        """No group is too old by the way it was started; whatever goes wrong, none gets into a batch."""
        bound = oldest_allowed(self.step, self._max_async_level)
        num_fresh = 0
        for index, group in list(self._groups.items()):
            if num_fresh == self._groups_per_batch:
                return
            if group is not None and group.oldest_version < bound:
                self.drop(index)
            else:
                num_fresh += 1

    def _remove(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            del self._groups[index]
