"""How a run ends before `max_steps` (`finished.txt`), seen from outside: end one, and whether one would end again.

The orchestrator decides about budget and stop rule itself; `halving` ends the losers of a sweep.
"""

from __future__ import annotations

import os

from daemons import audit
from daemons.errors import printable
from prime_rl.configs.base import ConfigError
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.early_stop import EarlyStop, series
from prime_rl.contract.files import read_end, read_text, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, list_steps
from prime_rl.contract.usage import budget_reason, used_in_life

# The end of the metrics file that the stop rule is judged by; an orchestrator reads as much.
MAX_HISTORY_BYTES = 64_000_000


def end_run(output: OutputDir, run: RunDir, action: str, reason: str, detail: str = "") -> bool:
    """End a run after a checkpoint; false when it has ended already (its first reason stays). Raises OSError."""
    try:
        write_atomic(run.finished, printable(reason), exclusive=True)
    except FileExistsError:
        return False
    audit.record(output, action, run.run_id, reason=reason, detail=detail)
    return True


def is_ended(run: RunDir) -> bool:
    """Whether the run has a `finished.txt`; a broken link counts."""
    return os.path.lexists(run.finished)


def ends_again(output: OutputDir, run: RunDir) -> str | None:
    """Why a run would end at once if it went on: its budget is used up, or its stop rule holds. Raises OSError."""
    try:
        config = load_run_config(run.orch_toml)
    except ConfigError:  # the trainer reports that
        return None
    if stopped := _stopped(run, config):
        return f"{stopped}: change or remove [stop] in its orch.toml first"
    life = read_text(run.life) or ""
    tokens, hours = used_in_life(output.run_usage(run.run_id), life)
    budget = config.budget
    used_up = budget_reason(tokens, hours, max_tokens=budget.max_tokens, max_hours=budget.max_hours)
    return f"{used_up}: raise [budget] in its orch.toml first" if used_up else None


def _stopped(run: RunDir, config: OrchestratorConfig) -> str | None:
    if config.stop is None:
        return None
    rule = EarlyStop(**config.stop.model_dump())
    published = max(list_steps(run.broadcast, stable_only=True), default=0)
    lines = read_end(run.orchestrator_metrics, MAX_HISTORY_BYTES).splitlines()
    for step, value in series(lines, rule.metric, at_most=published):
        rule.feed(step, value)
    return rule.reason
