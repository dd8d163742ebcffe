"""What the trainer would do on a GPU, traced without one: no tensor is on the wrong device (`tests/traced_main.py`)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.budgets import in_full
from tests.daemons_support import ROOT
from tests.patience import PATIENCE_S
from tests.traced_main import OPTIMIZERS, USUAL

TORCH = Path(torch.__file__).parent
# What shows that the way of a GPU was taken.
GROUPED, VARLEN, FUSED_ADAM = "aten._grouped_mm", "torch_attn._varlen_attn_backward", "aten._fused_adamw_"


def built(compiler: str) -> Path:
    """`no_gpu.cpp` as a library: kept in build/, since the headers of torch take ten seconds."""
    source = ROOT / "tests" / "no_gpu.cpp"
    made_of = f"{compiler} {TORCH} {torch.__version__}".encode() + source.read_bytes()
    library = ROOT / "build" / "no_gpu" / f"{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        where = [f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]
        build = [compiler, "-shared", "-fPIC", "-std=c++20", "-O0", str(source), "-o", str(part)]
        subprocess.run([*build, *where], check=True, timeout=PATIENCE_S)
        part.replace(library)
    return library


@pytest.fixture(scope="module")
def traces(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    if torch.version.cuda is not None:
        pytest.skip("this build of torch has CUDA's own kernels; tests/gpu has the real thing")
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("g++ not found: it builds the device that computes nothing (tests/no_gpu.cpp)")
    library = built(compiler)
    # A process of its own: the device must be there before torch is. It traces what these tests ask for, and no more.
    mine: list[Any] = [item for item in request.session.items if item.path == request.path]
    scenarios = [item.callspec.params["scenario"] for item in mine]
    command = [sys.executable, "-m", "tests.traced_main", str(library), *scenarios]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("scenario", "takes"),
    [
        ("launches", {GROUPED, VARLEN}),
        ("advantages_of_tokens", {GROUPED, VARLEN}),
        ("updates", {GROUPED, VARLEN, FUSED_ADAM}),
        ("trained_head", {VARLEN}),
        *in_full(
            ("packed_bfloat16", {GROUPED, VARLEN}),
            ("packed_bfloat16_of_an_odd_rank", {VARLEN}),
            ("offloaded", {GROUPED, VARLEN}),
            ("packed_float32", set()),
            ("padded_bfloat16", {GROUPED}),
            ("updates_of_other_kinds", {GROUPED, VARLEN, FUSED_ADAM}),
        ),
    ],
)
def test_everything_is_on_the_gpu(traces: dict[str, dict[str, Any]], scenario: str, takes: set[str]) -> None:
    found = traces[scenario]
    assert found["error"] is None, found["error"]
    assert {GROUPED, VARLEN, FUSED_ADAM} & set(found["operations"]) == takes
    if scenario.startswith("updates"):
        exports = [wait for wait in found["waits"] if wait.startswith("aten._to_copy: adapter_state")]
        updated = USUAL if scenario == "updates" else set(OPTIMIZERS) - set(USUAL)
        assert len(exports) == len(updated), "one copy of each run's weights for what it publishes"
    else:
        # What is offloaded goes to pinned memory where there is a driver that pins.
        waits = [wait for wait in found["waits"] if scenario != "offloaded" or "copy_: model.py" not in wait]
        assert waits == [], "the host goes on while the device computes"
