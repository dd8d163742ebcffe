"""MultiRunManager as its documentation describes it: without a trainer, by the names written there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import RunDir
from prime_rl.lora.linear import MultiLoRALinear
from prime_rl.trainer.runs import MultiRunManager
from prime_rl.trainer.runs.manager import RunLife
from prime_rl.trainer.runs.run import TrainerRun
from tests.runs_support import add, look
from tests.trainer_support import write_config

ROOT = Path(__file__).parent.parent.parent


def with_layer(workspace: Path, max_runs: int = 2, rank: int = 8) -> tuple[MultiRunManager, MultiLoRALinear]:
    manager = MultiRunManager(output_dir=workspace, max_runs=max_runs)
    layer = MultiLoRALinear(base_layer=nn.Linear(6, 4), rank=rank, n_adapters=manager.max_runs)
    layer.register_with_runs(manager, "model.layer")
    return manager, layer


def test_without_limits_the_layers_decide(tmp_path: Path) -> None:
    add(tmp_path, "run_a", 1, model={"name": "any/model"})
    add(tmp_path, "run_b", 2, model={"name": "another/model", "lora": {"rank": 4, "alpha": 12}})
    large = add(tmp_path, "run_c", 3, model={"lora": {"rank": 9}})
    manager, _ = with_layer(tmp_path)
    look(manager)
    lora = manager.config[0].model.lora
    assert (lora.rank, lora.alpha, manager.scaling_factors) == (8, 32.0, [4.0, 3.0])
    text = large.config_error.read_text()
    assert "model.lora.rank: found 9: must be at most the trainer's 8" in text


def test_without_layers_any_rank_is_taken(tmp_path: Path) -> None:
    add(tmp_path, "run_a", 1)
    add(tmp_path, "run_b", 2, model={"lora": {"rank": 100, "alpha": 50}})
    manager = look(MultiRunManager(tmp_path, 2))
    assert [manager.rank_of(idx) for idx in (0, 1)] == [16, 100] and manager.scaling_factors == [2.0, 0.5]
    assert manager.get_named_parameters_for_run(0) == [] and manager.get_state_dict_for_run(0) == {}


def test_a_layer_of_other_slots_is_refused(tmp_path: Path) -> None:
    manager = MultiRunManager(tmp_path, 2)
    layer = MultiLoRALinear(base_layer=nn.Linear(6, 4), rank=8, n_adapters=3)
    with pytest.raises(ValueError, match="layer x has n_adapters = 3, the manager 2 slots"):
        layer.register_with_runs(manager, "x")


def test_a_scale_that_a_discovered_hook_sets_is_used_and_published(tmp_path: Path) -> None:
    add(tmp_path, "run_a", model={"lora": {"rank": 4, "alpha": 12}})
    manager, layer = with_layer(tmp_path)
    manager.register_discovered_hook(lambda idx, run_id, config: manager.scaling_factors.__setitem__(idx, 0.5))
    look(manager)
    for _, parameter in manager.get_named_parameters_for_run(0):
        nn.init.ones_(parameter)
    x_RTI = torch.ones(1, 2, 6)
    layer.routing.set_rows([0])
    delta_RTO = layer(x_RTI) - layer.base_layer(x_RTI)
    torch.testing.assert_close(delta_RTO, torch.full_like(delta_RTO, 0.5 * 6 * 8))
    assert manager.alpha_of(0) == 2.0, "0.5 at rank 4"


def test_each_look_calls_forgotten_then_validation_then_discovered(tmp_path: Path) -> None:
    for number in (1, 2):
        add(tmp_path, f"run_{number}", number, seed=number)
    manager, _ = with_layer(tmp_path)
    look(manager)
    calls: list[tuple[str, Any]] = []

    def valid(config: OrchestratorConfig) -> tuple[bool, str]:
        calls.append(("validation", config.seed))
        return True, ""

    manager.register_config_validation_hook(valid)
    manager.register_discovered_hook(lambda idx, run_id, config: calls.append(("discovered", run_id)))
    manager.register_forgotten_hook(lambda idx, run_id: calls.append(("forgotten", run_id)))
    manager.register_creation_hook(lambda idx, run_id: calls.append(("creation", run_id)))
    manager.register_deletion_hook(lambda idx, run_id: calls.append(("deletion", run_id)))
    for number in (1, 2):
        manager.evict_run(idx=number - 1, reason="test")
        add(tmp_path, f"run_{number + 2}", number + 2, seed=number + 2)
    look(manager)
    in_order = [("forgotten", "run_1"), ("forgotten", "run_2"), ("validation", 3), ("validation", 4)]
    in_order += [("discovered", "run_3"), ("discovered", "run_4"), ("deletion", "run_1"), ("deletion", "run_2")]
    assert calls == [*in_order, ("creation", "run_3"), ("creation", "run_4")]


def test_a_run_that_comes_back_is_judged_again(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a", seed=1)
    manager, _ = with_layer(tmp_path)
    seen: list[int] = []

    def accept(config: OrchestratorConfig) -> tuple[bool, str]:
        seen.append(config.seed)
        return True, ""

    manager.register_config_validation_hook(accept)
    for _ in range(2):
        look(manager)
        look(manager)
        manager.evict_run(idx=0, reason="test")
        look(manager)
        run.evicted.unlink()
    assert seen == [1, 1]


def test_who_waits_is_judged_again_when_there_is_a_new_rule(tmp_path: Path) -> None:
    first, second = add(tmp_path, "run_a", 1, seed=1), add(tmp_path, "run_b", 2, seed=2)
    manager, _ = with_layer(tmp_path, max_runs=1)
    assert look(manager).waiting == ["run_b"]
    seen: list[int] = []

    def even_seeds(config: OrchestratorConfig) -> tuple[bool, str]:
        seen.append(config.seed)
        return config.seed % 2 == 0, "the seed is odd"

    manager.register_config_validation_hook(even_seeds)
    assert look(manager).waiting == ["run_b"] and seen == [2]
    manager.evict_run(idx=0, reason="test")
    assert look(manager).id_2_idx == {"run_b": 0}
    first.evicted.unlink()
    look(manager)
    assert manager.findings.invalid == ["run_a"] and first.config_error.read_text().strip().endswith("the seed is odd")
    assert not second.config_error.exists()


@pytest.mark.parametrize("kind", ["discovered", "creation"])
def test_the_reason_names_the_hook_and_its_error(tmp_path: Path, kind: str) -> None:
    run = add(tmp_path, "run_a")
    manager, _ = with_layer(tmp_path)

    class Strict:
        def check_room(self, *arguments: object) -> None:
            raise KeyError("no room")

    getattr(manager, f"register_{kind}_hook")(Strict().check_room)
    look(manager)
    assert "Strict.check_room: KeyError: 'no room'" in run.evicted.read_text() and manager.used_idxs == set()


def test_hooks_of_a_run_that_leaves_all_get_their_turn(tmp_path: Path) -> None:
    add(tmp_path, "run_a")
    manager, _ = with_layer(tmp_path)
    calls: list[str] = []

    def fails(idx: int, run_id: str) -> None:
        raise OSError("no")

    for register in (manager.register_forgotten_hook, manager.register_deletion_hook):
        register(fails)
        register(lambda idx, run_id: calls.append(run_id))
    look(manager)
    manager.evict_run(idx=0, reason="test")
    look(manager)
    assert calls == ["run_a", "run_a"] and manager.used_idxs == set()


def test_names_with_dots_are_names(tmp_path: Path) -> None:
    for run_id in ("run_1", "run_1.5", "run_1.50"):
        add(tmp_path, run_id)
    manager, _ = with_layer(tmp_path, max_runs=3)
    look(manager)
    assert set(manager.id_2_idx) == {"run_1", "run_1.5", "run_1.50"}
    assert manager.get_run_dir(manager.id_2_idx["run_1.5"]) == tmp_path / "run_1.5"
    manager.evict_run(idx=manager.id_2_idx["run_1.5"], reason="test")
    assert set(look(manager).id_2_idx) == {"run_1", "run_1.50"}


def test_the_older_place_of_a_config_has_its_errors_in_control(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run_old")
    (run.path / "configs").mkdir(parents=True)
    (run.path / "configs" / "orch.toml").write_text("batch_size = 4")
    manager, _ = with_layer(tmp_path)
    assert look(manager).findings.invalid == ["run_old"]
    assert run.config_error.parent.name == "control" and "model: required, but missing" in run.config_error.read_text()
    write_config(run, Path("m"))
    assert look(manager).id_2_idx == {"run_old": 0} and not run.config_error.exists()


def test_a_slot_without_a_run_is_named(tmp_path: Path) -> None:
    manager, _ = with_layer(tmp_path)
    for call in (manager.get_run_dir, manager.get_state_dict_for_run, manager.reset_run_parameters):
        with pytest.raises(KeyError, match="no run in slot 1"):
            call(1)
    with pytest.raises(KeyError, match="no run in slot 1"):
        manager.evict_run(idx=1, reason="test")
    assert not manager.needs_discovery


def test_a_reset_gives_the_start_values_of_the_run(tmp_path: Path) -> None:
    add(tmp_path, "run_a", seed=3)
    manager, _ = with_layer(tmp_path)
    start = look(manager).get_state_dict_for_run(0)
    for _, parameter in manager.get_named_parameters_for_run(0):
        nn.init.ones_(parameter)
    manager.reset_run_parameters(0)
    again = manager.get_state_dict_for_run(0)
    assert all(torch.equal(again[name], tensor) for name, tensor in start.items())


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "runs.md").read_text(), re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/runs.md", "exec"), names)


@pytest.mark.parametrize("fails", ["admitted", "created"])
def test_a_run_that_puts_itself_forward_again_pays_for_what_its_failed_start_took(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment may remove `evicted.txt`: the run is not admitted at each look, and the others train."""
    run = add(tmp_path, "run_a", 1)
    add(tmp_path, "run_b", 2)
    manager, _ = with_layer(tmp_path)
    took_s, now, tries = [0.0], [100.0], []
    monkeypatch.setattr(manager._discovery, "spent", lambda: took_s[0])
    monkeypatch.setattr(manager._discovery, "_clock", lambda: now[0])

    class Life(RunLife):
        def start(self, state: str, started: TrainerRun) -> None:
            if state == fails and started.run_id == "run_a":
                tries.append(now[0])
                took_s[0] += 2.0
                raise ValueError("a state that takes long to read")

        def admitted(self, run: TrainerRun) -> None:
            self.start("admitted", run)

        def created(self, run: TrainerRun) -> None:
            self.start("created", run)

    manager.life = Life()
    for _ in range(5):
        look(manager)
        run.evicted.unlink(missing_ok=True)
        now[0] += 1.0
    assert len(tries) == 1 and [each.run_id for each in manager.used] == ["run_b"]
    now[0] += 100.0
    look(manager)
    assert len(tries) == 2, "its owner, who mended it, does not wait for ever"
