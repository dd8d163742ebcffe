"""The embedded engine beside the trainer and vLLM, and the whole system as a person starts it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import tomli_w
import torch

from benchmarks.gpu.stage import RANK, Stage, clock, kernels, peaks
from benchmarks.loop_servers import load, random_adapters, server
from prime_rl.base_model.teach import build_tokenizer
from prime_rl.configs import EXAMPLES
from prime_rl.configs.base import LoRAConfig, load_toml
from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.layout import scan_runs
from prime_rl.inference.embedded.batch import Batch, Job, Row, SamplingParams
from prime_rl.inference.embedded.model import Served, load_model
from prime_rl.lora.adapter_state import load_adapter, peft_names
from prime_rl.trainer.model import PackedRows, Targets, adapt_model
from prime_rl.utils.process import kill_tree
from prime_rl.utils.runtime import nvidia_smi

ROOT = Path(__file__).parents[2]
DEMO = EXAMPLES / "demo"
NUM_ADAPTERS, ALPHA, NEW = 8, 32.0, 128
NUM_ROWS = (256, 64, 8)
PEAK = 3.0  # of the last norm
# What a demo that is asked to stop has, before the stage is ended.
END_S, LOOK_EVERY_S = 20.0, 0.5


def run_engine(stage: Stage) -> None:
    """Without its server."""
    with tempfile.TemporaryDirectory() as folder:
        stage.base(peak=PEAK).save_pretrained(folder)
        model = {"name": folder, "max_model_len": 2048, "lora": {"rank": RANK}}
        config = {"output_dir": folder, "model": model, "device": stage.device}
        served = load_model(InferenceConfig.model_validate(config))
    fill(served)
    stage.measure("mismatch", mismatch, stage, served)
    for num_rows in NUM_ROWS:
        stage.measure(f"rows_{num_rows}", decode, stage, served, num_rows)
    batch, _ = joined(stage, served, 64)
    batch.step()
    stage.measure("step_64", kernels, batch.step, stage.shape["num_hidden_layers"])


def fill(model: Any) -> None:
    """Adapters in the first slots of `model`, large enough to matter, the same each time."""
    generator = torch.Generator().manual_seed(0)
    for slot in range(NUM_ADAPTERS):
        tensors: dict[str, torch.Tensor] = {}
        for name, layer in model.layers.items():
            num_out, num_in = layer.base_layer.weight.shape
            A_KI, B_OK = (torch.randn(shape, generator=generator) for shape in ((RANK, num_in), (num_out, RANK)))
            tensors |= zip(peft_names(name), (A_KI / num_in**0.5, B_OK / 200), strict=True)
        load_adapter(model.layers, slot, tensors, RANK)
        model.routing.scaling[slot] = ALPHA / RANK


def prompts(num_rows: int) -> list[list[int]]:
    """Of 64 tokens and a few more, of a vocabulary that all have."""
    rng = random.Random(num_rows)
    return [[rng.randrange(3, 250) for _ in range(64 + number % 16)] for number in range(num_rows)]


def joined(stage: Stage, served: Served, num_rows: int) -> tuple[Batch, list[Row]]:
    """A batch of so many prompts over all adapters, as after a burst."""
    batch = Batch(served, lambda ids: "")
    params = SamplingParams(max_tokens=8 if stage.tiny else NEW, ignore_eos=True, seed=0)
    jobs = [Job([ids], params, slot=at % NUM_ADAPTERS, max_length=2048) for at, ids in enumerate(prompts(num_rows))]
    rows = [row for job in jobs for row in job.rows]
    batch.add(rows)
    return batch, rows


def decode(stage: Stage, served: Served, num_rows: int) -> dict[str, float]:
    """Tokens/s from the first prompt to the last token."""
    joined(stage, served, num_rows)[0].step()  # warm
    start = clock()
    batch, rows = joined(stage, served, num_rows)
    prefill_s = clock() - start
    while batch.num_rows:
        batch.step()
    seconds, num_new = clock() - start, len(rows[0].token_ids)
    step_ms = 1e3 * (seconds - prefill_s) / num_new
    return {"tokens_per_s": num_rows * num_new / seconds, "prefill_s": prefill_s, "step_ms": step_ms, **peaks()}


@torch.no_grad()
def mismatch(stage: Stage, served: Served) -> dict[str, float]:
    """Answers of the engine, and the log-probabilities that the trainer's own packed pass gives the same tokens."""
    batch, rows = joined(stage, served, 16)
    while batch.num_rows:
        batch.step()
    lora = LoRAConfig(rank=RANK, alpha=ALPHA)
    ours = adapt_model(stage.base(peak=PEAK), lora, NUM_ADAPTERS, checkpoints=True, packs=True)
    fill(ours)
    rows.sort(key=lambda row: row.job.rank)
    lengths, at = [len(row.all_ids) for row in rows], list[int]()
    for row, end in zip(rows, accumulate(lengths), strict=True):
        at += range(end - len(row.token_ids) - 1, end - 1)
    columns = at, [each for row in rows for each in row.token_ids], [1.0] * len(at)
    targets = Targets(*(torch.tensor(column, device=served.device) for column in columns))
    ids_1N = torch.tensor([[each for row in rows for each in row.all_ids]], device=served.device)
    packed = PackedRows(tuple(lengths), (0,) * len(lengths))
    logprobs_N, entropy_N, _ = ours.token_logprobs(ids_1N, [row.job.slot for row in rows], targets, packed)
    log_ratio_N = logprobs_N - torch.tensor([each for row in rows for each in row.logprobs], device=served.device)
    kl_N = log_ratio_N.exp() - 1 - log_ratio_N
    found = {"mismatch_kl": kl_N.mean(), "worst_log_ratio": log_ratio_N.abs().max(), "entropy": entropy_N.mean()}
    return {name: float(value) for name, value in found.items()}


