"""A page of the newest figures for Prometheus to scrape, on loopback."""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prime_rl.configs.monitors import PrometheusConfig
from prime_rl.orchestrator.monitors.base import missing_package

logger = logging.getLogger("monitors")

LOOPBACK = "127.0.0.1"
# The monitors of an orchestrator that was killed may hold the port until they have passed on what they had.
PORT_PATIENCE_S = 8.0
RETRY_S = 0.2


class PrometheusMonitor:
    """Every figure as a gauge `prl_<name>{run_id="..."}`; `prl_orchestrator_step` and `prl_trainer_step` beside them.

    It is also the collector that the library asks for the gauges at each scrape.
    """

    name = "prometheus"

    def __init__(self, config: PrometheusConfig, patience_s: float = PORT_PATIENCE_S) -> None:
        self._config = config
        self._patience_s = patience_s
        self._gauges: dict[str, float] = {}
        self._server: Any = None

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.metrics_core import GaugeMetricFamily
        except ImportError as error:
            raise missing_package("prometheus-client") from error
        self._run_id = run_id
        self._gauge = GaugeMetricFamily
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, self._thread = self._serve(registry)
        logger.info("prometheus: http://%s:%d/metrics", LOOPBACK, self._server.server_port)

    def _serve(self, registry: Any) -> tuple[Any, Any]:
        from prometheus_client import start_http_server

        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return start_http_server(self._config.port, LOOPBACK, registry)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise
            time.sleep(RETRY_S)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writers = {name.partition("/")[0] for name in metrics}
        news = {gauge_name(name): value for name, value in metrics.items()}
        # Replaced whole: a scrape in another thread sees one state or the other.
        self._gauges = self._gauges | news | {f"prl_{writer}_step": float(step) for writer in writers}

    def collect(self) -> Iterator[Any]:
        for name, value in self._gauges.items():
            gauge = self._gauge(name, "See docs/metrics.md.", labels=["run_id"])
            gauge.add_metric([self._run_id], value)
            yield gauge

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def gauge_name(name: str) -> str:
    """ "orchestrator/reward/mean" -> "prl_orchestrator_reward_mean" """
    return "prl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
