"""Daemons as steps of a job on a real Slurm of three nodes, all on this host."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus, read_status
from tests.daemons_support import ROOT, Prl, fake_workspace
from tests.patience import PATIENCE_S
from tests.slurm_support import MISSING, WHY_SKIPPED, SlurmCluster, slurm_cluster

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(MISSING), reason=WHY_SKIPPED),
]
ACTS = ["exit_code", "two_nodes_adopted_and_stopped", "stubborn_is_killed", "node_down_then_what_is_left"]


SYSTEM_ACTS = ["up", "adopted_by_the_next_supervisor", "restarted_after_a_kill", "down"]


def test_a_daemon_is_started_adopted_stopped_and_killed_and_a_lost_node_is_seen(tmp_path: Path) -> None:
    """Each act is a function of tests/slurm_main.py."""
    with slurm_cluster() as cluster:
        run_job(cluster, tmp_path, "tests.slurm_main", ACTS)
        wait_for(lambda: not cluster.processes(), "no process to be left", timeout_s=PATIENCE_S)
    assert os.listdir(tmp_path / "workspace" / "daemons") == ["starts"]


def test_a_workspace_is_adopted_after_the_death_of_its_supervisor_and_down_leaves_nothing(tmp_path: Path) -> None:
    """Each act is a function of tests/slurm_system_main.py."""
    with slurm_cluster() as cluster:
        run_job(cluster, tmp_path, "tests.slurm_system_main", SYSTEM_ACTS)
        wait_for(lambda: not cluster.processes(), "no process to be left", timeout_s=PATIENCE_S)


def test_up_outside_an_allocation_submits_a_job_and_down_ends_it(tmp_path: Path) -> None:
    prl = fake_workspace(tmp_path)
    with slurm_cluster() as cluster:
        prl.env["SLURM_CONF"] = str(cluster.conf)
        engine = ("--deployment.engine", "slurm", "--supervisor.drain_s", "3")
        told = prl(*prl.up_args(*engine)).stdout
        assert "submitted job 1" in told and "(RUNNING, node1)" in told and "\nup: " in told, told
        for name in ("trainer", "inference"):
            handle = status(prl, name).handle
            assert handle is not None and handle.engine == "slurm"
        assert prl(*prl.up_args(*engine)).stdout.startswith("already running with these settings: ")
        refused = prl(*prl.up_args(*engine, "--max_concurrent_runs", "3"), exit_code=1).stderr
        assert refused.count("\n") == 1 and "already" in refused and "prl down" in refused, refused
        prl("runs", "add", str(prl.run_file()))
        prl.wait_state("run_reverse", "finished")
        assert "ending job 1 (RUNNING" in prl("down").stdout
        assert cluster.job_state("1") == "" and status(prl, "trainer").state == "stopped"
        assert "nothing is running" in prl("down").stdout

        cluster.call("scontrol", "update", f"NodeName={','.join(cluster.nodes)}", "State=DRAIN", "Reason=test")
        with prl.start("up") as waiting:
            wait_for(lambda: cluster.job_state("2") == "PENDING", "the second job to wait", timeout_s=PATIENCE_S)
            waiting.send_signal(signal.SIGINT)
            out, _ = waiting.communicate(timeout=PATIENCE_S)
        assert waiting.returncode == 130 and "ending job 2 (PENDING" in out, out
        assert cluster.job_state("2") == ""
        wait_for(lambda: not cluster.processes(), "no process to be left", timeout_s=PATIENCE_S)


def status(prl: Prl, name: str) -> DaemonStatus:
    found = read_status(OutputDir(prl.output_dir).daemon_status(name), DaemonStatus)
    assert found is not None
    return found


def run_job(cluster: SlurmCluster, folder: Path, module: str, acts: list[str]) -> None:
    """Run a module as the batch script of a job of three nodes; it must do all of its acts."""
    log, script = folder / "job.log", folder / "job.sh"
    command = shlex.join([sys.executable, "-m", module, str(folder / "workspace")])
    script.write_text(f"#!/bin/sh\ncd {shlex.quote(str(ROOT))}\nexec {command}\n")
    job = cluster.call("sbatch", "--parsable", "-N3", "-k", "--no-requeue", "-o", str(log), str(script)).strip()
    wait_for(lambda: cluster.job_state(job) == "", f"job {job} to end", timeout_s=4 * PATIENCE_S)
    wait_for(log.exists, f"the log of job {job}", timeout_s=PATIENCE_S)
    said = log.read_text()
    assert [f"done: {act}" for act in acts] == [line for line in said.splitlines() if line.startswith("done:")], said
