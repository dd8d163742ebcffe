"""Successive halving over the runs of a sweep (arXiv 1502.07943): at each rung the best 1/eta continue, the others end.

The supervisor calls `Halving.look` at its every look. The result of a rung is decided purely, written to
`sweeps/decisions/<name>.json`, and then carried out. A supervisor that ends in between carries out the same decision
when it starts again. A run that is at its rung before the others is paused, so that they get its slot: more runs than
slots never wait for each other. A run that waits for a slot or that a person has paused is waited for; one that failed,
is evicted, invalid or deleted no longer takes part.

Of a run's `orch.toml` only `max_steps` is read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from daemons.actions import end_run
from daemons.errors import record_act
from daemons.workspace_reader import RunFiles, Stamp, stamp_of
from prime_rl.contract.files import FileRefused, read_end, read_file, remove_file, write_atomic
from prime_rl.contract.layout import LayoutError, OutputDir, RunDir, TooManySteps
from prime_rl.contract.metrics import series
from prime_rl.contract.notes import MAX_PLAN_BYTES, SweepPlan, list_sweeps, read_plan
from prime_rl.contract.status import DaemonStatus, read_mark, read_status

logger = logging.getLogger("supervisor")

DECISIONS_VERSION = 1
# The end of a metrics file in which the values up to a rung are: a run gets little further before it is paused.
MAX_HISTORY_BYTES = 8_000_000
# How the reasons begin by which our own pauses are known.
MARK = "halving: "
AUDIT = "halving"
# What a run's own files cause, and the disk does not.
OF_A_RUN = (FileRefused, TooManySteps, NotADirectoryError, PermissionError, LayoutError)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one rung. `values` by run, null for a run without one; `carried_out`: all marks are written."""

    rung: int
    step: int
    kept: list[str]
    lost: list[str]
    values: dict[str, float | None]
    carried_out: bool = False


class Decisions(msgspec.Struct, kw_only=True):
    """`sweeps/decisions/<name>.json`."""

    version: int = DECISIONS_VERSION
    rungs: list[Decision] = []


@dataclass(frozen=True)
class Rung:
    """At `step` the best `keep` runs go on. `number` counts from 1."""

    number: int
    step: int
    keep: int


@dataclass(frozen=True)
class RunFact:
    """One run of a sweep now.

    Attributes:
        step: its newest published version.
        is_over: it has ended by itself or was ended: it never gets further.
        paused: the text of its `paused.txt`.
    """

    run_id: str
    step: int
    is_over: bool = False
    paused: str | None = None


# Pure


def rungs_of(plan: SweepPlan, max_steps: int) -> list[Rung]:
    """Rungs at max_steps / eta^k, so many that one run is left at the last; those before `min_steps` are left out."""
    eta = plan.halving
    if eta is None or eta < 2 or len(plan.runs) < 2:
        return []
    num_rungs = 1
    while len(plan.runs) > eta**num_rungs:
        num_rungs += 1
    by_step: dict[int, int] = {}
    for number in range(1, num_rungs + 1):
        step = math.ceil(max_steps / eta ** (num_rungs - number + 1))
        if max(plan.min_steps, 1) <= step < max_steps:
            by_step[step] = math.ceil(len(plan.runs) / eta**number)  # of rungs at one step the last
    return [Rung(number, step, keep) for number, (step, keep) in enumerate(sorted(by_step.items()), start=1)]


def next_rung(rungs: Sequence[Rung], decisions: Sequence[Decision]) -> Rung | None:
    """The first that is not decided."""
    return rungs[len(decisions)] if len(decisions) < len(rungs) else None


def contenders(plan: SweepPlan, decisions: Sequence[Decision], facts: Mapping[str, RunFact]) -> list[RunFact]:
    """The runs that still take part, in the plan's order. `facts` has no others."""
    lost = {run_id for decision in decisions for run_id in decision.lost}
    return [facts[run.run_id] for run in plan.runs if run.run_id in facts and run.run_id not in lost]


def is_due(rung: Rung, runs: Sequence[RunFact]) -> bool:
    """True when the rung can be decided: all have reached it, or it would end none."""
    return len(runs) <= rung.keep or all(run.is_over or run.step >= rung.step for run in runs)


