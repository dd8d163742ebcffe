"""What the trainer would do on a GPU, traced without one: no tensor is on the wrong device (`tests/traced_main.py`)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daemons_support import ROOT
from tests.patience import PATIENCE_S

TORCH = Path(torch.__file__).parent
# What shows that the way of a GPU was taken.
GROUPED, VARLEN, FUSED_ADAM = "aten._grouped_mm", "torch_attn._varlen_attn_backward", "aten._fused_adamw_"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    if torch.version.cuda is not None:
        pytest.skip("this build of torch has CUDA's own kernels; tests/gpu has the real thing")
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("g++ not found: it builds the device that computes nothing (tests/no_gpu.cpp)")
    library = tmp_path_factory.mktemp("no_gpu") / "no_gpu.so"
    where = [f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]
    build = [compiler, "-shared", "-fPIC", "-std=c++20", "-O0", str(ROOT / "tests/no_gpu.cpp"), "-o", str(library)]
    subprocess.run([*build, *where], check=True, timeout=PATIENCE_S)
    # A process of its own: the device must be there before torch is.
    command = [sys.executable, "-m", "tests.traced_main", str(library)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("scenario", "takes"),
    [
        ("packed_bfloat16", {GROUPED, VARLEN}),
        ("advantages_of_tokens", {GROUPED, VARLEN}),
        ("packed_bfloat16_of_an_odd_rank", {VARLEN}),
        ("offloaded", {GROUPED, VARLEN}),
        ("packed_float32", set()),
        ("padded_bfloat16", {GROUPED}),
        ("trained_head", {VARLEN}),
        ("updates", {GROUPED, VARLEN, FUSED_ADAM}),
    ],
)
def test_everything_is_on_the_gpu(traces: dict[str, dict[str, Any]], scenario: str, takes: set[str]) -> None:
    found = traces[scenario]
    assert found["error"] is None, found["error"]
    assert {GROUPED, VARLEN, FUSED_ADAM} & set(found["operations"]) == takes
