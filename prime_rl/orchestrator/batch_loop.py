"""From groups to batch files, step after step, until the run's last update is published (and evaluated).

What is awaited here is the scheduler's: groups, and the last policy version. What it hands over is a file a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import RunDir
from prime_rl.orchestrator.batch import assemble_batch, publish_batch
from prime_rl.orchestrator.checkpoint import checkpoint_is_due, save_state
from prime_rl.orchestrator.evaluate import Evaluator
from prime_rl.orchestrator.guard import check_run
from prime_rl.orchestrator.logprobs import check_temperature
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.report import BatchReporter, Reporter
from prime_rl.orchestrator.sampler import ExampleSampler
from prime_rl.orchestrator.samples import SampleKeeper
from prime_rl.orchestrator.scheduler import Scheduler


@dataclass(frozen=True)
class BatchLoop:
    """Every batch of one run. `evaluator` is null for a run that is not evaluated."""

    config: OrchestratorConfig
    run: RunDir
    client: InferenceClient
    scheduler: Scheduler
    sampler: ExampleSampler
    evaluator: Evaluator | None
    batches: BatchReporter
    samples: SampleKeeper
    reporter: Reporter

    async def make_all(self) -> None:
        """Make the batches of all steps that are left, then wait for what the last one leads to."""
        await self.scheduler.start()
        self.reporter.update(state="running")
        while self.scheduler.ledger.step <= self.config.max_steps:
            check_run(self.run)
            await self._make_one(self.scheduler.ledger.step)
        last = self.config.max_steps
        await self.scheduler.wait_for_version(last, serve=self.evaluator is not None)
        if self.evaluator is not None:
            self.reporter.wait_for(lambda now: self.client.trouble or f"the evaluation of policy version {last}")
            await self.evaluator.done.wait()

    async def _make_one(self, step: int) -> None:
        groups = await self.scheduler.next_groups()
        check_temperature(self.config.sampling, raw=self.client.reports_raw_logprobs)  # a restarted server may differ
        self.sampler.end_batch(groups[-1].index)
        temperature = self.config.sampling.temperature
        batch = assemble_batch(
            self.run.run_id,
            step,
            groups,
            advantage=self.config.advantage,
            temperature=temperature,
            sampler=self.sampler,
        )
        if checkpoint_is_due(step, self.config.ckpt, self.config.max_steps):
            save_state(self.run, batch)
        publish_batch(self.run, batch)
        self.batches.report(step, groups)
        self.samples.keep(groups, batch)
