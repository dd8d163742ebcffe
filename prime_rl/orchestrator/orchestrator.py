"""The orchestrator of one run: rollouts in, one batch file a step out. Reads top to bottom: parse, build, loop, end.

    python -m prime_rl.orchestrator.orchestrator @ OUTPUT_DIR/run_a/control/orch.toml [--a.b value]

`orchestrate` is the run's whole life: `set_up`, then its loops. Beside both a guard looks whether the run was evicted,
ended, deleted, paused or asked to stop, so no wait outlasts that. The final `state` in `control/status.json` is
finished, evicted, paused, failed or stopped; a crash leaves none, so the supervisor may start it again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from prime_rl.configs.admitted import changed_data_text, read_effect
from prime_rl.configs.base import ConfigError, ConfigProblem, build, merge, read_argv
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import make_folder
from prime_rl.contract.layout import LayoutError, OutputDir, RunDir, TooManySteps
from prime_rl.contract.notes import pending_request
from prime_rl.contract.status import RunStatus, StatusWriter, read_status
from prime_rl.contract.types import BadBatchError, max_batch_bytes, max_rollout_bytes
from prime_rl.orchestrator.batch import (
    BatchLoop,
    CheckpointError,
    Progress,
    SecondOrchestrator,
    find_progress,
    has_signal,
)
from prime_rl.orchestrator.client import AccessDenied, AdapterRefused
from prime_rl.orchestrator.envs import Environments, load_environments
from prime_rl.orchestrator.envs.agent_judge import Judge
from prime_rl.orchestrator.envs.checked import EnvironmentBroken
from prime_rl.orchestrator.evaluate import Evaluator
from prime_rl.orchestrator.guard import (
    MAX_LOOK_S,
    Ending,
    RunEnded,
    RunEvicted,
    RunFailed,
    RunGone,
    RunMeter,
    RunPaused,
    StopRequested,
    TrainerWatch,
    Wake,
    find_other,
    guard,
    run_beside,
    trainer_status,
    woken_by_signals,
)
from prime_rl.orchestrator.metrics import PhaseClock
from prime_rl.orchestrator.policy import ChatTokenizer, PolicyVersions, TokenizerError, TurnSampler
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.publication import (
    base_model,
    check_temperature,
    choose_publication,
    clear_inference,
    connect,
    warn_of_narrow_sampling,
)
from prime_rl.orchestrator.report import BatchReporter, LearningWatch, RunReporter, SampleKeeper, environment_figures
from prime_rl.orchestrator.rollout import BaseModel, Group, RolloutWorker, give_judges
from prime_rl.orchestrator.sampler import Curricula, ExampleSampler, Pools
from prime_rl.orchestrator.scheduler import GroupLedger, Scheduler
from prime_rl.orchestrator.sessions import Sessions, link_up
from prime_rl.orchestrator.teacher import Teachers, find_teachers
from prime_rl.orchestrator.texts import Texts
from prime_rl.utils.process import StopFlag, end_orphans, inherit_orphans
from prime_rl.utils.runtime import complain, setup_logger
from prime_rl.utils.secrets import SecretError, close_handed
from prime_rl.utils.watch import Watcher

logger = logging.getLogger("orchestrator")

MAX_REASON_CHARS = 10_000
# Errors that a restart of the orchestrator would not fix.
FINAL = (
    *(RunFailed, ConfigError, EnvironmentBroken, AccessDenied, AdapterRefused),
    *(TokenizerError, CheckpointError, BadBatchError, TooManySteps, SecretError),
)


async def orchestrate(
    config: OrchestratorConfig, run: RunDir, writer: StatusWriter, stop: Callable[[], bool], cleanup: AsyncExitStack
) -> None:
    """Make every batch of the run, then wait until its last update is published (and evaluated, if asked for)."""
    if any(map(os.path.lexists, (run.paused, run.preempted))):
        await clear_inference(config, run)
    wake = Wake()
    cleanup.enter_context(woken_by_signals(wake))
    reporter = RunReporter(writer)
    loop = await run_beside(set_up(config, run, writer, reporter, wake, cleanup), guard(run, stop, reporter.tick, wake))
    beside = [loop.evaluator.loop()] if loop.evaluator else []
    beside += [loop.teachers.follow(config.watch)] if loop.teachers else []
    await run_beside(
        loop.make_all(),
        loop.scheduler.watch_loop(),
        loop.scheduler.update_policy_loop(),
        *beside,
        guard(run, stop, loop.reporter.tick, wake),
    )


async def set_up(
    config: OrchestratorConfig,
    run: RunDir,
    writer: StatusWriter,
    reporter: RunReporter,
    wake: Wake,
    cleanup: AsyncExitStack,
) -> BatchLoop:
    """All that the run needs. What is waited for meanwhile goes to `reporter`, what must be ended to `cleanup`."""
    for folder in (run.rollouts, run.broadcast, run.checkpoints, run.metrics):
        make_folder(folder)  # not their parents: a deleted run is not made again
    await resume_done(run, config, reporter)
    trainer = TrainerWatch(OutputDir(run.path.parent).trainer_status)
    seq_len = config.seq_len or (await trainer_status(run, reporter.wait_for, "the trainer's seq_len")).max_seq_len
    tokenizer = ChatTokenizer.load(config.model.name, config.sampling.chat_template_kwargs)
    phases = PhaseClock(on_change=wake.set)
    changed = await asyncio.to_thread(changed_data_text, run)  # what is loaded now stays
    sessions = Sessions.of(run, tokenizer, seq_len) if config.needs_gateway else None
    envs, eval_envs = await load_environments(config, phases, cleanup, reporter.wait_for, run.data_file, sessions)
    max_bytes = max_batch_bytes(config.max_rollouts * config.max_branches, seq_len, config.num_soft)
    progress = find_progress(run, config.groups_per_batch, max_bytes=max_bytes)
    reporter.update(step=progress.step)

    if sessions:
        link_up(run, sessions, cleanup)
    texts = await asyncio.to_thread(Texts, config, run.data_file, tokenizer, seq_len) if config.data else None
    num_learned = partial(getattr, texts, "num_tokens", 0)
    client, policy, base = await serve(config, run, reporter, partial(note_trouble, phases, sessions), cleanup)
    checked = [*envs.values(), *eval_envs.values()]
    judges = give_judges(checked, BaseModel(client, base, tokenizer, seq_len), cleanup)
    teachers = await find_teachers(config, run, client, base, tokenizer, reporter.wait_for, cleanup)
    close_handed()
    num_taught = partial(getattr, teachers, "num_tokens", 0)
    meter = RunMeter(run, config, client, judges, num_learned, num_taught)
    ending = Ending(run, config, meter, step=progress.step)
    if not config.samples_rollouts:
        assert texts is not None, "its config has [[data]]"
        sampler, make_group = texts.sampler, texts.worker(policy)
    else:
        sampler = make_sampler(config, envs, progress)
        make_group = RolloutWorker(
            TurnSampler(
                client, policy, config.sampling, seq_len=seq_len - bool(teachers)
            ),  # to read needs a place more
            tokenizer,
            envs,
            sampler,
            rollouts_per_example=config.rollouts_per_example,
            seed=config.sampling_seed,
            max_rollout_bytes=max_rollout_bytes(config.max_rollouts, config.max_branches, seq_len, config.num_soft),
            num_soft=config.num_soft,
            teach=teachers.taught if teachers else None,
        ).group
    scheduler = make_scheduler(config, run, progress, make_group, client, policy, trainer, phases, cleanup)
    eval_turns = TurnSampler(client, policy, config.eval_sampling, seq_len=seq_len)
    evaluator = (
        Evaluator(config, run, eval_turns, tokenizer, policy, eval_envs, step=progress.step, on_figures=ending.feed)
        if config.eval
        else None
    )
    told = partial(environment_figures, checked, changed, texts.unusable if texts else None)
    cleanup.callback(lambda: writer.update(**told()))
    awaited: list[Sessions | Judge | Teachers] = [*judges, *(each for each in (sessions, teachers) if each)]
    status = make_reporter(writer, scheduler, policy, client, told, awaited, num_learned)
    batches = BatchReporter(run, scheduler, client, status, envs, sampler, LearningWatch(run), texts, teachers)
    samples = SampleKeeper(run, config.samples, tokenizer.decode)
    cleanup.callback(lambda: ending.note(scheduler.ledger.step - 1))
    return BatchLoop(
        *(config, run, client, scheduler, sampler, evaluator, batches, samples, status, ending, texts, teachers)
    )


async def serve(
    config: OrchestratorConfig,
    run: RunDir,
    reporter: RunReporter,
    on_trouble: Callable[[str | None], None],
    cleanup: AsyncExitStack,
) -> tuple[InferenceClient, PolicyVersions, str]:
    """Inference, once it is there, the run's versions in it, and the base model's name there.

    A run that samples nothing has no servers.
    """
    publication = await choose_publication(config, run, reporter.wait_for, cleanup)
    client = connect(config, run, publication, on_trouble)
    cleanup.push_async_callback(client.close)
    base = config.model.name
    if config.needs_inference:
        reporter.wait_for(lambda now: client.trouble)
        base = await base_model(client, config.model.name)
    if config.samples_rollouts:
        check_temperature(config.sampling, raw=client.reports_raw_logprobs)
        warn_of_narrow_sampling(config.sampling, raw=client.reports_raw_logprobs)
    policy = PolicyVersions(publication, client, base)
    cleanup.push_async_callback(policy.close)
    return client, policy, base


def note_trouble(phases: PhaseClock, sessions: Sessions | None, trouble: str | None) -> None:
    """Note what is wrong with inference, where time is accounted for and where agents wait for it."""
    phases.note_trouble(trouble)
    if sessions:
        sessions.note_trouble(trouble)


def make_sampler(config: OrchestratorConfig, envs: Environments, progress: Progress) -> ExampleSampler:
    """The example order, with what `progress` holds about the examples. Raises CheckpointError, EnvironmentBroken."""
    pools = Pools(envs, {env.label: env.reward_range for env in config.env})
    curricula = Curricula.of(config.env, envs)
    try:
        pools.restore(progress.pools)
        curricula.restore(progress.curricula)
    except ValueError as error:
        raise CheckpointError(f"the sampler state of step {progress.step}: {error}") from error
    weights = {env.label: env.weight for env in config.env}
    return ExampleSampler(envs, config.seed, weights, pools, config.settled_share, curricula, progress.next_index)


def make_scheduler(
    config: OrchestratorConfig,
    run: RunDir,
    progress: Progress,
    make_group: Callable[[int, Callable[[int], None]], Awaitable[Group]],
    client: InferenceClient,
    policy: PolicyVersions,
    trainer: TrainerWatch,
    phases: PhaseClock,
    cleanup: AsyncExitStack,
) -> Scheduler:
    """The scheduler of the groups that are still to be made; `cleanup` ends it, then what it watches with."""
    watcher = Watcher([run.broadcast], rescan_s=config.watch.rescan_s, kind=config.watch.kind)
    cleanup.callback(watcher.close)
    cleanup.callback(watcher.wake)  # a thread waits in it
    ledger = GroupLedger(
        step=progress.step + 1,
        next_index=progress.next_index,
        groups_per_batch=config.groups_per_batch,
        max_steps=config.max_steps,
        max_async_level=config.max_async_level,
        max_off_policy_steps=config.max_off_policy_steps,
        num_spare=math.ceil((config.oversampling_factor - 1) * config.groups_per_batch),
    )
    scheduler = Scheduler(
        run,
        ledger,
        make_group,
        client,
        policy,
        watcher,
        trainer,
        phases=phases,
        max_groups=max(1, config.client.max_concurrent_requests // config.rollouts_per_example),
        has_signal=lambda group: (
            not config.filter_zero_advantage or has_signal(group, config.advantage, config.teaching)
        ),
    )
    cleanup.push_async_callback(scheduler.close)
    return scheduler


def make_reporter(
    writer: StatusWriter,
    scheduler: Scheduler,
    policy: PolicyVersions,
    client: InferenceClient,
    told: Callable[[], dict[str, object]],
    awaited: Sequence[Sessions | Judge | Teachers],
    num_learned: Callable[[], int],
) -> RunReporter:
    """The status file while batches are made: what is waited for, by whom, how far it is, and what is `told`."""
    of_sessions = next((each for each in awaited if isinstance(each, Sessions)), None)

    def figures() -> dict[str, object]:
        return {
            "policy_version": max(0, policy.version),
            "num_in_flight": scheduler.ledger.num_in_flight,
            "progress": client.num_sampled_tokens + num_learned() + policy.version + scheduler.ledger.step,
            **told(),
            **(of_sessions.figures() if of_sessions else {}),
        }

    def waiting_on(now: float) -> str | None:
        return scheduler.waiting_on(now) or next(filter(None, (each.waits_for for each in awaited)), None)

    return RunReporter(writer, waiting_on, figures)


async def resume_done(run: RunDir, config: OrchestratorConfig, reporter: RunReporter) -> None:
    """Wait until the trainer has gone back to `ckpt.resume_step`, if the run asks for that."""
    while pending_request(run, config.ckpt.resume_step):
        reporter.wait_for(f"the trainer to go back to ckpt.resume_step = {config.ckpt.resume_step}")
        await asyncio.sleep(MAX_LOOK_S)
    reporter.wait_for(None)


async def run_to_the_end(config: OrchestratorConfig, run: RunDir, stop: Callable[[], bool]) -> int:
    """`orchestrate` under guard, and its last word in the status file. Returns the exit code."""
    before = read_status(run.status, RunStatus)
    status = RunStatus(run_id=run.run_id, max_steps=config.max_steps)
    if before:  # these hold until the next batch, of which there may be none
        status.signs, status.reward = before.signs, before.reward
    writer = StatusWriter(run.status, status)
    final_status: dict[str, object] = {}
    second: SecondOrchestrator | None = None
    try:
        async with AsyncExitStack() as cleanup:
            await orchestrate(config, run, writer, stop, cleanup)
        final_status = {"state": "finished"}
        logger.info("finished: %d steps", config.max_steps)
    except StopRequested:
        final_status = {"state": "stopped"}
        logger.info("stopped")
    except RunEnded as error:
        final_status = {"state": "finished", "reason": str(error)}
        logger.info("finished: %s", error)
    except RunEvicted as error:
        final_status = {"state": "evicted", "reason": str(error)}
    except RunPaused as error:
        final_status = {"state": "paused"}
        logger.info("paused: %s", error)
    except FINAL as error:
        final_status = {"state": "failed", "reason": str(error)}
    except RunGone as error:
        logger.info("%s: nothing left to do", error)
    except SecondOrchestrator as error:
        second = error
    except Exception as error:
        if not run.path.is_dir():  # whatever failed, failed because of that
            logger.info("%s is gone: nothing left to do", run.path)
        else:
            final_status = {"reason": f"{type(error).__name__}: {error}"}
            logger.exception("crashed")
    finally:
        if "reason" in final_status:  # whatever code of the environment says
            final_status["reason"] = str(final_status["reason"])[:MAX_REASON_CHARS]
        if second is None:
            writer.close(waiting_on=None, num_in_flight=0, problem=None, **final_status)
        else:
            writer.abandon()  # the status file is the other one's
    if second is not None:
        complain("orchestrator", second)
        return 1
    if "reason" in final_status and final_status.get("state") != "finished":
        complain(f"{run.run_id} {writer.status.state}", final_status["reason"])
        return 1
    return 0


def find_run(argv: Sequence[str]) -> RunDir:
    """The run whose `control/orch.toml` the command line names. Raises ConfigError or LayoutError."""
    for token, after in itertools.pairwise([*argv, ""]):
        name = after if token == "@" else token[1:] if token.startswith("@") else ""
        if name:
            run_path = Path(name).absolute().parent.parent
            return OutputDir(run_path.parent).run(run_path.name)
    raise ConfigError("command line", [ConfigProblem("", "write @ OUTPUT_DIR/run_<id>/control/orch.toml")])


def read_config(run: RunDir, argv: Sequence[str]) -> OrchestratorConfig:
    """The run's config in effect, with the overrides of the command line. Raises ConfigError."""
    rest = list(argv)
    at = next(number for number, token in enumerate(rest) if token.startswith("@"))
    del rest[at : at + (2 if rest[at] == "@" else 1)]
    return build(OrchestratorConfig, merge(read_effect(run).data, read_argv(rest)[0]), str(run.orch_toml))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 finished, stopped or paused, 1 failed or evicted, 2 wrong config."""
    stop = StopFlag().install()
    argv = sys.argv[1:] if argv is None else argv
    try:
        run = find_run(argv)
        config = read_config(run, argv)
    except (ConfigError, LayoutError) as error:
        complain("orchestrator", error)
        return 2
    setup_logger("orchestrator", config.log.level)
    if other := find_other(run, stop):
        complain("orchestrator", f"{run.run_id} has one already ({other}): stop that first")
        return 1
    inherit_orphans()
    try:
        return asyncio.run(run_to_the_end(config, run, stop))
    finally:
        if left := end_orphans():
            logger.error("cannot end processes %s of its environments", left)


if __name__ == "__main__":
    sys.exit(main())
