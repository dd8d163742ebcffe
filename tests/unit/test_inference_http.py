"""What is decided before an engine is asked: guard, protocol, start checks, and the rate in the status file."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from prime_rl.configs.inference import InferenceConfig, VllmConfig
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.notes import Item, WorkNote
from prime_rl.contract.status import InferenceStatus, StatusWriter, read_status
from prime_rl.inference.embedded import server as embedded_server
from prime_rl.inference.embedded.server import ChatRequest, CompletionRequest, parsed
from prime_rl.inference.guard import MAX_BODY_BYTES, ApiError, Guard, confined_adapter
from prime_rl.inference.serve import WINDOW_S, EngineReporter, ServerContext, Snapshot, serve
from prime_rl.inference.server import base_url, bind, check_model, main, read_api_key
from prime_rl.inference.vllm.server import command_line, environment, round_rank, server_arguments
from prime_rl.utils.runtime import StartError, is_loopback
from prime_rl.utils.secrets import handed_over


async def ask(
    app: ASGIApp,
    path: str,
    *chunks: bytes,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    gone: bool = False,
) -> tuple[int, dict[str, Any]]:
    """Send one request of JSON; returns status and body. `gone`: its client does not wait for the answer."""
    incoming = [{"type": "http.request", "body": c, "more_body": True} for c in chunks]
    incoming.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        if not incoming and not gone:
            await asyncio.Event().wait()
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    usual = {"host": "localhost", "content-type": "application/json"}
    given = usual | {name.lower(): value for name, value in (headers or {}).items()}
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    await app({"type": "http", "path": path, "method": method, "headers": raw}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def echo(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    """An application that returns what reached it."""
    message = await receive()
    assert not message["more_body"]
    body = json.dumps({"path": scope["path"], "body": message["body"].decode()}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


async def test_guard_hands_a_body_on_whole() -> None:
    guard = Guard(echo, api_key=None)
    status, body = await ask(guard, "/v1/completions", b"one ", b"two", headers={"Transfer-Encoding": "chunked"})
    assert (status, body["body"]) == (200, "one two")


async def test_guard_asks_for_the_key_except_for_health() -> None:
    guard = Guard(echo, api_key="secret")
    assert (await ask(guard, "/health", method="GET"))[0] == 200
    assert (await ask(guard, "/v1/models", method="GET", headers={"authorization": "Bearer secret"}))[0] == 200
    for header in ({}, {"authorization": "Bearer secre"}, {"authorization": "secret"}, {"x-api-key": "secret"}):
        status, body = await ask(guard, "/v1/models", method="GET", headers=header)
        assert status == 401 and body["error"]["code"] == 401 and "secret" not in str(body)


async def test_guard_bounds_the_body_whatever_the_header_says() -> None:
    guard = Guard(echo, api_key=None)
    piece = b"x" * (MAX_BODY_BYTES // 2)
    assert (await ask(guard, "/v1/completions", piece, piece))[0] == 200
    status, body = await ask(guard, "/v1/completions", piece, piece, b"x", headers={"content-length": "3"})
    assert status == 413 and "larger" in body["error"]["message"]


def test_adapters_outside_are_refused_by_any_way(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    outside = adapter(tmp_path / "workspace2" / "a")
    inside = adapter(workspace / "a")
    assert confined_adapter(workspace, str(inside)) == inside
    (workspace / "loop").symlink_to(workspace / "loop")
    (workspace / "out").symlink_to(outside)
    # A list of models that names it could not be encoded, for anybody.
    (workspace / "bytes").symlink_to(adapter(workspace / os.fsdecode(b"\xff")))
    for path, status in (
        (workspace / "bytes", 400),
        (outside, 403),
        (workspace / "out", 403),
        (workspace / ".." / "workspace2" / "a", 403),
        (workspace, 400),
        (workspace / "none", 400),
        (workspace / "loop", 400),
        (workspace / ("a" * 5000), 400),
        ("x\0y", 400),
        ("", 400),
    ):
        with pytest.raises(ApiError) as caught:
            confined_adapter(workspace, str(path))
        assert caught.value.status == status, str(path)[:200]


def test_a_relative_path_that_means_another_folder_here_is_told(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match=r"'outputs/a' is outside of .*\. Give an absolute path\.$"):
        confined_adapter(tmp_path, "outputs/a")


def test_fields_without_effect_are_accepted_at_neutral_values_only() -> None:
    neutral = {"top_k": -1, "frequency_penalty": 0.0, "user": "me", "echo": None, "min_p": None, "stream": False}
    assert parsed({"prompt": "x", **neutral}, CompletionRequest) == parsed({"prompt": "x"}, CompletionRequest)
    for name, value in (
        ("length_penalty", 2),
        ("stream", True),
        ("echo", True),
        ("logit_bias", {"1": 2}),
        ("temprature", 1),
        ("top_k", 2**70),
        ("top_logprobs", 1),
        ("n", True),
        ("seed", 2**63),
        ("temperature", "1"),
        ("stop", ["a", ""]),
        ("stop", [str(number) for number in range(17)]),
        ("stop_token_ids", [-1]),
        ("min_tokens", 2**31),
        ("temperature", 1e-320),
        ("min_p", 1e-320),
        ("max_tokens", 0),
    ):
        with pytest.raises(ApiError, match=name) as caught:
            parsed({"prompt": "x", name: value}, CompletionRequest)
        assert caught.value.status == 400 and (caught.value.param or "").startswith(name)
    with pytest.raises(ApiError, match="min_tokens"):
        parsed({"prompt": "x", "max_tokens": 3, "min_tokens": 4}, CompletionRequest)
    with pytest.raises(ApiError, match="tools"):
        parsed({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, ChatRequest)


def test_prompts_are_told_apart() -> None:
    def prompts(prompt: object) -> Any:
        return parsed({"prompt": prompt}, CompletionRequest).prompt

    assert prompts("ab") == ["ab"] and prompts([1, 2]) == [[1, 2]] and prompts([]) == [[]] and prompts("") == [""]
    assert prompts(["a", "b"]) == ["a", "b"] and prompts([[1], "b"]) == [[1], "b"] and prompts([[1]]) == [[1]]
    for bad in ([-1], [1.5], [True], {}, None, [[["a"]]], [1, "a"], [1, [1]], ["a"] * 1025):
        with pytest.raises(ApiError):
            prompts(bad)


def test_chat_messages_are_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parsed({"messages": [{"role": "user", "content": parts}]}, ChatRequest)
    assert request.messages[0].for_template() == {"role": "user", "content": "a\nb"}, "as vLLM joins them"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ApiError, match=r"messages\[0\]\.content\[0\]\.type: .*'image_url'"):
        parsed({"messages": [{"role": "user", "content": image}]}, ChatRequest)
    with pytest.raises(ApiError):
        parsed({"messages": [{"role": "assistant", "tool_calls": []}]}, ChatRequest)
    with pytest.raises(ApiError, match="top_logprobs needs logprobs"):
        parsed({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, ChatRequest)


def test_beyond_loopback_a_key_is_needed() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))
    config = InferenceConfig(host="0.0.0.0", api_key_var="KEY")
    assert read_api_key(config, {"KEY": "k"}) == "k"
    for environ in ({}, {"KEY": ""}, {"PRL_API_KEY": "k"}):
        with pytest.raises(StartError, match="KEY") as caught:
            read_api_key(config, environ)
        assert caught.value.exit_code == 2
    assert read_api_key(InferenceConfig(), {}) is None


def test_a_model_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in (str(tmp_path / "none"), str(tmp_path), "owner/name"):
        with pytest.raises(StartError, match=name):
            check_model(name)
    (tmp_path / "hf" / "hub" / "models--owner--name").mkdir(parents=True)
    check_model("owner/name")
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", 0) as free:
        assert free.getsockname()[1] > 0
    with pytest.raises(StartError, match=r"cannot listen on 203\.0\.113\.1"):
        bind("203.0.113.1", 0)


async def test_answers_on_a_kept_connection_are_not_held_back() -> None:
    """Nagle's delay and the delayed acknowledgement of the client together are 40 ms."""
    is_nodelay: list[int] = []

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        is_nodelay.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    server = await asyncio.start_server(connected, sock=bind("127.0.0.1", 0))
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await reader.read()
        writer.close()
        await writer.wait_closed()
    assert is_nodelay == [1]


