"""Where alerts go, and what is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from prime_rl.configs.base import BaseConfig
from prime_rl.configs.shared import LogConfig

AlertKind = Literal[
    "run_failed",
    "run_invalid",
    "run_evicted",
    "run_not_finite",
    "run_stalled",
    "reward_collapsed",
    "daemon_crashed",
    "daemon_stalled",
    "node_lost",
    "disk_low",
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
