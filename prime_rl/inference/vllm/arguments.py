"""Our config as vLLM's own: environment variables (set before vLLM is imported) and server arguments. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.checks import StartError

# Adapters stay in vLLM's host memory after they were unloaded, until newer ones push them out. Twice the room keeps
# those that are loaded from being pushed out by those that were unloaded.
CPU_LORAS_PER_LORA = 2
# What vLLM mixes into its workers, by `broadcast.type`. By name: the workers import it, and it must not be imported
# here, before vLLM's environment is set.
WORKER_EXTENSION_CLS = {
    "filesystem": "prime_rl.inference.vllm.worker.FileSystemWeightUpdateWorker",
    "nccl": "prime_rl.inference.vllm.worker.NCCLWeightUpdateWorker",
}
# Room for the prompts of many requests in one pass on a CPU.
MIN_BATCHED_TOKENS = 8192


def environment(config: InferenceConfig, tmp: Path) -> dict[str, str]:
    """Environment variables of vLLM for this config; its sockets are in `tmp`."""
    env = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_RPC_BASE_PATH": str(tmp),
        # No report of what is served leaves the machine.
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": config.log.level.upper(),
    }
    if config.num_threads is not None:
        # Left alone, vLLM binds its threads to all cores but one.
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.num_threads)}
    return env


def server_arguments(config: InferenceConfig, *, max_model_len: int, on_cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's server by their names there."""
    device_type = "cpu" if on_cpu else "cuda"
    arguments: dict[str, Any] = {
        "model": config.model.name,
        "served_model_name": config.model.name,
        "dtype": config.model.dtype_on(device_type),
        "max_model_len": max_model_len,
        "max_num_seqs": config.num_seqs_on(device_type),
        "enforce_eager": config.vllm.is_eager_on(device_type),
        "logprobs_mode": config.logprobs_mode,
        # Else top_k, top_p and temperature of the model's own generation config would apply unasked.
        "generation_config": "vllm",
        # Give its processes time to end: killed ones leave shared memory behind.
        "shutdown_timeout": 2,
        "worker_extension_cls": WORKER_EXTENSION_CLS[config.broadcast.type],
    }
    if on_cpu:
        arguments |= {
            "kv_cache_memory_bytes": int(config.vllm.kv_cache_gb * 2**30),
            # The first token of a seeded request whose prompt came in chunks ends vLLM on a CPU: its random generator
            # cannot be reset there. Prompts come whole instead.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, max_model_len),
        }
    else:
        arguments["gpu_memory_utilization"] = config.vllm.gpu_share
    if config.model.lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": config.max_loras,
            "max_cpu_loras": CPU_LORAS_PER_LORA * config.max_loras,
            "max_lora_rank": round_rank(config.model.lora.rank),
        }
    return arguments | _extra(config, arguments)


def round_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM's that holds `rank`."""
    return next(size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank)


def _extra(config: InferenceConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    taken = sorted(config.vllm.extra_args.keys() & {*arguments, "host", "port", "api_key", "uds", "middleware"})
    if taken:
        raise StartError(
            f"vllm.extra_args: {', '.join(taken)} must not be set here: the server's own config sets it", exit_code=2
        )
    return config.vllm.extra_args


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The same as a command line, which is what vLLM checks and fills in."""
    line = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            line += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return line
