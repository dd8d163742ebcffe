"""How soon the trainer sees a new run, beside a loop that looks every second; runs lost; the idle supervisor."""

from __future__ import annotations

from benchmarks.discovery_burst import lost_of_5000
from benchmarks.discovery_idle import idle_200_runs_cpu
from benchmarks.discovery_latency import latency_figures


def run() -> dict[str, float]:
    return {
        **latency_figures(),
        "idle_200_runs_cpu": idle_200_runs_cpu(),
        "lost_of_5000": lost_of_5000(),
    }
