"""The pages of docs/ that are made from the code are what is made, and the code does what they say."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from typer.main import get_command

from daemons.cli import app, run
from daemons.quiet import OpenIncident, mute, write_open
from daemons.specs import UP, write_component_configs
from prime_rl.configs import EXAMPLES
from prime_rl.configs.base import build
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.samples import KeptSample, SampleFile, SampleTurn
from prime_rl.contract.status import (
    DaemonStatus,
    GroupStatus,
    InferenceStatus,
    NodeStatus,
    RunStatus,
    SessionStatus,
    StatusWriter,
    TrainerRunStatus,
    TrainerStatus,
)
from prime_rl.contract.usage import UsageLine
from prime_rl.multinode.records import EXIT_REFUSED, EXIT_TRY_AGAIN
from prime_rl.trainer import runs
from prime_rl.trainer.runs import MultiRunManager, Progress, TrainerRun
from prime_rl.utils.process import EXIT_INTERRUPTED, EXIT_TERMINAL_GONE, EXIT_TERMINATED
from scripts import reference
from scripts.members import members, rows_of
from scripts.outputs import OUTPUTS, And, fields_of, is_model, leaves_out
from tests.daemons_support import RUN_TOML
from tests.unit.test_daemons_forks import put_version

ROOT = Path(__file__).parent.parent
RUN = str(EXAMPLES / "demo" / "reverse.toml")
# Commands that hand their flags or their work to another process. What `prl fit` prints is checked with its figures.
ELSEWHERE = {"prl fit", "prl eval TARGET", "prl multinode start", "prl runs endpoint ID"}


@pytest.mark.parametrize("page", reference.PAGES)
def test_a_page_is_what_is_made(page: str) -> None:
    assert (reference.DOCS / page).read_text() == reference.make(page), "python -m scripts.reference"


def test_every_member_of_the_runs_has_its_line(tmp_path: Path) -> None:
    """Also the attributes of an object; and none without a text."""
    config = build(OrchestratorConfig, tomllib.loads(RUN_TOML.format(max_steps=1, model="m")), "test")
    run = TrainerRun(0, RunDir(tmp_path / "run_a"), config, admission=1)
    for offered in (MultiRunManager(tmp_path, max_runs=1), Progress(), run):
        rows = {name: text for name, _, text in rows_of(type(offered))}
        assert rows.keys() == {name for name in vars_of(offered) if not name.startswith("_")}
        assert all(rows.values())
    page = members()
    assert [name for name in runs.__all__ if f"`{name}(" not in page and f"### {name}\n" not in page] == []


def vars_of(it: object) -> set[str]:
    """Its attributes and those of its class; looking at them calls no property."""
    return {*vars(it), *dir(type(it))}


def test_the_commands_have_every_environment_variable_of_ours() -> None:
    files = [path for package in ("prime_rl", "daemons", "tui") for path in (ROOT / package).rglob("*.py")]
    read = {name for path in files for name in re.findall(r"\"(PRL_[A-Z_]+)\"", path.read_text())}
    told = set(re.findall(r"`(PRL_[A-Z_]+)`", reference.COMMANDS_HEAD))
    assert len(read) > 3 and read <= told


@pytest.fixture
def workspace(tmp_path: Path) -> OutputDir:
    """Two runs with a version, a daemon of each kind, a group with a node, an incident, a silence, usage."""
    output = OutputDir(tmp_path / "out")
    data = {"output_dir": str(output.path), "model": {"name": "m"}, "alerts": {}}
    write_component_configs(build(SystemConfig, data, "test"), output)
    write_atomic(output.component_config(UP), tomli_w.dumps(data))
    for max_steps, run_id in enumerate(("run_a", "run_b"), start=5):
        folder = output.run(run_id)
        folder.control.mkdir(parents=True)
        folder.orch_toml.write_text(RUN_TOML.format(max_steps=max_steps, model="m"))
        put_version(folder, 2, saved=True)
        folder.metrics.mkdir()
        folder.orchestrator_metrics.write_text(json.dumps({"step": 2, "time": 1.0, "reward/mean": 0.5}) + "\n")
        turns = [SampleTurn(True, "more")]
        said = [{"role": role, "content": role} for role in ("user", "assistant")]
        kept = KeptSample(2, "e", "1", "prompt", "answer", 1.0, 0.5, [1], 9, 3, turns, messages=said, ended=True)
        SampleFile(folder.samples, 8).append([kept])
    output.usage.mkdir()
    line = UsageLine(run_id="run_a", day="2026-11-25", tokens=7)
    output.run_usage("run_a").write_bytes(msgspec.json.encode(line) + b"\n")
    write_open(output, {"run_failed run_a": OpenIncident("run_failed", "run_a", "boom", 1.0)})
    mute(output.path, "run_failed")
    (output.path / "run_?").mkdir()
    session = SessionStatus(id="run_a.x", example="e", since=1.0, num_calls=2, used_at=2.0, waiting_on="its client")
    slots = {"run_a": TrainerRunStatus(run_idx=0)}
    for path, status in (
        (output.trainer_status, TrainerStatus(state="training", max_runs=2, runs=slots)),
        (output.inference_status, InferenceStatus(state="serving")),
        (output.daemon_status("trainer"), DaemonStatus(state="running", name="trainer")),
        (output.run("run_a").status, RunStatus(run_id="run_a", state="running", num_sessions=1, sessions=[session])),
        (output.node_status(0), NodeStatus(state="done", rank=0)),
        (output.group_status, GroupStatus(state="ending", incarnation="1")),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        StatusWriter(path, status).abandon()
    return output


def words_of(workspace: OutputDir, tmp_path: Path) -> dict[str, list[str]]:
    """A call of each command of the page."""
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("batch_size = 0\n")
    calls = {
        "prl status": "status",
        "prl runs list": "runs list",
        "prl runs show ID": "runs show run_a",
        "prl runs samples ID": "runs samples run_a",
        "prl runs samples ID --export FILE": f"runs samples run_a --export {tmp_path / 'texts.jsonl'}",
        "prl runs sessions": "runs sessions",
        "prl runs validate FILE": f"runs validate {wrong}",
        "prl env try FILE": f"env try {RUN} -n 1",
        "prl runs fork ID": "runs fork run_a --dry-run",
        "prl runs sweep FILE": f"runs sweep {RUN} --set model.name=m --set seed=1,2 --dry-run",
        "prl runs export ID": f"runs export run_a --out {tmp_path / 'new'} --dry-run",
        "prl runs best": "runs best --by seed",
        "prl runs diff A B": "runs diff run_a run_b",
        "prl serve": "serve",
        "prl usage": "usage",
        "prl up --dry-run": f"up @ {EXAMPLES / 'demo' / 'system.toml'} --dry-run",
        "prl scale inference N": "scale inference 2",
        "prl doctor": "doctor --quick",
        "prl alerts": "alerts",
        "prl alerts --test": "alerts --test",
        "prl config show FILE": f"config show {RUN}",
        "prl config explain KEY": "config explain optim.lr",
        "prl config examples": "config examples",
        "prl multinode status": "multinode status",
    }
    return {command: words.split() for command, words in calls.items()}


def test_json_outputs_have_the_keys_and_types_of_their_page(
    workspace: OutputDir, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRL_OUTPUT_DIR", str(workspace.path))
    commands = words_of(workspace, tmp_path)
    assert commands.keys() == OUTPUTS.keys() - ELSEWHERE
    for command, words in commands.items():
        code = run([*words, "--json"])
        text = capsys.readouterr()
        assert code == 0 or command in ("prl runs validate FILE", "prl doctor"), (command, text.err)
        found = json.loads(text.out)
        assert found.pop("version") == 1
        check(found, OUTPUTS[command], command)


def keys_of(kind: Any) -> Mapping[str, Any]:
    if isinstance(kind, And):
        return {**fields_of(kind.model), **kind.more}
    return kind if isinstance(kind, Mapping) else fields_of(kind)


def check(value: Any, kind: Any, place: str) -> None:
    """`value` has exactly the keys of `kind`, and values of its types; what stands for an object may be null."""
    if isinstance(kind, list):
        assert isinstance(value, list) and (value or place in EMPTY), f"{place}: {value}"
        for each in value:
            check(each, kind[0], place)
    elif isinstance(kind, (Mapping, And)) or is_model(kind):
        if value is None:
            return
        keys = keys_of(kind)
        assert value.keys() <= keys.keys(), place
        assert value.keys() == keys.keys() or (is_model(kind) and leaves_out(kind)) or place in PARTLY, place
        for name, inner in value.items():
            check(inner, keys[name], f"{place} {name}")
    elif kind is Path:
        assert isinstance(value, str), place
    else:
        msgspec.convert(value, kind)


# Lists of a workspace as small as this one, and an object without one of its two keys.
EMPTY = {
    *("prl alerts --test sent", "prl multinode status waited_for", "prl serve served", "prl serve urls"),
    *("prl runs validate FILE warnings", "prl status clocks"),
}
PARTLY = {"prl runs show ID metrics"}


def test_every_command_with_json_is_on_the_page() -> None:
    found, root = set(), get_command(app)
    for words in reference.command_words(root):
        command: Any = root
        for word in words:
            command = command.commands[word]
        if any("--json" in each.opts for each in command.params):
            found.add(" ".join(["prl", *words]))
    told = {re.sub(r" ([A-Z]+|--[a-z-]+)", "", command) for command in OUTPUTS}
    assert found - ELSEWHERE == told - ELSEWHERE


def test_the_commands_have_every_exit_code() -> None:
    told = [int(code) for code in re.findall(r"^\| (\d+) \|", reference.COMMANDS_HEAD, re.MULTILINE)]
    assert told == [0, 1, EXIT_REFUSED, EXIT_TRY_AGAIN, EXIT_TERMINAL_GONE, EXIT_INTERRUPTED, EXIT_TERMINATED]
