"""The fields of the config files by their dotted keys, their values in a file, and JSON schemas for editors.

`prl config explain` and `prl config schema` print them. Types, limits and defaults come from the config classes. Values
come with the lines that set them; two runs are compared by them.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from prime_rl.configs.base import BaseConfig, ConfigError, ConfigProblem, models_in, tag_of
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.multinode import MultinodeConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.system import SystemConfig
from prime_rl.configs.trainer import TrainerConfig

# Kind of config file -> its class, and what takes it.
KINDS: dict[str, tuple[type[BaseConfig], str]] = {
    "orch": (OrchestratorConfig, "prl runs add FILE"),
    "system": (SystemConfig, "prl up @ FILE"),
    "trainer": (TrainerConfig, "prl trainer @ FILE"),
    "inference": (InferenceConfig, "prl inference @ FILE"),
    "multinode": (MultinodeConfig, "prl multinode start @ FILE"),
}

LIMITS = {
    "ge": "≥ {}",
    "gt": "> {}",
    "le": "≤ {}",
    "lt": "< {}",
    "min_length": "at least {}",
    "max_length": "at most {}",
}


@dataclass(frozen=True)
class FieldFacts:
    """One field of a kind of file. `default` and `type` are texts, `value` is the default (None when required).

    `choice`: the field is there only with this setting, such as `loss.type = "tis"`.
    """

    kind: str
    key: str
    type: str
    default: str
    value: Any
    help: str
    is_required: bool
    is_table: bool
    choice: str = ""


def kind_of(data: Mapping[str, Any], expected: str = "orch") -> str:
    """The kind of file that this is: the one that has most of its top-level keys, of equals the expected one."""
    return max((expected, *KINDS), key=lambda kind: len(data.keys() & KINDS[kind][0].model_fields.keys()))


def check_kind(kind: str, data: Mapping[str, Any], source: str) -> None:
    """Raises ConfigError, in one short line, for a file of another kind."""
    if (found := kind_of(data, kind)) != kind:
        names = {"orch": "a run's config", "system": "a workspace's system file"}
        looks, wanted = (names.get(each, f"the config of {each}") for each in (found, kind))
        words = f"looks like {looks}, not like {wanted}: use {KINDS[found][1].replace('FILE', source)}"
        raise ConfigError(source, [ConfigProblem("", words)])


@cache
def all_fields(kind: str) -> tuple[FieldFacts, ...]:
    """Every field of a kind of file, tables before what is in them."""
    return tuple(walk(KINDS[kind][0], kind))


def kinds_to_search(kind: str | None) -> list[list[str]]:
    """The kinds to look in, one group after another: a system file has what its daemons' files have."""
    return [[kind]] if kind else [["orch", "system"], ["trainer", "inference", "multinode"]]


def find_fields(key: str, kind: str | None = None) -> list[FieldFacts]:
    """The fields of this key, in one kind of file or in those of a workspace. env.0.id means env.id."""
    wanted = _plain(key)
    groups = ([f for each in kinds for f in all_fields(each) if f.key == wanted] for kinds in kinds_to_search(kind))
    return next(filter(None, groups), [])


def fields_below(table: FieldFacts) -> list[FieldFacts]:
    """The fields of a table, without those of tables in it."""
    return [each for each in all_fields(table.kind) if each.key.rpartition(".")[0] == table.key]


def nearest_keys(key: str, kind: str | None = None) -> list[str]:
    """Keys that may be meant by an unknown one: the same last name first, then similar ones."""
    wanted = _plain(key)
    known = keys_of(kind)
    same = [each for each in known if each.rpartition(".")[2] == wanted.rpartition(".")[2]]
    return list(dict.fromkeys([*same, *difflib.get_close_matches(wanted, known, n=3)]))[:3]


def keys_of(kind: str | None) -> list[str]:
    """All keys of one kind of file, or of those of a workspace."""
    return list(dict.fromkeys(field.key for each in kinds_to_search(kind)[0] for field in all_fields(each)))


