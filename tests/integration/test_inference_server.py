"""The server as a process: what it refuses to start with, how it ends, and a client that goes away."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from transformers import AutoModelForCausalLM

from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, read_status
from tests.budgets import in_release
from tests.inference_support import (
    RunningServer,
    error_of,
    greedy,
    logprob_tolerance,
    reference_logprobs,
    spawn,
    start,
    unread_request,
    write_config,
)
from tests.page_attacks import answered, ask
from tests.patience import PATIENCE_S
from tests.warm import warm

MAX_WAITING = 256


@pytest.fixture(scope="module")
def model(served_model: Path) -> Path:
    return served_model


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = start(
        "embedded", model, tmp_path_factory.mktemp("workspace"), max_num_seqs=4, embedded={"max_waiting": MAX_WAITING}
    )
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.stop()


def run_to_end(config: Path) -> tuple[int, str]:
    """Exit code and standard error of a server that does not come up."""
    server = warm("prime_rl.inference.server")
    done = server.run(["@", str(config)], env=os.environ, cwd=Path.cwd(), timeout_s=PATIENCE_S)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_busy_port_is_refused_before_the_model_is_loaded(engine: str, model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = write_config(
            tmp_path / "i.toml", output_dir=str(tmp_path / "o"), port=port, engine=engine, model={"name": str(model)}
        )
        code, stderr = run_to_end(config)
    assert code == 1
    assert stderr == (
        f"inference: port {port} on 127.0.0.1 is in use: stop the other server or set another `port` (0: a free one)\n"
    )
    assert not (tmp_path / "o").exists()


def test_wrong_use_is_one_line_and_exit_code_2(model: Path, tmp_path: Path) -> None:
    open_host = write_config(tmp_path / "a.toml", host="0.0.0.0", port=0, model={"name": str(model)})
    code, stderr = run_to_end(open_host)
    assert code == 2 and "PRL_API_KEY" in stderr and stderr.count("\n") == 1
    unknown = write_config(tmp_path / "b.toml", prot=1)
    code, stderr = run_to_end(unknown)
    assert code == 2 and "'port'" in stderr and stderr.count("\n") == 1


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    config = write_config(tmp_path / "a.toml", port=0, model={"name": str(tmp_path / "none")})
    code, stderr = run_to_end(config)
    assert code == 1 and str(tmp_path / "none") in stderr and "prl make-base" in stderr and stderr.count("\n") == 1


@pytest.mark.slow
def test_only_the_chosen_engine_is_imported(model: Path, tmp_path: Path) -> None:
    """And neither torch nor an engine before the checks are done."""
    script = (
        "import sys, prime_rl.inference.server\n"
        "heavy = {'torch', 'transformers', 'vllm', 'starlette', 'uvicorn'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import prime_rl.inference.embedded.server\n"
        "assert 'vllm' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, *in_release(signal.SIGINT)])
def test_a_signal_while_the_model_is_loaded_ends_the_server(signum: int, model: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "i.toml", output_dir=str(tmp_path), port=0, model={"name": str(model)}, num_threads=1
    )
    process = spawn(config, tmp_path / "log")
    try:
        wait_for(OutputDir(tmp_path).inference_status.exists, "the server to say that it starts", timeout_s=PATIENCE_S)
        status = read_status(OutputDir(tmp_path).inference_status, InferenceStatus)
        assert status is not None and status.state == "starting" and status.waiting_on == "the model to be loaded"
        process.send_signal(signum)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
    status = read_status(OutputDir(tmp_path).inference_status, InferenceStatus)
    assert status is not None and status.state == "stopped" and status.waiting_on is None
    assert "Traceback" not in (tmp_path / "log").read_text()


def spawned(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # children of imports come and go
        return "spawn_main" in " ".join(process.cmdline())
    return False


@pytest.mark.vllm
@pytest.mark.slow
def test_a_signal_while_vllm_starts_leaves_no_process(model: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "i.toml", output_dir=str(tmp_path), port=0, engine="vllm", model={"name": str(model)}
    )
    process = spawn(config, tmp_path / "log")
    family = psutil.Process(process.pid)
    try:
        wait_for(
            lambda: process.poll() is not None or any(spawned(child) for child in family.children()),
            "vLLM to start its engine process",
            timeout_s=PATIENCE_S,
        )
        children = family.children(recursive=True)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()[-3000:]
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert alive == []
    finally:
        for each in [*family.children(recursive=True), family] if family.is_running() else []:
            each.kill()
        process.wait()


def test_no_page_of_a_browser_reaches_a_server_without_a_key(server: RunningServer) -> None:
    port = httpx.URL(server.root_url).port
    assert port is not None
    for path in ("/health", "/v1/completions", "/reload_weights", "/nowhere"):
        assert answered(port, path) == [], path
    named = {"Host": f"localhost:{port}", "Content-Type": "Application/JSON; charset=utf-8"}
    assert ask(port, "POST", "/v1/completions", named, b'{"prompt": [5], "max_tokens": 1}')[0] == 200


def num_running(server: RunningServer) -> int:
    return metric(server, "prl_requests_running")


def num_generated(server: RunningServer) -> int:
    return metric(server, "prl_generated_tokens_total")


def metric(server: RunningServer, name: str) -> int:
    with server.http() as client:
        lines = client.get("/metrics").text.splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith(f"{name} "))))


def test_a_client_that_goes_away_frees_its_rows(server: RunningServer) -> None:
    with unread_request(server, prompt=[5], max_tokens=250, n=200, ignore_eos=True):
        wait_for(lambda: num_running(server) > 0, "the rows to run", timeout_s=PATIENCE_S)
    wait_for(lambda: num_running(server) == 0, "the rows of the client that went away to be free", timeout_s=PATIENCE_S)
    assert len(server.complete([5], max_tokens=3, ignore_eos=True)["choices"][0]["token_ids"]) == 3


@pytest.mark.numeric
def test_a_conversation_goes_on_from_what_was_computed(server: RunningServer, model: Path) -> None:
    """A turn sends the history with the sampled tokens. Their whole blocks are known, and the answer is the model's."""

    def counts() -> tuple[int, int]:
        queries, hits = (metric(server, f"prl_prefix_cache_{name}_total") for name in ("queries", "hits"))
        return queries, hits

    prompt, sampling = [5 + place % 60 for place in range(50)], {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    [first] = server.complete(prompt, **sampling)["choices"]
    history = [*prompt, *first["token_ids"]]
    before = counts()
    [second] = server.complete([*history, 7, 8, 9], **sampling)["choices"]
    queries, hits = (now - then for now, then in zip(counts(), before, strict=True))
    assert (queries, hits) == (len(history) + 2, (len(history) - 1) // 16 * 16)
    reference, turn = AutoModelForCausalLM.from_pretrained(model), [*history, 7, 8, 9]
    assert second["token_ids"] == greedy(reference, turn, 40)
    expected = reference_logprobs(reference, turn, second["token_ids"], 1.0)
    tolerance = logprob_tolerance(reference, turn)
    assert second["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=tolerance)


def test_turns_of_a_chat_share_their_beginning(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "a question of some letters, and then some more"}]
    hits = [0]
    for _ in range(3):
        before = metric(server, "prl_prefix_cache_hits_total")
        body = server.post("/v1/chat/completions", messages=messages, max_tokens=20, temperature=0).json()
        hits.append(metric(server, "prl_prefix_cache_hits_total") - before)
        answer = body["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and one more"}]
    assert hits[3] > hits[2] >= 32


@pytest.mark.slow
def test_a_slow_reader_does_not_hold_the_engine(server: RunningServer) -> None:
    """Its answer of some megabytes is more than the buffers of the connection take."""
    before = num_generated(server)
    with unread_request(server, prompt=[5], max_tokens=32, n=128, logprobs=20, ignore_eos=True):
        wait_for(lambda: num_generated(server) >= before + 32 * 128, "the request to be done", timeout_s=PATIENCE_S)
        assert len(server.complete([5], max_tokens=3, ignore_eos=True)["choices"][0]["token_ids"]) == 3


def test_a_full_queue_is_said_together_with_when_to_come_again(server: RunningServer) -> None:
    def ask(num_choices: int) -> httpx.Response:
        return server.post("/v1/completions", prompt=[5], max_tokens=1, n=num_choices)

    with unread_request(server, prompt=[5], max_tokens=250, n=200, ignore_eos=True):
        wait_for(lambda: num_running(server) == 4, "rows to run", timeout_s=PATIENCE_S)
        response = ask(100)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        words = r"(\d+) choices already wait, at most 256 may \(embedded\.max_waiting\): try again in 1 s\."
        said = re.fullmatch(words, error_of(response))
        # Four of the 200 run; where this came late, others have run and ended before.
        assert said is not None and 156 < int(said[1]) <= 196, error_of(response)
    wait_for(lambda: num_running(server) == 0, "the rows to be free", timeout_s=PATIENCE_S)
    assert ask(100).status_code == 200
    response = server.post("/v1/completions", prompt=[[5]] * 3, max_tokens=1, n=100)
    assert response.status_code == 400 and "300 choices (at most 256)" in error_of(response)


def test_streaming_is_refused_with_a_reason(server: RunningServer) -> None:
    response = server.post("/v1/completions", prompt="x", max_tokens=1, stream=True)
    assert response.status_code == 400 and "'stream' is not supported" in response.json()["error"]["message"]


def test_health_answers_while_requests_run(server: RunningServer) -> None:
    with server.http() as client:
        assert client.get("/health").status_code == 200


def test_status_shows_rows_that_run_and_wait(server: RunningServer) -> None:
    def status() -> InferenceStatus:
        found = read_status(OutputDir(server.output_dir).inference_status, InferenceStatus)
        assert found is not None
        return found

    with unread_request(server, prompt=[5], max_tokens=250, n=200, ignore_eos=True):
        wait_for(
            lambda: status().num_running == 4 and status().num_waiting > 0,
            "the status to show rows",
            timeout_s=PATIENCE_S,
        )
    wait_for(lambda: status().num_running == 0 == status().num_waiting, "the rows to be free", timeout_s=PATIENCE_S)


@pytest.mark.slow
def test_requests_in_flight_end_with_an_error_that_says_why(server: RunningServer) -> None:
    """The last test of this server."""
    body = {"prompt": [5], "max_tokens": 250, "n": 256, "ignore_eos": True}  # minutes of work
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.post, "/v1/completions", **body)
        wait_for(lambda: num_running(server) > 0, "the request to run", timeout_s=PATIENCE_S)
        assert server.stop() == 0
        response = pending.result()
    assert response.status_code == 503 and "shutdown" in response.json()["error"]["message"]
    assert "Traceback" not in server.log.read_text()
