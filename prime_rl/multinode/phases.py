"""The fourteen phases of one iteration: the work of master and workers, and the file that proves that it was done.

A node works in one phase at a time, notes in its own record that it is done, and goes on when the master has released
the next. So every phase ends in a barrier, also those in which only one side has work. Pure: `node` does the work,
`decide` moves the group from phase to phase.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prime_rl.contract.nodes import PHASE_NAMES, RL_PHASES


class Phase(enum.IntEnum):
    """The phases of `--rl-phase both`; `rollout` ends with EVAL_AGGREGATE, `update` begins with STOP_INFERENCE."""

    START = 0
    TRAIN_ROLLOUT = 1
    ROLLOUT_DONE = 2
    FILES_READY = 3
    AGGREGATE = 4
    EVAL_ROLLOUT = 5
    EVAL_AGGREGATE = 6
    STOP_INFERENCE = 7
    PREPARE = 8
    CONFIG_READY = 9
    TRAIN = 10
    COPY_CHECKPOINT = 11
    RESTART_INFERENCE = 12
    FINAL = 13

    @property
    def label(self) -> str:
        """The name for people, as in `PHASE_NAMES`."""
        return PHASE_NAMES[self]


class RlPhase(enum.StrEnum):
    """What `--rl-phase` names: the whole loop or one half of it."""

    BOTH = "both"
    ROLLOUT = "rollout"
    UPDATE = "update"


@dataclass(frozen=True)
class PhaseRule:
    """One row of the protocol's table. `proof` is a file below `multinode/` ({} is the iteration), or None."""

    master: str
    worker: str
    proof: str | None = None


_WAITS = "waits"
_SERVES = "starts its inference server"
_STOPS = "stops its inference server"
_TRAINS = "trains with all nodes (torchrun)"
RULES: Mapping[Phase, PhaseRule] = {
    Phase.START: PhaseRule("writes the run's config", _WAITS),
    Phase.TRAIN_ROLLOUT: PhaseRule(
        f"divides the tasks, {_SERVES}, makes its part of them",
        f"{_SERVES}, makes its part of the tasks",
        "iteration_{}/train_rank_*",
    ),
    Phase.ROLLOUT_DONE: PhaseRule("notes that its part is made", "notes that its part is made"),
    Phase.FILES_READY: PhaseRule("looks until it sees every task in the rank files", _WAITS),
    Phase.AGGREGATE: PhaseRule("notes the file of each task", _WAITS, "iteration_{}/train.json"),
    Phase.EVAL_ROLLOUT: PhaseRule(
        "decides on evaluation, makes its part of it", "makes its part, if any", "iteration_{}/eval_rank_*"
    ),
    Phase.EVAL_AGGREGATE: PhaseRule("takes the mean over all rank files", _WAITS, "iteration_{}/eval.json"),
    Phase.STOP_INFERENCE: PhaseRule(_STOPS, _STOPS),
    Phase.PREPARE: PhaseRule("writes the batches and the trainer's config", _WAITS, "iteration_{}/update.json"),
    Phase.CONFIG_READY: PhaseRule(_WAITS, "looks until it sees the trainer's config"),
    Phase.TRAIN: PhaseRule(_TRAINS, _TRAINS, "../run_multinode/broadcast/step_*/STABLE"),
    Phase.COPY_CHECKPOINT: PhaseRule("copies the new weights", _WAITS, "iteration_{}/checkpoint.json"),
    Phase.RESTART_INFERENCE: PhaseRule(_SERVES + " if more rollouts follow", _SERVES + " if more rollouts follow"),
    Phase.FINAL: PhaseRule("notes the end of the iteration", _WAITS, "iteration_{}/done.json"),
}


class Position(NamedTuple):
    """Where a group is. `round` counts, within a phase, how often work was divided again after a node was lost."""

    iteration: int
    phase: Phase
    round: int = 0

    def __str__(self) -> str:
        again = f", round {self.round}" if self.round else ""
        return f"iteration {self.iteration}, phase {int(self.phase)} ({self.phase.label}){again}"


def phases_of(rl_phase: RlPhase) -> Sequence[Phase]:
    """The phases of one iteration in a mode, in their order."""
    return [Phase(number) for number in RL_PHASES[rl_phase]]


def first_position(rl_phase: RlPhase, iteration: int) -> Position:
    """Where an iteration begins in a mode."""
    return Position(iteration, phases_of(rl_phase)[0])


def next_position(position: Position, rl_phase: RlPhase) -> Position:
    """What follows when all nodes are done with `position`; after the mode's last phase the next iteration begins."""
    if position.phase is phases_of(rl_phase)[-1]:
        return first_position(rl_phase, position.iteration + 1)
    return Position(position.iteration, Phase(position.phase + 1))


def eval_is_due(iteration: int, interval: int | None) -> bool:
    """Whether iteration N (from 1) is evaluated: every `interval` iterations, beginning with the first."""
    return interval is not None and iteration % interval == 1 % interval
