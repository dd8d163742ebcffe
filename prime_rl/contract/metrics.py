"""Lines of the metrics files: flat JSON objects with `step`, `time` and figures; listed in `docs/metrics.md`.

When a metric has stopped getting better is a pure rule (`EarlyStop`) that sees nothing but values, so a restarted
process that reads them again decides the same.

Signs that a run does not learn are pure rules over its metrics, the same for orchestrator, alerts, `prl` and console.
The orchestrator feeds `Learning` with every line of the run's two metrics files and writes the signs of now into its
status; readers put them into words with `RULES`. Limits are those of docs/learning.md. No I/O, no clock.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from prime_rl.contract.files import UNDECODABLE


def parse_metrics(line: bytes) -> tuple[int, dict[str, float]] | None:
    """`{"step": 3, "loss": 0.1, ...}` -> (3, {"loss": 0.1, ...}); numbers only. None for an invalid line."""
    try:
        record = msgspec.json.decode(line)
    except UNDECODABLE:
        record = _parse_lenient(line)
    if not isinstance(record, dict):
        return None
    values = {key: number for key, value in record.items() if (number := _number(value)) is not None}
    step = values.pop("step", None)
    return None if step is None or not 0 <= step < 2**53 else (int(step), values)


def _parse_lenient(line: bytes) -> object:
    """Python's own reader also takes NaN and Infinity, which Python's own writer writes."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


_EVAL = "eval/"


@dataclass
class EarlyStop:
    """Feed it the values of one metric in the order of their steps.

    Args:
        mode: "max" or "min": what is better.
        patience: how many values in a row may bring nothing better.
        min_delta: how much better than the best before a value must be.
        min_steps: no stop before this step.
    """

    metric: str
    mode: str = "max"
    patience: int = 5
    min_delta: float = 0.0
    min_steps: int = 0
    best: float | None = None
    best_step: int = 0
    num_without: int = 0
    step: int = -1

    def feed(self, step: int, value: float) -> None:
        """A value that is not finite is no better than any other; one of a step that was fed before does not count."""
        if step <= self.step:
            return
        self.step = step
        sign = 1.0 if self.mode == "max" else -1.0
        if math.isfinite(value) and (self.best is None or sign * (value - self.best) > self.min_delta):
            self.best, self.best_step, self.num_without = value, step, 0
        else:
            self.num_without += 1

    @property
    def reason(self) -> str | None:
        """Why the run is to end, with the numbers; None: it goes on."""
        if self.num_without < self.patience or self.step < self.min_steps:
            return None
        best = "no finite value" if self.best is None else f"best {self.best:.4g} at step {self.best_step}"
        return (
            f"stopped early: {self.metric} did not improve in {self.num_without} values ({best}, now step {self.step})"
        )


def bounded_mean(values: Sequence[float]) -> float:
    """The mean of a tenant's numbers, also where their sum is no float."""
    try:
        mean = statistics.fmean(values)
    except (OverflowError, ValueError):  # also infinities of both signs
        mean = sum(value / len(values) for value in values)
    return max(-sys.float_info.max, min(mean, sys.float_info.max))


def metric_value(values: Mapping[str, float], metric: str) -> float | None:
    """The value of `metric` in one line. "eval/X" without that name is the mean of "eval/<environment>/X"."""
    if metric in values:
        return values[metric]
    if not metric.startswith(_EVAL):
        return None
    ending = f"/{metric.removeprefix(_EVAL)}"
    of_envs = [
        value
        for name, value in values.items()
        if name.startswith(_EVAL) and name.endswith(ending) and name.count("/") == metric.count("/") + 1
    ]
    return math.fsum(value / len(of_envs) for value in of_envs) if of_envs else None  # their sum may be no float


def series(lines: Iterable[bytes], metric: str, *, at_most: int | None = None) -> list[tuple[int, float]]:
    """(step, value) of `metric`, ascending, out of the lines of a metrics file, up to the step `at_most`.

    A step that comes again (the run went back to a checkpoint) voids what came after it before.
    """
    found: list[tuple[int, float]] = []
    for line in lines:
        parsed = parse_metrics(line)
        value = None if parsed is None else metric_value(parsed[1], metric)
        if parsed is None or value is None:
            continue
        while found and found[-1][0] >= parsed[0]:
            found.pop()
        found.append((parsed[0], value))
    return [(step, value) for step, value in found if at_most is None or step <= at_most]


