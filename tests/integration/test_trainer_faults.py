"""A neighbour that does harm, by accident or not: it is evicted with the reason, and the others reach what they reach
alone. What makes a single batch file unfit is in `tests/unit/test_trainer_batches`.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.contract.layout import RunDir
from prime_rl.contract.types import TrainingBatch
from tests.isolation_support import NUM_STEPS, Adapter, all_done, check, put_run, put_runs
from tests.trainer_support import (
    VOCAB,
    make_batch,
    published,
    put_batch,
    put_batches,
    sample,
    train_until,
    trainer_config,
    write_run,
)

HUGE = 3e38  # the largest numbers of float32: two of them of different sign make a loss of NaN
EXPLOSIONS: dict[str, tuple[dict[str, Any], list[float], str]] = {
    "a spike of 1e6": ({"lr": 10.0, "max_norm": 1e9}, [1e6], ""),
    "infinite gradients": ({}, [1e38], "gradient norm"),
    "a loss that is not a number": ({}, [HUGE, -HUGE], "loss nan"),
    "weights that overflow": ({"type": "sgd", "lr": 1e38, "max_norm": 1e9}, [1e6], "not finite"),
}


def test_neighbours_that_blow_up_harm_no_other_run(alone: dict[str, Adapter], tiny: Path, tmp_path: Path) -> None:
    """All explosions at once, each in its own run."""
    runs = put_runs(tmp_path, tiny)
    wild: dict[str, RunDir] = {}
    for number, (name, (optim, advantages, _)) in enumerate(EXPLOSIONS.items()):
        run = wild[name] = write_run(tmp_path, f"run_{number}_wild", tiny, max_steps=NUM_STEPS, optim=optim)
        for step in range(1, NUM_STEPS + 1):
            batch = make_batch(run.run_id, step, num_samples=6)
            samples = [
                msgspec.structs.replace(one, advantage=advantages[at % len(advantages)])
                for at, one in enumerate(batch.samples)
            ]
            put_batch(run, msgspec.structs.replace(batch, samples=samples))
    config = trainer_config(
        tmp_path, tiny, max_tokens_per_micro_batch=128, max_concurrent_runs=len(runs) + len(EXPLOSIONS)
    )
    train_until(config, all_done(runs))
    check(runs, alone)
    for name, run in wild.items():
        reason = EXPLOSIONS[name][2]
        assert not reason or ("not finite" in run.evicted.read_text() and reason in run.evicted.read_text()), name


def with_sample(**changes: Any) -> Callable[[RunDir, TrainingBatch], None]:
    """The batch with one more sample, number 8, in which something is wrong."""

    def put(run: RunDir, batch: TrainingBatch) -> None:
        bad = msgspec.structs.replace(sample(random.Random(0), policy_version=1), **changes)
        put_batch(run, msgspec.structs.replace(batch, samples=[*batch.samples, bad]))

    return put


def with_lists(**changes: Any) -> Callable[[RunDir, TrainingBatch], None]:
    """The same as a file of version 1."""

    def put(run: RunDir, batch: TrainingBatch) -> None:
        bad = msgspec.structs.replace(sample(random.Random(0), policy_version=1), **changes)
        put_batch(run, batch)
        lists = msgspec.structs.replace(batch, samples=[*batch.samples, bad])
        run.rollout_file(2).write_bytes(msgspec.msgpack.encode(lists))

    return put


def with_columns(**changes: Any) -> Callable[[RunDir, TrainingBatch], None]:
    """One more sample whose columns are these bytes."""

    def put(run: RunDir, batch: TrainingBatch) -> None:
        bad = msgspec.structs.replace(sample(random.Random(0), policy_version=1).columns(), **changes)
        put_batch(run, batch)
        columns = batch.columns()
        columns = msgspec.structs.replace(columns, samples=[*columns.samples, bad])
        run.rollout_file(2).write_bytes(msgspec.msgpack.encode(columns))

    return put


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[RunDir, TrainingBatch], None]:
    def put(run: RunDir, batch: TrainingBatch) -> None:
        put_batch(run, batch)
        run.rollout_file(2).write_bytes(change(run.rollout_file(2).read_bytes()))

    return put


def with_fields(**changes: Any) -> Callable[[RunDir, TrainingBatch], None]:
    return lambda run, batch: put_at_2(run, msgspec.structs.replace(batch, **changes))


def put_at_2(run: RunDir, batch: TrainingBatch) -> None:
    put_batch(run, batch)
    if batch.step != 2:
        run.rollout_dir(2).mkdir()
        run.rollout_file(batch.step).rename(run.rollout_file(2))


def in_its_place(make: Callable[[Path], None]) -> Callable[[RunDir, TrainingBatch], None]:
    def put(run: RunDir, batch: TrainingBatch) -> None:
        run.rollout_dir(2).mkdir()
        make(run.rollout_file(2))

    return put


BAD_BATCHES: dict[str, tuple[Callable[[RunDir, TrainingBatch], None], str]] = {
    "nan": (with_sample(advantage=float("nan")), "sample 8: advantage is nan"),
    "infinite": (with_sample(logprobs=[float("-inf")] * 12), "sample 8: logprobs[0] is -inf"),
    "lengths": (with_sample(logprobs=[0.0]), "sample 8: token_ids has 12 entries, loss_mask 12, logprobs 1"),
    "negative id": (with_sample(token_ids=[0] * 11 + [-1]), "sample 8: token_ids[11] is -1, the vocabulary has"),
    "id too large": (with_sample(token_ids=[VOCAB] * 12), f"sample 8: token_ids[0] is {VOCAB}, the vocabulary has"),
    "too long": (
        with_sample(token_ids=[0] * 65, loss_mask=[False] * 64 + [True], logprobs=[0.0] * 65),
        "sample 8: token_ids has 65 entries, expected 2 to seq_len = 64",
    ),
    "from the future": (with_sample(policy_version=2), "sample 8: policy_version is 2, batch 2 may hold versions 0 to"),
    "empty": (with_fields(samples=[]), "the batch has no samples"),
    "another run's": (with_fields(run_id="run_sgd"), "run_id is 'run_sgd', expected 'run_bad'"),
    "another step's": (with_fields(step=7), "step is 7, expected 2"),
    "another format": (
        with_bytes(lambda data: data.replace(b"\xa7version\x03", b"\xa7version\x63")),
        "format version 99, this program reads 1, 2 and 3",
    ),
    "half a token": (with_columns(token_ids=b"\0" * 47), "sample 8: token_ids has 47 bytes, expected 4 for each token"),
    "a mask of numbers": (with_columns(loss_mask=b"\x07" * 12), "sample 8: loss_mask[0] is 7, must be 0 or 1"),
    "version 1, nan": (with_lists(advantage=float("nan")), "sample 8: advantage is nan"),
    "version 1, id too large": (
        with_lists(token_ids=[2**40] * 12),
        "sample 8: token_ids[0] is 1099511627776, which has no place in 32 bits",
    ),
    "0 bytes": (with_bytes(lambda data: b""), "not a batch file: Input data was truncated"),
    "cut": (with_bytes(lambda data: data[: len(data) // 2]), "not a batch file"),
    "junk": (with_bytes(lambda data: b"\x00junk"), "not a batch file"),
    "nested": (
        with_bytes(lambda data: data.replace(b"\xa8position\x02", b"\xa8position" + b"\x91" * 99_999)),
        "recurs",
    ),
    "a pickle": (with_bytes(lambda data: pickle.dumps(print)), "not a batch file"),
    "a folder": (in_its_place(Path.mkdir), "must be a regular file"),
    "a pipe": (in_its_place(os.mkfifo), "must be a regular file"),
    "a link": (in_its_place(lambda path: path.symlink_to("/dev/zero")), "must be a regular file"),
}


def test_bad_batches_evict_their_runs_with_the_reason_and_no_other(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path
) -> None:
    """All faults at once, each in its own run after a good first batch."""
    runs = put_runs(tmp_path, tiny)
    bad: dict[str, RunDir] = {}
    for number, (name, (put, _)) in enumerate(BAD_BATCHES.items()):
        run = bad[name] = write_run(tmp_path, f"run_bad{number}", tiny)
        put_batch(run, make_batch(run.run_id, 1))
        batch = make_batch(run.run_id, 2)
        put(run, batch)
    config = trainer_config(tmp_path, tiny, max_concurrent_runs=len(BAD_BATCHES) + 3)
    train_until(config, lambda: all_done(runs)() and all(run.evicted.exists() for run in bad.values()))
    check(runs, alone)
    for name, run in bad.items():
        reason = BAD_BATCHES[name][1].replace("run_bad'", f"{run.run_id}'")
        assert reason in run.evicted.read_text() and "rollouts/step_2" in run.evicted.read_text(), name
        assert published(run) == 1, name


def test_a_batch_file_that_changes_while_it_is_looked_at(alone: dict[str, Adapter], tiny: Path, tmp_path: Path) -> None:
    """It grows in place, is cut, is replaced by a pipe and by nothing, at every look of the trainer."""
    run, restless = put_run(tmp_path, tiny, "run_adamw"), write_run(tmp_path, "run_restless", tiny)
    put_batch(restless, make_batch("run_restless", 1))
    file = restless.rollout_file(2)
    restless.rollout_dir(2).mkdir()
    turns = 0

    def done() -> bool:
        nonlocal turns
        turns += 1
        if restless.evicted.exists() and turns % 5 == 0:
            restless.evicted.unlink()  # readmitted, to do it again
        file.unlink(missing_ok=True)
        if turns % 4 == 0:
            os.mkfifo(file)
        elif turns % 4 == 1:
            file.write_bytes(os.urandom(turns))
        elif turns % 4 == 2:
            file.write_bytes(b"\x00" * (4 << 20))
        return all_done([run])()

    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=64), done)
    check([run], alone)
    assert turns > NUM_STEPS and published(restless) == 1


def test_a_run_whose_files_cannot_be_written_is_evicted_alone(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path
) -> None:
    run = put_run(tmp_path, tiny, "run_adamw")
    full = write_run(tmp_path, "run_full", tiny)
    put_batches(full, 3)
    full.broadcast.write_text("a file where the folder should be")
    train_until(trainer_config(tmp_path, tiny), lambda: published(run) == NUM_STEPS and full.evicted.exists())
    check([run], alone)
    assert "publishing version 1 failed" in full.evicted.read_text()


def test_a_run_deleted_in_the_middle_is_not_made_again(alone: dict[str, Adapter], tiny: Path, tmp_path: Path) -> None:
    run = put_run(tmp_path, tiny, "run_adamw")
    gone = write_run(tmp_path, "run_gone", tiny)
    put_batches(gone, 50, num_samples=16)

    def done() -> bool:
        if published(gone) >= 2 and gone.path.exists():
            gone.path.rename(tmp_path / "trash")
        return published(run) == NUM_STEPS and not gone.path.exists()

    train_until(trainer_config(tmp_path, tiny, max_tokens_per_micro_batch=64), done)
    check([run], alone)
    assert not gone.path.exists()


class Exploit:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_nothing_that_a_run_left_in_a_checkpoint_is_executed(
    alone: dict[str, Adapter], tiny: Path, tmp_path: Path
) -> None:
    """Every file of a checkpoint replaced by a pickle that would act, in turn."""
    workspace, proof = tmp_path / "workspace", tmp_path / "proof"
    workspace.mkdir()
    first = write_run(workspace, "run_evil", tiny, ckpt={"interval": 1})
    put_batches(first, 1)
    train_until(trainer_config(workspace, tiny), lambda: (first.checkpoint_dir(1) / "STABLE").exists())
    run = put_run(workspace, tiny, "run_adamw")
    files = [path for path in first.trainer_checkpoint(1).rglob("*") if path.is_file()]
    assert len(files) >= 3
    good = {path: path.read_bytes() for path in files}
    for number, path in enumerate(files):
        path.write_bytes(pickle.dumps(Exploit(proof)))
        train_until(
            trainer_config(workspace, tiny), lambda number=number: first.evicted.exists() and published(run) > number
        )
        assert "it cannot be started" in first.evicted.read_text(), path.name
        first.evicted.unlink()
        path.write_bytes(good[path])
    train_until(trainer_config(workspace, tiny), all_done([run]))
    check([run], alone)
    assert not proof.exists()


def test_a_checkpoint_on_other_target_modules_is_refused(tiny: Path, tmp_path: Path) -> None:
    """The workspace came back with a trainer that adapts other layers: a part of the run would be the base model."""
    run = write_run(tmp_path, "run_a", tiny, ckpt={"interval": 1})
    put_batches(run, 1)
    config = trainer_config(tmp_path, tiny)
    train_until(config, lambda: published(run) == 1)
    for targets in (["q_proj", "v_proj"], ["gate_proj"]):
        changed = trainer_config(tmp_path, tiny, model={"lora": {"target_modules": targets}})
        train_until(changed, run.evicted.exists)
        assert "adapter does not fit the model" in run.evicted.read_text()
        assert "is not in the model" in run.evicted.read_text()
        run.evicted.unlink()
