"""What follows an update: the order of what is written, how many versions stay, and what a rank without rows adds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from prime_rl.contract.layout import list_steps, stable_marker
from prime_rl.trainer.checkpoint import RunSnapshot
from prime_rl.trainer.loss import LossSums
from prime_rl.trainer.metrics import MetricsWriter, PhaseTimer, StatusReporter
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.publish import (
    BackgroundWriter,
    FileSystemWeightBroadcast,
    NCCLWeightBroadcast,
    Publisher,
    label_of,
)
from prime_rl.trainer.runs.run import Leaving
from prime_rl.trainer.runs.sync import ReadyRun
from prime_rl.trainer.step import TrainStep, UpdateReport
from prime_rl.trainer.whole_model import ModelFiles, ModelSnapshot
from prime_rl.transfer import WeightSender
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.runs_support import add
from tests.trainer_support import solo_world
from tests.transfer_main import HOST, weights
from tests.unit.test_trainer_snapshot import Trainer
from tests.unit.test_transfer import Server, same


class Silent:
    """A status that is not written."""

    def published(self, run: object, progress: object) -> None: ...


class Noted:
    """The parts of a trainer that write for its run, and in which order they did."""

    def __init__(self, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer, self.done = Trainer(workspace), list[str]()
        broadcast, checkpoints = FileSystemWeightBroadcast(), self.trainer.checkpoints
        for owner, name in ((broadcast, "publish"), (checkpoints, "save")):
            monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name)))
        self.writer = BackgroundWriter()
        status = cast(StatusReporter, Silent())
        parts = (self.trainer.snapshots, broadcast, checkpoints, MetricsWriter(), status, self.writer)
        self.publisher = Publisher(self.trainer.manager, *parts)

    def _noting(self, name: str, real: Any) -> Any:
        def call(snapshot: Any) -> Any:
            self.done.append(f"{name} {snapshot.progress.step}")
            return real(snapshot)

        return call

    def update(self) -> None:
        self.trainer.update()
        run = self.trainer.run
        report = UpdateReport(run.progress.step, LossSums(), 1.0, 1e-3, 0.1, 0.1)
        self.publisher.after_update(run, ReadyRun(0, 10, 1), report, PhaseTimer())
        self.writer.finish("run_a")
        self.publisher.collect()
        assert not run.dir.evicted.exists() and run.leaving in (Leaving.NO, Leaving.FINISHED), run.reason


def test_the_last_version_is_published_after_its_checkpoint_and_all_others_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has finished when its last version is there, and is not written again."""
    add(tmp_path, "run_a", max_steps=3, ckpt={"interval": 1})
    noted = Noted(tmp_path, monkeypatch)
    for _ in range(3):
        noted.update()
    assert noted.done == ["publish 1", "save 1", "publish 2", "save 2", "save 3", "publish 3"]


@pytest.mark.parametrize("max_async_level", [0, 2])
def test_the_versions_that_may_still_be_asked_for_stay_and_three_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_async_level: int
) -> None:
    """The newest, the one that is being loaded, and one to spare."""
    add(tmp_path, "run_a", max_async_level=max_async_level)
    noted = Noted(tmp_path, monkeypatch)
    for _ in range(7):
        noted.update()
    kept = list_steps(noted.trainer.run.dir.broadcast, stable_only=True)
    assert kept == list(range(7 - max_async_level - 2, 8))


@pytest.mark.parametrize("num_with_rows", [0, 1])
def test_a_rank_without_rows_adds_zeros_and_not_the_gradients_of_the_update_before(
    tmp_path: Path, num_with_rows: int
) -> None:
    add(tmp_path, "run_a")
    trainer = Trainer(tmp_path)
    trainer.update()
    leaves = [leaf for _, leaf in trainer.manager.get_named_parameters_for_run(0)]
    assert all(leaf.grad is None for leaf in leaves)
    for leaf in leaves[:num_with_rows]:
        leaf.grad = torch.ones_like(leaf)
    expected = sum(float(leaf.grad.square().sum()) for leaf in leaves if leaf.grad is not None) ** 0.5
    assert trainer.run.training.reduce_gradients() == pytest.approx(expected)


WILD = {"type": "sgd", "lr": 1e38, "max_norm": 1e9}  # what is finite makes weights that are not


@pytest.mark.parametrize(
    ("gradient", "optim", "counts"),
    [(1.0, {}, (1, 100, 8)), (float("nan"), {}, (0, 0, 0)), (10.0, WILD, (0, 0, 0))],
)
def test_an_update_counts_its_batch_and_one_that_is_not_done_nothing_and_neither_leaves_gradients(
    tmp_path: Path, gradient: float, optim: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    add(tmp_path, "run_a", optim=optim)
    trainer = Trainer(tmp_path)
    model = cast(PolicyModel, SimpleNamespace(layers=["adapters"]))  # an update needs no pass
    leaves = [leaf for _, leaf in trainer.manager.get_named_parameters_for_run(0)]
    for leaf in leaves:
        leaf.grad = torch.full_like(leaf, gradient)
    report = TrainStep(model, trainer.manager, solo_world()).update(trainer.run, ReadyRun(0, 100, 8))
    progress = trainer.run.progress
    assert (progress.step, progress.total_tokens, progress.total_samples) == counts
    assert (report.problem is None) is bool(counts[0]) and all(leaf.grad is None for leaf in leaves)


@pytest.mark.parametrize("name", ["loss", "entropy"])
def test_an_update_after_logits_that_are_not_finite_is_not_done(tmp_path: Path, name: str) -> None:
    """Also where the loss cuts them off, so that it and its gradients are finite."""
    add(tmp_path, "run_a")
    trainer = Trainer(tmp_path)
    for _, leaf in trainer.manager.get_named_parameters_for_run(0):
        leaf.grad = torch.ones_like(leaf)
    setattr(trainer.run.sums, name, float("nan"))
    model = cast(PolicyModel, SimpleNamespace(layers=["adapters"]))
    report = TrainStep(model, trainer.manager, solo_world()).update(trainer.run, ReadyRun(0, 100, 8))
    assert trainer.run.progress.step == 0 and (report.problem or "").startswith(f"update 1: its {name} are not finite")


def test_a_version_is_offered_from_memory_again_after_a_restart(tmp_path: Path) -> None:
    """Its folder is there from before, and a server that asks for it gets all of it."""
    run = add(tmp_path, "run_a")
    offered = ModelSnapshot({}, weights(1), ModelFiles("{}", (), torch.float32))
    snapshot = RunSnapshot.of(Trainer(tmp_path).run, offered, state=None)
    for port in (free_port(HOST), free_port(HOST)):
        broadcast = NCCLWeightBroadcast(WeightSender(HOST, port, timeout_s=PATIENCE_S))
        folder = broadcast.publish(snapshot)
        try:
            (got,) = Server(port).fetch(label_of(folder))
        finally:
            broadcast.close()
        assert same(got, weights(1)) and folder == run.broadcast_dir(0) and stable_marker(folder).exists()
