"""Shell completion: ids of runs, names of daemons, states, configs. Reads names on disk only."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable

import typer

from daemons.actions import list_trash
from daemons.commands.common import choose_output_dir
from daemons.details import versions_of
from daemons.logs import JOB_LOG, SRUN_LOG
from daemons.specs import OPTIONAL, TRAINER, WHERE_NEEDED, saved_system
from daemons.workspace import replica_name
from prime_rl.configs.explain import KINDS, keys_of
from prime_rl.configs.orchestrator import LIVE_KEYS, BudgetConfig
from prime_rl.contract.layout import LayoutError, OutputDir, scan_runs
from prime_rl.contract.status import RunState

# A log in `logs/` that is not the first one of a daemon.
_OTHER_LOG = re.compile(rf"{JOB_LOG}|{SRUN_LOG}|[a-z0-9-]+-node[0-9]+")


def run_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Runs of the workspace on the command line."""
    return _starting(incomplete, _runs(_workspace(context)))


def versions(context: typer.Context, incomplete: str) -> list[str]:
    """Runs and the base model; after `run_a@` the versions of that run."""
    output = _workspace(context)
    run_id, at, _ = incomplete.partition("@")
    if not at:
        return _starting(incomplete, ["base", *_runs(output)])
    try:
        return _starting(incomplete, [version.name for version in versions_of(output.run(run_id))])
    except (OSError, LayoutError):
        return []


def try_models(context: typer.Context, incomplete: str) -> list[str]:
    """Models that `prl env try` takes."""
    return _starting(incomplete, ["echo", "base", *_runs(_workspace(context))])


def deleted_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Runs in the trash."""
    try:
        return _starting(incomplete, sorted({run_id for run_id, _ in list_trash(_workspace(context).path)}))
    except OSError:
        return []


def log_names(context: typer.Context, incomplete: str) -> list[str]:
    """Everything that has a log: daemons, then what else is in `logs/` (other nodes, Slurm's job), then runs."""
    output = _workspace(context)
    daemons = ["supervisor", TRAINER, *_servers(context), *_optional(context)]
    others = sorted(path.stem for path in output.logs.glob("*.log") if _OTHER_LOG.fullmatch(path.stem))
    return _starting(incomplete, [*daemons, *others, *_runs(output)])


def daemon_names(context: typer.Context, incomplete: str) -> list[str]:
    """Everything that can be restarted."""
    return _starting(incomplete, [TRAINER, *_servers(context), *_optional(context), *_runs(_workspace(context))])


def _servers(context: typer.Context) -> list[str]:
    replicas = saved_system(_workspace(context)).deployment.inference.replicas
    return [replica_name(number) for number in range(replicas)]


def _optional(context: typer.Context) -> list[str]:
    """Those that the system file asks for, and what only runs ask for."""
    output = _workspace(context)
    asked = [name for name in OPTIONAL if output.component_config(name).exists()]
    return [*asked, *(name for name in WHERE_NEEDED if name not in asked and output.daemon_status(name).exists())]


def states(incomplete: str) -> list[str]:
    """Complete the last state of a comma-separated list."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{state}" for state in _starting(last, [str(state) for state in RunState])]


def live_keys(incomplete: str) -> list[str]:
    """Keys that can be set while a run is in its slot."""
    names = [key for key in LIVE_KEYS if key != "budget"] + [f"budget.{name}" for name in BudgetConfig.model_fields]
    return _starting(incomplete, [f"{name}=" for name in names])


def config_kinds(incomplete: str) -> list[str]:
    """Kinds of config files."""
    return _starting(incomplete, KINDS)


def config_keys(context: typer.Context, incomplete: str) -> list[str]:
    """Keys of config files, one table at a time."""
    keys = keys_of(context.params.get("kind"))
    depth = incomplete.count(".")
    return _starting(incomplete, [key for key in keys if key.count(".") == depth])


def config_files(context: typer.Context, incomplete: str) -> list[str]:
    """TOML files and folders, and runs of the workspace."""
    paths = [path for path in glob.glob(f"{glob.escape(incomplete)}*") if path.endswith(".toml") or os.path.isdir(path)]
    names = [f"{path}/" if os.path.isdir(path) else path for path in sorted(paths)]
    return [*names, *_starting(incomplete, _runs(_workspace(context)))]


def _workspace(context: typer.Context) -> OutputDir:
    return OutputDir(choose_output_dir(context.params.get("output_dir")))


def _runs(output: OutputDir) -> list[str]:
    try:
        return [run.run_id for run in scan_runs(output.path)[0]]
    except OSError:
        return []


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
