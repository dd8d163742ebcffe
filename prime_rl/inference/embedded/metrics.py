"""/metrics of the embedded engine: numbers read from the engine at each request. Its own registry, no globals."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prime_rl.inference.embedded.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineMetrics(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield GaugeMetricFamily("prl_requests_running", "Choices that are being generated.", stats.num_running)
        yield GaugeMetricFamily("prl_requests_waiting", "Choices that wait for room.", stats.num_waiting)
        yield CounterMetricFamily("prl_prompt_tokens", "Prompt tokens since the start.", stats.num_prompt_tokens)
        yield CounterMetricFamily("prl_generated_tokens", "Tokens generated.", stats.num_generated_tokens)
        yield GaugeMetricFamily("prl_adapters_loaded", "Adapters loaded.", len(self._engine.adapters.loaded()))

    async def response(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE)
