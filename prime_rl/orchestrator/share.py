"""Makes one node's share of an iteration: the requested groups, with one policy version, into its rank file.

    python -m prime_rl.orchestrator.share make REQUEST.json      groups -> rank file, each as soon as it is finished
    python -m prime_rl.orchestrator.share join REQUEST.json      rank files -> batch files, or the mean of an evaluation

A task is a number: the index of a group in the run's example order, or of an example of the evaluation. Example, seeds
and sampling follow from it, from the run's config, and from what earlier batches recorded about the examples (the
request's `sampler_state`), so a result does not depend on which node made it. What the groups of an iteration add to
that counts from the next one on. `prime_rl.multinode` divides the tasks.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.configs.admitted import config_in_effect
from prime_rl.configs.orchestrator import EvalConfig, OrchestratorConfig
from prime_rl.contract.files import make_folder, read_file, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.types import (
    JoinRequest,
    JoinResult,
    MakeRequest,
    RankEntry,
    RankFileWriter,
    max_rollout_bytes,
    read_rank_file,
)
from prime_rl.orchestrator.batch import (
    SecondOrchestrator,
    assemble_batch,
    checkpoint_is_due,
    progress_of,
    publish_batch,
    save_state,
)
from prime_rl.orchestrator.envs import Environments, load_environments
from prime_rl.orchestrator.envs.checked import EnvironmentFault, ExampleUnusable
from prime_rl.orchestrator.evaluate import eval_rollout
from prime_rl.orchestrator.guard import RunFailed
from prime_rl.orchestrator.metrics import eval_metrics, mean, reward_metrics, write_metrics
from prime_rl.orchestrator.orchestrator import FINAL, make_sampler
from prime_rl.orchestrator.policy import ChatTokenizer, PolicyVersions, TurnSampler
from prime_rl.orchestrator.publication import AdapterPublication, base_model, check_temperature, connect
from prime_rl.orchestrator.recorder import Rollout
from prime_rl.orchestrator.rollout import BaseModel, Group, GroupFailed, RolloutWorker, give_judges, together
from prime_rl.orchestrator.sampler import ExampleSampler, Pick
from prime_rl.orchestrator.sessions import sessions_here
from prime_rl.utils.runtime import complain, setup_logger

logger = logging.getLogger("share")

# An environment may fail on a task now and then; a task that fails this often will not succeed.
MAX_ATTEMPTS = 3
# A request names every task of an iteration and its file: a million of them.
MAX_REQUEST_BYTES = 256 << 20
MakeTask = Callable[[int], Awaitable[Group]]


async def make(request: MakeRequest, run: RunDir, config: OrchestratorConfig) -> None:
    """Make the tasks that are not in the rank file yet. Raises GroupFailed when one cannot be made."""
    path = Path(request.rank_file)
    done = {entry.task for entry in read_rank_file(path)}
    tasks = [task for task in request.tasks if task not in done]
    if not tasks:
        return
    writer = RankFileWriter(path)
    async with AsyncExitStack() as cleanup:
        cleanup.callback(writer.close)
        make_task = await set_up(request, run, config, cleanup)
        places = asyncio.Semaphore(max(1, config.client.max_concurrent_requests // config.rollouts_per_example))

        async def one(task: str) -> None:
            async with places:
                group = await attempt(make_task, task)
            writer.append(RankEntry(task, msgspec.msgpack.encode(_without_messages(group))))
            if group.rollouts_G:
                logger.info("task %s: reward %.3f", task, mean([rollout.reward for rollout in group.rollouts_G]))

        await together(one(task) for task in tasks)


def _without_messages(group: Group) -> Group:
    """The group as it is joined: what was said is in its tokens."""

    def plain(rollout: Rollout) -> Rollout:
        return replace(rollout, branches=[replace(each, turns=(), tools=()) for each in rollout.branches])

    return replace(group, rollouts_G=[plain(each) for each in group.rollouts_G])


async def set_up(request: MakeRequest, run: RunDir, config: OrchestratorConfig, cleanup: AsyncExitStack) -> MakeTask:
    """Make the parts that make one task, with the requested version and nothing newer."""
    tokenizer = ChatTokenizer.load(config.model.name, config.sampling.chat_template_kwargs)
    sessions = await sessions_here(config, run.run_id, tokenizer, request.seq_len, cleanup)
    envs, eval_envs = await load_environments(config, None, cleanup, lambda words: None, run.data_file, sessions)
    adapters = AdapterPublication(run)
    config = config.replace(client={**config.client.model_dump(), "base_url": request.base_url})
    client = connect(config, run, adapters)
    cleanup.push_async_callback(client.close)
    base = await base_model(client, config.model.name)
    judge = BaseModel(client, base, tokenizer, request.seq_len)
    give_judges([*envs.values(), *eval_envs.values()], judge, cleanup)
    if request.split == "train":
        check_temperature(config.sampling, raw=client.reports_raw_logprobs)
    policy = PolicyVersions(adapters, client, base)
    cleanup.push_async_callback(policy.close)
    await policy.begin()
    if request.policy_version:
        await policy.switch_to(request.policy_version)
    sampling = config.sampling if request.split == "train" else config.eval_sampling
    turns = TurnSampler(client, policy, sampling, seq_len=request.seq_len)
    if request.split == "eval":
        return partial(make_eval, config, turns, tokenizer, eval_envs, request.policy_version)
    worker = RolloutWorker(
        turns,
        tokenizer,
        envs,
        make_sampler(config, envs, progress_of(request.policy_version, {"next_index": 0, **request.sampler_state})),
        rollouts_per_example=config.rollouts_per_example,
        seed=config.sampling_seed,
        is_noted=False,
        max_rollout_bytes=max_rollout_bytes(config.max_rollouts, config.max_branches, request.seq_len),
    )
    return worker.group


async def make_eval(
    config: OrchestratorConfig,
    turns: TurnSampler,
    tokenizer: ChatTokenizer,
    envs: Environments,
    version: int,
    index: int,
) -> Group:
    """All rollouts of one example; none when the environment has fewer examples. Same seeds at every version.

    The examples of all environments are numbered: `num_examples` an environment, also where it has fewer.
    """
    settings = config.eval or EvalConfig()
    place, number = divmod(index, settings.num_examples)
    env_name = list(envs)[place]
    examples = envs[env_name].examples("eval")
    if number >= len(examples):
        return Group(index, env_name, f"{env_name}/none", [])
    pick = Pick(env_name, examples[number])
    rollouts = await together(
        eval_rollout(turns, tokenizer, envs[env_name], pick, each, seed=config.seed, version=version)
        for each in range(settings.rollouts_per_example)
    )
    return Group(index, env_name, f"{env_name}/{pick.example.id}", rollouts)


async def attempt(make_task: MakeTask, task: str) -> Group:
    """One task, tried again when its environment fails; an empty group where its example is unusable.

    Raises what it failed with last.
    """
    for number in range(1, MAX_ATTEMPTS + 1):
        try:
            return await make_task(int(task))
        except ExampleUnusable as error:
            logger.warning("task %s is left out, its example is unusable: %s", task, error)
            return Group(int(task), "", "", [])
        except (GroupFailed, EnvironmentFault) as error:
            if number == MAX_ATTEMPTS:
                raise
            logger.warning("task %s, attempt %d of %d: %s", task, number, MAX_ATTEMPTS, error)
    raise AssertionError("unreachable")


async def join(request: JoinRequest, run: RunDir, config: OrchestratorConfig) -> JoinResult:
    """Put the results together in the order of the tasks. Raises KeyError for a task that is not where it should be."""
    groups = read_groups(request.sources)
    num_rollouts = sum(len(group.rollouts_G) for group in groups)
    state: dict[str, Any] = {}
    if request.split == "eval":
        rewards = _join_eval(request, run, config, groups)
    else:
        sampler = await _sampler_of(request, run, config, next_index=groups[-1].index + 1)
        rewards, state = _join_train(request, run, config, groups, sampler)
    return JoinResult(rewards=rewards, num_rollouts=num_rollouts, steps=request.steps, sampler_state=state)


async def _sampler_of(
    request: JoinRequest, run: RunDir, config: OrchestratorConfig, next_index: int
) -> ExampleSampler | None:
    """As it was when the groups were drawn, all before `next_index`.

    None where no draw depends on earlier rewards: then an update needs no environment.
    """
    if config.settled_share == 1.0 and not any(env.curriculum for env in config.env):
        return None
    progress = progress_of(request.steps[0] - 1, {**request.sampler_state, "next_index": next_index})
    async with AsyncExitStack() as cleanup:
        envs, _ = await load_environments(config, None, cleanup, lambda words: None, run.data_file)
        return make_sampler(config, envs, progress)


def decode_group(data: bytes) -> Group:
    """A group as `make` encodes it. In one of a program before branches each rollout has the fields of its branch."""
    fields = msgspec.msgpack.decode(data)
    for rollout in fields["rollouts_G"]:
        rollout.setdefault("branches", [rollout.copy()])
    return msgspec.convert(fields, Group)


def read_groups(sources: Mapping[str, str]) -> list[Group]:
    """The groups of all tasks, each from its own file, ascending by task."""
    found = {}
    for name in sorted(set(sources.values())):
        for entry in read_rank_file(Path(name)):
            if sources.get(entry.task) == name:
                found[int(entry.task)] = decode_group(entry.result)
    return [found[int(task)] for task in sorted(sources, key=int)]


def _join_train(
    request: JoinRequest,
    run: RunDir,
    config: OrchestratorConfig,
    groups: Sequence[Group],
    sampler: ExampleSampler | None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """The mean reward of each step, and the sampler state after the last."""
    size = len(groups) // len(request.steps)
    rewards, state = {}, {}
    for number, step in enumerate(request.steps):
        part = groups[number * size : (number + 1) * size]
        rollouts = [rollout for group in part for rollout in group.rollouts_G]
        if not rollouts:
            raise GroupFailed(f"step {step}: all its {size} examples are unusable; logs of the nodes have the reasons")
        rewards[str(step)] = mean([rollout.reward for rollout in rollouts])
        figures = _note(part, sampler) if sampler else {}
        batch = assemble_batch(
            run.run_id,
            step,
            part,
            advantage=config.advantage,
            temperature=config.sampling.temperature,
            sampler=sampler,
        )
        state = batch.sampler_state
        if run.rollout_file(step).exists():  # joined before, of the same groups
            continue
        if checkpoint_is_due(step, config.ckpt, config.max_steps):
            save_state(run, batch)
        make_folder(run.rollouts)
        publish_batch(run, batch)
        figures |= {"reward/mean": rewards[str(step)], **reward_metrics(rollouts)}
        figures["examples_unusable"] = sum(not group.rollouts_G for group in part)
        write_metrics(run.orchestrator_metrics, step, figures, time.time())
    return rewards, state


def _note(groups: Sequence[Group], sampler: ExampleSampler) -> dict[str, float]:
    """Note what the groups of one batch make known of the examples, in their order; returns it as metrics."""
    for group in filter(attrgetter("rollouts_G"), groups):
        example_id = group.example_id.removeprefix(f"{group.env_name}/")
        sampler.note(group.index, group.env_name, example_id, [rollout.reward for rollout in group.rollouts_G])
    sampler.end_batch(groups[-1].index)
    return sampler.figures()


def _join_eval(
    request: JoinRequest, run: RunDir, config: OrchestratorConfig, groups: Sequence[Group]
) -> dict[str, float]:
    by_env: dict[str, list[list[Rollout]]] = {}
    for group in groups:
        if group.rollouts_G:
            by_env.setdefault(group.env_name, []).append(group.rollouts_G)
    values: dict[str, float] = {}
    for name, examples in sorted(by_env.items()):
        values |= eval_metrics(name, examples, config.pass_rewards[name])
    write_metrics(run.orchestrator_metrics, request.steps[0], values, time.time())
    return {name: values[f"eval/{name}/reward"] for name in sorted(by_env)}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed. `argv` is ["make" or "join", path]; None takes that of the process."""
    what, path = sys.argv[1:] if argv is None else argv
    data = read_file(Path(path), limit=MAX_REQUEST_BYTES)
    try:
        if what == "make":
            request = msgspec.json.decode(data, type=MakeRequest)
            asyncio.run(make(request, *_load(request.run)))
        else:
            wanted = msgspec.json.decode(data, type=JoinRequest)
            write_atomic(Path(wanted.result), msgspec.json.encode(asyncio.run(join(wanted, *_load(wanted.run)))))
    except (*FINAL, SecondOrchestrator, GroupFailed, EnvironmentFault, OSError) as error:
        complain("share", error)
        return 1
    return 0


def _load(path: str) -> tuple[RunDir, OrchestratorConfig]:
    run = OutputDir(Path(path).parent).run(Path(path).name)
    config = config_in_effect(run)
    setup_logger("share", config.log.level)
    if config.data:
        raise RunFailed("data: a group of nodes learns from rollouts alone: remove [[data]]")
    return run, config


if __name__ == "__main__":
    sys.exit(main())
