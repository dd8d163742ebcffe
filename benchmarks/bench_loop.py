"""The asynchronous loop: savings, delay of new weights, cost; and the servers: speed, prefix caches, loads."""

from __future__ import annotations

from benchmarks.loop_async import async_figures
from benchmarks.loop_engines import embedded_vs_vllm_figures, first_token_figures
from benchmarks.loop_gateway import gateway_figures
from benchmarks.loop_orchestrator import idle_50_orchestrators_cpu, rollouts_per_s
from benchmarks.loop_prefix import prefix_figures
from benchmarks.loop_publish import publish_figures
from benchmarks.loop_stall import stall_figures


def run() -> dict[str, float]:
    return {
        **async_figures(),
        **publish_figures(),
        "rollouts_per_s": rollouts_per_s(),
        "idle_50_orchestrators_cpu": idle_50_orchestrators_cpu(),
        **embedded_vs_vllm_figures(),
        **first_token_figures(),
        **prefix_figures(),
        **stall_figures(),
        **gateway_figures(),
    }
