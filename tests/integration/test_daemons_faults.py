"""Main loops that hang beside a heartbeat that goes on, and workspaces that are started again from another shell."""

from __future__ import annotations

import os
import signal
import time

import pytest

from daemons.workspace import DaemonView
from daemons.workspace_reader import read_workspace
from prime_rl.contract.files import wait_for
from prime_rl.utils.process import ProcessId
from tests.daemons_support import PATIENCE_S, Prl
from tui.model.snapshot import Snapshot, make_snapshot


def console(prl: Prl) -> Snapshot:
    return make_snapshot(read_workspace(prl.output_dir), {}, time.time())


@pytest.mark.release
def test_a_supervisor_whose_loop_hangs_is_stalled_for_all_and_down_ends_it_and_its_daemons(prl: Prl) -> None:
    prl.may_hang()
    prl.up()
    prl.wait_state("trainer", "running")
    trainer = prl.daemon("trainer").process
    prl.hang("daemons/supervisor.json")
    stalled = prl.wait_state("supervisor", "stalled")
    assert isinstance(stalled, DaemonView) and stalled.stalled_since is not None
    prl.wait_state("trainer", "lost")
    assert (prl.daemon("trainer").reason or "").startswith("its supervisor does not respond, ")
    told = {each["name"]: each for each in prl.json("status")["daemons"]}
    assert (told["supervisor"]["state"], told["supervisor"]["pid"]) == ("stalled", stalled.pid)
    text = " ".join(prl("status").stdout.split())
    assert f"supervisor stalled {stalled.pid} its main loop has not turned since " in text
    shown = {row.name: row for row in console(prl).daemons}["supervisor"]
    assert shown.state == "stalled" and shown.detail.startswith("its main loop has not turned since ")
    problems = {problem.name: problem for problem in console(prl).problems}
    assert problems["supervisor"].since is not None and problems["supervisor"].text.startswith("stalled: ")
    refused = prl("restart", "trainer", exit_code=1).stderr
    assert (
        "the supervisor is stalled: its main loop has not turned since" in refused and "end it with prl down" in refused
    )
    done = prl("down")
    assert "it is stalled, its main loop has not turned since" in done.stdout and "SIGKILL" in done.stdout
    assert trainer is not None and not trainer.is_running() and prl.members() == []


@pytest.mark.release
def test_daemons_whose_loops_hang_are_stalled_for_all_until_they_turn_again(prl: Prl) -> None:
    prl.may_hang()
    prl.up()
    (prl.output_dir / "pause_run_a").touch()
    prl("runs", "add", str(prl.run_file("a")))
    names = ("trainer", "inference", "run_a")
    for name in names:
        wait_for(lambda name=name: prl.is_in(name, "running"), f"{name} to run", timeout_s=PATIENCE_S)
    pids = [prl.daemon(name).pid for name in names]
    prl.hang("trainer/status.json", "inference/status.json", "control/status.json")
    for name in names:
        wait_for(lambda name=name: prl.is_in(name, "stalled"), f"{name} to be stalled", timeout_s=PATIENCE_S)
        view = prl.daemon(name)
        assert view.stalled_since is not None and (view.reason or "").startswith("its main loop has not turned since ")
    assert prl.daemon("supervisor").state == "running"
    run = prl.json("runs", "show", "run_a")["run"]
    assert run["state"] == "active" and run["stalled_since"] is not None, "scripts read what they always read"
    assert "its orchestrator is stalled: its main loop has not turned since" in run["reason"]
    shown = prl("runs", "show", "run_a").stdout
    assert [line.split() for line in shown.splitlines() if line.split()[:1] == ["state"]] == [["state", "stalled"]]
    assert "stalled" in next(line for line in prl("runs", "list").stdout.splitlines() if "run_a" in line)
    snapshot = console(prl)
    assert {row.name: row.state for row in snapshot.daemons} == {
        **dict.fromkeys(names, "stalled"),
        "supervisor": "running",
    }
    row = snapshot.row("run_a")
    assert row is not None and row.state == "stalled" and row.note.startswith("its orchestrator is stalled: ")
    assert {"trainer", "inference", "run_a"} <= {problem.name for problem in snapshot.problems}
    prl.hang()
    for name in names:
        wait_for(lambda name=name: prl.is_in(name, "running"), f"{name} to run again", timeout_s=PATIENCE_S)
    assert [prl.daemon(name).pid for name in names] == pids, "nothing was ended for it"


