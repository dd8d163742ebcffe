"""Hooks for runs that come and go, for those who build on the manager, and how they are called.

Hooks of one kind are called in the order of registration. What happens when one fails depends on the kind: a config is
invalid, a run that comes is evicted, a run that leaves leaves anyway. When hooks are called is the manager's
business; their names are in the reasons that people read.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.trainer.runs.run import TrainerRun
from prime_rl.trainer.runs.sync import Channel, HookReport
from prime_rl.utils.text import error_text

logger = logging.getLogger(__name__)


class RunHook(Protocol):
    """Called on all ranks when a run is created or deleted, and on rank 0 when it is forgotten."""

    def __call__(self, run_idx: int, run_id: str, /) -> None:
        """A run comes to this slot or leaves it."""


class DiscoveredHook(Protocol):
    """Called on rank 0 when a run is admitted, before any rank creates it."""

    def __call__(self, run_idx: int, run_id: str, config: OrchestratorConfig, /) -> None:
        """A run is admitted; this slot will be its own."""


class ConfigValidationHook(Protocol):
    """The verdict on a config: (True, "") or (False, what is wrong)."""

    def __call__(self, config: OrchestratorConfig, /) -> tuple[bool, str]:
        """Judge a new config of any run; the message is what people read."""


class RunLife:
    """The calls of the trainer itself for a run that comes or goes. By default nothing: there is only a manager."""

    def admitted(self, run: TrainerRun) -> None:
        """Rank 0, before any rank creates the run. What it raises refuses the run."""

    def created(self, run: TrainerRun) -> None:
        """All ranks, after the run's parameters were reset. What it raises on one rank refuses the run on all.

        No collective: the ranks agree on whether it failed when all are through.
        """

    def may_leave(self, run: TrainerRun) -> bool:
        """Rank 0: whether a run that is to leave its slot can leave it now; asked at every look.

        It sees to it that one that is `Leaving.SAVED` is saved.
        """
        return True

    def forgotten(self, run: TrainerRun) -> None:
        """Rank 0: the run loses its slot, while its data is still there."""


@dataclass
class Hooks:
    """The hooks of each kind, in the order of registration."""

    validation: list[ConfigValidationHook] = field(default_factory=list)
    discovered: list[DiscoveredHook] = field(default_factory=list)
    forgotten: list[RunHook] = field(default_factory=list)
    creation: list[RunHook] = field(default_factory=list)
    deletion: list[RunHook] = field(default_factory=list)

    def problem_of(self, config: OrchestratorConfig) -> str | None:
        """The reason of the first refusing validation hook, or None. A hook that raises refuses."""
        for hook in self.validation:
            try:
                valid, message = hook(config)
            except Exception as error:
                valid, message = False, f"the check itself failed: {hook_failure(hook, error)}"
            if not valid:
                return message
        return None


class HookError(ValueError):
    """A hook failed: which one, and why."""


def calls_of(
    hooks: Sequence[Callable[..., object]], run_idx: int, run_id: str, *more: object
) -> list[Callable[[], None]]:
    """Calls of `hooks` for one run; what one raises comes out as HookError."""

    def call(hook: Callable[..., object]) -> None:
        try:
            hook(run_idx, run_id, *more)
        except Exception as error:
            raise HookError(hook_failure(hook, error)) from error

    return [partial(call, hook) for hook in hooks]


def call_coming(
    channel: Channel, calls: Sequence[Callable[[], None]], run_id: str, fault: str | None = None
) -> str | None:
    """Make the calls for a run that comes, on all ranks; returns what failed, or None.

    After each call the ranks agree on whether it failed anywhere. Then all of them leave out the rest for this run
    together, so a collective in a later one, or for the next run, still meets its counterparts. `fault` is what failed
    on this rank before. A rank with fewer calls waits for those that have more.
    """
    rest = deque(calls)
    while True:
        if fault is None and rest:
            try:
                rest.popleft()()
            except Exception as error:
                logger.debug("creating %s failed", run_id, exc_info=True)
                fault = error_text(error)
        reports = channel.gather(HookReport(fault, bool(rest)))
        fault = next((report.fault for report in reports if report.fault is not None), None)
        if fault is not None or not any(report.has_more for report in reports):
            return fault


def call_leaving(calls: Sequence[Callable[[], None]], run_id: str) -> None:
    """Make the calls for a run that leaves: one that fails must not keep the others from letting go."""
    for call in calls:
        try:
            call()
        except Exception:
            logger.exception("%s: a part of the trainer failed while the run left its slot", run_id)


def hook_failure(hook: object, error: Exception) -> str:
    """The hook that failed, and why: "Packer.check_room: KeyError: 3"."""
    return f"{getattr(hook, '__qualname__', type(hook).__qualname__)}: {error_text(error)}"