def decide_rung(plan: SweepPlan, rung: Rung, values: Mapping[str, float | None]) -> Decision:
    """The best `rung.keep` of the runs in `values` are kept. A run without a value is the worst; ties fall by seed."""

    def order(run_id: str) -> tuple[bool, float, bytes]:
        value = values[run_id]
        sign = -1.0 if plan.mode == "max" else 1.0
        tie = hashlib.sha256(f"{plan.seed}/{rung.number}/{run_id}".encode()).digest()
        return value is None, sign * value if value is not None else 0.0, tie

    ranked = sorted(values, key=order)
    return Decision(
        rung=rung.number, step=rung.step, kept=ranked[: rung.keep], lost=ranked[rung.keep :], values=dict(values)
    )


def to_pause(rung: Rung, runs: Sequence[RunFact]) -> list[RunFact]:
    """The runs that wait at the rung for the others and are not paused yet."""
    return [run for run in runs if run.step >= rung.step and not run.is_over and run.paused is None]


def numbers(plan: SweepPlan, decision: Decision, run_id: str) -> str:
    """The place of a run in a decision, with the numbers."""
    value = decision.values[run_id]
    own = "no value" if value is None else f"{value:.4g}"
    place = [*decision.kept, *decision.lost].index(run_id) + 1
    last = decision.values[decision.kept[-1]] if decision.kept else None
    least = "" if last is None else f", {last:.4g} was needed"
    return (
        f"rung {decision.rung} of sweep {plan.name}, step {decision.step}: {plan.metric} = {own}, "
        f"place {place} of {len(decision.values)}{least}"
    )


# Acting