async def test_the_loop_of_an_idle_server_turns(tmp_path: Path) -> None:
    writer = StatusWriter(OutputDir(tmp_path).inference_status, InferenceStatus())
    assert writer.status.loop is None

    def stop() -> bool:
        writer.update(state=f"look {writer.status.loop}")
        return (writer.status.loop or 0) >= 3

    context = ServerContext(InferenceConfig(), bind("127.0.0.1", 0), None, stop, writer)
    await asyncio.wait_for(serve(echo, context, alive=lambda: True, stats=Snapshot), 60)
    writer.close()
    status = read_status(writer.path, InferenceStatus)
    assert status is not None and (status.loop or 0) >= 3


def test_base_url_is_one_that_can_be_reached() -> None:
    assert base_url("127.0.0.1", 8000) == "http://127.0.0.1:8000/v1"
    assert base_url("0.0.0.0", 8000) == "http://127.0.0.1:8000/v1"
    assert base_url("::", 8000) == "http://[::1]:8000/v1"


def test_tokens_per_second_are_those_of_the_last_seconds(tmp_path: Path) -> None:
    writer = StatusWriter(OutputDir(tmp_path).inference_status, InferenceStatus())
    first = Snapshot(adapters=["run_a@v1"], num_running=3, num_waiting=1, kv_use=0.25)
    snapshots = [replace(first, num_tokens=n) for n in (0, 100, 300)]
    times = [0.0, 0.0, 1.0, 2.0]
    reporter = EngineReporter(writer, lambda: snapshots.pop(0), clock=lambda: times.pop(0))
    rates = []
    for _ in range(3):
        reporter.tick()
        rates.append(writer.status.tokens_per_s)  # type: ignore[attr-defined]
    assert rates == [0.0, 100.0, 150.0]
    assert read_status(writer.path, InferenceStatus) is not None and writer.status.kv_use == 0.25  # type: ignore[attr-defined]
    for second in range(1, 8):
        snapshots.append(Snapshot(num_tokens=300))
        times.append(2.0 + second * WINDOW_S / 5)
        reporter.tick()
    writer.close(state="stopped")
    status = read_status(writer.path, InferenceStatus)
    assert status is not None and status.tokens_per_s == 0.0 and status.adapters == []


