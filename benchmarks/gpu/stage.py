"""One stage in a process of its own, and what all share: models without files, rows, timing, kernels, waits.

    python -m benchmarks.gpu.stage NAME FOLDER SECONDS [--tiny]

Every measurement is an entry of `gpu_NAME.json`, which is written anew with it, so what ends a stage costs what was not
measured yet. One that takes longer prints its stacks.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.metadata
import json
import os
import random
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from prime_rl.utils.runtime import heavy_imports, nvidia_smi

if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[3]))  # what is loaded may hang too

with heavy_imports():
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoConfig, AutoModelForCausalLM

    import prime_rl
    from benchmarks.frame import RESULT_FORMAT_VERSION, machine
    from benchmarks.trainer_step import bench_sample
    from prime_rl.configs.system import SHAPES
    from prime_rl.contract.files import write_atomic
    from prime_rl.contract.types import MicroBatch, SampleColumns
    from prime_rl.lora import linear
    from prime_rl.trainer.fair_queue import rows_of, to_micro_batch

# The module of each stage, where it has a function `run_STAGE`.
MODULES = {"env": "checks", "correct": "checks", "selfcheck": "checks", "pass06": "passes", "pass4": "passes"}
LAST_S = 2.0  # in which nothing new is begun
RANK = 16
TINY = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY_PART = 64  # of the tokens
PACKAGES = ("torch", "triton", "transformers", "peft", "flash_attn", "vllm")
NUM_KERNELS = 12
Batches = list[list[SampleColumns]]


class Stage:
    """The entries of a stage, on disk with each; on a card at shapes that people have, or, tiny, on a CPU."""

    def __init__(self, name: str, folder: Path, seconds: float, *, tiny: bool) -> None:
        self.name, self.tiny = name, tiny
        self.device: Literal["cpu", "cuda"] = "cpu" if tiny else "cuda"
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.shape_name = "qwen3-4b" if name == "pass4" else "qwen3-0.6b"
        self.shape = {**SHAPES[self.shape_name], **(TINY if tiny else {})}
        self.start_s = time.monotonic()
        self.deadline_s = self.start_s + seconds
        self.entries: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self._head = {"version": RESULT_FORMAT_VERSION, "stage": name, "tiny": tiny, "machine": card(tiny)}
        self._path = folder / f"gpu_{name}.json"
        self._write()

    def measure(self, entry: str, call: Callable[..., Mapping[str, Any]], *args: Any) -> None:
        """Keep what `call` returns, or its error: the boundary of one measurement."""
        try:
            if time.monotonic() > self.deadline_s - LAST_S:
                raise TimeoutError("no time left")
            self.entries[entry] = dict(call(*args))
        except Exception as error:
            self.errors[entry] = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc(limit=-3)
        self._write()
        told = self.errors.get(entry) or ", ".join(f"{key} {_told(each)}" for key, each in self.entries[entry].items())
        print(f"[{time.monotonic() - self.start_s:5.1f} s] {self.name} {entry}: {told[:1000]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where no GPU is used
        if uses_gpu():
            torch.cuda.reset_peak_memory_stats()

    def _write(self) -> None:
        facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": time.monotonic() - self.start_s}
        found = {**self._head, **facts, "entries": self.entries, "errors": self.errors}
        write_atomic(self._path, json.dumps(found, indent=1) + "\n")

    def tokens(self, number: int) -> int:
        """`number`, or a small part of it."""
        return max(4, number // TINY_PART) if self.tiny else number

    def base(self, dtype: torch.dtype | None = None, num_layers: int = 1000, peak: float = 1.0, **changes: int) -> Any:
        """Random weights, made on the device. `peak`: of the last norm, so that the logits are not all alike."""
        shape = {**self.shape, "num_hidden_layers": min(num_layers, self.shape["num_hidden_layers"]), **changes}
        torch.manual_seed(0)
        with torch.device(self.device):
            config = AutoConfig.for_model(**shape, max_position_embeddings=32_768)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype or self.dtype)
        model.model.norm.weight.data.fill_(peak)
        return model.eval()

    def rows(self, num_runs: int, num_rows: int, num_tokens: int, *, even: bool = False, seed: int = 0) -> Batches:
        """The rows of each run, half of each prompt: `num_tokens` in the mean, every second longer, unless `even`."""
        rng, mean = random.Random(seed), self.tokens(num_tokens)
        more = 0 if even or num_rows == 1 else max(1, mean // 8)
        lengths = [mean + (more if row % 2 else -more) for row in range(num_rows)]
        rows = [bench_sample(rng, length, length // 2, self.shape["vocab_size"]).columns() for length in lengths]
        return [rows[number::num_runs] for number in range(num_runs)]


def _told(value: object) -> str:
    return json.dumps(value) if not isinstance(value, float) else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def card(tiny: bool) -> dict[str, Any]:
    """The card, its driver, and the versions of all that was measured."""
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    found = {"card": "a CPU", "project": prime_rl.__version__, "cuda": torch.version.cuda, "host": machine()}
    found |= {name: installed.get(name) for name in PACKAGES}
    if tiny:
        return found
    about = torch.cuda.get_device_properties(0)
    driver = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    capability, memory_gib = f"{about.major}.{about.minor}", f"{about.total_memory / 2**30:.1f}"
    return {**found, "card": about.name, "capability": capability, "memory_gib": memory_gib, "driver": driver}


def one_pass(batches: Batches) -> MicroBatch:
    """All rows of all runs."""
    return to_micro_batch([row for idx, samples in enumerate(batches) for row in rows_of(idx, samples)])


def differ(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-30))


@contextmanager
def planned(make: Callable[[Sequence[linear.TokenGroup]], linear.Plan]) -> Iterator[None]:
    """Inside, the products of adapters go through the plans that `make` gives for groups of tokens."""
    module: Any = linear
    kept, module.make_plan = module.make_plan, lambda groups, *_, **__: make(groups)
    try:
        yield
    finally:
        module.make_plan = kept


def uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def clock() -> float:
    """Seconds, when the device has done all."""
    if uses_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(stage: Stage, call: Callable[[], object]) -> float:
    """Seconds of a call with all its work on the device: the median; fewer times where one takes a second or so."""
    num_warm, num_calls = (1, 2) if stage.tiny or stage.name == "pass4" else (2, 3)
    seconds = []
    for _ in range(num_warm + num_calls):
        start = clock()
        call()
        seconds.append(clock() - start)
    return statistics.median(seconds[num_warm:])


def matmul_rate(stage: Stage) -> dict[str, float]:
    """Products of bfloat16 that the device does."""
    size = stage.tokens(8192)
    one, other = (torch.randn(size, size, device=stage.device, dtype=torch.bfloat16) for _ in range(2))
    return {"tflops": 10 * 2 * size**3 / timed(stage, lambda: [one @ other for _ in range(10)]) / 1e12}


def peaks() -> dict[str, float]:
    """The most memory of torch's allocator since the last reset, in GiB; nothing on a CPU."""
    most = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {f"peak_{name}_gib": num_bytes / 2**30 for name, num_bytes in most.items() if num_bytes}


