"""The daemon `monitors` as a process of its own with the real packages, and in a workspace that starts and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from prime_rl.contract.files import append_line, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import Status, TrainerRunStatus, TrainerStatus, read_status
from tests.budgets import in_release
from tests.daemons_support import ROOT, Prl
from tests.orchestrator_support import config_data, make_run, write_toml
from tests.patience import PATIENCE_S, until_seen
from tests.text_attacks import ATTACKS, check_clean

PAGE = re.compile(r"http://127\.0\.0\.1:\d+/metrics")
CANARY = "canary-that-only-the-monitors-may-see-4711"


class Daemon:
    """The daemon on a workspace without others; `hold` writes what the trainer would."""

    def __init__(self, output: OutputDir) -> None:
        self.output = output
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("PRL_", "WANDB_"))}
        self.env |= {"PYTHONPATH": str(ROOT), "HOME": str(output.path)}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, config: str) -> psutil.Process:
        path = self.output.component_config("monitors")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config)
        self.output.logs.mkdir(exist_ok=True)
        with self.output.log("monitors").open("ab") as log:
            argv = [sys.executable, "-m", "daemons.monitors", str(self.output.path)]
            self.process = subprocess.Popen(argv, env=self.env, stdout=log, stderr=log, cwd=self.output.path)
        return psutil.Process(self.process.pid)

    def end(self, signum: signal.Signals) -> int:
        """Returns the exit code. What it had started is gone then."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signum)
        code = self.process.wait(PATIENCE_S)
        until_seen(lambda: living(children) == [], "what it had started to be gone")
        return code

    def hold(self, *runs: RunDir) -> None:
        slots = {run.run_id: TrainerRunStatus(run_idx=number) for number, run in enumerate(runs)}
        self.output.trainer_status.parent.mkdir(exist_ok=True)
        write_atomic(self.output.trainer_status, msgspec.json.encode(TrainerStatus(runs=slots)))

    def page(self) -> str:
        found = PAGE.findall(self.log())
        return httpx.get(found[-1], timeout=PATIENCE_S).text if found else ""

    def log(self) -> str:
        return self.output.log("monitors").read_text()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    found = Daemon(OutputDir(tmp_path))
    yield found
    if found.process is not None and found.process.poll() is None:
        found.end(signal.SIGKILL)


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def children_of(process: psutil.Process) -> set[str]:
    """Their names. W&B calls programs that end at once, such as git and uname."""
    found = set()
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(child.name())
    return found


def write(run: RunDir, step: int) -> None:
    append_line(run.trainer_metrics, json.dumps({"step": step, "time": 1.0, "loss": step / 10}))


def add_run(daemon: Daemon, run_id: str, **monitor: object) -> RunDir:
    run = make_run(daemon.output.path, run_id)
    write_toml(run, config_data(Path("model"), monitor=monitor))
    run.metrics.mkdir()
    return run


def wandb_steps(run: RunDir) -> list[list[int]]:
    """The steps in W&B's own files: records of protobuf in a log of LevelDB's form, short enough for one block."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(run.monitors.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        data, steps = path.read_bytes()[7:], list[int]()
        while len(data) > 7:
            (length,) = struct.unpack("<H", data[4:6])
            record = wandb_internal_pb2.Record.FromString(data[7 : 7 + length])
            if record.HasField("history"):
                items = ((item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item)
                row = {key: json.loads(value) for key, value in items}
                assert row["trainer/loss"] == row["step"] / 10
                steps.append(row["step"])
            data = data[7 + length :]
        found.append(steps)
    return found


# What `trackio show` does first: what lies in files comes into the database.
READ_TRACKIO = """
import json, sys, trackio
from trackio import SQLiteStorage, fragments
fragments.import_inbox_dir()
for run in trackio.Api().runs(sys.argv[1]):
    rows = SQLiteStorage.get_logs(sys.argv[1], run.name, run_id=run.id)
    rows = [{name: row[name] for name in row if name != "timestamp"} for row in rows]
    print(json.dumps([run.id, run.name, run.config["max_steps"], rows]))
