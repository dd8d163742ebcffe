"""`prl config show|explain|schema|examples`: the config files, their fields, and schemas for editors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from daemons.adding import trainer_limits
from daemons.commands import complete
from daemons.commands.common import (
    FittingTable,
    JsonOption,
    OutputDirOption,
    cell,
    choose_output_dir,
    console,
    make_table,
    print_json,
    say,
)
from daemons.commands.runs import SetOption, parse_overrides
from daemons.errors import WrongUseError
from prime_rl.configs import EXAMPLES
from prime_rl.configs.admitted import flatten, hide_secret, read_effect
from prime_rl.configs.base import BaseConfig, build, merge, parse_toml, read_text
from prime_rl.configs.explain import (
    KINDS,
    FieldFacts,
    fields_below,
    find_fields,
    json_schema,
    key_lines,
    kind_of,
    line_of,
    nearest_keys,
)
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import TrainerLimits, resolve
from prime_rl.contract.layout import RUN_PREFIX, LayoutError, OutputDir

CONFIG_HELP = """Look at config files: resolved values, the fields there are, schemas for editors.

Example: prl config explain optim.lr
"""
MAX_HELP_CHARS = 1_000
config_app = typer.Typer(no_args_is_help=True, help=CONFIG_HELP, rich_markup_mode=None)

KindOption = Annotated[
    str | None,
    typer.Option(metavar="KIND", help=f"Kind of file: {', '.join(KINDS)}.", autocompletion=complete.config_kinds),
]

# file: it is set there. flag: by --set. workspace: a run takes what its trainer has. derived: from other values of the
# file, such as those that a system file shares between trainer and inference. default: none of these.
Source = Literal["file", "flag", "workspace", "derived", "default"]


@config_app.command()
def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|ID", help="A config file, or a run of the workspace.", autocompletion=complete.config_files
        ),
    ],
    output_dir: OutputDirOption = None,
    changes: SetOption = None,
    kind: KindOption = None,
    only_set: Annotated[bool, typer.Option("--only-set", help="Leave out defaults.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show every value of a config, and where it comes from.

    file: the line that sets it. flag: --set. workspace: a run takes what its trainer has. derived: from other values,
    such as those that trainer and inference share. default: none of these. The kind of file is recognised.

    Example: prl config show configs/demo/reverse.toml --set optim.lr=1e-3
    """
    _check(kind)
    place = choose_output_dir(output_dir)
    path, is_run = _file_of(file, place)
    kind = kind or ("orch" if is_run else None)
    text = read_effect(OutputDir(place).run(file)).text if is_run else read_text(path)
    name, origins = read_origins(path, kind, parse_overrides(changes), trainer_limits(place), text)
    chosen = [each for each in origins if each.source != "default" or not only_set]
    if as_json:
        rows = [{**asdict(each), "value": hide_secret(each.key, each.value)} for each in chosen]
        print_json({"file": str(path), "kind": name, "values": rows})
    else:
        console().print(make_table(["KEY", "VALUE", "FROM"], [_row(each) for each in chosen]))


