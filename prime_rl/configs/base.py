"""The reading of a config: TOML file, then `--a.b value` overrides, then one strict model. Errors name the place.

    python -m prime_rl.trainer.train @ trainer.toml --model.name models/base

An error names the file, the key, the value found and the values allowed; for an unknown key also the nearest valid one.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

import tomli
from pydantic import BaseModel, ConfigDict, ValidationError

from prime_rl.contract.files import FileRefused, read_file


class BaseConfig(BaseModel):
    """Base of all configs: unknown keys are errors, values are frozen, field docstrings are help texts (`docs`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def replace(self, **changes: Any) -> Self:
        """A validated copy with `changes`."""
        return type(self).model_validate({**self.model_dump(exclude_unset=True), **changes})

    @classmethod
    def docs(cls) -> dict[str, str]:
        """Field to its docstring, in one line. Read from the sources when asked: that is too dear for every start."""
        found = {}
        for base in reversed([base for base in cls.__mro__ if issubclass(base, BaseConfig)]):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, text in pairwise(body.body):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    value = text.value if isinstance(text, ast.Expr) else None
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        # A TOML key that is a word of Python has a field with an underscore behind it.
                        found[field.target.id.rstrip("_")] = " ".join(value.value.split())
        return found


ConfigT = TypeVar("ConfigT", bound=BaseConfig)
# No config of ours has a hundredth of it. What is larger (a device, a log) is never read to its end.
MAX_TOML_BYTES = 1 << 20
# What is nested deeper, or is a larger number, cannot be passed on as JSON.
MAX_TOML_LEVELS = 64
# All of a file with as many mistakes as lines would take hours to tell.
MAX_PROBLEMS = 50


@dataclass(frozen=True)
class ConfigProblem:
    """One problem of a config. `key` is dotted ("model.lora.rank", "env.0.id"), or "" for the whole file."""

    key: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.key}: {self.message}" if self.key else f"{where}{self.message}"


NOT_FOUND = ConfigProblem("", "not found")


class ConfigError(ValueError):
    """An invalid config: all its problems, each with its place."""

    def __init__(self, source: str, problems: Sequence[ConfigProblem]) -> None:
        self.source = source
        self.problems = list(problems)
        text = "; ".join(map(str, self.problems))
        super().__init__(f"not found: {source}" if self.problems == [NOT_FOUND] else f"{source}: {text}")


class ConfigParseError(ConfigError):
    """The text is not valid TOML (perhaps half written)."""


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML; a byte order mark is left out. Raises ConfigParseError with the line, whatever the text is."""
    try:
        data = tomli.loads(text.removeprefix("\ufeff"))
        _check_toml(data, MAX_TOML_LEVELS)
    except tomli.TOMLDecodeError as error:
        problem = ConfigProblem("", f"not valid TOML: {error.msg} (column {error.colno})", error.lineno)
        raise ConfigParseError(source, [problem]) from error
    except (RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a whole number has over 64 bits"
        raise ConfigParseError(source, [ConfigProblem("", f"not valid TOML: {reason}")]) from error
    return data


def _check_toml(value: Any, levels: int) -> None:
    """Raises RecursionError for what is nested deeper than `levels`, ValueError for a number that is too large."""
    if isinstance(value, dict | list):
        if not levels:
            raise RecursionError
        for each in value.values() if isinstance(value, dict) else value:
            _check_toml(each, levels - 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError


def load_toml(path: Path) -> dict[str, Any]:
    """Read and parse a TOML file; raises ConfigError when it is missing, unreadable, not a file, too large or not TOML.

    A file of a run must not be a link; any other may.
    """
    return parse_toml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a TOML file; raises ConfigError as `load_toml`."""
    try:
        return read_file(path, limit=MAX_TOML_BYTES, follow_links=True).decode()
    except UnicodeDecodeError as error:
        raise ConfigParseError(
            str(path), [ConfigProblem("", f"not UTF-8 text (byte {error.start}): save it as UTF-8")]
        ) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(str(path), [NOT_FOUND]) from error
    except OSError as error:
        reason = str(error.strerror) if isinstance(error, FileRefused) else f"cannot be read: {error.strerror}"
        raise ConfigError(str(path), [ConfigProblem("", reason)]) from error


