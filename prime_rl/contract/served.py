"""The names under which inference serves what a run has published, and the headers that name an answer's source."""

from __future__ import annotations

import re

from prime_rl.contract.layout import parse_step, step_name

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


def adapter_name(run_id: str, policy_version: int) -> str:
    """The name under which inference serves one published version. A new name a version: a name is never reused."""
    return f"{run_id}@v{policy_version}"


def parse_adapter_name(name: str) -> tuple[str, int] | None:
    """`run_a@v3` -> ("run_a", 3); anything else -> None."""
    match = _ADAPTER.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def chat_name(run_id: str, policy_version: int) -> str:
    """The name under which inference serves one version to a person."""
    return CHAT_PREFIX + adapter_name(run_id, policy_version)


def is_chat(name: str) -> bool:
    """True when the name is one of `chat_name`."""
    return name.startswith(CHAT_PREFIX)


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
