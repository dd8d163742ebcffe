"""A run that learns texts, in a whole workspace: beside a run with rollouts, and alone, without inference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.contract.types import read_batch
from tests.system_support import Workspace, closed, make_workspace, read_metrics

SFT = """\
kind = "sft"
batch_size = 8
max_steps = 12
[model]
name = "{model}"
[optim]
lr = 0.02
[ckpt]
interval = 5
keep_rollouts = true
[sft]
held_out_interval = 4
[[data]]
path = "words.jsonl"
num_held_out = 4
"""
RL = """\
batch_size = 8
rollouts_per_example = 4
max_steps = 3
[model]
name = "{model}"
[sampling]
max_tokens = 8
[[env]]
id = "upper-case"
"""


@pytest.fixture
def workspace(tmp_path: Path, untaught_model: Path) -> Iterator[Workspace]:
    yield from closed(make_workspace(tmp_path, untaught_model))


def write_texts(folder: Path) -> None:
    words = ["tree", "stone", "river", "cloud", "house", "bread", "light", "night"]
    rows = [{"prompt": f"say {word}", "completion": word} for word in 4 * words]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.slow
def test_texts_are_learned_beside_rollouts(workspace: Workspace, tmp_path: Path) -> None:
    write_texts(tmp_path)
    workspace.up()
    for run_id, text in {"run_texts": SFT, "run_rl": RL}.items():
        path = tmp_path / f"{run_id}.toml"
        path.write_text(text.format(model=workspace.model))
        workspace.prl("runs", "add", str(path), "--id", run_id)
    for run_id in ("run_texts", "run_rl"):
        workspace.wait(lambda run_id=run_id: workspace.state(run_id) == "finished", f"{run_id} to finish")
    run = workspace.run_dir("run_texts")
    first = read_batch(run.rollout_file(1)).samples
    assert [sample.use for sample in first] == ["supervised"] * 8 + ["held_out"] * 4
    lines = read_metrics(run.trainer_metrics)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["supervised/loss"] < lines[0]["supervised/loss"]
    assert [line["step"] for line in lines if "held_out/loss" in line] == [1, 5, 9]
    assert "mismatch_kl" not in lines[0]
    epochs = [line["epoch"] for line in read_metrics(run.orchestrator_metrics)]
    assert epochs == [round(8 * step / 28, 12) for step in range(1, 13)] or epochs[-1] > 3