def build(cls: type[ConfigT], data: Mapping[str, Any], source: str) -> ConfigT:
    """Validate `data` as `cls`; raises ConfigError with every problem, or the first of very many."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        problems = _without_echoes(list(islice(_problems(cls, error), MAX_PROBLEMS)))
        raise ConfigError(source, problems) from error


def load_config(cls: type[ConfigT], path: Path) -> ConfigT:
    """Load `cls` from a TOML file."""
    return build(cls, load_toml(path), str(path))


def parse_argv(cls: type[ConfigT], argv: Sequence[str]) -> ConfigT:
    """Load `cls` from `[@ FILE.toml] [--a.b value | --a.b=value]...`; a later item wins over an earlier one."""
    return build(cls, *read_argv(argv))


def read_argv(argv: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return what `parse_argv` builds from: the merged values, and the name of their source."""
    data: dict[str, Any] = {}
    source, given = "command line", False
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "@" or (token.startswith("@") and len(token) > 1):
            name = token[1:] or (rest.pop(0) if rest else "")
            if not name:
                raise ConfigError(source, [ConfigProblem("", "expected a TOML file after '@'")])
            data, source = merge(data, load_toml(Path(name))), name
        elif token.startswith("--") and len(token) > 2:
            key, has_value, value = token[2:].partition("=")
            if not has_value:
                if not rest:
                    raise ConfigError(source, [ConfigProblem(key, "missing value: expected --a.b VALUE")])
                value = rest.pop(0)
            data = merge(data, parse_override(key, value))
            given = True
        else:
            raise ConfigError(
                source, [ConfigProblem("", f"unexpected argument {token!r}: expected @ FILE.toml or --a.b VALUE")]
            )
    return data, f"{source} and the command line" if given and source != "command line" else source


def parse_override(key: str, value: str) -> dict[str, Any]:
    """("model.lora.rank", "8") -> {"model": {"lora": {"rank": 8}}}. The value is TOML; what is not TOML is a string."""
    try:
        parsed: Any = tomli.loads(f"v = {value}")["v"]
    except ValueError:
        parsed = value
    *parents, last = key.replace("-", "_").split(".")
    nested: dict[str, Any] = {last: parsed}
    for part in reversed(parents):
        nested = {part: nested}
    return nested


def parse_set(items: Sequence[str]) -> dict[str, Any]:
    """["a.b=1", "c=x"] (what `--set` takes) -> one nested mapping; raises ConfigError for an item without '='."""
    data: dict[str, Any] = {}
    for item in items:
        key, has_value, value = item.partition("=")
        if not has_value or not key:
            raise ConfigError(
                "--set", [ConfigProblem("", f"invalid {item!r}: expected KEY=VALUE, such as optim.lr=1e-3")]
            )
        data = merge(data, parse_override(key, value))
    return data


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge of tables; `over` wins. A list is replaced, or its entries are changed by number, as in env.0.id.

    Raises ConfigError for a number that the list does not have.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, list) and isinstance(value, Mapping):
            entries = {str(number): each for number, each in enumerate(old)}
            if odd := value.keys() - entries.keys():
                found = f"{min(odd)!r} is not an entry: expected the number of one, such as {key}.0"
                raise ConfigError("the change", [ConfigProblem(key, found)])
            merged[key] = list(merge(entries, value).values())
            continue
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def help_text(cls: type[BaseConfig]) -> str:
    """One line a field: dotted name, type, default, docstring."""
    return "\n".join(_help_lines(cls, ""))


