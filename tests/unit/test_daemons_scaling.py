"""`prl scale inference`: what it changes in the saved settings, what it refuses; and how several servers are shown."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from daemons.cli import run
from daemons.specs import SYSTEM, UP, write_component_configs
from daemons.workspace_reader import read_workspace
from prime_rl.configs.base import build, load_config
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, StatusWriter
from tui.model.snapshot import make_snapshot
from tui.screens.system import inference_lines


def start(path: Path, **inference: Any) -> OutputDir:
    """A workspace as `prl up` leaves it."""
    output = OutputDir(path)
    data = {"output_dir": str(path), "model": {"name": "m"}, "deployment": {"inference": inference}}
    write_component_configs(build(SystemConfig, data, "test"), output)
    write_atomic(output.component_config(UP), tomli_w.dumps(data))
    return output


def deployed(output: OutputDir, name: str = SYSTEM) -> tuple[int, tuple[int, ...]]:
    """The replicas, and the GPUs of the first."""
    inference = load_config(SystemConfig, output.component_config(name)).deployment.inference
    return inference.replicas, inference.devices(0)


def prl(*words: object) -> int:
    return run([str(word) for word in words])


def test_the_saved_settings_change_also_those_of_the_next_start_and_nothing_else(tmp_path: Path, capsys: Any) -> None:
    output = start(tmp_path)
    before = load_config(SystemConfig, output.component_config(SYSTEM))
    assert prl("scale", "inference", 3, "--output-dir", tmp_path, "--reason", "more load") == 0
    assert capsys.readouterr().out.endswith("1 -> 3 inference servers at the next prl up\n")
    assert deployed(output) == deployed(output, UP) == (3, ())
    assert prl("scale", "inference", 1, "--output-dir", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["before"], found["replicas"], found["supervisor_alive"]) == (3, 1, False)
    assert load_config(SystemConfig, output.component_config(SYSTEM)) == before
    assert prl("scale", "inference", 1, "--output-dir", tmp_path) == 0
    lines = [json.loads(line) for line in output.audit.read_text().splitlines()]
    acts = [(line["action"], line["reason"], line["detail"]) for line in lines]
    assert acts == [("scale", "more load", "1 -> 3 inference servers"), ("scale", "", "3 -> 1 inference servers")]


def test_servers_that_stay_keep_their_gpus(tmp_path: Path) -> None:
    output = start(tmp_path, replicas=2, gpus=[4, 5, 6, 7])
    assert prl("scale", "inference", 1, "--output-dir", tmp_path) == 0
    assert deployed(output) == (1, (4, 5))
    assert prl("scale", "inference", 2, "--output-dir", tmp_path) == 0
    assert deployed(output) == (2, (4, 5))


@pytest.mark.parametrize(
    ("number", "exit_code", "message"),
    [
        (0, 2, "must be 1 or more"),
        (3, 1, "3 inference servers of 2 GPUs need 6: deployment.inference.gpus lists 4"),
        (60_000, 1, "need ports up to 67999: at most 65535"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: Any, number: int, exit_code: int, message: str
) -> None:
    output = start(tmp_path, replicas=2, gpus=[0, 1, 2, 3])
    before = output.component_config(SYSTEM).read_bytes()
    assert prl("scale", "inference", number, "--output-dir", tmp_path) == exit_code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert output.component_config(SYSTEM).read_bytes() == before and not output.audit.exists()


def test_a_workspace_that_was_never_started_has_no_servers(tmp_path: Path, capsys: Any) -> None:
    assert prl("scale", "inference", 2, "--output-dir", tmp_path) == 1
    assert "start it with prl up first" in capsys.readouterr().err


def test_every_server_is_shown_and_all_of_them_count(tmp_path: Path) -> None:
    output = start(tmp_path)
    output.inference.mkdir()
    for number, path in {0: output.inference_status, 1: output.replica_status(1)}.items():
        adapters = ["run_a@v1", f"run_b@v{number}"]
        status = InferenceStatus(state="serving", base_url=f"http://h:{number}/v1", num_running=3, adapters=adapters)
        StatusWriter(path, status).abandon()
    workspace = read_workspace(output.path)
    assert workspace.inference is not None
    assert (workspace.inference.num_running, len(workspace.inference.adapters)) == (6, 3)
    assert [number for number, status in workspace.replicas if status.pid == os.getpid()] == [0, 1]
    snapshot = make_snapshot(workspace, {}, time.time())
    assert [row.name for row in snapshot.daemons] == ["trainer", "inference", "inference-1", "supervisor"]
    shown = "\n".join(line.plain for line in inference_lines(snapshot, 120))
    assert "2 servers" in shown and "6 running" in shown and "http://h:1/v1 3 running" in shown
