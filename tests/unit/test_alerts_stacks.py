"""The stacks of real processes that hang."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from daemons.alerts import __main__
from daemons.alerts.__main__ import keep_stack
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.process import ProcessId, kill_tree
from tests.patience import PATIENCE_S

PARENT = """
import subprocess, sys

def start_a_program_that_is_not_python():
    subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)

def wait_for_the_rank():
    subprocess.run([sys.executable, "-c", sys.argv[1]])

start_a_program_that_is_not_python()
wait_for_the_rank()
"""
CHILD = """
import time

def hang_in_the_rank():
    print("here", flush=True)
    time.sleep(1000)

hang_in_the_rank()
"""


@pytest.fixture
def output(tmp_path: Path) -> OutputDir:
    output = OutputDir(tmp_path)
    output.logs.mkdir()
    return output


def test_the_stack_of_a_child_that_hangs_is_kept_with_its_parents(
    output: OutputDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(__main__, "TIMEOUT_S", PATIENCE_S)
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None and parent.stdout.readline() == b"here\n"
            with caplog.at_level(logging.INFO, "alerts"):
                keep_stack(output, "trainer", ProcessId.of(parent.pid)).join()
        finally:
            kill_tree(parent.pid)
    kept = output.logs / "stacks" / "trainer.txt"
    if not kept.exists() and ("Permission" in caplog.text or "py-spy not found" in caplog.text):
        pytest.skip(caplog.text)
    assert "hang_in_the_rank" in kept.read_text() and "wait_for_the_rank" in kept.read_text()
    assert f"trainer: its stack is in {kept}" in caplog.text


SEALED = """
import time
from prime_rl.utils.secrets import seal

def hang_with_a_key():
    print("here", flush=True)
    time.sleep(1000)

seal()
hang_with_a_key()
"""


def test_a_sealed_daemon_writes_its_stack_itself_and_lives(
    output: OutputDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(__main__, "TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(__main__.shutil, "which", lambda *args, **options: None)
    log = output.log("inference")
    with log.open("wb") as file:
        daemon = subprocess.Popen([sys.executable, "-c", SEALED], stdout=file, stderr=file)
    try:
        wait_for(lambda: log.read_text() == "here\n", "the daemon to hang", timeout_s=PATIENCE_S)
        with caplog.at_level(logging.INFO, "alerts"):
            keep_stack(output, "inference", ProcessId.of(daemon.pid)).join()
        assert daemon.poll() is None, "the signal ends nothing"
    finally:
        daemon.kill()
        daemon.wait()
    kept = output.logs / "stacks" / "inference.txt"
    assert "hang_with_a_key" in kept.read_text() and "here" not in kept.read_text()
    assert caplog.messages == [f"inference: its stack is in {kept}"]


def test_a_process_of_another_machine_is_left_alone(output: OutputDir, caplog: pytest.LogCaptureFixture) -> None:
    here = ProcessId.of(os.getpid())
    if not here.start:
        pytest.skip("this system does not tell the boots of machines apart")
    with caplog.at_level(logging.INFO, "alerts"):
        keep_stack(output, "trainer", ProcessId(here.pid, here.create_time, f"another-boot/{here.start}")).join()
    (line,) = caplog.messages
    assert line.startswith("trainer: no stack is kept: ") and line.endswith(" is on another machine")
    assert not (output.logs / "stacks").exists()