@config_app.command()
def explain(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Dotted key of a field or table.", autocompletion=complete.config_keys)
    ],
    kind: KindOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a field: its type and range, its default, what it does, and where it is set.

    Of a table it lists the fields.

    Example: prl config explain optim.lr
    """
    _check(kind)
    found = find_fields(key, kind)
    if not found:
        near, tables = nearest_keys(key, kind), find_fields(key.rpartition(".")[0], kind)
        beside = ", ".join(dict.fromkeys(each.key for table in tables for each in fields_below(table)))
        hints = [f"did you mean {' or '.join(near)}?"] * bool(near) + [f"this table has {beside}"] * bool(beside)
        raise WrongUseError(f"unknown key {key!r}: {' '.join(hints) or 'docs/config.md lists all keys'}")
    if as_json:
        print_json({"fields": [asdict(field) for field in found]})
        return
    for number, field in enumerate(found):
        say("\n" * (number > 0) + "\n".join(_facts(field)))
        if field.is_table:
            console().print(_table_of(fields_below(field)))


@config_app.command()
def schema(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help=f"One of {', '.join(KINDS)}.", autocompletion=complete.config_kinds),
    ],
) -> None:
    """Print the JSON schema of a kind of config file, for completion and checks in an editor.

    Taplo and the TOML extension of VS Code read it where the first line of a file is "#:schema ./orch.schema.json".

    Example: prl config schema orch > orch.schema.json
    """
    _check(kind)
    print(json.dumps(json_schema(kind), indent=2))


@config_app.command()
def examples(
    copy: Annotated[
        Path | None, typer.Option("--copy", metavar="DIR", help="Copy them into this new folder, to be changed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the example configs that come with prl, or copy them.

    The documents call them configs/..., after their folder in a checkout.

    Example: prl config examples --copy configs
    """
    files = sorted(EXAMPLES.rglob("*.toml"))
    if copy is not None:
        if copy.exists():
            raise WrongUseError(f"{copy} already exists: choose a new folder")
        shutil.copytree(EXAMPLES, copy)
        say(f"copied {len(files)} configs to {copy}")
        return
    rows = [
        [str(path.relative_to(EXAMPLES)), path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()]
        for path in files
    ]
    if as_json:
        print_json({"folder": str(EXAMPLES), "examples": [{"file": name, "text": text} for name, text in rows]})
    else:
        console().print(make_table(["FILE", "WHAT IT IS"], rows))


def _file_of(name: str, place: Path) -> tuple[Path, bool]:
    """The file that is named, else the config of the run of that name; and whether it is a run's."""
    path = Path(name)
    if path.exists() or not name.startswith(RUN_PREFIX):
        return path, False
    try:
        return OutputDir(place).run(name).orch_toml, True
    except LayoutError:
        return path, False


def _check(kind: str | None) -> None:
    if kind is not None and kind not in KINDS:
        raise WrongUseError(f"invalid kind {kind!r}: expected one of {', '.join(KINDS)}")


def _row(origin: Origin) -> list[str]:
    value = hide_secret(origin.key, origin.value)
    where = f"{origin.source}, line {origin.line}" if origin.line else origin.source
    return [origin.key, "not set" if value is None else json.dumps(value, ensure_ascii=False), where]


def _facts(field: FieldFacts) -> list[str]:
    use = KINDS[field.kind][1]
    lines = [f"{field.key} ({field.kind}: {use})", f"  type     {field.type}"]
    if field.is_required or not field.is_table:
        lines.append(f"  default  {field.default}")
    if field.choice:
        lines.append(f"  only     {field.choice}")
    return [*lines, f"  {field.help}"]


def _table_of(fields: list[FieldFacts]) -> FittingTable:
    choices = ["ONLY WITH"] if any(field.choice for field in fields) else []
    rows = [
        [field.key, field.default, *([field.choice] if choices else []), cell(field.help, MAX_HELP_CHARS)]
        for field in fields
    ]
    return FittingTable(["KEY", "DEFAULT", *choices, "MEANING"], rows, ("DEFAULT",))


@dataclass(frozen=True)
class Origin:
    """One dotted key, its value as JSON has it, and where that comes from. `line` (from 1) is of the file."""

    key: str
    value: Any
    source: Source
    line: int | None = None


def read_origins(
    path: Path,
    kind: str | None = None,
    flags: Mapping[str, Any] | None = None,
    limits: TrainerLimits | None = None,
    text: str | None = None,
) -> tuple[str, list[Origin]]:
    """The kind of the file, and all its keys in the order of the schema.

    `limits`: those of a run's trainer. `text` stands for that of the file: the config that is in effect.

    Raises ConfigError when the file is not a valid config.
    """
    text, flags = read_text(path) if text is None else text, flags or {}
    data = merge(parse_toml(text, str(path)), flags)
    kind = kind or kind_of(data)
    model = KINDS[kind][0]
    config = build(model, data, str(path))
    lines = key_lines(text.splitlines())
    in_flags, in_data, alone = dict(flatten(flags)), dict(flatten(data)), dict(flatten(_dump(config)))
    resolved = resolve(config, limits) if limits and isinstance(config, OrchestratorConfig) else config
    # Not of a kind with required fields; values of a run are derived from nothing but its trainer.
    is_complete = not any(field.is_required() for field in model.model_fields.values())
    defaults = dict(flatten(_dump(model()))) if is_complete else {}

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
