"""Which run is in which slot. Pure: no files, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """How far a run is. `step` counts updates done."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0


@dataclass
class Slots:
    """A one-to-one mapping of `max_runs` slot numbers to run ids. A new run takes the lowest free slot."""

    max_runs: int
    idx_2_id: dict[int, str] = field(default_factory=dict)
    id_2_idx: dict[str, int] = field(default_factory=dict)

    @property
    def used_idxs(self) -> set[int]:
        return set(self.idx_2_id)

    @property
    def unused_idxs(self) -> set[int]:
        return set(range(self.max_runs)) - set(self.idx_2_id)

    def run_in(self, run_idx: int) -> str:
        """The id of the run in a slot. Raises KeyError for an empty slot."""
        if run_idx not in self.idx_2_id:
            raise KeyError(f"no run in slot {run_idx}; slots in use: {sorted(self.idx_2_id)}")
        return self.idx_2_id[run_idx]

    def take(self, run_id: str, run_idx: int | None = None) -> int:
        """Give `run_id` a slot (the lowest free one, or `run_idx`) and return it."""
        assert run_id not in self.id_2_idx, f"{run_id} has a slot already"
        assert self.unused_idxs, "no free slot"
        idx = min(self.unused_idxs) if run_idx is None else run_idx
        assert idx in self.unused_idxs, f"slot {idx} is taken"
        self.idx_2_id[idx] = run_id
        self.id_2_idx[run_id] = idx
        return idx

    def release(self, run_idx: int) -> str:
        """Free a slot; returns the id of the run that held it."""
        run_id = self.idx_2_id.pop(run_idx)
        del self.id_2_idx[run_id]
        return run_id
