"""Holders of a workspace: other machines on a shared folder, other boots of this one, and reused pids."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from daemons import records, supervisor_process
from daemons.launchers.base import LaunchError
from daemons.launchers.local import Local
from daemons.pidfile import SupervisorInfo, SupervisorLock, find_rival, read_info
from daemons.specs import save_devices, saved_devices, service_specs, settle_devices, write_component_configs
from daemons.supervisor_process import down, prepare
from daemons.up_and_down import choose_system, start_workspace, take_workspace
from prime_rl.configs.system import SupervisorConfig, SystemConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import Crash, DaemonStatus, Handle, InferenceStatus, read_status
from prime_rl.utils.process import ProcessId, boot_id
from tests.daemons_support import handle_of

HERE = socket.gethostname()
LIMITS = SupervisorConfig(drain_s=0.3, grace_s=0.3)


@pytest.fixture
def output(tmp_path: Path) -> OutputDir:
    workspace = OutputDir(tmp_path / "workspace")
    workspace.daemons.mkdir(parents=True)
    return workspace


@pytest.fixture
def stranger() -> Iterator[ProcessId]:
    """Another process, whose pid will be found written down."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as child:
        yield ProcessId.of(child.pid)
        child.kill()


def sign(output: OutputDir, host: str, pid: int = 4711, boot: str = "of another") -> None:
    info = SupervisorInfo(pid=pid, create_time=1.0, boot_id=boot, host=host, argv=[], output_dir="x", started_at=0.0)
    write_atomic(output.supervisor_pidfile, msgspec.json.encode(info))


def record(output: OutputDir, name: str, process: ProcessId, *, host: str = HERE, boot: str | None = None) -> None:
    spec = next(spec for spec in service_specs(output) if spec.name == name)
    status = DaemonStatus(
        name=name,
        state="running",
        argv=list(spec.argv),
        handle=handle_of(name, process, host=host, boot=boot),
        crashes=[Crash(at=1.0, kind="crash", reason="killed by signal 9", exit_code=-9)],
        log_tail=["last words"],
        num_restarts=1,
    )
    status.child = process
    write_atomic(output.daemon_status(name), msgspec.json.encode(status))


def beat(output: OutputDir, number: int) -> None:
    status = DaemonStatus(name="supervisor", state="running", updated_at=float(number))
    write_atomic(output.daemon_status("supervisor"), msgspec.json.encode(status))


def test_after_a_reboot_a_stranger_with_the_recorded_pid_is_left_alone(output: OutputDir, stranger: ProcessId) -> None:
    record(output, "trainer", stranger, boot="before the reboot")
    record(output, "inference", replace(stranger, start=f"{boot_id()}/1"))
    assert records.living(output, Local(output)) == {}
    assert records.end_leftovers(output, Local(output), LIMITS, print) == []
    assert down(output, timeout_s=1.0, say=print) is False
    assert stranger.is_running()
    status = read_status(output.daemon_status("trainer"), DaemonStatus)
    assert status is not None and (status.state, status.child_pid) == ("stopped", None)


def test_pids_of_another_machine_mean_nothing_here(output: OutputDir, stranger: ProcessId) -> None:
    record(output, "trainer", stranger, host="elsewhere")
    assert records.end_leftovers(output, Local(output), LIMITS, print) == []
    assert stranger.is_running()


def test_the_very_process_that_was_recorded_is_ended(output: OutputDir, stranger: ProcessId) -> None:
    record(output, "trainer", stranger)
    assert records.end_leftovers(output, Local(output), LIMITS, print) == []
    assert not stranger.is_running()


def test_a_daemon_is_adopted_with_its_history_unless_its_config_or_command_changed(
    output: OutputDir, stranger: ProcessId
) -> None:
    system = SystemConfig()
    write_component_configs(system, output)
    record(output, "trainer", stranger)
    assert records.adoptable(output, Local(output), system) == {"trainer"}
    assert records.adoptable(output, Local(output), SystemConfig.model_validate({"seq_len": 64})) == set()
    daemons, pasts = records.adopt(output, Local(output))
    assert daemons["trainer"].process == stranger
    assert [crash.exit_code for crash in daemons["trainer"].crashes] == [-9]
    assert (daemons["trainer"].num_restarts, pasts["trainer"].log_tail) == (1, ["last words"])


