"""What the launcher asks of Slurm, with commands that stand in for it. Over a real Slurm: `test_slurm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemons.launchers import slurm
from daemons.launchers.base import LaunchError
from daemons.launchers.slurm import Allocation, Slurm, run_slurm
from daemons.specs import DaemonSpec
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from tests.patience import PATIENCE_S


def put_command(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that are found before all others: a job with one node, on which each step ends at once."""
    folder = tmp_path / "bin"
    folder.mkdir()
    answers = {"squeue": "echo node1", "scontrol": "echo node1", "sinfo": "echo node1 alloc", "srun": "exit 0"}
    for name, body in answers.items():
        put_command(folder, name, body)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    for name in ("COMMAND_TIMEOUT_S", "FIRST_TIMEOUT_S"):
        monkeypatch.setattr(slurm, name, PATIENCE_S)
    return folder


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'slurm_load_jobs error: Invalid job id' >&2; echo more >&2", "slurm_load_jobs error: Invalid job id"),
        ("echo >&2; echo on standard output", "on standard output"),
        ("true", "exit code 3"),
    ],
)
def test_a_command_that_fails_is_told_by_its_first_line_or_exit_code(commands: Path, body: str, said: str) -> None:
    put_command(commands, "squeue", f"{body}; exit 3")
    with pytest.raises(LaunchError) as caught:
        run_slurm("squeue", "-h")
    assert str(caught.value) == f"squeue -h failed: {said}"


def test_slurm_has_longer_to_answer_the_first_question(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "COMMAND_TIMEOUT_S", 0.0)  # nothing answers in no time
    monkeypatch.setattr(slurm, "NODES_KNOWN_S", 0.0)
    output = OutputDir(tmp_path / "workspace")
    output.daemons.mkdir(parents=True)
    launcher = Slurm(output, Allocation("7", "0"))
    spec = DaemonSpec("inference", ("true",), output.log("inference"))
    assert launcher.start(spec).ref == "7 0 node1 "
    with pytest.raises(LaunchError, match=r"^squeue did not answer within 0 s: see whether slurmctld runs$"):
        launcher.start(spec)
    wait_for(launcher.has_news, "srun to end", timeout_s=PATIENCE_S)
