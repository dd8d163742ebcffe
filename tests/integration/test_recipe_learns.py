"""The recipe for a laptop as `prl demo --recipe smollm2` runs it, with the real pretrained weights, for one update.

That its reward rises takes minutes, and is shown in configs/recipes/README.md. Here is what is certain
after one update.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli
import tomli_w

from prime_rl.contract.types import read_batch
from tests.learning import ascent_of_adapter
from tests.system_support import ROOT, Workspace, closed

pytestmark = [pytest.mark.slow, pytest.mark.numeric]
RECIPE = ROOT / "configs" / "recipes" / "smollm2-sums"
NUM_STEPS = 1


@pytest.fixture
def recipe(tmp_path: Path, smollm2: Path) -> Iterator[Workspace]:
    """The recipe's own files, with one smaller update."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    system = folder / "system.toml"
    system.write_text((RECIPE / "system.toml").read_text())
    run = tomli.loads((RECIPE / "sums.toml").read_text())
    run |= {"max_steps": NUM_STEPS, "batch_size": 16, "ckpt": {"interval": 100, "keep_rollouts": True}}
    (folder / "sums.toml").write_text(tomli_w.dumps(run))
    yield from closed(Workspace(tmp_path / "demo", system, smollm2))


def test_a_pretrained_model_learns_by_the_recipe(recipe: Workspace) -> None:
    done = recipe.prl(
        "demo",
        "--recipe",
        "smollm2",
        "--configs",
        str(recipe.system_toml.parent),
        "--output-dir",
        str(recipe.output_dir),
        "--plain",
        "--model.name",
        str(recipe.model),
    )
    assert f"run_sums: step {NUM_STEPS}/{NUM_STEPS}, reward 0." in done.stdout and recipe.processes() == []
    report = json.loads((recipe.output_dir / "report.json").read_text())["runs"]["run_sums"]
    assert (report["state"], report["steps"]) == ("finished", NUM_STEPS)

    run = recipe.run_dir("run_sums")
    samples = read_batch(run.rollout_file(1)).samples
    assert len(samples) == 16 and len({sample.reward for sample in samples}) > 1
    told = [sample for sample in samples if sample.advantage]
    ascent_of_adapter(recipe.model, run.broadcast_dir(1), told).check()
