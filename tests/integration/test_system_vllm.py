"""The whole system on real vLLM: two tenants, and the proof that each published version is the one that sampled."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch

from prime_rl.contract.layout import RunDir, list_rollout_steps, list_steps, step_name
from prime_rl.contract.types import TrainingSample, read_batch
from tests.learning import load_policy, token_logprobs
from tests.system_support import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
NUM_STEPS = 4
# Between logprobs of one policy on two paths, in float32. Another policy is further off in some sample, not in each.
TOLERANCE = 2e-3


class Recorder:
    """Keeps a copy of every batch and every published adapter; the system removes them when it needs them no more."""

    def __init__(self, runs: list[RunDir], folder: Path) -> None:
        self.runs, self.folder = runs, folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._record)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def batches(self, run_id: str) -> dict[int, Path]:
        return {int(path.stem): path for path in sorted((self.folder / run_id).glob("*.msgpack"))}

    def adapter(self, run_id: str, version: int) -> Path:
        return self.folder / run_id / step_name(version)

    def _record(self) -> None:
        while not self._stop.is_set():
            self._copy()
            self._stop.wait(0.05)
        self._copy()

    def _copy(self) -> None:
        for run in self.runs:
            target = self.folder / run.run_id
            target.mkdir(parents=True, exist_ok=True)
            for step in list_rollout_steps(run):
                if not (target / f"{step}.msgpack").exists():
                    shutil.copy(run.rollout_file(step), target / f"{step}.msgpack")
            for step in list_steps(run.broadcast, stable_only=True):
                if not (target / step_name(step)).exists():
                    shutil.copytree(run.broadcast_dir(step), target / step_name(step))


@torch.no_grad()
def worst_difference(model: torch.nn.Module, sample: TrainingSample) -> float:
    mask_T = torch.tensor(sample.loss_mask)[1:]
    recorded_T = torch.tensor(sample.logprobs)[1:]
    return float((token_logprobs(model, sample) - recorded_T)[mask_T].abs().max())


def test_two_runs_on_vllm_and_every_version_is_the_one_that_generated(
    vllm_workspace: Workspace, tmp_path: Path
) -> None:
    workspace = vllm_workspace
    workspace.up()
    run_ids = ["run_a", "run_b"]
    recorder = Recorder([RunDir(workspace.output_dir / run_id) for run_id in run_ids], tmp_path / "recorded")
    try:
        workspace.prl("runs", "add", str(workspace.write_run("a", max_steps=NUM_STEPS, max_async_level=1)))
        workspace.prl(
            "runs",
            "add",
            str(workspace.write_run("b", max_steps=NUM_STEPS, max_async_level=0, env="upper-case", rank=4)),
        )
        for run_id in run_ids:
            workspace.wait(lambda run_id=run_id: workspace.state(run_id) == "finished", f"{run_id} to finish on vLLM")
        workspace.prl("down")
    finally:
        recorder.stop()
    assert workspace.processes() == []

    for run_id, max_async_level in zip(run_ids, (1, 0), strict=True):
        batches = recorder.batches(run_id)
        assert sorted(batches) == list(range(1, NUM_STEPS + 1))
        folders = {0: None} | {version: recorder.adapter(run_id, version) for version in range(1, NUM_STEPS)}
        policies = {version: load_policy(workspace.model, folder) for version, folder in folders.items()}
        from_base: dict[int, float] = {}
        for step, path in batches.items():
            for sample in read_batch(path).samples[::4]:
                version = sample.policy_version
                assert max(0, step - 1 - max_async_level) <= version <= step - 1
                wrong_by = worst_difference(policies[version], sample)
                assert wrong_by < TOLERANCE, f"{run_id} step {step}: not sampled from v{version}"
                from_base[version] = max(from_base.get(version, 0.0), worst_difference(policies[0], sample))
        assert len(from_base) >= 3
        idle = [version for version, difference in from_base.items() if version and difference < TOLERANCE]
        assert not idle, f"adapters {idle} of {run_id} do nothing: the base would have passed for them"
