"""The part of the inference contract about whole weights, broken loads, health; collected by `test_inference_contract`.

`server` and `model` are that module's fixtures: a process of each engine, and the model that it was started with.
"""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl.contract.files import wait_for
from prime_rl.inference.gateway import FRESH_S
from tests.inference_support import (
    LOADED,
    RunningServer,
    adapter_dir,
    error_of,
    logprob_tolerance,
    make_adapter,
    make_model,
    reference_logprobs,
    token_ids,
)
from tests.patience import PATIENCE_S

PROMPT = [9, 6, 13, 13, 16] * 10  # long enough to fill blocks of a prefix cache
SETTINGS: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
NUM_POLLS = 40


def publish(server: RunningServer, name: str, *, seed: int, **config: Any) -> Path:
    """Other whole weights, in the folder in which a trainer would publish them."""
    folder = make_model(server.output_dir / "run_w" / "broadcast" / name, seed=seed, **config)
    (folder / "STABLE").touch()
    return folder


def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


def update(server: RunningServer, folder: Path) -> None:
    response = server.post("/update_weights", weight_dir=str(folder))
    assert response.status_code == 200, response.text


def reload(server: RunningServer) -> None:
    response = server.post("/reload_weights")
    assert (response.status_code, response.json()) == (200, {"weights": "base"}), response.text


def difference(server: RunningServer, model: PreTrainedModel) -> float:
    """How far the server's log-probabilities of its own tokens are from those of `model`."""
    choice = server.complete(PROMPT, **SETTINGS)["choices"][0]
    expected = torch.tensor(reference_logprobs(model, PROMPT, choice["token_ids"], 1.0))
    return float((torch.tensor(choice["logprobs"]["token_logprobs"]) - expected).abs().max())


def check_weights(server: RunningServer, model: PreTrainedModel) -> None:
    """The server has the weights of `model`."""
    apart, limit = difference(server, model), logprob_tolerance(model, PROMPT)
    assert apart <= limit, f"logprobs differ by {apart:.3g}, rounding explains {limit:.3g}"


@pytest.fixture
def unladen(server: RunningServer) -> Iterator[RunningServer]:
    """The server without adapters; afterwards as it was."""
    with server.openai() as client:
        loaded = {entry.id: entry.root for entry in client.models.list() if "@" in entry.id}  # type: ignore[attr-defined]
    for name in loaded:
        server.unload(name)
    yield server
    reload(server)
    for name, path in loaded.items():
        server.load(name, Path(path))


def test_whole_weights_are_taken_over_and_given_back(unladen: RunningServer, model: Path) -> None:
    base, folders = reference(model), [publish(unladen, f"step_{seed}", seed=seed) for seed in (1, 2)]
    check_weights(unladen, base)
    for folder in folders:
        update(unladen, folder)
        answer = unladen.post("/v1/completions", model=unladen.model, prompt=PROMPT, max_tokens=1)
        assert answer.headers["x-weights"] == f"run_w/broadcast/{folder.name}"
        check_weights(unladen, reference(folder))
        assert difference(unladen, base) > 0.1
    reload(unladen)
    check_weights(unladen, base)


@pytest.mark.slow
def test_a_request_is_answered_by_one_set_of_weights_which_its_answer_names(unladen: RunningServer) -> None:
    folder = publish(unladen, "step_5", seed=5)
    names = ["base", "run_w/broadcast/step_5"]
    body = {"model": unladen.model, "prompt": [PROMPT, PROMPT[:20]], "max_tokens": 40, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}

    def ask() -> tuple[str, list[list[int]]]:
        response = unladen.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        return response.headers["x-weights"], token_ids(response.json())

    expected = dict([ask()])
    update(unladen, folder)
    expected |= dict([ask()])
    reload(unladen)
    assert list(expected) == names and expected[names[0]] != expected[names[1]]
    enough, newest = threading.Event(), [""]

    def keep_asking() -> list[tuple[str, list[list[int]]]]:
        found = []
        while not enough.is_set():
            found.append(ask())
            newest[0] = found[-1][0]
        return found

    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(keep_asking) for _ in range(8)]
        try:
            for change in range(4):
                name = names[change % 2]
                wait_for(lambda name=name: newest[0] == name, f"an answer by {name}", timeout_s=PATIENCE_S)  # type: ignore[misc]
                reload(unladen) if change % 2 else update(unladen, folder)
        finally:
            enough.set()
        answers = [answer for each in pending for answer in each.result()]
    assert {weights for weights, _ in answers} == set(names), "the weights changed before or after everything"
    assert all(expected[weights] == ids for weights, ids in answers)