def test_a_workspace_that_is_named_by_a_relative_path_keeps_its_daemons(
    tmp_path: Path, output: OutputDir, stranger: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    data = {"output_dir": "workspace", "model": {"name": str(tmp_path / "model")}, "inference": {"port": 0}}
    system = SystemConfig.model_validate(data)
    write_component_configs(system, output)
    record(output, "trainer", stranger)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    prepare(system, OutputDir(system.output_dir), said.append).release()
    assert "keeping trainer: already running with the same config" in said and stranger.is_running()


OLD, NEW = "old-key-4711", "new-key-4712"


@contextlib.contextmanager
def inference_with(output: OutputDir, key: str | None, *, lives: bool = True) -> Iterator[None]:
    """A server that asks for `key`, as the workspace's inference; that has ended unless it `lives`."""

    class Asks(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_open = key is None or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(200 if is_open else 401)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Asks) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        status = InferenceStatus(state="serving", base_url=f"http://127.0.0.1:{server.server_port}/v1")
        now = ProcessId.of(os.getpid())
        status.pid, status.pid_create_time, status.pid_start = now.pid, now.create_time, now.start if lives else "0"
        write_atomic(output.inference_status, msgspec.json.encode(status))
        yield
        server.shutdown()


@pytest.mark.parametrize(
    ("asked", "here", "is_same"),
    [
        (OLD, OLD, True),
        (OLD, NEW, False),
        (None, NEW, False),
        (None, None, True),
    ],
)
def test_up_with_another_key_is_no_up_with_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, here: str | None, is_same: bool
) -> None:
    monkeypatch.delenv("PRL_API_KEY", raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    wanted = choose_system(["--model.name", str(tmp_path / "model")], tmp_path / "workspace", say=print)
    output, said = OutputDir(tmp_path / "workspace"), list[str]()
    monkeypatch.setattr(supervisor_process, "wait_until_ready", lambda *_, **__: True)
    lock = take_workspace(wanted, output, said.append)
    beat(output, int(time.time()) + 1)
    monkeypatch.setattr("daemons.up_and_down._holder_with", lambda *_: read_info(output))
    key_file = tmp_path / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(here or "")
    if here:
        monkeypatch.setenv("PRL_API_KEY_FILE", str(key_file))

    def up() -> None:
        start_workspace(wanted, stop=lambda: False, say=said.append, on_look=lambda workspace: None)

    with inference_with(output, asked):
        if is_same:
            up()
            assert said[-1].startswith("already running with these settings: pid ")
            (tmp_path / "model" / "config.json").write_text("{ }")
            os.utime(tmp_path / "model" / "config.json", (time.time() + 60, time.time() + 60))
            up()
            assert (
                said[-1] == f"files of {tmp_path / 'model'} have changed since then: prl down, then prl up takes them"
            )
        else:
            with pytest.raises(
                LaunchError, match=r"with another API key than PRL_API_KEY has here; stop it with prl down"
            ):
                up()
            assert not any("already running" in line for line in said)
    lock.release()
    written = b"".join(path.read_bytes() for path in output.path.rglob("*") if path.is_file())
    assert OLD.encode() not in written and NEW.encode() not in written


def test_a_key_that_is_not_given_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRL_API_KEY", raising=False)
    output = OutputDir(tmp_path)
    with inference_with(output, OLD):
        assert not supervisor_process.has_another_key(SystemConfig(), output, or_none=False)
        assert supervisor_process.has_another_key(SystemConfig(), output, or_none=True)
        monkeypatch.setenv("PRL_API_KEY", "two words")
        with pytest.raises(LaunchError, match="PRL_API_KEY has no valid key"):
            supervisor_process.has_another_key(SystemConfig(), output, or_none=False)
        monkeypatch.setenv("PRL_API_KEY", NEW)
    assert not supervisor_process.has_another_key(SystemConfig(), output, or_none=True), "nothing answers any more"


def test_a_program_that_has_the_port_of_inference_now_does_not_get_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRL_API_KEY", NEW)
    output, asked = OutputDir(tmp_path), list[str]()
    monkeypatch.setattr(supervisor_process, "_asked", lambda url, key=None: asked.append(url) or 200)
    with inference_with(output, None, lives=False):
        assert not supervisor_process.has_another_key(SystemConfig(), output, or_none=True) and asked == []
    with inference_with(output, None):
        assert supervisor_process.has_another_key(SystemConfig(), output, or_none=True) and len(asked) == 2


@pytest.mark.parametrize(("here", "is_kept"), [(OLD, True), (NEW, False), (None, False)])
def test_daemons_of_a_dead_supervisor_are_kept_with_the_same_key_only(
    output: OutputDir, stranger: ProcessId, monkeypatch: pytest.MonkeyPatch, here: str | None, is_kept: bool
) -> None:
    system = SystemConfig.model_validate({"inference": {"port": 0}, "output_dir": str(output.path)})
    write_component_configs(system, output)
    record(output, "inference", stranger)
    monkeypatch.delenv("PRL_API_KEY", raising=False)
    if here:
        monkeypatch.setenv("PRL_API_KEY", here)
    with inference_with(output, OLD):
        prepare(system, output, print).release()
    assert stranger.is_running() == is_kept


def test_a_daemon_that_moves_to_other_devices_or_has_another_program_is_not_kept(
    output: OutputDir, stranger: ProcessId
) -> None:
    system = SystemConfig()
    write_component_configs(system, output)
    record(output, "trainer", stranger)
    assert records.adoptable(output, Local(output), system, {"inference"}) == {"trainer"}
    assert records.adoptable(output, Local(output), system, {"trainer"}) == set()
    other = SystemConfig.model_validate({"deployment": {"modules": {"trainer": "another"}}})
    assert records.adoptable(output, Local(output), other) == set()


def test_a_workspace_of_a_slurm_job_that_is_over_starts_on_this_machine(tmp_path: Path, output: OutputDir) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    data = {"output_dir": str(output.path), "model": {"name": str(model)}, "inference": {"port": 0}}
    write_component_configs(SystemConfig.model_validate({**data, "deployment": {"engine": "slurm"}}), output)
    handle = Handle(engine="slurm", name="trainer", start_id="0" * 12, ref="7 0 node1 ")
    status = DaemonStatus(name="trainer", state="running", handle=handle)
    write_atomic(output.daemon_status("trainer"), msgspec.json.encode(status))
    assert down(output, timeout_s=1.0, say=print) is False
    prepare(SystemConfig.model_validate(data), output, print).release()


@pytest.mark.parametrize(
    ("saved", "shell", "holds", "said"),
    [
        (None, {"HOME": "/h"}, None, []),
        (None, {"CUDA_VISIBLE_DEVICES": "0"}, "0", ["CUDA_VISIBLE_DEVICES: '0'"]),
        ("0,1", {"CUDA_VISIBLE_DEVICES": "0,1"}, "0,1", []),
        ("0,1", {}, "0,1", ["CUDA_VISIBLE_DEVICES: '0,1' (saved by an earlier prl up; set it to change it)"]),
        ("0,1", {"CUDA_VISIBLE_DEVICES": ""}, "", ["CUDA_VISIBLE_DEVICES: '' (was '0,1')"]),
    ],
)
def test_devices_that_are_set_win_over_the_saved_ones_and_that_is_told(
    saved: str | None, shell: dict[str, str], holds: str | None, said: list[str]
) -> None:
    lines: list[str] = []
    assert settle_devices(saved, shell, lines.append) == holds
    assert lines == said


def test_devices_that_are_saved_are_read_again(output: OutputDir) -> None:
    assert saved_devices(output) is None
    output.component_config("x").parent.mkdir()
    for devices in ("0,1", "", None):
        save_devices(output, devices)
        assert saved_devices(output) == devices


def test_a_workspace_whose_supervisor_on_another_machine_beats_is_refused(output: OutputDir) -> None:
    sign(output, "elsewhere")
    beat(output, 0)
    done = threading.Event()

    def go_on() -> None:
        number = 0
        while not done.wait(0.05):
            number += 1
            beat(output, number)

    beats = threading.Thread(target=go_on)
    beats.start()
    try:
        for attempt in (lambda: prepare(SystemConfig(), output, print), lambda: down(output, timeout_s=1.0, say=print)):
            with pytest.raises(LaunchError, match=r"pid 4711 on elsewhere since .*stop it with prl down on elsewhere"):
                attempt()
    finally:
        done.set()
        beats.join()
    info = read_info(output)
    assert info is not None and info.host == "elsewhere", "its pid file stays"


def test_a_workspace_whose_supervisor_on_another_machine_is_silent_is_taken_over(output: OutputDir) -> None:
    sign(output, "elsewhere")
    beat(output, int(time.time() + 1e6))  # its clock does not count here
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    assert find_rival(output, clock=lambda: now[0], sleep=sleep) is None
    assert 10.0 <= now[0] <= 15.0, "it was watched for two heartbeats"


def test_after_a_reboot_no_process_is_waited_for(output: OutputDir) -> None:
    sign(output, HERE)

    def sleep(seconds: float) -> None:
        raise AssertionError("this took time")

    assert find_rival(output, sleep=sleep) is None


def test_a_holder_notices_that_another_machine_took_its_workspace(output: OutputDir) -> None:
    lock = SupervisorLock.acquire(output)
    assert lock is not None
    lock.write_info(0.0)
    assert lock.is_in_place() and lock.is_in_place()
    sign(output, "elsewhere")
    assert not lock.is_in_place()
    lock.release()
    info = read_info(output)
    assert info is not None and info.host == "elsewhere", "and leaves it what is its own now"


def test_what_a_dead_holder_still_holds_is_waited_for(output: OutputDir) -> None:
    """Its threads end after it, and a child that it was starting has the lock until it becomes another program."""
    lock = SupervisorLock.acquire(output)
    assert lock is not None
    sign(output, HERE, boot=boot_id())
    last = threading.Timer(0.2, lock.release)
    last.start()
    after = SupervisorLock.acquire(output)
    last.join()
    assert after is not None
    after.release()


def test_the_lock_of_a_workspace_that_was_made_again_is_not_that_of_the_new_one(output: OutputDir) -> None:
    before = SupervisorLock.acquire(output)
    assert before is not None and SupervisorLock.acquire(output) is None
    before.write_info(1.0)
    assert before.is_in_place()
    shutil.rmtree(output.path)
    assert not before.is_in_place()
    after = SupervisorLock.acquire(output)
    assert after is not None and after.is_in_place()
    assert not before.is_in_place(), "also before the new holder has signed"
    after.write_info(2.0)
    before.release()
    found = read_info(output)
    assert found is not None and found.started_at == 2.0
    after.release()
