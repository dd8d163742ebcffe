"""Where a node works now: the iteration's folder, its updates, its policy version; and this node's own processes.

Shared by the work of rollouts and of updates (`work`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import tomli_w

from prime_rl.configs.multinode import RUN_ID, MultinodeConfig
from prime_rl.contract.files import make_folder, read_text, write_atomic
from prime_rl.contract.iterations import IterationDir
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.shares import JoinRequest, MakeRequest, Split
from prime_rl.multinode.decide import MASTER_RANK
from prime_rl.multinode.phases import Phase, Position, RlPhase
from prime_rl.multinode.processes import Child
from prime_rl.multinode.proofs import Proofs
from prime_rl.multinode.records import GroupRecord


@dataclass(frozen=True)
class WorkSetting:
    """What one node's work needs beside the config.

    Attributes:
        address: this node's, as the others reach it.
        master: the master's, once it is known.
        weights: of all ranks.
        splits: which rollouts are made.
        max_iterations: None: endless.
        num_ranks: of the trainer on this node.
    """

    rank: int
    incarnation: str
    rl_phase: RlPhase
    weights: tuple[float, ...]
    address: str
    master: Callable[[], str | None]
    eval_interval: int | None
    splits: frozenset[Split]
    max_iterations: int | None
    num_ranks: int = 1


class Place:
    """One node's; `move` takes it to where the group is."""

    def __init__(self, setting: WorkSetting, config: MultinodeConfig, output: OutputDir) -> None:
        self.setting = setting
        self.config = config
        self.output = output
        self.run = output.run(RUN_ID)
        self.proofs = Proofs(
            output,
            setting.rl_phase,
            setting.splits,
            setting.eval_interval,
            config.updates_per_iteration,
            config.rollouts_key(),
        )
        self.position = Position(0, Phase.START)
        self._children: list[Child] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._group: GroupRecord | None = None

    def move(self, position: Position, group: GroupRecord) -> None:
        """Take over position and record of the group."""
        self.position, self._group = position, group

    @property
    def group(self) -> GroupRecord:
        """The record of the group at the last `move`."""
        assert self._group is not None, "no work before there is a group"
        return self._group

    @property
    def is_master(self) -> bool:
        """Whether this node leads the group."""
        return self.setting.rank == MASTER_RANK

    @property
    def iteration(self) -> IterationDir:
        """The folder of the iteration that the node works in."""
        return self.output.iteration(self.position.iteration)

    @property
    def steps(self) -> list[int]:
        """The steps of this iteration's updates, ascending."""
        count = self.config.updates_per_iteration
        return [(self.position.iteration - 1) * count + number for number in range(1, count + 1)]

    def is_proven(self, name: str) -> bool:
        """Whether this iteration's proof of that name holds (`Proofs.holds`)."""
        return self.proofs.holds(name, self.position.iteration)

    def prove(self, name: str, content: Mapping[str, object]) -> bool:
        """Write the proof unless it holds already. Always returns True, for `tasks.Now`. Raises OSError."""
        if not self.is_proven(name):
            write_atomic(self.iteration.proof(name), msgspec.json.encode(content))
        return True

    def write_run(self) -> None:
        """The ordinary run that all this trains."""
        text = tomli_w.dumps(self.config.orchestrator(self.setting.max_iterations))
        run = self.run
        run.path.mkdir(parents=True, exist_ok=True)
        for folder in (run.control, run.rollouts, run.broadcast, run.checkpoints, run.metrics):
            make_folder(folder)
        if read_text(run.orch_toml) != text:
            write_atomic(run.orch_toml, text)

    # -- this node's processes ----

    def child(self, name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Raises ValueError after `close`."""
        with self._lock:
            if self._is_closed:
                raise ValueError(f"this node leaves: {name} is not started")
            child = Child(name, argv, self.output.log(f"node_{self.setting.rank}_{name}"), environment or {})
            self._children = [*(each for each in self._children if each.exit_code is None), child]
        return child

    def close(self) -> None:
        """Ask all of them to end. From any thread."""
        with self._lock:
            self._is_closed = True
            for child in self._children:
                child.ask_to_end()

    @property
    def has_ended(self) -> bool:
        """Whether all of this node's processes have ended."""
        return all(child.exit_code is not None for child in self._children)

    def make(self, split: Split, request: MakeRequest) -> Child:
        """Start the process that makes the rollouts of `request`, which is written to a file for it."""
        return self._share("make", split, request)

    def join(
        self,
        split: Split,
        sources: Mapping[str, str],
        steps: list[int],
        proof: str,
        sampler_state: dict[str, Any] | None = None,
    ) -> Child:
        """Put all tasks together, each from the file of this iteration that has its name; writes the proof."""
        request = JoinRequest(
            run=str(self.run.path),
            split=split,
            sources={task: str(self.iteration.path / name) for task, name in sources.items()},
            steps=steps,
            result=str(self.iteration.proof(proof)),
            sampler_state=sampler_state or {},
        )
        return self._share("join", split, request)

    def _share(self, what: str, split: Split, request: MakeRequest | JoinRequest) -> Child:
        path = self.iteration.request(f"{split}_{what}", self.setting.rank)
        write_atomic(path, msgspec.json.encode(request))
        return self.child(f"{split}_{what}", [sys.executable, "-m", "prime_rl.orchestrator.share", what, str(path)])
