"""One `prl eval`: the base model and adapters, one after the other, each on the same examples with the same seeds.

    python -m prime_rl.orchestrator.eval_job WORKSPACE/evaluations/NAME

`contract.samples` has what is read, kept and printed. An adapter is in the slot that inference keeps for people; one
whose slot a chat has taken waits a moment, and is loaded again. SIGINT ends it: the figures are then of what is
done. Evaluations during training are in `evaluate`. Exit codes: 0 done, 1 failed, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.jsonl import place_of
from prime_rl.configs.orchestrator import EvalConfig, OrchestratorConfig
from prime_rl.contract.files import append_line, read_file
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.samples import JOB_FILE, SAMPLES_FILE, EvalJob, EvalProgress, EvalResult, EvalSample
from prime_rl.contract.served import BASE_WEIGHTS, CHAT_PREFIX, is_chat
from prime_rl.contract.status import TrainerStatus, read_status
from prime_rl.orchestrator.client import InferenceError, RequestRefused, ServedModel, ServerClient, UnknownModel
from prime_rl.orchestrator.envs import Environments, load_environments
from prime_rl.orchestrator.envs.base import Example
from prime_rl.orchestrator.envs.checked import CheckedEnvironment, EnvironmentBroken
from prime_rl.orchestrator.evaluate import eval_rollout
from prime_rl.orchestrator.guard import RunFailed
from prime_rl.orchestrator.metrics import eval_metrics, mean, pass_at, standard_error
from prime_rl.orchestrator.policy import ChatTokenizer, PolicyVersions, TokenizerError, TurnSampler
from prime_rl.orchestrator.publication import AdapterPublication, base_model, connect
from prime_rl.orchestrator.recorder import Rollout
from prime_rl.orchestrator.rollout import BaseModel, give_judges, together
from prime_rl.orchestrator.sampler import Pick
from prime_rl.orchestrator.sessions import sessions_here
from prime_rl.utils.process import end_orphans, inherit_orphans
from prime_rl.utils.runtime import complain, setup_logger
from prime_rl.utils.text import one_line

MAX_JOB_BYTES = 16_000_000
# A prompt that is too long for the server is refused by it.
NO_LIMIT = 2**31 - 1
# Version 0 of a target is the target.
VERSION = 0
# Errors that no other rollout of the target would be spared.
FATAL = (InferenceError, EnvironmentBroken, TokenizerError, RunFailed)
# Long enough for an answer of a chat.
TURN_S = 10.0
# Names no run.
CLIENT = "eval"
# Of the sessions of its rollouts.
RUN_ID = "run_eval"

ResultT = TypeVar("ResultT")


class LentAdapter(AdapterPublication):
    """The adapter that is evaluated, copied to `folder`; None: the base model."""

    def __init__(self, output: OutputDir, folder: Path | None) -> None:
        super().__init__(RunDir(output.path / CLIENT), from_adapter=folder is not None)
        self._folder = folder
        self._was_loaded = False
        self._lent = f"{CHAT_PREFIX}{folder.relative_to(output.evaluations)}" if folder else BASE_WEIGHTS

    def answered_by(self, asked: int, weights: str | None, *, exactly: bool) -> int:
        """The version that was asked. Raises InferenceError for an answer of other weights than the base model's."""
        if weights not in (None, BASE_WEIGHTS):
            raise InferenceError(f"inference serves {weights} now, not the base model")
        return asked

    def _name(self, version: int) -> str:
        return self._lent

    def _own(self, models: Iterable[ServedModel]) -> set[int]:
        return {VERSION for model in models if model.id == self._lent}

    async def _load(self, server: ServerClient, version: int) -> None:
        """Load it in the place of what a person has there; of one who has taken it from this, after a while."""
        assert self._folder is not None
        others = [model.id for model in await server.list_models() if is_chat(model.id)]
        if others and self._was_loaded:
            await asyncio.sleep(TURN_S)
        for name in others:
            with contextlib.suppress(UnknownModel):  # it was unloaded meanwhile
                await server.unload_adapter(name)
        self._was_loaded = True
        await server.load_adapter(self._lent, self._folder)


@dataclass
class Tally:
    """The rollouts of one target in one environment, by example; what is not needed for figures is left out."""

    examples: list[list[Rollout]]
    num_failed: int = 0
    problem: str | None = None

    def result(self, target: str, env_name: str, k: int, pass_reward: float) -> EvalResult:
        """The figures: those of an evaluation in training, and pass@k over the examples with `k` rollouts."""
        tried = [rollouts for rollouts in self.examples if rollouts]
        figures: dict[str, float] = {}
        if tried:
            prefix = f"eval/{env_name}/"
            figures = {n.removeprefix(prefix): v for n, v in eval_metrics(env_name, tried, pass_reward).items()}
        if whole := [rollouts for rollouts in tried if len(rollouts) >= k]:
            chances = [pass_at(k, len(each), sum(r.reward >= pass_reward for r in each)) for each in whole]
            figures |= {f"pass@{k}": mean(chances), f"pass@{k}_se": standard_error(chances)}
        num_rollouts = sum(map(len, tried))
        return EvalResult(target, env_name, len(tried), num_rollouts, self.num_failed, figures, self.problem)


