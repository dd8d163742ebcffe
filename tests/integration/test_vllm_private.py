"""What we use of vLLM without its promise: the list is whole, and the installed version has all of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.inference.vllm import private
from prime_rl.inference.vllm.server import environment

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


# What vLLM's objects are called where they are used, what of them is ours, and what is Starlette's or Python's.
OBJECTS = {"control.py": {"self._engine", "self._requests"}, "server.py": {"engine", "app"}, "worker.py": {"self"}}
OURS, OF_OTHERS = re.compile(r"_?prl_\w+"), {"state", "index", "values"}


def members_used(function: ast.AST, objects: set[str]) -> set[str]:
    """The attributes of these objects, of what they lead to, and of the names that it is given in the function."""

    def is_vllms(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in known:
            return True
        if isinstance(node, ast.Attribute):
            return not OURS.fullmatch(node.attr) and is_vllms(node.value)
        if isinstance(node, ast.Call):
            return is_vllms(node.func)
        return isinstance(node, ast.Subscript | ast.Await) and is_vllms(node.value)

    nodes, known, num_known = list(ast.walk(function)), set(objects), 0
    while len(known) > num_known:
        num_known = len(known)
        assigned = [node for node in nodes if isinstance(node, ast.Assign) and is_vllms(node.value)]
        known |= {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_vllms(node.value)}
    return {name for name in found - OF_OTHERS if not OURS.fullmatch(name)}


def test_no_member_of_vllms_objects_is_used_that_is_not_in_the_list() -> None:
    used = set()
    for name, objects in OBJECTS.items():
        for node in ast.walk(ast.parse((FOLDER / name).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                used |= members_used(node, objects)
    assert {"lora_manager", "lora_int_id", "data_parallel_index", "world_size", "errored"} <= used
    assert used <= {member for members in private.MEMBERS.values() for member in members}


def test_a_member_is_seen_through_names_calls_and_items() -> None:
    text = "async def f():\n  a = await self.core.get(1)\n  b = a.deep[0]\n  other.free(b.last)\n  self.core = other"
    assert members_used(ast.parse(text), {"self.core"}) == {"get", "deep", "last"}


def test_the_variables_are_those_that_are_set() -> None:
    from prime_rl.configs.inference import InferenceConfig

    ours = environment(InferenceConfig(num_threads=2), Path("/tmp"))
    assert {name for name in ours if name.startswith("VLLM_")} == set(private.VARIABLES)


@pytest.mark.slow
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "IMPORTED", {"json": {"loads": ("text",), "gone": ()}, "no_such_module": {"x": ()}})
    monkeypatch.setattr(private, "MEMBERS", {"json.decoder.JSONDecoder": ("decode", "strict", "gone")})
    monkeypatch.setattr(private, "VARIABLES", ())
    found = list(private.moved())
    assert len(found) == 4
    assert re.fullmatch(r"json\.loads takes \('s',\), not \('text',\)", found[0])
    assert found[1:3] == ["json.gone is not there", "no_such_module.x is not there"]
    assert found[3] == "json.decoder.JSONDecoder.gone is not there"