def run_vllm(stage: Stage) -> None:
    """The same load, through one server."""
    if find_spec("vllm") is None:
        stage.measure("vllm", lambda: {"vllm": "not installed"})
        return
    names = [f"run_{number}@v1" for number in range(NUM_ADAPTERS)]
    with tempfile.TemporaryDirectory() as place:
        model, workspace = Path(place) / "model", Path(place) / "workspace"
        stage.base(peak=PEAK).save_pretrained(model)
        build_tokenizer(2048).save_pretrained(model)
        with server("vllm", model, workspace, max_adapters=NUM_ADAPTERS, rank=RANK, num_seqs=max(NUM_ROWS)) as url:
            load(url, random_adapters(workspace, model, names, rank=RANK))
            for num_rows in NUM_ROWS:
                stage.measure(f"rows_{num_rows}", lambda num=num_rows: asyncio.run(burst(url, names, num)))


async def burst(url: str, names: Sequence[str], num_rows: int) -> dict[str, float]:
    """The requests at once; the second time counts."""
    common = {"max_tokens": NEW, "ignore_eos": True, "logprobs": 1}
    bodies = [{**common, "model": names[at % len(names)], "prompt": ids} for at, ids in enumerate(prompts(num_rows))]
    async with httpx.AsyncClient(timeout=300.0, limits=httpx.Limits(max_connections=None)) as http:
        for _ in range(2):
            start = time.perf_counter()
            answers = await asyncio.gather(*(http.post(f"{url}/completions", json=body) for body in bodies))
            seconds = time.perf_counter() - start
    for answer in answers:
        answer.raise_for_status()
    return {"tokens_per_s": num_rows * NEW / seconds}


def run_system(stage: Stage) -> None:
    """`prl demo`: three runs on two slots, beside the embedded engine."""
    with tempfile.TemporaryDirectory() as folder:
        stage.measure("demo", demo, stage, Path(folder))


def demo(stage: Stage, folder: Path) -> dict[str, Any]:
    """The report of a demo; one that takes too long is stopped, and what it came to is told."""
    workspace, log, looks = folder / "demo", folder / "log", []
    argv = [sys.executable, "-m", "daemons.cli", "demo", "--plain", "--output-dir", str(workspace)]
    argv += tiny_demo(stage, folder) if stage.tiny else ["--trainer.device", "cuda", "--inference.device", "cuda"]
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = ("--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits", f"--id={card}")
    with log.open("wb") as file:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=file)
    try:
        while process.poll() is None and time.monotonic() < stage.deadline_s - END_S:
            looks += [] if stage.tiny else nvidia_smi(*query).splitlines()
            time.sleep(LOOK_EVERY_S)
        finished = process.poll() == 0
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S - 2 * LOOK_EVERY_S)
        kill_tree(process.pid)
    if not (report := workspace / "report.json").exists():
        raise RuntimeError(f"no report: {log.read_text(encoding='utf-8', errors='replace')[-400:]}")
    found: dict[str, Any] = {"finished": finished}
    for run_id, story in json.loads(report.read_text(encoding="utf-8"))["runs"].items():
        found |= {f"{run_id}_{key}": story[key] for key in ("steps", "reward_first", "reward_last", "tokens_per_s")}
    metrics = [run.trainer_metrics for run in scan_runs(workspace)[0]]
    lines = [line for path in metrics if path.exists() for line in path.read_text(encoding="utf-8").splitlines()]
    found["worst_mismatch_kl"] = max((json.loads(line).get("mismatch_kl", 0.0) for line in lines), default=None)
    return found | seen(looks)


def seen(looks: Sequence[str]) -> dict[str, float]:
    """The most memory in use, and the mean time in which any kernel ran, of lines like `81559, 97` from the driver."""
    fields = [look.split(", ") for look in looks if look.replace(", ", "").isdecimal()]
    if not fields:
        return {}
    most_mib, busy = max(float(each[0]) for each in fields), sum(float(each[1]) for each in fields) / len(fields)
    return {"card_gib": most_mib / 1024, "card_busy": busy / 100}


def tiny_demo(stage: Stage, folder: Path) -> list[str]:
    """One run of two updates, on a model that was not taught."""
    configs, model = folder / "configs", folder / "base"
    configs.mkdir()
    shutil.copy(DEMO / "system.toml", configs)
    run = {**load_toml(DEMO / "upper.toml"), "max_steps": 2, "batch_size": 16, "ckpt": {"interval": 2}}
    (configs / "upper.toml").write_text(tomli_w.dumps(run), encoding="utf-8")
    stage.base().save_pretrained(model)
    build_tokenizer(512).save_pretrained(model)
    return ["--configs", str(configs), "--model.name", str(model)]
