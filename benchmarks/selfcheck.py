"""Whether neighbours, or the machines that it ran on, changed a run's result, on the batches that a workspace recorded.

    python -m benchmarks.selfcheck WORKSPACE [--json] [--tolerance 1e-4] [--run ID]...

Each run is trained again alone and together with all others, in other slots: in passes of the size that the workspace
has, and again in the smallest. Two lines each run report by how much its adapter differs, relative to its size: with
neighbours from without, in passes of one size, and the one that the workspace published from the one that was trained
again alone. The workspace is only read. How a recording is replayed is in `selfcheck_replay`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.configs.base import ConfigError
from prime_rl.contract.layout import LayoutError, OutputDir, RunDir, scan_runs
from prime_rl.utils.runtime import complain
from prime_rl.utils.text import one_line

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.selfcheck_replay import Recording
    from prime_rl.configs.trainer import TrainerConfig
    from prime_rl.trainer.world import World

JSON_VERSION = 1
MAX_ERROR_CHARS = 1000
# Sizes of a pass: that of the workspace, and the smallest. Each is replayed alone and together: another size sums in
# another order, which Adam's first steps, of all but no gradient, can make a thousand times larger.
NUM_SIZES = 2


class WrongUse(RuntimeError):
    """Wrong usage; the message has the reason and what to do."""


@dataclass(frozen=True)
class Reached:
    """The adapter that the workspace published as `version`, against the replay of its run alone.

    `difference` as in `Verdict`; None where nothing can be compared, with the `reason`. `ok` is None where nothing has
    to be: that version is gone, or a replay cannot lead to it.
    """

    version: int
    difference: float | None
    ok: bool | None
    reason: str | None = None

    def __str__(self) -> str:
        what = f"version {self.version} as published"
        if self.ok is None:
            return f"{what}: not compared: {self.reason}"
        return f"{what}: {self.reason}" if self.difference is None else f"{what}, {_shown(self.difference)}"


@dataclass(frozen=True)
class Verdict:
    """`difference` is the norm of the difference over the norm, of the whole adapter; the worst of all replays."""

    run_id: str
    num_steps: int
    difference: float
    reached: Reached
    tolerance: float

    @property
    def is_isolated(self) -> bool:
        """Whether neighbours change nothing."""
        return self.difference <= self.tolerance

    @property
    def ok(self) -> bool:
        """Whether no difference was found: not with neighbours, and not from what was published."""
        return self.is_isolated and self.reached.ok is not False


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 no run differs, 1 one does or a replay failed, 2 wrong use."""
    arguments = _parse(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        runs = _runs(arguments.workspace, arguments.run)
        # From here on torch is loaded, which takes seconds.
        recordings = _recordings(runs, bool(arguments.run))
        verdicts, numbers = _checked(_trainer(arguments.workspace, recordings), recordings, arguments.tolerance)
    except (WrongUse, ConfigError) as error:
        complain("selfcheck", one_line(str(error), MAX_ERROR_CHARS))
        return 2
    except RuntimeError as error:
        complain("selfcheck", one_line(str(error), MAX_ERROR_CHARS))
        return 1
    if arguments.json:
        print(json.dumps(as_json(verdicts, arguments.tolerance) | {"numbers": numbers}))
    else:
        print(f"in {numbers}", *as_lines(verdicts), sep="\n")
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def check(
    config: TrainerConfig, world: World, recordings: Sequence[Recording], tolerance: float, progress: Progress
) -> list[Verdict]:
    """Replay all recordings alone and together, and compare. Raises ReplayError, ModelError, OSError."""
    from benchmarks.selfcheck_replay import Setting, replay

    # First of all: a run that trains meanwhile removes its old versions.
    published = [_published(recording) for recording in recordings]
    smallest = max((recording.config.seq_len or config.seq_len) for recording in recordings)
    alone: list[dict[str, dict[str, Tensor]]] = []
    together: list[dict[str, dict[str, Tensor]]] = []
    for size, order in ((config.micro_batch_tokens, list(reversed(recordings))), (smallest, list(recordings))):
        alone.append({})
        for recording in recordings:
            alone[-1] |= replay(config, world, [recording], Setting(size, 1), progress.part("alone"))
        together.append(replay(config, world, order, Setting(size, len(order)), progress.part("together")))
    verdicts = []
    for recording, adapter in zip(recordings, published, strict=True):
        run_id = recording.run.run_id
        found = [relative_difference(one[run_id], other[run_id]) for one, other in zip(together, alone, strict=True)]
        # max() forgets a nan that does not come first.
        worst = math.nan if any(map(math.isnan, found)) else max(found)
        reached = adapter if isinstance(adapter, Reached) else _reached(recording, adapter, alone[0][run_id], tolerance)
        verdicts.append(Verdict(run_id, recording.num_steps, worst, reached, tolerance))
    return verdicts


def _published(recording: Recording) -> dict[str, Tensor] | Reached:
    """The adapter to compare, or why nothing can be compared."""
    from benchmarks.selfcheck_replay import ReplayError, read_published

    try:
        return read_published(recording)
    except ReplayError as error:
        return Reached(recording.last, None, None, str(error))
    except (OSError, ValueError) as error:
        return Reached(recording.last, None, False, one_line(str(error), MAX_ERROR_CHARS))


def _reached(recording: Recording, published: dict[str, Tensor], alone: dict[str, Tensor], tolerance: float) -> Reached:
    if {name: each.shape for name, each in published.items()} != {name: each.shape for name, each in alone.items()}:
        return Reached(recording.last, None, False, "its tensors are not those of the run's adapter")
    difference = relative_difference(published, alone)
    return Reached(recording.last, difference, difference <= tolerance)


def relative_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of `other`, of the whole adapter."""
    assert one.keys() == other.keys()
    difference = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return math.sqrt(difference / sum(float(tensor.double().square().sum()) for tensor in other.values()))


class Progress:
    """One line that is written over, on standard error, when that is a terminal."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._num_before = 0
        self._num_now = 0
        self._is_shown = sys.stderr.isatty()

    def part(self, what: str) -> Callable[[int], None]:
        """For the next replay: called with the steps that it has done."""
        self._num_before += self._num_now
        self._num_now = 0
        return partial(self._show, what)

    def _show(self, what: str, num_steps: int) -> None:
        self._num_now = num_steps
        if self._is_shown:
            done = self._num_before + num_steps
            print(f"\r\033[Kreplaying {what}: step {done} of {self._num_steps}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Erase the line."""
        if self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def make_parser() -> argparse.ArgumentParser:
    """The command line of the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.selfcheck",
        description="Train recorded batches again, alone and together, and compare the adapters with each other and "
        "with the published one. Changes nothing.",
    )
    parser.add_argument("workspace", metavar="WORKSPACE", type=Path, help="the output_dir of the runs")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference (default: 1e-4)")
    parser.add_argument("--run", metavar="ID", action="append", default=[], help="only this run; may be repeated")
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if not arguments.tolerance >= 0:
        parser.error(f"--tolerance {arguments.tolerance:g}: must be 0 or more")
    return arguments


def _runs(workspace: Path, run_ids: Sequence[str]) -> list[RunDir]:
    if not workspace.is_dir():
        raise WrongUse(f"{workspace}: folder not found")
    try:
        runs = [OutputDir(workspace).run(run_id) for run_id in dict.fromkeys(run_ids)] or scan_runs(workspace)[0]
    except LayoutError as error:
        raise WrongUse(str(error)) from error
    for run in runs:
        if not run.path.is_dir():
            raise WrongUse(f"{run.run_id} not found in {workspace}")
    if not runs:
        raise WrongUse(f"{workspace} has no runs: give the output_dir of a trainer")
    return runs


def _trainer(workspace: Path, recordings: Sequence[Recording]) -> TrainerConfig:
    from benchmarks.selfcheck_replay import ReplayError, trainer_config

    try:
        return trainer_config(workspace, recordings)
    except ReplayError as error:
        raise WrongUse(str(error)) from error


def _checked(config: TrainerConfig, recordings: Sequence[Recording], tolerance: float) -> tuple[list[Verdict], str]:
    """`check` with its own process group, and in what numbers; every failure is a RuntimeError with one line."""
    from prime_rl.trainer.world import setup_world

    world = setup_world(config.device, config.dist_timeout_s, config.num_threads)
    progress = Progress(2 * NUM_SIZES * sum(recording.num_steps for recording in recordings))
    try:
        numbers = config.model.numbers_on(world.device.type)
        return check(config, world, recordings, tolerance, progress), numbers
    except OSError as error:
        raise RuntimeError(str(error)) from error
    finally:
        progress.close()
        world.close()


def _recordings(runs: Sequence[RunDir], were_named: bool) -> list[Recording]:
    """What can be replayed; a run that was asked for by name must be."""
    from benchmarks.selfcheck_replay import ReplayError, find_recording

    recordings = []
    for run in runs:
        try:
            recordings.append(find_recording(run))
        except ReplayError as error:
            if were_named or len(runs) == 1:
                raise WrongUse(one_line(str(error), MAX_ERROR_CHARS)) from error
            complain("selfcheck: left out", one_line(str(error), MAX_ERROR_CHARS))
    if not recordings:
        raise WrongUse("no run has recorded batches: set ckpt.keep_rollouts = true in control/orch.toml")
    return recordings


def as_json(verdicts: Sequence[Verdict], tolerance: float) -> dict[str, Any]:
    """The one object that `--json` prints; a difference that is not a finite number is null."""
    runs = [
        {
            "run_id": each.run_id,
            "num_steps": each.num_steps,
            "difference": _finite(each.difference),
            "reached": asdict(each.reached) | {"difference": _finite(each.reached.difference)},
            "ok": each.ok,
        }
        for each in verdicts
    ]
    return {"version": JSON_VERSION, "tolerance": tolerance, "runs": runs}


def as_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Two lines a run, for people."""
    lines = []
    for each in verdicts:
        failed = f": FAILED (tolerance {each.tolerance:g})"
        steps = f"{each.num_steps} step{'' if each.num_steps == 1 else 's'}"
        lines.append(f"{each.run_id}: {steps}, {_shown(each.difference)}{': ok' if each.is_isolated else failed}")
        word = {True: ": ok", False: failed, None: ""}[each.reached.ok]
        lines.append(f"{each.run_id}: {each.reached}{word}")
    return lines


def _shown(difference: float) -> str:
    return f"relative difference {difference:.2g}"


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
