"""A page of the newest figures of all runs for Prometheus to scrape, on loopback."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from prime_rl.configs.monitors import PrometheusConfig
from prime_rl.utils.http_rule import refusal

logger = logging.getLogger("monitors")

LOOPBACK = "127.0.0.1"
_HEADERS = {"Host": "HTTP_HOST", "Origin": "HTTP_ORIGIN", "Content-Type": "CONTENT_TYPE"}


class PrometheusPage(Collector):
    """Every figure as a gauge `prl_<name>{run="..."}`; `prl_orchestrator_step` and `prl_trainer_step` beside them.

    It is also the collector that the library asks for the gauges at each scrape, in another thread.
    """

    def __init__(self, config: PrometheusConfig) -> None:
        self.config = config
        # {run id: {gauge: value}}; the inner ones are replaced whole.
        self._runs: dict[str, dict[str, float]] = {}
        self._server: Any = None

    @property
    def url(self) -> str:
        """The address of the page; the port of the config until the page is open."""
        return f"http://{LOOPBACK}:{self._server.server_port if self._server else self.config.port}/metrics"

    @property
    def is_open(self) -> bool:
        """True when the page is served: from `open` until `close`."""
        return self._server is not None

    def open(self) -> None:
        """Raises OSError when the port is taken."""
        registry = CollectorRegistry(auto_describe=False)
        self._server, self._thread = start_http_server(self.config.port, LOOPBACK, registry)
        self._server.set_app(_guarded(self._server.get_app()))
        registry.register(self)
        logger.info("prometheus: %s", self.url)

    def close(self) -> None:
        """Stop the server and wait for its thread; does nothing without a server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def show(self, run_id: str, figures: dict[str, float]) -> None:
        """Put a run's figures on the page, by gauge; those that `figures` lacks keep their values."""
        self._runs[run_id] = self._runs.get(run_id, {}) | figures

    def remove(self, run_id: str) -> None:
        """Take all figures of a run off the page."""
        self._runs.pop(run_id, None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a gauge for each figure, with the values of all runs. The library calls it at each scrape."""
        gauges: dict[str, GaugeMetricFamily] = {}
        for run_id, figures in list(self._runs.items()):
            for name, value in figures.items():
                if name not in gauges:
                    gauges[name] = GaugeMetricFamily(name, "See docs/metrics.md.", labels=["run"])
                gauges[name].add_metric([run_id], value)
        yield from gauges.values()


def _guarded(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def guarded(environ: Mapping[str, str], start_response: Callable[..., object]) -> Iterable[bytes]:
        headers = [(name, environ[key]) for name, key in _HEADERS.items() if environ.get(key)]
        if (refused := refusal(environ["REQUEST_METHOD"], headers)) is None:
            return app(environ, start_response)
        start_response(f"{refused[0]} Refused", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{refused[1]}\n".encode()]

    return guarded


class PrometheusMonitor:
    """One run's figures on a page. A page of its own is opened and closed with it."""

    name = "prometheus"
    wants_all = False

    def __init__(self, page: PrometheusPage, *, is_own: bool = False) -> None:
        self._page, self._is_own = page, is_own
        self._run_id = ""

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Open the page if it is the run's own. Raises OSError when its port is taken."""
        self._run_id = run_id
        if self._is_own:
            self._page.open()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the figures of one line, and its step as that of the writer."""
        writers = {name.partition("/")[0] for name in metrics}
        news = {gauge_name(name): value for name, value in metrics.items()}
        self._page.show(self._run_id, news | {f"prl_{writer}_step": float(step) for writer in writers})

    def close(self) -> None:
        """Take the run off the page; a page of its own is closed."""
        self._page.remove(self._run_id)
        if self._is_own:
            self._page.close()


def gauge_name(name: str) -> str:
    """Name of a metric on the page: orchestrator/reward/mean -> prl_orchestrator_reward_mean."""
    return "prl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
