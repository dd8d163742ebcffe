"""The adapter that a new run starts from (`[init] from`): found, checked against the run, and copied into its `init/`.

It is a version of a run of this workspace, a folder in PEFT format, or the name of one on the Hugging Face hub. It is
copied when the run is added, so whatever becomes of the source, the run can start, and start over. Names, shapes and
numbers are checked by the trainer, which has the model.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from daemons.errors import ActionError, expand_home, in_one_line, need
from daemons.trash import existing_run
from daemons.versions import Version, find_version, parse_version
from prime_rl.configs.base import ConfigError, load_config
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits
from prime_rl.contract.files import open_file
from prime_rl.contract.layout import OutputDir, stable_marker
from prime_rl.contract.peft import (
    ADAPTER_FILE,
    CONFIG_FILE,
    AdapterConfig,
    check_adapter_file,
    has_adapter,
    read_adapter_config,
    untrained_modules,
)

# Beside the adapter in a checkpoint: the moments of the optimizer, and what refers to them.
_OPTIMIZER_FILES = ("progress.json", "state.safetensors")
_COPY_BYTES = 1 << 20
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Start:
    """An adapter to start from.

    Attributes:
        name: the version, such as "run_a@v20", the folder, or the name on the hub.
        version: None for what is not a version of a run of this workspace.
        files: what is copied; with moments of the optimizer, from a checkpoint.
    """

    name: str
    folder: Path
    config: AdapterConfig
    version: Version | None = None
    files: Sequence[str] = (CONFIG_FILE, ADAPTER_FILE)


def find_start(output: OutputDir, source: str, *, download: bool = True) -> Start | None:
    """Find what `[init] from` names. None: on the hub, and not to be downloaded.

    Raises ActionError when it is missing or not an adapter, or OSError.
    """
    named = parse_version(source)
    if named is not None:
        return start_from(find_version(existing_run(output, named[0]), named[1]))
    folder = expand_home(Path(source))
    if folder.is_dir():
        return Start(source, folder, _config(folder))
    if not _HUB_NAME.fullmatch(source):
        raise ActionError(
            in_one_line(
                f"init.from: {source!r} not found: must be a run such as run_a@v20, a folder in PEFT format, "
                "or ORG/NAME on the Hugging Face hub"
            )
        )
    if not download:
        return None
    folder = _download(source)
    return Start(source, folder, _config(folder))


def start_from(version: Version, *, with_optimizer: bool = False) -> Start:
    """A version to start from; `with_optimizer` needs its checkpoint. Raises ActionError."""
    folder = version.checkpoint if with_optimizer else version.adapter
    if folder is None or version.adapter is None:
        raise ActionError(f"{version.name} is a version of a whole model: a run can start from an adapter only")
    files = (CONFIG_FILE, ADAPTER_FILE, *(_OPTIMIZER_FILES if with_optimizer else ()))
    return Start(version.name, folder, _config(folder), version, files)


def check_start(output: OutputDir, start: Start, config: OrchestratorConfig, limits: TrainerLimits | None) -> None:
    """Raises ActionError when a run with `config` cannot start from it."""
    rank = config.model.lora.rank or (limits.max_rank if limits else None)
    if rank is not None and start.config.rank > rank:
        raise ActionError(
            f"init.from: {start.name} has rank {start.config.rank}, the run has model.lora.rank = {rank}: "
            "must be at most that; raise the run's rank, or choose another adapter"
        )
    takes = _target_modules(output)
    if takes is not None and (odd := untrained_modules(start.config.target_modules, takes)):
        raise ActionError(
            in_one_line(
                f"init.from: {start.name} adapts {', '.join(odd)[:200]}, this workspace's trainer only "
                f"{', '.join(takes)}: choose another adapter, or change lora.target_modules in the system file"
            )
        )


def copy_start(start: Start, folder: Path) -> None:
    """Copy the adapter into `folder`, which must be new. Raises ActionError or OSError."""
    folder.mkdir()
    try:
        for name in start.files:
            _copy(start.folder / name, folder / name)
        check_adapter_file(folder / ADAPTER_FILE)
    except FileNotFoundError as error:
        raise ActionError(f"{start.name}: {error.filename} not found: it may have been removed meanwhile") from error
    except ValueError as error:
        raise ActionError(in_one_line(str(error))) from error
    # A version is removed marker first: what was copied while the marker stood is whole.
    if start.version is not None and not _is_complete(start):
        raise ActionError(f"{start.name} was removed while it was copied: choose a newer version")


def has_optimizer(init: Path) -> bool:
    """Whether the `init/` of a run has moments of an optimizer too."""
    return all((init / name).exists() for name in _OPTIMIZER_FILES)


def _is_complete(start: Start) -> bool:
    """Whether the folder that was copied still counts. A checkpoint has its marker one folder higher."""
    assert start.version is not None
    step_dir = start.folder if start.folder == start.version.published else start.folder.parent
    return stable_marker(step_dir).exists()


def _config(folder: Path) -> AdapterConfig:
    try:
        return read_adapter_config(folder, follow_links=True)
    except FileNotFoundError as error:
        raise ActionError(f"{folder} has no {CONFIG_FILE}: a run starts from a folder in PEFT format") from error
    except ValueError as error:
        raise ActionError(in_one_line(str(error))) from error


def _download(name: str) -> Path:
    """The folder with the adapter `name` of the hub, from its cache if it is there."""
    need("cpu", "huggingface_hub")
    from huggingface_hub import snapshot_download  # a slow import, and most adapters are in a folder

    try:
        folder = Path(snapshot_download(name, allow_patterns=[CONFIG_FILE, ADAPTER_FILE]))
    except (OSError, ValueError) as error:
        raise ActionError(
            in_one_line(f"init.from: {name!r} is not a folder, and the hub does not give it: {str(error)[:300]}")
        ) from error
    if not has_adapter(folder):
        raise ActionError(f"init.from: {name!r} on the hub has no {CONFIG_FILE} and {ADAPTER_FILE}")
    return folder


def _target_modules(output: OutputDir) -> tuple[str, ...] | None:
    """What the workspace's trainer adapts; None when it never ran."""
    try:
        lora = load_config(TrainerConfig, output.component_config("trainer")).model.lora
    except ConfigError:
        return None
    return lora.target_modules if lora else None


def _copy(source: Path, target: Path) -> None:
    with os.fdopen(open_file(source, follow_links=True), "rb") as old, target.open("xb") as new:
        shutil.copyfileobj(old, new, _COPY_BYTES)
        new.flush()
        os.fsync(new.fileno())
