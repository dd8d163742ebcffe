"""Batches of rollouts with their tokens, ratios and all rewards, as the rollouts tab shows them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from msgspec.structs import replace

from prime_rl.contract.layout import RunDir
from prime_rl.contract.samples import (
    BatchRatios,
    BatchRewards,
    RatioFile,
    SampleFile,
    SampleTokens,
    SampleTurn,
    TokenSample,
)

GROUP_SIZE = 4
NUM_GROUPS = 2
BATCH_SIZE = 64
WORDS = ("the", "letters", "in", "order", "first", "then", "look", "at", "each", "one", "again", "so", "answer", "is")


def add_batches(run: RunDir, num_steps: int) -> None:
    """Of each batch two examples of four rollouts: one of a single turn, one a game with the environment."""
    samples, ratios = SampleFile(run.samples, keep=10_000), RatioFile(run.ratios, keep=1_000)
    for step in range(1, num_steps + 1):
        rng = random.Random(step)
        share = 1 - math.exp(-3 * step / num_steps)
        rewards = [round(min(max(rng.gauss(share, 0.25), 0.0), 1.0), 2) for _ in range(BATCH_SIZE)]
        kept = [_rollout(rng, step, place, rewards) for place in range(GROUP_SIZE * NUM_GROUPS)]
        samples.append([BatchRewards(rewards, step), *kept])
        by_place = {each.place: _ratios(rng, each) for each in kept}
        ratios.append(BatchRatios(step, by_place))


def add_branches(run: RunDir, step: int) -> None:
    """A batch of one example of two rollouts, the first of them an agent's in three branches."""
    rng = random.Random(step)
    agent = [_rollout(rng, step, place, [1.0] * 3 + [0.25]) for place in range(4)]
    for at, name in enumerate(("search it", "the page has 3 results", "that cannot be read: call a tool")):
        agent[at] = replace(
            agent[at],
            **{"prompt": name, "env": "agent", "example_id": "agent/task-7", "branch": at, "num_branches": 3},
            **{"num_shared": (0, 312, 48)[at], "shared_with": at // 2, "advantage": 0.375},
            output="step 1: search\nstep 2: read\ndone" if at == 0 else "",
        )
    agent[3] = replace(agent[3], env="agent", example_id="agent/task-7", advantage=-0.375)
    SampleFile(run.samples, keep=10_000).append([BatchRewards([1.0, 0.25], step), *agent])


def _rollout(rng: random.Random, step: int, place: int, rewards: Sequence[float]) -> TokenSample:
    group = place // GROUP_SIZE
    same = rewards[group * GROUP_SIZE : (group + 1) * GROUP_SIZE]
    is_game = group == 1
    pieces = [f" {word}" for word in rng.choices(WORDS, k=rng.randint(25, 60))]
    logprobs: list[float | None] = [-rng.choice([0.01, 0.1, 0.9, 2.5, 5.0]) for _ in pieces]
    if is_game:
        pieces[10:12], logprobs[10:12] = ["\nuser: ", "lower\n"], [None, None]
    text = "".join(pieces)
    turns = [SampleTurn(True, "".join(pieces[:10])), SampleTurn(False, "lower"), SampleTurn(True, "".join(pieces[12:]))]
    return TokenSample(
        step=step,
        env="guess" if is_game else "reverse-text",
        example_id=f"{'guess' if is_game else 'reverse-text'}/train-{step}",
        prompt="Guess the number between 1 and 9." if is_game else f"Reverse the letters of this text: word{step}",
        completion=text,
        reward=rewards[place],
        advantage=rewards[place] - sum(same) / len(same),
        policy_versions=[step - 1],
        num_tokens=len(pieces) + 20,
        num_completion_tokens=len(pieces),
        turns=turns if is_game else [],
        place=place,
        group=group,
        tokens=SampleTokens(pieces, logprobs, num_left_out=120 if place == 2 else 0),
    )


def _ratios(rng: random.Random, sample: TokenSample) -> list[float | None]:
    assert sample.tokens is not None
    return [rng.gauss(0, 0.2) for logprob in sample.tokens.logprobs if logprob is not None]
