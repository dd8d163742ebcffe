"""What a run says about itself: one flat JSON line a step, and where its time went.

Names are dotted with "/": `reward/mean`, `env/<env name>/<metric>`, `time/<phase>`. Reading and drawing is done
elsewhere.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from prime_rl.contract.files import append_line
from prime_rl.orchestrator.rollout import Group, Rollout

Phase = Literal["generate", "wait_for_policy", "wait_for_inference"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# A batch that lay ready takes no time; rates are taken over at least this.
MIN_STEP_S = 1e-3
# The end of the metrics file in which the newest evaluation is looked for.
TAIL_BYTES = 1_000_000


class PhaseClock:
    """Adds up how long each phase lasted since the last `lap`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase: Phase = "generate"
        self._since_s = clock()
        self._spent_s: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)

    def switch(self, phase: Phase) -> None:
        now_s = self._clock()
        self._spent_s[self._phase] += now_s - self._since_s
        self._phase, self._since_s = phase, now_s

    def lap(self) -> dict[Phase, float]:
        """Seconds of each phase since the last call."""
        self.switch(self._phase)
        spent_s, self._spent_s = self._spent_s, dict.fromkeys(PHASES, 0.0)
        return spent_s


def bottleneck(time_s: Mapping[Phase, float]) -> Phase:
    """The phase that took longest."""
    return max(PHASES, key=lambda phase: time_s[phase])


def batch_metrics(
    step: int, groups: Sequence[Group], time_s: Mapping[Phase, float], num_dropped: int, num_tokens: int
) -> dict[str, float]:
    """The figures of one batch.

    Args:
        num_dropped: groups dropped since the start of this process.
        num_tokens: tokens sampled since the last batch, for whatever batch.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    rewards = [rollout.reward for rollout in rollouts]
    levels = [step - 1 - rollout.oldest_version for rollout in rollouts]
    step_s = max(sum(time_s.values()), MIN_STEP_S)
    return {
        "reward/mean": mean(rewards),
        "reward/std": math.sqrt(max(0.0, mean([r * r for r in rewards]) - mean(rewards) ** 2)),
        **_by_env(groups),
        "completion_len/mean": mean([rollout.num_completion_tokens for rollout in rollouts]),
        "prompt_len/mean": mean([rollout.num_prompt_tokens for rollout in rollouts]),
        "truncated/mean": mean([float(rollout.truncated) for rollout in rollouts]),
        "async_level/max": max(levels),
        "async_level/mean": mean(levels),
        "groups_dropped": num_dropped,
        "tokens_per_s": num_tokens / step_s,
        **{f"time/{phase}": seconds for phase, seconds in time_s.items()},
        "time/step": step_s,
    }


def outcome_metrics(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of each metric of the environment; a rollout without a metric does not count for it."""
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    return {f"{prefix}/{n}": mean([r.metrics[n] for r in rollouts if n in r.metrics]) for n in names}


def write_metrics(path: Path, step: int, values: Mapping[str, float], now: float) -> None:
    """Append one line. JSON has no infinity and no NaN: such a value is null."""
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    append_line(path, json.dumps({"step": step, "time": now, **finite}, allow_nan=False))


def last_eval_step(path: Path) -> int | None:
    """The step of the newest evaluation in the file's last megabyte, or None."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        record = _record(line)
        if any(name.startswith("eval/") for name in record):
            return int(record["step"])
    return None


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def _by_env(groups: Sequence[Group]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for env_name in sorted({group.env_name for group in groups}):
        rollouts = [rollout for group in groups if group.env_name == env_name for rollout in group.rollouts_G]
        figures[f"reward/{env_name}"] = mean([rollout.reward for rollout in rollouts])
        figures |= outcome_metrics(f"env/{env_name}", rollouts)
    return figures


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:  # the first line of the tail may be cut
        return {}
    return record if isinstance(record, dict) else {}
