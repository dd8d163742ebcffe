"""A command in a fork is what it is as a process of its own: its arguments, folder, streams, exit code and signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from daemons import actions
from prime_rl.contract.files import append_line, wait_for
from prime_rl.contract.layout import OutputDir
from tests.daemons_support import ROOT, RUN_TOML
from tests.patience import PATIENCE_S
from tests.warm import warm


def test_a_fork_is_the_command(tmp_path: Path) -> None:
    prl, env = warm("daemons.cli"), {**os.environ, "PRL_OUTPUT_DIR": "out"}
    (tmp_path / "a.toml").write_text(RUN_TOML.format(max_steps=1, model="m"))
    done = prl.run(["runs", "add", "a.toml"], env=env, cwd=tmp_path, timeout_s=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "added run_a to out\n") and (tmp_path / "out" / "run_a").is_dir()
    asked = prl.run(["runs", "delete", "run_a"], env=env, cwd=tmp_path, timeout_s=PATIENCE_S, stdin="no\n")
    assert asked.returncode != 0 and (tmp_path / "out" / "run_a").is_dir()
    wrong = prl.run(["nonsense"], env=env, cwd=tmp_path, timeout_s=PATIENCE_S)
    assert wrong.returncode == 2 and wrong.stdout == "" and "nonsense" in wrong.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_one_that_lives_can_be_signalled_and_leads_its_session(tmp_path: Path, signum: signal.Signals) -> None:
    env, log = {**os.environ, "PRL_OUTPUT_DIR": str(tmp_path)}, tmp_path / "log"
    (tmp_path / "a.toml").write_text(RUN_TOML.format(max_steps=1, model="m"))
    actions.add_run(tmp_path, tmp_path / "a.toml", run_id="run_a")
    append_line(OutputDir(tmp_path).run("run_a").log, "a line")
    child = warm("daemons.cli").start(["logs", "run_a", "-f"], env=env, cwd=ROOT, log=log)
    try:
        wait_for(lambda: "a line" in log.read_text(), "the line", timeout_s=PATIENCE_S)
        assert child.poll() is None and os.getsid(child.pid) == child.pid
        child.send_signal(signum)
        assert child.wait(PATIENCE_S) == (-signum if signum == signal.SIGKILL else 0)
    finally:
        child.kill()
    assert not psutil.pid_exists(child.pid)


def test_another_interpreter_is_a_process_of_its_own(tmp_path: Path) -> None:
    prl = warm("daemons.cli")
    env = {**os.environ, "PYTHONVERBOSE": "1", "PYTHONPATH": str(ROOT)}
    assert prl.suits(os.environ) and not prl.suits(env)
    done = prl.run(["--version"], env=env, cwd=tmp_path, timeout_s=PATIENCE_S)
    assert done.returncode == 0 and "import 'daemons'" in done.stderr
