"""The files in `deploy/` as far as one machine can tell, and a two-rank trainer under torchrun in a real workspace."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from daemons import torchrun
from daemons.commands.up import choose_system
from prime_rl.contract.status import TrainerStatus, read_status
from tests.daemons_support import ROOT
from tests.system_support import Workspace

UNIT = ROOT / "deploy" / "systemd" / "prl@.service"
ENVIRONMENT = ROOT / "deploy" / "systemd" / "workspace.env.example"
SBATCH = ROOT / "deploy" / "slurm" / "prl.sbatch"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    prl = tmp_path / ".local" / "bin" / "prl"
    prl.parent.mkdir(parents=True)
    prl.symlink_to(sys.executable)
    shutil.copy(UNIT, tmp_path / "prl@.service")
    env = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = ["systemd-analyze", "--user", "--man=no", "verify", str(tmp_path / "prl@main.service")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "prl@" in line]) == (0, [])


def test_the_unit_starts_what_prl_understands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    system = tmp_path / "s.toml"
    system.write_text('[model]\nname = "m"\n')
    variables = dict(re.findall(r"^#?(\w+)=(.+)$", ENVIRONMENT.read_text(), re.MULTILINE))
    line = unit["Service"]["ExecStart"].replace("${PRL_SYSTEM}", str(system))
    words = shlex.split(line)
    assert words[:3] == ["%h/.local/bin/prl", "up", "--foreground"]
    monkeypatch.setenv("PRL_OUTPUT_DIR", variables["PRL_OUTPUT_DIR"])
    wanted = choose_system(words[3:], None).system
    assert str(wanted.output_dir) == variables["PRL_OUTPUT_DIR"]
    assert int(unit["Service"]["TimeoutStopSec"]) > 2 * wanted.supervisor.drain_s + 3 * wanted.supervisor.grace_s


def dry_run(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n")
    scontrol.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, **variables}
    return subprocess.run([str(SBATCH), "--dry-run"], capture_output=True, text=True, env=env)


def test_the_slurm_script_would_start_a_workspace_on_all_nodes(tmp_path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(SBATCH)]).returncode == 0
    (tmp_path / "s.toml").write_text('[model]\nname = "m"\n')
    names = {"PRL_SYSTEM": str(tmp_path / "s.toml"), "PRL_OUTPUT_DIR": str(tmp_path / "workspace")}
    job = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "TRAINER_GPUS": "2", "INFERENCE_GPUS": "6"}
    done = dry_run(tmp_path, **names, **job)
    assert done.returncode == 0, done.stderr
    head, others = (shlex.split(line) for line in done.stdout.splitlines())
    environ = dict(word.split("=", 1) for word in head[head.index("env") + 1 : head.index(sys.executable)])
    assert (environ["PRL_TRAINER_GPUS"], environ["CUDA_VISIBLE_DEVICES"]) == ("0,1", "2,3,4,5,6,7")
    wanted = choose_system(head[head.index("--foreground") + 1 :], None).system
    assert (wanted.inference.engine, wanted.inference.vllm.extra_args) == ("vllm", {"data_parallel_size": 6})
    ranks = "--nnodes 3 --nproc-per-node 2 --master-addr n1 --master-port 29500 --node-rank"
    rank_0 = torchrun.command(["@", "t.toml"], environ)
    assert f"{ranks} 0 -m prime_rl.trainer.train @ t.toml" in " ".join(rank_0)
    assert others[1:4] == ["--nodes=2", "--ntasks-per-node=1", "--exclude=n1"]
    config = tmp_path / "workspace" / "daemons" / "configs" / "trainer.toml"
    assert f"{ranks} $((SLURM_NODEID + 1)) -m prime_rl.trainer.train @ '{config}'" in others[-1]
    assert subprocess.run(["bash", "-n", "-c", others[-1]]).returncode == 0
    alone = dry_run(tmp_path, **names, SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="n1")
    assert len(alone.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PRL_OUTPUT_DIR": "/h"}, "PRL_SYSTEM must name"),
        ({"PRL_SYSTEM": "/s"}, "PRL_OUTPUT_DIR must name"),
        ({"PRL_SYSTEM": "/s", "PRL_OUTPUT_DIR": "/h'; touch owned; '"}, "only letters, digits"),
    ],
)
def test_the_slurm_script_says_what_is_missing(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    done = dry_run(tmp_path, **{"PRL_SYSTEM": "", "PRL_OUTPUT_DIR": "", **variables})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and message in done.stderr


@pytest.mark.slow
def test_a_workspace_whose_trainer_is_two_ranks_under_torchrun(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRL_MODULES", "trainer=daemons.torchrun")
    monkeypatch.setenv("PRL_TORCHRUN", "--standalone --nproc-per-node 2")
    workspace.prl("up", "@", str(workspace.system_toml), "--trainer.device", "cpu")
    trainer = read_status(workspace.paths.trainer_status, TrainerStatus)
    assert trainer is not None
    agent = psutil.Process(trainer.pid).parent()
    assert agent is not None and "torch.distributed.run" in agent.cmdline() and len(agent.children()) == 2
    workspace.prl("runs", "add", str(workspace.write_run("a", max_steps=2)))
    workspace.wait(lambda: workspace.state("run_a") == "finished", "run_a to finish")
    workspace.prl("down")
    assert workspace.processes() == [] and not agent.is_running()
