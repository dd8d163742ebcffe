"""A program that asks the policy learns by it, in a whole workspace, beside two other runs that cannot tell."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.contract.types import read_batch, rollouts_of
from tests.learning import ascent_of_adapter
from tests.system_support import ROOT, Workspace, closed, make_workspace, read_metrics
from tests.tool_model import WORDS

pytestmark = [pytest.mark.slow, pytest.mark.numeric]
PROGRAMS = ROOT / "tests" / "programs"
NUM_STEPS, BATCH_SIZE = 3, 32
COMMON = """\
batch_size = {batch_size}
rollouts_per_example = 16
max_steps = {num_steps}
max_async_level = 1
[model]
name = "{model}"
[optim]
lr = 0.005
[sampling]
max_tokens = 40
[ckpt]
interval = 100
keep_rollouts = true
[[env]]
"""
AGENT = """\
id = "agent"
[env.args]
command = ["{python}", "word_box.py"]
cwd = "program"
path = "boxes.jsonl"
num_eval_examples = 1
"""
OTHERS = {"run_upper": 'id = "upper-case"\n', "run_sums": 'id = "arithmetic"\n'}


@pytest.fixture
def boxes(tmp_path: Path, tool_model: Path) -> Iterator[Workspace]:
    workspace = make_workspace(tmp_path, tool_model)
    text = workspace.system_toml.read_text()
    text = text.replace("seq_len = 96", "seq_len = 384").replace("max_concurrent_runs = 2", "max_concurrent_runs = 3")
    workspace.system_toml.write_text(text)
    yield from closed(workspace)


def test_an_agent_learns_beside_two_runs_that_cannot_tell(boxes: Workspace, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"Which word is in box {number}?", "answer": number}) for number in range(len(WORDS))]
    (tmp_path / "boxes.jsonl").write_text("\n".join(rows))
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "word_box.py").write_text((PROGRAMS / "word_box.py").read_text())
    common = COMMON.format(batch_size=BATCH_SIZE, num_steps=NUM_STEPS, model=boxes.model)
    texts = {"run_box": AGENT.format(python=sys.executable), **OTHERS}
    boxes.up()
    for run_id, text in texts.items():
        path = tmp_path / f"{run_id}.toml"
        path.write_text(common + text)
        boxes.prl("runs", "add", str(path), "--id", run_id)
    for run_id in texts:
        boxes.wait(lambda run_id=run_id: boxes.state(run_id) == "finished", f"{run_id} to finish")
    boxes.prl("down")

    run = boxes.run_dir("run_box")
    batch = read_batch(run.rollout_file(1)).samples
    rollouts = rollouts_of(batch)
    assert len(rollouts) == BATCH_SIZE and all(len(places) == 2 for places in rollouts)
    assert {len(batch[places[0]].turn_versions) for places in rollouts} == {1, 2}, "with and without a look"
    ascent_of_adapter(boxes.model, run.broadcast_dir(1), batch).check()
    lines = [line for line in read_metrics(run.orchestrator_metrics) if "env/agent/looks" in line]
    assert [line["branches/mean"] for line in lines] == [2.0] * NUM_STEPS

    assert boxes.selfcheck().keys() == texts.keys()
