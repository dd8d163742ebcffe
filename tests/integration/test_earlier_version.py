"""A workspace that an earlier version left behind is taken up where it was.

`workspace_0.2.0.tar.gz` was recorded with that version, on a model of the shape SMALL with one slot: run_done had made
its 2 updates, run_waits was added while run_goes trained, and all processes were killed as version 5 of run_goes
appeared. Its newest checkpoint is that of step 4, its batches are those of the updates 5 and 6. In its texts the folder
is `/recorded` and the machine `recorder`.
"""

from __future__ import annotations

import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.contract.layout import list_rollout_steps, list_steps
from tests.system_support import Workspace, closed, read_metrics

RECORDED = Path(__file__).parent.parent / "files" / "workspace_0.2.0.tar.gz"
MAX_STEPS = {"run_done": 2, "run_goes": 12, "run_waits": 4}


@pytest.fixture
def workspace(tmp_path: Path, base_model: Path) -> Iterator[Workspace]:
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    there = {"/recorded/model": str(base_model), "/recorded": str(tmp_path), '"recorder"': f'"{socket.gethostname()}"'}
    for path in (path for path in tmp_path.rglob("*") if path.suffix in (".toml", ".json", ".pid")):
        text = path.read_text(encoding="utf-8")
        for old, new in there.items():
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
    yield from closed(Workspace(tmp_path / "workspace", tmp_path / "system.toml", base_model))


@pytest.mark.slow
def test_runs_of_version_0_2_0_go_on_and_lose_nothing(workspace: Workspace) -> None:
    runs = {run_id: workspace.run_dir(run_id) for run_id in MAX_STEPS}
    goes = runs["run_goes"]
    assert list_steps(goes.checkpoints, stable_only=True) == [4] and list_rollout_steps(goes) == [5, 6]
    before = {run_id: read_metrics(run.trainer_metrics) for run_id, run in runs.items() if run_id != "run_waits"}
    batches = read_metrics(goes.orchestrator_metrics)
    seen = {run_id: (run["state"], run["step"]) for run_id, run in workspace.runs().items()}
    assert seen == {"run_done": ("finished", 2), "run_goes": ("stopped", 5), "run_waits": ("stopped", 0)}

    workspace.prl("up", "--output-dir", str(workspace.output_dir))  # with the settings that it was started with
    workspace.wait(lambda: all(run["state"] == "finished" for run in workspace.runs().values()), "all runs to finish")
    for run_id, run in runs.items():
        for path in (run.trainer_metrics, run.orchestrator_metrics):
            assert [line["step"] for line in read_metrics(path)] == list(range(1, MAX_STEPS[run_id] + 1))
        assert list_steps(run.broadcast, stable_only=True)[-1] == MAX_STEPS[run_id]
        assert list_steps(run.checkpoints, stable_only=True)[-1] == MAX_STEPS[run_id]
    assert read_metrics(runs["run_done"].trainer_metrics) == before["run_done"], "it was finished"
    assert read_metrics(goes.trainer_metrics)[:4] == before["run_goes"][:4]
    assert read_metrics(goes.orchestrator_metrics)[:6] == batches, "batches on disk are trained and not made again"
    assert read_metrics(goes.trainer_metrics)[4]["tokens"] == before["run_goes"][4]["tokens"]
    shown = workspace.json("runs", "show", "run_goes")
    assert (shown["run"]["state"], shown["run"]["step"]) == ("finished", 12)
    workspace.prl("down")
    assert workspace.processes() == []
