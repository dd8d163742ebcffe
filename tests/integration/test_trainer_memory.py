"""A model that is trained as a whole is held in parts: a second rank takes its share off the first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.memory_main import WEIGHTS_FILE
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.release


@pytest.mark.release
def test_two_ranks_hold_much_less_each_than_one_alone(tmp_path: Path) -> None:
    """Alone: weights, gradients, two moments, the base, and the copy for inference on rank 0."""
    command = [sys.executable, "-m", "tests.memory_main", str(tmp_path)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # what is freed does not count
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("log_*"))
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    weights = (tmp_path / "model" / WEIGHTS_FILE).stat().st_size
    alone, first, second = (int((tmp_path / name).read_text()) for name in ("1_0", "2_0", "2_1"))
    print(f"in weights of the model: alone {alone / weights:.2f}, of two {first / weights:.2f}, {second / weights:.2f}")
    assert alone > 5 * weights, "what is alone has all of it"
    assert first < 0.7 * alone and second < 0.55 * alone
