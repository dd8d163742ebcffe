"""A workspace that fine-tunes the whole model: daemons, `/update_weights`, both engines, both broadcast types."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from prime_rl.contract.layout import list_steps
from prime_rl.contract.status import DaemonStatus, InferenceStatus, RunStatus, read_status
from prime_rl.contract.types import read_batch
from tests.integration.test_system_vllm import TOLERANCE, worst_difference
from tests.learning import ascent, load_policy
from tests.metrics_support import undocumented
from tests.patience import PATIENCE_S
from tests.system_support import Workspace, read_metrics

pytestmark = pytest.mark.release
WEIGHTS_FILE = "model.safetensors"
NUM_STEPS, KILL_AT = 8, 3
RUN_TOML = """\
batch_size = 64
rollouts_per_example = 16
max_steps = {max_steps}
max_async_level = 1
seed = 1
[model]
name = "{model}"
[optim]
lr = 5e-5
[sampling]
max_tokens = 12
[[env]]
id = "reverse-text"
args = {{ wording = "short", num_examples = 4, num_eval_examples = 2, min_len = 2, max_len = 3 }}
[eval]
interval = {max_steps}
[ckpt]
interval = 1
keep_last = {max_steps}
keep_rollouts = true
"""


def write_run(workspace: Workspace) -> Path:
    path = workspace.output_dir.parent / "a.toml"
    path.write_text(RUN_TOML.format(max_steps=NUM_STEPS, model=workspace.model))
    return path


def inference(workspace: Workspace) -> InferenceStatus:
    status = read_status(workspace.paths.inference_status, InferenceStatus)
    assert status is not None
    return status


def given(workspace: Workspace) -> list[list[str]]:
    """What each life of the inference server was given, in order: the last part of the folder, or "model" (base)."""
    lives = workspace.paths.log("inference").read_text().split("inference: starting the")[1:]
    return [re.findall(r"now serving the .*?(step_[0-9]+|model)$", life, re.MULTILINE) for life in lives]


def check_learning_and_end(workspace: Workspace) -> None:
    """The first update went uphill, all steps were made, and inference serves the base model again."""
    run = workspace.run_dir("run_a")
    workspace.wait(lambda: (read_status(run.status, RunStatus) or RunStatus()).state == "finished", "its evaluation")
    lines = read_metrics(run.orchestrator_metrics)
    assert undocumented("orchestrator", lines) == set()
    assert [line["step"] for line in lines if "reward/mean" in line] == list(range(1, NUM_STEPS + 1))
    check_first_update(workspace)
    assert max(line["async_level/max"] for line in lines if "async_level/max" in line) <= 1
    evaluated = {line["step"]: line for line in lines if "eval/reverse-text/reward" in line}
    assert evaluated.keys() == {0, NUM_STEPS}, "the first and the last version"
    assert all(line["eval/reverse-text/num_failed"] == 0 for line in evaluated.values())
    body = {"model": str(workspace.model), "prompt": [5, 6], "max_tokens": 1}

    def serves() -> tuple[int, str | None]:
        answer = httpx.post(f"{inference(workspace).base_url}/completions", json=body, timeout=PATIENCE_S)
        return answer.status_code, answer.headers.get("x-weights")

    workspace.wait(lambda: serves() == (200, "base"), "inference to serve the base model again")


def policy(workspace: Workspace, version: int) -> torch.nn.Module:
    """The weights of a version as the trainer's checkpoint has them; a published one may have been in memory only."""
    model = load_policy(workspace.model, None)
    if version:
        checkpoint = workspace.run_dir("run_a").trainer_checkpoint(version)
        model.load_state_dict(load_file(checkpoint / WEIGHTS_FILE), strict=False)
    return model


def check_first_update(workspace: Workspace) -> None:
    base = dict(policy(workspace, 0).named_parameters())
    model = policy(workspace, 1)
    update = {name: (parameter - base[name]).detach() for name, parameter in model.named_parameters()}
    ascent(model, update, read_batch(workspace.run_dir("run_a").rollout_file(1)).samples).check()


def check_versions(workspace: Workspace) -> None:
    """Each sample was sampled from the weights of the version that it names, and from no other."""
    run = workspace.run_dir("run_a")
    models = {version: policy(workspace, version) for version in range(NUM_STEPS)}
    worst = {version: dict.fromkeys(models, 0.0) for version in models}
    for step in range(1, NUM_STEPS + 1):
        for sample in read_batch(run.rollout_file(step)).samples[::16]:
            version = sample.policy_version
            assert max(0, step - 2) <= version <= step - 1
            for other, model in models.items():
                worst[version][other] = max(worst[version][other], worst_difference(model, sample))
            assert worst[version][version] < TOLERANCE, f"step {step}: not sampled from v{version}"
    for version, difference in worst.items():
        same = [other for other in models if other != version and difference[other] < TOLERANCE]
        assert not same or not any(difference.values()), f"v{version} would have passed as v{same}"


@pytest.mark.parametrize("whole_workspace", [("embedded", "filesystem")], indirect=True)
def test_it_learns_and_a_killed_server_gets_the_newest_weights_again(whole_workspace: Workspace) -> None:
    workspace = whole_workspace
    workspace.up()
    source = write_run(workspace)
    wrong = workspace.prl("runs", "add", str(source), "--set", "model.lora.rank=4", check=False)
    assert wrong.returncode == 2 and "add the run to a workspace with adapters" in wrong.stderr
    workspace.prl("runs", "add", str(source))
    # Looked at without `prl`, which takes as long as some of the few steps that are left.
    run = workspace.run_dir("run_a")
    workspace.wait(lambda: max(list_steps(run.broadcast, stable_only=True), default=0) >= KILL_AT, "run_a to train")
    os.kill(inference(workspace).pid, signal.SIGKILL)
    workspace.wait(lambda: workspace.state("run_a") == "finished", "run_a to finish after inference was killed")
    check_learning_and_end(workspace)
    check_versions(workspace)
    assert (workspace.run_dir("run_a").broadcast_dir(NUM_STEPS) / WEIGHTS_FILE).is_file()
    daemon = read_status(workspace.paths.daemon_status("inference"), DaemonStatus)
    assert daemon is not None and daemon.num_restarts == 1
    first, second = given(workspace)
    # A new server has the base model. The third batch needs version 1 or a newer one.
    assert first[0] in ("step_1", "step_2")
    assert second[-2:] == [f"step_{NUM_STEPS}", "model"]
    assert int(second[0].removeprefix("step_")) >= int(first[-1].removeprefix("step_")), "nothing was asked of the base"
    workspace.prl("down")
    assert workspace.processes() == []


@pytest.mark.vllm
@pytest.mark.parametrize("whole_workspace", [("vllm", "nccl")], indirect=True)
def test_it_learns_on_vllm_with_weights_from_the_trainers_memory(whole_workspace: Workspace) -> None:
    workspace = whole_workspace
    workspace.up()
    workspace.prl("runs", "add", str(write_run(workspace)))
    workspace.wait(lambda: workspace.state("run_a") == "finished", "run_a to finish on vLLM")
    check_learning_and_end(workspace)
    run = workspace.run_dir("run_a")
    versions = list_steps(run.broadcast, stable_only=True)
    assert versions[-1] == NUM_STEPS
    assert not any((run.broadcast_dir(version) / WEIGHTS_FILE).exists() for version in versions), "through the disk"
    workspace.prl("down")
    assert workspace.processes() == []
