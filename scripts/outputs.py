"""docs/json.md: what every command prints with `--json`, from the classes that are printed.

The keys of an output stand in `OUTPUTS`, with the class of each value; tests/test_reference.py holds them to what the
commands print.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from daemons.adding import Fork
from daemons.commands.config import Origin
from daemons.commands.results import Use
from daemons.details import CheckpointView, Difference
from daemons.doctor import Check
from daemons.exports import Export
from daemons.kept_texts import TextExport
from daemons.machine import DiskView
from daemons.quiet import OpenIncident, Silence
from daemons.submit import Planned
from daemons.workspace import DaemonView, RefusedView, RunView
from prime_rl.configs.explain import FieldFacts
from prime_rl.contract.notes import SweepPlan
from prime_rl.contract.samples import EvalResult, Sample

Keys = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class And:
    """A class with further keys beside its own."""

    model: type
    more: Keys


RUN_VIEW = And(RunView, {"troubles": list[str]})
SILENCE = And(Silence, {"name": str})
REPLICA: Keys = {
    "replica": int,
    "state": str,
    "base_url": str,
    "num_running": int,
    "num_waiting": int,
    "tokens_per_s": float,
    "kv_use": float | None,
    "adapters": list[str],
}
NODE: Keys = {
    **dict.fromkeys(("rank", "pid", "epoch", "iteration", "phase"), int),
    **dict.fromkeys(("host", "address", "health", "state", "phase_name"), str),
    "arrived": bool,
    "phase_s": float,
    "silent_s": float,
    "stalled_s": float | None,
    "loop": int | None,
    "progress": int | None,
    "waiting_on": str | None,
    "reason": str | None,
}
TURN: Keys = {"role": str, "content": str}
PROBLEM: Keys = {
    "file": str,
    "line": int | None,
    "key": str | None,
    "found": Any,
    "allowed": str,
    "message": str,
}
STANDING: Keys = {
    "environment": str,
    "metric": str,
    "step": int,
    "place": int | None,
    "name": str,
    "value": float | None,
    "standard_error": float | None,
    "num_runs": int,
    "runs": [{"run_id": str, "step": int | None, "value": float | None}],
}
FIT_SIZES = ("peak", "weights", "adapters", "optimizer", "activations", "head", "backward", "offloaded", "usable")
OUTPUTS: dict[str, Keys] = {
    "prl status": {
        "output_dir": str,
        "supervisor_alive": bool,
        "daemons": [DaemonView],
        "slots": [{"run_idx": int, "run_id": str | None}],
        "runs": [RUN_VIEW],
        "refused": [RefusedView],
        "disk": And(DiskView, {"house_bytes": int, "house_complete": bool}),
        "bottleneck": str | None,
        "clocks": list[str],
        "inference": [REPLICA],
    },
    "prl runs list": {"runs": [RUN_VIEW]},
    "prl runs show ID": {
        "run": And(RunView, {"troubles": list[str], "log_tail": list[str]}),
        "config": dict | None,
        "metrics": {"trainer": dict[str, float], "orchestrator": dict[str, float]},
        "errors": list[str],
        "data_changed": list[str],
        "changes": list[str],
        "checkpoints": [CheckpointView],
        "disk": {"num_bytes": int, "complete": bool, "folders": dict[str, int]},
    },
    "prl runs samples ID": {"samples": [Sample]},
    "prl runs samples ID --export FILE": {"export": TextExport},
    "prl runs sessions": {
        "sessions": [
            {
                **{"run_id": str, "id": str, "example": str, "since": float},
                **{"num_calls": int, "used_at": float, "waiting_on": str},
            }
        ],
        "num_more": int,
    },
    "prl runs endpoint ID": {"url": str | None, "key": str},
    "prl runs validate FILE": {
        "file": str,
        "valid": bool,
        "problems": [PROBLEM],
        "warnings": [PROBLEM],
        "trainer": {"model": str, "seq_len": int},
    },
    "prl env try FILE": {
        "file": str,
        "model": str,
        "envs": [
            {
                **dict.fromkeys(("env", "id"), str),
                **dict.fromkeys(("num_train", "num_eval"), int),
                "load_s": float,
                "rollouts": [
                    {
                        "example_id": str,
                        "prompt": [TURN],
                        "prompt_text": str | None,
                        "prompt_tokens": list[int] | None,
                        "turns": [TURN],
                        "branches": [
                            {
                                "num_tokens": int | None,
                                **dict.fromkeys(("num_shared", "shared_with"), int),
                                "turns": [{**TURN, "num_tokens": int | None, "reward": float | None}],
                            }
                        ],
                        "answer_tokens": list[int] | None,
                        "time_s": float,
                        "reward": float | None,
                        "rewards": dict[str, float],
                        "metrics": dict[str, float],
                        "error": str | None,
                        "output": str,
                    }
                ],
            }
        ],
    },
    "prl runs fork ID": {"fork": Fork, "dry_run": bool},
    "prl runs sweep FILE": {"plan": SweepPlan, "added": list[str], "dry_run": bool},
    "prl runs export ID": {"export": And(Export, {"dry_run": bool})},
    "prl runs best": {
        "metric": str,
        "by": str,
        "standings": [STANDING],
        "notes": list[str],
    },
    "prl runs diff A B": {"runs": list[str], "config": [Difference], "result": [Difference]},
    "prl eval TARGET": {"results": [EvalResult], "samples": str, "interrupted": bool},
    "prl serve": {"served": list[str], "urls": list[str]},
    "prl usage": {"by": str, "rows": [Use], "total": Use},
    "prl up --dry-run": {
        "engine": str,
        "nodes": list[str],
        "submit": list[str],
        "script": str,
        "daemons": [Planned],
    },
    "prl fit": {
        **dict.fromkeys(("model", "dtype"), str),
        **dict.fromkeys(("tokens", "seq_len", "runs"), int),
        "rank": int | None,
        **dict.fromkeys([f"{name}_gib" for name in FIT_SIZES], float),
        "activation_checkpointing": bool | Literal["mlp"],
        **dict.fromkeys(("max_tokens_per_micro_batch", "max_concurrent_runs"), int),
        "gpu_memory_utilization": float | None,
        "kv_cache_tokens": int | None,
    },
    "prl scale inference N": {"replicas": int, "before": int, "supervisor_alive": bool},
    "prl doctor": {"ok": bool, "checks": [Check]},
    "prl alerts": {
        "open": [And(OpenIncident, {"name": str, "acknowledged": SILENCE, "muted": SILENCE})],
        "said": [SILENCE],
    },
    "prl alerts --test": {"sent": [{"target": str, "error": str | None}]},
    "prl config show FILE": {"file": str, "kind": str, "values": [Origin]},
    "prl config explain KEY": {"fields": [FieldFacts]},
    "prl config examples": {"folder": str, "examples": [{"file": str, "text": str}]},
    "prl multinode status": {
        "group": {"state": str, "reason": str | None, "exit_code": int | None},
        "waited_for": list[int],
        "nodes": [NODE],
    },
}
HEAD = """\
# JSON outputs

