"""The whole system with the embedded engine: real daemons, real HTTP, real training, real kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from prime_rl.contract.layout import list_steps
from prime_rl.contract.status import DaemonStatus, InferenceStatus, TrainerStatus, read_status
from tests.metrics_support import undocumented
from tests.patience import PATIENCE_S
from tests.system_support import Workspace, read_metrics

pytestmark = pytest.mark.release
CANARY = "sk-canary-that-nobody-may-see"


def test_three_runs_on_two_slots_one_evicted_one_deleted(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an API key from a file, which is asked for and is seen nowhere."""
    key = tmp_path / "api.key"
    key.write_text(CANARY + "\n")
    key.chmod(0o600)
    monkeypatch.setenv("PRL_API_KEY_FILE", str(key))
    workspace.up()
    inference = read_status(workspace.paths.inference_status, InferenceStatus)
    assert inference is not None
    assert httpx.get(f"{inference.base_url}/models", trust_env=False, timeout=PATIENCE_S).status_code == 401
    workspace.prl("runs", "add", str(workspace.write_run("a", max_steps=6)))
    # On a busy machine it may be done before it is looked at.
    workspace.wait(lambda: workspace.state("run_a") in ("active", "finished"), "run_a to be admitted")
    workspace.prl("runs", "add", str(workspace.write_run("b", max_steps=1000, env="sort-letters", rank=4)))
    workspace.wait(lambda: workspace.state("run_b") == "active", "run_b to be admitted")
    workspace.prl("runs", "add", str(workspace.write_run("c", max_steps=1000, env="upper-case")))
    assert workspace.state("run_c") in ("waiting", "active")

    workspace.wait(lambda: (workspace.runs()["run_b"]["step"] or 0) >= 1, "run_b to train")
    workspace.prl("runs", "evict", "run_b", "--reason", "makes room for a test")
    workspace.wait(lambda: workspace.state("run_c") == "active", "run_c to be admitted")
    workspace.wait(lambda: workspace.state("run_a") == "finished", "run_a to finish")
    evicted = workspace.runs()["run_b"]
    assert (evicted["state"], evicted["reason"]) == ("evicted", "makes room for a test")

    workspace.wait(lambda: (workspace.runs()["run_c"]["step"] or 0) >= 1, "run_c to train")
    refused = workspace.prl("runs", "delete", "run_c", check=False)
    assert refused.returncode == 1 and "run_c" in refused.stderr
    workspace.prl("runs", "delete", "run_c", "--yes", "--wait", str(PATIENCE_S))
    assert set(workspace.runs()) == {"run_a", "run_b"}
    assert not (workspace.output_dir / "run_c").exists()

    lines = read_metrics(workspace.run_dir("run_a").trainer_metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert undocumented("trainer", lines) == set()
    assert undocumented("orchestrator", read_metrics(workspace.run_dir("run_a").orchestrator_metrics)) == set()
    assert list_steps(workspace.run_dir("run_a").checkpoints, stable_only=True)[-1] == 6
    status = read_status(workspace.paths.trainer_status, TrainerStatus)
    assert status is not None and status.runs == {}

    told = [
        workspace.prl(*words, "--json").stdout for words in (("status",), ("runs", "list"), ("runs", "show", "run_a"))
    ]
    assert told and not any(CANARY in text for text in told)
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if CANARY in " ".join(p.info["cmdline"] or [])]
    workspace.prl("down")
    files = [path for path in workspace.output_dir.rglob("*") if path.is_file()]
    assert len(files) > 30 and not [path for path in files if CANARY.encode() in path.read_bytes()]
    assert workspace.processes() == []
    assert workspace.json("status")["daemons"] != []
    assert workspace.prl("down").returncode == 0, "down is idempotent"


def test_nothing_survives_a_killed_supervisor_and_down(workspace: Workspace) -> None:
    workspace.up()
    workspace.prl("runs", "add", str(workspace.write_run("a", max_steps=1000)))
    workspace.wait(lambda: (workspace.runs()["run_a"]["step"] or 0) >= 1, "run_a to train")
    supervisor = read_status(workspace.paths.daemon_status("supervisor"), DaemonStatus)
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    workspace.wait(lambda: not psutil.pid_exists(supervisor.pid), "the supervisor to be gone")
    workspace.prl("down")
    assert workspace.processes() == []


def test_a_killed_trainer_comes_back_and_the_run_goes_on(workspace: Workspace) -> None:
    workspace.up()
    workspace.prl("runs", "add", str(workspace.write_run("a", max_steps=40)))
    workspace.wait(lambda: (workspace.runs()["run_a"]["step"] or 0) >= 3, "run_a to train")
    trainer = read_status(workspace.paths.trainer_status, TrainerStatus)
    assert trainer is not None
    os.kill(trainer.pid, signal.SIGKILL)

    def num_restarts() -> int:
        daemon = read_status(workspace.paths.daemon_status("trainer"), DaemonStatus)
        return daemon.num_restarts if daemon is not None else 0

    workspace.wait(lambda: num_restarts() >= 1, "the trainer to be started again")
    workspace.wait(lambda: workspace.state("run_a") == "finished", "run_a to finish after the trainer was killed")
    assert num_restarts() == 1
    assert list_steps(workspace.run_dir("run_a").broadcast, stable_only=True)[-1] == 40


def test_a_second_up_says_who_holds_the_workspace(workspace: Workspace) -> None:
    workspace.up()
    assert "already running with these settings" in workspace.prl("up", "@", str(workspace.system_toml)).stdout
    second = workspace.prl("up", "@", str(workspace.system_toml), "--max_concurrent_runs", "5", check=False)
    assert second.returncode == 1
    supervisor = read_status(workspace.paths.daemon_status("supervisor"), DaemonStatus)
    assert supervisor is not None and str(supervisor.pid) in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
