"""The recipe for a laptop as `prl demo --recipe smollm2` runs it, with the real pretrained weights.

For NUM_UPDATES of its 25 updates, for the promise of docs/recipes.md: the mean reward rises by at least MIN_RISE,
several times the noise (in two runs by 0.31 and 0.34). And for one smaller update, for what is certain after that on
every instruction set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w

from prime_rl.contract.types import read_batch
from tests.learning import ascent_of_adapter
from tests.patience import PATIENCE_S
from tests.system_support import ROOT, Workspace, closed

pytestmark = pytest.mark.release
RECIPE = ROOT / "configs" / "recipes" / "smollm2-sums"
# From the first five updates to the last five.
NUM_UPDATES, MIN_RISE = 16, 0.15
# They take four minutes on two cores that do nothing else.
DEMO_TIMEOUT_S = 5 * PATIENCE_S


@pytest.fixture
def demo(tmp_path: Path, smollm2: Path) -> Iterator[Workspace]:
    """The recipe's own files, copied to where a test may change them."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    for file in RECIPE.iterdir():
        (folder / file.name).write_text(file.read_text())
    yield from closed(Workspace(tmp_path / "demo", folder / "system.toml", smollm2))


def run_demo(demo: Workspace, num_updates: int, **changed: Any) -> dict[str, Any]:
    """What the demo reports of its run, with some keys `changed`; nothing of it is left running."""
    source = demo.system_toml.with_name("sums.toml")
    source.write_text(tomli_w.dumps(tomli.loads(source.read_text()) | changed | {"max_steps": num_updates}))
    options = ("--configs", str(source.parent), "--output-dir", str(demo.output_dir), "--model.name", str(demo.model))
    done = demo.prl("demo", "--recipe", "smollm2", "--plain", *options, timeout_s=DEMO_TIMEOUT_S)
    report: dict[str, Any] = json.loads((demo.output_dir / "report.json").read_text())["runs"]["run_sums"]
    assert f"run_sums: step {num_updates}/{num_updates}, reward 0." in done.stdout
    assert (report["state"], report["steps"]) == ("finished", num_updates) and demo.processes() == []
    return report


@pytest.mark.timeout(DEMO_TIMEOUT_S + PATIENCE_S)
def test_the_recipe_raises_the_reward_as_the_documents_promise(demo: Workspace) -> None:
    report = run_demo(demo, NUM_UPDATES)
    assert report["reward_last"] - report["reward_first"] >= MIN_RISE, report


@pytest.mark.numeric
def test_an_update_of_the_recipe_follows_the_gradient(demo: Workspace) -> None:
    run_demo(demo, 1, batch_size=16, ckpt={"interval": 100, "keep_rollouts": True})
    run = demo.run_dir("run_sums")
    samples = read_batch(run.rollout_file(1)).samples
    assert len(samples) == 16 and len({sample.reward for sample in samples}) > 1
    told = [sample for sample in samples if sample.advantage]
    ascent_of_adapter(demo.model, run.broadcast_dir(1), told).check()
