"""Before and after vLLM loads an adapter: what it is asked for, and whether its layers hold what the file holds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from starlette.requests import Request

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.gateway import build_app
from prime_rl.inference.guard import ApiError, model_shapes
from prime_rl.inference.vllm.control import AdapterGate, FairOrder, ToldAsOurs, VllmControl, num_places
from prime_rl.inference.vllm.server import PREFIX, check_adapter_room, environment, private_tmp
from prime_rl.utils.runtime import StartError
from tests.budgets import in_full
from tests.inference_support import make_adapter, make_model
from tests.patience import PATIENCE_S
from tests.text_attacks import check_clean


async def test_vllm_is_asked_after_a_check_beside_the_event_loop(tmp_path: Path) -> None:
    model = make_model(tmp_path / "base")
    folder = make_adapter(tmp_path / "run_a", model, seed=1)
    config = InferenceConfig.model_validate({"model": {"name": str(model), "lora": {"rank": 8}}})
    checking, answered, loaded = threading.Event(), threading.Event(), list[dict[str, Any]]()

    class SlowGate(AdapterGate):
        def __call__(self, name: str, folder: Path) -> str:
            checking.set()
            assert answered.wait(PATIENCE_S), "the event loop waits for the check"
            return super().__call__(name, folder)

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        loaded.append({"path": scope["path"], **json.loads((await receive())["body"])})
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "no room", "param": "lora_name"}}'})

    requests: dict[str, Any] = {}
    control = VllmControl(config, vllm, None, requests, SlowGate(config))
    request = Request({"type": "http", "path": "/v1/load_lora_adapter", "headers": []})
    load = asyncio.create_task(control.load_adapter(request, "run_a@v1", folder))
    while not checking.is_set():
        await asyncio.sleep(0.001)
    answered.set()
    with pytest.raises(ApiError, match="no room") as caught:
        await load
    assert caught.value.status == 400
    assert loaded == [{"path": "/v1/load_lora_adapter", "lora_name": "run_a@v1", "lora_path": str(folder)}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "two\\nlines of \\u001b[31m", "param": "prompt"}}', "two lines of"),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b'{"error": null}', '{"error": null}'),
        (b"plain \xff", "plain"),
        (b"", "vLLM refuses this request without a reason."),
    ],
)
async def test_what_vllm_refuses_is_told_in_one_line_and_what_it_answers_comes_as_it_is(
    body: bytes, message: str
) -> None:
    """A refusal may come in parts; an answer is sent on part by part."""

    def vllm(status: int) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": status, "headers": [(b"x-own", b"1")]})
            await send({"type": "http.response.body", "body": body[:3], "more_body": True})
            await send({"type": "http.response.body", "body": body[3:]})

        return ToldAsOurs(app)

    async def answered(status: int) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await vllm(status)({"type": "http"}, None, send)  # type: ignore[arg-type]
        return sent

    start, *parts = await answered(200)
    assert start["headers"] == [(b"x-own", b"1")] and [part["body"] for part in parts] == [body[:3], body[3:]]
    start, part = await answered(418)
    error = json.loads(part["body"])["error"]
    assert start["status"] == error["code"] == 418 and error["message"].startswith(message)
    assert check_clean("a refusal", iter((error["message"],))) == error["message"]


def test_an_adapter_that_vllm_ignored_or_cut_is_seen(tmp_path: Path) -> None:
    """What vLLM's layers hold is said here; that they hold it is in the contract, where every load is measured."""
    model = make_model(tmp_path / "base")
    folder = make_adapter(tmp_path / "run_a", model, seed=1)
    tensors = load_file(folder / "adapter_model.safetensors")
    size_A, size_B = (
        sum(float(t.double().square().sum()) for name, t in tensors.items() if kind in name)
        for kind in ("lora_A", "lora_B")
    )
    config = InferenceConfig.model_validate({"model": {"name": str(model), "lora": {"rank": 8}}})
    whole = (size_A, 4 * size_B)  # alpha is twice the rank
    gate = AdapterGate(config)
    gate("run_a@v1", folder)
    gate.check_sizes("run_a@v1", [[whole], [whole]])
    one_worker = [[None], [(0.0, 0.0)], [(size_A, size_B)], [(0.99 * size_A, 4 * size_B)]]
    for held in (*([each] for each in one_worker), *([[whole], each] for each in one_worker), [[whole, (size_A, 0.0)]]):
        gate("run_a@v1", folder)
        with pytest.raises(ValueError, match="its layers hold"):
            gate.check_sizes("run_a@v1", held)


