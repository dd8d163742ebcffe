"""A run that starts from an adapter: version 0 computes what the source computes, and can learn in all of its rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.contract.files import read_text
from prime_rl.contract.layout import RunDir, stable_marker
from prime_rl.contract.peft import AdapterConfig, untrained_modules
from prime_rl.lora.adapter_state import load_peft, peft_names, save_peft
from prime_rl.trainer.checkpoint import RunSnapshot, begun_from
from prime_rl.trainer.publish import FileSystemWeightBroadcast
from tests.runs_support import add, look
from tests.unit.test_trainer_snapshot import Trainer

pytestmark = pytest.mark.numeric
NAME_A, NAME_B = peft_names("layer")
Tensors = dict[str, torch.Tensor]


def adapter_of(rank: int, seed: int = 7) -> Tensors:
    """Of the one layer of `manager_of`: 6 in, 4 out."""
    generator = torch.Generator().manual_seed(seed)
    return {
        NAME_A: torch.randn(rank, 6, generator=generator),
        NAME_B: torch.randn(4, rank, generator=generator),
    }


def function_of(tensors: Tensors, scale: float) -> torch.Tensor:
    return scale * tensors[NAME_B].double() @ tensors[NAME_A].double()


def put_init(run: RunDir, tensors: Tensors, *, rank: int, alpha: float) -> None:
    run.init.mkdir()
    save_peft(run.init, tensors, rank=rank, alpha=alpha, target_modules=["layer"], base_model="some/model")


def trained(workspace: Path, **changes: Any) -> tuple[RunDir, Trainer]:
    """A run that was trained for three steps and saved."""
    run = add(workspace, "run_a", **changes)
    trainer = Trainer(workspace)
    for _ in range(3):
        trainer.update()
    trainer.checkpoints.save(trainer.snapshots.whole(trainer.run))
    return run, trainer


def forked(run: RunDir, workspace: Path, *, moments: bool, **changes: Any) -> Trainer:
    """A trainer whose only run starts from the checkpoint of `run`."""
    fork = add(workspace, "run_b", init={"from": "run_a@v3"}, **changes)
    shutil.copytree(run.trainer_checkpoint(3), fork.init)
    if not moments:
        (fork.init / "progress.json").unlink()
    return Trainer(workspace)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_rank_starts_from_the_same_bits(tmp_path: Path, dtype: str) -> None:
    lora = {"lora": {"rank": 4, "dtype": dtype}}
    run, one = trained(tmp_path / "one", model=lora)
    other = forked(run, tmp_path / "other", moments=False, model=lora, seed=99)
    assert torch.equal(other.weights(), one.weights())
    assert (other.run.progress.step, other.run.progress.total_tokens) == (0, 0)
    version = FileSystemWeightBroadcast().publish(RunSnapshot.of(other.run, other.snapshots.weights(other.run), None))
    assert version == other.run.dir.broadcast_dir(0) and stable_marker(version).exists()
    tensors, config = load_peft(version)
    assert config.scaling == load_peft(run.trainer_checkpoint(3))[1].scaling
    assert all(torch.equal(tensors[name], tensor) for name, tensor in load_peft(run.trainer_checkpoint(3))[0].items())


def test_with_its_moments_the_next_update_is_the_same_but_for_the_rate(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"lora": {"rank": 4}}, "scheduler": {"type": "linear", "warmup_steps": 2}}
    run, one = trained(tmp_path / "one", **changes)
    other = forked(run, tmp_path / "other", moments=True, **changes)
    fresh = forked(run, tmp_path / "fresh", moments=False, **changes)
    for state in (one, other):
        assert state.run.training.optimizer.state_dict()["state"], "it has moments"
    assert not fresh.run.training.optimizer.state_dict()["state"]
    saved, taken = (each.run.training.optimizer.state_dict()["state"][0] for each in (one, other))
    assert all(torch.equal(saved[key], taken[key]) for key in saved)
    assert other.run.training.scheduler.last_epoch == 0 and other.run.training.lr == fresh.run.training.lr


def test_a_lower_rank_with_another_scale_computes_the_same_and_can_learn(tmp_path: Path) -> None:
    source = adapter_of(2)
    run = add(tmp_path, "run_a", init={"from": "folder"}, model={"lora": {"rank": 8, "alpha": 32}})
    put_init(run, source, rank=2, alpha=3)
    trainer = Trainer(tmp_path)
    begun = trainer.manager.get_state_dict_for_run(0)
    torch.testing.assert_close(function_of(begun, 32 / 8), function_of(source, 3 / 2), rtol=1e-6, atol=1e-6)
    assert torch.equal(begun[NAME_A][:2], source[NAME_A])
    assert begun[NAME_A][2:].abs().min() > 0 and begun[NAME_B][:, 2:].abs().max() == 0, "the rest learns from zero"


def test_modules_that_it_does_not_adapt_stay_as_they_begin() -> None:
    fresh = adapter_of(4, seed=1) | {name.replace("layer", "other"): t for name, t in adapter_of(4, seed=2).items()}
    source = adapter_of(4)
    begun = begun_from(fresh, source, AdapterConfig(4, 4.0, ("layer",), "m"), rank=4, scale=1.0)
    assert {name for name in fresh if torch.equal(begun[name], fresh[name])} == fresh.keys() - source.keys()
    assert all(torch.equal(begun[name], source[name]) for name in source)


@pytest.mark.parametrize(
    ("tensors", "rank", "message"),
    [
        (adapter_of(9), 9, r"the adapter has rank 9, the run model\.lora\.rank = 8"),
        ({f"x.{name}": t for name, t in adapter_of(2).items()}, 2, r"x\.base_model.* is not in the model"),
        ({NAME_A: adapter_of(2)[NAME_A]}, 2, "layer.lora_B.weight is missing"),
        (adapter_of(2), 3, r"has shape \[2, 6\], expected \[3, 6\]"),
        ({}, 2, "it has no tensors"),
    ],
    ids=["rank", "modules", "half", "shape", "empty"],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, tensors: Tensors, rank: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        begun_from(adapter_of(8), tensors, AdapterConfig(rank, 8.0, ("layer",), "m"), rank=8, scale=1.0)


def test_a_run_whose_adapter_does_not_fit_or_is_missing_is_evicted_with_the_reason(tmp_path: Path) -> None:
    add(tmp_path, "run_good", landed=1)
    lost = add(tmp_path, "run_lost", landed=2, init={"from": "run_z@v2"})
    large = add(tmp_path, "run_large", landed=3, init={"from": "folder"}, model={"lora": {"rank": 4}})
    put_init(large, adapter_of(6), rank=6, alpha=6)
    trainer = Trainer(tmp_path)
    look(trainer.manager)
    assert "init.from = 'run_z@v2', but" in (read_text(lost.evicted) or "")
    assert "the adapter has rank 6, the run model.lora.rank = 4" in (read_text(large.evicted) or "")
    assert trainer.manager.idx_2_id == {0: "run_good"}


def test_target_modules_are_compared_by_their_last_parts() -> None:
    assert untrained_modules(["q_proj", "layers.0.v_proj"], ["q_proj", "v_proj"]) == []
    assert untrained_modules(["q_proj", "gate_proj", "proj"], ["q_proj", "v_proj"]) == ["gate_proj", "proj"]
