"""Every recipe of `configs/recipes` can be started as it is, and has the figures that are said of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from daemons.demo import SYSTEM_FILE
from prime_rl.configs.base import load_config
from prime_rl.configs.system import SystemConfig
from prime_rl.configs.validate import load_run_config

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "configs" / "recipes"
README = (RECIPES / "README.md").read_text()
SYSTEMS = sorted(RECIPES.glob(f"*/{SYSTEM_FILE}"))
RUNS = sorted(path for path in RECIPES.glob("*/*.toml") if path.name != SYSTEM_FILE)


def shown(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", SYSTEMS, ids=shown)
def test_a_system_file_has_runs_that_fit_it(path: Path) -> None:
    system = load_config(SystemConfig, path)
    runs = [load_run_config(each) for each in path.parent.glob("*.toml") if each != path]
    assert runs
    for run in runs:
        assert run.model.name == system.model.name
        assert run.sampling.max_tokens < system.seq_len
        assert run.max_async_level <= system.max_async_level
        assert system.lora is not None and (run.model.lora.rank or 0) <= system.lora.rank


@pytest.mark.parametrize("path", RUNS, ids=shown)
def test_a_run_is_valid(path: Path) -> None:
    assert load_run_config(path).env


def test_the_readme_names_every_recipe() -> None:
    folders = {path.name for path in RECIPES.iterdir() if path.is_dir()}
    assert set(re.findall(r"^\| `([\w.-]+)`:", README, re.M)) == folders


TABLE = re.search(r"^\| FLAGS \| (.*) \|\n\|[-|]+\n((?:\| .*\n)+)", README, re.M)


def test_the_readme_has_figures_of_every_recipe_for_gpus() -> None:
    assert TABLE is not None
    on_gpus = {path.parent.name for path in SYSTEMS if tomllib.loads(path.read_text())["inference"]["engine"] == "vllm"}
    assert set(re.findall(r"recipes/([\w.-]+)/", TABLE[2])) == on_gpus


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE[2].splitlines() if TABLE else [], ids=lambda row: row.split("/")[2])
def test_the_figures_are_those_of_prl_fit(row: str) -> None:
    assert TABLE is not None
    flags, *figures = row.strip("| ").split(" | ")
    command = [sys.executable, "-m", "prime_rl.trainer.fit", *flags.strip("`").split(), "--json"]
    answer = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    assert [f"{answer[name]:.2f}" for name in TABLE[1].split(" | ")] == figures
