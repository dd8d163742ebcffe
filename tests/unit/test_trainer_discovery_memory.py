"""Sequences of file operations: a Discovery that remembers decides as one without a memory."""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prime_rl.contract.layout import RunDir
from prime_rl.trainer.runs.discovery import QUIET_S, Findings
from tests.budgets import examples
from tests.discovery_support import SETTLE_S, Look, place, run_of, text_of

RUN_IDS = ["run_a", "run_b"]
OPERATIONS = [
    "mkdir",
    "control",
    "place",
    "write",
    "bad",
    "touch",
    "unlink",
    "evict",
    "readmit",
    "pause",
    "go on",
    "rmtree",
    "replace",
]


def operate(workspace: Path, run: RunDir, operation: str, number: int) -> list[Path]:
    """Do it as far as it can be done; the paths that changed."""
    config, has_control = run.control / "orch.toml", run.control.is_dir()
    if operation == "mkdir":
        run.path.mkdir(exist_ok=True)
        return [run.path]
    if operation == "control" and run.path.is_dir():
        run.control.mkdir(exist_ok=True)
        return [run.control]
    if operation in ("place", "write", "bad") and has_control:
        if operation == "place":
            place(run, text_of(number))
        else:
            config.write_text(text_of(number) if operation == "write" else f"seed = {number}")
        return [config]
    if operation == "touch" and config.exists():
        os.utime(config)
        return [config]
    if operation == "unlink":
        config.unlink(missing_ok=True)
        return [config]
    if operation == "evict" and has_control:
        run.evicted.write_text("no")
        return [run.evicted]
    if operation == "readmit":
        run.evicted.unlink(missing_ok=True)
        return [run.evicted]
    if operation == "pause" and has_control:
        run.paused.write_text("later")
        return [run.paused]
    if operation == "go on":
        run.paused.unlink(missing_ok=True)
        return [run.paused]
    if operation == "rmtree":
        shutil.rmtree(run.path, ignore_errors=True)
        return [run.evicted, config, run.control, run.path]
    if operation == "replace" and run.path.is_dir():
        run.path.rename(workspace / f"aside_{number}_{time.monotonic_ns()}")
        run_of(workspace, run.run_id, text_of(number))
        return [run.path]
    return []


def verdicts(found: Findings) -> dict[str, object]:
    told: dict[str, object] = {each.run.run_id: each.config.seed for each in found.candidates}
    for word in ("invalid", "evicted", "paused", "failed", "finished", "unconfigured", "settling"):
        told |= dict.fromkeys(getattr(found, word), word)
    return told | found.refused


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(RUN_IDS), st.sampled_from(OPERATIONS), st.integers(1, 3), st.booleans()), max_size=25
    ),
    is_lossy=st.booleans(),
)
def test_memory_changes_no_verdict(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int, bool]], is_lossy: bool
) -> None:
    workspace = tmp_path_factory.mktemp("workspace")
    look = Look(workspace)
    watched = set(look.all().folders)
    hints: set[Path] = set()
    for run_id, operation, number, looks in steps:
        changed = operate(workspace, RunDir(workspace / run_id), operation, number)
        if not is_lossy:
            hints |= {folder for path in changed for folder in (path, path.parent)} & watched
        if looks:
            look.now += QUIET_S
            found = look(*hints)
            # A folder that is new to the watcher gets a hint.
            hints, watched = set(found.folders) - watched, set(found.folders)
    while hints:
        found = look(*hints)
        hints, watched = set(found.folders) - watched, set(found.folders)
    found = look.all() if is_lossy else look()
    if found.due < math.inf:
        look.later(QUIET_S)
        found = look.later(SETTLE_S)
    assert verdicts(found) == verdicts(Look(workspace, settle_s=0).all())