@dataclass
class Evaluation:
    """One process's work. `stopped` is set by a signal."""

    folder: Path
    config: OrchestratorConfig
    tokenizer: ChatTokenizer
    envs: Environments
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def _own(self) -> EvalConfig:
        return self.config.eval or EvalConfig()

    async def target(self, label: str, folder: str | None) -> bool:
        """Evaluate a target of `EvalJob` in all environments, and print the results; false when that failed."""
        k, done = self._own.rollouts_per_example, 0
        total = sum(len(self._examples(env)) for env in self.envs.values()) * k
        try:
            async with AsyncExitStack() as cleanup:
                turns = await unless_stopped(self.stopped, self._connect(label, folder, total, cleanup))
                if turns is None:
                    return False
                for env_name, env in self.envs.items():
                    tally = await self._env(label, env_name, env, turns, done, total)
                    done += len(tally.examples) * k
                    say(tally.result(label, env_name, k, self.config.pass_rewards[env_name]))
        except FATAL as error:
            say(EvalResult(label, "", problem=one_line(str(error), 500)))
            return False
        return True

    async def _connect(self, label: str, folder: str | None, total: int, cleanup: AsyncExitStack) -> TurnSampler:
        output = OutputDir(self.folder.parents[1])
        waits = partial(EvalProgress, label, 0, total)
        say(waits())
        publication = LentAdapter(output, output.evaluations / folder if folder else None)
        client = connect(self.config, RunDir(output.path / CLIENT), publication, lambda trouble: say(waits(trouble)))
        cleanup.push_async_callback(client.close)
        base = await base_model(client, self.config.model.name)
        policy = PolicyVersions(publication, client, base)
        cleanup.push_async_callback(policy.close)
        if folder:
            await policy.switch_to(VERSION)
        trainer = read_status(output.trainer_status, TrainerStatus)
        seq_len = self.config.seq_len or (trainer.max_seq_len if trainer else None) or NO_LIMIT
        give_judges(self.envs.values(), BaseModel(client, base, self.tokenizer, seq_len), cleanup)
        return TurnSampler(client, policy, self.config.eval_sampling, seq_len=seq_len)

    def _examples(self, env: CheckedEnvironment) -> Sequence[Example]:
        return env.examples("eval")[: self._own.num_examples]

    async def _env(
        self, label: str, env_name: str, env: CheckedEnvironment, turns: TurnSampler, before: int, total: int
    ) -> Tally:
        examples = self._examples(env)
        tally, tries = Tally([[] for _ in examples]), range(self._own.rollouts_per_example)
        places, done = asyncio.Semaphore(self.config.client.max_concurrent_requests), before

        async def one(index: int, number: int) -> None:
            nonlocal done
            pick = Pick(env_name, examples[index])
            async with places:
                try:
                    rollout = await eval_rollout(
                        turns, self.tokenizer, env, pick, number, seed=self.config.seed, version=VERSION
                    )
                except Exception as error:  # whatever an environment raises is its own affair
                    if isinstance(error, FATAL) and not isinstance(error, RequestRefused):
                        raise
                    tally.num_failed += 1
                    tally.problem = tally.problem or one_line(f"{pick.example.id}: {error}", 500)
                else:
                    self._keep(label, pick, number, rollout)
                    tally.examples[index].append(replace(rollout, branches=[]))
            done += 1
            say(EvalProgress(label, done, total))

        await unless_stopped(
            self.stopped, together(one(index, number) for index in range(len(examples)) for number in tries)
        )
        return tally

    def _keep(self, label: str, pick: Pick, number: int, rollout: Rollout) -> None:
        last = rollout.branches[-1]  # of several the one that ended it
        sample = EvalSample(
            target=label,
            env=pick.env_name,
            example_id=pick.example.id,
            number=number,
            reward=rollout.reward,
            prompt=self.tokenizer.decode(last.token_ids_T[: last.num_prompt_tokens]),
            completion=self.tokenizer.decode(last.token_ids_T[last.num_prompt_tokens :]),
            num_completion_tokens=rollout.num_completion_tokens,
            truncated=rollout.truncated,
            metrics=rollout.metrics,
        )
        append_line(self.folder / SAMPLES_FILE, msgspec.json.encode(sample).decode())


async def unless_stopped(stopped: asyncio.Event, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """The result of `work`; None when a stop ended it."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await task
        return None
    finally:
        stopping.cancel()


def say(event: EvalProgress | EvalResult) -> None:
    """Print one line for the process that started this one."""
    print(msgspec.json.encode(event).decode(), flush=True)


async def evaluate_all(folder: Path, job: EvalJob, config: OrchestratorConfig) -> int:
    """Evaluate every target of `job`. Returns the exit code."""
    stopped, all_done = asyncio.Event(), True
    is_below_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for name in (signal.SIGINT, signal.SIGTERM, *[signal.SIGHUP] * (not is_below_nohup)):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # who started this had blocked it
    async with AsyncExitStack() as cleanup:
        tokenizer = ChatTokenizer.load(config.model.name, config.sampling.chat_template_kwargs)
        sessions = await sessions_here(config, RUN_ID, tokenizer, config.seq_len, cleanup)
        loading = load_environments(config, None, cleanup, lambda what: None, place_of(Path(job.source)), sessions)
        loaded = await unless_stopped(stopped, loading)
        evaluation = Evaluation(folder, config, tokenizer, loaded[1] if loaded else {}, stopped)
        for label, adapter in job.targets.items():
            if not stopped.is_set():
                all_done &= await evaluation.target(label, adapter)
    return 130 if stopped.is_set() else int(not all_done)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate the job in the folder on the command line. Returns the exit code."""
    (name,) = sys.argv[1:] if argv is None else argv
    folder = Path(name).absolute()
    setup_logger("eval", "error")
    job = msgspec.json.decode(read_file(folder / JOB_FILE, limit=MAX_JOB_BYTES), type=EvalJob)
    inherit_orphans()
    try:
        config = build(OrchestratorConfig, job.config, str(folder / JOB_FILE))
        return asyncio.run(evaluate_all(folder, job, config))
    except (ConfigError, *FATAL) as error:
        complain("eval", error)
        return 1
    finally:
        end_orphans()


if __name__ == "__main__":
    sys.exit(main())
