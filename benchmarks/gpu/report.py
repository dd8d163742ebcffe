"""What is asked of a card, and how the figures are shown beside it. Pure, and without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

BAR_WIDTH = 50
REPLAYED = {"difference": "a run alone / with others", "reached": "as published / trained again"}
MODELS = {"pass06": "Qwen3-0.6B", "pass4": "Qwen3-4B"}
# The entries of a pass whose rates are drawn, by their runs.
BY_RUNS = {"runs_1": 1, "runs_8": 8, "runs_64": 64}


class Asked(NamedTuple):
    """A figure of one entry of a stage, and the range in which it has to be."""

    stage: str
    entry: str
    figure: str
    what: str
    low: float = -math.inf
    high: float = math.inf
    needs_gpu: bool = False

    @property
    def range(self) -> str:
        """The range in words."""
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"{shown(self.low)} to {shown(self.high)}"
        return f"at least {shown(self.low)}" if math.isfinite(self.low) else f"at most {shown(self.high)}"


def _of_passes(stage: str) -> list[Asked]:
    model = MODELS[stage]
    return [
        Asked(stage, "ratios", "vs_one_peft", f"{model}: 8 runs / one peft, time", high=0.7),
        Asked(stage, "ratios", "vs_peft_in_turn", f"{model}: 8 runs / 8 peft in turn", high=0.35),
        Asked(stage, "ratios", "runs_64_vs_8", f"{model}: 64 runs / 8 runs, time", high=1.1),
        Asked(stage, "fit_runs_8", "reserved_vs_fit", f"{model}: peak reserved / prl fit", 0.95, 1.05, needs_gpu=True),
        Asked(stage, "inside", "adapters_share", f"{model}: adapters' share of a pass", high=0.15),
        Asked(stage, "inside", "host_waits", f"{model}: host waits in a pass", high=0, needs_gpu=True),
    ]


ASKED = [
    Asked("correct", "isolation_float32", "difference", "a run alone / with others, float32", high=1e-4),
    *(Asked("selfcheck", "float32", key, f"selfcheck, float32: {what}", high=1e-4) for key, what in REPLAYED.items()),
    Asked("pass06", "one_row", "tokens_per_s", "Qwen3-0.6B: 1 x 16,384, tokens/s", low=20_000),
    Asked("pass06", "runs_8", "tokens_per_s", "Qwen3-0.6B: 8 runs, 32 x 512, tokens/s", low=60_000),
    *_of_passes("pass06"),
    Asked("pass4", "runs_8", "matmul_share", "Qwen3-4B: 8 runs, 32 x 512, of the rate", low=0.4),
    *_of_passes("pass4"),
    Asked("engine", "mismatch", "mismatch_kl", "engine: mismatch_kl with the trainer", high=1e-3),
    Asked("engine", "rows_256", "tokens_per_s", "engine: 0.6B, 256 rows, tokens/s", low=20_000),
]


@dataclass(frozen=True)
class Verdict:
    """`value` is None where it was not measured, `met` where nothing is judged: what is tiny, or needs a GPU there."""

    asked: Asked
    value: float | None
    met: bool | None

    @property
    def word(self) -> str:
        """The last column of the table."""
        if self.value is None:
            return "needs a GPU" if self.met is None else "missing"
        return {True: "yes", False: "NO", None: "not judged"}[self.met]


def verdicts(stages: Mapping[str, Mapping[str, Any]], *, tiny: bool) -> list[Verdict]:
    """Of all that is asked of `stages`: result files, by stage."""
    found = []
    for asked in ASKED:
        if asked.stage in stages:
            value = stages[asked.stage]["entries"].get(asked.entry, {}).get(asked.figure)
            is_judged = not tiny or (value is None and not asked.needs_gpu)
            is_met = value is not None and asked.low <= value <= asked.high
            found.append(Verdict(asked, value, is_met if is_judged else None))
    return found


def table(found: Iterable[Verdict]) -> Table:
    """One line for each figure that is asked for."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("figure", "measured", "asked", "met"):
        made.add_column(column, justify="right" if column == "measured" else "left", no_wrap=column != "figure")
    for each in found:
        style = {True: "green", False: "bold red", None: ""}[each.met]
        made.add_row(each.asked.what, shown(each.value), each.asked.range, Text(each.word, style))
    return made


def plot(stages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Bars of the tokens/s of passes by number of runs, on one scale: the longest has BAR_WIDTH cells."""
    rates = {
        (stage, runs): stages[stage]["entries"][entry]["tokens_per_s"]
        for stage in MODELS
        for entry, runs in BY_RUNS.items()
        if stage in stages and entry in stages[stage]["entries"]
    }
    lines = []
    for stage, model in MODELS.items():
        bars = {runs: rate for (of, runs), rate in rates.items() if of == stage}
        lines += [f"{model}: tokens/s by runs"] * bool(bars)
        for runs, rate in bars.items():
            lines.append(f"{runs:>4} {'█' * max(1, round(BAR_WIDTH * rate / max(rates.values())))} {rate:,.0f}")
    return lines


def shown(value: float | None) -> str:
    """Three digits, or a whole number with its thousands."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == 0 or abs(value) >= 1000 else f"{value:.3g}"
