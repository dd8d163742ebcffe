"""The metrics of a run: one flat JSON line per step, and where its time went.

Names are dotted with "/": `reward/mean`, `env/<env name>/<metric>`, `time/<phase>`; all of them are in
`docs/metrics.md`. Reading, drawing and passing on (`daemons/monitors`) is done elsewhere.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from prime_rl.contract.files import append_line, read_end
from prime_rl.contract.metrics import TEACHER_KL, parse_metrics
from prime_rl.orchestrator.envs.base import MAX_REWARDS
from prime_rl.orchestrator.envs.checked import RolloutMeter
from prime_rl.orchestrator.recorder import Rollout
from prime_rl.orchestrator.rollout import Group

Phase = Literal["generate", "environment", "wait_for_policy", "wait_for_inference"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# The name in `bottleneck` for each phase.
_HOLDERS: dict[Phase, str] = {
    "generate": "inference",
    "environment": "environment",
    "wait_for_policy": "trainer",
    "wait_for_inference": "inference",
}
# A trainer that always has a batch to work on holds the run up once it is waited for this share of the time.
TRAINER_SHARE = 0.1
# The end of the metrics file in which the newest evaluation is looked for.
TAIL_BYTES = 1_000_000


class PhaseClock(RolloutMeter):
    """Adds up how long each phase lasted since the last `lap`.

    Of the time in which groups are made ("generate"), the share of the rollouts that are in the code of their
    environment goes to "environment". While inference is in trouble, all of it goes to "wait_for_inference".

    Args:
        on_change: called when something else is waited for than before.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._clock = clock
        self._on_change = on_change
        self._phase: Phase = "generate"
        self._trouble: str | None = None
        self._since_s = clock()
        self._spent_s: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._num_in_environment = 0
        self._num_in_turn = 0

    def move(self, *, in_environment: int, in_turn: int = 0) -> None:
        """So many rollouts more are in the code of their environment, and in a turn of the policy; or fewer."""
        self._settle()
        self._num_in_environment += in_environment
        self._num_in_turn += in_turn

    def switch(self, phase: Phase) -> None:
        """The time from now on belongs to `phase`."""
        if phase != self._phase:
            self._settle()
            self._phase = phase
            self._on_change()

    def note_trouble(self, trouble: str | None) -> None:
        """Note what is wrong with inference from now on; None when nothing is."""
        self._settle()
        self._trouble = trouble
        self._on_change()

    def lap(self) -> dict[Phase, float]:
        """Seconds of each phase since the last call."""
        self._settle()
        spent_s, self._spent_s = self._spent_s, dict.fromkeys(PHASES, 0.0)
        return spent_s

    def _settle(self) -> None:
        now_s = self._clock()
        passed_s, self._since_s = now_s - self._since_s, now_s
        phase = "wait_for_inference" if self._trouble else self._phase
        if phase == "generate" and self._num_in_environment:
            share = self._num_in_environment / (self._num_in_environment + self._num_in_turn)
            self._spent_s["environment"] += share * passed_s
            passed_s *= 1 - share
        self._spent_s[phase] += passed_s


def bottleneck(time_s: Mapping[Phase, float], num_ahead: int) -> str | None:
    """The bottleneck of the run: "trainer", "inference", "environment", or None.

    `time_s` is where the time since the last batch went, `num_ahead` how many batches the trainer had not yet trained
    on when this one came. With none left it waited for this one, so it is what took most of the time. With some
    left generation kept up, and the trainer holds the run up if it was waited for.
    """
    if num_ahead:
        return "trainer" if time_s["wait_for_policy"] > TRAINER_SHARE * math.fsum(time_s.values()) else None
    held_s = dict.fromkeys(_HOLDERS.values(), 0.0)
    for phase, holder in _HOLDERS.items():
        held_s[holder] += time_s[phase]
    return max(held_s, key=lambda holder: held_s[holder])


def batch_metrics(
    step: int, groups: Sequence[Group], time_s: Mapping[Phase, float], num_dropped: int
) -> dict[str, float]:
    """The figures of one batch. `num_dropped` counts groups since the start of this process."""
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    rewards = [rollout.reward for rollout in rollouts]
    return {
        "reward/mean": mean(rewards),
        "reward/std": std(rewards),
        **reward_metrics(rollouts),
        **_by_env(groups),
        "groups_dropped": num_dropped,
        **text_metrics(step, groups, time_s),
    }


def text_metrics(step: int, groups: Sequence[Group], time_s: Mapping[Phase, float]) -> dict[str, float]:
    """The figures of one batch that do not depend on how its tokens came about."""
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    levels = [step - 1 - rollout.oldest_version for rollout in rollouts]
    completion_lens = [rollout.num_completion_tokens for rollout in rollouts]
    branches = [len(rollout.branches) for rollout in rollouts]
    prompt_lens = [rollout.num_prompt_tokens for rollout in rollouts]
    return {
        "completion_len/mean": mean(completion_lens),
        "completion_len/max": max(completion_lens),
        "prompt_len/mean": mean(prompt_lens),
        "prompt_len/max": max(prompt_lens),
        "truncated/mean": mean([float(rollout.truncated) for rollout in rollouts]),
        "branches/mean": mean(branches),
        "branches/max": max(branches),
        "async_level/max": max(levels),
        "async_level/mean": mean(levels),
        **{f"time/{phase}": seconds for phase, seconds in time_s.items()},
        "time/step": math.fsum(time_s.values()),
    }


