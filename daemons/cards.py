"""The model card of an export: what was trained, from what, how, and what came out. Pure but for installed versions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w

from daemons.results import RunResult
from prime_rl import __version__

# Rows of a table: what a reader takes in.
MAX_ROWS = 20
SPARKS = "▁▂▃▄▅▆▇█"
MAX_SPARKS = 60
# A base model on the hub; a folder has no link.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CardFacts:
    """What a card tells. `config` is the run's, without secrets and clean; `is_adapter` as it was written."""

    run_id: str
    step: int
    base_model: str
    is_adapter: bool
    config: Mapping[str, Any]
    result: RunResult


def model_card(facts: CardFacts) -> str:
    """A README.md in the form that the Hugging Face hub reads."""
    result, title = facts.result, f"{facts.run_id}, version {facts.step}"
    what = "A LoRA adapter" if facts.is_adapter else "A whole model"
    parts = [
        "\n".join(["---", *_metadata(facts), "---"]),
        f"# {title}",
        f"{what} trained from {_code(facts.base_model)} with reinforcement learning: {facts.step} updates, "
        f"{result.tokens:,} tokens.",
        "## Use",
        _fenced("python", _usage(facts)),
        "## Reward",
        *_reward(result),
        *(["## Evaluation", *_evaluation(result)] if result.evaluations else []),
        "## Config",
        _fenced("toml", tomli_w.dumps(_without_nulls(facts.config))),
        "## Made with",
        ", ".join(_versions()) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(facts: CardFacts) -> list[str]:
    """The lines of YAML that the hub reads."""
    on_hub = _HUB_NAME.fullmatch(facts.base_model) and not Path(facts.base_model).exists()
    return [
        *([f"base_model: {facts.base_model}"] if on_hub else []),
        f"library_name: {'peft' if facts.is_adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        f"tags: [reinforcement-learning, prl{', lora' if facts.is_adapter else ''}]",
    ]


def _usage(facts: CardFacts) -> str:
    if not facts.is_adapter:
        return (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_NAME")\n'
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_NAME")\n'
        )
    return (
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f"base = AutoModelForCausalLM.from_pretrained({facts.base_model!r})\n"
        'model = PeftModel.from_pretrained(base, "FOLDER_OR_NAME")\n'
    )


def _reward(result: RunResult) -> list[str]:
    if not result.rewards:
        return ["Not recorded."]
    steps = sorted(result.rewards)
    rows = [[str(step), f"{result.rewards[step]:.4g}"] for step in _spread(steps, MAX_ROWS)]
    line = _fenced("", sparkline([result.rewards[step] for step in steps]))
    return [
        f"Mean of each batch, from step {steps[0]} to {steps[-1]}:",
        line,
        _table(["step", "reward"], rows),
    ]


def _evaluation(result: RunResult) -> list[str]:
    names = sorted({name for figures in result.evaluations.values() for name in figures})
    rows = [
        [str(step), *(f"{figures[name]:.4g}" if (name in figures) else "" for name in names)]
        for step in _spread(sorted(result.evaluations), MAX_ROWS)
        for figures in [result.evaluations[step]]
    ]
    return [_table(["version", *names], rows)]


def sparkline(values: Sequence[float]) -> str:
    """The curve in one line of at most MAX_SPARKS blocks, each the mean of its part."""
    num = min(len(values), MAX_SPARKS)
    parts = [values[len(values) * at // num : len(values) * (at + 1) // num] for at in range(num)]
    means = [sum(part) / len(part) for part in parts]
    low, width = min(means), max(means) - min(means)
    return "".join(SPARKS[round((mean - low) / width * (len(SPARKS) - 1)) if width else 0] for mean in means)


def _spread(steps: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of them, evenly spread, with the first and the last."""
    if len(steps) <= limit:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (limit - 1))] for at in range(limit)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    # A name may come from an environment: without what ends a cell or begins markup.
    lines = [[re.sub(r"[|\\`<>\[\]]", "?", each) for each in head], ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    return f"`{text.replace('`', '?')}`"


def _fenced(language: str, text: str) -> str:
    """In a fence that is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _without_nulls(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _versions() -> list[str]:
    found = [f"prl {__version__}"]
    for package in ("torch", "transformers"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found
