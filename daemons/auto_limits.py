"""`max_concurrent_runs = "auto"`, and vLLM's share of a GPU that the trainer uses too.

Both are worked out when a workspace is brought up. The numbers stand in the saved system file as if they had been set
there, and a later `prl up` takes them from there, unless something that decides them has changed.
`prime_rl.trainer.fit` answers, in a process of its own, as it loads torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from daemons.base_model import check_model
from daemons.launchers.base import LaunchError
from daemons.process import python_module, run_child
from daemons.specs import DEVICES_VARIABLE, FIT_MODULE, SYSTEM, UP, saved_devices, settle_devices, without_nulls
from daemons.starting import Say
from prime_rl.configs.base import ConfigError, load_config
from prime_rl.configs.deployment import TrainerDeployment
from prime_rl.configs.inference import WHOLE_GPU
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.gpus import count_gpus

SLOTS, SHARE = "max_concurrent_runs", "inference.vllm.gpu_memory_utilization"
# Arguments of vLLM with which it uses several GPUs.
_SEVERAL_GPUS = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
# The fields that decide how many slots fit, and what of a GPU is left for inference.
_DECIDES: dict[str, Any] = {
    "max_concurrent_runs": True,
    "trainer": {"model", "seq_len", "max_tokens_per_micro_batch", "device"},
    "inference": {"engine": True, "model": True, "max_versions_per_run": True, "vllm": {"gpu_memory_utilization"}},
}


def settle_slots(system: SystemConfig, output: OutputDir, *, stop: Callable[[], bool], say: Say) -> SystemConfig | None:
    """`system` with numbers for what is to be worked out; None when `stop()` came first. Raises LaunchError."""
    before = saved_devices(output)
    now = settle_devices(before, os.environ)
    is_shared = share_a_gpu(system, now)
    wanted = [SLOTS] * (system.max_concurrent_runs == "auto") + [SHARE] * is_shared
    if not wanted:
        return system
    check_model(system.model.name)
    earlier = _earlier(output, wanted)
    if earlier is not None and _question(earlier[0], before) == _question(system, now):
        found, source = earlier[1], ", as counted before"
    else:
        say(f"{' and '.join(wanted)} = 'auto': counting what fits into memory (takes a few seconds)")
        answer = _ask(system, now, stop, wanted)
        if answer is None:
            return None
        found, source = _numbers(answer, is_shared), ""
    if SLOTS in wanted:
        system = system.with_slots(int(found[SLOTS]))
        say(f"{SLOTS} = 'auto': {int(found[SLOTS])} slots{source}")
    if SHARE in wanted:
        system = system.with_gpu_share(found[SHARE])
        say(f"{SHARE} = 'auto': {found[SHARE]:g} of the GPU that trainer and inference share{source}")
    return system


def share_a_gpu(system: SystemConfig, devices: str | None) -> bool:
    """Whether vLLM's share of its GPU is to be worked out: it is "auto", and the trainer uses the same GPU.

    `devices`: CUDA_VISIBLE_DEVICES. One process takes the first GPU that it sees. What several GPUs of one vLLM
    hold is left to the person who set that up.
    """
    inference = system.inference
    several = _SEVERAL_GPUS & inference.vllm.extra_args.keys()
    if inference.engine != "vllm" or inference.vllm.gpu_memory_utilization != "auto" or several:
        return False
    if "cpu" in (system.trainer.device, inference.device) or not count_gpus(_with_devices(devices)):
        return False
    trainer, server = system.deployment.trainer, system.deployment.inference
    if trainer.gpus and (server.gpus or system.deployment.engine != "local"):
        return False
    first = "0" if devices is None else devices.partition(",")[0]
    return not trainer.gpus or first in map(str, trainer.gpus)


def _with_devices(devices: str | None) -> dict[str, str]:
    return {**os.environ, **({} if devices is None else {DEVICES_VARIABLE: devices})}


def _earlier(output: OutputDir, wanted: Sequence[str]) -> tuple[SystemConfig, dict[str, Any]] | None:
    """What the last `prl up` was asked for, and the `wanted` numbers that it ran with; None where one is missing."""
    try:
        asked = load_config(SystemConfig, output.component_config(UP))
        held = load_config(SystemConfig, output.component_config(SYSTEM))
    except ConfigError:  # never started, or of another version
        return None
    numbers = {SLOTS: held.max_concurrent_runs, SHARE: held.inference.vllm.gpu_memory_utilization}
    return None if "auto" in map(numbers.get, wanted) else (asked, numbers)


def _question(system: SystemConfig, devices: str | None) -> dict[str, Any]:
    trainer = system.deployment.trainer
    return {
        **system.model_dump(mode="json", include=_DECIDES),
        "devices": devices,
        "gpus": trainer.gpus,
        "ranks": _ranks(trainer),
    }


def _numbers(answer: Mapping[str, Any], is_shared: bool) -> dict[str, float]:
    """The slots and vLLM's share, from what `prl fit` answered.

    Raises LaunchError when trainer and inference do not fit onto one GPU.
    """
    share = answer["gpu_memory_utilization"]
    if is_shared and share is None:
        raise LaunchError(
            f"trainer and inference do not fit onto one GPU: a pass of {answer['tokens']} tokens with {answer['runs']} "
            f"slots takes {answer['peak_gib']:.1f} of {answer['usable_gib']:.1f} GiB, and the rest is too small for "
            f"vLLM with its own {answer['weights_gib']:.1f} GiB of weights: lower trainer.max_tokens_per_micro_batch, "
            f"seq_len or {SLOTS}, or give each its own GPU (docs/deploy.md)"
        )
    return {SLOTS: answer["runs"], SHARE: min(share or WHOLE_GPU, WHOLE_GPU)}


def _ranks(trainer: TrainerDeployment) -> int:
    return trainer.ranks * trainer.nodes


def _ask(
    system: SystemConfig, devices: str | None, stop: Callable[[], bool], wanted: Sequence[str]
) -> dict[str, Any] | None:
    """What `prl fit` answers; None when `stop()` came first. Raises LaunchError."""
    with tempfile.TemporaryDirectory() as name:
        file, out, errors = (Path(name) / each for each in ("system.toml", "out", "errors"))
        # What was left to defaults stays so: inference gets its number of slots only now.
        file.write_text(tomli_w.dumps(without_nulls(system.model_dump(mode="json", exclude_unset=True))))
        ranks = str(_ranks(system.deployment.trainer))
        argv = python_module(FIT_MODULE, "@", str(file), "--gpus", ranks, "--json")
        # A model of the hub may be asked for its config.json, which the trainer will load anyway.
        env = {"HF_HUB_OFFLINE": "0", **_with_devices(devices)}
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            exit_code = run_child(argv, stop, env=env, stdout=stdout, stderr=stderr)
        if exit_code is None:
            return None
        if exit_code:
            said = errors.read_text(errors="replace").strip().splitlines() or [f"prl fit exited with code {exit_code}"]
            raise LaunchError(f"{said[-1].removeprefix('prl fit: ')}; or set {' and '.join(wanted)} to a number")
        answer: dict[str, Any] = json.loads(out.read_text())
        return answer
