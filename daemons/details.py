"""All facts about one run, for `prl runs show`: config, latest metrics and errors, checkpoints, disk use.

Reads what `workspace_reader` need not read at every look. A file that is missing or damaged costs its own facts. Values
that look like API keys are hidden. All text is clean but `config`, which is data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemons.machine import Use, disk_use
from daemons.workspace import DaemonView, RunView
from prime_rl.configs.base import ConfigError, load_toml
from prime_rl.contract.layout import RunDir, list_steps, stable_marker
from prime_rl.contract.metrics import parse_metrics
from prime_rl.utils.tail import FileTail
from prime_rl.utils.text import CleanText, clean_text, one_line

NUM_ERRORS = 5
_TAIL_BYTES = 256 * 1024
_ERROR = re.compile(r"^\S+ (WARNING|ERROR|CRITICAL) |^[\w.]*(Error|Exception)\b.*:|^fatal\b", re.IGNORECASE)
# Names of secret values; `api_key_var` is a name and `max_tokens` a number.
_SECRET = re.compile(r"(^|_)(api_?key|access_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
HIDDEN = "(hidden)"


@dataclass(frozen=True)
class CheckpointView:
    """One `checkpoints/step_N`. Without `stable` it is being written, or was left behind by a kill."""

    step: int
    num_bytes: int
    stable: bool
    saved_at: float | None


@dataclass(frozen=True)
class RunDetails:
    """What is shown of one run.

    `config` is None unless it is valid TOML. `metrics`: the figures of the last step by writer. `disk`: bytes by
    folder.
    """

    run: RunView
    config: Mapping[str, Any] | None
    metrics: Mapping[str, Mapping[str, float]]
    errors: tuple[CleanText, ...]
    checkpoints: tuple[CheckpointView, ...]
    disk: Mapping[CleanText, int]
    disk_complete: bool
    log_tail: tuple[CleanText, ...]


def read_details(paths: RunDir, run: RunView, daemon: DaemonView | None) -> RunDetails:
    """Read the run's folder. Raises nothing for what is in it."""
    uses = _folders(paths.path)
    return RunDetails(
        run=run,
        config=_config(paths.orch_toml),
        metrics={
            name: figures
            for name, path in (("trainer", paths.trainer_metrics), ("orchestrator", paths.orchestrator_metrics))
            if (figures := last_figures(path))
        },
        errors=tuple(last_errors(paths.log)),
        checkpoints=tuple(_checkpoint(paths, step) for step in _steps(paths.checkpoints)),
        disk={one_line(name, 40): use.num_bytes for name, use in uses.items()},
        disk_complete=all(use.complete for use in uses.values()),
        log_tail=daemon.log_tail if daemon else (),
    )


def hide_secrets(value: Any) -> Any:
    """A copy of a config's values in which those with the name of a key are hidden."""
    if isinstance(value, Mapping):
        return {k: HIDDEN if _SECRET.search(str(k)) and v else hide_secrets(v) for k, v in value.items()}
    return [hide_secrets(item) for item in value] if isinstance(value, list) else value


def hide_secret(key: str, value: Any) -> Any:
    """The value of a dotted key, hidden when a part of the key is the name of one."""
    return HIDDEN if value and any(map(_SECRET.search, key.split("."))) else hide_secrets(value)


def last_figures(path: Path) -> dict[str, float]:
    """All figures of the last step of a metrics file, with `step`; {} without one."""
    found: dict[str, float] = {}
    for line in FileTail(path, start_bytes=_TAIL_BYTES).read().lines:
        parsed = parse_metrics(line)
        if parsed is not None:
            step, figures = parsed
            found = {**(found if found.get("step") == step else {}), **figures, "step": float(step)}
    return {one_line(name): value for name, value in found.items()}


def last_errors(log: Path) -> list[CleanText]:
    """The newest warnings and errors of a log, oldest first."""
    lines = FileTail(log, start_bytes=_TAIL_BYTES).read().lines
    texts = (clean_text(line.decode(errors="replace")) for line in lines)
    return [text for text in texts if _ERROR.search(text)][-NUM_ERRORS:]


def _config(path: Path) -> Mapping[str, Any] | None:
    try:
        hidden: Mapping[str, Any] = hide_secrets(load_toml(path))
        return hidden
    except ConfigError:
        return None


def _steps(folder: Path) -> list[int]:
    try:
        return list_steps(folder)
    except OSError:
        return []


def _checkpoint(paths: RunDir, step: int) -> CheckpointView:
    folder = paths.checkpoint_dir(step)
    try:
        saved_at = stable_marker(folder).stat().st_mtime
    except OSError:
        saved_at = None
    return CheckpointView(step, disk_use(folder).num_bytes, saved_at is not None, saved_at)


def _folders(run: Path) -> dict[str, Use]:
    """By folder of the run, largest first."""
    try:
        names = [entry.name for entry in run.iterdir() if entry.is_dir() and not entry.is_symlink()]
    except OSError:
        return {}
    uses = {name: disk_use(run / name) for name in names}
    return dict(sorted(uses.items(), key=lambda item: -item[1].num_bytes))
