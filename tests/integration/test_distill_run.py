"""Runs that learn from a teacher, in a whole workspace: from a run beside them, and from the base model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.contract.layout import list_rollout_steps, list_steps
from prime_rl.contract.served import is_teacher
from prime_rl.contract.status import InferenceStatus, RunStatus, read_status
from prime_rl.contract.types import TrainingSample, read_batch
from tests.integration.test_sft_run import write_texts
from tests.system_support import Workspace, closed, make_workspace, read_metrics

RL = """\
batch_size = 8
rollouts_per_example = 4
max_steps = 6
[model]
name = "{model}"
[optim]
lr = 0.01
[sampling]
max_tokens = 8
[ckpt]
interval = 3
keep_rollouts = true
[[env]]
id = "upper-case"
"""
TAUGHT = 'kind = "distill"\nteacher = "{teacher}"\n' + RL.replace("rollouts_per_example = 4\n", "")
# Moves away from the base; and from there back to it.
TEXTS = """\
kind = "sft"
batch_size = 8
max_steps = 40
[model]
name = "{model}"
[optim]
lr = 0.05
[[data]]
path = "words.jsonl"
"""
BACK = TAUGHT.replace("max_steps = 6", "max_steps = 12\nmax_async_level = 0") + '[init]\nfrom = "run_texts"\n'


@pytest.fixture
def workspace(tmp_path: Path, untaught_model: Path) -> Iterator[Workspace]:
    yield from closed(make_workspace(tmp_path, untaught_model))


def add(workspace: Workspace, run_id: str, text: str, **values: str) -> None:
    path = workspace.output_dir.parent / f"{run_id}.toml"
    path.write_text(text.format(model=workspace.model, **values))
    workspace.prl("runs", "add", str(path), "--id", run_id)


def finish(workspace: Workspace, *run_ids: str) -> None:
    for run_id in run_ids:
        workspace.wait(lambda run_id=run_id: workspace.state(run_id) == "finished", f"{run_id} to finish")


def adapters(workspace: Workspace) -> list[str]:
    status = read_status(workspace.paths.inference_status, InferenceStatus)
    return status.adapters if status else []


def samples(workspace: Workspace, run_id: str) -> list[TrainingSample]:
    run = workspace.run_dir(run_id)
    return [each for step in list_rollout_steps(run) for each in read_batch(run.rollout_file(step)).samples]


@pytest.mark.slow
def test_a_run_is_taught_by_one_beside_it_and_by_the_base_model(workspace: Workspace, tmp_path: Path) -> None:
    write_texts(tmp_path)
    workspace.up()
    add(workspace, "run_texts", TEXTS)
    finish(workspace, "run_texts")
    add(workspace, "run_a", RL)
    add(workspace, "run_b", TAUGHT, teacher="run_a@latest")
    finish(workspace, "run_a", "run_b")
    taught = samples(workspace, "run_b")
    assert len(taught) == 48 and any(any(each.token_advantages) for each in taught)
    lines = read_metrics(workspace.run_dir("run_b").orchestrator_metrics)
    versions = [line["distill/teacher_version"] for line in lines]
    assert versions == sorted(versions) and 1 <= versions[-1] <= 6
    assert len(list_steps(workspace.run_dir("run_b").teachers)) <= 2, "all but the last, and one that it was leaving"
    workspace.wait(lambda: not any(map(is_teacher, adapters(workspace))), "the teacher to be unloaded")

    for run_id in ("run_whole", "run_killed"):
        add(workspace, run_id, BACK, teacher="base")
    run = workspace.run_dir("run_killed")
    workspace.wait(lambda: len(list_rollout_steps(run)) >= 3, "three batches of run_killed")
    killed = read_status(run.status, RunStatus)
    assert killed is not None
    before = samples(workspace, "run_killed")
    os.kill(killed.pid, signal.SIGKILL)
    finish(workspace, "run_whole", "run_killed")
    after = read_status(run.status, RunStatus)
    assert after is not None and after.pid != killed.pid
    whole, again = samples(workspace, "run_whole"), samples(workspace, "run_killed")
    assert [each.example_id for each in again] == [each.example_id for each in whole] and len(whole) == 96
    assert again[: len(before)] == before, "no batch is made twice"
    assert all(each.token_advantages for each in again)
    used = {row["name"]: row["teacher_tokens"] for row in workspace.json("usage")["rows"]}
    assert used["run_whole"] >= sum(len(each.token_ids) for each in whole) and not used["run_a"]
