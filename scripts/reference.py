"""Write what is made in docs/: config.md, commands.md, json.md, files.md, the tables of runs.md, and results.ipynb.

    python -m scripts.reference

A test compares all six with what is made. The notebook is the page of the same name, in cells.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks.selfcheck import make_parser as selfcheck_parser
from daemons.cli import app
from prime_rl.configs.base import BaseConfig, models_in, tag_of
from prime_rl.configs.explain import default_text, type_text
from prime_rl.configs.multinode import MultinodeConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import DaemonPaths, IterationDir, OutputDir, RunDir
from scripts.outputs import outputs_page
from tui.cli import make_parser as tui_parser

DOCS = Path(__file__).resolve().parent.parent / "docs"
# Help is wrapped to the width of the terminal.
COLUMNS = "100"
CONFIG_HEAD = """\
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
CONFIG_FILES: list[tuple[str, str, type[BaseConfig]]] = [
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
COMMANDS_HEAD = """\
# Commands

What `--help` prints, for every command. Most act on one workspace: `--output-dir DIR`, else `PRL_OUTPUT_DIR`, else
`outputs`. `prl --install-completion` enables completion of commands, runs and daemons in your shell. What `--json`
prints is in [json.md](json.md), what the TOML files may have in [config.md](config.md).

## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | failed; one line on standard error says what, where, and what to do (`prl --debug ...` adds a traceback) |
| 2 | wrong usage: a flag, a config, a run id |
| 75 | `prl multinode`: a node was lost; start the same commands again |
| 129 | `prl-tui`: its terminal was closed |
| 130 | interrupted by Ctrl-C, or by SIGTERM: `prl up`, `demo`, `chat`, `env try`, `make-base` and `multinode` |
| 143 | ended by SIGTERM: `prl-tui`, and each command that has nothing to finish |

## Environment variables

| variable | read by | meaning |
|---|---|---|
| `PRL_OUTPUT_DIR` | all commands | the workspace, where `--output-dir` is not given |
| `PRL_API_KEY`, `PRL_API_KEY_FILE` | `prl up` | key of inference, or a file with it: [deploy.md](deploy.md#keys) |
| `WANDB_API_KEY` | `prl up` | for the daemon `monitors` alone |
| `CUDA_VISIBLE_DEVICES` | `prl up` | GPUs; saved: [supervisor.md](supervisor.md#the-environment-of-prl-up) |
| `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, `HF_TOKEN` | daemons, `prl runs export` | those of Hugging Face |
| `RANK`, `NODE_RANK` | `prl multinode` | the rank of this node, in place of `--master` and `--worker R` |
| `XDG_STATE_HOME` | `prl-tui` | where it remembers columns, filters and pins: `prl-tui/state.json` below it |
| `PRL_DAEMON`, `PRL_START` | daemons | set by prl for its own processes |
| `PRL_SESSION_URL`, `PRL_MODEL`, `PRL_EXAMPLE`, `PRL_VERIFIER_DIR` | agents | set by prl: [agents.md](agents.md) |
"""
FILES_HEAD = """\
# Files of a workspace

Every path that prl reads or writes in a workspace, from `prime_rl/contract/layout.py`. N is a step, a policy version or
the number of a server, R the rank of a node, I an iteration. How they are written is in
[architecture.md](architecture.md#on-disk).
"""
# What stands for the arguments of a path.
PLACES = {
    "step": "N",
    "number": "N",
    "version": "N",
    "replica": "N",
    "rank": "R",
    "run_id": "run_ID",
    "name": "NAME",
    "named": "FILE",
    "start_id": "START",
    "node": "NODE",
    "stamp": "TIME",
    "what": "WHAT",
    "split": "SPLIT",
    "epoch": "EPOCH",
    "round": "ROUND",
    "key": "KEY",
    "incarnation": "PROCESS",
}
SECTIONS = [
    ("A run", RunDir, "WORKSPACE/run_ID"),
    ("All runs", OutputDir, "WORKSPACE"),
    ("Daemons", DaemonPaths, "WORKSPACE"),
    ("One iteration of a group of nodes", IterationDir, "WORKSPACE/multinode/iteration_I"),
]


def config_page() -> str:
    """The whole text of docs/config.md."""
    sections = [CONFIG_HEAD]
    for title, text, model in CONFIG_FILES:
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


def commands_page() -> str:
    """The whole text of docs/commands.md."""
    commands = [_command_section(words) for words in command_words()]
    programs = [_section(parser.prog, parser.format_help()) for parser in (tui_parser(), selfcheck_parser())]
    return "\n".join([COMMANDS_HEAD, *commands, *programs])


def command_words(command: Any = None, words: Sequence[str] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command after `prl`, a group before its commands; first () for `prl` itself."""
    command = command or get_command(app)
    yield tuple(words)
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from command_words(inner, (*words, name))


def _command_section(words: Sequence[str]) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], prog_name="prl")
    assert done.exit_code == 0, done.output
    return _section(" ".join(["prl", *words]), done.output)


def _section(title: str, help_text: str) -> str:
    lines = [line.rstrip() for line in help_text.strip().splitlines()]
    return f"## {title}\n\n```text\n" + "\n".join(lines) + "\n```\n"


def files_page() -> str:
    """The whole text of docs/files.md."""
    sections = [FILES_HEAD]
    for title, kind, base in SECTIONS:
        rows = [f"| `{path}` | {text} |" for path, text in sorted(_paths(kind, Path(base)))]
        sections.append("\n".join([f"## {title}\n", "| path | what |", "|---|---|", *rows, ""]))
    return "\n".join(sections)


def _paths(kind: type, base: Path) -> Iterator[tuple[str, str]]:
    """Each path that a class of the layout names, with its docstring."""
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or getattr(function, "__annotations__", {}).get("return") != "Path":
            continue
        found = getattr(kind(base), name)
        if not isinstance(found, Path):
            found = found(**{each: PLACES[each] for each in inspect.signature(found).parameters})
        yield str(found), " ".join((inspect.getdoc(function) or "").split())


def runs_page() -> str:
    """The text of docs/runs.md, its tables made again."""
    from scripts.members import with_members  # loads torch

    return with_members((DOCS / "runs.md").read_text(encoding="utf-8"))


def notebook() -> str:
    """The page about results as a notebook: its Python as cells to run, the rest as text."""
    parts = re.split(r"^```python\n(.*?)^```\n", (DOCS / "results.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(part.strip() for part in parts):
        own = {"cell_type": "code", "execution_count": None, "outputs": []} if number % 2 else {"cell_type": "markdown"}
        cells.append({"id": f"cell-{number}", "metadata": {}, "source": part.splitlines(keepends=True)} | own)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "commands.md": commands_page,
    "json.md": outputs_page,
    "files.md": files_page,
    "runs.md": runs_page,
    "results.ipynb": notebook,
}


def make(name: str) -> str:
    """One page, the same on every terminal."""
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        return PAGES[name]()
    finally:  # what starts later has the width of its own terminal
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(make(page), encoding="utf-8")
