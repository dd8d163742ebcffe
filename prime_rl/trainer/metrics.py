"""The reports of the trainer: metrics of each update of a run, `trainer/status.json`, and `usage/trainer.jsonl`.

All are written by rank 0 alone. A replayed update (after a restart) writes no second line of metrics of the same step.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import torch

from prime_rl.contract.files import UNDECODABLE, append_line, read_end
from prime_rl.contract.layout import RunDir, list_steps
from prime_rl.contract.samples import BatchRatios, RatioFile
from prime_rl.contract.status import StatusWriter, TrainerRunStatus
from prime_rl.contract.usage import UsageLog
from prime_rl.trainer.loss import LossSums
from prime_rl.trainer.runs import MultiRunManager, Progress, TrainerRun
from prime_rl.trainer.runs.sync import ReadyRun
from prime_rl.trainer.step import UpdateReport
from prime_rl.utils.runtime import TokenRate
from prime_rl.utils.text import printable

logger = logging.getLogger(__name__)

PHASES = ("wait", "forward_backward", "optim", "broadcast", "checkpoint")
# A line of metrics is far shorter than this.
TAIL_BYTES = 16_384
# Updates come in bursts, one a run; a rate over less than this would jump.
RATE_WINDOW_S = 30.0
# Of a log-ratio.
RATIO_DIGITS = 4


@dataclass
class PhaseTimer:
    """Seconds by phase since the last `take`. `last_s`: those of the phase that ended last."""

    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    last_s: float = 0.0

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to `phase`, also when it raises."""
        start = self.clock()
        try:
            yield
        finally:
            self.last_s = self.clock() - start
            self.seconds[phase] += self.last_s

    def take(self) -> dict[str, float]:
        """The seconds so far; starts again at zero."""
        seconds, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return seconds


