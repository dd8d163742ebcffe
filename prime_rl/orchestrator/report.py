"""The run's face to the outside: its status file, its metrics lines, its log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prime_rl.contract.disk import held_async
from prime_rl.contract.layout import RunDir
from prime_rl.contract.status import StatusWriter
from prime_rl.orchestrator.envs.checked import CheckedEnvironment
from prime_rl.orchestrator.metrics import batch_metrics, bottleneck, write_metrics
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.rollout import Group
from prime_rl.orchestrator.sampler import ExampleSampler
from prime_rl.orchestrator.scheduler import Scheduler
from prime_rl.utils.clock import TokenRate
from prime_rl.utils.text import one_line

logger = logging.getLogger("orchestrator")

# How often the status file follows figures that change all the time; a new wait is written at once.
REPORT_S = 2.0
# The status file is written often: of the unusable examples it has so many.
MAX_UNUSABLE_SHOWN = 20
# Several batches may be ready at once and then none for long: the token rate is taken over at least this.
RATE_WINDOW_S = 10.0


def environment_figures(envs: Sequence[CheckedEnvironment]) -> dict[str, object]:
    """The figures of the environments in the status file: what goes wrong in them, and the unusable examples."""
    unusable = {f"{env.name}/{one_line(each, 80)}": one_line(why) for env in envs for each, why in env.unusable.items()}
    return {
        "problem": "; ".join(problem for env in envs if (problem := env.problem())) or None,
        "examples_unusable": len(unusable),
        "unusable": dict(list(unusable.items())[-MAX_UNUSABLE_SHOWN:]),
    }


class RunReporter:
    """Keeps `control/status.json` true: a new wait at once, figures that changed every REPORT_S, nothing else.

    Args:
        waiting_on: the sentence about what is waited for, at a time in Unix seconds; None while nothing is.
        figures: fields that change all the time.
    """

    def __init__(
        self,
        writer: StatusWriter,
        waiting_on: Callable[[float], str | None] = lambda now: None,
        figures: Callable[[], dict[str, object]] = dict,
    ) -> None:
        self._writer = writer
        self._waiting_on = waiting_on
        self._figures = figures
        self._written_s = 0.0
        self._written: dict[str, object] = {}

    def wait_for(self, what: str | Callable[[float], str | None] | None) -> None:
        """Note what is waited for from now on, written at once."""
        self._waiting_on = what if callable(what) else lambda now: what
        self.tick()

    def update(self, **fields: object) -> None:
        """Write `fields` into the status file, together with the present wait and all figures."""
        self._written_s = time.monotonic()
        self._written = self._figures()
        self._writer.update(waiting_on=self._waiting_on(time.time()), **self._written, **fields)

    def tick(self) -> None:
        """One turn of the event loop: a new wait is written at once, figures that changed every REPORT_S."""
        self._writer.turn()
        sentence = self._waiting_on(time.time())
        if sentence != self._writer.status.waiting_on:
            if sentence:
                logger.info("waiting for %s", sentence)
            self.update()
        elif time.monotonic() - self._written_s >= REPORT_S and self._figures() != self._written:
            self.update()


@dataclass(frozen=True)
class BatchReporter:
    """After each batch: one line of metrics, one line of log, and the status file."""

    run: RunDir
    scheduler: Scheduler
    client: InferenceClient
    reporter: RunReporter
    envs: Mapping[str, CheckedEnvironment]
    sampler: ExampleSampler
    rate: TokenRate = field(default_factory=lambda: TokenRate(RATE_WINDOW_S))

    async def report(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Returns the figures of the batch."""
        time_s, ledger = self.scheduler.phases.lap(), self.scheduler.ledger
        held_by = bottleneck(time_s, num_ahead=step - 1 - self.scheduler.published)
        values = batch_metrics(step, groups, time_s, ledger.num_dropped)
        values |= {"groups_filtered": ledger.num_filtered, "groups_too_old": ledger.num_too_old}
        values |= {f"env/{name}/dropped": env.num_dropped for name, env in self.envs.items()}
        values["examples_unusable"] = sum(len(env.unusable) for env in self.envs.values())
        values |= self.sampler.figures()
        values["tokens_per_s"] = self.rate.per_s(self.client.num_sampled_tokens)
        values |= self.client.metrics()
        line: dict[str, float | str] = {**values, "bottleneck": held_by or "none"}
        write = partial(write_metrics, self.run.orchestrator_metrics, step, line, time.time())
        await held_async(write, self.run.path)
        self.reporter.update(
            step=step,
            reward=values["reward/mean"],
            tokens_per_s=values["tokens_per_s"],
            async_level=int(values["async_level/max"]),
            bottleneck=held_by,
        )
        logger.info(
            "step %d: reward %.4f, async level %d, %.1f s, %.0f tokens/s",
            step,
            values["reward/mean"],
            values["async_level/max"],
            values["time/step"],
            values["tokens_per_s"],
        )
        return values
