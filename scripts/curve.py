"""The curve of a demo's run as a small chart for the documents, with the machine and the day on it.

    prl demo --recipe smollm2
    python -m scripts.curve outputs/demo run_sums env/arithmetic/exact_match --out docs/images/smollm2-sums.svg

Draws the mean reward of each update, and the metrics that are named. Run it on the machine that made the run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from benchmarks.frame import machine
from daemons.demo import REPORT, RunStory
from daemons.details import REWARD
from prime_rl.contract.layout import OutputDir

# Pixels. Colours are readable on white and on black.
WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 36, 628, 30, 236
COLOURS = ("#5c6bc0", "#ef6c00", "#26a69a")
INK = "#808080"
Y_TICK, X_TICK = 0.1, 5


def chart(records: Sequence[Mapping[str, float]], metrics: Sequence[str], caption: Sequence[str]) -> str:
    """An SVG with one line for each metric over `step`. `caption`: the lines of text below it."""
    last = int(max(record["step"] for record in records))
    num_ticks = max(1, math.ceil(max(record[name] for record in records for name in metrics) / Y_TICK - 1e-9))

    def x(step: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * step / last, 1)

    def y(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * value / (num_ticks * Y_TICK), 1)

    heights = [(tick * Y_TICK, y(tick * Y_TICK)) for tick in range(num_ticks + 1)]
    names = [(name, COLOURS[number % len(COLOURS)]) for number, name in enumerate(metrics)]
    points = {name: " ".join(f"{x(record['step'])},{y(record[name])}" for record in records) for name in metrics}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        *(f'<path d="M{LEFT} {at}H{RIGHT}" stroke="{INK}" stroke-opacity="0.3"/>' for _, at in heights),
        *(_text(f"{value:.1f}", LEFT - 26, at + 4) for value, at in heights),
        *(_text(str(step), x(step) - 6, BOTTOM + 16) for step in range(X_TICK, last + 1, X_TICK)),
        *(_text(name, LEFT + 160 * at, TOP - 12, colour) for at, (name, colour) in enumerate(names)),
        *(
            f'<polyline points="{points[name]}" fill="none" stroke="{colour}" stroke-width="2"/>'
            for name, colour in names
        ),
        *(_text(line, LEFT, BOTTOM + 38 + 16 * at) for at, line in enumerate(caption)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(text: str, x: float, y: float, colour: str = INK) -> str:
    return f'<text x="{x}" y="{y}" font-size="12" fill="{colour}">{escape(text)}</text>'


def curve(output: OutputDir, run_id: str, metrics: Sequence[str]) -> str:
    """The chart of a finished demo's run. Raises OSError, or KeyError for a run or metric that is not there."""
    story = RunStory(run_id)
    story.read_metrics(output.run(run_id))
    told = json.loads((output.path / REPORT).read_text(encoding="utf-8"))["runs"][run_id]
    day = datetime.datetime.fromtimestamp(story.metrics[-1]["time"], datetime.UTC).date()
    caption = [
        f"reward {told['reward_first']:.2f} in the first five updates, {told['reward_last']:.2f} in the last five",
        f"{day}, {machine()}",
    ]
    return chart(story.metrics, [REWARD, *metrics], caption)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("run_id")
    parser.add_argument("metrics", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(curve(OutputDir(args.output_dir), args.run_id, args.metrics), encoding="utf-8")


if __name__ == "__main__":
    main()
