"""vLLM's own OpenAI server in this process, behind our guard. Called by `prime_rl.inference.server`.

vLLM builds the engine (in its own processes) and the application; binding, serving, stopping and the status file are
ours. The `vllm` command is not used: it asks for a distribution of that name, which the CPU builds do not have.

The engine's processes, and what they leave behind, end with the server, whatever way it ends. An exclusive lock on a
folder for temporary files proves that its owner runs. The kernel drops the lock of a process that is killed, and the
next process that makes such a folder removes unlocked ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import logging
import os
import shutil
import signal
import tempfile
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.inference.gateway import serve_engine
from prime_rl.inference.guard import Room, max_model_len, model_shapes
from prime_rl.inference.serve import POLL_S, ServerContext
from prime_rl.inference.vllm.control import AdapterGate, VllmControl
from prime_rl.lora.adapter_state import Shapes
from prime_rl.utils.chat_template import ChatTemplate, TokenizerError
from prime_rl.utils.runtime import StartError, setup_logger

logger = logging.getLogger(__name__)

# vLLM ends its processes in about two seconds; what is left after this is killed.
CHILDREN_GRACE_S = 8.0


def run(context: ServerContext) -> None:
    """Start vLLM, serve, end every process it made. Raises StartError."""
    config, started = context.config, threading.Event()
    with private_tmp() as folder:
        os.environ.update(environment(config, folder))
        on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
        threading.Thread(target=_break_off, args=(context.stop, started), name="break off", daemon=True).start()
        try:
            available = psutil.virtual_memory().available
            check_adapter_room(config, model_shapes(config.model.name), available, on_cpu=on_cpu)
            arguments = server_arguments(config, max_model_len=max_model_len(config), on_cpu=on_cpu)
            asyncio.run(_serve(context, arguments, started))
        except StartError:
            raise
        except Exception as error:
            # Whatever vLLM raises while it starts: the boundary to a foreign program, so nothing narrower is known.
            if not context.stop():
                logger.exception("vLLM has failed")
                raise StartError(f"vLLM has failed: {error}") from error
        finally:
            started.set()
            end_children(CHILDREN_GRACE_S)
            # vLLM's objects clean up when they are dropped, which must not be left to the end of the interpreter.
            gc.unfreeze()
            gc.collect()


def check_adapter_room(config: InferenceConfig, shapes: Shapes, available: int, *, on_cpu: bool) -> None:
    """Raises StartError when all adapters, of the largest rank on all target modules, exceed the `available` memory.

    vLLM keeps adapters in its host's memory, and another copy in its layers, which on a CPU lie there too. `shapes` are
    those of the model's weights.
    """
    if (lora := config.model.lora) is None:
        return
    targets = [
        shape for name, shape in shapes.items() if name.split(".")[-2:-1] and name.split(".")[-2] in lora.target_modules
    ]
    dtype: torch.dtype = getattr(torch, config.model.dtype_on("cpu" if on_cpu else "cuda"))
    each = sum(lora.rank * sum(shape) for shape in targets if len(shape) == 2) * dtype.itemsize
    needed = (CPU_LORAS_PER_LORA + on_cpu) * config.max_loras * each
    if needed > available:
        raise StartError(
            f"max_concurrent_runs: {config.max_concurrent_runs} runs of {config.max_versions_per_run} versions need "
            f"{needed / 2**30:.2f} GiB for adapters of rank {lora.rank}, {available / 2**30:.2f} GiB free: lower "
            "max_concurrent_runs, max_versions_per_run or model.lora.rank",
            exit_code=2,
        )


def _break_off(stop: Callable[[], bool], started: threading.Event) -> None:
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
        setup_logger("inference", context.config.log.level)  # a library of vLLM's has put the root's level up to ERROR
        adapters = app.state.openai_serving_models.lora_requests
        tokenizer = engine.get_tokenizer()
        room = Room.of(engine.model_config.max_model_len, tokenizer.get_vocab())
        render_as_orchestrators(tokenizer, context.config.model.name)
        control = VllmControl(context.config, app, engine, adapters, AdapterGate(context.config))
        started.set()
        await serve_engine(control, context, room)


def render_as_orchestrators(tokenizer: Any, model: str) -> None:
    """Let vLLM's chat route, which asks its `tokenizer`, render by our template of `model`.

    Another one that vLLM has chosen (of tools, of its arguments) is rendered by its code, as are models without one.
    """
    try:
        template = ChatTemplate.load(model, local_only=True)
    except TokenizerError:
        return
    theirs = tokenizer.apply_chat_template

    def apply_chat_template(
        conversation: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **given: Any
    ) -> str | list[int]:
        if given.get("chat_template") != template.source:
            return theirs(conversation, tokenize=tokenize, **given)  # type: ignore[no-any-return]
        if "messages" in given:
            raise TokenizerError("chat_template_kwargs may not set ['messages']")
        flags = {name: given.pop(name, False) for name in ("add_generation_prompt", "continue_final_message")}
        arguments = {name: value for name, value in given.items() if name not in ("chat_template", "return_dict")}
        text = template.render(conversation, arguments, **flags)
        return tokenizer.encode(text, add_special_tokens=False) if tokenize else text

    tokenizer.apply_chat_template = apply_chat_template


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
    if not os.access(os.path.expanduser("~"), os.W_OK):  # in a container, or of a user without one
        folders = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton"}
        caches = OutputDir(config.output_dir).caches.resolve()
        env |= {name: str(caches / folder) for name, folder in folders.items() if name not in os.environ}
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
        # Each request has its place by what its run has asked for.
        "scheduling_policy": "priority",
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
        arguments["gpu_memory_utilization"] = config.gpu_share
    if config.model.lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": config.max_loras,
            "max_cpu_loras": CPU_LORAS_PER_LORA * config.max_loras,
            "max_lora_rank": round_rank(config.model.lora.rank),
            # Else vLLM puts adapters on the head too, where scores of given tokens beside another request end it: it
            # multiplies the rows of one by the adapters of the other.
            "lora_target_modules": config.model.lora.target_modules,
        }
    taken = sorted(config.vllm.extra_args.keys() & {*arguments, "host", "port", "api_key", "uds", "middleware"})
    if taken:
        raise StartError(
            f"vllm.extra_args: {', '.join(taken)} must not be set here: the server's own config sets it", exit_code=2
        )
    return arguments | config.vllm.extra_args


def round_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM's that holds `rank`."""
    return next(size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The same as a command line, which is what vLLM checks and fills in."""
    line = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            line += [f"--{flag}", *map(str, value)]
        elif value is not None:
            line += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return line


def end_children(grace_s: float) -> None:
    """End every process below this one: SIGTERM, then SIGKILL. Engine workers hold memory and devices."""
    _, alive = psutil.wait_procs(signal_children(signal.SIGTERM), timeout=grace_s)
    for child in alive:
        logger.warning("process %d did not exit: killing it", child.pid)
    psutil.wait_procs(signal_children(signal.SIGKILL), timeout=grace_s)


def signal_children(signum: signal.Signals) -> list[psutil.Process]:
    """Send `signum` to every process below this one; returns them."""
    children = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            # Python's resource tracker takes no SIGTERM; it ends with this process.
            if not any("resource_tracker" in part for part in child.cmdline()):
                child.send_signal(signum)
                children.append(child)
    return children


# Short: a socket's path has room for about 100 characters, and 37 of them are the name of the socket.
PREFIX = "prl-vllm-"


@contextlib.contextmanager
def private_tmp() -> Iterator[Path]:
    """The folder, which exists as long as the block runs. Raises OSError."""
    parent = Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    folder, lock = _make(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = _lock(folder)
        # Another process may have cleaned up between the two lines.
        if lock is not None and folder.exists():
            return folder, lock
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A locked descriptor, or None when another process holds the lock or the folder is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """Remove abandoned folders; what other users own is not touched."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and (lock := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
