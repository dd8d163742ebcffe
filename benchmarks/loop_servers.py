"""Real inference servers for the benchmarks: base models, servers of both engines, random adapters."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import tomli_w
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from prime_rl.configs.base import DEFAULT_TARGET_MODULES
from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, read_status
from prime_rl.lora.adapter_state import peft_names, save_peft

ROOT = Path(__file__).parents[1]
# The base model that the demo trains, and a pretrained one of 135 M parameters.
DEMO, SMOLLM2 = "demo", "smollm2-135m"
FOLDERS = {DEMO: "base", SMOLLM2: SMOLLM2}
START_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 30.0
NUM_SEQS = 64


def base_model(kind: str, folder: Path) -> Path:
    """The folder in `models/`; where it is not there, the model is made in `folder`."""
    made = ROOT / "models" / FOLDERS[kind]
    if (made / "config.json").is_file():
        return made
    argv = [sys.executable, "-m", "prime_rl.base_model", "--kind", kind, "--out", str(folder / kind)]
    subprocess.run(argv, check=True, cwd=ROOT)
    return folder / kind


@contextlib.contextmanager
def server(
    engine: str,
    model: Path,
    workspace: Path,
    *,
    max_adapters: int = 2,
    rank: int = 8,
    num_threads: int | None = None,
    num_seqs: int = NUM_SEQS,
    max_model_len: int = 512,
    vllm: dict[str, Any] | None = None,
) -> Iterator[str]:
    """A server with room for `max_adapters` adapters of `rank`; the value is its URL."""
    workspace.mkdir()
    config = {
        "output_dir": str(workspace),
        "engine": engine,
        "port": 0,
        "num_threads": num_threads or os.cpu_count() or 1,
        "max_num_seqs": num_seqs,
        "max_concurrent_runs": max_adapters,
        "max_versions_per_run": 1,
        "model": {"name": str(model), "max_model_len": max_model_len, "lora": {"rank": rank}},
        "vllm": vllm or {},
    }
    (workspace / "inference.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    argv = [sys.executable, "-m", "prime_rl.inference.server", "@", str(workspace / "inference.toml")]
    with (workspace / "log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(lambda: _url(workspace, process) is not None, f"the {engine} server", timeout_s=START_TIMEOUT_S)
        url = _url(workspace, process)
        assert url is not None
        yield url
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def _url(workspace: Path, process: subprocess.Popen[bytes]) -> str | None:
    if process.poll() is not None:
        raise RuntimeError((workspace / "log").read_text(encoding="utf-8")[-2000:])
    status = read_status(OutputDir(workspace).inference_status, InferenceStatus)
    return status.base_url if status is not None and status.state == "serving" else None


def random_adapters(folder: Path, model: Path, names: Sequence[str], *, rank: int = 8) -> dict[str, Path]:
    """A folder for each of `names` in the workspace `folder`, with an adapter of `rank` on every linear layer."""
    linear = {
        name: module
        for name, module in AutoModelForCausalLM.from_pretrained(model).named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in DEFAULT_TARGET_MODULES
    }
    folders = {}
    for seed, adapter in enumerate(names):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, module in linear.items():
            name_A, name_B = peft_names(name)
            tensors[name_A] = torch.randn(rank, module.in_features, generator=generator) * 0.02
            tensors[name_B] = torch.randn(module.out_features, rank, generator=generator) * 0.02
        run_id, _, version = adapter.partition("@v")
        folders[adapter] = OutputDir(folder).run(run_id).broadcast_dir(int(version))
        folders[adapter].mkdir(parents=True)
        targets = list(DEFAULT_TARGET_MODULES)
        save_peft(folders[adapter], tensors, rank=rank, alpha=16, target_modules=targets, base_model=str(model))
    return folders


def load(url: str, adapters: dict[str, Path]) -> None:
    for name, path in adapters.items():
        body = {"lora_name": name, "lora_path": str(path)}
        httpx.post(f"{url}/load_lora_adapter", json=body, timeout=300.0).raise_for_status()
