"""The whole system on real vLLM: two tenants, and the proof that each published version is the one that sampled."""

from __future__ import annotations

from typing import Any

import pytest

from prime_rl.contract.layout import RunDir, list_rollout_steps
from prime_rl.contract.types import read_batch
from tests.learning import load_policy, worst_difference
from tests.system_support import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
# (max_async_level, steps, other settings) of each run. Of so few steps every version but the base is still there.
RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "run_a": (1, 4, {}),
    "run_b": (0, 3, {"env": "upper-case", "rank": 4}),
}
# Between logprobs of one policy on two paths, in float32. Another policy is further off in some sample, not in each.
TOLERANCE = 2e-3


def test_two_runs_on_vllm_and_every_version_is_the_one_that_generated(vllm_workspace: Workspace) -> None:
    workspace = vllm_workspace
    workspace.up()
    for run_id, (level, num_steps, settings) in RUNS.items():
        name = run_id.removeprefix("run_")
        config = workspace.write_run(name, max_steps=num_steps, max_async_level=level, **settings)
        config.write_text(config.read_text() + "keep_rollouts = true\n")  # of [ckpt]
        workspace.prl("runs", "add", str(config))
    for run_id in RUNS:
        workspace.wait(lambda run_id=run_id: workspace.state(run_id) == "finished", f"{run_id} to finish on vLLM")
    workspace.prl("down")
    assert workspace.processes() == []

    for run_id, (max_async_level, num_steps, _) in RUNS.items():
        run = RunDir(workspace.output_dir / run_id)
        assert list_rollout_steps(run) == list(range(1, num_steps + 1))
        folders = {0: None} | {version: run.broadcast_dir(version) for version in range(1, num_steps)}
        policies = {version: load_policy(workspace.model, folder) for version, folder in folders.items()}
        from_base: dict[int, float] = {}
        for step in range(1, num_steps + 1):
            for sample in read_batch(run.rollout_file(step)).samples[::4]:
                version = sample.policy_version
                assert max(0, step - 1 - max_async_level) <= version <= step - 1
                wrong_by = worst_difference(policies[version], sample)
                assert wrong_by < TOLERANCE, f"{run_id} step {step}: not sampled from v{version}"
                from_base[version] = max(from_base.get(version, 0.0), worst_difference(policies[0], sample))
        # With a level of one a version may be skipped: two are certain.
        assert len(from_base) >= (2 if max_async_level else 3)
        idle = [version for version, difference in from_base.items() if version and difference < TOLERANCE]
        assert not idle, f"adapters {idle} of {run_id} do nothing: the base would have passed for them"
