"""The wheel in an empty environment: the control plane works there, without torch, and says what it lacks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl import __version__
from prime_rl.configs import EXAMPLES
from tests.integration.test_tui_tmux import Terminal
from tests.tui_support import build_workspace
from tests.wheel_support import LOAD_ALL, Installed, clean_environment, find_python, install_wheel

pytestmark = [pytest.mark.release, pytest.mark.xdist_group("wheel")]
MAX_BYTES = 60_000_000
NEEDS_CPU = 'prl: not installed: torch, transformers, tokenizers, httpx, starlette; pip install "prl-multirun[cpu]"\n'


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def workspace(installed: Installed) -> Path:
    """A copy of a workspace, as somebody has it who looks at it through a mount."""
    there = installed.work / "there"
    build_workspace(there, living=False)
    return Path(shutil.copytree(there, installed.work / "copy"))


def test_it_is_small_and_has_no_torch(installed: Installed) -> None:
    assert installed.num_bytes < MAX_BYTES, f"{installed.num_bytes / 1e6:.0f} MB"
    for module in ("torch", "transformers"):
        assert f"No module named '{module}'" in installed.run("python", "-c", f"import {module}").stderr


def test_every_module_of_the_control_plane_loads(installed: Installed) -> None:
    loaded = installed.run("python", "-c", LOAD_ALL)
    assert loaded.returncode == 0 and int(loaded.stdout) > 100, loaded.stderr


def test_it_tells_type_checkers_that_it_is_typed(installed: Installed) -> None:
    (packages,) = (installed.venv / "lib").glob("python*/site-packages")
    assert all((packages / name / "py.typed").is_file() for name in ("prime_rl", "daemons", "tui"))


def test_the_commands_answer(installed: Installed, workspace: Path) -> None:
    assert installed.run("prl", "--version").stdout == f"prl {__version__}\n"
    assert "prl runs add RUN.toml" in installed.run("prl", "--help").stdout
    assert "--read-only" in installed.run("prl-tui", "--help").stdout
    listed = installed.run("prl", "runs", "list", "--output-dir", str(workspace), "--json")
    assert json.loads(listed.stdout)["runs"], listed.stderr
    shown = installed.run("prl", "doctor", "--output-dir", str(workspace)).stdout
    assert 'only look at workspaces: pip install "prl-multirun[cpu]"' in shown and "broken" not in shown


def test_uv_installs_it_as_a_tool_and_runs_it_without_installing(installed: Installed, tmp_path: Path) -> None:
    """As docs/install.md has both."""
    uv = pytest.importorskip("uv", reason="uv is not installed: make install-test").find_uv_bin()
    (wheel,) = (installed.work.parent / "sources" / "dist").glob("*.whl")
    folders = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        environment = clean_environment() | folders
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        if done.returncode and any(sign in done.stderr for sign in ("dns error", "error sending request", "timed out")):
            pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        return done

    run(uv, "tool", "install", str(wheel))
    assert sorted(path.name for path in (tmp_path / "bin").iterdir()) == ["prl", "prl-tui"]
    assert run(str(tmp_path / "bin" / "prl"), "--version").stdout == f"prl {__version__}\n"
    assert "--read-only" in run(uv, "run", "--no-project", "--with", str(wheel), "prl-tui", "--help").stdout


def test_the_examples_are_in_it_and_valid(installed: Installed) -> None:
    said = installed.run("python", "-c", "from prime_rl.configs import EXAMPLES; print(EXAMPLES)").stdout
    examples = Path(said.strip())
    assert examples.is_relative_to(installed.venv)
    names = {path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*") if path.is_file()}
    found = {path.relative_to(examples) for path in examples.rglob("*") if path.is_file()}
    assert {path for path in found if path.suffix != ".pyc"} == names  # pip compiles programs among them too
    run = examples / "demo" / "reverse.toml"
    assert installed.run("prl", "runs", "validate", str(run)).stdout.startswith(f"{run}: valid")
    wrong = installed.run("prl", "runs", "validate", str(examples / "demo" / "system.toml"))
    assert wrong.returncode == 2 and "looks like a workspace's system file" in wrong.stderr


@pytest.mark.parametrize(
    "words", ["up --output-dir new", "demo --plain", "make-base --out models/base", "trainer @ trainer.toml", "fit"]
)
def test_what_needs_an_extra_names_it(installed: Installed, words: str) -> None:
    done = installed.run("prl", *words.split())
    assert (done.returncode, done.stderr) == (1, NEEDS_CPU)


def test_the_browser_needs_an_extra_too(installed: Installed, workspace: Path) -> None:
    done = installed.run("prl-tui", str(workspace), "--serve")
    told = 'prl-tui: --serve: not installed: textual_serve; pip install "prl-multirun[serve]"\n'
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_later_pythons_have_the_control_plane_too(version: str, tmp_path: Path, workspace: Path) -> None:
    later = install_wheel(tmp_path, python=find_python(version))
    assert later.run("python", "--version").stdout.startswith(f"Python {version}.")
    loaded = later.run("python", "-W", "error::SyntaxWarning", "-c", LOAD_ALL)
    assert loaded.returncode == 0 and int(loaded.stdout) > 100, loaded.stderr
    listed = later.run("prl", "runs", "list", "--output-dir", str(workspace), "--json")
    assert json.loads(listed.stdout)["runs"], listed.stderr
    assert "--read-only" in later.run("prl-tui", "--help").stdout


@pytest.fixture
def terminal(installed: Installed, workspace: Path) -> Iterator[Terminal]:
    state = f"XDG_STATE_HOME={installed.work / 'state'}"
    environment = [f"{key}={value}" for key, value in clean_environment().items() if key not in ("COLUMNS", "LINES")]
    command = ["env", "-i", *environment, state, installed.command("prl-tui"), "--read-only", str(workspace)]
    opened = Terminal(installed.work, command)
    yield opened
    opened.close()


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_the_console_shows_the_workspace(terminal: Terminal) -> None:
    terminal.wait("read-only")
    terminal.wait("run_")
    terminal.press("q")


def test_with_the_extra_for_cpus_it_runs_the_demo(tmp_path: Path, untaught_model: Path) -> None:
    """From an empty folder, with the examples that are in the wheel, cut to two updates a run."""
    installed = install_wheel(tmp_path, "[cpu]")
    copied = installed.run("prl", "config", "examples", "--copy", "configs")
    assert copied.returncode == 0, copied.stderr
    configs = installed.work / "configs" / "demo"
    for path in configs.glob("*.toml"):
        path.write_text(re.sub("^max_steps = .*", "max_steps = 2", path.read_text(), flags=re.MULTILINE))
    done = installed.run("prl", "demo", "--plain", "--configs", str(configs), f"--model.name={untaught_model}")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((installed.work / "outputs" / "demo" / "report.json").read_text())
    assert {name: (each["state"], each["steps"]) for name, each in report["runs"].items()} == {
        f"run_{task}": ("finished", 2) for task in ("reverse", "sort", "upper")
    }