def test_what_up_was_given_holds_for_a_later_up_from_another_shell_and_down_needs_no_supervisor(prl: Prl) -> None:
    prl.env["CUDA_VISIBLE_DEVICES"] = "0,1"
    prl.up()
    for name in ("trainer", "inference"):
        prl.wait_state(name, "running")
    before = {name: prl.daemon(name).process for name in ("trainer", "inference")}
    kill_supervisor(prl)
    del prl.env["CUDA_VISIBLE_DEVICES"]
    said = prl("up").stdout
    assert "keeping inference, trainer: already running with the same config" in said
    assert "CUDA_VISIBLE_DEVICES: '0,1' (saved by an earlier prl up; set it to change it)" in said
    assert {name: prl.daemon(name).process for name in before} == before
    prl("restart", "trainer")
    trainer = next(each for each in prl.members() if each.pid == prl.daemon("trainer").pid)
    assert "fake_trainer" in trainer.cmdline(), "nor does a restart forget it"
    assert trainer.environ()["CUDA_VISIBLE_DEVICES"] == "0,1"
    kill_supervisor(prl)
    prl.env["CUDA_VISIBLE_DEVICES"] = "1"
    said = prl("up").stdout
    assert "CUDA_VISIBLE_DEVICES: '1' (was '0,1')" in said and "keeping" not in said
    assert not {trainer.pid, before["inference"].pid} & {each.pid for each in prl.members()}
    prl.wait_state("trainer", "running")
    now = next(each for each in prl.members() if each.pid == prl.daemon("trainer").pid)
    assert now.environ()["CUDA_VISIBLE_DEVICES"] == "1"
    (prl.output_dir / "pause_run_a").touch()
    prl("runs", "add", str(prl.run_file("a")))
    wait_for(lambda: prl.is_in("run_a", "running"), "the orchestrator to run", timeout_s=PATIENCE_S)
    kill_supervisor(prl)
    daemons = {each.environ()["PRL_DAEMON"] for each in prl.members()}
    assert daemons == {"trainer", "inference", "run_a"}, "daemons outlive a killed supervisor"
    lost = prl.daemon("trainer")
    assert lost.state == "lost" and "still runs: prl up takes it over, prl down ends it" in (lost.reason or "")
    prl("down")
    assert (prl.members(), prl.daemon("trainer").state) == ([], "stopped")
    assert "nothing is running" in prl("down").stdout


def kill_supervisor(prl: Prl) -> None:
    supervisor = prl.daemon("supervisor").process
    assert isinstance(supervisor, ProcessId)
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: not supervisor.is_running(), "the supervisor to be gone", timeout_s=PATIENCE_S)


def test_a_run_with_unreadable_files_keeps_no_other_run_from_its_orchestrator(prl: Prl) -> None:
    prl.up()
    deep = b"[" * 100_000
    control = prl.output_dir / "run_bad" / "control"
    control.mkdir(parents=True)
    (control / "status.json").write_bytes(b'{"run_id": "run_bad", "x": ' + deep + b"}")
    (prl.output_dir / "run_bad" / "logs").write_text("no folder")
    (control / "orch.toml").write_text(prl.run_file("bad").read_text())
    prl("runs", "add", str(prl.run_file("good")))
    prl.wait_state("run_good", "finished")
    assert prl.daemon("supervisor").reason is None
