"""When the packer takes a batch that was read ahead: at the turn of its run, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import RunDir
from prime_rl.contract.types import BatchColumns
from prime_rl.trainer.batches import BatchLimits, BatchReader, Packer, take_batch
from prime_rl.trainer.step import Rows
from tests.patience import PATIENCE_S
from tests.runs_support import add, look, manager_of
from tests.trainer_support import VOCAB, make_batch, put_batch


class Trainer:
    """The packer over real runs; what the training loop does around it. `reads` are the files that were read."""

    def __init__(self, workspace: Path, num_ranks: int = 1) -> None:
        self.workspace = workspace
        self.manager = manager_of(workspace)
        self.reader = BatchReader(self.read)
        self.packer = Packer(self.manager, self.reader, VOCAB, max_tokens=10_000, num_ranks=num_ranks, packs=True)
        self.manager.register_forgotten_hook(lambda idx, run_id: self.packer.forgotten(self.manager.run(idx)))
        self.reads: list[Path] = []

    def read(self, path: Path, limits: BatchLimits) -> BatchColumns | None:
        try:
            return take_batch(path, limits)
        finally:
            self.reads.append(path)

    def reads_ahead(self, *files: Path) -> None:
        """While rows wait: nothing is taken, and `files` are read, where they were not before."""
        assert self.packer.get_batch() == {}
        wait_for(lambda: {*files} <= {*self.reads}, f"{files} to be read", timeout_s=PATIENCE_S)

    def takes(self, held: tuple[str, ...] = (), num: int = 1) -> dict[int, BatchColumns]:
        """The batches that come, once there are `num`, or a run was evicted."""
        taken: dict[int, BatchColumns] = {}
        num_active = len(self.manager.active)

        def came() -> bool:
            taken.update(self.packer.get_batch(held))
            return len(taken) >= num or len(self.manager.active) < num_active

        wait_for(came, "a batch", timeout_s=PATIENCE_S)
        return taken

    def update(self) -> None:
        """Train what is in work: all its rows are in one pass."""
        pack = self.packer.pack()
        assert pack is not None and pack.ready
        for ready in pack.ready:
            self.manager.progress[ready.run_idx].step += 1

    def put(self, run: RunDir, step: int, seed: int = 0) -> BatchColumns:
        batch = make_batch(run.run_id, step, seed=seed)
        put_batch(run, batch)
        return msgspec.structs.replace(batch.columns(), sampler_state={})  # which the trainer does not read


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.reader.close()


def test_one_batch_of_a_run_is_in_work_and_the_next_one_is_ready_at_its_turn(trainer: Trainer) -> None:
    run = add(trainer.workspace, "run_a")
    look(trainer.manager)
    first, second = trainer.put(run, 1), trainer.put(run, 2)
    assert trainer.takes() == {0: first}
    trainer.reads_ahead(run.rollout_file(2))
    trainer.put(run, 2, seed=1)
    for _ in range(3):
        assert trainer.packer.get_batch() == {}
    trainer.update()
    assert trainer.takes() == {0: second}, "the one that was read"
    assert trainer.reads.count(run.rollout_file(2)) == 1


def test_a_bad_batch_evicts_at_its_turn_and_not_before(trainer: Trainer) -> None:
    run, other = add(trainer.workspace, "run_a"), add(trainer.workspace, "run_b")
    look(trainer.manager)
    for each in (run, other):
        trainer.put(each, 1)
        trainer.put(each, 2)
        each.rollout_file(2).write_bytes(b"no batch")
    assert trainer.takes(num=2).keys() == {0, 1}
    trainer.reads_ahead(run.rollout_file(2), other.rollout_file(2))
    repaired = trainer.put(other, 2)
    assert len(trainer.manager.active) == 2 and not run.evicted.exists()
    trainer.update()
    taken = trainer.takes()
    assert [run.run_idx for run in trainer.manager.active] == [1]
    look(trainer.manager)
    assert f"reading rollouts/step_2 failed: {run.rollout_file(2)}: not a batch file" in run.evicted.read_text()
    assert (taken or trainer.takes()) == {1: repaired}


def test_a_run_that_leaves_takes_what_was_read_ahead_with_it(trainer: Trainer) -> None:
    run = add(trainer.workspace, "run_a")
    look(trainer.manager)
    trainer.put(run, 1)
    trainer.put(run, 2)
    trainer.takes()
    trainer.reads_ahead(run.rollout_file(2))
    trainer.update()
    trainer.manager.evict_run(0, "a test")
    assert trainer.packer.get_batch() == {}
    look(trainer.manager)
    assert trainer.manager.used_idxs == set()
    run.evicted.unlink()
    look(trainer.manager)
    trainer.manager.progress[0].step = 1  # as after its checkpoint was loaded
    new = trainer.put(run, 2, seed=1)
    assert trainer.takes() == {0: new}


def test_a_run_that_is_held_takes_nothing_until_it_is_released(trainer: Trainer) -> None:
    run, other = add(trainer.workspace, "run_a"), add(trainer.workspace, "run_b")
    look(trainer.manager)
    batches = {number: trainer.put(each, 1) for number, each in enumerate((run, other))}
    assert trainer.takes(held=("run_a",)) == {1: batches[1]}
    wait_for(lambda: run.rollout_file(1) in trainer.reads, "the batch of run_a to be read", timeout_s=PATIENCE_S)
    assert trainer.packer.get_batch(held=("run_a",)) == {}
    assert trainer.takes() == {0: batches[0]}


def test_nothing_more_is_trained_of_a_run_that_leaves(trainer: Trainer) -> None:
    leaving, staying = add(trainer.workspace, "run_a"), add(trainer.workspace, "run_b")
    look(trainer.manager)
    batches = [trainer.put(each, 1) for each in (leaving, staying)]
    trainer.takes(num=2)
    trainer.manager.evict_run(0, "a test")
    pack = trainer.packer.pack()
    assert pack is not None and [ready.run_idx for ready in pack.ready] == [1]
    assert [each.run_idxs for each in pack.micro_batches] == [[1] * len(batches[1].samples)]
    trainer.manager.progress[1].step = 1
    assert trainer.packer.pack() is None


def test_a_run_whose_next_batch_is_gone_is_refused_and_not_waited_for(trainer: Trainer) -> None:
    run = add(trainer.workspace, "run_a")
    slot = look(trainer.manager).run(0)
    trainer.packer.admitted(slot)
    trainer.put(run, 1)
    trainer.packer.admitted(slot)
    slot.progress.step = 1
    trainer.packer.admitted(slot)
    trainer.put(run, 3)
    with pytest.raises(ValueError, match=r"it is at step 1, but .*step_2.* is missing while step 3 exists"):
        trainer.packer.admitted(slot)
    trainer.put(run, 2)
    trainer.packer.admitted(slot)


def test_the_positions_of_a_pass_are_counted_for_the_run_that_has_them(trainer: Trainer) -> None:
    runs = [add(trainer.workspace, name) for name in ("run_a", "run_b")]
    look(trainer.manager)
    batches = [trainer.put(run, 1, seed) for seed, run in enumerate(runs)]
    trainer.takes(num=2)
    assert trainer.packer.pack() is not None
    num_positions = [sum(len(sample.loss_mask) - 1 for sample in batch.samples) for batch in batches]
    assert [run.pass_positions for run in trainer.manager.active] == num_positions


def test_a_run_of_twice_the_weight_is_given_rows_twice_as_fast(trainer: Trainer) -> None:
    """Until its own batch is through, the other one has had half of its tokens, or a row more."""
    for run_id, weight in (("run_a", 1.0), ("run_b", 2.0)):
        put_batch(add(trainer.workspace, run_id, weight=weight), make_batch(run_id, 1, num_samples=40))
    look(trainer.manager)
    trainer.takes(num=2)
    trainer.packer.limit(60)
    num_passes = 0
    while not (pack := trainer.packer.pack()) or not pack.ready:
        num_passes += 1
    assert num_passes > 3 and [ready.run_idx for ready in pack.ready] == [1]
    light, heavy = (run.pass_positions for run in trainer.manager.active)
    assert abs(light - heavy / 2) <= 60


def test_passes_are_as_small_as_the_smallest_limit_that_was_found(trainer: Trainer) -> None:
    run = add(trainer.workspace, "run_a")
    look(trainer.manager)
    batch = trainer.put(run, 1)
    trainer.takes()
    for limit in (math.inf, 40.0, 1000.0):
        trainer.packer.limit(limit)
    passes: list[int] = []
    while trainer.packer.waits_for() is None:
        pack = trainer.packer.pack()
        assert pack is not None
        passes += [Rows.of(each).num_positions(packed=True) for each in pack.micro_batches]
    assert max(passes) <= 40 and sum(passes) == sum(len(sample.loss_mask) - 1 for sample in batch.samples)


@pytest.mark.parametrize("kl_coefs", [(0.0, 0.0), (0.0, 0.1)])
def test_every_rank_has_a_pass_and_compares_with_the_base_model_if_any_row_does(
    tmp_path: Path, kl_coefs: tuple[float, float]
) -> None:
    trainer = Trainer(tmp_path, num_ranks=8)
    for run_id, kl_coef in zip(("run_a", "run_b"), kl_coefs, strict=True):
        put_batch(add(tmp_path, run_id, loss={"kl_coef": kl_coef}), make_batch(run_id, 1, num_samples=2))
    look(trainer.manager)
    trainer.takes(num=2)
    pack = trainer.packer.pack()
    trainer.reader.close()
    assert pack is not None and [ready.run_idx for ready in pack.ready] == [0, 1]
    assert {each.base_pass for each in pack.micro_batches} == {any(kl_coefs)}
    has_loss = [any(map(any, each.loss_mask)) for each in pack.micro_batches]
    assert has_loss == [True] * 4 + [False] * 4, "a rank without rows takes part"
