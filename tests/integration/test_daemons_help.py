"""What `prl` offers before it does anything: help with examples, version, completion."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from daemons import actions
from daemons.cli import app, run
from prime_rl import __version__
from prime_rl.configs.system import MakeBaseConfig
from tests.daemons_support import PATIENCE_S, ROOT, RUN_TOML
from tests.warm import warm


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name, each in inner.items():
        yield from leaves(each, (*words, name))


COMMANDS = dict(leaves(get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_that_is_one(words: tuple[str, ...], capsys: Any) -> None:
    assert run([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    begin = f"Example: prl {' '.join(words)}"
    assert begin in shown, shown
    (example,) = [line.strip() for line in (COMMANDS[words].help or "").splitlines() if "Example: " in line]
    for word in example.split():
        assert not word.startswith("configs/") or (ROOT / word).exists(), f"{example}: there is no {word}"
        known = {name for each in COMMANDS[words].params for name in (*each.opts, *each.secondary_opts)}
        passes_on = COMMANDS[words].ignore_unknown_options
        assert passes_on or not word.startswith("-") or word in known, f"{example}: there is no {word}"


def test_what_a_command_takes_stands_in_its_usage(capsys: Any) -> None:
    for words in (["up"], ["trainer"]):
        assert run([*words, "--help"]) == 0
        assert "[@ FILE] [OPTIONS]" in capsys.readouterr().out.splitlines()[0]
    assert run(["multinode", "start", "--help"]) == 0
    assert capsys.readouterr().out.count("--help") == 1
    assert run(["runs", "--help"]) == 0
    assert "Example: prl runs list" in capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_misspelt_flag_is_named_with_the_one_that_is_meant(words: tuple[str, ...], capsys: Any) -> None:
    assert run([*words, "--hlep"]) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith("Error: No such option: --hlep (Possible options: ") and "--help" in last


def test_a_misspelt_flag_does_not_end_what_a_shell_completes(tmp_path: Path) -> None:
    assert complete(tmp_path, "prl up --forground --output-d") == ["--output-dir"]


def test_a_misspelt_flag_does_not_take_what_follows(tmp_path: Path, capsys: Any) -> None:
    for words, meant in (("up --forground @ x.toml", "--foreground"), ("demo --output-dri=x", "--output-dir")):
        assert run(words.split()) == 2
        assert f"(Possible options: {meant})" in capsys.readouterr().err
    for place in (["--output_dir", str(tmp_path)], [f"--output_dir={tmp_path}"]):  # a key of the config
        assert run(["up", "--dry-run", "--json", *place]) == 0
        assert str(tmp_path) in capsys.readouterr().out


def test_the_help_of_make_base_has_all_that_it_takes(capsys: Any) -> None:
    assert run(["make-base", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, text in MakeBaseConfig.docs().items():
        assert f"--{name} {text}" in shown
    for facts in ("[path; required]", '[demo, smollm2-135m; "demo"]', "[integer, ≥ 1; 360]"):
        assert facts in shown


def test_the_groups_are_walked() -> None:
    assert {("up",), ("runs", "add"), ("runs", "purge")} <= set(COMMANDS)


def test_version(capsys: Any) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"prl {__version__}\n"


def complete(workspace: Path, line: str) -> list[str]:
    words = line.split(" ")
    env = {**os.environ, "PRL_OUTPUT_DIR": str(workspace), "_PRL_COMPLETE": "complete_bash"}
    env |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = warm("daemons.cli").run([], env=env, cwd=ROOT, timeout_s=PATIENCE_S)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.slow
def test_the_shell_completes_runs_daemons_and_states(tmp_path: Path) -> None:
    workspace, source = tmp_path / "workspace", tmp_path / "x.toml"
    source.write_text(RUN_TOML.format(max_steps=1, model="m"))
    for run_id in ("run_a", "run_b", "run_gone"):
        actions.add_run(workspace, source, run_id=run_id)
    actions.delete_run(workspace, "run_gone")
    assert complete(workspace, "prl runs show ") == ["run_a", "run_b"]
    assert complete(tmp_path / "none", f"prl runs evict --output-dir {workspace} run_a run_b") == ["run_b"]
    assert complete(workspace, "prl runs undelete run_") == ["run_gone"]
    assert complete(workspace, "prl logs ") == ["supervisor", "trainer", "inference", "run_a", "run_b"]
    assert complete(workspace, "prl restart ru") == ["run_a", "run_b"]
    assert complete(workspace, "prl runs list --state active,f") == ["active,finished", "active,failed"]
    assert complete(tmp_path / "none", "prl runs show ") == []
    assert complete(workspace, "prl config explain optim.l") == ["optim.lr"]
    assert complete(workspace, "prl env try x.toml --model ") == ["echo", "base", "run_a", "run_b"]
    assert complete(workspace, "prl config show run_") == ["run_a", "run_b"]