def test_weights_that_cannot_be_taken_are_refused_in_one_line(
    unladen: RunningServer, model: Path, tmp_path: Path
) -> None:
    outside = make_model(tmp_path / "outside")
    (outside / "STABLE").touch()
    link = unladen.output_dir / "whole_link"
    link.symlink_to(outside)
    half = unladen.output_dir / "whole_half"
    half.mkdir()
    (half / "STABLE").touch()
    (half / "model.safetensors").symlink_to(outside / "model.safetensors")
    wide, odd, cut, early, endless = (publish(unladen, f"step_{step}", seed=step) for step in (11, 12, 13, 14, 16))
    shutil.rmtree(wide)
    wide = publish(unladen, "step_11", seed=11, hidden=32)
    tensors = load_file(odd / "model.safetensors")
    save_file({k.replace("q_proj", "query"): v for k, v in tensors.items()}, odd / "model.safetensors")
    last = sorted(tensors)[-1]
    tensors[last].view(-1)[-1] = float("inf")
    save_file(tensors, endless / "model.safetensors")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    (early / "STABLE").unlink()
    empty = unladen.output_dir / "run_w" / "broadcast" / "step_15"
    empty.mkdir()
    (empty / "STABLE").touch()
    for folder, status, words in (
        (outside, 403, "outside"),
        (link, 403, "outside"),
        (half, 403, "outside"),
        (unladen.output_dir / "none", 400, "is not a folder"),
        (early, 400, "STABLE"),
        (empty, 400, "missing"),
        (cut, 400, "cannot be read"),
        (odd, 400, "query.weight is not in the model"),
        (wide, 400, "has shape"),
        (endless, 422, f"were not changed: {last} is not finite"),
    ):
        response = unladen.post("/update_weights", weight_dir=str(folder))
        message = error_of(response)
        assert response.status_code == status and words in message and "\n" not in message, (folder, message)
    for body in ({}, {"weight_dir": 1}, {"weight_dir": ""}, {"weight_dir": "a\0b"}, {"weight_dir": "x", "y": 1}):
        assert unladen.post("/update_weights", **body).status_code == 400
    check_weights(unladen, reference(model))


def test_adapters_and_other_weights_do_not_meet(unladen: RunningServer, model: Path) -> None:
    update(unladen, publish(unladen, "step_21", seed=21))
    name = "run_late@v1"
    adapter = make_adapter(adapter_dir(unladen, name), model, seed=1)
    response = unladen.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(adapter))
    assert response.status_code == 409 and "reload_weights first" in error_of(response)
    reload(unladen)
    unladen.load(name, adapter)
    for refused in (
        unladen.post("/update_weights", weight_dir=str(unladen.output_dir / "run_w" / "broadcast" / "step_21")),
        unladen.post("/reload_weights"),
    ):
        assert refused.status_code == 409 and f"({name}): unload them first" in error_of(refused)
    unladen.unload(name)
    check_weights(unladen, reference(model))


def test_health_costs_next_to_nothing_and_needs_no_key(server: RunningServer) -> None:
    def num_tokens() -> float:
        lines = server.get("/metrics").text.splitlines()
        names = ("vllm:generation_tokens_total", "prl_generated_tokens_total")
        return sum(float(line.split()[-1]) for line in lines if line.startswith(names))

    url = f"{server.root_url}/health"
    before, start_s = num_tokens(), time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        codes = set(pool.map(lambda url: httpx.get(url, timeout=PATIENCE_S).status_code, [url] * NUM_POLLS))
    assert codes == {200}
    assert 1 <= num_tokens() - before <= 2 + (time.monotonic() - start_s) / FRESH_S


def test_a_load_that_nobody_waits_for_leaves_nothing(server: RunningServer, model: Path) -> None:
    """A client that is paused in the middle of a load unloads the adapter before the server has got it."""
    name = "run_gone@v1"
    folder = make_adapter(adapter_dir(server, name), model, seed=5)
    body = json.dumps({"lora_name": name, "lora_path": str(folder)})
    url = httpx.URL(server.root_url)
    with socket.create_connection((url.host, url.port)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # the request and the end of it in one packet
        lines = ["POST /v1/load_lora_adapter HTTP/1.1", f"Host: {url.host}", f"Content-Length: {len(body)}"]
        lines += ["Content-Type: application/json", f"Authorization: Bearer {server.api_key}", "", body]
        client.sendall("\r\n".join(lines).encode())
    told = f"unloaded {name} again"
    wait_for(lambda: told in server.log.read_text(), "the server to have done with the load", timeout_s=PATIENCE_S)
    with server.openai() as client:
        assert {entry.id for entry in client.models.list()} == {server.model, *LOADED}
