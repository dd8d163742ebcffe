"""What is proven of each iteration by the files that the master wrote, and where a new epoch goes on by them.

A proof that no longer holds (rollouts with other settings, of a policy that has been trained since, or in a file
that is damaged; an evaluation that was not due and is now) counts as none, and is made again. Reads, writes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prime_rl.configs.multinode import RUN_ID
from prime_rl.contract.files import read_file
from prime_rl.contract.layout import OutputDir, list_steps
from prime_rl.contract.rank_files import read_rank_file
from prime_rl.contract.shares import Split
from prime_rl.multinode.phases import Phase, Position, RlPhase, eval_is_due, first_position

# A proof names every task of an iteration and its file: a million of them.
MAX_PROOF_BYTES = 256 << 20
KindT = TypeVar("KindT")


class TrainProof(msgspec.Struct, frozen=True, kw_only=True):
    """All rollouts of an iteration.

    The policy version and the settings (`Proofs.key`) that made them, and the name of each task's file.
    """

    policy_version: int
    key: str
    sources: dict[str, str]


class EvalProof(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of a policy version (`steps` has that one), or that none was due."""

    steps: list[int] = []
    due: bool = True


class _UpdateProof(msgspec.Struct, frozen=True):
    """What is read again of the batches that were made (`contract.shares.JoinResult`)."""

    sampler_state: dict[str, Any] = {}


class Proofs:
    """The proofs of one workspace as a group of this mode sees them.

    `splits`: the rollouts that it makes; `key` identifies their settings (`MultinodeConfig.rollouts_key`).
    """

    def __init__(
        self,
        output: OutputDir,
        rl_phase: RlPhase,
        splits: frozenset[Split],
        eval_interval: int | None,
        updates_per_iteration: int,
        key: str,
    ) -> None:
        self._output = output
        self._rl_phase = rl_phase
        self._splits = splits
        self._eval_interval = eval_interval
        self._updates = updates_per_iteration
        self.key = key
        self._whole: set[int] = set()

    def version(self, iteration: int) -> int:
        """The policy version that makes an iteration's rollouts. Without training it stays the newest version."""
        wanted = (iteration - 1) * self._updates
        if self._rl_phase is not RlPhase.ROLLOUT:
            return wanted
        return min(wanted, max(list_steps(self._output.run(RUN_ID).broadcast, stable_only=True), default=0))

    def sampler_state(self, version: int) -> dict[str, Any]:
        """What the rollouts up to policy version `version` left known of the examples; they decide what is drawn next.

        Raises OSError while the proof that holds it is not there to be read.
        """
        iteration = version // self._updates
        if iteration == 0:
            return {}
        path = self._output.iteration(iteration).proof("update")
        proof = read_json(path, _UpdateProof)
        if proof is None:
            problem = f"{path}: not found or damaged: the next examples depend on it"
            raise OSError(f"{problem}: put it back, or start over in an empty --log-path")
        return proof.sampler_state

    def eval_is_due(self, iteration: int) -> bool:
        """Whether this group makes evaluations and the iteration has one."""
        return "eval" in self._splits and eval_is_due(iteration, self._eval_interval)

    def train(self, iteration: int) -> TrainProof | None:
        """The rollouts that are there, of whatever version and settings."""
        return read_json(self._output.iteration(iteration).proof("train"), TrainProof)

    def lost_task(self, iteration: int, proof: TrainProof) -> str | None:
        """A task of the rollouts that are proven, but no longer in its file, which is damaged or gone."""
        if iteration in self._whole:
            return None
        folder = self._output.iteration(iteration).path
        found = {(entry.task, name) for name in set(proof.sources.values()) for entry in read_rank_file(folder / name)}
        for task, name in proof.sources.items():
            if (task, name) not in found:
                return f"task {task} in {folder / name}"
        self._whole.add(iteration)  # looked at once: they are only ever added to
        return None

    def holds(self, name: str, iteration: int) -> bool:
        """Whether an iteration's proof of that name exists with the expected content."""
        path = self._output.iteration(iteration).proof(name)
        if name == "train":
            proof = self.train(iteration)
            if proof is None or (proof.policy_version, proof.key) != (self.version(iteration), self.key):
                return False
            return self.lost_task(iteration, proof) is None
        if name == "eval" and path.exists() and self.eval_is_due(iteration):
            found = read_json(path, EvalProof)
            return found is not None and found.due and found.steps == [self.version(iteration)]
        return path.exists()

    def resume(self) -> Position:
        """The first position that is not proven to be done."""
        iteration = 1
        while self.holds("done", iteration) or (self._rl_phase is RlPhase.ROLLOUT and self._is_rolled_out(iteration)):
            iteration += 1
        opening = first_position(self._rl_phase, iteration)
        return max(Position(iteration, self._phase(iteration)), opening)

    def _is_rolled_out(self, iteration: int) -> bool:
        return self.holds("eval", iteration) and ("train" not in self._splits or self.holds("train", iteration))

    def _phase(self, iteration: int) -> Phase:
        """Where an iteration that is not done goes on."""
        if self.holds("checkpoint", iteration):
            return Phase.RESTART_INFERENCE
        if self.holds("update", iteration):
            return Phase.CONFIG_READY
        if "train" in self._splits and not self.holds("train", iteration):
            return Phase.START
        return Phase.STOP_INFERENCE if self.holds("eval", iteration) else Phase.EVAL_ROLLOUT


def read_json(path: Path, kind: type[KindT]) -> KindT | None:
    """None when it is not there, not to be seen yet, or damaged."""
    try:
        return msgspec.json.decode(read_file(path, limit=MAX_PROOF_BYTES), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
