"""Versions of a run on disk, and where: what is forked, exported, served, or continued from.

A version has been published for inference, saved as a checkpoint, or both; of both the older ones are removed in time.
Version 0 is on disk only for a run that started from an adapter (`[init]`). Reads names only.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from daemons.errors import ActionError
from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.contract.peft import CONFIG_FILE
from prime_rl.contract.served import adapter_name

_SOURCE = re.compile(r"(run_[A-Za-z0-9._-]{1,64})(?:@v(0|[1-9][0-9]{0,9}))?")
MAX_LISTED = 12


@dataclass(frozen=True)
class Version:
    """One version of a run. `published` and `checkpoint` are folders with its weights, None where there is none."""

    run: RunDir
    step: int
    published: Path | None
    checkpoint: Path | None

    @property
    def name(self) -> str:
        """The name under which inference serves it: `run_id@vN`."""
        return adapter_name(self.run.run_id, self.step)

    @property
    def adapter(self) -> Path | None:
        """A folder with its adapter in PEFT format; None for a version of the whole model."""
        folders = [folder for folder in (self.published, self.checkpoint) if folder is not None]
        return next((folder for folder in folders if os.path.lexists(folder / CONFIG_FILE)), None)


def versions_of(run: RunDir) -> list[Version]:
    """The complete versions of a run, oldest first."""
    published = set(list_steps(run.broadcast, stable_only=True))
    saved = set(list_steps(run.checkpoints, stable_only=True))
    return [
        Version(
            run,
            step,
            run.broadcast_dir(step) if step in published else None,
            run.trainer_checkpoint(step) if step in saved else None,
        )
        for step in sorted(published | saved)
    ]


def find_version(run: RunDir, step: int | None = None, *, saved: bool = False) -> Version:
    """The version of `step`, by default the newest; `saved`: of those with a checkpoint. Raises ActionError."""
    found = [version for version in versions_of(run) if version.checkpoint or not saved]
    wanted = [version for version in found if step is None or version.step == step]
    if wanted:
        return wanted[-1]
    what, kind = ("a checkpoint", "checkpoints") if saved else ("a version", "versions")
    if not found:
        raise ActionError(
            f"{run.run_id} does not have {what} yet: wait for its first, or add its orch.toml as a new run"
        )
    steps = ", ".join(str(version.step) for version in found[-MAX_LISTED:])
    more = "..., " if len(found) > MAX_LISTED else ""
    raise ActionError(f"{run.run_id} does not have {what} of step {step}; its {kind}: {more}{steps}")


def parse_version(text: str) -> tuple[str, int | None] | None:
    """`run_a@v20` -> ("run_a", 20), `run_a` -> ("run_a", None); anything else -> None."""
    match = _SOURCE.fullmatch(text)
    return (match[1], None if match[2] is None else int(match[2])) if match else None