def test_an_adapter_that_is_not_of_the_model_reaches_no_vllm(tmp_path: Path) -> None:
    """By its names, its shapes, or the model that it was trained on."""
    model, other = make_model(tmp_path / "base"), make_model(tmp_path / "other", attention_bias=True)
    folder = make_adapter(tmp_path / "run_a", model, seed=1)
    gate = AdapterGate(InferenceConfig.model_validate({"model": {"name": str(model), "lora": {"rank": 8}}}))
    gate("run_a@v1", folder)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, words = load_file(weights), json.loads(config.read_text())
    name = min(tensors)
    misfits = "adapter does not fit the model:"
    for spoiled, base, problem in (
        (tensors, other, f"its base model is {other}, not {model}"),
        (
            {**tensors, "x.lora_A.weight": tensors[name].clone()},
            model,
            f"{misfits} x.lora_A.weight is not in the model",
        ),
        ({**tensors, name: tensors[name][:, 1:].contiguous()}, model, f"{misfits} {name} has shape "),
        ({each: tensors[each] for each in tensors if each != name}, model, f"{misfits} {name} is missing"),
    ):
        save_file(spoiled, weights)
        config.write_text(json.dumps(words | {"base_model_name_or_path": str(base)}))
        with pytest.raises(ApiError) as caught:
            gate("run_a@v1", folder)
        assert caught.value.status == 422
        assert caught.value.message.startswith(f"adapter 'run_a@v1' is refused: {problem}")


