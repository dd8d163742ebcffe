"""The layer table: the allowed imports, by the sources; and what two light packages may load, measured."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYER_0 = ("prime_rl.contract", "prime_rl.utils")
LAYER_1 = (*LAYER_0, "prime_rl.configs")
# How the console reads a workspace, as `prl` does.
READS = ("daemons.workspace", "daemons.workspace_reader", "daemons.machine", "daemons.ranking")
# What it does to one.
ACTS = (
    *("daemons.actions", "daemons.adding", "daemons.sweeps"),
    *("daemons.exports", "daemons.chat", "daemons.quiet", "daemons.up_and_down", "daemons.details", "daemons.doctor"),
    *("daemons.quiet", "daemons.alerts.targets", "daemons.errors", "daemons.details", "daemons.start"),
)
# package -> what of this project, and of the heavy libraries, it may import
ALLOWED: dict[str, tuple[str, ...]] = {
    "prime_rl/contract": (*LAYER_0, "msgspec", "watchdog", "psutil"),
    "prime_rl/utils": (*LAYER_0, "msgspec", "watchdog", "psutil"),
    "prime_rl/configs": (*LAYER_1, "pydantic", "tomli"),
    "prime_rl/gateway": (*LAYER_1, "prime_rl.gateway", "starlette"),
    "prime_rl/lora": (*LAYER_0, "prime_rl.lora", "torch", "safetensors"),
    "prime_rl/transfer.py": ("prime_rl.transfer", "torch"),
    "prime_rl/trainer": (
        *LAYER_1,
        "prime_rl.lora",
        "prime_rl.transfer",
        "prime_rl.trainer",
        "torch",
        "transformers",
    ),
    "prime_rl/base_model": (*LAYER_1, "prime_rl.base_model", "torch", "transformers", "tokenizers"),
    "prime_rl/inference": (
        *LAYER_1,
        "prime_rl.lora",
        "prime_rl.transfer",
        "prime_rl.inference",
        "torch",
        "transformers",
        "vllm",
        "starlette",
        "psutil",
    ),
    "prime_rl/orchestrator": (
        *LAYER_1,
        "prime_rl.gateway",
        "prime_rl.orchestrator",
        "tokenizers",
        "httpx",
        "reasoning_gym",
    ),
    "prime_rl/orchestrator/envs": (*LAYER_1, "prime_rl.orchestrator.envs", "httpx", "reasoning_gym"),
    "prime_rl/multinode": (*LAYER_1, "prime_rl.multinode"),
    "daemons": (
        *LAYER_1,
        "daemons",
        "prime_rl.gateway.keys",
        "prime_rl.gateway.texts",
        "prime_rl.results",
        "psutil",
        "typer",
    ),
    "prime_rl/results.py": (*LAYER_1, *READS, "daemons.details", "daemons.errors"),
    "tui": (*LAYER_1, *READS, *ACTS, "tui", "textual"),
}
OURS = ("prime_rl", "daemons", "tui")
# Libraries whose place is limited: a package that is not named with them above may not load them.
GUARDED = (
    *("torch", "transformers", "vllm", "starlette", "textual", "typer", "tokenizers", "httpx", "watchdog", "psutil"),
    "reasoning_gym",
)


@cache
def imported_names(path: Path) -> list[tuple[int, str]]:
    """(line, full name) of every import of a file, those inside functions too."""
    return list(_imported_names(path))


def _imported_names(path: Path) -> Iterator[tuple[int, str]]:
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            module = f"{base}{node.module or ''}".rstrip(".")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def is_within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def violations(package: str, allowed: tuple[str, ...]) -> Iterator[str]:
    place = ROOT / package
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        for line, name in imported_names(path):
            guarded = is_within(name, OURS) or is_within(name, GUARDED)
            if guarded and not is_within(name, (*allowed, "prime_rl.__version__")):
                yield f"{path.relative_to(ROOT)}:{line} imports {name}"


# The console: each room imports from itself and from those before it, also inside functions.
ROOMS = (
    ("tui.fmt", "tui.memory", "tui.keys"),
    ("tui.readers",),
    ("tui.model",),
    ("tui.messages",),
    ("tui.watcher", "tui.actions"),
    ("tui.widgets",),
    ("tui.dialogs",),
    ("tui.screens",),
    ("tui.app", "tui.serve"),
    ("tui.cli",),
    ("tui.__main__",),
)


def room_of(module: str) -> int:
    return next(number for number, room in enumerate(ROOMS) if is_within(module, room))


def console_imports() -> dict[str, set[str]]:
    """Module of the console -> the modules of the console that it imports."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "tui").rglob("*.py")}
    modules = {name: path for name, path in files.items() if not name.endswith("__init__")}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {name for _, name in imported_names(path)}
        found[module] = {each for each in modules for name in names if name == each or name.startswith(f"{each}.")}
    return found


def circles(imports: dict[str, set[str]]) -> list[str]:
    """The modules of circles, and those that import them: what is left when modules that import none are taken out."""
    left = {module: set(names) for module, names in imports.items()}
    while free := {module for module, names in left.items() if not names & left.keys()}:
        left = {module: names for module, names in left.items() if module not in free}
    return sorted(left)


def test_the_console_flows_one_way() -> None:
    imports = console_imports()
    wrong = [f"{a} imports {b}" for a, names in imports.items() for b in names if room_of(b) > room_of(a)]
    assert (wrong, circles(imports)) == ([], [])


def test_circles_are_seen() -> None:
    assert circles({"a": {"b"}, "b": {"a"}, "c": set(), "d": {"c"}}) == ["a", "b"]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_follow_the_layers(package: str) -> None:
    assert list(violations(package, ALLOWED[package])) == []


def test_the_check_sees_a_violation() -> None:
    assert list(violations("prime_rl/lora", ("prime_rl.lora",)))


def test_what_decoding_raises_is_named_in_one_place() -> None:
    """msgspec has no error of its own for text that is not UTF-8, so who names its errors forgets that one."""
    files = [path for package in ("prime_rl", "daemons", "tui") for path in (ROOT / package).rglob("*.py")]
    naming = [path for path in files if re.search(r"(except|suppress\().*MsgspecError", path.read_text("utf-8"))]
    # What it looks at is decoded already.
    assert naming == [ROOT / "prime_rl" / "inference" / "embedded" / "server.py"]


def test_text_files_are_utf8_whatever_the_locale() -> None:
    """Beside ruff's rule, which sees only paths whose type it knows."""
    found = []
    folders = ("prime_rl", "daemons", "tui", "scripts", "benchmarks")
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py")]:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if re.search(r"read_text|write_text|\btext=", source) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                given = {each.arg for each in node.keywords}
                is_file = isinstance(node.func, ast.Attribute) and name in ("read_text", "write_text")
                is_output = name in ("run", "Popen", "check_output") and "text" in given
                if "encoding" not in given and (is_file or is_output):
                    found.append(f"{path}:{node.lineno}")
    assert found == []


def test_light_packages_load_no_heavy_library() -> None:
    modules = "tui.app, daemons.cli, prime_rl.orchestrator.orchestrator, prime_rl.results"
    heavy = ("torch", "vllm", "transformers", "wandb", "tensorboard", "trackio", "reasoning_gym", "verifiers")
    code = f"import sys, {modules}; print(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []
