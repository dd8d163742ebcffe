"""Which daemon is handed which API key, by the variables that the configs name. No key itself is read here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from daemons.specs import ALERTS, INFERENCE, MONITORS, DaemonSpec
from prime_rl.configs.alerts import AlertsConfig
from prime_rl.configs.base import ConfigError, load_config, parse_toml
from prime_rl.contract.files import read_text
from prime_rl.contract.layout import OutputDir, RunDir, scan_runs
from prime_rl.utils.secrets import DEFAULT_VARIABLE, WANDB_VARIABLE


def keys_of(spec: DaemonSpec, output: OutputDir) -> list[str]:
    """The variables whose keys a daemon is handed: inference and each orchestrator its own, alerts its URLs.

    Monitors are handed that of W&B, also before a run asks for it: a daemon is handed keys only when it starts.
    """
    if spec.run_id:
        return [_variable(RunDir(output.path / spec.run_id).orch_toml, "client")]
    if spec.name == ALERTS:
        return _alerts_variables(output)
    if spec.name == MONITORS:
        return [WANDB_VARIABLE]
    return [inference_variable(output)] if spec.kind == INFERENCE else []


def all_keys(output: OutputDir) -> list[str]:
    """What the supervisor is handed, to hand it on."""
    runs, _ = scan_runs(output.path)
    variables = [_variable(run.orch_toml, "client") for run in runs]
    return sorted({inference_variable(output), *variables, *_alerts_variables(output), WANDB_VARIABLE})


def inference_variable(output: OutputDir) -> str:
    """The variable of the key that inference asks its clients for."""
    return _variable(output.component_config(INFERENCE))


def _alerts_variables(output: OutputDir) -> list[str]:
    try:
        return load_config(AlertsConfig, output.component_config(ALERTS)).variables()
    except ConfigError:  # most workspaces have none
        return []


def _variable(path: Path, *tables: str) -> str:
    try:
        value: Any = parse_toml(read_text(path) or "", str(path))
    except ConfigError:  # reported to the run's owner elsewhere
        return DEFAULT_VARIABLE
    for name in (*tables, "api_key_var"):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) and value else DEFAULT_VARIABLE