def bytes_read() -> int:
    """Of this process, from files and whatever else."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])


def test_an_adapter_that_is_not_of_the_model_is_not_read(tmp_path: Path) -> None:
    """A file takes no room on a disk for zeros, and would in memory."""
    model, size = make_model(tmp_path / "base"), 256 << 20
    folder = make_adapter(tmp_path / "run_a", model, seed=1)
    gate = AdapterGate(InferenceConfig.model_validate({"model": {"name": str(model), "lora": {"rank": 8}}}))
    name = min(load_file(folder / "adapter_model.safetensors"))
    head = json.dumps({name: {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
    before = bytes_read()
    with pytest.raises(ApiError, match="adapter does not fit the model") as caught:
        gate("run_a@v1", folder)
    assert caught.value.status == 422 and bytes_read() - before < size // 16


def loading(config: InferenceConfig, size: tuple[float, float], logprob: float) -> tuple[VllmControl, list[int]]:
    """A vLLM whose layers hold `size`, and whose next token has `logprob`; and what it unloaded."""
    requests: dict[str, Any] = {}
    removed: list[int] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        requests[json.loads((await receive())["body"])["lora_name"]] = SimpleNamespace(lora_int_id=7)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def remove_lora(number: int) -> None:
        removed.append(number)

    async def generate(*args: Any, lora_request: Any) -> AsyncIterator[Any]:
        assert lora_request.lora_int_id == 7
        choice = SimpleNamespace(token_ids=[3], logprobs=[{3: SimpleNamespace(logprob=logprob)}])
        yield SimpleNamespace(outputs=[choice])

    engine: Any = SimpleNamespace(engine_core=Core(size), remove_lora=remove_lora, generate=generate)
    return VllmControl(config, vllm, engine, requests, AdapterGate(config)), removed


LOAD = {"type": "http", "path": "/v1/load_lora_adapter", "headers": []}


async def test_an_adapter_that_vllm_ignores_is_unloaded_and_refused(tmp_path: Path) -> None:
    """As a fault of the request: a server that fails (500) is asked for the same again and again."""
    model = make_model(tmp_path / "base")
    folder = make_adapter(tmp_path / "run_a", model, seed=1)
    config = InferenceConfig.model_validate({"model": {"name": str(model), "lora": {"rank": 8}}})
    control, removed = loading(config, (0.0, 0.0), -1.0)
    with pytest.raises(ApiError, match=r"'run_a@v1' correctly: its layers hold \(0\.0, 0\.0\)") as caught:
        await control.load_adapter(Request(LOAD), "run_a@v1", folder)
    assert (caught.value.status, removed, list(control.adapters())) == (400, [7], [])


@pytest.mark.parametrize("is_real", [False, *in_full(True)])
async def test_an_adapter_whose_numbers_overflow_is_unloaded_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_real: bool
) -> None:
    """In its files, or in what vLLM computes with them: as a fault of the adapter, which ends its run."""
    if is_real:  # seconds of imports, for the parameters of one request
        pytest.importorskip("vllm")
    else:
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    model = make_model(tmp_path / "base")
    folder = make_adapter(tmp_path / "run_a", model, seed=1)
    config = InferenceConfig.model_validate({"model": {"name": str(model), "lora": {"rank": 8}}})
    gate = AdapterGate(config)
    gate("run_a@v1", folder)
    size_A, size_B = gate._sizes["run_a@v1"]
    control, removed = loading(config, (size_A, size_B), -1.0)
    await control.load_adapter(Request(LOAD), "run_a@v1", folder)
    assert list(control.adapters()) == ["run_a@v1"] and not removed
    control, removed = loading(config, (size_A, size_B), math.nan)
    with pytest.raises(ApiError, match="'run_a@v1' is refused: logits are not finite") as caught:
        await control.load_adapter(Request(LOAD), "run_a@v1", folder)
    assert (caught.value.status, removed, list(control.adapters())) == (422, [7], [])
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0, 0] = math.inf
    save_file(tensors, weights)
    with pytest.raises(ApiError, match=r"'run_a@v1' is refused: .* is not finite") as caught:
        await control.load_adapter(Request(LOAD), "run_a@v1", folder)
    assert caught.value.status == 422


async def test_vllm_gets_no_request_that_is_out_of_range(tmp_path: Path) -> None:
    config = InferenceConfig.model_validate({"model": {"name": str(make_model(tmp_path / "base"))}})
    passed: list[Any] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        passed.append(json.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    engine: Any = SimpleNamespace(errored=False)
    control = VllmControl(config, vllm, engine, {}, AdapterGate(config))
    asked = httpx.ASGITransport(build_app(control, config))
    async with httpx.AsyncClient(transport=asked, base_url="http://127.0.0.1") as client:
        for number, route in enumerate(("/v1/completions", "/v1/chat/completions"), start=1):
            good = {"prompt": "x", "temperature": 0, "top_k": -1, "stream": True, "extra": [1]}
            assert (await client.post(route, json=good)).status_code == 200
            assert passed.pop() == good | {"priority": number}
            stops = [("stop", "x" * 257), ("stop", ["x", "y" * 257]), ("stop", ["x"] * 17)]
            numbers = [("temperature", 1e-320), ("repetition_penalty", 0), ("max_tokens", 2**70), ("n", 300.0)]
            numbers += [("prompt_logprobs", -1), ("prompt_logprobs", 21)]
            # vLLM takes a text with a number in it as that number.
            texts = [("temperature", "1e-39"), ("repetition_penalty", "1e-320"), ("n", "10000"), ("top_p", " 1e-9")]
            for name, value in stops + numbers + texts:
                response = await client.post(route, json={"prompt": "x", name: value})
                assert response.status_code == 400 and response.json()["error"]["param"] == name
        scored = {"prompt": [1, 2], "prompt_logprobs": 20}
        assert (await client.post("/v1/completions", json=scored)).status_code == 200
        assert passed.pop().items() >= scored.items()
        for more in ({"messages": []}, {"stream": True}, {"prompt": [1] * 10**5}, {"prompt": ["x" * 500] * 200}):
            response = await client.post("/v1/completions", json=scored | more)
            assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_logprobs"
        body = {"token_ids": [1], "sampling_params": {"temperature": 1e-39}}
        response = await client.post("/inference/v1/generate", json=body)
        assert response.status_code == 400 and "must be 0, or 0.01 to 2" in response.text
    assert not passed


async def test_an_answer_of_vllm_that_is_not_finite_is_the_fault_of_its_adapter(tmp_path: Path) -> None:
    """As vLLM tells it: as a bad request, when it cannot write such numbers."""
    model = make_model(tmp_path / "base")
    config = InferenceConfig.model_validate({"model": {"name": str(model), "lora": {"rank": 8}}})
    message = "Out of range float values are not JSON compliant: nan"

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"error": {"message": message}}).encode()})

    control = VllmControl(config, vllm, SimpleNamespace(errored=False), {"run_a@v3": None}, AdapterGate(config))
    asked = httpx.ASGITransport(build_app(control, config))
    async with httpx.AsyncClient(transport=asked, base_url="http://127.0.0.1") as client:
        for route, body in (("/v1/completions", {"prompt": [1]}), ("/inference/v1/generate", {"token_ids": [1]})):
            response = await client.post(route, json={"model": "run_a@v3", **body})
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (422, "InvalidAdapterError")
            assert error["message"].startswith("run_a@v3: logits are not finite")


def test_runs_get_places_in_turn_however_many_one_asks_for() -> None:
    order, ended = FairOrder(), contextlib.ExitStack()
    many = ended.enter_context(order.place("run_many", 1000))
    later = ended.enter_context(order.place("run_many", 10))
    with order.place("run_few", 8) as first, order.place("run_few", 8) as second:
        assert [first.priority, second.priority, many.priority, later.priority] == [8, 16, 1000, 1010]
        second.is_served = True
    # What was not served takes no place from its own run, and what was is behind all that ask from now on.
    with order.place("run_few", 8) as third, order.place("run_new", 1) as new:
        assert (third.priority, new.priority) == (24, 17)
    many.is_served = True
    ended.close()
    with order.place("run_few", 8) as few, order.place("run_many", 8) as again:
        assert few.priority == again.priority == 1008
    assert not order._ends


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": [1, 2, 3], "n": 4}, 4),
        ({"prompt": ["x", "y"], "n": 4}, 8),
        ({"prompt": [[1, 2], [3], [4]], "n": None}, 3),
        ({"messages": [], "n": 5}, 5),
        ({"prompt": "x", "n": 200.0}, 200),
        ({"prompt": [[7] * 500] * 32}, 32 + 250),
        ({"prompt": "x" * 512, "n": 4}, 6),
        ({"messages": [{"content": [{"text": "x" * 1020}, {"text": "y" * 4}]}]}, 5),
    ],
)
def test_places_of_a_request_are_counted_over_its_choices_and_prompts(body: dict[str, Any], expected: int) -> None:
    assert num_places(body) == expected


class Core:
    """Two data-parallel engines of one worker each, which answer as they are told."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.asked = answers, list[str]()

    async def call_utility_all_async(self, utility: str, method: str, *_: object) -> list[list[object]]:
        assert utility == "collective_rpc"
        self.asked.append(method)
        return [[answer] for answer in self.answers]

    async def do_nothing(self, **_: object) -> None: ...


