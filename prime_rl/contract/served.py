"""Names under which inference serves a run, headers of its answers, and the values that sampling may have.

One table of values for configs, both engines, chats and the trainer.

vLLM raises a temperature below 0.01 to that without a word, and the trainer's distribution would not be the one that
was sampled from. Other values that are nearly zero are zero in float32: quotients by them are not finite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from prime_rl.contract.layout import RunDir, parse_step, step_name
from prime_rl.contract.status import read_mark

_ADAPTER = re.compile(r"(run_[A-Za-z0-9._-]{1,64})@v(0|[1-9][0-9]{0,9})")
# Headers of inference: the whole weights of an answer (a broadcast folder, or the base model), its `logprobs_mode`.
WEIGHTS_HEADER, LOGPROBS_HEADER = "x-weights", "x-logprobs-mode"
# Of requests: the run that asks, also while it samples from the base model.
RUN_HEADER = "x-run"
BASE_WEIGHTS = "base"
# Versions that people talk to are loaded under names of their own, in a slot that no run has: a run unloads its own
# versions when it likes, and loses no room to a chat.
CHAT_PREFIX = "chat/"
NUM_CHAT_ADAPTERS = 1
# What a run learns from is copied into its folder, and loaded beside its versions where slots are free.
TEACHER_PREFIX = "teacher/"
MAX_TEACHER_ADAPTERS = 2


def adapter_name(run_id: str, policy_version: int) -> str:
    """The name under which inference serves one published version. A new name a version: a name is never reused."""
    return f"{run_id}@v{policy_version}"


def parse_adapter_name(name: str) -> tuple[str, int] | None:
    """`run_a@v3` -> ("run_a", 3); anything else -> None."""
    match = _ADAPTER.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def served_run(name: str) -> str:
    """The run whose version or teacher an adapter's name says; "" for one of a chat, or another name."""
    return (parse_adapter_name(name.removeprefix(TEACHER_PREFIX)) or ("",))[0]


def chat_name(run_id: str, policy_version: int) -> str:
    """The name under which inference serves one version to a person."""
    return CHAT_PREFIX + adapter_name(run_id, policy_version)


def is_chat(name: str) -> bool:
    """True when the name is one of `chat_name`."""
    return name.startswith(CHAT_PREFIX)


def teacher_name(run_id: str, number: int) -> str:
    """The name under which inference serves one adapter that a run learns from."""
    return TEACHER_PREFIX + adapter_name(run_id, number)


def is_teacher(name: str) -> bool:
    """True when the name is one of `teacher_name`."""
    return name.startswith(TEACHER_PREFIX)


def kept_name(run: RunDir) -> str | None:
    """The name of the version of `run` that `prl serve` keeps; None when it keeps none. Never raises."""
    name = read_mark(run.served, empty="") or ""
    parsed = parse_adapter_name(name)
    return name if parsed and parsed[0] == run.run_id else None


def weights_name(run_id: str, policy_version: int) -> str:
    """The name at inference of the whole weights of one published version; version 0 is the base model."""
    return f"{run_id}/broadcast/{step_name(policy_version)}" if policy_version else BASE_WEIGHTS


def parse_weights_name(run_id: str, name: str) -> int | None:
    """The version of `run_id` that `weights_name` gave this name; None for what is not of this run."""
    if name == BASE_WEIGHTS:
        return 0
    folder, _, last = name.rpartition("/")
    version = parse_step(last)
    return version if version and folder == f"{run_id}/broadcast" else None


_MAX_INT = 2**31 - 1


class Range(NamedTuple):
    """From `lowest` to `highest`, and the values in `off`, which change nothing (or, of a temperature, are greedy)."""

    lowest: float
    highest: float
    off: tuple[float, ...] = ()

    def __str__(self) -> str:
        return "".join(f"{value}, or " for value in self.off) + f"{self.lowest} to {self.highest}"

    def problem(self, value: float) -> str | None:
        """The reason why `value` is refused, None when it is not. NaN is outside of every range."""
        fits = value in self.off or self.lowest <= value <= self.highest
        return None if fits else f"found {value}: must be {self}"

    def check(self, value: float) -> float:
        """Return `value`. Raises ValueError when it is refused."""
        if problem := self.problem(value):
            raise ValueError(problem)
        return value


# The likeliest tokens that an answer tells of a position, as in vLLM.
MAX_TOP_LOGPROBS = 20
TEMPERATURE = Range(0.01, 2, off=(0,))
RANGES: Mapping[str, Range] = {
    "n": Range(1, 256),
    "temperature": TEMPERATURE,
    "top_p": Range(1e-6, 1),
    "top_k": Range(1, _MAX_INT, off=(-1, 0)),
    "min_p": Range(1e-6, 1, off=(0,)),
    "repetition_penalty": Range(0.01, 2),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "min_tokens": Range(0, _MAX_INT),
    "max_tokens": Range(1, _MAX_INT),
    "max_completion_tokens": Range(1, _MAX_INT),
    "seed": Range(-(2**63), 2**63 - 1),
    "prompt_logprobs": Range(0, MAX_TOP_LOGPROBS),
}


# Texts that end a completion, and characters of one: each is looked for at each token.
MAX_STOPS, MAX_STOP_CHARS = 16, 256


def refusal(params: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first parameter outside of its range, and the reason. A text is outside: vLLM would take it as a number."""
    stop = params.get("stop")
    stops = stop if isinstance(stop, list) else [stop]
    if len(stops) > MAX_STOPS or any(isinstance(each, str) and len(each) > MAX_STOP_CHARS for each in stops):
        return "stop", f"stop: must be at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters"
    for name, limits in RANGES.items():
        value = params.get(name)
        if isinstance(value, str):
            return name, f"{name}: found a text: must be {limits}"
        if isinstance(value, int | float) and not isinstance(value, bool) and (problem := limits.problem(value)):
            return name, f"{name}: {problem}"
    return None
