"""Many tenants on one server, whose versions change while they ask; and whole weights from a living trainer."""

from __future__ import annotations

import contextlib
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl.contract.layout import RunDir
from tests.inference_support import (
    RunningServer,
    adapter_dir,
    error_of,
    greedy,
    logprob_tolerance,
    make_adapter,
    start,
    token_ids,
)
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.trainer_support import published, put_batches, train_until, whole_config, write_run
from tests.weights_contract import check_weights, difference, reference, reload

# With those whose adapters are loaded, as many as the server has room for.
TENANTS = [f"run_tenant{number}" for number in range(8)]
VERSIONS = (1, 2, 3)
PROMPT = [9, 6, 13, 13, 16]
NUM_TOKENS, NUM_REQUESTS = 10, 4
NUM_UPDATES = 3
# Of the transfer; one test waits for it to pass.
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def model(served_model: Path) -> Path:
    return served_model


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])])
def fetching(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server that takes whole weights from a trainer's memory."""
    nccl = {"type": "nccl", "port": free_port(), "timeout_s": TIMEOUT_S}
    running = start(request.param, model, tmp_path_factory.mktemp(request.param), broadcast=nccl)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.stop()


def with_adapter(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """What the model's weights are with the adapter merged into them: no library's idea of what an adapter does."""
    tensors, weights = load_file(folder / "adapter_model.safetensors"), dict(model.state_dict())
    for key, tensor_A in tensors.items():
        if ".lora_A." in key:
            name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
            weights[name] = weights[name] + 2.0 * tensors[key.replace(".lora_A.", ".lora_B.")] @ tensor_A
    return weights


@pytest.fixture(scope="module")
def answers(server: RunningServer, model: Path) -> dict[str, list[int]]:
    """Each tenant's and version's greedy answer; no two are alike, so an answer identifies its adapter."""
    base = reference(model)
    told = {}
    for seed, name in enumerate(f"{run_id}@v{version}" for run_id in TENANTS for version in VERSIONS):
        folder = make_adapter(adapter_dir(server, name), model, seed=seed)
        merged = AutoModelForCausalLM.from_config(base.config).eval()
        merged.load_state_dict(with_adapter(base, folder))
        told[name] = greedy(merged, PROMPT, NUM_TOKENS)
    assert len({tuple(ids) for ids in told.values()}) == len(told)
    return told


@pytest.mark.slow
def test_no_request_is_answered_by_another_adapter(server: RunningServer, answers: dict[str, list[int]]) -> None:
    """Each tenant goes through its versions at its own pace; the next is loaded while the last is asked."""
    together = threading.Barrier(len(TENANTS))

    def ask(name: str) -> None:
        body = server.complete(PROMPT, model=name, max_tokens=NUM_TOKENS, temperature=0)
        assert token_ids(body) == [answers[name]], f"{name} was answered by {whose(token_ids(body)[0], answers)}"

    def live(run_id: str) -> None:
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            together.wait(PATIENCE_S)
            asked: list[list[object]] = []
            for version in VERSIONS:
                name = f"{run_id}@v{version}"
                server.load(name, adapter_dir(server, name))
                pending = [pool.submit(ask, name) for _ in range(NUM_REQUESTS)]
                if version > 1:
                    for each in asked.pop():
                        each.result()  # type: ignore[attr-defined]
                    server.unload(f"{run_id}@v{version - 1}")
                asked.append(list(pending))
            for each in asked.pop():
                each.result()  # type: ignore[attr-defined]
            server.unload(f"{run_id}@v{VERSIONS[-1]}")

    with ThreadPoolExecutor(len(TENANTS)) as pool:
        lives = [pool.submit(live, run_id) for run_id in TENANTS]
    for life in lives:
        life.result()


def whose(ids: list[int], answers: dict[str, list[int]]) -> str:
    return next((name for name, told in answers.items() if told == ids), "nobody's adapter")


def test_a_tenant_takes_no_more_than_its_share(server: RunningServer, answers: dict[str, list[int]]) -> None:
    one, other = TENANTS[:2]

    def load(name: str) -> int:
        response = server.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(adapter_dir(server, name)))
        if response.status_code == 400:
            assert f"{one} holds its 2 adapter slots" in error_of(response)
        return response.status_code

    assert [load(f"{one}@v{version}") for version in VERSIONS] == [200, 200, 400]
    assert load(f"{other}@v1") == 200
    for name in (f"{one}@v1", f"{one}@v2", f"{other}@v1"):
        server.unload(name)


@pytest.mark.slow
def test_whole_weights_come_from_the_memory_of_a_living_trainer(fetching: RunningServer, model: Path) -> None:
    """A full fine-tune, fetched while the trainer runs; the server's answers are then compared with its checkpoint."""
    run = write_run(fetching.output_dir, "run_whole", model, max_steps=NUM_UPDATES, ckpt={"interval": 1})
    port = read_port(fetching)
    config = whole_config(fetching.output_dir, model, broadcast={"type": "nccl", "port": port, "timeout_s": TIMEOUT_S})
    put_batches(run, NUM_UPDATES)
    worst: dict[str, float] = {}

    def fetched() -> bool:
        if published(run) == NUM_UPDATES:
            fetch(fetching, run, worst)
        return bool(worst)

    missing = fetching.post("/update_weights", weight_dir=str(unknown(fetching)))
    assert missing.status_code == 400 and f"127.0.0.1:{port} cannot be reached within {TIMEOUT_S:g} s" in error_of(
        missing
    )
    train_until(config, fetched)
    assert worst["trained"] <= logprob_tolerance(reference(model), PROMPT) < 0.01 < worst["base"], worst
    assert not (run.broadcast_dir(NUM_UPDATES) / "model.safetensors").exists(), "they went through the disk"
    reload(fetching)
    check_weights(fetching, reference(model))


def read_port(server: RunningServer) -> int:
    return int(tomllib.loads((server.output_dir / "inference.toml").read_text())["broadcast"]["port"])


def unknown(server: RunningServer) -> Path:
    """A version that no trainer has."""
    folder = server.output_dir / "elsewhere" / "step_99"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "STABLE").touch()
    return folder


def fetch(server: RunningServer, run: RunDir, worst: dict[str, float]) -> None:
    refused = server.post("/update_weights", weight_dir=str(unknown(server)))
    assert refused.status_code == 400
    assert f"the trainer holds run_whole/broadcast/step_{NUM_UPDATES}, not elsewhere/step_99" in error_of(refused)
    check_weights(server, reference(Path(server.model)))
    folder = run.broadcast_dir(NUM_UPDATES)
    for _ in range(2):  # as a server that was started again would
        response = server.post("/update_weights", weight_dir=str(folder))
        assert response.status_code == 200, response.text
    worst["base"] = difference(server, reference(Path(server.model)))
    worst["trained"] = difference(server, trained(run, Path(server.model)))


def trained(run: RunDir, model: Path) -> PreTrainedModel:
    """The trainer's own weights, as its checkpoint has them."""
    policy = reference(model)
    policy.load_state_dict(load_file(run.trainer_checkpoint(NUM_UPDATES) / "model.safetensors"), strict=False)
    return policy


def test_a_killed_server_takes_its_processes_with_it(fetching: RunningServer) -> None:
    """The last test of this server; vLLM has its own processes."""
    children = psutil.Process(fetching.process.pid).children(recursive=True)
    assert len(children) >= 2 or not fetching.output_dir.name.startswith("vllm")
    try:
        fetching.process.kill()
        fetching.process.wait()
        assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
    finally:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