REWARD = "reward/mean"
SUPERVISED_LOSS, HELD_OUT_LOSS = "supervised/loss", "held_out/loss"
# How far a student is from its teacher.
TEACHER_KL = "distill/kl"
# How the trainer's figures of texts begin.
HELD_OUT = "held_out/"
OF_TEXTS = ("supervised/", HELD_OUT)
LESS_IS_BETTER = (SUPERVISED_LOSS, HELD_OUT_LOSS, TEACHER_KL, "loss", "mismatch_kl", "grad_norm", "truncated/mean")
# What is advised at most in place of a learning rate that broke a run.
USUAL_LR = 1e-3
# So many of the newest values of a figure are kept; the rules look at as many or fewer.
NUM_KEPT = 10
# A figure beyond this is as wrong as this one, and sums of it stay finite.
MAX_FIGURE = 1e300


class Sign(msgspec.Struct, frozen=True):
    """One rule of docs/learning.md that holds now: its figure, the limit, and for how many steps it has held."""

    name: str
    value: float
    limit: float
    num: int


@dataclass(frozen=True)
class Rule:
    """A figure is beyond its limit for `num` values in a row, or in their mean. `said` has the names of a `Sign`."""

    figure: str
    num: int
    limit: float
    said: str
    why: str
    advice: str

    def text(self, sign: Sign) -> str:
        """The sign in numbers."""
        return self.said.format(value=sign.value, limit=sign.limit, num=sign.num)


# In the order of importance. Each name is that of a sign.
RULES: Mapping[str, Rule] = {
    "reward_collapsed": Rule(
        REWARD,
        NUM_KEPT,
        0.5,
        "reward collapsed: mean {value:.3g} over 10 batches, was {limit:.3g} at best",
        "updates have destroyed what was learned",
        "{again}",
    ),
    "no_signal": Rule(
        "signal",
        5,
        0.0,
        "no signal: no rollout of {num} batches in a row has an advantage",
        "within each group all rewards are equal, so the examples are too easy, too hard, or solved",
        "look at prl runs samples {run_id}, then change the examples or the reward; a solved run can be ended",
    ),
    "no_gradient": Rule(
        "grad_norm",
        8,
        1e-6,
        "no gradient: grad_norm at most {value:.2g} for {num} updates",
        "the weights no longer change, as after a learning rate that was far too high, or without signal",
        "{again}",
    ),
    "mismatch": Rule(
        "mismatch_kl",
        5,
        0.1,
        "trainer and inference disagree: mean mismatch_kl {value:.3g} over 5 updates, limit {limit:g}",
        "rollouts are too stale, or the two compute different probabilities",
        "lower max_async_level or optim.lr, and compare dtype and sampling of inference with the trainer's",
    ),
    "entropy_exploded": Rule(
        "entropy",
        NUM_KEPT,
        3.0,
        "entropy exploded: mean {value:.3g} nats over 10 updates, {limit:.3g} is three times that of the first 10",
        "answers turn into noise",
        "{again}, or with a lower sampling.temperature",
    ),
    "entropy_gone": Rule(
        "entropy",
        NUM_KEPT,
        0.01,
        "entropy is gone: mean {value:.2g} nats over 10 updates, limit {limit:g}",
        "the policy gives one answer to each prompt, so nothing new is tried",
        "end the run if its reward is good enough; else {again}",
    ),
}


def sign_texts(signs: Iterable[Sign], run_id: str, step: int | None = None, lr: float | None = None) -> list[str]:
    """The signs of a run in one line each, in the order of importance: the number, the reason, and what to do.

    `step`: the newest version on disk from before them, None when that is gone. `lr`: the learning rate that was used.
    """
    lower = "" if lr is None else f" --set optim.lr={min(lr / 3, USUAL_LR):.2g}"
    again = "no version from before it is left: add the run again with a lower optim.lr"
    if step is not None:
        again = f"start again from before it: prl runs fork {run_id} --step {step}{lower}"
    return [
        f"{rule.text(sign)}: {rule.why}; {rule.advice.format(run_id=run_id, again=again)}"
        for rule, sign in _known(signs)
    ]


def short_texts(signs: Iterable[Sign]) -> list[str]:
    """The signs of a run in numbers, in the order of importance."""
    return [rule.text(sign) for rule, sign in _known(signs)]


def learned_nothing(signs: Iterable[Sign], step: int) -> str | None:
    """Tell that all updates of a run up to `step` were without signal or gradient, and why; None when one was not."""
    for rule, sign in _known(sign for sign in signs if sign.name in ("no_signal", "no_gradient")):
        if sign.num >= step > 0:
            return f"learned nothing in {step} of {step} updates: {rule.text(sign)}: {rule.why}"
    return None


