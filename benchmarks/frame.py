"""What every benchmark shares: paired timing, the description of the machine, and the form of a result file.

A benchmark is a module `benchmarks/bench_NAME.py` with a function `run() -> dict[str, float]` that returns its figures.
`benchmarks.run` calls it and writes `benchmarks/results/NAME.json`. A figure that is a ratio is taken from pairs that
are timed in turn in one process, so a machine whose speed drifts does not change it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from prime_rl.contract.files import write_atomic

RESULTS = Path(__file__).parent / "results"
RESULT_FORMAT_VERSION = 1


def paired_ratio(ours: Callable[[], object], other: Callable[[], object], *, num_pairs: int = 11) -> float:
    """Median over pairs of time(ours) / time(other), both called in turn after one warm-up each."""
    ours()
    other()
    return statistics.median(_time_s(ours) / _time_s(other) for _ in range(num_pairs))


def _time_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def machine() -> str:
    """Processor, cores and memory, in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text(encoding="utf-8").splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}"


def write_result(name: str, figures: Mapping[str, float]) -> Path:
    """Write `benchmarks/results/NAME.json` and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    result = {"version": RESULT_FORMAT_VERSION, "machine": machine(), "date": today, "figures": dict(figures)}
    write_atomic(path, json.dumps(result, indent=2) + "\n")
    return path
