"""The figures of a batch, where its time went, what held it up; and that `docs/metrics.md` lists every figure."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from prime_rl.configs.envs import CurriculumConfig, EnvConfig
from prime_rl.orchestrator.envs.base import MAX_REWARDS, Message
from prime_rl.orchestrator.envs.checked import CheckedEnvironment, RolloutMeter
from prime_rl.orchestrator.metrics import PHASES, Phase, PhaseClock, batch_metrics, bottleneck, reward_metrics
from prime_rl.orchestrator.sampler import Curricula, Curriculum
from tests.metrics_support import documented, undocumented
from tests.orchestrator_support import TalkEnv
from tests.unit.test_orchestrator_pure import a_group
from tests.unit.test_orchestrator_run import Workspace, lines, publish, workspace  # noqa: F401

NO_TIME: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)


def test_metrics_of_a_batch() -> None:
    groups = [a_group(0, [0.0, 1.0], version=1, env="x"), a_group(1, [1.0, 1.0], version=2, env="y")]
    values = batch_metrics(3, groups, {**NO_TIME, "generate": 3.0, "wait_for_policy": 1.0}, num_dropped=2)
    assert values["reward/mean"] == 0.75
    assert values["reward/std"] == pytest.approx(np.std([0, 1, 1, 1]))
    assert (values["reward/x"], values["reward/y"]) == (0.5, 1.0)
    assert (values["reward_std/x"], values["reward_std/y"]) == (0.5, 0.0)
    assert values["env/x/exact_match"] == 0.5
    assert (values["async_level/max"], values["async_level/mean"]) == (1, 0.5)
    assert (values["completion_len/mean"], values["prompt_len/mean"], values["truncated/mean"]) == (2, 3, 0)
    assert (values["completion_len/max"], values["prompt_len/max"]) == (2, 3)
    assert (values["branches/mean"], values["branches/max"]) == (1, 1)
    assert (values["time/step"], values["time/wait_for_policy"], values["groups_dropped"]) == (4.0, 1.0, 2)


def test_a_rollout_in_branches_counts_once() -> None:
    group = a_group(0, [0.0, 1.0], version=1)
    first = group.rollouts_G[0]
    many = replace(first, branches=first.branches * 4)
    values = batch_metrics(3, [replace(group, rollouts_G=[many, group.rollouts_G[1]])], NO_TIME, num_dropped=0)
    assert (values["branches/mean"], values["branches/max"], values["reward/mean"]) == (2.5, 4, 0.5)
    assert (values["completion_len/max"], values["prompt_len/max"]) == (8, 3) and not undocumented(
        "orchestrator", [values]
    )


def test_single_rewards_have_a_mean_each_and_never_too_many() -> None:
    (group,) = [a_group(0, [0.0, 1.0, 1.0])]
    named = [{"form": 0.5, "right": 0.0}, {"form": 1.0}, {}]
    rollouts = [replace(each, rewards=own) for each, own in zip(group.rollouts_G, named, strict=True)]
    assert reward_metrics(rollouts) == {"reward/form/mean": 0.75, "reward/right/mean": 0.0}
    values = batch_metrics(3, [replace(group, rollouts_G=rollouts)], NO_TIME, num_dropped=0)
    assert values["reward/form/mean"] == 0.75 and undocumented("orchestrator", [values]) == set()
    many = [replace(each, rewards={f"r{at}-{n:02}": 1.0 for n in range(16)}) for at, each in enumerate(rollouts)]
    assert list(reward_metrics(many)) == [f"reward/r0-{n:02}/mean" for n in range(MAX_REWARDS)]


def test_phases_add_up_and_begin_again_after_a_lap() -> None:
    now = [0.0]
    clock = PhaseClock(lambda: now[0])
    phases: list[tuple[Phase, float]] = [("wait_for_policy", 2.0), ("generate", 5.0)]
    for phase, until_s in phases:
        now[0] = until_s
        clock.switch(phase)
    now[0] = 6.0
    assert clock.lap() == {**NO_TIME, "generate": 3.0, "wait_for_policy": 3.0}
    now[0] = 6.5
    assert clock.lap() == {**NO_TIME, "generate": 0.5}


def test_time_in_trouble_is_time_without_inference_and_every_change_is_told() -> None:
    now, changes = [0.0], list[float]()
    clock = PhaseClock(lambda: now[0], on_change=lambda: changes.append(now[0]))
    clock.switch("generate")  # as before
    for now_s, trouble in ((1.0, "503"), (3.0, "429"), (4.0, None)):
        now[0] = now_s
        clock.note_trouble(trouble)
    now[0] = 6.0
    clock.switch("wait_for_policy")
    now[0] = 7.0
    assert clock.lap() == {**NO_TIME, "generate": 3.0, "wait_for_inference": 3.0, "wait_for_policy": 1.0}
    assert changes == [1.0, 3.0, 4.0, 6.0]


def test_time_goes_to_the_environment_by_the_share_of_rollouts_in_its_code() -> None:
    now = [0.0]
    clock = PhaseClock(lambda: now[0])
    clock.move(in_environment=1)
    clock.move(in_environment=1)
    now[0] = 1.0  # both in the environment: all of it
    clock.move(in_environment=-1, in_turn=1)
    now[0] = 5.0  # one in each: half of it
    clock.move(in_environment=-1, in_turn=1)
    now[0] = 7.0  # both generate
    clock.switch("wait_for_inference")
    clock.move(in_environment=1, in_turn=-1)
    now[0] = 9.0  # nothing is generated, so inference is waited for, whatever works meanwhile
    assert clock.lap() == {**NO_TIME, "environment": 3.0, "generate": 4.0, "wait_for_inference": 2.0}


async def test_an_environment_is_metered_also_when_it_or_the_policy_fails() -> None:
    seen: list[str] = []

    class Meter(RolloutMeter):
        def move(self, *, in_environment: int, in_turn: int = 0) -> None:
            names = {(1, 0): "enter", (-1, 0): "leave", (-1, 1): "begin", (1, -1): "end"}
            seen.append(names[in_environment, in_turn])

    class Echo:
        fails = False
        answer_lens: Sequence[int] = ()

        async def complete(self, messages: Sequence[Message]) -> str:
            seen.append("turn")
            if self.fails:
                raise RuntimeError("no answer")
            return "hi"

    turn = ["begin", "turn", "end"]
    env = CheckedEnvironment(TalkEnv(num_turns=2), EnvConfig(id="plugin:talk"), max_failure_share=1.0, meter=Meter())
    assert (await env.rollout(env.examples("train")[0], Echo())).reward == 0.5
    assert seen == ["enter", *turn, *turn, "leave"]
    seen.clear()
    Echo.fails = True
    with pytest.raises(RuntimeError, match="no answer"):
        await env.rollout(env.examples("train")[0], Echo())
    assert seen == ["enter", *turn, "leave"]


@pytest.mark.parametrize(
    ("time_s", "num_ahead", "holder"),
    [
        ({"generate": 2.0, "wait_for_policy": 1.0}, 0, "inference"),
        ({"wait_for_inference": 2.0, "wait_for_policy": 1.0}, 0, "inference"),
        ({"generate": 1.0, "wait_for_inference": 1.0, "wait_for_policy": 1.5}, 0, "inference"),
        ({"generate": 1.0, "environment": 2.0, "wait_for_policy": 1.0}, 0, "environment"),
        ({"generate": 1.0, "wait_for_policy": 2.0}, 0, "trainer"),  # on-policy: both in turn, and training takes longer
        ({"generate": 4.0, "wait_for_policy": 1.0}, 1, "trainer"),  # it always had work, and was waited for
        ({"generate": 4.0, "wait_for_policy": 0.1}, 1, None),  # no waiting
    ],
)
def test_the_bottleneck_is_who_is_waited_for(time_s: dict[Phase, float], num_ahead: int, holder: str | None) -> None:
    assert bottleneck({**NO_TIME, **time_s}, num_ahead) == holder


# -- what is documented is what is written ----


async def test_every_figure_of_a_run_is_documented_and_every_documented_one_is_written(workspace: Workspace) -> None:  # noqa: F811
    code = await workspace.run_to_the_end(
        max_steps=4,
        env=[{"id": "reverse-text", "name": "easy", "args": {"max_len": 3}}, {"id": "arithmetic"}],
        eval={"interval": 2, "num_examples": 1},
    )
    assert code == 0
    assert undocumented("orchestrator", lines(workspace.run)) == set()
    written = set(itertools.chain.from_iterable(lines(workspace.run)))
    # Only families of reasoning-gym have levels, and none of them is built in.
    written |= Curricula({"easy": Curriculum(CurriculumConfig(), num_levels=2, full_reward=1.0)}).figures().keys()
    never = {name for name, pattern in documented("orchestrator").items() if not any(map(pattern.fullmatch, written))}
    of_teachers = {"distill/kl", "distill/teacher_tokens", "distill/teacher_version"}
    assert never == {"epoch", *of_teachers}, "of runs that learn texts, or from a teacher"
    assert {line["bottleneck"] for line in lines(workspace.run) if "bottleneck" in line} <= {
        *("inference", "environment", "trainer", "none")
    }


def test_an_undocumented_figure_is_noticed() -> None:
    assert undocumented("orchestrator", [{"step": 1, "reward/mean": 0.5, "reward/mood": 1, "mystery": 2}]) == {
        "mystery"
    }
    assert undocumented("trainer", [{"step": 1, "loss": 0.5, "reward/mean": 1}]) == {"reward/mean"}


async def test_a_stopped_and_a_killed_run_repeat_no_step_and_tear_no_line(workspace: Workspace) -> None:  # noqa: F811
    for stop_at in (2, 4):
        task = workspace.start(max_steps=6, max_async_level=0)
        for version in range(stop_at - 1, stop_at + 1):
            publish(workspace.run, version)
            await workspace.until_waiting_on(f"policy version {version + 1}")
        if stop_at == 2:
            workspace.stopped = True
            await task
        else:  # as a kill in the middle of a write leaves it
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with workspace.run.orchestrator_metrics.open("a") as file:
                file.write('{"step": 6, "ti')
    assert await workspace.run_to_the_end(max_steps=6) == 0
    text = workspace.run.orchestrator_metrics.read_text().replace('{"step": 6, "ti\n', "")
    workspace.run.orchestrator_metrics.write_text(text)
    assert [line["step"] for line in lines(workspace.run)] == [1, 2, 3, 4, 5, 6]
