"""A taskset of `verifiers` with a tool on real vLLM: the policy learns to call the tool.

Its first answer is a call or a guess, about one to one; a call is answered by the real tool server, and its result
leads to the right word. So the more it looks, the higher the reward. The training client of `verifiers` then asks the
same server for rollouts of the last version, on the same tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from prime_rl.contract.status import InferenceStatus, read_status
from prime_rl.contract.types import TrainingSample, read_batch
from tests.learning import ascent_of_adapter, load_policy, worst_difference
from tests.patience import PATIENCE_S
from tests.system_support import ROOT, Workspace, closed, make_workspace, read_metrics
from tests.tool_model import TOOL, WORDS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.numeric]
TASKSETS = ROOT / "tests" / "tasksets"
# Of so few steps every version but the base is still there.
NUM_STEPS, BATCH_SIZE, NUM_TASKS = 4, 32, len(WORDS)
# Between logprobs of one policy on two paths, in float32.
TOLERANCE = 2e-3
# Of the probability of a call, which is about one half at first.
MIN_RISE = 0.15
RUN = """\
batch_size = {batch_size}
rollouts_per_example = 16
max_steps = {num_steps}
max_async_level = 1
[model]
name = "{model}"
[optim]
lr = 0.02
[scheduler]
warmup_steps = 4
[sampling]
max_tokens = 40
[[env]]
id = "verifiers:word-box"
args = {{ taskset = {{ num_tasks = {num_tasks} }}, num_eval_examples = 1 }}
[ckpt]
interval = 100
keep_rollouts = true
"""


@pytest.fixture
def tools_workspace(tmp_path: Path, tool_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    monkeypatch.setenv("PYTHONPATH", f"{TASKSETS}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    monkeypatch.setenv("HOME", str(tmp_path))  # verifiers keeps the folders of its rollouts below it
    workspace = make_workspace(tmp_path, tool_model, engine="vllm")
    text = workspace.system_toml.read_text()
    workspace.system_toml.write_text(text.replace("seq_len = 96", "seq_len = 384"))
    yield from closed(workspace)


def messages(sample: Any) -> list[tuple[bool, list[int]]]:
    """A prompt and what followed: whether it is trained on, and its tokens."""
    marked = zip(sample.loss_mask, sample.token_ids, strict=True)
    return [(ours, [token for _, token in group]) for ours, group in itertools.groupby(marked, lambda each: each[0])]


@torch.no_grad()
def call_probability(model: nn.Module, prompt: list[int], call_id: int) -> float:
    """That the first answer begins with a call."""
    return float(model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)[call_id])


def rollouts_of_verifiers(workspace: Workspace, version: int) -> list[SimpleNamespace]:
    """Those that `verifiers` makes without this project, of a version that is loaded for it."""
    status = read_status(workspace.paths.inference_status, InferenceStatus)
    assert status is not None
    name = f"chat/run_box@v{version}"
    body = {"lora_name": name, "lora_path": str(workspace.run_dir("run_box").broadcast_dir(version))}
    assert httpx.post(f"{status.base_url}/load_lora_adapter", json=body, timeout=PATIENCE_S).status_code == 200
    command = [sys.executable, "-m", "tests.train_client_main", status.base_url, name, str(workspace.model)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [SimpleNamespace(**json.loads(line), temperature=1.0) for line in done.stdout.splitlines()]


@pytest.mark.release
def test_a_policy_on_vllm_learns_to_call_the_tool(tools_workspace: Workspace) -> None:
    workspace = tools_workspace
    workspace.up()
    path = workspace.output_dir.parent / "box.toml"
    path.write_text(RUN.format(batch_size=BATCH_SIZE, num_tasks=NUM_TASKS, num_steps=NUM_STEPS, model=workspace.model))
    workspace.prl("runs", "add", str(path), "--id", "run_box")
    workspace.wait(lambda: workspace.state("run_box") == "finished", "run_box to finish")
    theirs = rollouts_of_verifiers(workspace, NUM_STEPS)
    workspace.prl("down")

    run = workspace.run_dir("run_box")
    batches = {step: read_batch(run.rollout_file(step)).samples for step in range(1, NUM_STEPS + 1)}
    folders = {0: None} | {version: run.broadcast_dir(version) for version in range(1, NUM_STEPS + 1)}
    policies = {version: load_policy(workspace.model, folder) for version, folder in folders.items()}
    tokenizer = AutoTokenizer.from_pretrained(workspace.model)
    (call_id,) = tokenizer.encode("<tool_call>", add_special_tokens=False)
    samples = [sample for batch in batches.values() for sample in batch]
    for sample in samples:
        check_messages(sample, tokenizer, call_id)
    assert {len(sample.turn_versions) for sample in samples} >= {1, 2}
    of_one_version = [sample for sample in samples if len(set(sample.turn_versions)) == 1]
    assert {sample.policy_version for sample in of_one_version} > {0}
    for sample in of_one_version:
        assert worst_difference(policies[sample.policy_version], sample) < TOLERANCE
    assert read_metrics(run.trainer_metrics)[0]["mismatch_kl"] < TOLERANCE**2, "the trainer's logprobs are others"

    ascent_of_adapter(workspace.model, run.broadcast_dir(1), batches[1]).check()
    prompt = messages(samples[0])[0][1]
    before, after = (call_probability(policies[version], prompt, call_id) for version in (0, NUM_STEPS))
    assert after > before + MIN_RISE

    assert len(theirs) == NUM_TASKS and any(each.num_turns == 2 for each in theirs)
    for each in theirs:
        assert worst_difference(policies[NUM_STEPS], each) < TOLERANCE
    prompts = {tuple(messages(sample)[0][1]) for sample in samples}
    assert prompts & {tuple(messages(each)[0][1]) for each in theirs}, "the same tokens through its own client"


def check_messages(sample: TrainingSample, tokenizer: Any, call_id: int) -> None:
    """A guess, or a call with the tool's result and a last answer; the reward is that of the answer."""
    said = messages(sample)
    assert [ours for ours, _ in said] == [False, True] * len(sample.turn_versions)
    prompt = tokenizer.decode(said[0][1])
    number = int(prompt.rpartition("in box ")[2][0])
    offered = prompt.partition("</tools> XML tags:\n<tools>\n")[2].partition("\n</tools>")[0]
    # How verifiers writes a tool down is its own affair.
    tool, expected = json.loads(offered)["function"], TOOL["function"]
    assert tool["name"] == expected["name"]
    assert tool["parameters"]["properties"].keys() == expected["parameters"]["properties"].keys()
    for (_, call), (_, result) in zip(said[1:-1:2], said[2:-1:2], strict=True):
        assert call_id in call and "<tool_response>" in tokenizer.decode(result)
    answer = tokenizer.decode(said[-1][1], skip_special_tokens=True)
    assert sample.reward == 0.75 * (WORDS[number] in answer) + 0.25 * (len(answer) < 20)
