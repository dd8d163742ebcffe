"""A run that is saved and loaded is the same run: weights, moments, rate, random numbers, for every optimizer."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from prime_rl.configs.admitted import apply
from prime_rl.configs.base import LoRAConfig
from prime_rl.configs.orchestrator import OptimConfig
from prime_rl.contract.layout import RunDir, list_steps, stable_marker
from prime_rl.trainer import checkpoint
from prime_rl.trainer.checkpoint import AdapterSnapshots, CheckpointManager, trainer_steps
from prime_rl.trainer.runs import MultiLoRAOptimizer, MultiRunManager
from tests.runs_support import BASE, add, look, manager_of
from tests.trainer_support import solo_world, write_config

pytestmark = pytest.mark.numeric

TYPES = get_args(OptimConfig.model_fields["type"].annotation)
LORA = LoRAConfig(rank=16, target_modules=("layer",))


class Trainer:
    """What a trainer has for its runs, without the model."""

    def __init__(self, workspace: Path) -> None:
        self.manager: MultiRunManager = manager_of(workspace)
        self.snapshots = AdapterSnapshots(self.manager, "some/model", LORA)
        self.checkpoints = CheckpointManager(self.snapshots)
        self.manager.register_discovered_hook(
            lambda idx, run_id, config: self.checkpoints.admitted(self.manager.run(idx))
        )
        MultiLoRAOptimizer(self.manager, solo_world())
        self.manager.register_creation_hook(lambda idx, run_id: self.checkpoints.load(self.manager.run(idx)))
        look(self.manager)
        self.run = self.manager.run(0)

    def update(self) -> torch.Tensor:
        """A step along random numbers of the run's own."""
        for _, leaf in self.manager.get_named_parameters_for_run(0):
            leaf.grad = torch.rand(leaf.shape, generator=self.run.generator) - 0.3
        self.run.training.step(self.run.training.reduce_gradients())
        self.run.training.next_rate()
        self.run.progress.step += 1
        self.run.progress.total_tokens += 100
        return self.weights()

    def weights(self) -> torch.Tensor:
        return torch.cat([tensor.float().reshape(-1) for tensor in self.manager.get_state_dict_for_run(0).values()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", TYPES)
def test_a_saved_run_goes_on_to_the_same_bits(tmp_path: Path, kind: str, dtype: str) -> None:
    changes: dict[str, Any] = {
        "optim": {"type": kind, "lr": 1e-2, "weight_decay": 0.1},
        "scheduler": {"type": "cosine", "warmup_steps": 3},
        "model": {"lora": {"rank": 4, "dtype": dtype}},
        "max_steps": 20,
    }
    add(tmp_path, "run_a", **changes)
    one = Trainer(tmp_path)
    for _ in range(4):
        one.update()
    one.checkpoints.save(one.snapshots.whole(one.run))
    other = Trainer(tmp_path)
    assert other.run.progress == one.run.progress and other.run.progress.step == 4
    assert torch.equal(other.weights(), one.weights())
    for _ in range(3):
        assert other.run.training.lr == one.run.training.lr
        assert torch.equal(other.update(), one.update())


def test_a_snapshot_stays_as_it_was_taken(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a")
    trainer = Trainer(tmp_path)
    trainer.update()
    taken = trainer.snapshots.whole(trainer.run)
    trainer.update()
    trainer.checkpoints.save(taken)
    assert taken.progress.step == 1 and run.trainer_checkpoint(1).is_dir()
    again = Trainer(tmp_path)
    assert not torch.equal(again.weights(), trainer.weights())
    assert torch.equal(again.update(), trainer.weights())


def test_a_snapshot_is_at_home_in_its_own_folder_and_not_in_another_of_the_same_name(tmp_path: Path) -> None:
    run = add(tmp_path, "run_a")
    taken = Trainer(tmp_path)
    snapshot = taken.snapshots.whole(taken.run)
    assert snapshot.is_at_home()
    run.path.rename(tmp_path / "elsewhere")
    assert not snapshot.is_at_home()
    add(tmp_path, "run_a")
    assert not snapshot.is_at_home()
    (tmp_path / "run_a").rename(tmp_path / "another")
    (tmp_path / "elsewhere").rename(run.path)
    assert snapshot.is_at_home()


@pytest.mark.parametrize(("number", "is_at_home"), [(errno.EIO, True), (errno.ENOENT, False), (errno.ENOTDIR, False)])
def test_a_disk_that_fails_has_not_lost_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_at_home: bool
) -> None:
    """What is written there fails with that reason; what is lost is not written, without a word."""
    add(tmp_path, "run_a")
    taken = Trainer(tmp_path)
    snapshot = taken.snapshots.whole(taken.run)

    def fails(path: Path, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fails)
        found = snapshot.is_at_home()
    assert found is is_at_home


def test_a_checkpoint_is_stable_once_its_files_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = add(tmp_path, "run_a")
    trainer = Trainer(tmp_path)
    trainer.update()
    snapshot, marker = trainer.snapshots.whole(trainer.run), stable_marker(run.checkpoint_dir(1))
    save, seen = type(snapshot.weights).save, []

    def watched(self: Any, folder: Path) -> None:
        save(self, folder)
        seen.append(marker.exists())

    monkeypatch.setattr(type(snapshot.weights), "save", watched)
    trainer.checkpoints.save(snapshot)
    assert seen == [False] and marker.exists()


def saved_up_to(workspace: Path, last: int) -> RunDir:
    """A run with a checkpoint of each step."""
    add(workspace, "run_a")
    trainer = Trainer(workspace)
    for _ in range(last):
        trainer.update()
        trainer.checkpoints.save(trainer.snapshots.whole(trainer.run))
    return trainer.run.dir


def test_a_run_goes_back_once_and_then_on_from_there(tmp_path: Path) -> None:
    run = saved_up_to(tmp_path, 3)
    write_config(run, BASE, ckpt={"resume_step": 1})
    apply(run, run.orch_toml.read_text())
    back = Trainer(tmp_path)
    assert back.run.progress.step == 1 and trainer_steps(run) == [1]
    back.update()
    back.checkpoints.save(back.snapshots.whole(back.run))
    on = Trainer(tmp_path)
    assert on.run.progress.step == 2, "the same text is not carried out again"
    assert torch.equal(on.weights(), back.weights())


class Killed(BaseException):
    """The process ends here."""


def test_a_run_goes_back_although_the_trainer_was_killed_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = saved_up_to(tmp_path, 3)
    write_config(run, BASE, ckpt={"resume_step": 1})
    apply(run, run.orch_toml.read_text())

    def dies(*args: Any, **at: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "put_away", dies)
        with pytest.raises(Killed):
            Trainer(tmp_path)
    again = Trainer(tmp_path)
    assert again.run.progress.step == 1 and trainer_steps(run) == list_steps(run.checkpoints) == [1]


def test_what_is_saved_is_not_written_again(tmp_path: Path) -> None:
    """It may be the only complete checkpoint, and a disk that is full now would leave none."""
    run = saved_up_to(tmp_path, 1)
    before = {path.name: path.stat().st_ino for path in run.trainer_checkpoint(1).iterdir()}
    trainer = Trainer(tmp_path)
    trainer.checkpoints.save(trainer.snapshots.whole(trainer.run))
    assert {path.name: path.stat().st_ino for path in run.trainer_checkpoint(1).iterdir()} == before
