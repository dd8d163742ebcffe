"""The rollouts that a run keeps as texts to learn: `prl runs samples ID --export FILE`, which is rejection sampling.

Each line is one that `[[data]]` takes: the messages of a branch, and its tools.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemons.errors import ActionError, WrongUseError, expand_home
from daemons.trash import acting_on
from prime_rl.configs.admitted import config_in_effect
from prime_rl.configs.data import MAX_LINE_BYTES, DataConfig
from prime_rl.contract.files import write_atomic
from prime_rl.contract.samples import KeptSample, read_kept
from prime_rl.gateway.texts import text_of

Line = dict[str, Any]
Branches = Sequence[KeptSample]


@dataclass(frozen=True)
class Wanted:
    """The rollouts that are written: with a reward of `min_reward` at least, of the steps `first` to `last`.

    `best_of`: of each example that with the highest reward, of several the first. `truncated`: also those with an
    answer that was cut, or ended by a stop of the run.
    """

    min_reward: float | None = None
    first: int = 0
    last: float = math.inf
    best_of: bool = False
    truncated: bool = False


@dataclass(frozen=True)
class TextExport:
    """What was written. `left_out`: rollouts that are not in the file, by the reason."""

    path: str
    num_texts: int
    num_rollouts: int
    num_kept: int
    num_examples: int
    num_examples_kept: int
    left_out: Mapping[str, int]


def export_texts(output_dir: Path, run_id: str, out: Path, wanted: Wanted, *, force: bool = False) -> TextExport:
    """Write the kept rollouts of a run that are `wanted` into the new file `out`. Raises ActionError."""
    if wanted.min_reward is not None and math.isnan(wanted.min_reward):
        raise WrongUseError("invalid --min-reward nan: expected a number")
    with acting_on(output_dir, run_id, "exporting the rollouts of") as (output, run):
        config, kept = config_in_effect(run), read_kept(run.samples)
        if config.kind == "sft":
            raise ActionError(f"{run_id} learns texts: it has no rollouts to export")
        if not kept:
            off = "samples.per_step is 0, so none are kept" if not config.samples.per_step else "each batch adds some"
            raise ActionError(f"{run_id} has no rollouts: {off}")
        kept = [each for each in kept if wanted.first <= each[0].step <= wanted.last]
        chosen, left_out = choose(kept, wanted)
        lines = list(dict.fromkeys(json.dumps(line) for branches in chosen for line in lines_of(branches)))
        if not lines:
            why = in_words(left_out) or "none is of these steps"
            raise ActionError(f"{run_id}: none of its {len(kept)} kept rollouts qualifies ({why}): nothing was written")
        path = expand_home(out).absolute()
        if path.parent.resolve().is_relative_to(output.path.resolve()):
            raise ActionError(f"{out} is inside the workspace: choose a file outside of it")
        try:
            write_atomic(path, "".join(f"{line}\n" for line in lines), exclusive=not force)
        except FileExistsError:
            raise ActionError(f"{out} exists already: choose another file, or replace it with --force") from None
        some, every = (len(set(map(_example, each))) for each in (chosen, kept))
        return TextExport(str(path), len(lines), len(chosen), len(kept), some, every, left_out)


def choose(kept: Sequence[Branches], wanted: Wanted) -> tuple[list[Branches], Mapping[str, int]]:
    """The rollouts that are `wanted`, in their order, and why others are not."""
    reasons = [_why_not(branches, wanted) for branches in kept]
    chosen = [branches for branches, why in zip(kept, reasons, strict=True) if not why]
    left_out = Counter(why for why in reasons if why)
    if wanted.best_of:
        best: dict[tuple[str, str], Branches] = {}
        for branches in sorted(chosen, key=lambda each: -each[0].reward):
            best.setdefault(_example(branches), branches)
        left_out["not the best of their example"] = len(chosen) - len(best)
        chosen = [branches for branches in chosen if best[_example(branches)] is branches]
    return chosen, dict(+left_out)


def _why_not(branches: Branches, wanted: Wanted) -> str:
    if wanted.min_reward is not None and not branches[0].reward >= wanted.min_reward:
        return f"with a reward below {wanted.min_reward:g}"
    if not all(each.messages for each in branches):
        return "not kept as messages (docs/sft.md)"
    if not (wanted.truncated or all(each.ended for each in branches)):
        return "cut, or ended by a stop (--truncated takes them)"
    lines = lines_of(branches)
    said = [message for line in lines for message in line["messages"] if message["role"] == "assistant"]
    if "\N{REPLACEMENT CHARACTER}" in json.dumps(said, ensure_ascii=False):
        return "with bytes that are no text"
    return "" if lines else "without what can be learned"


def lines_of(branches: Branches) -> list[Line]:
    """A line for each branch with which no other begins; [] where one could not be learned."""
    lines = [{"messages": each.messages, **({"tools": each.tools} if each.tools else {})} for each in branches]
    try:
        for line in lines:
            text_of(0, line, DataConfig(path="-"))
    except ValueError:
        return []
    said = [line["messages"] for line in lines]
    begins = [any(len(o) > len(one) and o[: len(one)] == one for o in said) for one in said]
    whole = [line for line, is_part in zip(lines, begins, strict=True) if not is_part]
    return whole if all(len(json.dumps(line)) <= MAX_LINE_BYTES for line in whole) else []


def _example(branches: Branches) -> tuple[str, str]:
    return branches[0].env, branches[0].example_id


def in_words(left_out: Mapping[str, int]) -> str:
    """Such as "3 with a reward below 0.5, 1 without what can be learned"."""
    return ", ".join(f"{num} {why}" for why, num in left_out.items())
