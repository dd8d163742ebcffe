"""Faults of environment code: what is dropped, what replaces it, and when a run gives up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.envs import EnvConfig
from prime_rl.orchestrator.client import AccessDenied
from prime_rl.orchestrator.envs import load_environments
from prime_rl.orchestrator.envs.base import Environment, Example, Outcome, Policy, PolicyError, RolloutError
from prime_rl.orchestrator.envs.checked import (
    FAILURE_WINDOW,
    MAX_TIME_LIMITS,
    MIN_EXAMPLES,
    MIN_ROLLOUTS,
    CheckedEnvironment,
    EnvironmentBroken,
    EnvironmentFault,
    ExampleUnusable,
    Interrupted,
    TimedOut,
    Transient,
)
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.report import environment_figures
from prime_rl.orchestrator.rollout import MAX_REPLACEMENTS, GroupFailed, RolloutWorker
from tests.orchestrator_support import (
    FakeInference,
    TalkEnv,
    make_client,
    make_model,
    make_policy,
    make_run,
    make_worker,
    run_config,
    serving,
    until,
)
from tests.patience import PATIENCE_S

EXAMPLE = Example("e", [{"role": "user", "content": "q"}], "")


class Says:
    """A policy that answers after `delay_s`, or raises."""

    def __init__(self, delay_s: float = 0.0, error: Exception | None = None) -> None:
        self.answer_lens: list[int] = []
        self._delay_s = delay_s
        self._error = error

    async def complete(self, messages: Any) -> str:
        await asyncio.sleep(self._delay_s)
        if self._error is not None:
            raise self._error
        self.answer_lens.append(3)
        return "hello"


class Does(TalkEnv):
    """An environment whose rollout is a function."""

    def __init__(self, does: Callable[[Policy], Awaitable[Any]]) -> None:
        super().__init__(num_examples=4)
        self._does = does

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        outcome: Outcome = await self._does(policy)
        return outcome


def checked(
    env: Environment, share: float = 1.0, num_tries: int = 4, num_examples: int | None = None, **config: Any
) -> CheckedEnvironment:
    given = EnvConfig.model_validate({"id": "plugin:talk", **config})
    return CheckedEnvironment(env, given, max_failure_share=share, num_tries=num_tries, num_examples=num_examples)


async def test_a_client_outside_costs_no_example_and_does_not_end_the_run() -> None:
    fates = itertools.cycle((EnvironmentFault("no call was answered"), Outcome(2.0), Outcome(0.5)))

    async def does(policy: Policy) -> Any:
        if isinstance(fate := next(fates), EnvironmentFault):
            raise fate
        return fate

    env = checked(Does(does), share=0.0, num_tries=1, num_examples=4, id="sessions", reward_range=(0.0, 1.0))
    env._reward_names = ["form"]
    for number in range(3 * FAILURE_WINDOW):
        with pytest.raises(Interrupted):
            await env.rollout(example(number % 4), Says())
    assert env.num_dropped == 0 and not env.unusable and env.problem() is None


def example(number: int) -> Example:
    return Example(f"e{number}", [{"role": "user", "content": "q"}], "")


async def returns(outcome: Any, **config: Any) -> Outcome:
    async def does(policy: Policy) -> Any:
        return outcome

    return await checked(Does(does), **config).rollout(EXAMPLE, Says())


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome(float("nan")), "the reward is nan"),
        (Outcome(float("inf")), "the reward is inf"),
        (Outcome(1.5), r"the reward is 1.5, not within reward_range = \[0, 1\]"),
        (Outcome(-0.1), "not within reward_range"),
        (Outcome("1"), "the reward is str instead of a number"),  # type: ignore[arg-type]
        (Outcome(None), "the reward is NoneType"),  # type: ignore[arg-type]
        (0.5, "returned float instead of an Outcome"),
        (None, "returned NoneType"),
        (Outcome(0.5, {"a": float("nan")}), "a is nan"),
        (Outcome(0.5, {"a": "b"}), "a is str"),  # type: ignore[dict-item]
        (Outcome(0.5, {"\x1b[2J": 1.0}), "is not a valid name of a metric"),
        (Outcome(0.5, [1.0]), "the metrics are list"),  # type: ignore[arg-type]
        (Outcome(0.5, rewards={"form": float("nan")}), "form is nan"),
        (Outcome(0.5, rewards={"a\nb": 1.0}), r"'a\\nb' is not a valid name of a reward"),
        (Outcome(0.5, rewards={"form": -1e31}), r"the reward form is -1e\+31, at most 1e\+30 is allowed"),
        (Outcome(0.5, rewards=[1.0]), "the rewards are list"),  # type: ignore[arg-type]
        (Outcome(0.5, rewards={f"r{n}": 1.0 for n in range(17)}), "there are 17 rewards, at most 16 are allowed"),
    ],
)
async def test_what_is_no_outcome_is_dropped(outcome: Any, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        await returns(outcome)


async def gives(advantages: Any, num_turns: int = 2) -> Outcome:
    """After so many turns, each an answer of three tokens."""

    async def does(policy: Policy) -> Outcome:
        for _ in range(num_turns):
            await policy.complete([])
        assert list(policy.answer_lens) == [3] * num_turns
        return Outcome(0.5, advantages=advantages)

    return await checked(Does(does)).rollout(EXAMPLE, Says())


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ([1.0], "there are advantages of 1 turns, but the policy took 2"),
        ([1.0, 2.0, 3.0], "there are advantages of 3 turns, but the policy took 2"),
        ([1.0, [1.0] * 4], "the advantage of turn 2 has length 4, but its answer has 3 tokens"),
        ([[], 1.0], "the advantage of turn 1 has length 0, but its answer has 3 tokens"),
        ([1.0, [0.0, float("nan"), 0.0]], "the advantage of turn 2 is not finite in float32"),
        ([float("-inf"), 1.0], "the advantage of turn 1 is not finite in float32"),
        ([1e300, 1.0], "the advantage of turn 1 is not finite in float32"),
        ([10**400, 1.0], "the advantage of turn 1 is neither a number nor a number for each token"),
        (["one", 1.0], "the advantage of turn 1 is neither a number"),
        ([[1.0, None, 1.0], 1.0], "the advantage of turn 1 is neither a number"),
        ([None, 1.0], "the advantage of turn 1 is neither a number"),
        ([[[1.0]] * 3, 1.0], "the advantage of turn 1 is neither a number"),
        (0.5, "TypeError: object of type 'float' has no len"),
        (["abc", 1.0], "the advantage of turn 1 is neither a number"),
    ],
)
async def test_advantages_that_do_not_fit_the_answers_are_dropped_by_name(advantages: Any, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        await gives(advantages)


async def test_advantages_are_a_number_for_a_turn_or_for_each_of_its_tokens() -> None:
    import numpy as np

    assert (await gives([np.float32(0.5), np.array([1, 2, -3])])).advantages == (0.5, [1.0, 2.0, -3.0])
    assert (await gives([True, (0.1, 0.2, 0.3)])).advantages == (1.0, np.float32([0.1, 0.2, 0.3]).tolist())
    assert (await gives(np.zeros(2))).advantages == (0.0, 0.0)
    assert (await gives([])).advantages == (await gives(())).advantages == ()


async def test_a_reward_that_the_run_weighs_must_be_there() -> None:
    async def does(policy: Policy) -> Outcome:
        return Outcome(0.5, rewards={"style": 1.0, "accuracy": 0.5})

    config = EnvConfig.model_validate({"id": "plugin:talk"})
    for names in ((), ("accuracy",), ("style", "accuracy")):
        env = CheckedEnvironment(Does(does), config, max_failure_share=1.0, reward_names=names)
        assert (await env.rollout(EXAMPLE, Says())).rewards == {"style": 1.0, "accuracy": 0.5}
    env = CheckedEnvironment(Does(does), config, max_failure_share=1.0, reward_names=("accuracy", "format"))
    with pytest.raises(
        EnvironmentFault, match=r"no reward 'format', which advantage.reward_weights names; found: accuracy, style"
    ):
        await env.rollout(EXAMPLE, Says())
    assert env.num_dropped == 1


async def test_numbers_of_every_kind_are_outcomes() -> None:
    import numpy as np

    assert await returns(Outcome(True, {"n": np.float32(2)})) == Outcome(1.0, {"n": 2.0})
    truths: Any = np.bool_(True), np.False_
    assert await returns(Outcome(truths[0], {"n": truths[1]})) == Outcome(1.0, {"n": 0.0})
    with pytest.raises(EnvironmentFault, match="the reward is ndarray"):
        await returns(Outcome(np.array([True])))  # type: ignore[arg-type]
    assert await returns(Outcome(-3), reward_range=[-5, 5]) == Outcome(-3.0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("no such word"), "KeyError: 'no such word'"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (asyncio.CancelledError(), "CancelledError"),
        (SystemExit(3), "SystemExit: 3"),
        (RuntimeError("\x1b]0;title\x07red\nlines"), "RuntimeError: red lines"),
    ],
)
async def test_what_an_environment_raises_is_dropped(error: BaseException, message: str) -> None:
    async def does(policy: Policy) -> None:
        raise error

    env = checked(Does(does))
    with pytest.raises(EnvironmentFault, match=message):
        await env.rollout(EXAMPLE, Says())
    assert env.num_dropped == 1


async def test_a_step_has_a_deadline_and_the_policy_has_none() -> None:
    async def hangs(policy: Policy) -> None:
        await policy.complete([])
        await asyncio.Event().wait()

    async def waits(policy: Policy) -> Outcome:
        await policy.complete([])
        return Outcome(1.0)

    with pytest.raises(EnvironmentFault, match=r"a step took longer than timeout_s = 0.05"):
        await checked(Does(hangs), timeout_s=0.05).rollout(EXAMPLE, Says())
    assert (await checked(Does(waits), timeout_s=0.05).rollout(EXAMPLE, Says(delay_s=0.2))).reward == 1.0


async def test_what_the_policy_raises_is_not_the_environments_fault() -> None:
    async def hides(policy: Policy) -> Outcome:
        try:
            await policy.complete([])
        except AccessDenied:
            raise ValueError("hidden") from None
        raise AssertionError

    env = checked(Does(hides))
    with pytest.raises(AccessDenied):
        await env.rollout(EXAMPLE, Says(error=AccessDenied("no key")))
    assert env.num_dropped == 0


async def test_a_cancelled_rollout_is_cancelled() -> None:
    async def hangs(policy: Policy) -> None:
        await asyncio.Event().wait()

    env = checked(Does(hangs))
    task = asyncio.create_task(env.rollout(EXAMPLE, Says()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.num_dropped == 0


async def test_too_large_a_share_of_faults_is_the_end() -> None:
    fails = iter([False] * 8 + [True] * 100)

    async def does(policy: Policy) -> Outcome:
        if next(fails):
            raise ValueError("boom")
        return Outcome(1.0)

    env = checked(Does(does), share=0.5, name="talk")
    for number in range(16):
        if number < 8:
            await env.rollout(EXAMPLE, Says())
        else:
            with pytest.raises(EnvironmentFault):
                await env.rollout(EXAMPLE, Says())
    with pytest.raises(
        EnvironmentBroken, match=r"env talk: 9 of its newest 17 .* = 0.5 of them; last: ValueError: boom"
    ):
        await env.rollout(EXAMPLE, Says())


@pytest.fixture
def workspace(tmp_path: Path) -> tuple[Path, Path]:
    return make_model(tmp_path / "model"), tmp_path / "out"


@pytest.fixture
async def client(workspace: tuple[Path, Path]) -> AsyncIterator[InferenceClient]:
    model, output_dir = workspace
    async with serving(FakeInference(model)) as url:
        client = make_client(url, output_dir)
        yield client
        await client.close()


def worker_of(
    workspace: tuple[Path, Path], client: InferenceClient, env: Environment, share: float, **config: Any
) -> RolloutWorker:
    model, output_dir = workspace
    policy = make_policy(client, make_run(output_dir), model)
    return make_worker(client, policy, model, {"talk": checked(env, share, **config)}, rollouts_per_example=4)


async def test_a_dropped_rollout_is_replaced_by_one_of_another_seed(
    workspace: tuple[Path, Path], client: InferenceClient
) -> None:
    fates = iter([False, True, False, True, True] + [False] * 100)
    calls = 0

    def on_rollout(example: Example) -> None:
        nonlocal calls
        calls += 1

    env = TalkEnv(num_turns=2, on_rollout=on_rollout)
    talk = env.rollout

    async def rollout(example: Example, policy: Policy) -> Outcome:
        outcome = await talk(example, policy)
        if next(fates):
            raise ValueError("boom")
        return outcome

    env.rollout = rollout  # type: ignore[method-assign]
    group = await worker_of(workspace, client, env, share=1.0).group(0)
    assert len(group.rollouts_G) == 4 and calls == 4 + 3
    answers = [tuple(rollout.branches[0].token_ids_T) for rollout in group.rollouts_G]
    assert len(set(answers)) > 1


async def test_rollouts_lost_through_others_are_made_again_and_count_for_nothing(
    workspace: tuple[Path, Path], client: InferenceClient
) -> None:
    fates = iter([True] * (4 * MAX_REPLACEMENTS + 8) + [False] * 4)

    async def does(policy: Policy) -> Outcome:
        await policy.complete([{"role": "user", "content": "q"}])
        if next(fates):
            raise Interrupted("its process was started again")
        return Outcome(1.0)

    group = await worker_of(workspace, client, Does(does), share=0.0).group(0)
    assert len(group.rollouts_G) == 4


async def test_an_environment_to_train_and_to_evaluate_on_is_loaded_once(workspace: tuple[Path, Path]) -> None:
    said: list[str | None] = []
    config = run_config(
        workspace[0], env=[{"id": "arithmetic"}, {"id": "upper-case"}], eval={"env": [{"id": "arithmetic"}]}
    )
    async with AsyncExitStack() as cleanup:
        envs, eval_envs = await load_environments(config, None, cleanup, said.append)
    assert (list(envs), list(eval_envs), said) == (["arithmetic", "upper-case"], ["arithmetic"], [None])
    assert envs["arithmetic"].examples("eval") is eval_envs["arithmetic"].examples("eval")
    assert envs["arithmetic"] is not eval_envs["arithmetic"], "each has its own count of faults"


async def test_an_example_that_fails_in_each_try_is_dropped_once_and_for_all(
    workspace: tuple[Path, Path], client: InferenceClient
) -> None:
    """Its group of four and one try more, instead of five tries more for each of the four."""
    calls = 0

    async def does(policy: Policy) -> Outcome:
        nonlocal calls
        calls += 1
        await policy.complete([{"role": "user", "content": "q"}])
        raise KeyError("answer")

    worker = worker_of(workspace, client, Does(does), share=1.0)
    for _ in range(2):
        with pytest.raises(ExampleUnusable, match="KeyError: 'answer'"):
            await worker.group(0)
        assert calls <= 2 * 4 and calls > 4
    env = worker.envs["talk"]
    assert isinstance(env, CheckedEnvironment) and list(env.unusable.values()) == ["KeyError: 'answer'"]


async def test_a_fault_that_passes_never_makes_an_example_unusable(
    workspace: tuple[Path, Path], client: InferenceClient
) -> None:
    async def does(policy: Policy) -> Outcome:
        try:
            raise ConnectionRefusedError("no judge")
        except OSError as error:
            raise RuntimeError("the judge is down") from error

    worker = worker_of(workspace, client, Does(does), share=1.0)
    with pytest.raises(GroupFailed, match="env talk: Transient: RuntimeError: the judge is down"):
        await worker.group(0)
    env = worker.envs["talk"]
    assert isinstance(env, CheckedEnvironment) and env.num_dropped > MAX_REPLACEMENTS and not env.unusable


async def hangs(policy: Policy) -> Outcome:
    await asyncio.Event().wait()
    return Outcome(1.0)


async def test_a_time_limit_that_is_reached_is_tried_once_more_and_counted_from_the_first_time(
    workspace: tuple[Path, Path], client: InferenceClient
) -> None:
    worker = worker_of(workspace, client, Does(hangs), share=1.0, timeout_s=0.01)
    with pytest.raises(GroupFailed, match=r"env talk: TimedOut: a step took longer than timeout_s = 0.01"):
        await worker.group(0)
    env = worker.envs["talk"]
    assert isinstance(env, CheckedEnvironment) and 4 < env.num_dropped <= 2 * 4 and not env.unusable


async def test_a_group_with_one_rollout_that_reaches_its_time_limit_is_completed(
    workspace: tuple[Path, Path], client: InferenceClient
) -> None:
    fates = iter([True] * 3 + [False] * 8)  # three at the same time count as one

    async def does(policy: Policy) -> Outcome:
        if next(fates):
            await hangs(policy)
        await policy.complete([{"role": "user", "content": "q"}])
        return Outcome(1.0)

    worker = worker_of(workspace, client, Does(does), share=0.5, timeout_s=PATIENCE_S)
    task = asyncio.create_task(worker.group(0))
    env = worker.envs["talk"]
    assert isinstance(env, CheckedEnvironment)
    await until(lambda: len(env._at_work) >= 3, "three that hang")
    for asked in list(env._at_work)[:3]:
        asked.deadline.reschedule(asyncio.get_running_loop().time())
    assert len((await task).rollouts_G) == 4 and env.num_dropped == 3


async def test_time_limits_in_a_row_end_the_run_and_those_at_the_same_time_are_one() -> None:
    fates = iter([True] * 5 + [False] + [True] * 100)

    async def does(policy: Policy) -> Outcome:
        return await hangs(policy) if next(fates) else Outcome(1.0)

    env = checked(Does(does), share=0.5, name="talk", timeout_s=0.01)
    at_once = [env.rollout(example(number), Says()) for number in range(4)]
    assert {type(each) for each in await asyncio.gather(*at_once, return_exceptions=True)} == {TimedOut}
    for fault in (TimedOut, None, *[TimedOut] * (MAX_TIME_LIMITS - 1)):
        with pytest.raises(fault) if fault else contextlib.nullcontext():
            await env.rollout(example(0), Says())
    with pytest.raises(
        EnvironmentBroken,
        match=r"^env talk: 3 time limits in a row were reached, and no rollout succeeded; "
        r"last: a step took longer than timeout_s = 0.01 in example e3$",
    ):
        await env.rollout(example(3), Says())


@pytest.mark.parametrize("succeeds", [True, False])
async def test_time_limits_end_no_run_while_rollouts_from_before_them_are_under_way(succeeds: bool) -> None:
    """Those may succeed, and then the limits were not in a row. A reward that hangs for all ends the run then."""

    async def does(policy: Policy) -> Outcome:
        await policy.complete([{"role": "user", "content": "q"}])
        return Outcome(1.0) if succeeds and policy.answer_lens == [7] else await hangs(policy)

    class Slow(Says):
        async def complete(self, messages: Any) -> str:
            begun.set()
            await goes_on.wait()
            self.answer_lens.append(7)
            return "hello"

    begun, goes_on = asyncio.Event(), asyncio.Event()
    env = checked(Does(does), share=0.9, timeout_s=0.01)
    early = asyncio.create_task(env.rollout(example(1), Slow()))
    await begun.wait()
    for _ in range(MAX_TIME_LIMITS + 2):
        with pytest.raises(TimedOut):
            await env.rollout(example(0), Says())
    goes_on.set()
    if not succeeds:
        with pytest.raises(EnvironmentBroken, match="5 time limits in a row were reached, and no rollout succeeded"):
            await early
        return
    assert (await early).reward == 1
    for _ in range(MAX_TIME_LIMITS - 1):
        with pytest.raises(TimedOut):
            await env.rollout(example(0), Says())
    late = asyncio.create_task(env.rollout(example(1), Slow()))  # begun after the first limit: it holds up nothing
    goes_on.clear()
    await asyncio.sleep(0)
    with pytest.raises(EnvironmentBroken, match="3 time limits in a row"):
        await env.rollout(example(0), Says())
    late.cancel()


async def test_no_time_limit_ends_a_run_that_tolerates_every_fault() -> None:
    env = checked(Does(hangs), share=1.0, timeout_s=0.01)
    for _ in range(MAX_TIME_LIMITS + 1):
        with pytest.raises(TimedOut):
            await env.rollout(example(0), Says())


async def test_faults_by_chance_are_those_of_rollouts_once_one_of_the_example_has_succeeded() -> None:
    fates = iter([True, True, True, False, *[True] * 9])

    async def does(policy: Policy) -> Outcome:
        if next(fates):
            raise ValueError("boom")
        return Outcome(1.0)

    env = checked(Does(does), share=0.8)
    for fails in [True] * 3 + [False] + [True] * 5:
        with pytest.raises(EnvironmentFault) if fails else contextlib.nullcontext():
            await env.rollout(EXAMPLE, Says())
    with pytest.raises(EnvironmentBroken, match="9 of its newest 10 rollouts were dropped"):
        await env.rollout(EXAMPLE, Says())
    assert not env.unusable


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "the messages are NoneType: must be a list"),
        ("hello", "the messages are str: must be a list"),
        (["hello"], "message 0 is str: must be a dict with role and content"),
        (
            [{"role": "user", "content": "q"}, {"role": "user"}],
            "the content of message 1 is NoneType: must be a string",
        ),
        ([{"role": "user", "content": 3}], "the content of message 0 is int: must be a string"),
        ([{"role": None, "content": "q"}], "the role of message 0 is NoneType: must be a string"),
        (
            [{"role": "user", "content": "ab\ud800"}],
            "the content of message 0 has a surrogate at character 2, which .*",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "the content of message 0 is list: must be a string"),
        ([{"role": "user", "content": "long " * 400}], r"2\d+ prompt tokens leave no room in seq_len = 256 .*"),
    ],
)
async def test_a_first_prompt_that_nothing_can_be_sampled_from_drops_its_example_at_once(
    workspace: tuple[Path, Path], client: InferenceClient, messages: Any, reason: str
) -> None:
    async def does(policy: Policy) -> Outcome:
        try:
            await policy.complete(messages)
        except Exception as error:
            raise ValueError("hidden") from error
        raise AssertionError

    worker = worker_of(workspace, client, Does(does), share=1.0)
    with pytest.raises(ExampleUnusable, match=f"^{reason}$"):
        await worker.group(0)
    env = worker.envs["talk"]
    assert isinstance(env, CheckedEnvironment) and env.num_dropped <= 4


async def test_content_in_text_parts_is_text(workspace: tuple[Path, Path], client: InferenceClient) -> None:
    content: Any = "one\ntwo"

    async def does(policy: Policy) -> Outcome:
        await policy.complete([{"role": "user", "content": content}])
        return Outcome(1.0)

    groups = [await worker_of(workspace, client, Does(does), share=1.0).group(0)]
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    groups.append(await worker_of((workspace[0], workspace[1] / "b"), client, Does(does), share=1.0).group(0))
    first, second = (group.rollouts_G[0] for group in groups)
    assert first.branches[0].token_ids_T == second.branches[0].token_ids_T


async def fails(env: CheckedEnvironment, numbers: range) -> None:
    for number in numbers:
        with pytest.raises(ExampleUnusable):
            await env.rollout(example(number), Says(error=RolloutError("too long")))


async def test_a_share_of_examples_ends_the_run_and_not_of_their_rollouts() -> None:
    async def does(policy: Policy) -> Outcome:
        await policy.complete([])
        return Outcome(1.0)

    env = checked(Does(does), share=0.5, name="talk")
    await fails(env, range(MIN_EXAMPLES - 1))
    for number in range(10, 10 + MIN_EXAMPLES):
        await env.rollout(example(number), Says())
    for _ in range(3):
        await fails(env, range(MIN_EXAMPLES - 1))  # known: tried no more, counted no more
    await fails(env, range(20, 21))
    with pytest.raises(
        EnvironmentBroken,
        match=r"^env talk: 11 of the 21 examples tried are unusable, more than max_env_failure_share = 0.5 of them; "
        r"last: too long in example e21$",
    ):
        await env.rollout(example(21), Says(error=RolloutError("too long")))
    assert (env.num_dropped, len(env.unusable)) == (11, 11)


async def test_a_policy_that_is_at_fault_makes_no_example_unusable_and_is_named() -> None:
    async def does(policy: Policy) -> Outcome:
        await policy.complete([])
        raise AssertionError

    env = checked(Does(does), share=0.5, num_examples=3, name="talk")
    error = PolicyError("the policy is at fault, not the example: run_a@v3: its logits are not finite")
    for number in range(MIN_ROLLOUTS - 1):
        with pytest.raises(Transient, match="the policy is at fault"):
            await env.rollout(example(number % 3), Says(error=error))
    assert env.unusable == {}
    with pytest.raises(EnvironmentBroken, match=r"last: the policy is at fault, not the example: run_a@v3"):
        await env.rollout(example(0), Says(error=error))


async def test_when_all_examples_are_unusable_the_run_ends_however_few_they_are() -> None:
    async def does(policy: Policy) -> Outcome:
        await policy.complete([])
        raise AssertionError

    env = checked(Does(does), share=1.0, num_examples=3)
    await fails(env, range(2))
    with pytest.raises(EnvironmentBroken, match=r"^env talk: all 3 examples are unusable; last: .* in example e2$"):
        await env.rollout(example(2), Says(error=RolloutError("too long")))


async def test_a_problem_is_told_from_the_first_drop_on_until_it_is_long_ago() -> None:
    fates = iter([False] * 32 + [True] + [False] * 200)

    async def does(policy: Policy) -> Outcome:
        await policy.complete([])
        if next(fates):
            raise KeyError("answer")
        return Outcome(1.0)

    env = checked(Does(does), name="jsonl")
    for _ in range(32):
        await env.rollout(example(17), Says())
    assert env.problem() is None
    with pytest.raises(EnvironmentFault):
        await env.rollout(example(17), Says())
    todo = "; see the run's log; prl env try FILE tries a change"
    assert env.problem() == f"env jsonl: 3 % of rollouts dropped: KeyError: 'answer' in example e17{todo}"
    for number in range(FAILURE_WINDOW):
        assert env.problem() is not None, number
        await env.rollout(example(17), Says())
    assert env.problem() is None
    await fails(env, range(1))
    assert env.problem() == f"env jsonl: 1.5 % of rollouts dropped, 1 example unusable: too long in example e0{todo}"
    told = environment_figures([checked(Does(does)), env])
    assert told == {"problem": env.problem(), "examples_unusable": 1, "unusable": {"jsonl/e0": "too long"}}


async def test_a_step_that_hangs_is_told_after_half_of_its_time() -> None:
    release = asyncio.Event()

    async def does(policy: Policy) -> Outcome:
        await policy.complete([])
        await release.wait()
        return Outcome(1.0)

    env = checked(Does(does), timeout_s=2 * PATIENCE_S)
    turn = Says(delay_s=0.0)
    task = asyncio.create_task(env.rollout(example(17), turn))
    await until(lambda: turn.answer_lens == [3], "the turn of the policy")
    assert env.problem() is None
    (asked,) = env._at_work
    asked.deadline.reschedule(asyncio.get_running_loop().time() + 0.9 * PATIENCE_S)
    assert env.problem() == (
        f"env talk: a step of example e17 takes {1.1 * PATIENCE_S:.0f} s already (timeout_s = {2 * PATIENCE_S:g}); "
        "find what it waits for, or raise timeout_s"
    )
    release.set()
    assert (await task).reward == 1.0 and env.problem() is None


async def test_advantages_of_turns_and_tokens_come_to_the_tokens_of_their_answers(
    workspace: tuple[Path, Path], client: InferenceClient
) -> None:
    async def does(policy: Policy) -> Outcome:
        messages = list(EXAMPLE.messages)
        for _ in range(2):
            answer = await policy.complete(messages)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
        by_token = [float(at) for at in range(policy.answer_lens[1])]
        return Outcome(1.0, rewards={"form": 1.0}, advantages=[0.5, by_token])

    for rollout in (await worker_of(workspace, client, Does(does), share=1.0).group(0)).rollouts_G:
        at_T = list(zip(rollout.branches[0].token_advantages_T, rollout.branches[0].loss_mask_T, strict=True))
        assert [value for value, is_answer in at_T if is_answer] == [0.5, 0.5, 0.5, 0.0, 1.0, 2.0]
        assert {value for value, is_answer in at_T if not is_answer} == {0.0} and rollout.rewards == {"form": 1.0}
