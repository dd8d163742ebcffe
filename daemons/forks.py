"""Fork a run: a new run that starts from one version of another, with its config and some changes.

The new run counts its steps from 0 and its version 0 is the version that it was forked from. `[init] from` in its
`orch.toml` and the audit log keep where it came from; it no longer needs the other run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from daemons import audit
from daemons.adding import NewRun, candidates, checked, free_id, has_text, mode_like, place, trainer_limits
from daemons.errors import ActionError, in_one_line, one_line_errors
from daemons.init_adapter import check_start, has_optimizer, start_from
from daemons.trash import existing_run
from daemons.versions import find_version
from prime_rl.configs.base import ConfigError, build, load_toml, merge
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import OutputDir, RunDir

# Of a run's id, with room for "-fork".
_MAX_NAME_CHARS = 57


@dataclass(frozen=True)
class Fork:
    """`source` is the version that it starts from, such as "run_a@v20"; `added` is false when it was there already."""

    run_id: str
    source: str
    with_optimizer: bool
    added: bool


def fork_run(
    output_dir: Path,
    run_id: str,
    *,
    step: int | None = None,
    new_id: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    with_optimizer: bool = False,
    dry_run: bool = False,
    reason: str = "",
) -> Fork:
    """Add a run that starts from version `step` of `run_id`, by default its newest, with `overrides` to its config.

    `with_optimizer` takes the moments of the optimizer too, which only checkpoints have; the learning rate's schedule
    starts over. `new_id` defaults to the run's own id with "-fork". If the run `new_id` is this fork already, nothing
    changes. Raises ActionError.
    """
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"forking {run_id}"):
        run = existing_run(output, run_id)
        version = find_version(run, step, saved=with_optimizer)
        start = start_from(version, with_optimizer=with_optimizer)
        text, config = _config(output, run, version.name, overrides or {})
        check_start(output, start, config, trainer_limits(output.path))
        if with_optimizer:
            _check_moments(output, run, config, start.config.rank, start.config.alpha)
        if new_id is not None and _is_there(output.run(new_id), text, with_optimizer):
            return Fork(new_id, version.name, with_optimizer, added=False)
        names = candidates(new_id, f"{run_id[:_MAX_NAME_CHARS]}-fork")
        if dry_run:
            return Fork(free_id(output, names), version.name, with_optimizer, added=False)
        fork = place(output, names, NewRun(text, config, mode_like(run.orch_toml), start))
        detail = f"from {version.name}" + (" with its optimizer" if with_optimizer else "")
        audit.record(output, "fork", fork.run_id, reason=reason, detail=detail)
        return Fork(fork.run_id, version.name, with_optimizer, added=True)


def _config(
    output: OutputDir, run: RunDir, source: str, overrides: Mapping[str, Any]
) -> tuple[str, OrchestratorConfig]:
    """The new run's text and config. Raises ActionError when it would be invalid."""
    if "init" in overrides:
        raise ActionError("init.from of a fork is the version that it starts from: choose it with --step")
    try:
        data = load_toml(run.orch_toml)
        if isinstance(ckpt := data.get("ckpt"), dict):
            ckpt.pop("resume_step", None)
        data = {**merge(data, overrides), "init": {"from": source}}
        config = checked(output.path, data, run.orch_toml.name, None)
    except ConfigError as error:
        raise ActionError(in_one_line(f"the fork of {run.run_id} would be invalid: {error}")) from error
    return tomli_w.dumps(data), config


def _is_there(run: RunDir, text: str, with_optimizer: bool) -> bool:
    return has_text(run, text) and has_optimizer(run.init) == with_optimizer


def _check_moments(output: OutputDir, run: RunDir, config: OrchestratorConfig, rank: int, alpha: float) -> None:
    """Raises ActionError when moments of the run's optimizer mean nothing to the fork."""
    limits, lora = trainer_limits(output.path), config.model.lora
    own = (lora.rank or (limits and limits.max_rank) or rank, lora.alpha or (limits and limits.alpha) or alpha)
    try:
        before = build(OrchestratorConfig, load_toml(run.orch_toml), run.orch_toml.name).optim.type
    except ConfigError as error:
        raise ActionError(in_one_line(f"--with-optimizer: {error}")) from error
    if own != (rank, alpha):
        found, wanted = f"rank {rank} and alpha {alpha:g}", f"rank {own[0]} and alpha {own[1]:g}"
    elif config.optim.type != before:
        found, wanted = f"optim.type = {before!r}", f"optim.type = {config.optim.type!r}"
    else:
        return
    raise ActionError(
        f"--with-optimizer: {run.run_id} was trained with {found}, the fork has {wanted}: leave the option out, "
        "or keep these"
    )
