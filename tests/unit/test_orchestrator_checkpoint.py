"""The state of a checkpoint is there before the batch, which lets the trainer complete that checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.contract.layout import RunDir
from prime_rl.contract.types import JoinRequest, TrainingBatch
from prime_rl.orchestrator import batch as batch_module
from prime_rl.orchestrator import share
from prime_rl.orchestrator.batch import publish_batch
from tests.orchestrator_support import make_run, run_config
from tests.unit.test_orchestrator_pure import a_group
from tests.unit.test_orchestrator_run import Workspace, workspace  # noqa: F401


@pytest.fixture
def was_there(monkeypatch: pytest.MonkeyPatch) -> dict[int, bool]:
    """Whether the state of a step was there when its batch was published."""
    seen: dict[int, bool] = {}

    def watched(run: RunDir, batch: TrainingBatch) -> None:
        seen[batch.step] = (run.orchestrator_checkpoint(batch.step) / "state.json").exists()
        publish_batch(run, batch)

    for module in (batch_module, share):
        monkeypatch.setattr(module, "publish_batch", watched)
    return seen


async def test_a_run_writes_the_state_of_a_checkpoint_before_its_batch(
    workspace: Workspace,  # noqa: F811
    was_there: dict[int, bool],
) -> None:
    await workspace.run_to_the_end(max_steps=3, ckpt={"interval": 2})
    assert was_there == {1: False, 2: True, 3: True}


def test_a_node_of_a_group_does_so_too(tmp_path: Path, was_there: dict[int, bool]) -> None:
    run = make_run(tmp_path)
    for made in (run.metrics, run.checkpoints):
        made.mkdir()
    request = JoinRequest(run=str(run.path), split="train", sources={}, steps=[1, 2, 3], result="")
    config = run_config(tmp_path, max_steps=3, ckpt={"interval": 2})
    share._join_train(request, run, config, [a_group(index) for index in range(3)], None)
    assert was_there == {1: False, 2: True, 3: True}