"""


def trackio_runs(output: OutputDir, project: str) -> list[tuple[str, str, int, list[dict[str, float]]]]:
    """Id, name, `max_steps` of the config, and rows of each run, as trackio itself reads them in another process."""
    env = {**os.environ, "TRACKIO_DIR": str(output.path / "monitors" / "trackio")}
    argv = [sys.executable, "-c", READ_TRACKIO, project]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    return sorted((tuple(json.loads(line)) for line in done.stdout.splitlines()), key=lambda run: run[1])


ALL = """
[prometheus]
[tensorboard]
[wandb]
mode = "offline"
project = "tests"
"""


def test_every_line_of_two_runs_reaches_all_monitors_over_a_kill_and_nothing_outlives_the_daemon(
    daemon: Daemon,
) -> None:
    runs = [add_run(daemon, "run_a"), add_run(daemon, "run_b")]
    daemon.hold(*runs)
    process = daemon.start(ALL)
    for run in runs:
        write(run, 1)

    def all_passed_on() -> bool:
        return all(passed_on(run, monitor) for run in runs for monitor in ("wandb", "tensorboard"))

    until_seen(all_passed_on, "the first lines")
    until_seen(lambda: daemon.page().count("prl_trainer_loss{") == 2, "both runs on one page")
    assert "wandb-core" in children_of(process)
    assert len(process.children()) == 1, "one W&B process for all runs"
    assert not any("libtorch" in mapped.path for mapped in process.memory_maps())
    daemon.end(signal.SIGKILL)
    for run in runs:
        write(run, 2)
        (run.monitors / "wandb_id.txt").write_text("0" * 16)
    daemon.hold()  # both are finished
    daemon.start(ALL)
    until_seen(all_passed_on, "the lines that came meanwhile")
    write(runs[0], 3)
    assert daemon.end(signal.SIGTERM) == 0
    # What W&B had not written when it was killed is lost; what it was given is given once.
    *_, last = wandb_steps(runs[0])
    assert last == [2, 3] and wandb_steps(runs[1])[-1] == [2]
    ids = [{path.name[-16:] for path in run.monitors.glob("wandb/offline-run-*")} for run in runs]
    assert [len(each) for each in ids] == [1, 1] and ids[0] != ids[1], "each stays itself, whatever its folder says"
    assert all(len(list(run.monitors.glob("tensorboard/events*"))) == 2 for run in runs)
    assert not (daemon.output.path / "wandb").exists()


@pytest.mark.parametrize("mode", ["sqlite", *in_release("jsonl")])
def test_trackio_reads_every_line_of_two_runs_once_over_a_kill_and_nothing_is_sent(daemon: Daemon, mode: str) -> None:
    """With "jsonl", which trackio takes on a network file system, the lines wait in files for `trackio show`."""
    runs = [add_run(daemon, "run_a"), add_run(daemon, "run_b")]
    daemon.hold(*runs)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(0)
        daemon.env |= {
            "TRACKIO_STORAGE_MODE": mode,
            "TRACKIO_DIR": str(daemon.output.path / "elsewhere"),
            # Of a person who also sends to Hugging Face.
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_TOKEN": "hf_0",
            "TRACKIO_SPACE_ID": "somebody/space",
            "TRACKIO_BUCKET_ID": "somebody/bucket",
        }

        def all_passed_on() -> bool:
            return all(passed_on(run, "trackio") for run in runs)

        process = daemon.start('[trackio]\nproject = "tests"\n')
        for run in runs:
            write(run, 1)
        append_line(runs[0].orchestrator_metrics, json.dumps({"step": 1, "reward/mean": 0.5}))
        until_seen(all_passed_on, "the first lines")
        assert process.children() == [] and not any(each.status == "LISTEN" for each in process.net_connections())
        daemon.end(signal.SIGKILL)
        (runs[0].monitors / "state.json").unlink()  # as if it was killed before it could keep how far it was
        for run in runs:
            write(run, 2)
            (run.monitors / "trackio_id.txt").write_text("0" * 16)  # is not read: it may be a neighbour's
        daemon.start('[trackio]\nproject = "tests"\n')
        until_seen(all_passed_on, "the lines that came meanwhile")
        assert daemon.end(signal.SIGTERM) == 0
        with pytest.raises(BlockingIOError):
            hub.accept()
    assert "*" not in daemon.log() and "disabled" not in daemon.log()
    assert not (daemon.output.path / "elsewhere").exists()
    (id_a, name_a, max_steps, rows_a), (id_b, name_b, _, rows_b) = trackio_runs(daemon.output, "tests")
    assert (name_a, name_b, max_steps) == ("run_a", "run_b", config_data(Path("model"))["max_steps"]) and id_a != id_b
    assert rows_b == [{"step": 1, "trainer/loss": 0.1}, {"step": 2, "trainer/loss": 0.2}]
    by_step = sorted(rows_a, key=lambda row: (row["step"], len(row), "trainer/loss" in row))
    assert by_step == [{"step": 1, "orchestrator/reward/mean": 0.5}, *rows_b]


@pytest.mark.release
def test_a_run_that_is_added_again_is_another_run_of_trackio_and_its_text_is_cleaned(daemon: Daemon) -> None:
    run = add_run(daemon, "run_a", trackio={})
    daemon.hold(run)
    daemon.start("[prometheus]\n")
    write(run, 1)
    until_seen(lambda: passed_on(run, "trackio"), "the first run's line")
    run.path.rename(daemon.output.path / "deleted")
    run = add_run(daemon, "run_a", trackio={})
    attacks = [text for name, text in ATTACKS.items() if name != "megabyte"]  # too long for a line
    for number, text in enumerate(attacks):
        append_line(run.trainer_metrics, json.dumps({"step": number, text.format("shown"): 0.5, text: 0.25}))
    until_seen(lambda: passed_on(run, "trackio"), "its successor's lines")
    assert daemon.end(signal.SIGTERM) == 0
    (id_1, _, _, rows_1), (id_2, _, _, rows_2) = sorted(
        trackio_runs(daemon.output, "prl-multirun"), key=lambda run: len(run[3])
    )
    assert id_1 != id_2 and rows_1 == [{"step": 1, "trainer/loss": 0.1}]
    assert [row["step"] for row in rows_2] == list(range(len(attacks)))
    shown = check_clean("trackio", (name for row in rows_2 for name in row))
    assert "shown" in shown and max(len(name) for row in rows_2 for name in row) < 200


@pytest.mark.release
def test_wandb_without_a_network_holds_up_neither_other_runs_nor_the_end(daemon: Daemon) -> None:
    """The quick guard of this is the unit test with a library that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        daemon.env |= {
            "WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "WANDB_API_KEY": "f" * 40,
        }
        hangs, works = add_run(daemon, "run_hangs", wandb={}), add_run(daemon, "run_works", wandb={"mode": "offline"})
        daemon.hold(hangs, works)
        process = daemon.start("[prometheus]\n")
        until_seen(lambda: "wandb-core" in children_of(process), "W&B to start")
        for run in (hangs, works):
            write(run, 1)
        until_seen(lambda: passed_on(works, "wandb"), "the other run's line")
        until_seen(lambda: daemon.page().count("prl_trainer_loss{") == 2, "both on the page")
        before = turns(daemon)
        until_seen(lambda: turns(daemon) > before, "the loop")
        assert daemon.end(signal.SIGTERM) == 0
    assert wandb_steps(works) == [[1]] and "wandb" not in read(hangs)