def _help_lines(cls: type[BaseConfig], prefix: str) -> Iterator[str]:
    docs = cls.docs()
    for name, field in cls.model_fields.items():
        if get_origin(field.annotation) is not list and (nested := models_in(field.annotation)):
            members = [list(_help_lines(model, f"{prefix}{name}.")) for model in nested]
            # A field that all members of a union share is named once.
            shared = [line for line in members[0] if all(line in lines for lines in members)]
            yield from shared
            yield from (line for lines in members for line in lines if line not in shared)
            continue
        default = f"default {field.get_default(call_default_factory=True)!r}"
        note = "required" if field.is_required() else default
        yield f"  --{prefix}{name} {_type_name(field.annotation)} ({note})\n      {docs.get(name, '')}"


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(map(repr, get_args(annotation)))
    return getattr(annotation, "__name__", None) or str(annotation)


def _problems(cls: type[BaseModel], error: ValidationError) -> Iterator[ConfigProblem]:
    for item in error.errors(include_url=False):
        place = _place(cls, item["loc"])
        key = place.key
        if item["type"] == "extra_forbidden":
            yield ConfigProblem(key, _unknown_key(place))
        elif item["type"] == "missing":
            yield ConfigProblem(key, "required, but missing")
        elif item["type"] == "value_error":
            yield ConfigProblem(key, str(item["ctx"]["error"]))
        elif item["type"] == "union_tag_invalid":
            tag = item["ctx"]["discriminator"].strip("'")
            found = _shown(item["input"].get(tag))
            yield ConfigProblem(f"{key}.{tag}", f"found {found}: expected one of {item['ctx']['expected_tags']}")
        else:
            found = _shown(item.get("input"))
            yield ConfigProblem(key, f"found {found}: {_must(item['msg'])}")


def _must(message: str) -> str:
    """pydantic's "Input should be greater than 0" -> "must be greater than 0"."""
    return re.sub(r"^(?:input|value) should ", "must ", f"{message[0].lower()}{message[1:]}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _without_echoes(problems: list[ConfigProblem]) -> list[ConfigProblem]:
    """Report a table that is copied into others once: `lora.rnk`, not also `trainer.model.lora.rnk`."""
    return [p for p in problems if not any(p.key.endswith(f".{q.key}") and p.message == q.message for q in problems)]


@dataclass(frozen=True)
class _Place:
    """Where a problem is: the dotted key, the models that could stand around it, and the tag that chose among them."""

    key: str
    models: Sequence[type[BaseModel]]
    tag: str | None


def _place(cls: type[BaseModel], loc: Sequence[int | str]) -> _Place:
    """Follow pydantic's path. It has names of union members too, which are not keys of the file."""
    keys: list[str] = []
    models: Sequence[type[BaseModel]] = [cls]
    tag = None
    for part in loc:
        tagged = [m for m in models if len(models) > 1 and tag_of(m) == part]
        if tagged:
            models, tag = tagged, str(part)
        elif isinstance(part, int) or not _names_a_member(part):
            keys.append(str(part))
            fields = [field for model in models if (field := model.model_fields.get(str(part)))]
            inner = [model for field in fields for model in models_in(field.annotation)]
            if inner:
                models, tag = inner, None
    return _Place(".".join(keys), models, tag)


def _names_a_member(part: str) -> bool:
    return part.startswith("function-") or "[" in part or part.endswith("Config")


def _unknown_key(place: _Place) -> str:
    valid = sorted({name for model in place.models for name in model.model_fields})
    near = difflib.get_close_matches(place.key.rpartition(".")[2], valid, n=1, cutoff=0.5)
    what = f"unknown key for type = {place.tag!r}" if place.tag else "unknown key"
    hint = f"did you mean {near[0]!r}?" if near else ""
    return f"{what}; {hint} valid keys: {', '.join(valid)}".replace(";  ", "; ")


def tag_of(model: type[BaseModel]) -> str | None:
    """The value of the model's `type`, if it is a member of a union that `type` discriminates."""
    values = get_args(model.model_fields["type"].annotation) if "type" in model.model_fields else ()
    return values[0] if len(values) == 1 else None


def models_in(annotation: Any) -> list[type[BaseConfig]]:
    """The config classes in a type: one for a table, several for a choice by `type`."""
    if parts := get_args(annotation):
        return [model for part in parts for model in models_in(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseConfig) else []
