"""Recorded batches of a workspace, trained on again elsewhere: find them, copy them, run the real trainer on them.

A recording is read from a run's folder: the rollout files that are still there (`ckpt.keep_rollouts` keeps all) and
the checkpoint before the first of them. Only copies in a temporary folder are trained on; the workspace is read, never
written. What the results mean is up to `selfcheck`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from torch import Tensor

from prime_rl.configs.admitted import config_in_effect, read_effect
from prime_rl.configs.base import ConfigError, load_config, merge
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.contract.files import WaitTimeout, read_file, read_text, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, list_rollout_steps, list_steps
from prime_rl.contract.notes import done_request
from prime_rl.contract.types import MAX_BATCH_BYTES
from prime_rl.lora.adapter_state import load_peft
from prime_rl.trainer.checkpoint import trainer_steps
from prime_rl.trainer.train import train
from prime_rl.trainer.world import World

# A step of a large model takes minutes, not this.
STALL_TIMEOUT_S = 1800.0


class ReplayError(RuntimeError):
    """Nothing to replay, or an unfinished replay; the message has the reason and what to do."""


@dataclass(frozen=True)
class Recording:
    """The batches `start` + 1 to `last` of a run, and the checkpoint of step `start` (0: none is needed)."""

    run: RunDir
    config: OrchestratorConfig
    start: int
    last: int

    @property
    def num_steps(self) -> int:
        """Updates that a replay makes."""
        return self.last - self.start


@dataclass(frozen=True)
class Setting:
    """How recordings are replayed: they take slots in the order they are given in."""

    max_tokens_per_micro_batch: int
    num_slots: int


def find_recording(run: RunDir) -> Recording:
    """The longest recording that a run still has. Raises ReplayError."""
    try:
        config = config_in_effect(run)
    except ConfigError as error:
        raise ReplayError(f"{run.run_id}: its config cannot be read: {error}") from error
    steps = set(list_rollout_steps(run))
    starts = [step for step in [0, *trainer_steps(run)] if step + 1 in steps]
    if not starts:
        raise ReplayError(
            f"{run.run_id} has no recorded batches that follow a checkpoint or step 0: "
            "set ckpt.keep_rollouts = true in its control/orch.toml before it trains"
        )
    last = start = starts[0]
    while last + 1 in steps and last < config.max_steps:
        last += 1
    newest = max(list_steps(run.broadcast, stable_only=True), default=start)
    # Batches after the newest version are still to be trained on.
    return Recording(run, config, start, newest if start < newest < last else last)


def read_published(recording: Recording) -> dict[str, Tensor]:
    """The adapter of version `last` as the run published it.

    Raises ReplayError when it is not there or a replay cannot lead to it, OSError and ValueError when it is damaged.
    """
    run, last = recording.run, recording.last
    if last not in list_steps(run.broadcast, stable_only=True):
        raise ReplayError(f"version {last} is not in {run.broadcast}")
    request = done_request(run)
    if request is not None and request.resume_step > recording.start:
        raise ReplayError(
            f"the run was rolled back to step {request.resume_step}: before it, control/orch.toml may have been another"
        )
    return load_peft(run.broadcast_dir(last))[0]


def trainer_config(workspace: Path, recordings: Sequence[Recording]) -> TrainerConfig:
    """The config of the trainer that made the recordings; without one, defaults with room for all of them."""
    path = OutputDir(workspace).component_config("trainer")
    if path.exists():
        config = load_config(TrainerConfig, path)
        if config.model.lora is None:
            raise ReplayError(
                f"{path}: the trainer of this workspace has the whole model for one run, which has no neighbours"
            )
        return config
    name = recordings[0].config.model.name
    rank = max((recording.config.model.lora.rank or 0) for recording in recordings)
    return TrainerConfig.model_validate({"model": {"name": name, "lora": {"rank": rank} if rank else {}}})


def replay(
    config: TrainerConfig,
    world: World,
    recordings: Sequence[Recording],
    setting: Setting,
    tell: Callable[[int], None] = lambda num_steps: None,
) -> dict[str, dict[str, Tensor]]:
    """The last adapter of each run after its recording was trained on. `tell` gets the number of steps done.

    Raises ReplayError when a run is refused or evicted, with its reason, and WaitTimeout when nothing moves.
    """
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        workspace = Path(folder)
        copies = {_copy(recording, workspace, place): recording for place, recording in enumerate(recordings)}
        changes = {
            "output_dir": workspace,
            "max_concurrent_runs": setting.num_slots,
            "max_tokens_per_micro_batch": setting.max_tokens_per_micro_batch,
        }
        train(config.model_copy(update=changes), world, _Watch(copies, tell))
        return {run.run_id: load_peft(run.broadcast_dir(recording.last))[0] for run, recording in copies.items()}


class _Watch:
    """Called by the training loop: whether all copies are at their end. Raises when one will never be."""

    def __init__(self, copies: Mapping[RunDir, Recording], tell: Callable[[int], None]) -> None:
        self._copies = copies
        self._tell = tell
        self._num_done = -1
        self._moved_at = time.monotonic()

    def __call__(self) -> bool:
        for run in self._copies:
            for path in (run.evicted, run.config_error):
                if reason := read_text(path):
                    raise ReplayError(f"{run.run_id} cannot be replayed: {' '.join(reason.split())}")
        versions = {run: max(list_steps(run.broadcast, stable_only=True), default=0) for run in self._copies}
        num_done = sum(max(0, versions[run] - recording.start) for run, recording in self._copies.items())
        if num_done != self._num_done:
            self._num_done, self._moved_at = num_done, time.monotonic()
            self._tell(num_done)
        if time.monotonic() - self._moved_at > STALL_TIMEOUT_S:
            raise WaitTimeout(f"timed out after {STALL_TIMEOUT_S:g} s waiting for the next step of the replay")
        return all(versions[run] >= recording.last for run, recording in self._copies.items())


def _copy(recording: Recording, workspace: Path, place: int) -> RunDir:
    """A run that starts where the recording does, and saves nothing that it need not."""
    source, copy = recording.run, RunDir(workspace / recording.run.run_id)
    copy.control.mkdir(parents=True)
    ckpt = {"resume_step": -1, "interval": recording.config.max_steps, "keep_rollouts": True}
    write_atomic(copy.orch_toml, tomli_w.dumps(merge(read_effect(source).data, {"ckpt": ckpt})))
    # Slots are given in the order in which configs landed.
    os.utime(copy.orch_toml, (place + 1, place + 1))
    for step in range(recording.start + 1, recording.last + 1):
        copy.rollout_dir(step).mkdir(parents=True)
        batch = read_file(source.rollout_file(step), limit=MAX_BATCH_BYTES)
        write_atomic(copy.rollout_file(step), batch, durable=False)
    if recording.start:
        shutil.copytree(source.checkpoint_dir(recording.start), copy.checkpoint_dir(recording.start), symlinks=True)
    elif recording.config.init.from_ is not None:
        shutil.copytree(source.init, copy.init, symlinks=True)
    return copy
