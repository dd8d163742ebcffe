"""What a monitor's config may say, and which of two configs stands."""

from __future__ import annotations

from typing import Any

import pytest

from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.reports import MonitorConfig, MonitorsConfig, PrometheusConfig, TrackioConfig, WandbConfig


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        ({"wandb": {"mode": "dryrun"}}, "wandb.mode"),
        ({"wandb": {"project": "a/b"}}, "wandb.project"),
        ({"trackio": {"project": "a/b"}}, "trackio.project"),
        ({"trackio": {"space_id": "a/b"}}, "trackio.space_id"),
        ({"prometheus": {"port": 70000}}, "prometheus.port"),
        ({"mlflow": {}}, "mlflow"),
    ],
)
def test_a_wrong_monitor_is_refused_by_its_key(bad: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build(MonitorConfig, bad, "test")


def test_what_a_run_sets_stands_over_the_default_of_the_workspace() -> None:
    workspace = MonitorsConfig(wandb=WandbConfig(project="all", mode="offline"), prometheus=PrometheusConfig(port=9400))
    assert workspace.of_run(MonitorConfig()).wandb == workspace.wandb
    assert MonitorsConfig(trackio=TrackioConfig()).of_run(MonitorConfig(wandb=WandbConfig())).trackio is not None
    own = build(MonitorConfig, {"wandb": {"project": "own"}, "prometheus": {"port": 9401}}, "test")
    found = workspace.of_run(own)
    assert found.wandb == WandbConfig(project="own", mode="offline") and found.prometheus is None
    assert MonitorsConfig().of_run(own) == own and not MonitorsConfig().any_on


def test_each_monitor_alone_starts_the_daemon() -> None:
    for name in set(MonitorConfig.model_fields):
        assert build(MonitorConfig, {name: {}}, "test").any_on, name