def _known(signs: Iterable[Sign]) -> list[tuple[Rule, Sign]]:
    """A name without a rule, of another version, is left out."""
    known = {sign.name: sign for sign in signs}
    return [(rule, known[name]) for name, rule in RULES.items() if name in known]


class RewardTrend:
    """Mean of the newest `window` rewards, None while there are fewer, and the best such mean so far."""

    def __init__(self, window: int) -> None:
        self._newest = _Series(window)
        self.mean: float | None = None
        self.best = float("-inf")

    def feed(self, step: int, reward: float) -> None:
        """The batch of `step`; a step that comes again voids what came after it, but not the best."""
        self._newest.feed(step, reward)
        self.mean = self._newest.mean(self._newest.size)
        self.best = self.best if self.mean is None else max(self.best, self.mean)

    def has_collapsed(self, drop: float) -> bool:
        """True when the mean is lower than the best by more than the share `drop` of that."""
        return self.mean is not None and self.best - self.mean > drop * abs(self.best)

    @property
    def is_clear(self) -> bool:
        """True when the fall from the best is more than twice what the newest rewards differ by."""
        newest = self._newest.last(self._newest.size)
        return self.mean is not None and self.best - self.mean > 2 * max(abs(each - self.mean) for each in newest)


class Learning:
    """Feed it the lines of both metrics files, each file in its order."""

    def __init__(self) -> None:
        self._series = {rule.figure: _Series(NUM_KEPT) for rule in RULES.values()}
        self._reward = RewardTrend(RULES["reward_collapsed"].num)
        self._signs: dict[str, Sign] = {}
        self._since: dict[str, int] = {}

    def feed(self, step: int, figures: Mapping[str, float]) -> None:
        """One line. That texts of others become certain is no sign: they are what is to be learned."""
        if SUPERVISED_LOSS in figures and "mismatch_kl" not in figures:
            figures = {name: value for name, value in figures.items() if name != "entropy"}
        for name, series in self._series.items():
            if (value := figures.get(name)) is not None:
                series.feed(step, value)
        if REWARD in figures:
            self._reward.feed(step, figures[REWARD])
        for name, rule in RULES.items():
            if rule.figure in figures:
                sign = self._look(name, rule)
                if sign is None:
                    self._signs.pop(name, None)
                    self._since.pop(name, None)
                else:
                    self._signs[name] = sign

    def signs(self) -> list[Sign]:
        """Those that hold now, in the order of importance."""
        return [self._signs[name] for name in RULES if name in self._signs]

    def _look(self, name: str, rule: Rule) -> Sign | None:
        series = self._series[rule.figure]
        newest, mean = series.last(rule.num), series.mean(rule.num)
        if mean is None:
            return None
        value, limit = mean, rule.limit
        if name == "reward_collapsed":
            holds = self._reward.has_collapsed(limit) and self._reward.is_clear
            limit = self._reward.best
        elif name in ("no_signal", "no_gradient"):
            value = max(newest)
            holds = value <= limit
        elif name == "entropy_exploded":
            limit *= series.first_mean
            holds = series.is_past_first and value > max(limit, 1.0)
        else:
            holds = value < limit if name == "entropy_gone" else value > limit
        if not holds:
            return None
        began = min(self._since.get(name, series.step_of(rule.num)), series.step_of(1))
        self._since[name] = began
        return Sign(name, value, limit, series.step_of(1) - began + 1)


class _Series:
    """The first and the newest `size` values of a figure by step. A step that comes again voids those after it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._newest: deque[tuple[int, float]] = deque(maxlen=size)
        self._first: list[tuple[int, float]] = []

    def feed(self, step: int, value: float) -> None:
        value = max(-MAX_FIGURE, min(value, MAX_FIGURE))
        for kept in (self._newest, self._first):
            while kept and kept[-1][0] >= step:
                kept.pop()
        self._newest.append((step, value))
        if len(self._first) < self.size:
            self._first.append((step, value))

    def last(self, num: int) -> list[float]:
        return [value for _, value in self._newest][-num:]

    def mean(self, num: int) -> float | None:
        newest = self.last(num)
        return sum(newest) / num if len(newest) == num else None

    def step_of(self, place: int) -> int:
        """The step of the newest value for 1, of the one before for 2."""
        return self._newest[-place][0]

    @property
    def first_mean(self) -> float:
        return sum(value for _, value in self._first) / len(self._first)

    @property
    def is_past_first(self) -> bool:
        return self._newest[0][0] > self._first[-1][0]
