"""What the config tab shows of a run: its `orch.toml`, what is wrong with it, all values, differences. No widgets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.configs import values
from prime_rl.configs.base import ConfigError, build, parse_toml
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.values import key_lines
from prime_rl.contract.layout import RunDir
from prime_rl.utils.text import CleanText, clean_text, one_line
from tui.readers.tabs import CONFIG, TabData, file_stamp, read_clean

MAX_VALUE_CHARS, MAX_PATH_CHARS = 200, 1_000
MISSING, NO_TEXT = one_line("-"), one_line("")
_LINE = re.compile(r"\bline (\d+)\b")


@dataclass(frozen=True)
class Value:
    """One key with its value as text. `is_default`: the file does not set it."""

    key: CleanText
    text: CleanText
    is_default: bool


@dataclass(frozen=True)
class Difference:
    """One key whose value differs. `MISSING` where a side has none."""

    key: CleanText
    mine: CleanText
    other: CleanText


@dataclass(frozen=True)
class ConfigRequest:
    """The file; or all values with their defaults; or the differences to the run `other`."""

    wants_all: bool = False
    other: str | None = None


@dataclass(frozen=True)
class ConfigData(TabData):
    """One look. `values` are all keys when they were asked for, `differences` to `other_id` when there is one.

    `text` is None when there is no readable file at `path`. `problem` is why values or differences are not available.
    """

    tab = CONFIG
    path: CleanText = NO_TEXT
    text: CleanText | None = None
    error: CleanText | None = None
    error_lines: tuple[int, ...] = ()
    values: tuple[Value, ...] | None = None
    other_id: str | None = None
    differences: tuple[Difference, ...] = ()
    problem: CleanText | None = None


class ConfigReader:
    """Reads again when a file or the request changed."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._output_dir = output_dir
        self._run = RunDir(output_dir / run_id)
        self._shown: object = None

    def read(self, request: ConfigRequest) -> tuple[ConfigData | None, bool]:
        """(what the request asks for, or None when neither it nor a file changed; False: one look reads all)."""
        other = request.other
        paths = [self._run.orch_toml, self._run.config_error]
        if other is not None:
            paths.append(RunDir(self._output_dir / other).orch_toml)
        shown = (request, *map(file_stamp, paths))
        if shown == self._shown:
            return None, False
        self._shown = shown
        return self._look(other, request.wants_all), False

    def _look(self, other: str | None, wants_all: bool) -> ConfigData:
        path, found = self._run.orch_toml, read_clean(self._run.orch_toml)
        text, error = found or NO_TEXT, read_clean(self._run.config_error)
        lines = find_error_lines(text, error or "")
        data = ConfigData(self._run.run_id, one_line(str(path), MAX_PATH_CHARS), found, error, lines)
        try:
            if other is not None:
                theirs = read_clean(RunDir(self._output_dir / other).orch_toml) or ""
                return _replace(data, other_id=other, differences=find_differences(text, theirs))
            return _replace(data, values=all_values(text)) if wants_all else data
        except ConfigError as problem:
            return _replace(data, other_id=other, problem=clean_text(str(problem)))


def _replace(data: ConfigData, **changes: Any) -> ConfigData:
    return ConfigData(**{**data.__dict__, **changes})


def all_values(text: str) -> tuple[Value, ...]:
    """Every key of a run's config in the order of the schema, with its default where the text does not set it.

    Raises ConfigError when the text is not a valid config.
    """
    said = dict(flatten(parse_toml(text, "orch.toml")))
    config = build(OrchestratorConfig, parse_toml(text, "orch.toml"), "orch.toml").model_dump(mode="json")
    return tuple(Value(key, toml_text(value), key not in said) for key, value in flatten(config))


def find_differences(mine: str, other: str) -> tuple[Difference, ...]:
    """Keys whose values differ, by what counts: a default equals the same value in the file.

    If one of the texts is not a valid config, the files' own keys are compared. Raises ConfigError for invalid TOML.
    """
    one, two = parse_toml(mine, "this orch.toml"), parse_toml(other, "the other orch.toml")
    return tuple(
        Difference(one_line(key, MAX_VALUE_CHARS), _side(ours), _side(theirs))
        for key, ours, theirs in values.differing(one, two)
    )


def _side(value: Any) -> CleanText:
    return MISSING if value is None else toml_text(value)


def flatten(data: Mapping[str, Any]) -> Iterator[tuple[CleanText, Any]]:
    """Dotted keys, fit for the screen, with their values."""
    return ((one_line(key, MAX_VALUE_CHARS), value) for key, value in values.flatten(data))


def toml_text(value: Any) -> CleanText:
    """As TOML, on one line; null for what TOML cannot express."""
    if value is None or isinstance(value, bool):
        return one_line(str(value).lower())
    return one_line(f'"{value}"' if isinstance(value, str) else str(value), MAX_VALUE_CHARS)


def find_error_lines(config: str, error: str) -> tuple[int, ...]:
    """Line numbers (from 1) of `config` that `error` names: as "line N", or by the key that is set there."""
    lines = config.splitlines()
    named = {int(number) for number in _LINE.findall(error) if 1 <= int(number) <= len(lines)}
    return tuple(sorted(named | {number for key, number in key_lines(lines).items() if f": {key}: " in f": {error}"}))
