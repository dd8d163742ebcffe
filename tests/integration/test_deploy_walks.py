"""The walks of docs/deploy.md on a real Slurm and a real Ray of three nodes, word by word, in an empty folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from daemons.workspace_reader import read_workspace
from prime_rl.contract.layout import OutputDir
from tests import ray_support
from tests.integration.test_docs_commands import BIN, BLOCK, ROOT, bash, prl
from tests.slurm_support import MISSING, WHY_SKIPPED, slurm_cluster

PAGE = ROOT / "docs" / "deploy.md"


def walk(folder: Path, heading: str) -> str:
    """Run the commands of a chapter; what they printed."""
    chapter = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    commands = BLOCK.findall(chapter)
    assert "".join(commands).count("prl up") == 2, "a walk has a dry run and a start"
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    try:
        done = bash(folder, commands, environment)
        assert done.returncode == 0, done.stderr + done.stdout
    finally:
        prl(folder, "down", "--output-dir", "outputs/walk")
    check(folder / "outputs" / "walk")
    return done.stdout


def check(output_dir: Path) -> None:
    """The run has ended on a trainer of two nodes, beside a second server, and nothing runs any more."""
    workspace = read_workspace(output_dir)
    (run,) = workspace.runs
    assert (run.state, run.step) == ("finished", run.max_steps)
    assert {"trainer", "inference", "inference-1"} <= {daemon.name for daemon in workspace.daemons}
    assert workspace.trainer is None and not workspace.replicas and not workspace.supervisor_alive
    log = OutputDir(output_dir).log("trainer").read_text()
    assert "torch.distributed.run --nnodes 2" in log and "run_reverse takes slot 0" in log


@pytest.mark.slurm
@pytest.mark.release
@pytest.mark.xdist_group("slurm")
@pytest.mark.skipif(bool(MISSING), reason=WHY_SKIPPED)
def test_the_walk_on_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slurm_cluster() as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        said = walk(tmp_path, "Slurm")
    jobs = re.findall(r"^ *\d+ +(prl \w+) +R +2 ", said, re.MULTILINE)
    assert jobs == ["prl walk"], said


@pytest.mark.filterwarnings("default")
@pytest.mark.ray
@pytest.mark.release
@pytest.mark.xdist_group("ray")
@ray_support.MARKS[3]
def test_the_walk_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_support.ray_cluster() as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        said = walk(tmp_path, "Ray")
    assert "engine ray" in said
