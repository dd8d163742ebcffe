"""Where a run stands, so that a restarted orchestrator goes on at the next example of the next batch.

It is in two places on disk: the newest batch file, and `orchestrator/state.json` in the newest STABLE checkpoint (whose
batch files the trainer has removed). Both hold the same sampler state. A state file without STABLE does not
count: it is written before its batch.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.configs.orchestrator import CkptConfig
from prime_rl.contract.files import make_folder, read_file, read_text, write_atomic
from prime_rl.contract.layout import RunDir, list_rollout_steps, list_steps
from prime_rl.contract.types import MAX_BATCH_BYTES, TrainingBatch, read_batch

logger = logging.getLogger(__name__)

STATE_FORMAT_VERSION = 1
# It holds a number, two bits for each example, and a thousand shares for each curriculum.
MAX_STATE_BYTES = 1 << 20


class CheckpointError(RuntimeError):
    """The place to go on from cannot be read; the message names the file."""


@dataclass(frozen=True)
class Progress:
    """The newest batch that is done with, where the example order goes on after it, and what is known of examples."""

    step: int
    next_index: int
    pools: dict[str, Any] = field(default_factory=dict)
    curricula: dict[str, Any] = field(default_factory=dict)


class _State(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    step: int
    sampler_state: dict[str, Any]


def checkpoint_is_due(step: int, config: CkptConfig, max_steps: int) -> bool:
    """True when the run is checkpointed at `step`: every `config.interval` steps, and at the last."""
    return step % config.interval == 0 or step == max_steps


def save_state(run: RunDir, batch: TrainingBatch) -> None:
    """Write the orchestrator's part of checkpoint `batch.step`; before the batch file, which lets the trainer go on."""
    make_folder(run.checkpoint_dir(batch.step))
    write_atomic(_state_file(run, batch.step), _state_of(batch))


def correct_state(run: RunDir, batch: TrainingBatch) -> None:
    """Once `batch` is on disk: make the state of its step, if there is one, that of this batch.

    Two orchestrators may both have written the state before one of them wrote the batch.
    """
    path, right = _state_file(run, batch.step), _state_of(batch)
    if read_text(path) not in (None, right):
        write_atomic(path, right)


def _state_file(run: RunDir, step: int) -> Path:
    return run.orchestrator_checkpoint(step) / "state.json"


def _state_of(batch: TrainingBatch) -> str:
    return json.dumps({"version": STATE_FORMAT_VERSION, "step": batch.step, "sampler_state": batch.sampler_state})


def find_progress(run: RunDir, groups_per_batch: int, *, max_bytes: int = MAX_BATCH_BYTES) -> Progress:
    """Where to go on: after the newest batch file (of at most `max_bytes`) or STABLE checkpoint.

    Raises CheckpointError or BadBatchError. A trainer that stops saves itself at any step, so a checkpoint may lack our
    part. Its batch file is then still there, unless the run was rolled back from a later one: the example order goes on
    as if no group had been dropped.
    """
    newest_batch = max(list_rollout_steps(run), default=0)
    newest_checkpoint = max(list_steps(run.checkpoints, stable_only=True), default=0)
    if newest_batch == newest_checkpoint == 0:
        return Progress(0, 0)
    if newest_batch >= newest_checkpoint:
        batch = read_batch(run.rollout_file(newest_batch), limit=max_bytes)
        return progress_of(newest_batch, batch.sampler_state)
    path = _state_file(run, newest_checkpoint)
    if not os.path.lexists(path):
        logger.warning("%s not found: the example order continues as if no group had been dropped", path)
        return Progress(newest_checkpoint, newest_checkpoint * groups_per_batch)
    return progress_of(newest_checkpoint, _load_state(path).sampler_state)


def _load_state(path: Path) -> _State:
    try:
        state = msgspec.json.decode(read_file(path, limit=MAX_STATE_BYTES), type=_State)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: cannot resume from this checkpoint: {error}") from error
    if state.version != STATE_FORMAT_VERSION:
        raise CheckpointError(f"{path}: format version {state.version}, this program reads {STATE_FORMAT_VERSION}")
    return state


def progress_of(step: int, state: Mapping[str, Any]) -> Progress:
    """After batch `step`, which has the sampler state `state`. Raises CheckpointError."""
    try:
        known = dict(state.get("pools", {})), dict(state.get("curricula", {}))
        return Progress(step, int(state["next_index"]), *known)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"sampler state {str(state)[:200]} cannot be used: {error!r}") from error
