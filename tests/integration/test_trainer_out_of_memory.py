"""A pass, an optimizer or a snapshot for which there is no memory costs at most its own run, and no other run a bit.

The errors are those of torch, raised in the middle of forward, and in the middle of backward, when a part of the
gradients is there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from prime_rl.contract.types import MicroBatch
from prime_rl.trainer import checkpoint, step
from prime_rl.trainer.model import PolicyModel
from prime_rl.trainer.optim import RunOptimizer
from prime_rl.utils.runtime import is_out_of_memory
from tests.isolation_support import NUM_STEPS, Adapter, all_done, check, put_run, put_runs
from tests.trainer_support import (
    make_batch,
    published,
    put_batch,
    put_batches,
    relative_difference,
    solo_world,
    train_until,
    trainer_config,
    whole_config,
    write_run,
)

ON_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
ON_CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8589934592 bytes. Error code 12 (Cannot allocate memory)"
)
ERRORS = [ON_GPU, ON_CPU, MemoryError("Unable to allocate 8.00 GiB")]


class Memory:
    """Passes for which it `lacks` fail, each with the next of ERRORS. `passes`: rows, and whether it failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lacks: Callable[[MicroBatch], bool]) -> None:
        self.passes: list[tuple[int, bool]] = []
        self._num_failed = 0
        real: Any = step.forward_backward

        def forward_backward(model: PolicyModel, batch: MicroBatch, *rest: Any) -> Any:
            fails = lacks(batch)
            self.passes.append((len(batch.run_idxs), fails))
            last: Any = model.module.get_submodule("model.layers.1")
            hook = last.register_forward_pre_hook(self._fail if fails else lambda *_: None)
            try:
                return real(model, batch, *rest)
            finally:
                hook.remove()

        monkeypatch.setattr(step, "forward_backward", forward_backward)

    def _fail(self, layer: object, args: tuple[Tensor, ...]) -> None:
        self._num_failed += 1
        error = ERRORS[self._num_failed % len(ERRORS)]

        def fail(grad: Tensor) -> None:
            raise error

        if not args[0].requires_grad or self._num_failed % 2:
            raise error
        args[0].register_hook(fail)


def test_a_pass_that_does_not_fit_is_done_in_halves_and_no_run_has_other_weights(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first large pass fails; from then on passes are half as large."""
    memory = Memory(monkeypatch, lambda batch: len(batch.run_idxs) > 3)
    runs = put_runs(tmp_path, tiny)
    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=128), all_done(runs))
    check(runs, alone)
    failed = [at for at, (_, fails) in enumerate(memory.passes) if fails]
    assert failed and len(failed) <= 6, "a pass of that size is not tried again and again"
    assert len(memory.passes) > failed[-1] + NUM_STEPS


@pytest.mark.release
def test_halves_of_every_size_keep_what_earlier_passes_left(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second pass of several rows fails, whatever its size."""
    turn = [0]

    def lacks(batch: MicroBatch) -> bool:
        turn[0] += 1
        return len(batch.run_idxs) > 1 and turn[0] % 2 == 0

    memory = Memory(monkeypatch, lacks)
    monkeypatch.setattr("prime_rl.trainer.batches.Packer.limit", lambda packer, tokens: None)
    runs = put_runs(tmp_path, tiny)
    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=100), all_done(runs))
    check(runs, alone)
    assert sum(fails for _, fails in memory.passes) > NUM_STEPS


def test_a_row_that_does_not_fit_alone_evicts_its_run_with_its_tokens_and_the_key(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory(monkeypatch, lambda batch: batch.num_tokens > 30)
    good, long = put_run(tmp_path, tiny, "run_muon"), write_run(tmp_path, "run_0_long", tiny)
    batch = make_batch(long.run_id, 1, num_samples=6)
    most = max(batch.samples, key=lambda sample: len(sample.token_ids))
    twice = {name: getattr(most, name) * 2 for name in ("token_ids", "logprobs")}
    mask = most.loss_mask + [True] * len(most.loss_mask)
    most = msgspec.structs.replace(most, loss_mask=mask, **twice)
    put_batch(long, msgspec.structs.replace(batch, samples=[*batch.samples, most]))
    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=128), all_done([good]))
    check([good], alone)
    assert long.evicted.read_text().strip() == (
        f"a sample with {len(mask)} tokens: out of memory on cpu; make seq_len smaller"
    )
    assert published(long) == 0


