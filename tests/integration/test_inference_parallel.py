"""Data-parallel engines of vLLM behind one server: adapters and other weights reach each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.inference_support import RunningServer, adapter_dir, error_of, greedy, make_adapter, start, token_ids
from tests.weights_contract import publish, reference, update

NUM_ENGINES, NUM_TOKENS = 2, 8
PROMPT = [9, 6, 13, 13, 16]


def answers(server: RunningServer, name: str) -> list[list[int]]:
    """That of each engine, which vLLM lets a request choose."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    found = []
    for engine in range(NUM_ENGINES):
        with server.http(headers={"X-data-parallel-rank": str(engine)}) as client:
            response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found += token_ids(response.json())
    return found


def num_requests(server: RunningServer) -> list[float]:
    """How many each engine has answered since it started, by its own count."""
    found = re.findall(r"^vllm:request_success_total\{(.*)\} (.*)$", server.get("/metrics").text, re.MULTILINE)
    return [
        sum(float(value) for labels, value in found if f'engine="{engine}"' in labels) for engine in range(NUM_ENGINES)
    ]


@pytest.mark.vllm
@pytest.mark.release
@pytest.mark.xdist_group("vllm")
def test_adapters_and_whole_weights_reach_every_engine(served_model: Path, tmp_path: Path) -> None:
    server = start(
        "vllm", served_model, tmp_path, vllm={"kv_cache_gb": 0.1, "extra_args": {"data_parallel_size": NUM_ENGINES}}
    )
    try:
        folder = make_adapter(adapter_dir(server, "run_a@v1"), served_model, seed=1)
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(served_model), folder).eval()
        base, tuned = (greedy(model, PROMPT, NUM_TOKENS) for model in (reference(served_model), adapted))
        server.load("run_a@v1", folder)
        before = num_requests(server)
        assert answers(server, "run_a@v1") == [tuned] * NUM_ENGINES
        assert [after - each for after, each in zip(num_requests(server), before, strict=True)] == [1] * NUM_ENGINES
        assert answers(server, server.model) == [base] * NUM_ENGINES != [tuned] * NUM_ENGINES
        server.unload("run_a@v1")
        newer = publish(server, "step_1", seed=1)
        update(server, newer)
        assert answers(server, server.model) == [greedy(reference(newer), PROMPT, NUM_TOKENS)] * NUM_ENGINES
        response = server.post("/v1/load_lora_adapter", lora_name="run_a@v1", lora_path=str(folder))
        assert response.status_code == 409 and "reload_weights first" in error_of(response)
        assert server.post("/reload_weights").status_code == 200
        assert answers(server, server.model) == [base] * NUM_ENGINES
        server.stop_and_leave_nothing()
    finally:
        if server.process.poll() is None:
            server.stop()
