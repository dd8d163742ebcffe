"""The run's face to the outside: its status file, its metrics lines, its log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from prime_rl.contract.layout import RunDir
from prime_rl.contract.status import StatusWriter
from prime_rl.orchestrator.client import InferenceClient
from prime_rl.orchestrator.metrics import batch_metrics, bottleneck, write_metrics
from prime_rl.orchestrator.rollout import Group
from prime_rl.orchestrator.scheduler import Scheduler

logger = logging.getLogger("orchestrator")

# How often the status file follows figures that always change; a new wait is written at once.
REPORT_S = 2.0


class Reporter:
    """Keeps `control/status.json` true: a new wait at once, changing figures every REPORT_S."""

    def __init__(self, writer: StatusWriter) -> None:
        self.waiting_on: Callable[[float], str | None] = lambda now: None
        self.figures: Callable[[], dict[str, object]] = dict
        self._writer = writer
        self._written_s = 0.0

    def update(self, **fields: object) -> None:
        self._written_s = time.monotonic()
        self._writer.update(waiting_on=self.waiting_on(time.time()), **self.figures(), **fields)

    def tick(self) -> None:
        sentence = self.waiting_on(time.time())
        if sentence != self._writer.status.waiting_on:
            if sentence:
                logger.info("waiting for %s", sentence)
            self.update()
        elif time.monotonic() - self._written_s >= REPORT_S:
            self.update()


def report_batch(
    run: RunDir, step: int, groups: Sequence[Group], scheduler: Scheduler, client: InferenceClient, reporter: Reporter
) -> None:
    """One line of metrics, one line of log, and the status file."""
    time_s = scheduler.phases.lap()
    num_tokens, client.num_sampled_tokens = client.num_sampled_tokens, 0
    metrics = batch_metrics(step, groups, time_s, scheduler.ledger.num_dropped, num_tokens)
    write_metrics(run.orchestrator_metrics, step, metrics, time.time())
    reporter.update(
        step=step,
        reward=metrics["reward/mean"],
        tokens_per_s=metrics["tokens_per_s"],
        async_level=int(metrics["async_level/max"]),
        bottleneck=bottleneck(time_s),
    )
    logger.info(
        "step %d: reward %.4f, async level %d, %.1f s, %.0f tokens/s",
        step,
        metrics["reward/mean"],
        metrics["async_level/max"],
        metrics["time/step"],
        metrics["tokens_per_s"],
    )
