"""The paths of one iteration of a multi-node group, below `contract.layout.OutputDir.iteration`.

Like `contract.layout` it only computes paths.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class IterationDir:
    """The files of one iteration of a multi-node group: `multinode/iteration_N/`. `split` is "train" or "eval"."""

    path: Path

    def plan(self, split: str, epoch: str, round: int) -> Path:
        """The tasks of each rank in one round of one epoch; written by the master."""
        return self.path / f"{split}_plan_{epoch}_{round}.json"

    def plans(self, split: str, epoch: str) -> list[Path]:
        """Those of all rounds of one epoch, the last round last."""
        found = self.path.glob(f"{split}_plan_{epoch}_*.json")
        return sorted(found, key=lambda path: int(path.stem.rpartition("_")[2]))

    def rank_file(self, split: str, rank: int, version: int, key: str, incarnation: str) -> Path:
        """The results of one process of one rank with one policy version. `key` identifies their settings."""
        return self.path / f"{split}_rank_{rank}_v{version}_{key}_{incarnation}.msgpack"

    def rank_files(self, split: str, *, rank: int | str = "*", version: int | str = "*", key: str = "*") -> list[Path]:
        """Those of all processes of a rank, with a version and with settings; or of any."""
        return sorted(self.path.glob(f"{split}_rank_{rank}_v{version}_{key}_*.msgpack"))

    def request(self, what: str, rank: int) -> Path:
        """A node's request to its own rollout worker."""
        return self.path / f"{what}_request_{rank}.json"

    def proof(self, name: str) -> Path:
        """The proof that a phase is done: train, eval, update, checkpoint, done. Written by the master, last of all."""
        return self.path / f"{name}.json"
