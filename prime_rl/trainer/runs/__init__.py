"""The runs of one trainer: slots, discovery, synchronization, hooks.

`setup_multi_run_manager` makes the one manager of a process and `get_multi_run_manager` returns it. Only entry files
call these; every other part is handed the manager.

The rest are older names of the manager's interface, as thin views: for programs that were written for them. `Runs`,
`setup_runs` and `get_runs` are the manager; `check_for_changes` and `sync_runs` are the two steps of a look.
`MultiLoRAOptimizer` and `MultiLoRAScheduler` show what the runs have (`TrainerRun.optimizer`) by slot.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from prime_rl.trainer.optim import FlatWeights, RunOptimizer, make_scheduler
from prime_rl.trainer.runs.manager import MultiRunManager, get_multi_run_manager, setup_multi_run_manager
from prime_rl.trainer.runs.run import Progress, TrainerRun
from prime_rl.trainer.world import World

__all__ = [
    "MultiRunManager",
    "Progress",
    "Runs",
    "TrainerRun",
    "check_for_changes",
    "get_multi_run_manager",
    "get_runs",
    "setup_multi_run_manager",
    "setup_runs",
    "sync_runs",
]


Runs = MultiRunManager
setup_runs = setup_multi_run_manager
get_runs = get_multi_run_manager


def check_for_changes() -> None:
    """`discover_runs` under its older name."""
    get_multi_run_manager().discover_runs()


def sync_runs() -> None:
    """`synchronize_state` under its older name."""
    get_multi_run_manager().synchronize_state()


# Called on all ranks with each new optimizer and its slot.
PostCreationCallback = Callable[[Optimizer, int], None]


class MultiLoRAOptimizer:
    """The optimizers of all slots, for a manager without a trainer: it registers its own creation hook."""

    def __init__(self, manager: MultiRunManager, world: World) -> None:
        self._manager = manager
        self._world = world
        self._post_creation: list[PostCreationCallback] = []
        manager.register_creation_hook(self.optimizer_creation_hook)

    @property
    def optimizers(self) -> list[Optimizer | None]:
        """By slot; null where no run is."""
        return [run.optimizer.optimizer if run and run.optimizer else None for run in self._manager.runs]

    def register_post_creation_callback(self, callback: PostCreationCallback) -> None:
        """`callback` gets every optimizer that is made from now on, in the order of registration."""
        self._post_creation.append(callback)

    def optimizer_creation_hook(self, run_idx: int, run_id: str) -> None:
        """Make the optimizer of a run that comes, then call the callbacks with it."""
        run, manager = self._manager.run(run_idx), self._manager
        weights = FlatWeights(manager.get_named_parameters_for_run(run_idx), run.rank)
        run.optimizer = RunOptimizer(run.config, weights, run.dtype, self._world, run.progress.step)
        for callback in self._post_creation:
            callback(run.optimizer.optimizer, run_idx)

    def step(self) -> None:
        """Update every run that is ready from the gradients of all ranks. A collective."""
        for run in self._manager.ready:
            run.training.step(run.training.reduce_gradients())


class MultiLoRAScheduler:
    """The schedulers of all slots."""

    def __init__(self, manager: MultiRunManager) -> None:
        self._manager = manager

    @property
    def schedulers(self) -> list[LRScheduler | None]:
        """By slot; null where no run is."""
        return [run.optimizer.scheduler if run and run.optimizer else None for run in self._manager.runs]

    def scheduler_creation_hook(self, optimizer: Optimizer, run_idx: int) -> None:
        """For `MultiLoRAOptimizer.register_post_creation_callback`. Starts where the run's progress stands."""
        run = self._manager.run(run_idx)
        run.training.scheduler = make_scheduler(optimizer, run.config, run.progress.step)

    def step(self) -> None:
        """After the optimizers stepped: the next rate of every run that is ready."""
        for run in self._manager.ready:
            run.training.next_rate()
