"""Every file in `configs/` is valid, and every run fits the workspace beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.base import load_config
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.system import SystemConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits, check_against_trainer, load_run_config
from prime_rl.orchestrator.envs import load_environment

CONFIGS = Path(__file__).parents[2] / "configs"
# By the name of the file; every other one is a run.
PROCESSES = {"system": SystemConfig, "trainer": TrainerConfig, "inference": InferenceConfig}
SINGLE_WORKSPACE = ("demo", "reverse_text", "multi_tenant", "multi_turn")
RUNS = sorted(
    path
    for workspace in SINGLE_WORKSPACE
    for path in (CONFIGS / workspace).glob("*.toml")
    if path.stem not in PROCESSES
)


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


@pytest.mark.parametrize("path", [p for p in sorted(CONFIGS.rglob("*.toml")) if p.stem in PROCESSES], ids=name_of)
def test_processes(path: Path) -> None:
    load_config(PROCESSES[path.stem], path)


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_runs_fit_their_workspace(path: Path) -> None:
    config = load_run_config(path)
    system = load_config(SystemConfig, path.with_name("system.toml"))
    assert check_against_trainer(config, TrainerLimits.of(system.trainer)) == []
    for env in config.env:
        train = load_environment(env, config.seed).examples("train")
        longest = max(len(example.answer) for example in train)
        assert longest < config.sampling.max_tokens, "no room for the end of the turn"


def test_the_demo_has_more_runs_than_slots() -> None:
    runs = [path for path in RUNS if path.parent.name == "demo"]
    system = load_config(SystemConfig, CONFIGS / "demo" / "system.toml")
    assert {path.stem for path in runs} == {"reverse", "sort", "upper"}
    assert system.max_concurrent_runs < len(runs)
    assert len({load_run_config(path).env[0].id for path in runs}) == 3


def test_separate_processes_agree_with_each_other_and_with_their_workspace() -> None:
    folder = CONFIGS / "reverse_text"
    trainer = load_config(TrainerConfig, folder / "trainer.toml")
    inference = load_config(InferenceConfig, folder / "inference.toml")
    system = load_config(SystemConfig, folder / "system.toml")
    assert trainer == system.trainer
    assert inference == system.inference
