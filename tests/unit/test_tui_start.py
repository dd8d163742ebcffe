"""Starting: what is imported, what is said when the folder is not there."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tui.cli import main

HEAVY = ("torch", "vllm", "transformers", "peft", "starlette")


def run_python(code: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, tui, tui.app, tui.screens.acting; print([name for name in {!r} if name in sys.modules])"
    assert run_python(code.format(HEAVY)) == "[]"


def test_read_only_never_imports_what_acts(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib, sys
from tui.app import PrlApp
async def go():
    app = PrlApp(pathlib.Path({str(tmp_path)!r}), read_only=True)
    async with app.run_test() as pilot:
        await pilot.pause()
        for key in "aerdu":
            await pilot.press(key)
asyncio.run(go())
acts = ("daemons.actions", "tui.screens.acting", "tui.actions", "tui.dialogs")
print([name for name in sys.modules if name.startswith(acts)])
"""
    assert run_python(code) == "[]"


def test_a_missing_folder_is_wrong_use_in_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    done = subprocess.run(
        [sys.executable, "-m", "tui", str(missing)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and str(missing) in done.stderr


@pytest.mark.parametrize("other", ["input", "output", "error"])
def test_without_a_terminal_it_names_what_prints_text(tmp_path: Path, other: str) -> None:
    ours, theirs = pty.openpty()
    streams = {name: subprocess.PIPE if name == other else theirs for name in ("input", "output", "error")}
    command = [sys.executable, "-m", "tui", str(tmp_path)]
    child = subprocess.Popen(command, stdin=streams["input"], stdout=streams["output"], stderr=streams["error"])
    os.close(theirs)
    _, err = child.communicate(timeout=PATIENCE_S)
    said = err if other == "error" else os.read(ours, 1 << 16)
    os.close(ours)
    line = f"prl-tui: standard {other} must be a terminal; as text: prl status --output-dir {tmp_path}"
    assert (child.returncode, said.decode().splitlines()) == (2, [line])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "1"], "--port requires --serve"),
        (["--allow-actions"], "--allow-actions requires --serve"),
        (["--serve", "--read-only", "--allow-actions"], "exclude each other"),
        (["--serve", "--host", "0.0.0.0"], "invalid host 0.0.0.0"),
        (["--serve", "--port", "70000"], "0 to 65535"),
    ],
)
def test_wrong_use_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main([*arguments, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error


def test_the_folder_comes_from_the_environment(tmp_path: Path) -> None:
    env = {**os.environ, "PRL_OUTPUT_DIR": str(tmp_path / "from-env")}
    done = subprocess.run(
        [sys.executable, "-m", "tui"], capture_output=True, text=True, timeout=PATIENCE_S, env=env, check=False
    )
    assert done.returncode == 2 and "from-env" in done.stderr
