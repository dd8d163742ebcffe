"""Ends of a run before `max_steps`: its budget and its stop rule; and the account of what it uses.

`RunMeter` adds up what the run uses and writes it down after every step; `Ending` decides after every batch whether
there is another one. Both take up where an earlier process of the run ended. What others decide about the run is the
business of `guard`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping

from prime_rl.configs.base import ConfigError
from prime_rl.configs.lifetime import BudgetConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract import audit
from prime_rl.contract.early_stop import EarlyStop, metric_value, series
from prime_rl.contract.files import read_end, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.usage import UsageLog, budget_reason, life_of
from prime_rl.orchestrator.pool import InferenceClient

logger = logging.getLogger("orchestrator")

# The end of the metrics file from which the stop rule is brought up to date: tens of thousands of steps.
MAX_HISTORY_BYTES = 64_000_000


class RunMeter:
    """Tokens, seconds of inference and hours at work of one run, over all its starts."""

    def __init__(self, run: RunDir, config: OrchestratorConfig, client: InferenceClient) -> None:
        self._run_id = run.run_id
        self._tags = config.tags
        self._client = client
        self._life = _life(run)
        self._log = UsageLog(OutputDir(run.path.parent).run_usage(run.run_id))
        self._written = self._counters()

    def note(self, step: int) -> None:
        """Write down what was used since the last call."""
        now = self._counters()
        used = {name: now[name] - self._written[name] for name in now}
        self._written = now
        self._log.add(self._run_id, life=self._life, step=step, tags=self._tags, used=used)

    def used(self) -> tuple[int, float]:
        """(tokens, hours) up to the last `note`, also of earlier processes."""
        lines = self._log.of_life(self._run_id, self._life)
        return sum(line.tokens for line in lines), sum(line.work_s for line in lines) / 3600

    def _counters(self) -> dict[str, float]:
        client = self._client
        return {"tokens": client.num_sampled_tokens, "inference_s": client.request_s, "work_s": time.monotonic()}


class Ending:
    """The rule by which the run ends before `max_steps`. The budget is read again when `orch.toml` changes.

    Args:
        step: where the run goes on; figures of later steps are void.
    """

    def __init__(self, run: RunDir, config: OrchestratorConfig, meter: RunMeter, *, step: int) -> None:
        self._run = run
        self._meter = meter
        self._budget = config.budget
        self._stamp = self._toml_stamp()
        self._rule = EarlyStop(**config.stop.model_dump()) if config.stop else None
        if self._rule is not None:
            if self._rule.metric.startswith("eval/") and config.eval is None:
                logger.warning("stop.metric = %r, but the run has no [eval]: it never stops early", self._rule.metric)
            lines = read_end(run.orchestrator_metrics, MAX_HISTORY_BYTES).splitlines()
            for at, value in series(lines, self._rule.metric, at_most=step):
                self._rule.feed(at, value)

    def note(self, step: int) -> None:
        """Write down what the run has used up to here."""
        self._meter.note(step)

    def feed(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a batch or of an evaluation."""
        value = metric_value(values, self._rule.metric) if self._rule else None
        if self._rule is not None and value is not None:
            self._rule.feed(step, value)

    def reason(self) -> str | None:
        """Why the run ends now; None: it goes on."""
        if stopped := self._rule.reason if self._rule else None:
            return stopped
        self._read_budget()
        tokens, hours = self._meter.used()
        return budget_reason(tokens, hours, max_tokens=self._budget.max_tokens, max_hours=self._budget.max_hours)

    def write(self, reason: str) -> None:
        """Write `finished.txt`: the trainer saves the run and frees its slot."""
        logger.info("ending the run: %s", reason)
        with contextlib.suppress(FileExistsError):
            write_atomic(self._run.finished, reason, exclusive=True)
            audit.note(self._run, "orchestrator", "finish", reason)

    def _read_budget(self) -> None:
        stamp = self._toml_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            budget: BudgetConfig = load_run_config(self._run.orch_toml).budget
        except ConfigError as error:
            logger.warning("the budget stays as it is: %s", error)
            return
        if budget != self._budget:
            logger.info("new budget: %s", budget.model_dump(exclude_none=True) or "none")
        self._budget = budget

    def _toml_stamp(self) -> tuple[int, int, int] | None:
        try:
            info = os.lstat(self._run.orch_toml)
        except OSError:
            return None
        return info.st_mtime_ns, info.st_size, info.st_ino


def _life(run: RunDir) -> str:
    try:
        return life_of(run)
    except OSError as error:
        logger.warning("%s cannot be used, so a new run of this id has the usage of this one: %s", run.life, error)
        return ""
