"""`max_concurrent_runs = "auto"`: counted once, when a workspace is brought up, and the same from then on.

The number stands in the saved system file as if it had been set there, and a later `prl up` takes it from there, unless
something that decides it has changed. `prime_rl.trainer.fit` counts, in a process of its own, as it loads torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from daemons import torchrun
from daemons.launch import LaunchError, Say, check_model
from daemons.process import python_module, run_child
from daemons.specs import FIT_MODULE, SYSTEM, TRAINER, UP, module_of, saved_topology, settle_topology, without_nulls
from prime_rl.configs.base import ConfigError, load_config
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import OutputDir

# The fields that decide how many slots fit.
_DECIDES: dict[str, Any] = {
    "trainer": {"model", "seq_len", "max_tokens_per_micro_batch", "device"},
    "inference": {"engine": True, "model": True, "max_versions_per_run": True, "vllm": {"gpu_memory_utilization"}},
}


def settle_slots(system: SystemConfig, output: OutputDir, *, stop: Callable[[], bool], say: Say) -> SystemConfig | None:
    """`system` with a number of slots; None when `stop()` came first. Raises LaunchError."""
    if system.max_concurrent_runs != "auto":
        return system
    check_model(system.model.name)
    before = saved_topology(output)
    now, _ = settle_topology(before, os.environ, lambda line: None)
    earlier = _earlier(output)
    if earlier is not None and _question(earlier[0], before or {}) == _question(system, now):
        say(f"max_concurrent_runs = 'auto': {earlier[1]} slots, as counted before")
        return system.with_slots(earlier[1])
    say("max_concurrent_runs = 'auto': counting the slots that fit into memory (takes a few seconds)")
    num_slots = _count(system, now, stop)
    if num_slots is None:
        return None
    say(f"max_concurrent_runs = 'auto': {num_slots} slots")
    return system.with_slots(num_slots)


def _earlier(output: OutputDir) -> tuple[SystemConfig, int] | None:
    """What the last `prl up` was asked for, and the slots that it counted; None if it counted none."""
    try:
        asked = load_config(SystemConfig, output.component_config(UP))
        held = load_config(SystemConfig, output.component_config(SYSTEM))
    except ConfigError:  # never started, or of another version
        return None
    is_counted = asked.max_concurrent_runs == "auto" and held.max_concurrent_runs != "auto"
    return (asked, held.inference.max_concurrent_runs) if is_counted else None


def _question(system: SystemConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    return {**system.model_dump(mode="json", include=_DECIDES), "gpus": _gpus(environ)}


def _gpus(environ: Mapping[str, str]) -> str:
    """The trainer's ranks, for `prl fit --gpus`."""
    return torchrun.num_ranks(environ) if module_of(TRAINER, environ) == torchrun.__name__ else "1"


def _count(system: SystemConfig, environ: Mapping[str, str], stop: Callable[[], bool]) -> int | None:
    with tempfile.TemporaryDirectory() as name:
        file, out, errors = (Path(name) / each for each in ("system.toml", "out", "errors"))
        # What was left to defaults stays so: inference gets its number of slots only now.
        file.write_text(tomli_w.dumps(without_nulls(system.model_dump(mode="json", exclude_unset=True))))
        argv = python_module(FIT_MODULE, "@", str(file), "--gpus", _gpus(environ), "--json")
        # A model of the hub may be asked for its config.json, which the trainer will load anyway.
        env = {"HF_HUB_OFFLINE": "0", **os.environ, **environ}
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            exit_code = run_child(argv, stop, env=env, stdout=stdout, stderr=stderr)
        if exit_code is None:
            return None
        if exit_code:
            said = errors.read_text(errors="replace").strip().splitlines() or [f"prl fit exited with code {exit_code}"]
            raise LaunchError(f"{said[-1].removeprefix('prl fit: ')}; or set max_concurrent_runs to a number")
        return int(json.loads(out.read_text())["runs"])
