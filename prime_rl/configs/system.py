"""Config of a whole workspace: what `prl up @ system.toml` starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from prime_rl.configs.base import BaseConfig, merge
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.shared import BroadcastConfig, LoRAConfig, ModelConfig
from prime_rl.configs.trainer import TrainerConfig, TrainerModelConfig

# Versions that rollouts lag behind by, and besides the newest one and the one that is being loaded.
SPARE_VERSIONS = 2
# That of a run which does not say its own, and the largest that one may say.
DEFAULT_MAX_ASYNC_LEVEL, MAX_ASYNC_LEVEL = 2, 16


class StallConfig(BaseConfig):
    """When a daemon that lives counts as stalled, and what follows."""

    limit_s: float = Field(1800.0, gt=0)
    """So long may its progress stand still while it has work."""

    restart: bool = False
    """End it and start it again then, unless it names somebody whom it waits for. Else it is only told."""


class StallConfigs(BaseConfig):
    """Stalls, for each kind of daemon."""

    trainer: StallConfig = StallConfig()
    """Its progress: passes, updates, published versions. It has work while a run is in a slot."""

    inference: StallConfig = StallConfig()
    """Its progress: generated tokens. It has work while a request is open."""

    orchestrator: StallConfig = StallConfig()
    """Its progress: sampled tokens, batches, policy versions. It has work until its last word."""

    def of(self, kind: str) -> StallConfig:
        """The settings of "trainer", "inference" or "orchestrator"."""
        return {"trainer": self.trainer, "inference": self.inference}.get(kind, self.orchestrator)


class SupervisorConfig(BaseConfig):
    """How the supervisor treats its daemons."""

    start_timeout_s: float = Field(300.0, gt=0)
    """A daemon that is not ready by then has failed to start."""

    drain_s: float = Field(120.0, ge=0)
    """How long an orchestrator may finish its batch, the trainer its step and its saving, before it is forced."""

    grace_s: float = Field(20.0, ge=0)
    """Between SIGTERM and SIGKILL of what is left then, or has nothing to finish."""

    backoff_s: float = Field(1.0, gt=0)
    """Wait before the first restart; doubles with each further crash."""

    max_backoff_s: float = Field(60.0, gt=0)
    """Longest wait before a restart."""

    early_crash_s: float = Field(10.0, ge=0)
    """A crash this soon after the start counts as early."""

    max_early_crashes: int = Field(3, ge=1)
    """So many early crashes or failed starts in a row and the daemon has failed."""

    max_starting: int = Field(8, ge=1)
    """So many orchestrators may be starting at one time; the others wait for their turn."""

    max_log_bytes: int = Field(50_000_000, ge=10_000)
    """A log that is larger is put aside and begun anew."""

    num_old_logs: int = Field(3, ge=1)
    """So many logs that were put aside are kept of each daemon."""

    stall: StallConfigs = StallConfigs()
    """When a living daemon counts as stalled."""


class SystemConfig(BaseConfig):
    """One workspace: trainer, inference, and how they are kept alive.

    `model`, `lora` or `full_finetune`, `broadcast`, `max_concurrent_runs`, `max_async_level` and `seq_len` are said
    once here and reach the daemons, unless a daemon sets its own.
    """

    output_dir: Path = Path("outputs")
    """The workspace."""

    model: ModelConfig = ModelConfig()
    """Base model of trainer and inference."""

    lora: LoRAConfig | None = LoRAConfig()
    """Adapters of trainer and inference. A workspace has adapters also without this table."""

    full_finetune: bool = False
    """The workspace has no adapters: its runs, one at a time, fine-tune the whole model."""

    broadcast: BroadcastConfig = BroadcastConfig()
    """How the whole model's new weights get from trainer to inference."""

    max_concurrent_runs: int = Field(4, ge=1, le=1024)
    """Slots of the trainer, tenants of the inference server. 1, also by default, with `full_finetune`."""

    max_async_level: int = Field(DEFAULT_MAX_ASYNC_LEVEL, ge=0, le=MAX_ASYNC_LEVEL)
    """Largest `max_async_level` of the runs: it sizes `inference.max_versions_per_run`, and a run that asks for more is
    refused."""

    seq_len: int = Field(2048, ge=8)
    """Longest sample of the trainer, longest sequence of the inference server."""

    trainer: TrainerConfig = TrainerConfig(model=TrainerModelConfig(lora=LoRAConfig()))
    """The trainer's own settings."""

    inference: InferenceConfig = InferenceConfig()
    """The inference server's own settings."""

    supervisor: SupervisorConfig = SupervisorConfig()
    """The supervisor's settings."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, data: Any) -> Any:
        """Copy what is said once into both daemons. Unknown keys and wrong types are left for the strict models."""
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
                "full_finetune is for trainer and inference together: leave it out of [trainer], [inference]"
            )
        if self.trainer.broadcast.type != self.inference.broadcast.type:
            raise ValueError("broadcast.type is for trainer and inference together: say it in [broadcast] only")
        return self


def _for_adapters(data: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what goes with `full_finetune` only."""
    broadcast = data.get("broadcast")
    if isinstance(broadcast, dict) and broadcast.get("type") == "nccl":
        raise ValueError(
            "broadcast.type = 'nccl' is for the whole model, adapters go through the disk: leave it out, or set "
            "full_finetune = true"
        )
    return data


def _for_the_whole_model(data: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what does not go with `full_finetune`."""
    if data.get("lora") is not None:
        raise ValueError("full_finetune: the whole model has no adapters: leave out [lora]")
    if (slots := data.get("max_concurrent_runs", 1)) != 1:
        raise ValueError(
            f"max_concurrent_runs = {slots}: with full_finetune one run at a time trains the whole model; set it to 1, "
            "or leave it out"
        )
    return {**data, "max_concurrent_runs": 1, "lora": None}
