"""How `prl runs show` and `prl runs samples` print what they are given. Reads no file."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import tomli_w
from rich.console import Group, RenderableType
from rich.text import Text

from daemons.commands.common import cell, make_table, short_time
from daemons.commands.views import run_json, state_text
from daemons.details import RunDetails
from prime_rl.contract.condition import utc
from prime_rl.contract.samples import Sample
from prime_rl.utils.text import clean_strings, clean_text, one_line, size_text

# Shown when present, beside the avg@K of evaluations; all others are in `--json` and in `prl-tui`.
_MAIN_FIGURES = (
    *("step", "reward/mean", "reward/std", "loss", "entropy", "mismatch_kl", "grad_norm", "lr", "tokens_per_s"),
    *("async_level/max", "time/step", "time/wait_for_rollouts", "completion_len/mean"),
)


def details_json(details: RunDetails) -> dict[str, Any]:
    """The payload of `prl runs show --json`."""
    return {
        "run": {**run_json(details.run), "log_tail": list(details.log_tail)},
        "config": details.config,
        "metrics": details.metrics,
        "errors": list(details.errors),
        "checkpoints": [asdict(each) for each in details.checkpoints],
        "disk": {
            "num_bytes": sum(details.disk.values()),
            "complete": details.disk_complete,
            "folders": details.disk,
        },
    }


def details_view(details: RunDetails) -> RenderableType:
    """What `prl runs show` prints; missing facts take no line."""
    parts: list[RenderableType] = [_facts(details)]
    for name, figures in details.metrics.items():
        evaluated = sorted(key for key in figures if key.startswith("eval/") and "/avg@" in key)
        shown = [f"{key} {figures[key]:.4g}" for key in (*_MAIN_FIGURES, *evaluated) if key in figures]
        more = len(figures) - len(shown)
        parts += _section(f"latest metrics of the {name}", [", ".join(shown) + (f" and {more} more" if more else "")])
    if details.checkpoints:
        now = time.time()
        rows = [
            [
                f"step {each.step}",
                size_text(each.num_bytes),
                "STABLE" if each.stable else "incomplete",
                short_time(now - each.saved_at) if each.saved_at else "",
            ]
            for each in details.checkpoints
        ]
        parts += [Text("\ncheckpoints", style="bold"), make_table(["", "size", "state", "age"], rows)]
    least = "" if details.disk_complete else "at least "
    folders = ", ".join(f"{name} {size_text(used)}" for name, used in details.disk.items() if used)
    parts += _section("disk", [f"{least}{size_text(sum(details.disk.values()))}" + (f": {folders}" if folders else "")])
    parts += _section("latest warnings and errors", details.errors)
    parts += _section("end of the log", details.log_tail if details.run.state in ("failed", "invalid") else ())
    if details.config is not None:
        parts += _section("config", clean_text(tomli_w.dumps(details.config)).splitlines())
    return Group(*parts)


def _facts(details: RunDetails) -> RenderableType:
    rows = []
    for name, value in run_json(details.run).items():
        shown: object = value
        if name in ("updated_at", "added_at", "stalled_since") and isinstance(value, float):
            shown = utc(value)
        if name == "state":
            shown = state_text(details.run)
        if shown is not None:
            rows.append([name, cell(shown, 2_000)])
    return make_table(["", ""], rows)


def _section(title: str, lines: tuple[str, ...] | list[str]) -> list[RenderableType]:
    text = [Text(f"  {line}") for line in lines]
    return [Text(f"\n{title}", style="bold"), *text] if text else []


def sample_view(sample: Sample) -> str:
    """What `prl runs samples` prints for one rollout. Text of the rollout is indented."""
    sample = clean_strings(sample)
    versions = ", ".join(map(str, sample.policy_versions))
    lines = [
        f"step {sample.step}  {one_line(sample.example_id)}  reward {sample.reward:.3f}  advantage "
        f"{sample.advantage:+.3f}  policy version {versions}  {sample.num_completion_tokens} tokens"
    ]
    for title, text in (("prompt", sample.prompt), ("completion", sample.completion)):
        lines += [f"  {title}:", *(f"    {line}" for line in text.splitlines() or [""])]
    return "\n".join(lines)