class Halving:
    """Looks after all sweeps of one workspace."""

    def __init__(self, output: OutputDir) -> None:
        self._output = output
        self._files: dict[str, RunFiles] = {}
        self._done: dict[str, Stamp] = {}
        self._complained: dict[str, str] = {}

    def look(self) -> None:
        """Decide and carry out what is due. A sweep that cannot be looked after costs the others nothing."""
        for name in list_sweeps(self._output):
            plan_stamp = stamp_of(self._output.sweep(name))
            if self._done.get(name) == plan_stamp:
                continue
            try:
                if self._look_after(name):
                    self._done[name] = plan_stamp
                self._complained.pop(name, None)
            except Exception as error:  # the boundary of a sweep
                self._complain(name, error)

    def _complain(self, who: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        if self._complained.get(who) != why:
            self._complained[who] = why
            logger.error("sweep %s: %s", who, why)

    def _look_after(self, name: str) -> bool:
        """True when nothing is left to decide about it."""
        plan = read_plan(self._output, name)
        if plan is None or plan.halving is None:
            return True  # a plan is written once
        decisions = read_decisions(self._output, name)
        facts = {}
        for each in plan.runs:
            with self._boundary(plan, each.run_id, is_look=True):
                if (fact := self._fact(each.run_id)) is not None:
                    facts[each.run_id] = fact
        max_steps = [most for _, most in facts.values()]
        if not max_steps:
            return not any((self._output.path / run.run_id).is_dir() for run in plan.runs)
        rungs = rungs_of(plan, min(max_steps))
        for decision in decisions.rungs:
            if not decision.carried_out:
                self._carry_out(plan, decisions, decision)
        rung = next_rung(rungs, decisions.rungs)
        if rung is None:
            return all(each.carried_out for each in decisions.rungs)
        runs = contenders(plan, decisions.rungs, {run_id: fact for run_id, (fact, _) in facts.items()})
        if not is_due(rung, runs):
            for run in to_pause(rung, runs):
                with self._boundary(plan, run.run_id):
                    self._pause(plan, rung, run)
            return False
        decision = decide_rung(plan, rung, {run.run_id: self._value(plan, rung, run.run_id) for run in runs})
        decisions.rungs.append(decision)
        write_decisions(self._output, name, decisions)
        self._carry_out(plan, decisions, decision)
        return next_rung(rungs, decisions.rungs) is None and all(each.carried_out for each in decisions.rungs)

    def _carry_out(self, plan: SweepPlan, decisions: Decisions, decision: Decision) -> None:
        """End who lost, let the others go on; then note that it is done. A run that cannot be told is tried again."""
        told = []
        for run_id in [*decision.lost, *decision.kept]:
            with self._boundary(plan, run_id):
                self._tell(plan, decision, run_id)
                told.append(run_id)
        if len(told) == len(decision.values):
            at = decisions.rungs.index(decision)
            decisions.rungs[at] = msgspec.structs.replace(decision, carried_out=True)
            write_decisions(self._output, plan.name, decisions)

    @contextlib.contextmanager
    def _boundary(self, plan: SweepPlan, run_id: str, *, is_look: bool = False) -> Iterator[None]:
        """What goes wrong with the files of one run is no reason to keep the others waiting.

        A look lets through what may be the disk's doing: nothing is decided by what could not be read for now.
        """
        try:
            yield
        except (OSError, LayoutError) as error:
            is_own = isinstance(error, OF_A_RUN) or getattr(error, "errno", 0) in (errno.ENAMETOOLONG, errno.ELOOP)
            if is_look and not is_own:
                raise
            self._complain(f"{plan.name}, {run_id}", error)

    def _tell(self, plan: SweepPlan, decision: Decision, run_id: str) -> None:
        run, why = self._output.run(run_id), numbers(plan, decision, run_id)
        if run_id in decision.lost:
            if os.path.isdir(run.control):
                end_run(self._output, run, AUDIT, f"ended by halving at {why}", detail=_detail(decision))
                _unpause(run, MARK)
        elif _unpause(run, _waits(plan, decision)):
            record_act(self._output, AUDIT, run_id, reason=f"goes on: {MARK}{why}", detail=_detail(decision))

    def _pause(self, plan: SweepPlan, rung: Rung, run: RunFact) -> None:
        reason = _waits(plan, rung)
        try:
            write_atomic(self._output.run(run.run_id).paused, reason, exclusive=True)
        except FileExistsError:
            return
        record_act(self._output, AUDIT, run.run_id, reason=reason)

    def _value(self, plan: SweepPlan, rung: Rung, run_id: str) -> float | None:
        """The last value of the sweep's metric up to the rung."""
        found: list[tuple[int, float]] = []
        with self._boundary(plan, run_id, is_look=True):
            run = self._output.run(run_id)
            for path in (run.orchestrator_metrics, run.trainer_metrics):
                lines = read_end(path, MAX_HISTORY_BYTES).splitlines()
                found = found or series(lines, plan.metric, at_most=rung.step)
        return found[-1][1] if found else None

    def _fact(self, run_id: str) -> tuple[RunFact, int] | None:
        """A run that takes part, and its `max_steps`; None for one that does not, or whose config was not read yet."""
        run = self._output.run(run_id)
        if not os.path.isdir(run.control):
            return None
        record = self._files.setdefault(run_id, RunFiles(run)).read(is_busy=True)
        config = record.parsed.config
        if record.evicted is not None or record.config_error is not None or config is None:
            return None
        is_over = record.ended is not None or record.published >= config.max_steps
        if not is_over:
            daemon = read_status(self._output.daemon_status(run_id), DaemonStatus)
            if any(each is not None and each.state == "failed" for each in (record.status, daemon)):
                return None
        return RunFact(run_id, record.published, is_over, record.paused), config.max_steps


def _waits(plan: SweepPlan, at: Rung | Decision) -> str:
    number = at.number if isinstance(at, Rung) else at.rung
    return f"{MARK}waits for rung {number} of sweep {plan.name} (step {at.step})"


def _unpause(run: RunDir, mark: str) -> bool:
    """Take back our own pause that begins with `mark`, not that of a person; false without one."""
    is_ours = (read_mark(run.paused) or "").startswith(mark)
    if is_ours:
        remove_file(run.paused)
    return is_ours


def read_decisions(output: OutputDir, name: str) -> Decisions:
    """The decisions about a sweep so far; none without a file.

    Raises ValueError for another version, OSError or MsgspecError when the file cannot be read.
    """
    path = output.sweep_decisions(name)
    if not os.path.lexists(path):
        return Decisions()
    found = msgspec.json.decode(read_file(path, limit=MAX_PLAN_BYTES), type=Decisions)
    if found.version != DECISIONS_VERSION:
        raise ValueError(f"{path}: version {found.version}, this program reads {DECISIONS_VERSION}")
    return found


def write_decisions(output: OutputDir, name: str, decisions: Decisions) -> None:
    """Write `decisions` in place of those in the file. Raises OSError."""
    write_atomic(output.sweep_decisions(name), msgspec.json.encode(decisions))


def _detail(decision: Decision) -> str:
    found = decision.values.items()
    values = ", ".join(f"{run_id} {'none' if value is None else f'{value:.4g}'}" for run_id, value in found)
    return f"rung {decision.rung}, step {decision.step}: kept {', '.join(decision.kept)}; {values}"
