"""Runs and requests that do harm beside two good runs of a living system: the good ones notice nothing.

Both reach their last step; their weights are those that their batches lead to in a trainer of their own; no daemon was
started more than once again; and each guilty run ends by itself, with a reason that names it. Quicker, each at the
process that it attacks: `test_inference_engine`, `test_inference_sampling`, `test_trainer_faults`, `test_envs_run`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from prime_rl.contract.status import InferenceStatus, read_status
from tests.patience import PATIENCE_S
from tests.system_support import Workspace, closed, make_workspace

NUM_STEPS = 8
GOOD = ("run_good_a", "run_good_b")
# Of float32, where AdamW would divide what vLLM's batches round otherwise by a gradient near zero (docs/isolation.md).
TOLERANCE = 1e-5
SGD = ("lr = 0.003", 'type = "sgd"\nlr = 1.0')
# The largest weight of B, which begins at zero: an adapter that stays as it is would equal any other.
MOVED = 1e-2
ENDED = {"failed", "evicted", "invalid", "finished"}
SPARSE_BYTES = 2 << 30


@pytest.fixture
def neighbours(request: pytest.FixtureRequest, tmp_path: Path, untaught_model: Path) -> Iterator[Workspace]:
    """A workspace with an engine and a slot for each run; the good runs keep their batches."""
    yield from closed(make_workspace(tmp_path, untaught_model, slots=len(GOOD) + len(HOSTILE), engine=request.param))


def config(workspace: Workspace, name: str, *changes: tuple[str, str], max_steps: int = NUM_STEPS) -> Path:
    """The TOML file of a run, with some of its lines changed."""
    path = workspace.write_run(name, max_steps=max_steps, seed=ord(name[-1]))
    text = path.read_text().replace("[ckpt]", "[ckpt]\nkeep_rollouts = true")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def add_good(workspace: Workspace) -> None:
    workspace.up()
    for run_id in GOOD:
        workspace.prl("runs", "add", str(config(workspace, run_id.removeprefix("run_"), SGD)))


def put_bad(workspace: Workspace, run_id: str, *changes: tuple[str, str]) -> None:
    """Add a guilty run as somebody would who does not ask `prl` first: its file lands in its folder."""
    path = config(workspace, run_id.removeprefix("run_"), *changes)
    control = workspace.run_dir(run_id).control
    control.mkdir(parents=True)
    part = control / "part"
    part.write_text(path.read_text())
    part.rename(workspace.run_dir(run_id).orch_toml)


def check_good(workspace: Workspace, *, daemons: tuple[str, ...] = ("trainer", "inference", *GOOD)) -> None:
    """The good runs reach their end with the weights of undisturbed ones, and nothing had to be started twice again."""
    seen: dict[str, int] = {}

    def are_done() -> bool:
        for daemon in workspace.json("status")["daemons"]:
            seen[daemon["name"]] = max(daemon["num_restarts"], seen.get(daemon["name"], 0))
        runs = workspace.runs()
        assert not any(runs[run_id]["state"] in ENDED - {"finished"} for run_id in GOOD), runs
        return all((runs[run_id]["state"], runs[run_id]["run_idx"]) == ("finished", None) for run_id in GOOD)

    workspace.wait(are_done, "both good runs to reach their last step")
    assert all(workspace.runs()[run_id]["step"] == NUM_STEPS for run_id in GOOD)
    assert {name: seen.get(name, 0) for name in daemons if seen.get(name, 0) > 1} == {}
    verdicts = workspace.selfcheck(f"--tolerance={TOLERANCE}", *(f"--run={run_id}" for run_id in GOOD))
    assert verdicts.keys() == set(GOOD)
    for each in verdicts.values():
        assert each["reached"]["ok"] and each["num_steps"] == NUM_STEPS, each
    for run_id in GOOD:
        adapter = load_file(workspace.run_dir(run_id).broadcast_dir(NUM_STEPS) / "adapter_model.safetensors")
        moved = max(float(tensor.abs().max()) for name, tensor in adapter.items() if "lora_B" in name)
        assert moved > MOVED, f"{run_id}: {moved:g}"


def reason_of(workspace: Workspace, run_id: str) -> str:
    """Wait until a guilty run has ended, and return the reason that people are shown."""
    workspace.wait(lambda: workspace.state(run_id) in ENDED, f"{run_id} to end by itself")
    found = workspace.runs()[run_id]
    assert found["state"] != "finished", found
    return str(found["reason"])


def inference_url(workspace: Workspace) -> str:
    status = read_status(workspace.paths.inference_status, InferenceStatus)
    assert status is not None and status.base_url
    return status.base_url


LR = ("lr = 0.003", "lr = 1e15")
TEMPERATURE = ("max_tokens = 12", "max_tokens = 12\ntemperature = 1e-39")
BATCH_SIZE = ("batch_size = 16", "batch_size = 4000000")
TOO_SHORT = ("seed = ", "seq_len = 4\nseed = ")
# By run: the change of its config, and what the reason must name.
HOSTILE: dict[str, tuple[tuple[str, str] | None, str]] = {
    "run_bad_rate": (LR, r"not finite.*lr|lr.*not finite"),  # it ruins its weights
    "run_bad_temperature": (TEMPERATURE, r"sampling\.temperature"),  # no float can divide by it
    "run_bad_length": (TOO_SHORT, r"seq_len"),  # prompts are longer than its sequences
    "run_bad_batch": (BATCH_SIZE, r"batch_size"),  # no trainer can hold it
    "run_bad_file": (None, r"rollouts/step_1.*bytes|bytes.*rollouts/step_1"),  # of two gigabytes
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "neighbours", ["embedded", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.release])], indirect=True
)
def test_runs_and_requests_that_do_harm_end_alone(neighbours: Workspace) -> None:
    """All at once, from the start, beside the good runs until those are through."""
    file = neighbours.run_dir("run_bad_file").rollout_file(1)
    file.parent.mkdir(parents=True)
    with file.open("wb") as made:  # a sparse one, which takes no disk
        made.truncate(SPARSE_BYTES)
    for run_id, (change, _) in HOSTILE.items():
        put_bad(neighbours, run_id, *([change] if change else []))
    add_good(neighbours)
    attack(neighbours)
    for run_id, (_, named) in HOSTILE.items():
        reason = reason_of(neighbours, run_id)
        assert re.search(named, reason), f"{run_id}: {reason}"
    check_good(neighbours)


def attack(workspace: Workspace) -> None:
    """Ask for what once ended the engine, until the good runs are through; each is refused with the field's name."""
    hostile = [
        ({"temperature": 1e-320}, "temperature"),
        ({"temperature": 1e-39}, "temperature"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty"),
        ({"prompt": "x" * 2_000_000}, "prompt"),
        ({"prompt": ["x" * 2_000_000] * 8}, "prompt"),
    ]
    url = inference_url(workspace)
    while True:
        for fields, named in hostile:
            body = {"model": str(workspace.model), "prompt": "x", "max_tokens": 4, **fields}
            answer = httpx.post(f"{url}/completions", json=body, timeout=PATIENCE_S)
            assert answer.status_code in (400, 413), answer.text
            assert named in answer.text or "long" in answer.text, answer.text
        if all(workspace.runs()[run_id]["state"] == "finished" for run_id in GOOD):
            return
