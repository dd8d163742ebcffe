"""All of vLLM that we use and that it does not promise to keep. A new version of vLLM is held against this list first.

    python -m prime_rl.inference.vllm.private     what has moved, a line each; nothing while all is there

What is not in it is public: `SamplingParams`, the arguments of its server (a wrong one is refused when it starts), its
HTTP routes, and the names of its metrics.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping

_EXPAND = ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor")
# Module: functions and classes that are imported or replaced, each with the first of its arguments.
IMPORTED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm.entrypoints.launchers.api_server.app_state": {"init_app_state": ("engine_client", "state", "args")},
    "vllm.entrypoints.launchers.api_server.entry": {"build_async_engine_client": ("args",)},
    "vllm.entrypoints.launchers.app": {"build_app": ("args",)},
    "vllm.entrypoints.launchers.cli_args": {"make_arg_parser": ("parser",), "validate_parsed_serve_args": ("args",)},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": ()},
    "vllm.platforms": {"current_platform": ()},
    # The slot of each row is the fourth argument.
    "vllm.lora.ops.torch_ops.lora_ops": {"bgmv_expand": _EXPAND, "bgmv_expand_slice": _EXPAND},
    "vllm.lora.punica_wrapper.punica_cpu": {"bgmv_expand": (), "bgmv_expand_slice": ()},
}
# Class: methods and attributes of its objects. And a function: what it puts into the state of the application.
MEMBERS: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.engine.async_llm.AsyncLLM": (
        *("generate", "engine_core", "pause_generation", "resume_generation", "remove_lora"),
        *("get_supported_tasks", "get_tokenizer", "errored", "model_config", "vllm_config"),
    ),
    "vllm.tokenizers.protocol.TokenizerLike": ("get_vocab", "encode", "apply_chat_template"),
    "vllm.config.vllm.VllmConfig": ("parallel_config",),
    "vllm.config.model.ModelConfig": ("max_model_len",),
    "vllm.config.parallel.ParallelConfig": ("world_size", "data_parallel_size", "data_parallel_index"),
    "vllm.v1.engine.core_client.AsyncMPClient": ("call_utility_all_async",),
    "vllm.v1.engine.core.EngineCore": ("collective_rpc",),
    "vllm.entrypoints.launchers.api_server.app_state.init_app_state": ("openai_serving_models",),
    "vllm.entrypoints.openai.models.serving.OpenAIServingModels": ("lora_requests",),
    "vllm.lora.request.LoRARequest": ("lora_int_id",),
    "vllm.v1.worker.gpu_worker.Worker": ("reload_weights", "model_runner", "rank", "parallel_config", "device"),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": ("lora_manager",),
    "vllm.lora.worker_manager.WorkerLoRAManager": ("_adapter_manager",),
    "vllm.lora.model_manager.LoRAModelManager": ("lora_index_to_id", "modules"),
    "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA": ("lora_a_stacked", "lora_b_stacked"),
}
# Of its environment variables.
VARIABLES = (
    *("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_RPC_BASE_PATH", "VLLM_NO_USAGE_STATS"),
    *("VLLM_LOGGING_LEVEL", "VLLM_CPU_OMP_THREADS_BIND"),
)


def moved() -> Iterator[str]:
    """A line for each that the installed vLLM does not have."""
    for module_name, names in IMPORTED.items():
        for name, arguments in names.items():
            found = _find(module_name, name)
            if found is None:
                yield f"{module_name}.{name} is not there"
            elif arguments and (taken := tuple(inspect.signature(found).parameters)[: len(arguments)]) != arguments:
                yield f"{module_name}.{name} takes {taken}, not {arguments}"
    for path, members in MEMBERS.items():
        module_name, _, class_name = path.rpartition(".")
        found = _find(module_name, class_name)
        source = _source(found)
        for member in members:
            if not (hasattr(found, member) or re.search(rf"\b(self|state)\.{member}\b", source)):
                yield f"{path}.{member} is not there"
    variables = getattr(_find("vllm", "envs"), "environment_variables", {})
    yield from (f"environment variable {name} is not there" for name in VARIABLES if name not in variables)


def _find(module_name: str, name: str) -> type | None:
    try:
        found: type | None = getattr(importlib.import_module(module_name), name, None)
    except ImportError:
        return None
    return found


def _source(found: type | None) -> str:
    """Of a function, or of a class and all that it inherits from but what is not written in Python."""
    sources = []
    for each in inspect.getmro(found) if inspect.isclass(found) else (found,):
        with contextlib.suppress(OSError, TypeError):
            sources.append(inspect.getsource(each))  # type: ignore[arg-type]
    return "\n".join(sources)


if __name__ == "__main__":
    problems = list(moved())
    print("\n".join(problems), end="\n" if problems else "")
    sys.exit(1 if problems else 0)
