"""Tokens per second of the embedded engine against vLLM's, both as real servers on this machine's CPU.

The demo's base model in float32, the same 64 concurrent requests of 32 tokens over the base model and two adapters, to
the one server and to the other in turn. vLLM's own model code and scheduler, with the settings that the project gives
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import tomli_w
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from prime_rl.configs.shared import DEFAULT_TARGET_MODULES
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, read_status
from prime_rl.lora.adapter_state import peft_names, save_peft

ROOT = Path(__file__).parents[1]
NUM_REQUESTS, NUM_TOKENS = 64, 32
NUM_PAIRS = 9
ADAPTERS = ("run_a@v1", "run_b@v1")
RANK = 8
START_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 30.0


def embedded_vs_vllm_tokens_per_s() -> dict[str, float]:
    """Median over pairs of (tokens per second of the embedded engine) / (those of vLLM)."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = base_model(Path(folder))
        urls = [stack.enter_context(server(engine, model, Path(folder) / engine)) for engine in ("embedded", "vllm")]
        return {"embedded_vs_vllm_tokens_per_s": asyncio.run(_ratio(urls, str(model)))}


async def _ratio(urls: list[str], model: str) -> float:
    async with httpx.AsyncClient(
        timeout=300.0, limits=httpx.Limits(max_connections=None, keepalive_expiry=1.0)
    ) as http:
        times_s = [[await round_s(http, url, model, number) for url in urls] for number in range(NUM_PAIRS + 1)]
    # The first pair is the warm-up.
    return statistics.median(vllm_s / embedded_s for embedded_s, vllm_s in times_s[1:])


async def round_s(http: httpx.AsyncClient, url: str, model: str, number: int) -> float:
    """Seconds until all requests of one round are answered."""
    names = (model, *ADAPTERS)
    bodies = [
        {
            "model": names[idx % len(names)],
            "prompt": [3 + (number * 31 + idx * 7 + place) % 200 for place in range(8 + idx % 24)],
            "max_tokens": NUM_TOKENS,
            "temperature": 1.0,
            "seed": idx,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        for idx in range(NUM_REQUESTS)
    ]
    start_s = time.perf_counter()
    answers = await asyncio.gather(*(http.post(f"{url}/completions", json=body) for body in bodies))
    took_s = time.perf_counter() - start_s
    assert all(len(answer.json()["choices"][0]["token_ids"]) == NUM_TOKENS for answer in answers)
    return took_s


def base_model(folder: Path) -> Path:
    """The demo's, made when it is not there yet."""
    made = ROOT / "models" / "base"
    if (made / "config.json").is_file():
        return made
    made = folder / "base"
    subprocess.run([sys.executable, "-m", "prime_rl.base_model", "--out", str(made)], check=True, cwd=ROOT)
    return made


@contextlib.contextmanager
def server(engine: str, model: Path, workspace: Path) -> Iterator[str]:
    """A server with the adapters loaded; the value is its URL."""
    workspace.mkdir()
    config = {
        "output_dir": str(workspace),
        "engine": engine,
        "port": 0,
        "num_threads": os.cpu_count() or 1,
        "max_num_seqs": NUM_REQUESTS,
        "max_concurrent_runs": len(ADAPTERS),
        "max_versions_per_run": 1,
        "model": {"name": str(model), "max_model_len": 512, "lora": {"rank": RANK}},
    }
    (workspace / "inference.toml").write_text(tomli_w.dumps(config))
    argv = [sys.executable, "-m", "prime_rl.inference.server", "@", str(workspace / "inference.toml")]
    with (workspace / "log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(lambda: _url(workspace, process) is not None, f"the {engine} server", timeout_s=START_TIMEOUT_S)
        url = _url(workspace, process)
        assert url is not None
        for seed, name in enumerate(ADAPTERS):
            adapter = random_adapter(workspace / name, model, seed)
            answer = httpx.post(f"{url}/load_lora_adapter", json={"lora_name": name, "lora_path": str(adapter)})
            answer.raise_for_status()
        yield url
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def _url(workspace: Path, process: subprocess.Popen[bytes]) -> str | None:
    if process.poll() is not None:
        raise RuntimeError((workspace / "log").read_text()[-2000:])
    status = read_status(OutputDir(workspace).inference_status, InferenceStatus)
    return status.base_url if status is not None and status.state == "serving" else None


def random_adapter(folder: Path, model: Path, seed: int) -> Path:
    """On every linear layer, of RANK."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in AutoModelForCausalLM.from_pretrained(model).named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in DEFAULT_TARGET_MODULES:
            name_A, name_B = peft_names(name)
            tensors[name_A] = torch.randn(RANK, module.in_features, generator=generator) * 0.02
            tensors[name_B] = torch.randn(module.out_features, RANK, generator=generator) * 0.02
    save_peft(folder, tensors, rank=RANK, alpha=16, target_modules=list(DEFAULT_TARGET_MODULES), base_model=str(model))
    return folder