async def test_a_dead_engine_ends_the_server(tmp_path: Path) -> None:
    writer = StatusWriter(OutputDir(tmp_path).inference_status, InferenceStatus())
    alive = [True, True, False]
    context = ServerContext(InferenceConfig(), bind("127.0.0.1", 0), None, lambda: False, writer)
    with context.sock, pytest.raises(StartError, match="engine has failed"):
        await serve(Guard(echo, api_key=None), context, alive=lambda: alive.pop(0), stats=Snapshot)
    assert alive == []
    writer.close()


def test_vllm_gets_our_config_in_its_words() -> None:
    data = {
        "engine": "vllm",
        "num_threads": 3,
        "max_concurrent_runs": 3,
        "max_versions_per_run": 2,
        "model": {"name": "models/x", "dtype": "bfloat16", "max_model_len": 64, "lora": {"rank": 12}},
        "vllm": {"kv_cache_gb": 0.5, "extra_args": {"seed": 4, "enable_prefix_caching": False}},
    }
    config = InferenceConfig.model_validate(data)
    line = command_line(server_arguments(config, max_model_len=64, on_cpu=True))
    for flag, value in (
        ("--model", "models/x"),
        ("--served-model-name", "models/x"),
        ("--dtype", "bfloat16"),
        ("--max-model-len", "64"),
        ("--max-loras", "7"),
        ("--max-lora-rank", "16"),
        ("--logprobs-mode", "processed_logprobs"),
        ("--kv-cache-memory-bytes", str(2**29)),
        ("--seed", "4"),
    ):
        assert line[line.index(flag) + 1] == value
    raw = server_arguments(config.replace(logprobs_mode="raw_logprobs"), max_model_len=64, on_cpu=True)
    assert raw["logprobs_mode"] == "raw_logprobs"
    assert {"--enable-lora", "--enforce-eager", "--no-enable-prefix-caching"} <= set(line)
    on_gpu = server_arguments(config, max_model_len=64, on_cpu=False)
    at = line.index("--lora-target-modules") + 1
    assert config.model.lora is not None
    assert line[at : at + 7] == list(config.model.lora.target_modules), "none on the head"
    assert "--gpu-memory-utilization" in command_line(on_gpu)
    auto = InferenceConfig()
    of_auto = [server_arguments(auto, max_model_len=64, on_cpu=on_cpu) for on_cpu in (True, False)]
    assert [(each["max_num_seqs"], each["enforce_eager"]) for each in of_auto] == [(64, True), (256, False)]
    assert (auto.model.dtype, [each["dtype"] for each in of_auto]) == ("auto", ["float32", "bfloat16"])
    chosen = InferenceConfig(max_num_seqs=7, vllm=VllmConfig(enforce_eager=True))
    found = server_arguments(chosen, max_model_len=64, on_cpu=False)
    assert (found["max_num_seqs"], found["enforce_eager"]) == (7, True)
    assert environment(config, Path("/tmp/x"))["OMP_NUM_THREADS"] == "3"
    assert environment(config, Path("/tmp/x"))["VLLM_RPC_BASE_PATH"] == "/tmp/x"
    assert "OMP_NUM_THREADS" not in environment(InferenceConfig(), Path("/tmp/x"))
    assert [round_rank(rank) for rank in (1, 2, 16, 17, 512)] == [1, 8, 16, 32, 512]


