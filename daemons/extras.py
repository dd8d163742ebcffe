"""Refuse what this installation cannot do, before anything is started: the extra that is missing, in one line."""

from __future__ import annotations

from daemons.errors import ActionError
from prime_rl.configs.system import SystemConfig
from prime_rl.utils import extras


def need_daemons(system: SystemConfig) -> None:
    """What the daemons of a workspace need. Raises ActionError."""
    need_cpu()
    if system.inference.engine == "vllm":
        need("gpu", "vllm")


def need_cpu() -> None:
    """What trainer, inference, orchestrators and the tools for models need. Raises ActionError."""
    need("cpu", *extras.CPU)


def need(extra: str, *modules: str) -> None:
    """Raises ActionError when a module of the extra is not installed."""
    if sentence := extras.missing(extra, *modules):
        raise ActionError(sentence)
