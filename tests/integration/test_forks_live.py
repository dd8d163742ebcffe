"""A fork, a sweep, and a run that is trained longer, in a workspace that works, with all its real daemons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from prime_rl.contract.layout import RunDir
from prime_rl.contract.types import read_batch
from tests.system_support import Workspace, closed, make_workspace, read_metrics

# What these guard in every run: tests/unit/test_trainer_warm_start.py, test_orchestrator_first_version.py,
# test_daemons_forks.py and test_daemons_sweeps.py.
pytestmark = pytest.mark.release
# Else a batch goes when a checkpoint covers it.
KEPT = ("--set", "ckpt.keep_rollouts=true")


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, untaught_model: Path) -> Iterator[Workspace]:
    """A run of two steps, a fork of it and a sweep over two seeds that starts from the fork, all finished."""
    workspace = make_workspace(tmp_path_factory.mktemp("forks"), untaught_model)
    for _ in closed(workspace):
        workspace.up()
        workspace.prl("runs", "add", str(workspace.write_run("a", max_steps=2)))
        workspace.wait(lambda: workspace.state("run_a") == "finished", "run_a to finish")
        workspace.prl("runs", "fork", "run_a", "--id", "run_b", *KEPT, "--set", "max_steps=1")
        base = workspace.write_run("c", max_steps=1)
        base.write_text(base.read_text() + '[init]\nfrom = "run_a@v2"\n')
        workspace.prl("runs", "sweep", str(base), *KEPT, "--set", "seed=1,2")
        for run_id in ("run_b", "run_c-seed1", "run_c-seed2"):
            workspace.wait(lambda run_id=run_id: workspace.state(run_id) == "finished", f"{run_id} to finish")
        workspace.prl("down")
        yield workspace


def weights(run: RunDir, step: int) -> dict[str, bytes]:
    tensors = load_file(run.broadcast_dir(step) / "adapter_model.safetensors")
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("run_id", ["run_b", "run_c-seed1", "run_c-seed2"])
def test_version_0_is_the_source_and_its_rollouts_come_from_it(lived: Workspace, run_id: str) -> None:
    source, run = lived.run_dir("run_a"), lived.run_dir(run_id)
    assert weights(run, 0) == weights(source, 2)
    samples = read_batch(run.rollout_file(1)).samples
    assert {sample.policy_version for sample in samples} == {0}
    has_learned = any(sample.advantage for sample in samples)  # a batch whose rewards are equal changes nothing
    assert (weights(run, 1) != weights(run, 0)) == has_learned


def test_what_inference_sampled_from_is_what_the_trainer_has(lived: Workspace) -> None:
    """Had the base model answered, its log-probabilities would differ from those of the trainer's version 0."""
    forked = read_metrics(lived.run_dir("run_b").trainer_metrics)[0]["mismatch_kl"]
    first = read_metrics(lived.run_dir("run_a").trainer_metrics)[0]["mismatch_kl"]
    assert abs(forked) <= abs(first) * 10 + 1e-6


def test_a_finished_run_is_trained_longer_by_one_command_evaluated_and_served(workspace: Workspace) -> None:
    workspace.up()
    run = workspace.run_dir("run_a")
    workspace.prl("runs", "add", str(workspace.write_run("a", max_steps=2)))
    workspace.wait(lambda: workspace.state("run_a") == "finished", "run_a to finish")
    second = weights(run, 2)
    said: list[str] = []

    def is_set() -> bool:
        done = workspace.prl("runs", "set", "run_a", "max_steps=3", check=False)
        assert done.returncode == 0 or "did not release it yet: try again" in done.stderr, done
        said.append(done.stdout)
        return done.returncode == 0

    workspace.wait(is_set, "run_a to be released, and to get more steps")
    assert "run_a continues from step 2" in said[-1]
    workspace.wait(lambda: workspace.state("run_a") == "finished", "run_a to finish again")
    assert [line["step"] for line in read_metrics(run.trainer_metrics)] == [1, 2, 3]
    assert weights(run, 2) == second and (run.broadcast_dir(3) / "STABLE").exists()
    # On its own environment, beside the base model that it began with.
    found = workspace.json("eval", "base", "run_a@v0", "run_a", "-n", "4", "-k", "2")["results"]
    assert [each["target"] for each in found] == ["base", "run_a@v0", "run_a@v3"]
    assert all((each["num_rollouts"], each["num_failed"]) == (8, 0) for each in found), found
    assert found[0]["figures"] == found[1]["figures"]
    workspace.prl("serve", "run_a")
    assert workspace.json("status")["inference"][0]["adapters"] in ([], ["run_a@v3"])  # the file is a moment behind
    answer = workspace.answer("run_a", "abc")
    workspace.prl("restart", "inference")
    workspace.wait(
        lambda: any(each["state"] == "serving" for each in workspace.json("status")["inference"]),
        "inference to come back",
    )
    assert workspace.answer("run_a", "abc") == answer and workspace.json("serve")["served"] == ["run_a@v3"]
    assert workspace.json("serve", "--stop", "run_a")["served"] == []
