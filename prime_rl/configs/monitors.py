"""Where a run's metrics go in addition to its JSONL files, and which rollouts are kept as text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from prime_rl.configs.base import BaseConfig

# Names on a service: no path, nothing that a URL would have to escape.
Slug = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class WandbConfig(BaseConfig):
    """Weights & Biases; needs `pip install prl-multirun[monitors]`."""

    project: Slug = "prl-multirun"
    """Project."""

    entity: Slug | None = None
    """User or team; null takes the default of the account."""

    mode: Literal["online", "offline"] = "online"
    """online sends while the run trains; offline writes to the run's monitors/wandb, for `wandb sync`."""


class TensorBoardConfig(BaseConfig):
    """Event files in the run's monitors/tensorboard; needs `pip install prl-multirun[monitors]`."""

    flush_s: float = Field(5.0, gt=0)
    """Longest time until a metric is on disk, in seconds."""


class PrometheusConfig(BaseConfig):
    """The newest metrics at http://127.0.0.1:PORT/metrics, while the orchestrator runs."""

    port: int = Field(0, ge=0, le=65535)
    """TCP port, on loopback only; each run needs its own. 0 takes a free port and writes it to the run's log."""


class MonitorConfig(BaseConfig):
    """Monitors in addition to the JSONL files. One that fails is logged once, and the run continues."""

    wandb: WandbConfig | None = None
    """Weights & Biases; null: off."""

    tensorboard: TensorBoardConfig | None = None
    """TensorBoard; null: off."""

    prometheus: PrometheusConfig | None = None
    """Prometheus; null: off."""

    @property
    def any_on(self) -> bool:
        return any(value is not None for _, value in self)


class SamplesConfig(BaseConfig):
    """Rollouts kept as text in `metrics/samples.jsonl`, for people."""

    per_step: int = Field(4, ge=0, le=64)
    """Rollouts kept of each batch, from the lowest reward to the highest; 0: off."""

    keep_steps: int = Field(50, ge=1, le=10_000)
    """Batches whose rollouts are kept; older ones are removed. The file stays below 16 MB."""

    max_chars: int = Field(4_000, ge=16, le=100_000)
    """Longest prompt and completion, in characters; longer ones lose their middle."""
