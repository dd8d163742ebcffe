"""The rollouts tab: the samples that a run keeps of its batches, in order and in groups.

One of them turn by turn; of one batch also the tokens, and of the newest batches all rewards. The texts of environment
and policy are clean. No widgets here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from daemons.workspace_reader import stamp_of
from prime_rl.contract.layout import RunDir
from prime_rl.contract.samples import (
    MAX_TOKENS,
    Batch,
    Sample,
    SampleTokens,
    TokenSample,
    clean_sample,
    read_batches,
    read_rewards,
    read_samples,
    token_ratios,
)
from prime_rl.utils.text import clean_text
from tui.readers.tabs import ROLLOUTS, TabData

# The list shows at most so many of the newest; the file itself is bounded by its writer.
MAX_SAMPLES = 2_000
MAX_REWARDS = 100_000
# Characters of one token: longer ones are no tokens.
MAX_PIECE = 100
ORDERS = ("newest", "highest reward", "lowest reward", "highest advantage", "lowest advantage")
# An example of a batch: its step, and what tells it from the others.
GroupKey = tuple[int, str]


@dataclass(frozen=True)
class RolloutsRequest:
    """The step whose tokens are requested; None: none are."""

    step: int | None = None


@dataclass(frozen=True)
class TokenLine:
    """The kept tokens of a rollout, after its prompt.

    Attributes:
        pieces: their texts, clean.
        logprobs: under the policy that sampled; None for a token of the environment.
        ratios: log(pi / mu); None where it is not there.
        num_left_out: in the middle, after the first half of `pieces`.
        advantages: of each token where the environment gave them, else ().
    """

    pieces: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    ratios: tuple[float | None, ...]
    num_left_out: int = 0
    advantages: tuple[float, ...] = ()


@dataclass(frozen=True)
class RolloutsData(TabData):
    """One look: the newest samples, oldest first, all their text clean.

    Attributes:
        rewards: of all rollouts of a batch, by step, ascending; empty in files of an earlier version.
        request: what `tokens` answers.
        tokens: by the place of their rollout in the batch of that step.
    """

    tab = ROLLOUTS
    samples: tuple[Sample, ...] = ()
    rewards: dict[int, tuple[float, ...]] = field(default_factory=dict)
    request: RolloutsRequest = RolloutsRequest()
    tokens: dict[int, TokenLine] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One turn: its speaker ("prompt", "policy", "environment"), its text, and the reward of it alone."""

    speaker: str
    text: str
    reward: float | None = None


