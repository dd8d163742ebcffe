"""Reports to the outside: what is an alert and where it goes, where metrics go, which rollouts are kept as text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

from pydantic import AfterValidator, Field

from prime_rl.configs.base import BaseConfig, LogConfig

AlertKind = Literal[
    "run_failed",
    "run_invalid",
    "run_evicted",
    "run_not_finite",
    "run_stalled",
    "reward_collapsed",
    "run_trouble",
    "daemon_crashed",
    "daemon_stalled",
    "node_lost",
    "disk_low",
    "clocks",
]
ALERT_KINDS: tuple[AlertKind, ...] = get_args(AlertKind)
_VARIABLE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")


def variable_of(target: str) -> str | None:
    """NAME of "$NAME": the environment variable that holds the URL."""
    return target[1:] if _VARIABLE.fullmatch(target) else None


def _url(value: str) -> str:
    if variable_of(value) is None and not re.match(r"https?://[^/\s]", value):
        raise ValueError("must be an http:// or https:// URL, or $NAME for the URL in an environment variable")
    return value


def _apprise_url(value: str) -> str:
    if variable_of(value) is None and "://" not in value:
        raise ValueError("must be an apprise URL such as slack://..., or $NAME for one in an environment variable")
    return value


WebUrl = Annotated[str, AfterValidator(_url)]
AppriseUrl = Annotated[str, AfterValidator(_apprise_url)]


class RewardRule(BaseConfig):
    """When the reward of a run has collapsed."""

    window: int = Field(10, ge=2, le=10_000)
    """Number of batches over which the mean reward is taken."""

    drop: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Collapsed: the mean is lower than its best so far by more than this share of that best."""


class AlertsConfig(BaseConfig):
    """Alerts that leave the machine. A URL that holds a secret is given as "$NAME"."""

    webhooks: list[WebUrl] = Field([])
    """URLs that each alert is sent to as JSON (POST). Its field text suits a webhook of Slack or Mattermost."""

    apprise: list[AppriseUrl] = Field([])
    """Slack, Discord, mail and others by their apprise URLs; needs `pip install "prl-multirun[alerts]"`."""

    dead_man_url: WebUrl | None = None
    """URL that is requested (GET) as long as supervisor, trainer and inference work; when the requests stop, the
    service behind it raises the alarm."""

    dead_man_s: float = Field(60.0, ge=1)
    """Seconds between two such requests."""

    kinds: list[AlertKind] = Field(list(ALERT_KINDS))
    """What is reported."""

    min_free_gb: float = Field(5.0, ge=0)
    """Free space of the workspace's disk, in GB, below which disk_low is reported."""

    reward: RewardRule = RewardRule()
    """The rule of reward_collapsed."""

    output_dir: Path = Path("outputs")
    """The workspace."""

    log: LogConfig = LogConfig()
    """Logging."""

    def variables(self) -> list[str]:
        """The environment variables that its targets name."""
        targets = [*self.webhooks, *self.apprise, *([self.dead_man_url] if self.dead_man_url else [])]
        return sorted({name for target in targets if (name := variable_of(target)) is not None})


# Names on a service: no path, nothing that a URL would have to escape.
Slug = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class WandbConfig(BaseConfig):
    """Weights & Biases; needs `pip install "prl-multirun[monitors]"`."""

    project: Slug = "prl-multirun"
    """Project."""

    entity: Slug | None = None
    """User or team; null takes the default of the account."""

    mode: Literal["online", "offline"] = "online"
    """online sends while the run trains; offline writes to the run's monitors/wandb, for `wandb sync`."""


class TensorBoardConfig(BaseConfig):
    """Event files in the run's monitors/tensorboard; needs `pip install "prl-multirun[monitors]"`."""

    flush_s: float = Field(5.0, gt=0)
    """Longest time until a metric is on disk, in seconds."""


class TrackioConfig(BaseConfig):
    """One database with all runs, for `trackio show`; needs `pip install "prl-multirun[monitors]"`."""

    project: Slug = "prl-multirun"
    """Project."""


class PrometheusConfig(BaseConfig):
    """The newest metrics at http://127.0.0.1:PORT/metrics."""

    port: int = Field(0, ge=0, le=65535)
    """TCP port, on loopback only. 0 takes a free port and writes it to logs/monitors.log."""


class MonitorConfig(BaseConfig):
    """Monitors of one run. What is set here stands over `[monitors]` of the workspace.

    One that fails is logged once, and the run continues.
    """

    wandb: WandbConfig | None = None
    """Weights & Biases; null: off."""

    tensorboard: TensorBoardConfig | None = None
    """TensorBoard; null: off."""

    trackio: TrackioConfig | None = None
    """trackio, in the workspace's monitors/trackio; null: off."""

    prometheus: PrometheusConfig | None = None
    """Deprecated: a page for this run alone. Ignored where the workspace has `[monitors.prometheus]`."""

    @property
    def any_on(self) -> bool:
        """True when any monitor is set."""
        return any(value is not None for value in (self.wandb, self.tensorboard, self.trackio, self.prometheus))


class MonitorsConfig(MonitorConfig):
    """Monitors of all runs of a workspace, fed by the daemon `monitors`."""

    prometheus: PrometheusConfig | None = None
    """One page with the newest metrics of all runs; null: off."""

    log: LogConfig = LogConfig()
    """Logging."""

    def of_run(self, own: MonitorConfig) -> MonitorConfig:
        """The monitors of a run whose config has `own`. Its `prometheus` is a page for it alone."""
        return MonitorConfig(
            wandb=_over(self.wandb, own.wandb),
            tensorboard=_over(self.tensorboard, own.tensorboard),
            trackio=_over(self.trackio, own.trackio),
            prometheus=None if self.prometheus else own.prometheus,
        )


TableT = TypeVar("TableT", bound=BaseConfig)


def _over(default: TableT | None, own: TableT | None) -> TableT | None:
    if default is None or own is None:
        return own or default
    return default.replace(**own.model_dump(exclude_unset=True))


class SamplesConfig(BaseConfig):
    """Rollouts kept as text in `metrics/samples.jsonl`, for people."""

    per_step: int = Field(4, ge=0, le=64)
    """About so many rollouts of each batch are kept, in whole groups, at least one; 0: off."""

    keep_steps: int = Field(50, ge=1, le=10_000)
    """Batches whose rollouts are kept; older ones are removed. The file stays below 16 MB."""

    max_chars: int = Field(4_000, ge=16, le=100_000)
    """Longest prompt and completion, in characters; longer ones lose their middle. Messages of up to twice as many are
    kept for `prl runs samples --export`."""