class MetricsWriter:
    """Appends to `metrics/trainer.jsonl` of each run, and to `metrics/ratios.jsonl`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        # By run, of those that have any.
        self._ratios: dict[str, RatioFile] = {}

    def admitted(self, run: TrainerRun) -> None:
        """Find up to which step the run was reported, when it is decided where it resumes.

        A run that was rolled back has lost its later versions, and is reported again from there.
        """
        published = max(list_steps(run.dir.broadcast, stable_only=True), default=0)
        run.reported_step = min(last_metrics_step(run.dir), published)
        # It may be another folder than the one of that name before.
        self._ratios.pop(run.run_id, None)

    def write(self, run: TrainerRun, ready: ReadyRun, report: UpdateReport, seconds: dict[str, float]) -> None:
        """One line, from any thread. `seconds` has what the phases after the update took. Raises OSError."""
        if report.step <= run.reported_step:
            return
        sums, total_s = report.sums, report.forward_backward_s + report.optim_s
        line = {
            "step": report.step,
            "time": self._clock(),
            "loss": sums.loss,
            "entropy": sums.mean(sums.entropy),
            **_of_tokens(sums),
            **({"kl_base": sums.mean(sums.kl_base)} if report.compares_with_base else {}),
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "tokens": ready.num_tokens,
            "tokens/trained": ready.num_trained,
            "tokens/computed": ready.num_computed,
            "samples": ready.num_samples,
            "rows/without_gradient": ready.num_samples - ready.num_rows,
            "tokens_per_s": ready.num_tokens / total_s if total_s else 0.0,
            "memory/peak_gib": peak_gib(),
            "time/forward_backward": report.forward_backward_s,
            "time/optim": report.optim_s,
            **{f"time/{phase}": value for phase, value in seconds.items()},
        }
        append_line(run.dir.trainer_metrics, msgspec.json.encode(line).decode())
        if report.ratios:
            self._write_ratios(run, report)
        run.reported_step = report.step

    def _write_ratios(self, run: TrainerRun, report: UpdateReport) -> None:
        """A disk that does not take them is logged and costs nothing else."""
        rounded: dict[int, list[float | None]] = {
            place: [round(value, RATIO_DIGITS) for value in values] for place, values in report.ratios.items()
        }
        new = RatioFile(run.dir.ratios, keep=run.config.samples.keep_steps)
        try:
            self._ratios.setdefault(run.run_id, new).append(BatchRatios(report.step, rounded))
        except OSError as error:
            logger.warning("%s: log-ratios of step %d are not kept: %s", run.run_id, report.step, error)


def _of_tokens(sums: LossSums) -> dict[str, float]:
    """The figures of tokens that were sampled, and of those of texts: as far as there are any."""
    found: dict[str, float] = {}
    if sums.num_supervised < sums.num_loss_tokens or not sums.num_supervised:
        found["mismatch_kl"] = sums.mean_of_sampled(sums.mismatch_kl)
        found["importance_ratio/mean"] = sums.mean_of_sampled(sums.importance_ratio)
        found["clipped_fraction"] = sums.mean_of_sampled(sums.num_clipped)
    for name, number, loss, right in (
        ("supervised", sums.num_supervised, sums.supervised_loss, sums.supervised_right),
        ("held_out", sums.num_held_out, sums.held_out_loss, sums.held_out_right),
    ):
        found |= {f"{name}/loss": loss / number, f"{name}/accuracy": right / number} if number else {}
    return found


def peak_gib() -> float:
    """The most that this process has held: in tensors on its GPU, or, without one, in all of its host memory."""
    # 0 in a process that has not used a GPU.
    if on_gpu := torch.cuda.max_memory_allocated():
        return on_gpu / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def last_metrics_step(run: RunDir) -> int:
    """The step of the last whole line of `metrics/trainer.jsonl`; 0 without one."""
    for line in reversed(read_end(run.trainer_metrics, TAIL_BYTES).splitlines()):
        with contextlib.suppress(*UNDECODABLE, KeyError, TypeError, ValueError):
            return int(msgspec.json.decode(line)["step"])
    return 0


class StatusReporter:
    """Keeps `trainer/status.json`: what the trainer does, or what it waits for, and every slot."""

    def __init__(self, writer: StatusWriter, manager: MultiRunManager) -> None:
        self._writer = writer
        self._manager = manager
        self._num_updates = 0
        self._progress = 0
        self._rate = TokenRate(RATE_WINDOW_S)
        self._num_tokens = 0
        self._time_s: dict[str, float] = {}
        self._total_s = dict.fromkeys(PHASES, 0.0)

    def published(self, run: TrainerRun, progress: Progress) -> None:
        """The progress of a run up to here is on disk, and may be reported."""
        self._progress += 1
        run.published = progress

    def training(self) -> None:
        """A pass begins, or an update is done."""
        self._progress += 1
        self._update(state="training", waiting_on=None)

    def waiting(self, batches: str | None) -> None:
        """Nothing to do: `batches` names the batches that are waited for; None: there is no run."""
        if batches is None:
            self._time_s = {}
            self._update(state="waiting", waiting_on=self._no_run(), tokens_per_s=0.0)
        else:
            self._update(state="waiting", waiting_on=batches)

    def updated(self, time_s: dict[str, float], num_tokens: int) -> None:
        """A run was updated. `time_s` is where the time since the last update went."""
        self._num_updates += 1
        self._time_s = dict(time_s)
        self.spent(time_s)
        self._num_tokens += num_tokens
        self.training()

    def spent(self, time_s: dict[str, float]) -> None:
        """Add to the time of each phase."""
        self._total_s = {phase: seconds + time_s[phase] for phase, seconds in self._total_s.items()}

    def close(self) -> None:
        """Write the status a last time, with state stopped, and end its heartbeat."""
        self._writer.close(
            state="stopped", waiting_on=None, runs=self._runs(), time_s={}, total_s=self._total_s, tokens_per_s=0.0
        )

    def _update(self, state: str, waiting_on: str | None, tokens_per_s: float | None = None) -> None:
        self._writer.turn()  # the main loop comes by here at every pass and at every look for one
        self._writer.update(
            state=state,
            waiting_on=waiting_on,
            progress=self._progress,
            runs=self._runs(),
            waiting=list(self._manager.waiting),
            refused={printable(name): printable(why) for name, why in self._manager.findings.refused.items()},
            time_s=self._time_s,
            total_s=self._total_s,
            num_updates=self._num_updates,
            tokens_per_s=self._rate.per_s(self._num_tokens) if tokens_per_s is None else tokens_per_s,
        )

    def _runs(self) -> dict[str, TrainerRunStatus]:
        return {
            run.run_id: TrainerRunStatus(
                run_idx=run.run_idx,
                step=run.published.step,
                max_steps=run.config.max_steps,
                tokens=run.published.total_tokens,
                samples=run.published.total_samples,
                ready=run.ready,
                lr=run.training.lr,
            )
            for run in self._manager.used
            if run.published is not None
        }

    def _no_run(self) -> str:
        findings = self._manager.findings
        counts = [
            f"{len(names)} {word}"
            for word, names in (
                ("finished", findings.finished),
                ("evicted", findings.evicted),
                ("paused", findings.paused),
                ("failed", findings.failed),
                ("invalid", findings.invalid),
                ("without control/orch.toml", findings.unconfigured),
                ("still being written", findings.settling),
                ("refused", findings.refused),
            )
            if names
        ]
        where = self._manager.output_dir
        if not counts:
            return f"a run: no run_* with control/orch.toml in {where}"
        return f"a run: none of the run_* in {where} can train ({', '.join(counts)})"


# Phases whose seconds belong to the run that is updated.
_OF_UPDATE = ("optim", "broadcast", "checkpoint")


class TrainerUsage:
    """Whose work the trainer's seconds were.

    The seconds of a pass are split over its runs by the positions that were computed for each on all ranks; what an
    update takes (optimizer, snapshots) is its run's. So the seconds of all runs together are those of the trainer's
    phases without waiting. The tokens of a batch count when its run is updated. A run's line is written after each
    update, and when it leaves. Work that is done again after a crash was used again, and counts again.
    """

    def __init__(self, manager: MultiRunManager, log: UsageLog) -> None:
        self._manager = manager
        self._log = log

    def passed(self, seconds: float) -> None:
        """A pass over rows of the runs that have `pass_positions` took so long."""
        runs = [run for run in self._manager.used if run.pass_positions]
        total = sum(run.pass_positions for run in runs)
        for run in runs:
            run.used_s += seconds * run.pass_positions / total
            run.used_positions += run.pass_positions
            run.pass_positions = 0

    def updated(self, run: TrainerRun, num_tokens: int, time_s: Mapping[str, float]) -> None:
        """The run was updated with a batch. `time_s` is where the time since the last update of any run went."""
        run.used_s += sum(time_s[phase] for phase in _OF_UPDATE)
        run.used_tokens += num_tokens
        self.write(run)

    def write(self, run: TrainerRun) -> None:
        """Write down what the run has used since its last line."""
        if run.used_s or run.used_tokens:
            tokens = {"trained_tokens": run.used_tokens, "computed_tokens": run.used_positions}
            self._log.add(run.run_id, step=run.progress.step, used={"trainer_s": run.used_s, **tokens})
        run.used_s, run.used_tokens, run.used_positions = 0.0, 0, 0
