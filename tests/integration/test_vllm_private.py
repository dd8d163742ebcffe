"""What we use of vLLM without its promise: the list is whole, and the installed version has all of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.inference.vllm import private
from prime_rl.inference.vllm.arguments import environment

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "prime_rl/inference/vllm"


@pytest.mark.vllm
@pytest.mark.slow
def test_the_installed_vllm_has_all_of_it() -> None:
    command = [sys.executable, "-m", "prime_rl.inference.vllm.private"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr[-2000:]


def test_nothing_is_imported_from_vllm_that_is_not_in_the_list() -> None:
    imported = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    listed = {f"{module}.{name}" for module, names in private.IMPORTED.items() for name in names}
    modules = {*private.IMPORTED, "vllm.SamplingParams"}
    assert imported <= listed | modules


def test_the_variables_are_those_that_are_set() -> None:
    from prime_rl.configs.inference import InferenceConfig

    ours = environment(InferenceConfig(num_threads=2), Path("/tmp"))
    assert {name for name in ours if name.startswith("VLLM_")} == set(private.VARIABLES)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "IMPORTED", {"json": {"loads": ("text",), "gone": ()}, "no_such_module": {"x": ()}})
    monkeypatch.setattr(private, "MEMBERS", {"json.decoder.JSONDecoder": ("decode", "strict", "gone")})
    monkeypatch.setattr(private, "VARIABLES", ())
    found = list(private.moved())
    assert len(found) == 4
    assert re.fullmatch(r"json\.loads takes \('s',\), not \('text',\)", found[0])
    assert found[1:3] == ["json.gone is not there", "no_such_module.x is not there"]
    assert found[3] == "json.decoder.JSONDecoder.gone is not there"