def kernels(call: Callable[[], object], num_layers: int) -> dict[str, Any]:
    """Launches by layer, how busy the device is, the dearest kernels [name, calls, ms]; on a CPU of its operations."""
    call()
    on_gpu = uses_gpu()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
        start = clock()
        call()
        seconds = clock() - start
    events = list(profiler.key_averages())
    launch = ("cudaLaunchKernel", "cuLaunchKernel") if on_gpu else ("aten::",)
    work = [each for each in events if not on_gpu or "CUDA" in str(each.device_type)]
    ms = [(each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1e3 for each in work]
    dearest = sorted(zip(ms, work, strict=True), key=lambda pair: -pair[0])[:NUM_KERNELS]
    num_launches = sum(each.count for each in events if each.key.startswith(launch))
    names = [[each.key[:100], each.count, round(cost, 3)] for cost, each in dearest]
    return {"launches_per_layer": num_launches / num_layers, "busy_share": sum(ms) / 1e3 / seconds, "kernels": names}


def waits(call: Callable[[], object]) -> dict[str, int]:
    """How often the host waits for the device in `call`, by line."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [each for each in told if "called a synchronizing" in str(each.message)]
    return dict(Counter("/".join(Path(each.filename).parts[-3:]) + f":{each.lineno}" for each in found))


def main(name: str, folder: str, seconds: str, *flags: str) -> int:
    """Returns the exit code: 0 all was measured, 1 something was not."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stage = Stage(name, Path(folder), float(seconds), tiny="--tiny" in flags)
    module = importlib.import_module(f"benchmarks.gpu.{MODULES.get(name, 'serving')}")
    getattr(module, f"run_{name.rstrip('046')}")(stage)
    return int(bool(stage.errors))


if __name__ == "__main__":
    try:
        code = main(*sys.argv[1:])
    except KeyboardInterrupt:
        code = 1
    sys.stdout.flush()
    os._exit(code)  # nothing that is left is worth the seconds
