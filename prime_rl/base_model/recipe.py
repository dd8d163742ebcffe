"""What a base model is made of. Everything that decides its bytes is a field here, so that its hash names the model.

No torch here: whether a folder is up to date must be known at once.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

# Raise it when code (not a field below) changes what comes out.
RECIPE_VERSION = 1


@dataclass(frozen=True)
class Recipe:
    """One base model. The defaults teach the tasks in about a minute on two cores, and leave room above.

    A first part of the demonstrations is all right, which is the fast way to the skill; the rest is of mixed quality,
    like text in the wild, so that a sampled answer is right about every third time. The skill is there and rarely
    shown: this is what reinforcement learning brings out within a few updates.
    """

    seed: int = 0
    num_steps: int = 360
    num_threads: int = 2

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 512

    batch_size: int = 64
    muon_lr: float = 0.02
    """Of the weight matrices."""
    adamw_lr: float = 5e-3
    """Of embeddings and norms."""
    warmup_steps: int = 30
    min_lr_ratio: float = 0.05
    max_norm: float = 1.0

    min_len: int = 3
    max_len: int = 7
    task_weights: tuple[tuple[str, int], ...] = (
        ("reverse-text", 1),
        ("sort-letters", 2),
        ("upper-case", 1),
        ("copy-text", 1),
    )
    """How often each task is shown; sorting is the hardest to learn."""
    clean_share: float = 0.6
    """Part of the steps, from the first, in which all demonstrations are right."""
    other_task_share: float = 0.6
    """After that: part of the demonstrations that answer a randomly drawn task, mostly another one."""
    careless_share: float = 0.3
    """After that: part of the demonstrations with letters lost or mistaken."""

    def digest(self) -> str:
        """Hash of all settings: equal digests are equal models."""
        text = json.dumps({"version": RECIPE_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