def test_an_error_that_is_not_of_memory_is_not_hidden(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(step, "forward_backward", fail)
    put_run(tmp_path, tiny, "run_adamw")
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train_until(trainer_config(tmp_path, tiny), lambda: False)


def test_what_an_optimizer_raises_and_a_snapshot_without_memory_evict_their_run(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = put_run(tmp_path, tiny, "run_adamw")
    # By their last step, which tells them apart.
    of_optimizer, of_snapshot = {7: ON_GPU, 8: ValueError("moments of another shape")}, {9: ON_GPU}
    bad = {last: write_run(tmp_path, f"run_{last}", tiny, max_steps=last) for last in (7, 8, 9)}
    for run in bad.values():
        put_batches(run, 2)
    update: Any = RunOptimizer._update
    weights: Any = checkpoint.AdapterSnapshots.weights

    def failing_update(self: Any, value: Any) -> Any:
        if error := of_optimizer.get(self._config.max_steps):
            raise error
        return update(self, value)

    def failing_weights(self: Any, run: Any) -> Any:
        if error := of_snapshot.get(run.config.max_steps):
            raise error
        return weights(self, run)

    monkeypatch.setattr(RunOptimizer, "_update", failing_update)
    monkeypatch.setattr(checkpoint.AdapterSnapshots, "weights", failing_weights)
    config = trainer_config(tmp_path, tiny, max_concurrent_runs=4)
    train_until(config, lambda: all_done([good])() and all(run.evicted.exists() for run in bad.values()))
    check([good], alone)
    memory, other, snapshot = (run.evicted.read_text() for run in bad.values())
    assert memory.startswith("update 1: its optimizer does not fit into the memory that is left: set ")
    assert other.strip() == "update 1: its optimizer raised ValueError: moments of another shape"
    assert snapshot.startswith("handing over version 1 failed: ") and "out of memory" in snapshot
    assert {published(run) for run in bad.values()} == {0}


def test_a_sharded_model_ends_with_the_pass_and_the_next_one_makes_smaller_ones(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks wait for this one in the middle of the pass."""
    undisturbed, run = (write_run(tmp_path / name, "run_a", tiny, max_steps=2) for name in ("quiet", "full"))
    for each in (undisturbed, run):
        put_batches(each, 2)
    config = whole_config(tmp_path / "full", tiny, max_tokens_per_micro_batch=128)
    train_until(whole_config(tmp_path / "quiet", tiny), lambda: published(undisturbed) == 2)
    Memory(monkeypatch, lambda batch: len(batch.run_idxs) > 2)
    limits, reasons = [float("inf")], set()
    while published(run) < 2:
        try:
            train_until(config, lambda: published(run) == 2)
        except step.PassTooLarge as error:
            reasons.add(re.sub(r"\d+", "N", str(error)))
            limits.append(step.remembered(config, solo_world()))
    assert reasons == {"rank N: N samples with N tokens: out of memory on cpu; make max_tokens_per_micro_batch smaller"}
    assert len(limits) > 1 and all(later <= half / 2 for half, later in itertools.pairwise(limits))
    assert not run.evicted.exists()
    wanted, found = (load_file(each.broadcast_dir(2) / "model.safetensors") for each in (undisturbed, run))
    assert relative_difference(found, wanted) <= 1e-4
    other = whole_config(tmp_path / "full", tiny, model={"activation_checkpointing": True})
    assert step.remembered(other, solo_world()) == float("inf"), "of another model it says nothing"


def test_a_row_that_does_not_fit_on_a_rank_is_not_tried_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, "run_a", tiny)
    put_batches(run, 1)
    config = whole_config(tmp_path, tiny, max_tokens_per_micro_batch=8)
    Memory(monkeypatch, lambda batch: True)
    with pytest.raises(step.PassTooLarge):
        train_until(config, lambda: False)
    assert re.fullmatch(
        r"rank 0: a sample with \d+ tokens: out of memory on cpu; make seq_len smaller\s*", run.evicted.read_text()
    )
    good = write_run(tmp_path, "run_b", tiny)
    put_batches(good, 1)
    monkeypatch.undo()
    train_until(config, lambda: published(good) == 1)


@pytest.mark.parametrize("error", [*ERRORS, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ...")])
def test_what_is_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_what_is_not_out_of_memory() -> None:
    assert not any(map(is_out_of_memory, [RuntimeError("size mismatch"), OSError(12, "no"), ValueError()]))
