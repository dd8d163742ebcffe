"""What a run writes: the state of a checkpoint before the batch, which lets the trainer complete it; all of it once."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from prime_rl.contract import files
from prime_rl.contract.layout import RunDir, list_rollout_steps
from prime_rl.contract.types import JoinRequest, TrainingBatch
from prime_rl.orchestrator import batch as batch_module
from prime_rl.orchestrator import report, share
from prime_rl.orchestrator.batch import publish_batch
from prime_rl.orchestrator.guard import Ending
from tests.orchestrator_support import make_run, run_config
from tests.unit.test_orchestrator_pure import a_group
from tests.unit.test_orchestrator_run import Workspace, lines, workspace  # noqa: F401


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


async def test_what_the_disk_does_not_take_is_held_and_written_once(
    workspace: Workspace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches, states, figures, and that the run has ended: each at its third try."""
    tried: list[str] = []

    def fails_twice(module: Any, name: str) -> None:
        real = getattr(module, name)

        def write(*args: Any) -> None:
            tried.append(what := f"{name} {args[1].step if isinstance(args[1], TrainingBatch) else args[1]}")
            if tried.count(what) < 3:
                raise OSError(errno.ENOSPC, "No space left on device", str(workspace.run.metrics / "part"))
            real(*args)

        monkeypatch.setattr(module, name, write)

    monkeypatch.setattr(files, "RETRY_S", 0.001)
    for module, name in ((batch_module, "save_state"), (batch_module, "publish_batch"), (report, "write_metrics")):
        fails_twice(module, name)
    fails_twice(Ending, "write")
    await workspace.run_to_the_end(max_steps=4, ckpt={"interval": 1}, budget={"max_tokens": 1})
    assert workspace.status.state == "finished", workspace.status.reason
    whole = (workspace.run.finished.read_text(), list_rollout_steps(workspace.run), len(lines(workspace.run)))
    assert whole == (str(workspace.status.reason), [1], 1)
    words = f"write {whole[0]}"
    assert Counter(tried) == dict.fromkeys(("save_state 1", "publish_batch 1", "write_metrics 1", words), 3)
