"""Config of the inference server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from prime_rl.configs.base import BaseConfig, BroadcastConfig, LogConfig, LoRAConfig, ModelConfig
from prime_rl.contract.served import NUM_CHAT_ADAPTERS

# vLLM's own names.
LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]
# The share of a GPU that inference has to itself: vLLM's own default.
WHOLE_GPU = 0.9
Share = Annotated[float, Field(gt=0, le=1)] | Literal["auto"]


class InferenceModelConfig(ModelConfig):
    """The base model as the server holds it."""

    max_model_len: int = Field(2048, ge=8)
    """Longest sequence (prompt and completion) in tokens."""

    lora: LoRAConfig | None = LoRAConfig()
    """Largest rank and target modules of the adapters to be served: the trainer's. Null with `full_finetune`."""


class VllmConfig(BaseConfig):
    """Settings of the vLLM engine."""

    enforce_eager: bool | Literal["auto"] = "auto"
    """Disable compilation and CUDA graphs. auto: on a CPU, where they only make the start longer."""

    kv_cache_gb: float = Field(1.0, gt=0)
    """KV cache on a CPU, in GiB. On a GPU use `gpu_memory_utilization`."""

    gpu_memory_utilization: Share = "auto"
    """Share of GPU memory that each server uses. auto: 0.9, which `prl up` divides among servers on one GPU; beside the
    trainer on one GPU, what its passes leave, which `prl up` works out."""

    extra_args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of vLLM's own server, by their names there (`{"tensor_parallel_size": 2}`)."""

    def is_eager_on(self, device_type: str) -> bool:
        """`enforce_eager` on devices of type "cuda" or "cpu"."""
        return device_type == "cpu" if self.enforce_eager == "auto" else self.enforce_eager


class EmbeddedConfig(BaseConfig):
    """Settings of the embedded engine."""

    gpu_share: Share = "auto"
    """As `vllm.gpu_memory_utilization`."""

    max_waiting: int = Field(16_384, ge=1)
    """Longest queue of a run, in sequences; a request beyond it gets 503 with `Retry-After`."""

    prefix_cache_gb: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Keys and values of prompts and finished sequences that are kept for requests of the same adapter version that
    begin alike, in GiB at most; 0 keeps none. auto: an eighth of the memory that is free beside the model, and no more
    than `max_num_seqs` sequences of `max_model_len` take."""

    def prefix_bytes(self, free: float, most: float) -> float:
        """`prefix_cache_gb` in bytes, of the `free` ones; `most` is what auto has a use for."""
        return min(free / 8, most) if self.prefix_cache_gb == "auto" else self.prefix_cache_gb * 2**30


class InferenceConfig(BaseConfig):
    """`prl inference @ inference.toml`."""

    output_dir: Path = Path("outputs")
    """The workspace. Adapters are loaded only from below it; the status file is in it."""

    replica: int = Field(0, ge=0, le=99_999)
    """Number of this server of the workspace; others find it as inference/<n>/status.json."""

    status_file: Path | None = None
    """Path of the server's status file;

    null: the one of its `replica` in the workspace. With a file of its own it is found by nothing else.
    """

    engine: Literal["embedded", "vllm"] = "embedded"
    """`embedded`: prl's own engine in one process, for small models on a CPU. `vllm`: everything else."""

    host: str = "127.0.0.1"
    """Address to listen on. Any address but loopback requires an API key."""

    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free port and writes it to the status file."""

    allowed_hosts: list[Annotated[str, Field(pattern=r"^[a-z0-9._-]+$")]] = Field(default_factory=list)
    """Names under which requests may ask for the server (their `Host`, without a port) beside 127.0.0.1 and localhost:
    that of a proxy on this machine. With an API key any name may."""

    api_key_var: str = "PRL_API_KEY"
    """Name of the environment variable that holds the API key; the same name with `_FILE` may name a file instead that
    only its owner can read. Requests need the key when there is one."""

    model: InferenceModelConfig = InferenceModelConfig()
    """Base model and adapters."""

    full_finetune: bool = False
    """The trainer fine-tunes the whole model (it has no `[model.lora]`): the server holds no adapters."""

    max_concurrent_runs: int = Field(4, ge=1, le=1024)
    """Runs to hold adapters for: the trainer's slots. Waiting and ending runs are served from the base model."""

    max_versions_per_run: int = Field(4, ge=1, le=18)
    """Policy versions of one run that may be loaded at one time: at most 2 more than its
    `max_async_level` are ever used. A run that needs more at a moment waits for its own."""

    max_num_seqs: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Largest number of sequences that are decoded together. auto: 256 on a GPU, 64 on a CPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to generate on."""

    num_threads: int | None = Field(None, ge=1)
    """Number of CPU threads of torch; null leaves it to torch."""

    logprobs_mode: LogprobsMode = "processed_logprobs"
    """Which log-probabilities rollouts carry: those of the distribution that was sampled from, after temperature,
    penalties and what cuts off tokens; or the model's own before all that, for runs with a temperature of 1
    (docs/inference.md)."""

    embedded: EmbeddedConfig = EmbeddedConfig()
    """The embedded engine's own settings."""

    broadcast: BroadcastConfig = BroadcastConfig()
    """How whole weights are received: the trainer's `[broadcast]`."""

    vllm: VllmConfig = VllmConfig()
    """The vLLM engine's own settings."""

    log: LogConfig = LogConfig()
    """Logging."""

    @model_validator(mode="before")
    @classmethod
    def _no_adapters_with_the_whole_model(cls, data: Any) -> Any:
        """TOML has no null for `model.lora`."""
        if not isinstance(data, dict) or data.get("full_finetune") is not True:
            return data
        model = data.get("model", {})
        if not isinstance(model, dict):
            return data
        if model.get("lora") is not None:
            raise ValueError("full_finetune: remove [model.lora], full fine-tuning has no adapters")
        return {**data, "model": {**model, "lora": None}}

    def num_seqs_on(self, device_type: str) -> int:
        """`max_num_seqs` on devices of type "cuda" or "cpu"."""
        if self.max_num_seqs != "auto":
            return self.max_num_seqs
        return 64 if device_type == "cpu" else 256

    @property
    def share_key(self) -> str:
        """The key in which `share` is, from the top of the system file."""
        return f"inference.{'vllm.gpu_memory_utilization' if self.engine == 'vllm' else 'embedded.gpu_share'}"

    @property
    def share(self) -> Share:
        """The part of a GPU's memory that is for the engine."""
        return self.vllm.gpu_memory_utilization if self.engine == "vllm" else self.embedded.gpu_share

    @property
    def gpu_share(self) -> float:
        """`share` as a number; for "auto" that of a GPU without a trainer."""
        return WHOLE_GPU if self.share == "auto" else self.share

    @property
    def max_loras(self) -> int:
        """Largest number of adapters loaded at one time: of all runs, and one that a person talks to."""
        return self.max_run_loras + NUM_CHAT_ADAPTERS

    @property
    def max_run_loras(self) -> int:
        """Largest number of adapters of runs loaded at one time."""
        return self.max_concurrent_runs * self.max_versions_per_run
