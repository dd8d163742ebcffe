"""What a monitor is. Each has its own file and imports its library in `start`, so only when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from prime_rl.configs.monitors import MonitorConfig


class MonitorError(RuntimeError):
    """A monitor that cannot work; the message has what is missing."""


class Monitor(Protocol):
    """Takes the metrics of one run. Any of the calls may raise: the monitor is then left out from there on."""

    name: str

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Called once, before all else. `config` is the run's whole config, as plain data."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of a metrics file. Names begin with the writer: "orchestrator/reward/mean", "trainer/loss"."""
        ...

    def close(self) -> None:
        """Called once, also when `start` failed half way."""
        ...


def make_monitors(config: MonitorConfig, folder: Path) -> list[Monitor]:
    """The monitors that a run asks for; `folder` is for what they write."""
    monitors: list[Monitor] = []
    if config.wandb is not None:
        from prime_rl.orchestrator.monitors.wandb import WandbMonitor

        monitors.append(WandbMonitor(config.wandb, folder))
    if config.tensorboard is not None:
        from prime_rl.orchestrator.monitors.tensorboard import TensorBoardMonitor

        monitors.append(TensorBoardMonitor(config.tensorboard, folder))
    if config.prometheus is not None:
        from prime_rl.orchestrator.monitors.prometheus import PrometheusMonitor

        monitors.append(PrometheusMonitor(config.prometheus))
    return monitors


def missing_package(name: str) -> MonitorError:
    return MonitorError(f"the package {name} is not installed: pip install prl-multirun[monitors]")
