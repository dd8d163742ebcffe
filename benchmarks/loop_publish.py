"""How long new weights take to answer: from the end of the optimizer step to the first token sampled from that version.

A real trainer, embedded server and orchestrator, strictly on-policy, so that all wait for the new version and
nothing else goes on; answers have one token and a batch is one group, so the first answer is the first token. Against
it the bare sum on the same workspace, in blocks between the runs: write the tensors, one load call, one request for a
token of the run's own prompt. In the run the server sleeps between two versions, and before each sum it sleeps as long;
the sum in a tight loop, where every process is awake and every cache warm, is the second figure.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import tomli_w
from safetensors.torch import save_file

from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import InferenceStatus, TrainerStatus, is_alive, read_status
from prime_rl.contract.types import read_batch
from prime_rl.lora.adapter_state import ADAPTER_FILE, load_peft

NUM_RUNS, NUM_STEPS = 4, 24
# The first steps of a process import and allocate.
NUM_WARM_UP = 4
TIMEOUT_S = 300.0
MODEL = Path("models/base")
RANK, ALPHA = 8, 16.0


def publish_figures() -> dict[str, float]:
    """Median over all versions of the whole way, over the medians of the bare sum: as cold as in the run, and hot."""
    whole_s: list[float] = []
    cold_s: list[float] = []
    hot_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder, _workspace(Path(folder)) as (workspace, url):
        for number in range(NUM_RUNS):
            run = RunDir(workspace / f"run_{number}")
            _write_run(run, seed=number)
            _orchestrate(run)
            times = _times(run, Path(folder) / "trainer.marks")
            versions = range(NUM_WARM_UP + 1, NUM_STEPS)
            whole_s += [times["answered", version] - times["updated", version] for version in versions]
            idle_s = statistics.median(times["loading", v + 1] - times["answered", v] for v in versions[:-1])
            cold_s += _floors(url, run, "cold", pause_s=idle_s)
            hot_s += _floors(url, run, "hot", pause_s=0.0)
    return {
        "publish_vs_floor": statistics.median(whole_s) / statistics.median(cold_s),
        "publish_vs_hot_floor": statistics.median(whole_s) / statistics.median(hot_s),
        "publish_to_first_token_ms": 1000 * statistics.median(whole_s),
    }


@contextlib.contextmanager
def _workspace(folder: Path) -> Iterator[tuple[Path, str]]:
    """Trainer and embedded server, one core each, as a workspace starts them."""
    workspace = folder / "workspace"
    workspace.mkdir()
    common = {"output_dir": str(workspace), "max_concurrent_runs": 1, "num_threads": 1}
    lora = {"rank": RANK, "alpha": ALPHA}
    model = {"name": str(MODEL.resolve()), "lora": lora}
    trainer = {**common, "model": model, "seq_len": 96}
    inference = {**common, "model": {**model, "max_model_len": 96}, "engine": "embedded", "port": 0}
    marked = ["benchmarks.loop_marks", "trainer", str(folder / "trainer.marks")]
    output = OutputDir(workspace)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_process(marked, folder / "trainer.toml", trainer))
        stack.enter_context(_process(["prime_rl.inference.server"], folder / "inference.toml", inference))
        wait_for(lambda: _serving(output) is not None, "the server", timeout_s=TIMEOUT_S)
        wait_for(
            lambda: is_alive(read_status(output.trainer_status, TrainerStatus), time.time()),
            "the trainer",
            timeout_s=TIMEOUT_S,
        )
        url = _serving(output)
        assert url is not None
        yield workspace, url


def _serving(output: OutputDir) -> str | None:
    status = read_status(output.inference_status, InferenceStatus)
    return status.base_url if status is not None and status.state == "serving" else None


@contextlib.contextmanager
def _process(module: list[str], file: Path, config: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    file.write_text(tomli_w.dumps(config), encoding="utf-8")
    log = file.with_suffix(".log")
    with log.open("wb") as stream:
        argv = [sys.executable, "-m", *module, "@", str(file)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(argv, stdout=stream, stderr=stream, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _write_run(run: RunDir, seed: int) -> None:
    staged = run.path.with_name(f".{run.run_id}")
    (staged / "control").mkdir(parents=True)
    config = {
        "batch_size": 8,
        "rollouts_per_example": 8,
        "max_steps": NUM_STEPS,
        "max_async_level": 0,
        "seed": seed,
        "model": {"name": str(MODEL.resolve())},
        "sampling": {"max_tokens": 1},
        "env": [{"id": "reverse-text", "args": {"wording": "short"}}],
        "ckpt": {"interval": 1000, "keep_rollouts": True},
    }
    (staged / "control" / "orch.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    staged.rename(run.path)


def _orchestrate(run: RunDir) -> None:
    """The run's orchestrator from beginning to end."""
    marks = run.path / "marks"
    argv = [sys.executable, "-m", "benchmarks.loop_marks", "orchestrator", str(marks), "@", str(run.orch_toml)]
    done = subprocess.run(
        argv, timeout=TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout[-2000:]


def _times(run: RunDir, trainer_marks: Path) -> dict[tuple[str, int], float]:
    """When what happened first, by (what, version). The trainer's marks are those since the last call."""
    lines = [
        *trainer_marks.read_text(encoding="utf-8").splitlines(),
        *(run.path / "marks").read_text(encoding="utf-8").splitlines(),
    ]
    trainer_marks.write_text("", encoding="utf-8")
    times: dict[tuple[str, int], float] = {}
    for line in map(json.loads, lines):
        times.setdefault((line["what"], line["version"]), line["at_s"])
    return times


def _floors(url: str, run: RunDir, kind: str, pause_s: float) -> list[float]:
    """As many bare sums as a run has versions, in seconds; `pause_s` before each."""
    newest = run.broadcast_dir(NUM_STEPS)
    tensors, _ = load_peft(newest)
    sample = read_batch(run.rollout_file(NUM_STEPS)).samples[0]
    prompt = [token for token, sampled in zip(sample.token_ids, sample.loss_mask, strict=True) if not sampled]
    floors = []
    with httpx.Client(timeout=TIMEOUT_S) as http:
        for number in range(1, NUM_STEPS):
            apart = OutputDir(run.path.parent).run(f"{run.run_id}-{kind}")
            version, name = apart.broadcast_dir(number), f"{apart.run_id}@v{number}"
            shutil.copytree(newest, version)
            (version / ADAPTER_FILE).unlink()
            load = {"lora_name": name, "lora_path": str(version)}
            ask = {"model": name, "prompt": prompt, "max_tokens": 1, "logprobs": 1, "return_token_ids": True}
            time.sleep(pause_s)
            start_s = time.perf_counter()
            save_file(tensors, version / ADAPTER_FILE)
            http.post(f"{url}/load_lora_adapter", json=load).raise_for_status()
            http.post(f"{url}/completions", json=ask).raise_for_status()
            floors.append(time.perf_counter() - start_s)
            http.post(f"{url}/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
            shutil.rmtree(version)
    return floors[NUM_WARM_UP:]


if __name__ == "__main__":
    print(publish_figures())
