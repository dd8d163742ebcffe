"""The resolved config of a file, and where each value comes from: what `prl config show` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prime_rl.configs.base import BaseConfig, ConfigError, build, merge, parse_toml, read_text
from prime_rl.configs.explain import KINDS
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import TrainerLimits, resolve
from prime_rl.configs.values import flatten, key_lines, line_of

# file: it is set there. flag: by --set. workspace: a run takes what its trainer has. derived: from other values of the
# file, such as those that a system file shares between trainer and inference. default: none of these.
Source = Literal["file", "flag", "workspace", "derived", "default"]


@dataclass(frozen=True)
class Origin:
    """One dotted key, its value as JSON has it, and where that comes from. `line` (from 1) is of the file."""

    key: str
    value: Any
    source: Source
    line: int | None = None


def kind_of(data: Mapping[str, Any]) -> str:
    """The kind of file that this is: the one whose check finds the fewest problems."""
    return min(KINDS, key=lambda kind: _num_problems(KINDS[kind][0], data))


def read_origins(
    path: Path, kind: str | None = None, flags: Mapping[str, Any] | None = None, limits: TrainerLimits | None = None
) -> tuple[str, list[Origin]]:
    """The kind of the file, and all its keys in the order of the schema. `limits`: those of a run's trainer.

    Raises ConfigError when the file is not a valid config.
    """
    text, flags = read_text(path), flags or {}
    data = merge(parse_toml(text, str(path)), flags)
    kind = kind or kind_of(data)
    config = build(KINDS[kind][0], data, str(path))
    lines = key_lines(text.splitlines())
    in_flags, in_data, alone = dict(flatten(flags)), dict(flatten(data)), dict(flatten(_dump(config)))
    resolved = resolve(config, limits) if limits and isinstance(config, OrchestratorConfig) else config
    defaults = _defaults(kind)

    def source(key: str, value: Any) -> Source:
        if key in in_flags:
            return "flag"
        if key in in_data:
            return "file"
        if value != alone.get(key):
            return "workspace"
        return "derived" if key in defaults and value != defaults[key] else "default"

    found = []
    for key, value in flatten(_dump(resolved)):
        origin = source(key, value)
        found.append(Origin(key, value, origin, line_of(key, lines) if origin == "file" else None))
    return kind, found


def _dump(config: BaseConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def _defaults(kind: str) -> dict[str, Any]:
    """Of the kinds whose fields all have one; values of a run are derived from nothing but its trainer."""
    model = KINDS[kind][0]
    return {} if any(field.is_required() for field in model.model_fields.values()) else dict(flatten(_dump(model())))


def _num_problems(model: type[BaseConfig], data: Mapping[str, Any]) -> int:
    try:
        build(model, data, "")
    except ConfigError as error:
        return len(error.problems)
    return 0