What commands print with `--json`: one object with `version` (1) and the keys below. Within a version keys are
added, never changed. Times are Unix seconds. Text is clean of everything that a terminal obeys; configs and rollouts
are as they are. Where an object stands in a table, null may stand too when there is none.

What the figures of `prl fit` mean is in [training.md](training.md). `python -m benchmarks.selfcheck --json` has
keys of its own ([durability.md](durability.md#checking-it-on-your-own-runs)). `prl config schema KIND` prints a JSON
schema.
"""
_WORDS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    Path: "text",
    Any: "any",
    type(None): "null",
}


def outputs_page() -> str:
    """The whole text of docs/json.md."""
    models = sorted(set(_models(list(OUTPUTS.values()))), key=lambda each: each.__name__)
    sections = [
        HEAD,
        *(f"## {command}\n\n{_table(keys)}" for command, keys in OUTPUTS.items()),
        "## Objects\n\nThe classes that stand in the tables above.\n",
        *(f"### {model.__name__}\n\n{_about(model)}\n\n{_table(fields_of(model))}" for model in models),
    ]
    return "\n".join(sections)


def fields_of(model: type) -> Keys:
    """The keys of a printed class, with their types."""
    hints = typing.get_type_hints(model)
    if issubclass(model, msgspec.Struct):
        return {name: hints[name] for name in model.__struct_fields__}
    return {field.name: hints[field.name] for field in dataclasses.fields(model)}


def leaves_out(model: type) -> bool:
    return issubclass(model, msgspec.Struct) and model.__struct_config__.omit_defaults


def is_model(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct))


def _table(keys: Keys) -> str:
    rows = [f"| `{name}` | {_type(kind)} |" for name, kind in keys.items()]
    return "\n".join(["| key | type |", "|---|---|", *rows, ""])


def _about(model: type) -> str:
    """The docstring, with what it tells of each attribute as a list."""
    text, _, attributes = (inspect.getdoc(model) or "").partition("\n\nAttributes:\n")
    lines = re.sub(r"\n {8}\s*", " ", attributes).splitlines()
    left_out = ["Keys that have their default are left out."] if leaves_out(model) else []
    return "\n\n".join([text, *left_out, *(["\n".join(f"- {line.strip()}" for line in lines)] if lines else [])])


def _models(kind: Any) -> Iterator[type]:
    """The printed classes in a type, and those in them."""
    if is_model(kind):
        yield kind
        yield from _models(list(fields_of(kind).values()))
    elif isinstance(kind, And):
        yield from _models([kind.model, *kind.more.values()])
    elif isinstance(kind, (list, Mapping)):
        for each in kind.values() if isinstance(kind, Mapping) else kind:
            yield from _models(each)
    else:
        yield from _models(list(typing.get_args(kind)))


def _type(kind: Any) -> str:
    if isinstance(kind, list):
        return f"list of {_type(kind[0])}"
    if isinstance(kind, And):
        return f"{_type(kind.model)} with {_type(kind.more)}"
    if isinstance(kind, Mapping):
        return "{" + ", ".join(f"`{name}`: {_type(inner)}" for name, inner in kind.items()) + "}"
    if is_model(kind):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if isinstance(kind, typing.NewType):
        return _type(kind.__supertype__)
    return _plain_type(kind)


def _plain_type(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type, inner))
    if origin in (list, tuple):
        return f"list of {_type(inner[0])}"
    if origin is not None:
        return f"object of {_type(inner[-1])}" if inner[-1] is not Any else "object"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(f"`{each.value}`" for each in kind)
    return _WORDS[kind]