class RolloutsReader:
    """Reads the samples file again whenever it changed, and the tokens of a step when they are wanted."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self._run = RunDir(output_dir / run_id)
        self._stamps: tuple[object, object] | None = None
        self._shown = RolloutsData(run_id)

    def read(self, request: RolloutsRequest = RolloutsRequest()) -> tuple[RolloutsData | None, bool]:
        """(samples, and tokens of the step asked for, or None when nothing changed; False: one look reads all)."""
        stamps, before = (stamp_of(self._run.samples), stamp_of(self._run.ratios)), self._stamps
        if stamps == before and request == self._shown.request:
            return None, False
        if before is None or before[0] != stamps[0]:
            path = self._run.samples
            self._shown = replace(self._shown, samples=_samples(path), rewards=_rewards(path))
        self._stamps = stamps
        self._shown = replace(self._shown, request=request, tokens=self._tokens(request.step))
        return self._shown, False

    def _tokens(self, step: int | None) -> dict[int, TokenLine]:
        if step is None:
            return {}
        try:
            batches = read_batches(self._run.samples, self._run.ratios, 1, step)
        except OSError:
            return {}
        return tokens_of(batches[0]) if batches else {}


def tokens_of(batch: Batch) -> dict[int, TokenLine]:
    """By place; of rollouts that have tokens."""
    return {
        sample.place: _token_line(sample.tokens, batch.ratios.get(sample.place, ()))
        for sample in batch.samples
        if isinstance(sample, TokenSample) and sample.tokens is not None and sample.place >= 0
    }


def _token_line(tokens: SampleTokens, ratios: Sequence[float | None]) -> TokenLine:
    num = min(len(tokens.pieces), len(tokens.logprobs), MAX_TOKENS)
    return TokenLine(
        tuple(clean_text(piece.expandtabs(4), MAX_PIECE) for piece in tokens.pieces[:num]),
        tuple(tokens.logprobs[:num]),
        tuple(token_ratios(tokens, ratios)[:num]),
        max(tokens.num_left_out, 0),
        tuple(tokens.advantages[:num]) if len(tokens.advantages) >= num else (),
    )


def _samples(path: Path) -> tuple[Sample, ...]:
    try:
        return tuple(map(clean_sample, read_samples(path, MAX_SAMPLES)))
    except OSError:
        return ()


def _rewards(path: Path) -> dict[int, tuple[float, ...]]:
    """Without those that are not finite."""
    try:
        return {step: tuple(filter(math.isfinite, each)) for step, each in read_rewards(path, MAX_REWARDS).items()}
    except OSError:
        return {}


def arrange(samples: Sequence[Sample], order: str) -> list[Sample]:
    """In one of ORDERS, by the first branch of each rollout, the others below it; equals stay newest first."""
    rollouts = by_rollout(samples)[::-1]
    if order != "newest":
        sign = -1.0 if order.startswith("highest") else 1.0
        is_reward = order.endswith("reward")
        rollouts.sort(key=lambda each: sign * (each[0].reward if is_reward else each[0].advantage))
    return [sample for each in rollouts for sample in each]


def by_rollout(samples: Iterable[Sample]) -> list[list[Sample]]:
    """The branches of each rollout, in the order of the first of them."""
    found: dict[object, list[Sample]] = {}
    for number, sample in enumerate(samples):
        is_branch = sample.num_branches > 1 and sample.place >= sample.branch
        found.setdefault((sample.step, sample.place - sample.branch) if is_branch else number, []).append(sample)
    return [sorted(each, key=lambda sample: sample.branch) for each in found.values()]


def group_key(sample: Sample) -> GroupKey:
    """The same for all rollouts of one example of one batch."""
    return sample.step, str(sample.group) if sample.group >= 0 else f"{sample.env} {sample.example_id}"


def group_of(samples: Sequence[Sample], chosen: Sample) -> list[Sample]:
    """All kept rollouts of its example, in the order of their batch: of each its first branch, or `chosen`."""
    key = group_key(chosen)
    rollouts = by_rollout(each for each in samples if group_key(each) == key)
    shown = (chosen if chosen in branches else branches[0] for branches in rollouts)
    return sorted(shown, key=lambda sample: sample.place)


def step_rewards(data: RolloutsData) -> dict[int, tuple[float, ...]]:
    """All rewards by step, ascending; without them those of the kept rollouts."""
    if data.rewards:
        return data.rewards
    by_step = sorted((each[0] for each in by_rollout(data.samples)), key=lambda sample: sample.step)
    grouped = itertools.groupby(by_step, key=lambda sample: sample.step)
    return {step: tuple(sample.reward for sample in each if math.isfinite(sample.reward)) for step, each in grouped}


def turns(sample: Sample) -> list[Turn]:
    """The prompt and the turns of a sample, in order; a completion without turns is one turn of the policy."""
    said = [
        Turn(
            "policy" if turn.by_policy else "environment", turn.text.strip("\n") if sample.turns else turn.text, reward
        )
        for turn, reward in sample.said()
    ]
    return [Turn("prompt", sample.prompt.strip("\n")), *said]


def branch_of(sample: Sample) -> str:
    """`branch 2 of 3`; "" of a rollout that has one."""
    return f"branch {sample.branch + 1} of {sample.num_branches}" if sample.num_branches > 1 else ""


def versions(sample: Sample) -> str:
    """`v41`, or `v40 v41` when its turns came from several."""
    return " ".join(f"v{version}" for version in sample.policy_versions) or "-"
