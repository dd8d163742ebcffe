"""Where the trainer is killed with SIGKILL in the tests: a table of named points.

Each point wraps one function of the real trainer, in a forked child: before, after or in the middle of a call the child
names the point in a pipe and kills itself. `seen` looks at what lies on disk afterwards, where the disk can tell. The
names stand in docs/durability.md too, with what each kill costs.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from prime_rl.contract.layout import STABLE, RunDir, list_steps, stable_marker

Matches = Callable[..., bool]
# Called instead of the function that is wrapped: gets the real one, `die`, and the arguments.
Instead = Callable[..., Any]


@dataclass(frozen=True)
class KillPoint:
    """`target` is "module:attribute.path"; the `nth` call that `matches` is replaced by `instead`."""

    name: str
    target: str
    instead: Instead
    matches: Matches = lambda *args, **kwargs: True
    nth: int = 1
    seen: Callable[[RunDir], bool] = lambda run: True


def before(real: Any, die: Callable[[], None], *args: Any, **kwargs: Any) -> None:
    die()


def after(real: Any, die: Callable[[], None], *args: Any, **kwargs: Any) -> None:
    real(*args, **kwargs)
    die()


def half_a_file(real: Any, die: Callable[[], None], path: Path, data: bytes) -> None:
    real(path, data[: len(data) // 2])
    die()


def half_a_line(real: Any, die: Callable[[], None], path: Path, line: str) -> None:
    with path.open("ab") as file:
        file.write(line.encode()[: len(line) // 2])
    die()


def whole(path: Any, dir_fd: int | None = None) -> Path:
    """The path, also of what is named in an open folder, or by the descriptor of one."""
    return Path(path if dir_fd is None else f"/proc/self/fd/{dir_fd}/{path}").resolve()


def half_a_folder(real: Any, die: Callable[[], None], folder: Any, dir_fd: int | None = None) -> None:
    """A file is gone. Should the marker still be there, it is not that one."""
    files = sorted(path for path in whole(folder, dir_fd).rglob("*") if path.is_file() and path.name != STABLE)
    files[0].unlink()
    die()


def half_a_backward(real: Any, die: Callable[[], None], loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """At the node of the graph that is reached after a few others, on the way to the adapters."""
    node = loss.grad_fn
    for _ in range(6):
        assert node is not None
        node = next(inner for inner, _ in node.next_functions if inner is not None)
    assert node is not None
    node.register_hook(lambda *gradients: die())
    real(loss, *args, **kwargs)


def file_named(part: str, name: str) -> Matches:
    return lambda path, *args: part in str(whole(path)) and Path(path).name == name


def folder_named(part: str, name: str) -> Matches:
    return lambda folder, dir_fd=None: whole(folder, dir_fd).parts[-2:] == (part, name)


def renamed_to(part: str, name: str) -> Matches:
    """A rename to `name` in a folder whose path has `part`; the folder may be given as a descriptor."""

    def matches(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> bool:
        path = whole(target, dst_dir_fd)
        return part in str(path) and path.name == name

    return matches


def in_the_middle_of_batch_3(step: Any, *args: Any) -> bool:
    manager = step._manager
    return manager.progress[0].step == 2 and not any(manager.ready_to_update)


def of_step(step: int) -> Matches:
    return lambda self, snapshot: snapshot.progress.step == step and snapshot.run.run_id == "run_a"


def is_odd_step(self: Any, snapshot: Any) -> bool:
    """Checkpoints of the tests are due at even steps, so this is the one of the exit."""
    return snapshot.progress.step % 2 == 1


def half_written(run: RunDir, pattern: str) -> bool:
    """One file of that name, smaller than a finished one."""
    found = [path for path in run.path.glob(pattern) if any(part.endswith(".tmp") for part in path.parts)]
    return len(found) == 1 and found[0].stat().st_size > 0


def complete(parent: Path, step: int) -> bool:
    return step in list_steps(parent, stable_only=True)


def without_marker(folder: Path) -> bool:
    return folder.is_dir() and not stable_marker(folder).exists()


TRAINER = "prime_rl.trainer"
POINTS = [
    KillPoint("while a batch file is read", f"{TRAINER}.batches:check_batch", before, nth=3),
    KillPoint(
        "between two passes of a batch", f"{TRAINER}.step:TrainStep.forward_backward", after, in_the_middle_of_batch_3
    ),
    KillPoint("inside a backward pass", "torch.autograd:backward", half_a_backward, nth=5),
    KillPoint("before the optimizer's step", f"{TRAINER}.optim:RunOptimizer.step", before, nth=3),
    KillPoint(
        "between the optimizer's step and its version", f"{TRAINER}.publish:Publisher.after_update", before, nth=3
    ),
    KillPoint(
        "while the adapter file of a version is written",
        "pathlib:Path.write_bytes",
        half_a_file,
        file_named("/broadcast/", "adapter_model.safetensors"),
        nth=3,
        seen=lambda run: half_written(run, "broadcast/.step_3.*/*") and not run.broadcast_dir(3).exists(),
    ),
    KillPoint(
        "before a version gets its name",
        "os:rename",
        before,
        renamed_to("/broadcast/", "step_3"),
        seen=lambda run: bool(list(run.broadcast.glob(".step_3.*.tmp/STABLE"))) and not complete(run.broadcast, 3),
    ),
    KillPoint(
        "between a version and its checkpoint",
        f"{TRAINER}.checkpoint:CheckpointManager.save",
        before,
        of_step(4),
        seen=lambda run: complete(run.broadcast, 4) and not complete(run.checkpoints, 4),
    ),
    KillPoint(
        "while the state of a checkpoint is written",
        "pathlib:Path.write_bytes",
        half_a_file,
        file_named("/step_4/", "state.safetensors"),
        seen=lambda run: half_written(run, "checkpoints/step_4/.trainer.*/state.safetensors"),
    ),
    KillPoint(
        "before the marker of a checkpoint",
        f"{TRAINER}.checkpoint:mark_stable",
        before,
        lambda folder: str(folder).endswith("/run_a/checkpoints/step_4"),
        seen=lambda run: run.trainer_checkpoint(4).is_dir() and without_marker(run.checkpoint_dir(4)),
    ),
    KillPoint(
        "between a checkpoint and its line of metrics",
        f"{TRAINER}.metrics:MetricsWriter.write",
        before,
        nth=4,
        seen=lambda run: complete(run.checkpoints, 4),
    ),
    KillPoint(
        "inside a line of metrics",
        f"{TRAINER}.metrics:append_line",
        half_a_line,
        nth=3,
        seen=lambda run: not run.trainer_metrics.read_bytes().endswith(b"\n"),
    ),
    KillPoint(
        "while an old checkpoint is removed",
        "prime_rl.contract.files:_remove_tree",
        half_a_folder,
        folder_named("checkpoints", "step_2"),
        seen=lambda run: without_marker(run.checkpoint_dir(2)) and complete(run.checkpoints, 4),
    ),
    KillPoint(
        "while an old version is removed",
        "prime_rl.contract.files:_remove_tree",
        half_a_folder,
        folder_named("broadcast", "step_1"),
        seen=lambda run: without_marker(run.broadcast_dir(1)),
    ),
    KillPoint(
        "while covered rollouts are removed",
        "prime_rl.contract.files:_remove_tree",
        half_a_folder,
        folder_named("rollouts", "step_2"),
        seen=lambda run: run.rollout_dir(2).is_dir() and not run.rollout_file(2).exists(),
    ),
    KillPoint(
        "while an eviction is written",
        "os:rename",
        before,
        renamed_to("/control/", "evicted.txt"),
        seen=lambda run: not RunDir(run.path.parent / "run_bad").evicted.exists(),
    ),
    KillPoint("while a slot is given back", f"{TRAINER}.runs.manager:MultiRunManager._free", after),
    KillPoint("while the ranks agree on new runs", f"{TRAINER}.runs.sync:Channel.gather", before),
    KillPoint(
        "while a stop writes what is left",
        f"{TRAINER}.checkpoint:CheckpointManager.save",
        before,
        is_odd_step,
        seen=lambda run: complete(run.broadcast, 3) and not complete(run.checkpoints, 3),
    ),
]
# Comes after another kill: there must be a checkpoint to load.
LOADING = KillPoint("while a checkpoint is loaded", f"{TRAINER}.checkpoint:Snapshots.restore", after)
READING = KillPoint("while the first batch file is read", f"{TRAINER}.batches:check_batch", before)
BY_NAME = {point.name: point for point in [*POINTS, LOADING, READING]}


def arm(point: KillPoint, tell: Callable[[str], None]) -> None:
    """Wrap the target in this process."""
    module, _, path = point.target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, last = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    real = getattr(owner, last)
    num_calls = 0

    def die() -> None:
        tell(point.name)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        if point.matches(*args, **kwargs):
            num_calls += 1
            if num_calls == point.nth:
                return point.instead(real, die, *args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, last, wrapped)
