"""The real `prl-tui` in a real terminal: starts a workspace, adds a run, sees it train, evicts, deletes, undoes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from tests.patience import PATIENCE_S
from tests.system_support import Workspace


class Terminal:
    """A tmux server of our own with one window that runs a command; what is on it can be read and typed to."""

    def __init__(self, folder: Path, command: list[str], *, width: int = 120, height: int = 32) -> None:
        # A socket's path may have 107 bytes; a test's folder is longer than that now and then.
        self._socket = f"prl-test-{os.getpid()}-{folder.parent.name}"
        self._run(
            "-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), "-c", str(folder), *command
        )

    def text(self) -> str:
        return self._run("capture-pane", "-p", check=False)

    def press(self, *keys: str) -> None:
        """Keys by the names that tmux has for them."""
        for key in keys:
            self._run("send-keys", key)

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", "--", text)

    def wait(self, pattern: str, *, absent: bool = False) -> str:
        """Until `pattern` stands on the screen (or does not); returns the screen."""
        seen = ""

        def there() -> bool:
            nonlocal seen
            seen = self.text()
            return (re.search(pattern, seen) is None) is absent

        try:
            wait_for(
                there, f"{pattern!r} {'to leave' if absent else 'on'} the screen", timeout_s=PATIENCE_S, poll_s=0.1
            )
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{seen}") from error
        return seen

    def is_open(self) -> bool:
        return "no server" not in self._run("list-sessions", check=False)

    def close(self) -> None:
        self._run("kill-server", check=False)

    def _run(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._socket, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout + ("" if check else done.stderr)


@pytest.fixture
def terminal(tmp_path: Path, workspace: Workspace) -> Iterator[Terminal]:
    """prl-tui on an empty workspace, in a folder whose configs are the test's own."""
    configs = tmp_path / "work" / "configs" / "mine"
    configs.mkdir(parents=True)
    shutil.copy(workspace.system_toml, configs / "system.toml")
    with workspace.write_run("fresh", max_steps=500).rename(configs / "fresh.toml").open("a") as toml:
        toml.write("keep_last = 300\n")  # it trains on while a person looks at its checkpoints
    state = f"XDG_STATE_HOME={tmp_path / 'state'}"
    opened = Terminal(
        configs.parents[1],
        ["env", "-u", "COLUMNS", "-u", "LINES", state, sys.executable, "-m", "tui", str(workspace.output_dir)],
    )
    yield opened
    opened.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_whole_day_at_the_console(terminal: Terminal, workspace: Workspace) -> None:
    terminal.wait("no runs here yet")
    start_the_workspace(terminal)
    add_a_run(terminal)
    terminal.wait(r"● active\s+run_fresh .* ([3-9]|\d\d+)/500")
    go_back_to_a_checkpoint(terminal, workspace)
    evict_delete_and_undo(terminal, workspace)
    terminal.press("q")
    wait_for(lambda: not terminal.is_open(), "prl-tui to end", timeout_s=PATIENCE_S)
    assert workspace.json("status")["daemons"][0]["state"] == "running", "quitting ends no daemon"


def start_the_workspace(terminal: Terminal) -> None:
    terminal.type("U")
    terminal.wait("as in configs/mine/system.toml")
    terminal.press("Down", "Enter")
    terminal.wait(r"✔ up: 2 slots")
    terminal.wait(r"● trainer waiting\s+● inference serving\s+● supervisor running")


def add_a_run(terminal: Terminal) -> None:
    terminal.type("a")
    terminal.wait("mine/fresh.toml")
    terminal.press("Enter")
    terminal.wait("✔ valid: reverse-text")
    terminal.press("C-s")
    terminal.wait("run_fresh: added")


def go_back_to_a_checkpoint(terminal: Terminal, workspace: Workspace) -> None:
    metrics = OutputDir(workspace.output_dir).run("run_fresh").trainer_metrics

    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in metrics.read_text().split("\n")[:-1]]

    terminal.press("Enter")
    terminal.wait("5 Checkpoints")
    terminal.type("5")
    terminal.wait(r"✔ STABLE .*starts here")
    terminal.type("G")
    terminal.press("Enter")
    asked = re.search(r"to step (\d+)", terminal.wait(r"to step \d+"))
    assert asked is not None
    step = int(asked[1])
    workspace.wait(lambda: steps()[-1] > step, "a step after the checkpoint")
    terminal.press("Enter")
    terminal.wait(f"run_fresh: rolled back to step {step}")
    workspace.wait(lambda: steps().count(step + 1) == 2, "the step after the checkpoint once more")
    workspace.wait(lambda: steps()[-1] >= step + 2 and steps().count(step + 1) == 2, "it to train on")
    trained = steps()
    assert trained[: step + 1] == list(range(1, step + 2)), "it had got there before"
    back = len(trained) - 1 - trained[::-1].index(step + 1)
    assert trained[back:] == list(range(step + 1, trained[-1] + 1)), "and goes on one by one from there"
    terminal.press("Escape")
    terminal.wait(r"● active\s+run_fresh")


def evict_delete_and_undo(terminal: Terminal, workspace: Workspace) -> None:
    terminal.type("e")
    terminal.wait("reason .required.")
    terminal.type("enough seen")
    terminal.press("Enter")
    terminal.wait(r"⊘ evicted\s+run_fresh .* enough seen")
    workspace.wait(
        lambda: workspace.runs()["run_fresh"]["run_idx"] is None and not run_lives(workspace), "the run to be let go"
    )
    terminal.type("d")
    terminal.wait(r"\d+ steps of training, [\d.]+ [KM]iB on disk")
    terminal.press("Enter")
    terminal.wait("run_fresh: moved to .trash")
    terminal.wait("no runs here yet")
    assert not (workspace.output_dir / "run_fresh").exists()
    terminal.type("u")
    terminal.wait("run_fresh: restored")
    terminal.wait(r"⊘ evicted\s+run_fresh")
    terminal.type("L")
    terminal.wait("actions of this session")
    for command in ("up @ configs/mine/system.toml", "runs add", "runs evict", "runs delete", "runs undelete"):
        terminal.wait(re.escape(f"prl {command}"))
    terminal.press("Escape")
    terminal.wait("actions of this session", absent=True)


def run_lives(workspace: Workspace) -> bool:
    for process in workspace.processes():
        with contextlib.suppress(psutil.Error):  # it may end meanwhile
            if "run_fresh" in " ".join(process.cmdline()):
                return True
    return False
