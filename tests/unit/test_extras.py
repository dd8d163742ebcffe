"""The control plane without the extras: it loads, and a command that needs one names it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from daemons.cli import run
from prime_rl.configs import EXAMPLES
from prime_rl.utils.runtime import CPU, install_command, missing
from scripts import install
from tests.wheel_support import LOAD_ALL, ROOT

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_all_extras_together_are_not_needed_to_load_the_control_plane() -> None:
    names = {re.split(r"[<>=\[]", line)[0].replace("-", "_") for line in chain(*EXTRAS.values())}
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, *names], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0 and int(done.stdout) > 100, done.stderr


def test_what_the_daemons_need_is_in_the_extra() -> None:
    assert set(CPU) <= {re.split(r"[<>=]", line)[0] for line in EXTRAS["cpu"]}
    assert missing("cpu", *CPU) is None


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        ("up --output-dir {0}/new", "torch", "cpu"),
        ("up --foreground --output-dir {0}/new", "transformers", "cpu"),
        ("up --output-dir {0}/new --inference.engine vllm", "vllm", "gpu"),
        ("demo --plain --output-dir {0}/new", "transformers", "cpu"),
        ("make-base --out {0}/new", "torch", "cpu"),
        ("inference @ {0}/none.toml", "starlette", "cpu"),
        ("multinode start --master", "httpx", "cpu"),
    ],
)
def test_a_missing_extra_is_named_before_anything_starts(
    words: str, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert run(words.format(tmp_path).split()) == 1
    assert capsys.readouterr().err == f"prl: not installed: {module}; {install_command(extra)}\n"
    assert list(tmp_path.iterdir()) == []


def test_the_examples_of_a_checkout_are_its_configs() -> None:
    assert EXAMPLES == ROOT / "configs" and (EXAMPLES / "demo" / "system.toml").is_file()


def test_extras_that_are_named_exist() -> None:
    files = [path for folder in ("prime_rl", "daemons", "tui", "docs") for path in (ROOT / folder).rglob("*.*")]
    texts = [path.read_text() for path in [*files, ROOT / "README.md"] if path.suffix in (".py", ".md")]
    in_text = [name for text in texts for name in re.findall(r"prl-multirun\[([\w,-]+)\]", text)]
    in_code = [name for text in texts for name in re.findall(r"install_command\([\"'](\w+)[\"']\)", text)]
    named = {each for name in [*in_text, *in_code] for each in name.split(",")}
    assert len(named) >= 4 and named <= EXTRAS.keys()


def test_make_install_takes_extras_by_the_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing() -> None:
        pass

    for step in ("make_venv", "install_torch_cpu", "install_core"):
        monkeypatch.setattr(install, step, nothing)
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "uv", lambda *words, versions: asked.append((*words, versions)))
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.setattr(sys, "argv", ["install.py", "core"])
    for extras, code in (("", 0), ("recipes, monitors", 0), ("monitors,recipes", 0), ("recipe", 2)):
        monkeypatch.setenv("EXTRAS", extras)
        assert install.main() == code
    words = ("--no-build-isolation", "--editable", f"{install.ROOT}[recipes,monitors]", install.CPU_VERSIONS)
    assert asked == [words], "once, whatever their order"
    assert capsys.readouterr().err.startswith("install: EXTRAS: unknown recipe; known: cpu, gpu, ")


def test_an_install_ends_with_what_is_there_and_what_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second time too, where it was asked for; not before another goal of make, which has nothing to wait for."""
    for step in ("make_venv", "install_torch_cpu", "install_core", "install_test", "install_reasoning_gym"):
        monkeypatch.setattr(install, step, _named(step))
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.delenv("EXTRAS", raising=False)
    for kind, following in (("core", "next: source .venv/bin/activate, then prl up"), ("test", "next: make test")):
        monkeypatch.setattr(sys, "argv", ["install.py", kind])
        for is_goal, beginning in (("", "install: done: "), ("", None), ("install", "install: up to date: ")):
            monkeypatch.setenv("IS_GOAL", is_goal)
            assert install.main() == 0
            last = capsys.readouterr().out.splitlines()[-1:]
            assert bool(last) is (beginning is not None)
            assert all(line.startswith(str(beginning)) and following in line for line in last)


def test_make_tells_the_install_whether_it_is_the_goal() -> None:
    for goal, named in (("install", "install"), ("install-test", "install-test"), ("demo", "")):
        done = subprocess.run(["make", "-n", goal], cwd=install.ROOT, capture_output=True, text=True, check=True)
        assert f"IS_GOAL={named} " in done.stdout


def _named(name: str) -> Callable[[], None]:
    def step() -> None:
        pass

    step.__name__ = name
    return step
