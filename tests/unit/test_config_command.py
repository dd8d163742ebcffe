"""`prl config`: what a key means, where a value comes from, schemas for editors, examples."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from typer.main import get_command

from daemons import actions
from daemons.cli import app, run
from daemons.commands import complete
from prime_rl.configs import EXAMPLES
from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.explain import KINDS, all_fields, find_fields, json_schema, kind_of
from prime_rl.contract.layout import OutputDir
from tests.patience import PATIENCE_S

FILES = sorted(EXAMPLES.rglob("*.toml"))
BY_NAME = {"system.toml": "system", "trainer.toml": "trainer", "inference.toml": "inference"}
RUN = EXAMPLES / "demo" / "reverse.toml"


def prl(*words: str, capsys: Any) -> Any:
    """What a command prints as JSON."""
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def kind_by_place(path: Path) -> str:
    return "multinode" if path.parent.name == "multinode" else BY_NAME.get(path.name, "orch")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_examples_are_of_their_kind_and_pass_its_schema(path: Path) -> None:
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    kind = kind_of(data)
    assert kind == kind_by_place(path)
    jsonschema.Draft202012Validator(json_schema(kind)).validate(data)


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_behind_the_editors_takes_the_examples_and_shows_a_mistake_at_its_line(
    kind: str, tmp_path: Path
) -> None:
    def taplo(*files: Path) -> tuple[int, str]:
        program = Path(sys.executable).with_name("taplo")
        command = [program, "check", "--schema", schema.as_uri(), *files]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        return done.returncode, done.stderr

    schema, wrong = tmp_path / f"{kind}.schema.json", tmp_path / "wrong.toml"
    schema.write_text(json.dumps(json_schema(kind)))
    files = [path for path in FILES if kind_by_place(path) == kind]
    assert files and taplo(*files)[0] == 0
    text = files[0].read_text()
    wrong.write_text(f"no_such_key = 1\n{text}")
    code, shown = taplo(wrong)
    assert code != 0 and f"{wrong}:1:1" in shown and "no_such_key" in shown, shown


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("orch", {"optim": {"lr": 0.0}}),
    ("orch", {"optim": {"lr": "high"}}),
    ("orch", {"optim": {"lrr": 1e-3}}),
    ("orch", {"scheduler": {"type": "step"}}),
    ("orch", {"loss": {"type": "tis", "delta": 8.0}}),
    ("orch", {"env": []}),
    ("orch", {"kind": "sft", "env": [], "rollouts_per_example": 1}),
    ("orch", {"model": {}}),
    ("system", {"seq_len": 4}),
    ("system", {"trainer": {"sequence": 1}}),
    ("system", {"inference": {"engine": "other"}}),
]


@pytest.mark.parametrize(("kind", "change"), WRONG)
def test_a_schema_refuses_what_the_check_refuses(kind: str, change: dict[str, Any]) -> None:
    whole = {**(tomllib.loads(RUN.read_text()) if kind == "orch" else {}), **change}
    with pytest.raises(ConfigError):
        build(KINDS[kind][0], whole, "x")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json_schema(kind)).validate(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_is_one_and_has_every_help_text(kind: str, capsys: Any) -> None:
    assert run(["config", "schema", kind]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    tables = [schema, *schema.get("$defs", {}).values()]
    texts = {each.get("description") for table in tables for each in table.get("properties", {}).values()}
    assert None not in texts
    assert all(field.help for field in all_fields(kind))
    assert {field.help for field in all_fields(kind)} <= {text.replace("`", "") for text in texts}


def test_a_field_is_explained(capsys: Any) -> None:
    assert run(["config", "explain", "optim.lr"]) == 0
    told = "optim.lr (orch: prl runs add FILE)\n  type     number, > 0\n  default  0.0001\n  Peak learning rate.\n"
    assert capsys.readouterr().out == told
    (field,) = prl("config", "explain", "optim.max-norm", capsys=capsys)["fields"]
    assert (field["key"], field["value"], field["is_required"]) == ("optim.max_norm", 1.0, False)
    assert [field.kind for field in find_fields("seq_len")] == ["orch", "system"]
    assert [field.kind for field in find_fields("seq_len", "trainer")] == ["trainer"]
    assert find_fields("env.0.id") == find_fields("env.id") and find_fields("env.id")[0].is_required
    assert [field.choice for field in find_fields("loss.cap")] == ['loss.type = "tis"']
    assert [field.choice for field in find_fields("loss.kl_coef")] == [""]


def test_a_table_is_explained_by_its_fields(capsys: Any) -> None:
    assert run(["config", "explain", "ckpt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  type     table, [ckpt]"
    assert [line.split()[0] for line in lines[4:]] == [
        f"ckpt.{name}" for name in ("interval", "keep_last", "keep_interval", "keep_rollouts", "resume_step")
    ]


def test_an_unknown_key_gets_the_nearest_ones(capsys: Any) -> None:
    assert run(["config", "explain", "optim.lrr"]) == 2
    assert capsys.readouterr().err.startswith("prl: unknown key 'optim.lrr': did you mean optim.lr")
    assert run(["config", "explain", "optim.learning_rate"]) == 2
    assert "unknown key 'optim.learning_rate': this table has optim.type, optim.lr, " in capsys.readouterr().err
    assert run(["config", "explain", "rank"]) == 2
    assert "model.lora.rank or lora.rank" in capsys.readouterr().err
    assert run(["config", "schema", "run"]) == 2
    assert "invalid kind 'run': expected one of orch, system" in capsys.readouterr().err


def test_values_come_with_their_source(tmp_path: Path, capsys: Any) -> None:
    words = ("config", "show", str(RUN), "--set", "optim.lr=2e-3", "--output-dir", str(tmp_path))
    shown = prl(*words, capsys=capsys)
    rows = {row["key"]: (row["value"], row["source"], row["line"]) for row in shown["values"]}
    lines = RUN.read_text().splitlines()
    assert shown["kind"] == "orch"
    assert rows["batch_size"] == (64, "file", lines.index(next(x for x in lines if x.startswith("batch_size"))) + 1)
    assert rows["env.0.args.wording"] == ("short", "file", next(n for n, x in enumerate(lines, 1) if "wording" in x))
    assert rows["optim.lr"] == (2e-3, "flag", None)
    assert rows["optim.betas"] == ([0.9, 0.999], "default", None)
    assert rows["seq_len"] == (None, "default", None)


def test_values_of_a_system_file_are_shared(capsys: Any) -> None:
    shown = prl("config", "show", str(EXAMPLES / "demo" / "system.toml"), "--only-set", capsys=capsys)
    rows = {row["key"]: (row["value"], row["source"]) for row in shown["values"]}
    assert rows["seq_len"] == (64, "file") and rows["trainer.seq_len"] == (64, "derived")
    assert "trainer.model.lora.rank" not in rows, "it is the default"


def test_a_run_takes_values_of_its_workspace(tmp_path: Path, capsys: Any) -> None:
    output, source = OutputDir(tmp_path / "workspace"), tmp_path / "mine.toml"
    source.write_text(RUN.read_text() + '[monitor.wandb]\n[client]\napi_key_var = "MY_KEY"\n')
    actions.add_run(output.path, source)
    output.component_config("trainer").parent.mkdir(parents=True)
    output.component_config("trainer").write_text(
        'seq_len = 77\n[model]\nname = "models/base"\n[model.lora]\nrank = 9\n'
    )
    shown = prl("config", "show", "run_mine", "--output-dir", str(output.path), capsys=capsys)
    rows = {row["key"]: (row["value"], row["source"]) for row in shown["values"]}
    assert rows["seq_len"] == (77, "workspace") and rows["model.lora.rank"] == (8, "file")
    assert rows["client.api_key_var"] == ("MY_KEY", "file")


def test_secrets_in_a_config_are_not_shown(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        RUN.read_text().replace('{ wording = "short" }', '{ api_key = "abcdef" }').replace("reverse-text", "plugin:x")
    )
    assert run(["config", "show", str(path)]) == 0
    assert run(["config", "show", str(path), "--json"]) == 0
    printed = capsys.readouterr().out
    assert "abcdef" not in printed and "env.0.args.api_key" in printed


def test_the_examples_can_be_copied(tmp_path: Path, capsys: Any) -> None:
    listed = prl("config", "examples", capsys=capsys)["examples"]
    assert [EXAMPLES / each["file"] for each in listed] == FILES and all(each["text"] for each in listed)
    assert run(["config", "examples", "--copy", str(tmp_path / "configs")]) == 0
    assert (tmp_path / "configs" / "demo" / "reverse.toml").read_text() == RUN.read_text()
    assert run(["config", "examples", "--copy", str(tmp_path / "configs")]) == 2
    assert "already exists" in capsys.readouterr().err


def test_keys_kinds_and_files_are_completed(tmp_path: Path) -> None:
    context = typer.Context(get_command(app))
    context.params = {"output_dir": tmp_path}
    assert complete.config_keys(context, "optim.l") == ["optim.lr"]
    assert "optim" in complete.config_keys(context, "o") and "optim.lr" not in complete.config_keys(context, "o")
    assert complete.config_kinds("s") == ["system"]
    (tmp_path / "folder").mkdir()
    for name in ("file.toml", "file.txt"):
        (tmp_path / name).write_text("")
    assert complete.config_files(context, f"{tmp_path}/f") == [f"{tmp_path}/file.toml", f"{tmp_path}/folder/"]