def teacher_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """How far the student is from its teachers, and what these have read of the batch; {} without teachers."""
    branches = [each for group in groups for rollout in group.rollouts_G for each in rollout.branches if each.teacher_T]
    gaps = [
        own - of_it
        for each in branches
        for is_learned, own, of_it in zip(each.loss_mask_T, each.logprobs_T, each.teacher_T, strict=True)
        if is_learned
    ]
    num_tokens = sum(len(each.token_ids_T) for each in branches)
    return {TEACHER_KL: mean(gaps), "distill/teacher_tokens": num_tokens} if gaps else {}


def reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of each single reward, of at most MAX_REWARDS names; a rollout without it does not count for it."""
    names = sorted({name for rollout in rollouts for name in rollout.rewards})[:MAX_REWARDS]
    return {f"reward/{n}/mean": mean([r.rewards[n] for r in rollouts if n in r.rewards]) for n in names}


def outcome_metrics(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of each metric of the environment; a rollout without a metric does not count for it."""
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    return {f"{prefix}/{n}": mean([r.metrics[n] for r in rollouts if n in r.metrics]) for n in names}


def eval_metrics(env_name: str, examples: Sequence[Sequence[Rollout]], pass_reward: float) -> dict[str, float]:
    """The figures of one environment in an evaluation. The standard errors are those over examples.

    Args:
        examples: the rollouts of each, at least one of each.
        pass_reward: lowest reward of a rollout that has passed.
    """
    prefix = f"eval/{env_name}"
    rollouts = [rollout for rollouts in examples for rollout in rollouts]
    passed = [[rollout.reward >= pass_reward for rollout in rollouts] for rollouts in examples]
    average = f"{prefix}/avg@{max(map(len, examples))}"
    reward = mean([rollout.reward for rollout in rollouts])
    reward_se = standard_error([mean([rollout.reward for rollout in each]) for each in examples])
    figures = {
        **dict.fromkeys((f"{prefix}/reward", average), reward),
        **dict.fromkeys((f"{prefix}/reward_se", f"{average}_se"), reward_se),
        f"{prefix}/truncated": mean([float(rollout.truncated) for rollout in rollouts]),
    }
    k, fewest = 1, min(map(len, examples))
    while k <= fewest:
        chances = [pass_at(k, len(each), sum(each)) for each in passed]
        figures |= {f"{prefix}/pass@{k}": mean(chances), f"{prefix}/pass@{k}_se": standard_error(chances)}
        k *= 2
    return figures | outcome_metrics(prefix, rollouts)


def pass_at(k: int, num_rollouts: int, num_passed: int) -> float:
    """Chance that of `k` rollouts at least one passes, without bias from `num_rollouts` >= k (arXiv 2107.03374)."""
    return 1.0 - math.comb(num_rollouts - num_passed, k) / math.comb(num_rollouts, k)


def standard_error(values: Sequence[float]) -> float:
    """Of their mean; 0 for a single value."""
    return std(values) / math.sqrt(len(values) - 1) if len(values) > 1 else 0.0


def write_metrics(path: Path, step: int, values: Mapping[str, float | str], now: float) -> None:
    """Append one line. JSON has no infinity and no NaN: such a value is null."""
    finite = {name: value if isinstance(value, str) or math.isfinite(value) else None for name, value in values.items()}
    append_line(path, json.dumps({"step": step, "time": now, **finite}, allow_nan=False))


def last_eval_step(path: Path, *, at_most: int) -> int | None:
    """The step of the newest evaluation in the file's last megabyte, or None.

    A run that was rolled back to an earlier step has evaluations of later ones; those are void.
    """
    for line in reversed(read_end(path, TAIL_BYTES).splitlines()):
        step, values = parse_metrics(line) or (0, {})
        if step <= at_most and any(name.startswith("eval/") for name in values):
            return step
    return None


def mean(values: Iterable[float]) -> float:
    """The mean, from a sum without rounding errors. Raises ZeroDivisionError without values."""
    values = list(values)
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Of the population, so 0 for a single value."""
    middle = mean(values)
    return math.sqrt(mean([(value - middle) ** 2 for value in values]))


def _by_env(groups: Sequence[Group]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for env_name in sorted({group.env_name for group in groups}):
        rollouts = [rollout for group in groups if group.env_name == env_name for rollout in group.rollouts_G]
        rewards = [rollout.reward for rollout in rollouts]
        figures[f"reward/{env_name}"] = mean(rewards)
        figures[f"reward_std/{env_name}"] = std(rewards)
        figures |= outcome_metrics(f"env/{env_name}", rollouts)
    return figures
