"""vLLM's own OpenAI server in this process, behind our guard. Called by `prime_rl.inference.server`.

vLLM builds the engine (in its own processes) and the application; binding, serving, stopping and the status file are
ours. The `vllm` command is not used: it asks for a distribution of that name, which the CPU builds do not have.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from argparse import Namespace
from typing import Any

import psutil
import torch

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.checks import StartError
from prime_rl.inference.child_processes import end_children, signal_children
from prime_rl.inference.context import ServerContext
from prime_rl.inference.front import build_app
from prime_rl.inference.lengths import Room
from prime_rl.inference.limits import adapter_bytes, check_adapter_room, max_model_len
from prime_rl.inference.private_tmp import private_tmp
from prime_rl.inference.reporting import EngineReporter, Snapshot
from prime_rl.inference.serve import POLL_S, EngineFailed, serve
from prime_rl.inference.vllm.adapters import AdapterGate
from prime_rl.inference.vllm.arguments import CPU_LORAS_PER_LORA, command_line, environment, server_arguments
from prime_rl.inference.vllm.control import VllmControl
from prime_rl.inference.weight_files import model_shapes
from prime_rl.utils.signals import StopFlag

logger = logging.getLogger(__name__)

# vLLM ends its processes in about two seconds; what is left after this is killed.
CHILDREN_GRACE_S = 8.0
_RUNNING, _WAITING, _TOKENS = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total"
_KV_USE = "vllm:kv_cache_usage_perc"  # a share, not a percentage


def run(context: ServerContext) -> None:
    """Start vLLM, serve, end every process it made. Raises StartError."""
    config = context.config
    with private_tmp() as folder:
        os.environ.update(environment(config, folder))
        _run(context)


def _run(context: ServerContext) -> None:
    config = context.config
    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    started = threading.Event()
    threading.Thread(target=_break_off, args=(context.stop, started), name="break off", daemon=True).start()
    try:
        _check_room(config, on_cpu)
        arguments = server_arguments(config, max_model_len=max_model_len(config), on_cpu=on_cpu)
        asyncio.run(_serve(context, arguments, started))
    except EngineFailed as error:
        raise StartError(str(error)) from error
    except Exception as error:
        # Whatever vLLM raises while it starts: the boundary to a foreign program, so nothing narrower is known.
        if isinstance(error, StartError):
            raise
        if not context.stop():
            logger.exception("vLLM has failed")
            raise StartError(f"vLLM has failed: {error}") from error
    finally:
        started.set()
        end_children(CHILDREN_GRACE_S)
        # vLLM's objects clean up when they are dropped, which must not be left to the end of the interpreter.
        gc.unfreeze()
        gc.collect()


def _check_room(config: InferenceConfig, on_cpu: bool) -> None:
    """vLLM keeps adapters in its host's memory, and another copy in its layers, which on a CPU lie there too."""
    each = adapter_bytes(config, model_shapes(config.model.name), "cpu" if on_cpu else "cuda")
    check_adapter_room(config, each, CPU_LORAS_PER_LORA + on_cpu, psutil.virtual_memory().available)


def _break_off(stop: StopFlag, started: threading.Event) -> None:
    """When a stop is asked for before `started`, end vLLM's processes: its start then fails at once.

    vLLM starts them in one call of half a minute, which looks at no flag.
    """
    while not started.wait(POLL_S):
        if stop():
            signal_children(signal.SIGTERM)


async def _serve(context: ServerContext, arguments: dict[str, Any], started: threading.Event) -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app as build_vllm

    args = _parse(arguments)
    if context.stop():
        return
    async with build_async_engine_client(args) as engine:
        tasks = await engine.get_supported_tasks()
        app = build_vllm(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        adapters = app.state.openai_serving_models.lora_requests
        config = context.config
        room = Room.of(engine.model_config.max_model_len, engine.get_tokenizer().get_vocab())
        control = VllmControl(config, app, engine, adapters, AdapterGate(config), _num_tokens)
        served = build_app(control, config, room=room, api_key=context.api_key)
        started.set()
        await serve(
            served,
            context.sock,
            stop=context.stop,
            engine_alive=control.alive,
            status=context.status,
            reporter=EngineReporter(context.status, lambda: _snapshot(sorted(adapters))),
            tick=served.state.tick,
        )


def _parse(arguments: dict[str, Any]) -> Namespace:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
    known = vars(parser.parse_args([]))
    if unknown := sorted(arguments.keys() - known.keys()):
        raise StartError(f"vllm.extra_args: unknown arguments of vLLM's server: {', '.join(unknown)}", exit_code=2)
    args: Namespace = parser.parse_args(command_line(arguments))
    validate_parsed_serve_args(args)
    return args


def _snapshot(adapters: list[str]) -> Snapshot:
    running, waiting, tokens, kv_use = _measured(_RUNNING, _WAITING, _TOKENS, _KV_USE)
    return Snapshot(
        adapters=adapters,
        num_running=int(sum(running)),
        num_waiting=int(sum(waiting)),
        num_tokens=int(sum(tokens)),
        kv_use=min(sum(kv_use) / max(len(kv_use), 1), 1.0),
    )


def _num_tokens() -> int:
    return int(sum(_measured(_TOKENS)[0]))


def _measured(*names: str) -> list[list[float]]:
    """The values of each data-parallel engine. vLLM measures for its /metrics, in this process's registry."""
    from prometheus_client import REGISTRY

    values: dict[str, list[float]] = {name: [] for name in names}
    for metric in REGISTRY.restricted_registry(names).collect():
        for sample in metric.samples:
            if sample.name in values:
                values[sample.name].append(sample.value)
    return list(values.values())