async def test_weights_are_taken_by_all_engines_or_by_none(tmp_path: Path) -> None:
    model = make_model(tmp_path / "base")
    config = InferenceConfig.model_validate({"model": {"name": str(model)}})
    fits = {name: list(shape) for name, shape in model_shapes(str(model)).items()}
    asked = {}
    for answers, refusal in (
        ((fits, fits), None),
        ((fits, "cannot be read"), "cannot be read"),
        ((fits, {}), "missing"),
    ):
        core = Core(*answers)
        idle: Any = SimpleNamespace(
            engine_core=core, pause_generation=core.do_nothing, resume_generation=core.do_nothing
        )
        control = VllmControl(config, None, idle, {}, AdapterGate(config))
        try:
            await control.load_weights(model)
            assert refusal is None
        except ApiError as error:
            assert refusal is not None and refusal in error.message  # noqa: PT017 (one case is not refused)
        asked[refusal] = core.asked
    refused = ["prl_stage_weights", "prl_drop_weights"]
    assert asked == {None: ["prl_stage_weights", "prl_apply_weights"], "cannot be read": refused, "missing": refused}


@pytest.mark.parametrize("is_there", [True, False])
def test_caches_are_in_the_workspace_where_there_is_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path if is_there else tmp_path / "nobody"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    found = environment(InferenceConfig(output_dir=tmp_path / "workspace"), tmp_path)
    assert found.get("VLLM_CACHE_ROOT") == (None if is_there else str(tmp_path / "workspace" / "cache" / "vllm"))
    assert "TRITON_CACHE_DIR" not in found, "what is set stays"


@pytest.fixture
def tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_private_folder_goes_with_its_process_or_at_the_next_start(tmp: Path) -> None:
    with private_tmp() as folder:
        assert folder.parent == tmp and folder.stat().st_mode & 0o777 == 0o700
        (folder / "socket").touch()
    assert list(tmp.iterdir()) == []
    reading, writing = os.pipe()
    if (owner := os.fork()) == 0:
        try:
            with private_tmp() as folder:
                (folder / "left").touch()
                os.write(writing, os.fsencode(folder))
                signal.pause()
        finally:
            os._exit(1)
    try:
        held = Path(os.fsdecode(os.read(reading, 4096)))
        with private_tmp():
            assert (held / "left").exists(), "its owner lives"
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        os.close(reading)
        os.close(writing)
    (tmp / "other").mkdir()
    assert held.exists() and held.name.startswith(PREFIX)
    with private_tmp() as folder:
        assert set(tmp.iterdir()) == {folder, tmp / "other"}


def test_adapters_that_cannot_fit_are_refused_with_what_to_lower() -> None:
    data = {"max_concurrent_runs": 1024, "max_versions_per_run": 4, "model": {"lora": {"rank": 512}}}
    config = InferenceConfig.model_validate(data)
    shapes = {"layers.0.q_proj.weight": (64, 32), "layers.0.norm.weight": (64,), "layers.0.other.weight": (9, 9)}
    needed = {True: 3 * 4097 * 512 * (64 + 32) * 4, False: 2 * 4097 * 512 * (64 + 32) * 2}  # one adapter is of a chat
    for on_cpu, size in needed.items():
        check_adapter_room(config, shapes, size, on_cpu=on_cpu)
        with pytest.raises(StartError, match="adapters of rank 512"):
            check_adapter_room(config, shapes, size - 1, on_cpu=on_cpu)
    with pytest.raises(StartError, match=r"need 2\.25 GiB .*rank 512, 1\.00 GiB free: lower max_conc") as caught:
        check_adapter_room(config, shapes, 2**30, on_cpu=True)
    assert caught.value.exit_code == 2