def test_what_the_config_itself_sets_cannot_be_set_twice() -> None:
    config = InferenceConfig.model_validate({"vllm": {"extra_args": {"max_loras": 1, "port": 1}}})
    with pytest.raises(StartError, match="max_loras, port"):
        server_arguments(config, max_model_len=64, on_cpu=True)


def tell_and_end(context: ServerContext) -> None:
    """In the place of an engine."""
    held = [each.resolve().name for each in Path("/proc/self/fd").iterdir()]
    print(context.api_key, any("memfd" in each for each in held), "PRL_API_KEY_FILE" in os.environ, flush=True)
    WorkNote(OutputDir(context.config.output_dir).replica_work(1)).write([Item("run_a", "served run_a@v1")])
    if context.config.log.level == "error":
        raise StartError("the engine has failed")


def become_server(flags: Sequence[str], environ: Mapping[str, str], out: Path) -> None:
    """The server's command in this process, which has loaded it. Never returns."""
    code = 99
    try:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
        sys.stdout = os.fdopen(1, "w")
        os.environ.clear()
        os.environ.update(environ)
        embedded_server.run = tell_and_end
        code = main(flags)
    finally:
        os._exit(code)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="keys are in files without a name on Linux only")
@pytest.mark.parametrize(("level", "code"), [("info", 0), ("error", 1)])
def test_a_server_holds_no_open_key_and_one_that_was_stopped_leaves_no_run_to_blame(
    tmp_path: Path, level: str, code: int
) -> None:
    """The note of what it works on stays when its engine fails, and only then."""
    model, output = tmp_path / "model", OutputDir(tmp_path / "workspace")
    model.mkdir()
    (model / "config.json").write_text("{}")
    flags = {"output_dir": output.path, "model.name": model, "port": 0, "replica": 1, "log.level": level}
    with handed_over({**os.environ, "PRL_API_KEY": "k"}, ["PRL_API_KEY"]) as (environ, _):
        if (pid := os.fork()) == 0:
            become_server([f"--{name}={value}" for name, value in flags.items()], environ, tmp_path / "out")
        found = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert (found, (tmp_path / "out").read_text()) == (code, "k False False\n")
    assert output.replica_work(1).exists() is bool(code)