def json_schema(kind: str) -> dict[str, Any]:
    """JSON schema (2020-12) of a kind of file, with help texts. Rules between fields are not in it."""
    model, use = KINDS[kind]
    schema = model.model_json_schema(schema_generator=_WithHelp)
    if model is OrchestratorConfig:  # a run that learns texts needs neither, one with a teacher no groups
        schema["required"] = [key for key in schema["required"] if key not in ("rollouts_per_example", "env")]
        taught: dict[str, Any] = {"required": ["env"], "properties": {"env": {"minItems": 1}}}
        of_rewards = {**taught, "required": ["rollouts_per_example", "env"]}
        sft, distill = ({"properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("sft", "distill"))
        schema |= {"if": sft, "then": {"required": ["data"]}}
        schema |= {"else": {"if": distill, "then": taught, "else": of_rewards}}
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": f"prl {kind} config: {use}"}


class _WithHelp(GenerateJsonSchema):
    """Describes each property by the docstring of its field."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        model = schema["cls"]
        texts = _texts(model) if issubclass(model, BaseConfig) else {}
        for name, each in made.get("properties", {}).items():
            if text := texts.get(name):
                each["description"] = text
        return made


def walk(model: type[BaseConfig], kind: str, prefix: str = "") -> Iterator[FieldFacts]:
    """The fields of a config, each table before what is in it."""
    texts = _texts(model)
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        key = f"{prefix}{name}"
        inner = models_in(field.annotation)
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        yield FieldFacts(
            kind=kind,
            key=key,
            type=_table_text(field, key, inner) if inner else type_text(field).replace("`", ""),
            default=default_text(field).replace("`", ""),
            value=value.model_dump(mode="json", by_alias=True) if isinstance(value, BaseConfig) else value,
            help=texts.get(name, "").replace("`", ""),
            is_required=field.is_required(),
            is_table=bool(inner),
        )
        if len(inner) == 1:
            yield from walk(inner[0], kind, f"{key}.")
        elif inner:
            yield from _walk_choices(inner, kind, key)


def _walk_choices(models: list[type[BaseConfig]], kind: str, table: str) -> Iterator[FieldFacts]:
    """The fields of tables of which `type` chooses one; each once, with the types that have it unless all do."""
    found: list[tuple[FieldFacts, list[str]]] = []
    for model in models:
        tag = str(tag_of(model))
        for field in walk(model, kind, f"{table}."):
            tags = next((tags for same, tags in found if same == field), None)
            if tags is None:
                found.append((field, [tag]))
            else:
                tags.append(tag)
    for field, tags in found:
        only = f"{table}.type = {' or '.join(map(repr, tags))}".replace("'", '"')
        yield field if len(tags) == len(models) else replace(field, choice=only)


def _table_text(field: FieldInfo, key: str, inner: list[type[BaseConfig]]) -> str:
    if "list[" in str(field.annotation):
        return f"list of tables, [[{key}]]"
    return f"table, [{key}], by its type" if len(inner) > 1 else f"table, [{key}]"


def type_text(field: FieldInfo) -> str:
    """The type of a field in Markdown, with its limits: "integer, ≥ 1"."""
    if models_in(field.annotation):
        return "table, by its `type`"
    limits = [
        words.format(getattr(limit, name))
        for limit in field.metadata
        for name, words in LIMITS.items()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join([_annotation_text(field.annotation), *limits])


def _annotation_text(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _annotation_text(inner[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_annotation_text(part) for part in inner if part is not type(None))
    if origin in (list, tuple):
        return f"list of {_annotation_text(inner[0])}"
    if origin is dict:
        return "table"
    return {int: "integer", float: "number", str: "text", bool: "boolean", Path: "path"}.get(annotation, "any")


def default_text(field: FieldInfo) -> str:
    """The default of a field in Markdown: its value as in TOML, "required" or "not set"."""
    value = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    if value is None:
        return "not set"
    return f"`{_toml(value)}`" if not isinstance(value, BaseConfig) else f'`type = "{getattr(value, "type", "")}"`'


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return str(value) if isinstance(value, (int, float)) else f'"{value}"'


@cache
def _texts(model: type[BaseConfig]) -> dict[str, str]:
    """Reading them from the sources is slow, and tables are met more than once."""
    return model.docs()


def _plain(key: str) -> str:
    """As a key stands in a file: "--env.0.reward-range" -> "env.reward_range"."""
    parts = key.lstrip("-").replace("-", "_").split(".")
    return ".".join(part for part in parts if not part.isdigit())


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
