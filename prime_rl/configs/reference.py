"""The tables of docs/config.md, from the config classes themselves.

python -m prime_rl.configs.reference > docs/config.md
"""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo

from prime_rl.configs.base import BaseConfig, models_in, tag_of
from prime_rl.configs.multinode import MultinodeConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.system import SystemConfig

HEAD = """\
# Config files

Every field, with its default. An unknown field is an error. Any field can be set on the command line:
`prl up @ system.toml --trainer.seq_len 4096`, `prl runs add run.toml --set optim.lr=1e-4`.

`prl config explain optim.lr` prints one of them, and `prl config show FILE` all values of a file or a run with where
each comes from: a line of the file, a flag, the workspace, other values, or the default. `prl config examples` lists
example files; with `--copy DIR` it copies them.

For completion and checks in an editor (Taplo, the TOML extension of VS Code), keep what
`prl config schema orch` prints as `orch.schema.json` and begin the file with `#:schema ./orch.schema.json`. Other kinds
are `system`, `trainer`, `inference` and `multinode`. Rules between fields are left to `prl runs validate FILE`.
"""
FILES: list[tuple[str, str, type[BaseConfig]]] = [
    (
        "A run: `orch.toml`",
        "What `prl runs add FILE` takes. Fields without a default are required.",
        OrchestratorConfig,
    ),
    (
        "A workspace: the system file",
        "What `prl up @ FILE` takes. The files of `prl trainer` and `prl inference` have the fields of `[trainer]` and "
        "`[inference]`,\nwithout that prefix.",
        SystemConfig,
    ),
    ("A group of nodes: `multinode.toml`", "What `prl multinode start @ FILE` takes.", MultinodeConfig),
]
LIMITS = {
    "ge": "≥ {}",
    "gt": "> {}",
    "le": "≤ {}",
    "lt": "< {}",
    "min_length": "at least {}",
    "max_length": "at most {}",
}


def tables() -> str:
    """The whole text of docs/config.md."""
    sections = [HEAD]
    for title, text, model in FILES:
        sections += [f"## {title}\n\n{text}\n", *_tables(model, "")]
    return "\n".join(sections)


def _tables(model: type[BaseConfig], path: str) -> Iterator[str]:
    """The fields of a TOML table, then the tables below it."""
    if table := field_table(model):
        yield table
    texts = model.docs()
    for name, field in _named(model):
        inner, key = models_in(field.annotation), f"{path}.{name}".lstrip(".")
        if len(inner) == 1:
            heading = f"[[{key}]]" if "list[" in str(field.annotation) else f"[{key}]"
            yield f"### `{heading}`\n\n{'Required. ' * field.is_required()}{texts.get(name, '')}\n"
            yield from _tables(inner[0], key)
        for chosen in inner if len(inner) > 1 else ():
            yield f'### `[{key}]` with `type = "{tag_of(chosen)}"`\n\n{chosen.docs()["type"]}\n'
            yield field_table(chosen, without=("type",))


def field_table(model: type[BaseConfig], without: Collection[str] = ()) -> str:
    """A row for each field that is not a table of its own; empty without any."""
    texts = {name: text.replace("|", "\\|") for name, text in model.docs().items()}
    rows = [
        f"| `{name}` | {type_text(field)} | {default_text(field)} | {texts.get(name, '')} |"
        for name, field in _named(model)
        if len(models_in(field.annotation)) != 1 and name not in without
    ]
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n" if rows else ""


def _named(model: type[BaseConfig]) -> list[tuple[str, FieldInfo]]:
    """The fields by their keys in TOML."""
    return [(field.alias or name, field) for name, field in model.model_fields.items()]


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


if __name__ == "__main__":
    print(tables(), end="")
