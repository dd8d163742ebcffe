"""A talk with versions of runs through a real inference server, which the runs use too: `daemons.chat`, `prl chat`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemons.chat import Chat, ChatSettings
from daemons.errors import ActionError
from prime_rl.contract.files import mark_stable, wait_for
from prime_rl.contract.layout import OutputDir
from tests.budgets import in_full
from tests.chat_support import GREEDY, RUNS_VERSIONS, answer_of, ask, chat_server, loaded
from tests.daemons_support import ROOT, RUN_TOML
from tests.inference_support import KEY, RunningServer, adapter_dir, make_model
from tests.integration.test_tui_tmux import Terminal
from tests.patience import PATIENCE_S
from tests.warm import warm

# With the others that start servers of this engine: a worker loads it once.
pytestmark = pytest.mark.xdist_group("server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    yield from chat_server(tmp_path_factory.mktemp("chat"))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRL_API_KEY", KEY)


def test_a_chat_has_the_answers_of_the_version_and_leaves_nothing(server: RunningServer) -> None:
    server.load("run_b@v1", adapter_dir(server, "run_b@v1"))
    with Chat(server.output_dir, "run_b@v1", GREEDY) as chat:
        assert loaded(server) == ["run_b@v1", "chat/run_b@v1"]
        first = ask(chat)
        assert first == answer_of(server, "run_b@v1", "hello") != answer_of(server, server.model, "hello")
        assert ask(chat, "and") == answer_of(server, "run_b@v1", "hello", first, "and")
        chat.reset()
        assert ask(chat) == first
        server.unload("run_b@v1")  # as the run does when it has a newer one
        assert ask(chat, "still") and len(chat.messages) == 4
    assert loaded(server) == []
    with Chat(server.output_dir, "run_b", GREEDY) as chat:
        assert chat.label == "run_b@v2"
    with Chat(server.output_dir, "base", GREEDY) as chat:
        assert ask(chat) == answer_of(server, server.model, "hello") and loaded(server) == []


def test_a_chat_takes_no_room_from_runs_and_the_newest_has_the_slot(server: RunningServer) -> None:
    for name in RUNS_VERSIONS:
        server.load(name, adapter_dir(server, name))
    shutil.copytree(adapter_dir(server, "run_a@v1"), adapter_dir(server, "run_late@v1"))
    response = server.post(
        "/v1/load_lora_adapter", lora_name="run_late@v1", lora_path=str(adapter_dir(server, "run_late@v1"))
    )
    assert response.status_code == 400 and "All 4 adapter slots are in use" in response.text
    first, second = (Chat(server.output_dir, name, GREEDY) for name in ("run_a@v1", "run_a@v2"))
    try:
        with first, second:
            assert loaded(server) == [*RUNS_VERSIONS, "chat/run_a@v2"]
            assert ask(second) == answer_of(server, "run_a@v2", "hello")
            assert ask(first) == answer_of(server, "run_a@v1", "hello")  # it takes the slot back
            response = server.post(
                "/v1/load_lora_adapter", lora_name="chat/run_b@v1", lora_path=str(adapter_dir(server, "run_b@v1"))
            )
            assert (
                response.status_code == 400 and "The adapter slot for chats is in use by chat/run_a@v1" in response.text
            )
        assert loaded(server) == list(RUNS_VERSIONS)
    finally:
        for name in RUNS_VERSIONS:
            server.unload(name)


def test_an_answer_can_be_stopped_and_the_server_stops_with_it(server: RunningServer) -> None:
    with Chat(server.output_dir, "run_a", ChatSettings(max_tokens=240, temperature=0.0)) as chat:
        answer = chat.answer("hello")
        next(answer)
        chat.stop()
        rest = "".join(answer)
        assert len(rest) < 240
        wait_for(
            lambda: b"prl_requests_running 0.0" in server.get("/metrics").content, "it to stop", timeout_s=PATIENCE_S
        )
        assert [message["role"] for message in chat.messages] == ["user", "assistant"]
        assert ask(chat, "again")


def test_a_stop_string_is_not_streamed(server: RunningServer) -> None:
    whole = answer_of(server, server.model, "hello")
    stop = whole[5:8]
    expected = answer_of(server, server.model, "hello", stop=stop)
    assert whole.startswith(expected) and stop not in expected
    client = server.openai()
    stream = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=12,
        temperature=0,
        stop=stop,
        stream=True,
        n=2,
    )
    texts, reasons = ["", ""], {}
    for event in stream:
        (choice,) = event.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert texts == [expected, expected] and reasons == {0: "stop", 1: "stop"}
    response = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], stream=True, logprobs=True
    )
    assert response.status_code == 400 and "without logprobs" in response.text


def test_what_cannot_be_talked_to_is_refused_in_one_line(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target, message in (
        ("run_c", "run 'run_c' not found"),
        ("run_a@v7", "does not have a version of step 7; its versions: 1, 2"),
        ("nonsense", "expected a run, RUN@vN, or base"),
    ):
        with pytest.raises(ActionError, match=message):
            Chat(server.output_dir, target).open()
    with pytest.raises(ActionError, match="start the workspace with prl up"):
        Chat(tmp_path, "base").open()
    with Chat(server.output_dir, "base", ChatSettings(system="x" * 300)) as chat:
        with pytest.raises(ActionError, match=r"inference refuses this: The prompt has .* tokens"):
            ask(chat)
        assert len(chat.messages) == 1  # the system prompt; the question was not answered
    monkeypatch.delenv("PRL_API_KEY")
    with pytest.raises(ActionError, match="set PRL_API_KEY or PRL_API_KEY_FILE"):
        Chat(server.output_dir, "run_a").open()
    assert loaded(server) == []


@pytest.fixture
def whole(server: RunningServer) -> Iterator[list[Path]]:
    """Three versions of `run_w`, which trains the whole model; the second is served, and afterwards the base model."""
    run = OutputDir(server.output_dir).run("run_w")
    run.control.mkdir(parents=True)
    run.orch_toml.write_text(RUN_TOML.format(max_steps=3, model=server.model))
    folders = [make_model(run.broadcast_dir(step), seed=step) for step in (1, 2, 3)]
    list(map(mark_stable, folders))
    serve(server, folders[1])
    yield folders
    assert server.post("/reload_weights").status_code == 200
    shutil.rmtree(run.path)


def serve(server: RunningServer, folder: Path) -> None:
    assert server.post("/update_weights", weight_dir=str(folder)).status_code == 200


def test_a_run_that_trains_the_whole_model_is_talked_to_as_inference_serves_it(
    server: RunningServer, whole: list[Path]
) -> None:
    with Chat(server.output_dir, "run_w", GREEDY) as chat:
        assert chat.label == "run_w@v2" and loaded(server) == []
        first = ask(chat)
        assert first == answer_of(server, server.model, "hello")
        serve(server, whole[2])  # as the run does with its next version
        chat.reset()
        assert ask(chat) != first and chat.label == "run_w@v3"
    for target, words in (("run_w@v2", "run_w@v2: a workspace that trains"), ("base", "the base model: chat with")):
        with pytest.raises(ActionError, match=f"serves run_w/broadcast/step_3 now, not {words}"):
            Chat(server.output_dir, target).open()
    with Chat(server.output_dir, "run_w@v3", GREEDY) as chat:
        serve(server, whole[1])
        with pytest.raises(ActionError, match="serves run_w/broadcast/step_2 now, not run_w@v3"):
            ask(chat)
        assert chat.messages == []
    done = piped(server, "run_w@v1", "hello\n")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1) and "not run_w@v1" in done.stderr


GREEDILY = ("--max-tokens", "12", "--temperature", "0")


def environment(server: RunningServer) -> dict[str, str]:
    return {**os.environ, "PRL_OUTPUT_DIR": str(server.output_dir), "PRL_API_KEY": KEY}


def prl_chat(server: RunningServer, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "daemons.cli", "chat", *args, *GREEDILY]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment(server), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def piped(server: RunningServer, target: str, lines: str) -> subprocess.CompletedProcess[str]:
    words = ["chat", target, *GREEDILY]
    return warm("daemons.cli").run(words, env=environment(server), cwd=ROOT, timeout_s=PATIENCE_S, stdin=lines)


def test_a_pipe_is_answered_line_by_line(server: RunningServer) -> None:
    done = piped(server, "run_a@v2", "hello\n\nand\n")
    server.load("run_a@v2", adapter_dir(server, "run_a@v2"))
    first = answer_of(server, "run_a@v2", "hello")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{first}\n{answer_of(server, 'run_a@v2', 'hello', first, 'and')}\n"
    server.unload("run_a@v2")
    acts = [json.loads(line) for line in (server.output_dir / "logs" / "audit.jsonl").read_text().splitlines()]
    assert (acts[-1]["action"], acts[-1]["run_id"], acts[-1]["detail"]) == ("chat", "run_a", "version 2")


@pytest.mark.parametrize("target", ["run_a", *in_full("base", "base alone")])
def test_environments_are_tried_with_a_version_or_the_base_model(
    server: RunningServer, tmp_path: Path, target: str
) -> None:
    """`prl env try` leaves nothing at the server; without one the base model has its own for as long."""
    file, output_dir = tmp_path / "own.toml", tmp_path if target == "base alone" else server.output_dir
    text = RUN_TOML.format(max_steps=3, model=server.model) + "[sampling]\nmax_tokens = 12\n"
    file.write_text(text, encoding="utf-8")
    words = ["env", "try", str(file), "-n", "1", "--json"]
    words += ["--model", target.partition(" ")[0], "--output-dir", str(output_dir)]
    done = warm("daemons.cli").run(words, env=environment(server), cwd=ROOT, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    (tried,) = json.loads(done.stdout)["envs"][0]["rollouts"]
    assert tried["error"] is None and 0 <= tried["reward"] <= 1 and 0 < tried["answer_tokens"][0] <= 12
    assert loaded(server) == [] and [path.name for path in tmp_path.iterdir()] == ["own.toml"]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_terminal_is_answered_until_quit(server: RunningServer, tmp_path: Path) -> None:
    """A new conversation, an answer that fails and an empty line do not end it. At the end the version is unloaded."""
    server.load("run_a@v1", adapter_dir(server, "run_a@v1"))
    first = answer_of(server, "run_a@v1", "hello").rstrip()
    second = answer_of(server, "run_a@v1", "hello", first, "and").rstrip()
    server.unload("run_a@v1")
    settings = [f"PRL_OUTPUT_DIR={server.output_dir}", f"PRL_API_KEY={KEY}", f"PYTHONPATH={ROOT}"]
    words = [sys.executable, "-m", "daemons.cli", "chat", "run_a@v1", "--max-tokens", "12", "--temperature", "0"]
    terminal = Terminal(tmp_path, ["env", *settings, *words])

    def lines() -> list[str]:
        return [line.rstrip() for line in terminal.text().splitlines() if line.strip()]

    def answered(question: str, *expected: str) -> None:
        """Until the screen ends with the question, the lines expected, and a new prompt."""
        terminal.type(question)
        terminal.press("Enter")
        after = [f"> {question}".rstrip(), *expected, ">"]
        wait_for(lambda: lines()[-len(after) :] == after, f"{after}", timeout_s=PATIENCE_S)

    try:
        terminal.wait("run_a@v1: /reset begins a new conversation, /quit ends\n>")
        answered("hello", first)
        answered("and", second)
        answered("/reset")
        answered("")
        answered("hello", first)
        terminal.type("a" * 600)  # more than the model's longest sequence
        terminal.press("Enter")
        terminal.wait("prl: inference refuses this: The prompt has [0-9]+ tokens")
        wait_for(lambda: lines()[-1] == ">", "the prompt", timeout_s=PATIENCE_S)
        answered("and", second)
        assert loaded(server) == ["chat/run_a@v1"]
        terminal.type("/quit")
        terminal.press("Enter")
        wait_for(lambda: not terminal.is_open(), "the end", timeout_s=PATIENCE_S)
        assert loaded(server) == []
    finally:
        terminal.close()


@pytest.mark.parametrize("number", [signal.SIGINT, *in_full(signal.SIGTERM)])
def test_an_interrupted_chat_unloads_its_version(server: RunningServer, number: signal.Signals) -> None:
    with prl_chat(server, "run_a@v2") as process:
        wait_for(lambda: loaded(server) == ["chat/run_a@v2"], "the version to be loaded", timeout_s=PATIENCE_S)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 130
    assert loaded(server) == []


def test_a_killed_chat_does_not_keep_the_slot(server: RunningServer) -> None:
    with prl_chat(server, "run_a@v2") as process:
        wait_for(lambda: loaded(server) == ["chat/run_a@v2"], "the version to be loaded", timeout_s=PATIENCE_S)
        process.kill()
    with Chat(server.output_dir, "run_b@v1", GREEDY) as chat:
        assert loaded(server) == ["chat/run_b@v1"] and ask(chat)
    assert loaded(server) == []
