"""A config as dotted keys with values, the lines that set them, and what differs between two runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.orchestrator import OrchestratorConfig


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as ("model.lora.rank", 8); tables in a list get their number: ("env.0.id", ...)."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            for number, each in enumerate(value):
                yield from flatten(each, f"{key}.{number}.")
        else:
            yield key, value


def resolved(data: Mapping[str, Any]) -> dict[str, Any]:
    """A run's config with its defaults. Raises ConfigError when it is not valid."""
    return build(OrchestratorConfig, data, "orch.toml").model_dump(mode="json")


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value in one, value in other) for all keys of two configs that differ; null where a key is missing.

    A default equals the same value in the file, unless one of the two is not valid.
    """
    with contextlib.suppress(ConfigError):
        one, other = resolved(one), resolved(other)
    sides = dict(flatten(one)), dict(flatten(other))
    keys = dict.fromkeys([*sides[0], *sides[1]])
    pairs = ((key, sides[0].get(key), sides[1].get(key)) for key in keys)
    return [pair for pair in pairs if pair[1] != pair[2]]


def key_lines(lines: Sequence[str]) -> dict[str, int]:
    """Dotted key ("model.lora.rank", "env.0.id") -> line (from 1) that sets it; tables too. Simple TOML only."""
    found: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    for number, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0].strip()
        if text.startswith("[[") and text.endswith("]]"):
            name = text[2:-2].strip()
            table = f"{name}.{counts.get(name, 0)}"
            counts[name] = counts.get(name, 0) + 1
            found.setdefault(table, number)
        elif text.startswith("[") and text.endswith("]"):
            table = text[1:-1].strip()
            found.setdefault(table, number)
        elif "=" in text:
            key = text.split("=", 1)[0].strip().strip("\"'")
            found.setdefault(f"{table}.{key}" if table else key, number)
    return found


def line_of(key: str, lines: Mapping[str, int]) -> int | None:
    """The line that sets `key`, else that of the innermost table around it in the text."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return None