def turns(daemon: Daemon) -> int:
    """Of the daemon's loop."""
    status = read_status(daemon.output.own_status("monitors"), Status)
    return status.loop or 0 if status is not None else 0


def read(run: RunDir) -> str:
    path = run.monitors / "state.json"
    return path.read_text() if path.exists() else ""


def passed_on(run: RunDir, monitor: str) -> bool:
    """Whether `monitor` was given all of the trainer's lines."""
    kept = json.loads(read(run) or "{}").get(monitor, {})
    return kept.get("trainer") == run.trainer_metrics.stat().st_size


@pytest.mark.release
def test_the_daemon_lives_while_a_run_asks_for_it_and_has_the_key_alone(prl: Prl) -> None:
    prl.env["WANDB_API_KEY"] = CANARY
    prl.up("--supervisor.drain_s", "60")
    assert "monitors" not in {each["name"] for each in prl.json("status")["daemons"]}
    (prl.output_dir / "pause_run_plain").touch()
    (prl.output_dir / "pause_run_asks").touch()
    prl("runs", "add", str(prl.run_file("plain")))
    file = prl.run_file("asks")
    file.write_text(file.read_text() + "[monitor.tensorboard]\n")
    prl.wait_state("run_plain", "active")
    assert not prl.is_in("monitors", "running"), "no run asks for it"
    prl("runs", "add", str(file))
    prl.wait_state("monitors", "running")
    members = prl.members()
    assert not [each.cmdline() for each in members if CANARY in str(each.environ())]
    ways = {each.environ()["PRL_DAEMON"] for each in members if "WANDB_API_KEY_FILE" in each.environ()}
    assert ways == {"monitors", "supervisor"}
    assert "daemons.monitors" in prl("logs", "monitors").stdout
    run = RunDir(prl.output_dir / "run_asks")
    until_seen(lambda: read(run) != "", "its monitor to have begun")  # its import may take longer than its end may
    (prl.output_dir / "pause_run_asks").unlink()
    prl.wait_state("run_asks", "finished")
    prl.wait_state("monitors", "done")
    assert json.loads(read(run)) == {
        "tensorboard": {"orchestrator": run.orchestrator_metrics.stat().st_size, "trainer": 0}
    }
    assert not (prl.output_dir / "run_plain" / "monitors").exists()
    assert "monitors has ended (no longer requested" in prl("restart", "monitors", exit_code=1).stderr
    assert "no process is left" in prl("down").stdout


def test_a_page_whose_port_is_taken_is_refused_before_anything_runs(prl: Prl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = prl(*prl.up_args("--monitors.prometheus.port", port), exit_code=1)
    assert f"monitors cannot listen on 127.0.0.1:{port}" in refused.stderr
    assert "--monitors.prometheus.port N" in refused.stderr
    assert prl.members() == []
