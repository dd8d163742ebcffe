"""Rows of a JSONL file as an `Environment`: one turn each, scored by a built-in scorer or a function of the run's own.

Imported only in the process of such an environment (`child`). The function's file is code: where it is a file of a run
it must belong to the account of this process, so that whoever may write a run's folder runs nothing by it.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from prime_rl.configs.base import build
from prime_rl.configs.jsonl import JSONL, MAX_CODE_BYTES, JsonlArgs, Row, RowsArgs, last_number, read_rows
from prime_rl.contract.files import is_of_a_run, is_own, open_file
from prime_rl.orchestrator.envs.base import Example, Message, Outcome, Policy, Split
from prime_rl.utils.runtime import missing

# Two numbers are the same within this share.
TOLERANCE = 1e-6
FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


class JsonlEnvironment:
    """The rows of one file. Raises ValueError, and OSError, for files that are not as the arguments name them."""

    def __init__(self, args: dict[str, Any], seed: int) -> None:
        self.id = JSONL
        config = build(JsonlArgs, args, "args")
        rows = read_rows(Path(config.path), config)
        self._scored = Scored(config)
        self._rows = {row.id: row for row in rows}
        train, held = config.split([example_of(row) for row in rows])
        self._splits: dict[Split, Sequence[Example]] = {"train": train, "eval": held}

    def examples(self, split: Split) -> Sequence[Example]:
        """The examples of a split, in the order of the file."""
        return self._splits[split]

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        """One turn, and its score."""
        text = await policy.complete(example.messages)
        row = self._rows[example.id]
        if self._scored.scorer:
            return Outcome(float(self._scored.scorer(text, row.target)))
        return await self._scored.call(text, dict(row.fields))


class Scored:
    """The scoring of answers: by `scorer`, or where that is None by a function of the run's own.

    Raises ValueError, OSError and the errors of the function's file.
    """

    def __init__(self, config: RowsArgs) -> None:
        if config.scoring == "math" and (sentence := missing("math", "math_verify")):
            raise ValueError(f"scorer = 'math': {sentence}")
        self.scorer = SCORERS[config.scoring] if config.scoring else None
        self._code = config.code or ""
        self._function = load_function(Path(self._code), config.function) if self._code else None

    async def call(self, *args: Any) -> Outcome:
        """The outcome that the function gives `args`. Raises what it raises, with its line."""
        assert self._function is not None
        try:
            found = self._function(*args)
            if inspect.isawaitable(found):
                found = await found
        except Exception as error:
            lines = [
                frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self._code
            ]
            if lines:
                error.add_note(f" ({Path(self._code).name} line {lines[-1]})")
            raise
        return found if isinstance(found, Outcome) else Outcome(found)


def example_of(row: Row) -> Example:
    """A row as an example."""
    return Example(row.id, cast(list[Message], row.messages), row.answer)


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """The function `name` of the Python file at `path`, which is run. Raises ValueError, OSError, and its errors."""
    module = types.ModuleType(f"prl_reward_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(own_code(path), path, "exec"), vars(module))
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    return cast(Callable[..., Any], function)


def own_code(path: Path, limit: int = MAX_CODE_BYTES) -> bytes:
    """The content of a file. One of a run must belong to this account, and nobody else may write it: ValueError."""
    with os.fdopen(open_file(path), "rb") as file:
        if is_of_a_run(path) and not is_own(file.fileno()):
            raise ValueError(
                f"{path} belongs to another account, or others may write it: its code is not run; "
                "add the run as the workspace's account"
            )
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} has more than {limit} bytes")
    return data


def _number(text: str, target: float) -> bool:
    found = last_number(text)
    return found is not None and math.isclose(found, target, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _json(text: str, target: Any) -> bool:
    fenced = FENCED.findall(text)
    try:
        return _same(json.loads(fenced[-1] if fenced else text), target)
    except (ValueError, RecursionError):
        return False


def _same(found: Any, target: Any) -> bool:
    """Equal as JSON: 1.0 is 1, and true is not."""
    if isinstance(found, bool) or isinstance(target, bool):
        return found is target
    if isinstance(found, list) and isinstance(target, list):
        return len(found) == len(target) and all(map(_same, found, target))
    if isinstance(found, dict) and isinstance(target, dict):
        return found.keys() == target.keys() and all(_same(value, target[key]) for key, value in found.items())
    return bool(found == target)


def _math(text: str, target: str) -> bool:
    from math_verify import parse, verify  # sympy takes a second

    is_marked = "$" in target or "\\boxed" in target  # else it is LaTeX without the signs around it
    return bool(verify(parse(target if is_marked else f"${target}$"), parse(text)))


SCORERS: dict[str, Callable[[str, Any], bool]] = {
    "exact": lambda text, target: text.strip() == target,
    "contains": lambda text, target: target.casefold() in text.casefold(),
    "regex": lambda text, target: target.search(text) is not None,
    "number": _number,
    "json": _json,
    "math": _math,
}
