"""Real supervisors over small real daemons: starting, crashing, stopping, and never a process left."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from daemons.alerts.__main__ import is_well
from daemons.launchers.local import end_daemons, find_members
from daemons.pidfile import SupervisorLock
from daemons.process import log_tail, spawn
from daemons.trash import users_of_run
from daemons.up_and_down import stop_workspace
from daemons.workspace import NO_SAMPLING
from daemons.workspace_reader import read_workspace
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import DaemonStatus, read_status
from prime_rl.utils.process import ProcessId, boot_id
from tests.budgets import in_release
from tests.daemons_support import PATIENCE_S, ROOT, Prl, age_records, step_clock
from tests.text_attacks import ATTACKS, check_clean
from tests.warm import warm

SFT_TOML = """\
kind = "sft"
batch_size = 8
max_steps = 3
[model]
name = "{model}"
[[data]]
path = "texts.jsonl"
"""


def waits_first(prl: Prl, run_id: str) -> bool:
    run = read_workspace(prl.output_dir).run(run_id)
    return run is not None and run.waiting_on == "a free slot (1. in the queue)"


def kill(pid: int) -> None:
    identity = ProcessId.of(pid)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not identity.is_running(), f"pid {pid} to be gone", timeout_s=PATIENCE_S)


def test_three_runs_on_two_slots_one_that_keeps_crashing_until_a_person_asks_then_down(prl: Prl) -> None:
    prl.env["PRL_API_KEY"] = "sk-canary"
    prl.up()
    for name in ("a", "b"):
        (prl.output_dir / f"pause_run_{name}").touch()
    for name in ("a", "b", "c"):
        prl("runs", "add", str(prl.run_file(name)))
    wait_for(lambda: waits_first(prl, "run_c"), "run_c to be the first in the queue", timeout_s=PATIENCE_S)
    environments = {each.environ()["PRL_DAEMON"]: each.environ() for each in prl.members()}
    assert {"supervisor", "trainer", "inference"} < environments.keys() and "sk-canary" not in str(environments)
    assert "PRL_API_KEY_FILE" in environments["inference"] and "PRL_API_KEY_FILE" not in environments["trainer"]
    for name in ("a", "b"):
        (prl.output_dir / f"pause_run_{name}").unlink()
    for name in ("a", "b", "c"):
        assert prl.wait_state(f"run_{name}", "finished").reason is None
    assert (prl.output_dir / "run_a" / "logs" / "orchestrator.log").read_text().count("begin run_a") == 1
    for name in ("run_a", "run_b", "run_c"):
        wait_for(lambda name=name: prl.is_in(name, "done"), f"{name}'s orchestrator to end", timeout_s=PATIENCE_S)
    (prl.output_dir / "crash_run_d").touch()
    prl("runs", "add", str(prl.run_file("d", max_steps=4)))
    assert prl.wait_state("run_d", "failed").reason == "3 failed starts in a row, last: exit code 3"
    assert prl.daemon("run_d").log_tail[-1] == "fatal: told to crash red"
    assert {prl.daemon(name).state for name in ("trainer", "inference")} == {"running"}
    (prl.output_dir / "crash_run_d").unlink()
    prl("runs", "readmit", "run_d")
    prl.wait_state("run_d", "finished")
    wait_for(lambda: prl.is_in("run_d", "done"), "its orchestrator to end", timeout_s=PATIENCE_S)
    done = prl("down")
    assert "no process is left" in done.stdout
    assert prl.members() == []
    assert {each.name: each.state for each in read_workspace(prl.output_dir).daemons} == {
        **dict.fromkeys(["supervisor", "trainer", "inference"], "stopped"),
        **dict.fromkeys(["run_a", "run_b", "run_c", "run_d"], "done"),
    }
    assert "nothing is running" in prl("down").stdout


def test_inference_runs_only_where_a_run_samples(prl: Prl) -> None:
    texts = prl.output_dir.parent / "texts.toml"
    texts.write_text(SFT_TOML.format(model=prl.model))
    (texts.parent / "texts.jsonl").write_text(10 * '{"prompt": "one", "completion": "two"}\n')
    prl.output_dir.mkdir(exist_ok=True)
    (prl.output_dir / "pause_run_texts").touch()
    prl("runs", "add", str(texts))
    done = prl(*prl.up_args())
    assert done.stdout.count(NO_SAMPLING) == 2 and "; the trainer loads torch, then the model" in done.stdout
    prl.wait_state("run_texts", "active")
    wait_for(lambda: is_well(read_workspace(prl.output_dir)), "the trainer's start to be noted", timeout_s=PATIENCE_S)
    workspace = read_workspace(prl.output_dir)
    assert (workspace.inference, workspace.needs_inference) == (None, False)
    assert "inference" not in {each.environ()["PRL_DAEMON"] for each in prl.members()}
    assert "inference" not in str(workspace.bottleneck)
    assert "no run needs it" in prl("status").stdout
    refused = prl("chat", "run_texts", exit_code=1).stderr
    assert refused == f"prl: {NO_SAMPLING}: prl serve ID keeps a version of a run served, and starts it\n"
    assert "pause it, or wait for its end" in prl("serve", "run_texts", exit_code=1).stderr
    (prl.output_dir / "pause_run_a").touch()
    prl("runs", "add", str(prl.run_file("a")))
    prl.wait_state("inference", "running")
    prl("runs", "delete", "run_a", "--yes")
    wait_for(lambda: not read_workspace(prl.output_dir).needs_inference, "inference to end", timeout_s=PATIENCE_S)
    (prl.output_dir / "run_texts" / "control" / "served.txt").write_text("run_texts@v1")
    prl.wait_state("inference", "running")


def test_a_killed_daemon_is_restarted_what_it_left_behind_ends_and_all_end_with_the_workspace(prl: Prl) -> None:
    prl.up("--supervisor.early_crash_s", "0")
    old = prl.daemon("inference")
    worker = ProcessId.of(int((prl.output_dir / "worker.pid").read_text()))
    os.kill(old.pid, signal.SIGKILL)

    def new() -> bool:
        now = prl.daemon("inference")
        return now.state == "running" and now.pid != old.pid

    wait_for(new, "inference to be started again", timeout_s=PATIENCE_S)
    now = prl.daemon("inference")
    assert (now.num_restarts, now.log_tail) == (1, (f"begin inference {old.pid}",))
    assert not worker.is_running(), "the grandchild of the killed daemon is gone"
    os.rename(prl.output_dir, prl.output_dir.with_name("moved"))
    wait_for(lambda: prl.members() == [], "the daemons to end", timeout_s=PATIENCE_S)


def test_a_daemon_that_cannot_start_stops_the_rest_and_shows_its_log(prl: Prl) -> None:
    (prl.output_dir / "crash_trainer").touch()
    # It rests until it is seen: the end of a second and a third start has other words.
    rest_s = str(PATIENCE_S)
    done = prl(*prl.up_args("--supervisor.backoff_s", rest_s, "--supervisor.max_backoff_s", rest_s), exit_code=1)
    first, *log = done.stderr.splitlines()
    assert first.startswith("prl: trainer did not start: exit code 3; last lines of ")
    assert log[-1] == "fatal: told to crash red", "and the escape sequence is gone"
    assert prl.members() == []


@pytest.mark.slow
def test_final_states_readmission_the_delete_of_a_run_that_trains_and_the_restart_of_a_daemon(prl: Prl) -> None:
    prl.up()
    (prl.output_dir / "pause_run_a").touch()
    prl("runs", "add", str(prl.run_file("a", max_steps=4)))
    prl.wait_state("run_a", "active")
    wait_for(lambda: prl.is_in("run_a", "running"), "the orchestrator to run", timeout_s=PATIENCE_S)
    prl("runs", "evict", "run_a", "--reason", "makes room")
    wait_for(lambda: prl.daemon("run_a").state == "done", "the orchestrator to end", timeout_s=PATIENCE_S)
    assert prl.wait_state("run_a", "evicted").reason == "makes room"
    (prl.output_dir / "pause_run_a").unlink()
    prl("runs", "readmit", "run_a")
    prl.wait_state("run_a", "finished")
    assert "is finished: only a run that is evicted" in prl("runs", "readmit", "run_a").stdout
    wait_for(lambda: not users_of_run(prl.output_dir, "run_a"), "its slot to be free", timeout_s=PATIENCE_S)
    assert prl("runs", "evict", "run_a", "--reason", "x").stdout == "run_a: already finished, so nothing was changed\n"

    (prl.output_dir / "pause_run_b").touch()
    prl("runs", "add", str(prl.run_file("b")))
    wait_for(lambda: prl.is_in("run_b", "running"), "the orchestrator to run", timeout_s=PATIENCE_S)
    assert "in use by the trainer (slot 0)" in prl("runs", "delete", "run_b", exit_code=1).stderr
    prl("runs", "delete", "run_b", "--yes")
    assert [run.run_id for run in read_workspace(prl.output_dir).runs] == ["run_a"]
    wait_for(
        lambda: read_workspace(prl.output_dir).daemon("run_b") is None,
        "the supervisor to forget it",
        timeout_s=PATIENCE_S,
    )
    (prl.output_dir / "pause_run_b").unlink()
    prl("runs", "undelete", "run_b")
    prl.wait_state("run_b", "finished")

    before = prl.daemon("trainer").pid
    prl("restart", "trainer")
    after = prl.wait_state("trainer", "running")
    assert after.pid != before and after.reason is None
    assert "daemon 'run_x' not found" in prl("restart", "run_x", exit_code=2).stderr


@pytest.mark.slow
def test_down_finds_a_worker_whose_parents_are_all_dead(prl: Prl) -> None:
    prl.up()
    kill(prl.daemon("supervisor").pid)
    kill(prl.daemon("inference").pid)
    worker = int((prl.output_dir / "worker.pid").read_text())
    assert worker in [each.pid for each in prl.members()]
    assert "no process is left" in prl("down").stdout
    assert prl.members() == []


def test_up_after_a_killed_supervisor_adopts_what_lives(prl: Prl, monkeypatch: pytest.MonkeyPatch) -> None:
    prl.up("--supervisor.early_crash_s", "0")
    (prl.output_dir / "pause_run_a").touch()
    prl("runs", "add", str(prl.run_file("a")))
    wait_for(lambda: prl.is_in("run_a", "running"), "the orchestrator to run", timeout_s=PATIENCE_S)
    names = ("trainer", "inference", "run_a")
    old = {name: prl.daemon(name).pid for name in names}
    supervisor = prl.daemon("supervisor").pid
    kill(supervisor)
    kill(old["run_a"])
    age_records(prl.output_dir, 3600.0)
    done = prl(*prl.up_args("--supervisor.early_crash_s", "0"))
    assert "keeping inference, trainer: already running with the same config" in done.stdout + done.stderr
    wait_for(lambda: prl.is_in("run_a", "running"), "the dead orchestrator to be started again", timeout_s=PATIENCE_S)
    new = {name: prl.daemon(name).pid for name in names}
    assert {name: new[name] == old[name] for name in names} == {"trainer": True, "inference": True, "run_a": False}
    assert prl.daemon("supervisor").pid != supervisor
    kill(old["trainer"])
    wait_for(
        lambda: prl.is_in("trainer", "running") and prl.daemon("trainer").pid != old["trainer"],
        "the adopted trainer to be started again after its death",
        timeout_s=PATIENCE_S,
    )
    status = read_status(OutputDir(prl.output_dir).daemon_status("trainer"), DaemonStatus)
    assert status is not None and [crash.reason for crash in status.crashes] == ["it ended"]
    assert status.log_tail == [f"begin trainer {old['trainer']}"]
    step_clock(monkeypatch, 3600.0)
    assert stop_workspace(prl.output_dir, say=print)
    assert prl.members() == []


@pytest.mark.slow
def test_up_with_another_config_ends_what_an_earlier_supervisor_left(prl: Prl) -> None:
    prl.up()
    old = {each.pid for each in prl.members()}
    kill(prl.daemon("supervisor").pid)
    prl.up("--seq_len", "64")
    new = [each.environ()["PRL_DAEMON"] for each in prl.members()]
    assert sorted(new) == ["inference", "inference", "supervisor", "trainer"], "the second is inference's worker"
    assert old.isdisjoint(each.pid for each in prl.members())


@pytest.mark.slow
def test_down_lets_the_trainer_save_however_short_the_grace_is(prl: Prl) -> None:
    (prl.output_dir / "saving_trainer").touch()
    prl.up("--supervisor.grace_s", "0.1", "--supervisor.drain_s", str(PATIENCE_S))
    prl.wait_state("trainer", "running")  # for its supervisor too: one that starts has nothing to save
    prl("down")
    assert (prl.output_dir / "saved").exists()


@pytest.mark.slow
def test_a_trainer_that_gets_nowhere_is_reported_and_not_ended(prl: Prl) -> None:
    prl.up("--supervisor.stall.trainer.limit_s", "0.5")
    pid = prl.daemon("trainer").pid
    (prl.output_dir / "pause_run_a").touch()
    prl("runs", "add", str(prl.run_file("a")))
    wait_for(lambda: prl.is_in("run_a", "running"), "the orchestrator to run", timeout_s=PATIENCE_S)
    (prl.output_dir / "stuck_trainer").touch()
    assert (prl.wait_state("trainer", "stalled").reason or "").startswith("no progress for 0.5 s, since 20")
    (prl.output_dir / "stuck_trainer").unlink()
    prl.wait_state("trainer", "running")
    assert (prl.daemon("trainer").pid, prl.daemon("trainer").num_restarts) == (pid, 0)


@pytest.mark.slow
def test_a_stubborn_daemon_is_killed_after_the_grace(prl: Prl) -> None:
    (prl.output_dir / "stubborn_trainer").touch()
    prl.up("--supervisor.grace_s", "0.5", "--supervisor.drain_s", "0.5")
    assert "no process is left" in prl("down").stdout
    assert prl.members() == []


@pytest.mark.slow
def test_one_of_two_ups_wins(prl: Prl) -> None:
    both = [prl.begin(*prl.up_args()) for _ in range(2)]
    ends = [(*child.communicate(timeout=PATIENCE_S), child.returncode) for child in both]
    told = [out for out, _, code in ends if code == 0 and "already running with these settings: pid " in out]
    if not told:  # it came while the winner was about to start
        assert sorted(code for *_, code in ends) == [0, 1]
        loser = next(err for _, err, code in ends if code == 1)
        assert loser.startswith("prl: already running: ") and loser.count("\n") == 1
    third = prl(*prl.up_args(), "--seq_len", "64", exit_code=1).stderr
    assert f"pid {prl.daemon('supervisor').pid} since" in third and "stop it with prl down" in third
    assert sorted(each.environ()["PRL_DAEMON"] for each in prl.members()).count("trainer") == 1


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, *in_release(signal.SIGTERM)])
def test_ctrl_c_during_up_stops_everything(prl: Prl, signum: signal.Signals) -> None:
    prl.modules["inference"] = "slow_start"
    (prl.output_dir.parent / "modules" / "slow_start.py").write_text(
        "import time\nprint('loading', flush=True)\ntime.sleep(600)\n"
    )
    child = prl.begin(*prl.up_args())
    log = prl.output_dir / "logs" / "inference.log"
    wait_for(lambda: log.exists() and "loading" in log.read_text(), "inference to be loading", timeout_s=PATIENCE_S)
    child.send_signal(signum)
    child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130
    assert prl.members() == []


@pytest.mark.slow
def test_ctrl_c_before_the_supervisor_has_said_who_it_is(prl: Prl) -> None:
    prl.modules["inference"] = "slow_start"  # or all could be up before the signal
    (prl.output_dir.parent / "modules" / "slow_start.py").write_text("import time\ntime.sleep(600)\n")
    child = prl.begin(*prl.up_args())
    log = prl.output_dir / "logs" / "supervisor.log"
    wait_for(log.exists, "the supervisor to be started", timeout_s=PATIENCE_S, poll_s=0.002)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130
    assert prl.members() == []


@pytest.mark.slow
def test_up_in_the_foreground_is_the_supervisor_and_shows_all_logs(prl: Prl) -> None:
    """What a run writes into its log, and how its folder is called, is shown to a person: no terminal obeys it."""
    (prl.output_dir / "say_run_a").write_text("\n".join(attack.replace("{}", "shown") for attack in ATTACKS.values()))
    (prl.output_dir / "run_\x1b]2;owned\x07\x9b31m\u202e").mkdir()
    prl("runs", "add", str(prl.run_file("a")))
    child = prl.start(*prl.up_args("--foreground"))
    prl.wait_state("run_a", "finished")
    trainer = prl.daemon("trainer").pid
    assert prl.daemon("supervisor").pid == child.pid
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0
    check_clean("prl up --foreground", iter((out, err)))
    assert sum(line.startswith("run_a | ") and "shown" in line for line in out.splitlines()) > 8
    assert f"trainer | begin trainer {trainer}" in out.splitlines()
    assert any("stopping: SIGTERM" in line for line in out.splitlines())
    assert prl.members() == []


@pytest.mark.slow
def test_up_in_the_foreground_ends_with_1_when_a_daemon_cannot_start(prl: Prl) -> None:
    (prl.output_dir / "crash_trainer").touch()
    done = prl(*prl.up_args("--foreground"), exit_code=1)
    assert "trainer | fatal: told to crash red" in done.stdout.splitlines()
    assert done.stderr.splitlines()[-1] == "prl: trainer did not start: exit code 3"
    assert prl.members() == []


def test_a_busy_port_and_a_missing_model_are_named(prl: Prl) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = prl(*prl.up_args("--inference.port", str(port)), exit_code=1)
    assert f"127.0.0.1:{port}: Address already in use" in done.stderr
    missing = prl("up", "--model.name", str(prl.output_dir / "none"), "--inference.port", "0", exit_code=1).stderr
    assert f"prl make-base --out {prl.output_dir / 'none'}" in missing
    assert (missing.count("\n"), prl.members()) == (1, [])


def test_an_output_dir_that_cannot_be_written(prl: Prl) -> None:
    (prl.output_dir / "file").touch()
    below_a_file = replace(prl, output_dir=prl.output_dir / "file" / "workspace")
    done = below_a_file(*prl.up_args(), exit_code=1)
    assert done.stderr.startswith(f"prl: cannot write to workspace {below_a_file.output_dir}: Not a directory")
    assert done.stderr.count("\n") == 1


def test_wrong_settings_are_wrong_use(prl: Prl) -> None:
    done = prl("up", "--trainer.modle.name", "x", exit_code=2)
    assert "trainer.modle: unknown key; did you mean 'model'?" in done.stderr
    assert "not found: none.toml" in prl("up", "@", "none.toml", exit_code=2).stderr


def test_the_lock_is_free_when_its_holder_is_dead_whatever_the_pid_file_says(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    lock = SupervisorLock.acquire(output)
    assert lock is not None
    lock.write_info(0.0)
    assert SupervisorLock.acquire(output) is None
    os.close(lock.fd)  # as the kernel does for a dead process
    again = SupervisorLock.acquire(output)
    assert again is not None
    again.claim()
    again.release()
    assert not output.supervisor_pidfile.exists()


FAMILY = """
import os, subprocess, sys, time
inner = "import os, time; os.setsid(); print('ready', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
subprocess.Popen(["env", "-i", sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"])
time.sleep(600)
"""


def test_a_daemon_is_ended_with_children_of_other_sessions_and_environments(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    with spawn([sys.executable, "-c", FAMILY.replace("os.setsid(); ", "")], log, tmp_path, "daemon") as child:
        wait_for(lambda: log_tail(log).count("ready") == 2, "the family to be complete", timeout_s=PATIENCE_S)
        leader = ProcessId.of(child.pid)
        family = find_members(tmp_path, [leader], {"daemon"})
        assert len(family) == 3
        assert find_members(tmp_path, [], {"other"}) == set()
        left = end_daemons(tmp_path, [("daemon", leader)], 5.0, tick=lambda: (child.poll(), None)[1])
    assert left == set()
    assert [each for each in family if each.is_running()] == []


def test_a_recycled_pid_is_left_alone(tmp_path: Path) -> None:
    with spawn([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "x.log", tmp_path, "other") as child:
        stranger = ProcessId.of(child.pid)
        recorded = replace(stranger, start=f"{boot_id()}/1")
        assert end_daemons(tmp_path, [("daemon", recorded)], 0.2) == set()
        assert stranger.is_running()
        child.kill()


def test_up_from_another_folder_starts_the_daemons_where_they_were_and_names_what_is_next(
    prl: Prl, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    done = prl(*prl.up_args())
    assert f"no runs yet: prl runs add FILE.toml --output-dir {prl.output_dir} adds one" in done.stdout
    pid = prl.daemon("supervisor").pid
    for words in (["up"], prl.up_args()):
        again = prl(*words)
        assert f"already running with these settings: pid {pid} since " in again.stdout and "\nup: " in again.stdout
    refused = prl("up", "--seq_len", "64", exit_code=1)
    assert "and with seq_len as given here" in refused.stdout and "prl up applies other settings" in refused.stderr
    prl("down")
    command, elsewhere = ["up", "--output-dir", f"../{prl.output_dir.name}"], tmp_path / "elsewhere"
    for words in ("up: ", "already running with these settings: "):
        done = warm("daemons.cli").run(command, cwd=elsewhere, env=prl.env, timeout_s=PATIENCE_S)
        assert done.returncode == 0 and words in done.stdout
    assert {Path(process.cwd()) for process in prl.members()} == {ROOT}
