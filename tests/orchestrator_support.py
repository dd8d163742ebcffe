"""Helpers of the orchestrator's tests: a tokenizer, run folders, a stand-in trainer, an inference server to break.

`FakeInference` speaks the HTTP of the real servers but generates nothing: its "completions" are the version that was
asked for, as a token, and some letters. It is there to inject faults and to control what finishes when; that the real
servers understand the orchestrator is shown in tests/integration.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prime_rl.configs.base import SamplingConfig, build, merge
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.files import mark_stable, staged_dir
from prime_rl.contract.layout import RunDir, list_rollout_steps, list_steps
from prime_rl.contract.served import BASE_WEIGHTS, LOGPROBS_HEADER, WEIGHTS_HEADER, parse_adapter_name
from prime_rl.orchestrator.client import CompletionRequest, Endpoint, ServerClient
from prime_rl.orchestrator.envs.base import Environment, Example, Outcome, Policy, Split
from prime_rl.orchestrator.policy import ChatTokenizer, PolicyVersions, TurnSampler
from prime_rl.orchestrator.pool import InferenceClient
from prime_rl.orchestrator.publication import AdapterPublication, Publication, WholeWeights
from prime_rl.orchestrator.rollout import RolloutWorker
from prime_rl.orchestrator.sampler import ExampleSampler
from tests.patience import PATIENCE_S

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Token ids of the specials come first, then one id a byte.
IM_START, IM_END = 1, 2
FIRST_BYTE = len(SPECIALS)


def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orchestrators of this process find at once what they look for every other second."""
    for interval in (
        "guard.MIN_LOOK_S",
        "guard.MAX_LOOK_S",
        "orchestrator.MAX_LOOK_S",
        "policy.RESTORE_RETRY_S",
        "pool.LOOK_EVERY_S",
        "publication.LEASE_POLL_S",
        "scheduler.LOAD_RETRY_S",
    ):
        monkeypatch.setattr(f"prime_rl.orchestrator.{interval}", 0.02)


def make_model(folder: Path) -> Path:
    """A model folder as far as the orchestrator reads it: byte tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


def run_config(model: Path, **over: Any) -> OrchestratorConfig:
    return build(OrchestratorConfig, config_data(model, **over), "test")


def config_data(model: Path, **over: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "batch_size": 4,
        "rollouts_per_example": 2,
        "seq_len": 256,
        "max_steps": 3,
        "model": {"name": str(model), "full_finetune": False},
        "sampling": {"max_tokens": 16},
        "env": [{"id": "reverse-text", "args": {"wording": "short", "num_examples": 20, "num_eval_examples": 4}}],
        "watch": {"rescan_s": 0.2},
    }
    return merge(base, over)


def make_run(output_dir: Path, run_id: str = "run_a") -> RunDir:
    """An empty run folder with control/ in it."""
    run = RunDir(output_dir / run_id)
    run.control.mkdir(parents=True)
    return run


def write_toml(run: RunDir, data: Mapping[str, Any]) -> Path:
    path = run.control / "orch.toml"
    path.write_text(tomli_w.dumps(data))
    return path


def publish(run: RunDir, version: int) -> None:
    """What a trainer does with a new policy version, without weights."""
    run.broadcast.mkdir(exist_ok=True)
    with staged_dir(run.broadcast_dir(version)) as folder:
        (folder / "adapter_config.json").write_text("{}")
        mark_stable(folder)


async def stand_in_trainer(run: RunDir, publish: Callable[[RunDir, int], None] = publish, keep: int = 100) -> None:
    """Publishes a version for every batch that it finds, forever; never ahead of the batches."""
    while True:
        done = max(list_steps(run.broadcast, stable_only=True), default=0)
        if done + 1 in list_rollout_steps(run):
            publish(run, done + 1)
        await asyncio.sleep(0.01)


def score_alike(body: dict[str, Any]) -> list[dict[str, Any] | None]:
    """A model for which each token has -9, and the likeliest are 0, 1, ..., with -1, -2, ..."""
    top = {str(number): {"logprob": -1.0 - number} for number in range(body["prompt_logprobs"])}
    return [None, *({str(token_id): {"logprob": -9.0}} | top for token_id in body["prompt"][1:])]


class FakeInference:
    """An ASGI app. What it got is in `requests`; how it behaves is set by the attributes.

    Attributes:
        gate: awaited by every completion with its request body; a test lets it go when it likes.
        letter: the text of every completion; None: a letter by its seed.
        answer: the tokens of every completion in place of that, by the body of its request.
        logprob: of every token, unless `answer` is set: then each token has its own.
        answered: of each answer that `answer` gave, the request and the choice.
        score: the `prompt_logprobs` of every request for such, by its body.
        logprobs_mode: what every answer names as such; None: no answer does.
        weights: the whole weights in force, by the name that its answers give them; they change between requests.
        num_cancelled: requests whose client hung up before the gate let them go.
        faults: for each coming request (path, body) -> HTTP status to answer with, or None to answer properly.
    """

    def __init__(self, model: Path) -> None:
        self.model = str(model)
        self.adapters: dict[str, str] = {}
        self.weights = BASE_WEIGHTS
        self.logprob: float | None = -0.5
        self.logprobs_mode: str | None = None
        self._between = asyncio.Condition()  # held while the weights change, which no completion lives through
        self._num_completing = 0
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.num_unknown = 0
        self.num_loads = 0
        self.num_cancelled = 0
        self.letter: int | None = None
        self.answer: Callable[[dict[str, Any]], list[int]] | None = None
        self.answered: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._tokenizer: Tokenizer | None = None
        self.score: Callable[[dict[str, Any]], list[Any]] = score_alike
        self.gate: Callable[[dict[str, Any]], Awaitable[None]] | None = None
        self.fault: Callable[[str, dict[str, Any]], int | None] = lambda path, body: None
        self.retry_after_s: int | None = None  # what an injected fault asks for
        self.api_key: str | None = None

    @property
    def completions(self) -> list[dict[str, Any]]:
        """The requests for completions so far."""
        return [body for path, body in self.requests if path == "/v1/completions"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        data = b""
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":  # a client that went away amid its request
                return
            data += event.get("body", b"")
            if not event.get("more_body"):
                break
        body = json.loads(data) if data else {}
        path = scope["path"]
        self.requests.append((path, body))
        answering = self._answer(path, body, dict(scope["headers"]))
        answered = await answering if self.gate is None else await self._unless_hung_up(answering, receive())
        if answered is None:
            return
        status, answer = answered
        weights = answer.pop(WEIGHTS_HEADER, None) if isinstance(answer, dict) else None
        payload = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
        if weights is not None:
            headers.append((WEIGHTS_HEADER.encode(), weights.encode()))
        if self.logprobs_mode is not None:
            headers.append((LOGPROBS_HEADER.encode(), self.logprobs_mode.encode()))
        if self.retry_after_s is not None and status >= 500:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": payload})

    async def _unless_hung_up(
        self, answering: Coroutine[Any, Any, tuple[int, Any]], hanging_up: Coroutine[Any, Any, Any]
    ) -> tuple[int, Any] | None:
        answer, hang_up = asyncio.ensure_future(answering), asyncio.ensure_future(hanging_up)
        try:
            await asyncio.wait({answer, hang_up}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            self.num_cancelled += 1
            return None
        finally:
            answer.cancel()
            hang_up.cancel()

    async def _answer(self, path: str, body: dict[str, Any], headers: dict[bytes, bytes]) -> tuple[int, Any]:
        if self.api_key is not None and headers.get(b"authorization") != f"Bearer {self.api_key}".encode():
            return 401, _error("invalid API key")
        if (status := self.fault(path, body)) is not None:
            return status, _error(f"injected {status}")
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in [self.model, *self.adapters]]}
        if path == "/v1/load_lora_adapter":
            return self._load(body)
        if path == "/v1/unload_lora_adapter":
            return (200, "ok") if self.adapters.pop(body["lora_name"], None) else (404, _error("no such adapter"))
        if path == "/v1/completions":
            async with self._between:
                self._num_completing += 1
            try:
                return await self._complete(body)
            finally:
                self._num_completing -= 1
                async with self._between:
                    self._between.notify_all()
        if path in ("/update_weights", "/reload_weights"):
            return await self._change_weights(Path(body["weight_dir"]) if body else None)
        return 404, _error("no such route")

    async def _change_weights(self, folder: Path | None) -> tuple[int, Any]:
        if folder is not None and not (folder / "STABLE").exists():
            return 400, _error(f"{folder} is not complete")
        async with self._between:
            await self._between.wait_for(lambda: not self._num_completing)
            self.num_loads += 1
            self.weights = "/".join(folder.parts[-3:]) if folder is not None else BASE_WEIGHTS
        return 200, {"weights": self.weights}

    def _load(self, body: dict[str, Any]) -> tuple[int, Any]:
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return 400, _error(f"{name} has already been loaded")
        if not (Path(path) / "STABLE").exists():
            return 400, _error(f"{path} is not an adapter")
        self.num_loads += 1
        self.adapters[name] = path
        return 200, "ok"

    async def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["model"]
        if not self._knows(name):
            return 404, _error(f"The model {name!r} does not exist.")
        if self.gate is not None:
            await self.gate(body)
        if not self._knows(name):  # unloaded while in use
            return 404, _error(f"The model {name!r} does not exist.")
        if "prompt_logprobs" in body:
            return 200, {"choices": [{"prompt_logprobs": self.score(body)}], WEIGHTS_HEADER: self.weights}
        choices = [self._choice(name, body, number) for number in range(body["n"])]
        return 200, {"choices": choices, WEIGHTS_HEADER: self.weights}

    def version_of(self, name: str) -> int:
        """The policy version that answers now to a request for `name`."""
        parsed = parse_adapter_name(name)
        return parsed[1] if parsed else int(self.weights.rpartition("_")[2]) if "/" in self.weights else 0

    def _knows(self, name: str) -> bool:
        if name == self.model or name in self.adapters:
            return True
        self.num_unknown += 1
        return False

    def _choice(self, model: str, body: dict[str, Any], number: int) -> dict[str, Any]:
        if self.answer is not None:
            self.answered.append((body, self._given(body, self.answer(body))))
            return self.answered[-1][1]
        letter = self.letter or 65 + (body["seed"] + number) % 26
        token_ids = [FIRST_BYTE + self.version_of(model), FIRST_BYTE + letter, IM_END][: body["max_tokens"]]
        stops = chr(letter) in body.get("stop", ())
        token_ids = token_ids[:2] if stops else token_ids
        return {
            "token_ids": token_ids,
            "logprobs": {"token_logprobs": [self.logprob] * len(token_ids)},
            "finish_reason": "stop" if stops or token_ids[-1] == IM_END else "length",
            "stop_reason": chr(letter) if stops else None,
            "text": "",
        }

    def _given(self, body: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        self._tokenizer = self._tokenizer or Tokenizer.from_file(f"{self.model}/tokenizer.json")
        token_ids, stop = token_ids[: body["max_tokens"]], None
        for end in range(1, len(token_ids) + 1) if body.get("stop") else ():
            text = self._tokenizer.decode(token_ids[:end])
            if stop := next((each for each in body["stop"] if each in text), None):
                token_ids = token_ids[:end]
                break
        return {
            "token_ids": token_ids,
            "logprobs": {
                "token_logprobs": [-((body["seed"] + 7 * at) % (2**24 - 3)) / 2**20 for at in range(len(token_ids))]
            },
            "finish_reason": "stop" if stop or token_ids[-1] == IM_END else "length",
            "stop_reason": stop,
            "text": "",
        }


def version_token(model: str) -> int:
    """The token by which a fake completion names its version."""
    parsed = parse_adapter_name(model)
    return FIRST_BYTE + (parsed[1] if parsed else 0)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


class _Server(uvicorn.Server):
    """One that ends at once: uvicorn's own looks for its end, and then for that of its requests, every 0.1 s."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the signals of the tests are theirs

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ended.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if tasks := list(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=0.1)


@contextlib.asynccontextmanager
async def serving(app: Any, port: int = 0) -> AsyncIterator[str]:
    """Serve `app` over real HTTP within this event loop; the value is the base URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off", ws="none")
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started or task.done(), "the server to start")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.ended.set()
        await task


async def until(condition: Callable[[], bool], what: str, deadline_s: float = PATIENCE_S) -> None:
    """Poll until `condition()` holds; fails with `what` at the deadline."""
    end = asyncio.get_running_loop().time() + deadline_s
    while not condition():
        assert asyncio.get_running_loop().time() < end, f"timed out waiting for {what}"
        await asyncio.sleep(0.01)


class TalkEnv:
    """An environment of `num_turns` turns; `on_rollout` may raise or wait. The reward identifies the example."""

    id = "talk"

    def __init__(
        self,
        num_examples: int = 10,
        num_turns: int = 1,
        on_rollout: Callable[[Example], None] = lambda example: None,
    ) -> None:
        self._examples = [Example(f"e{i}", [{"role": "user", "content": f"q{i}"}], "") for i in range(num_examples)]
        self._num_turns = num_turns
        self._on_rollout = on_rollout
        self.answers: list[str] = []

    def examples(self, split: Split) -> Sequence[Example]:
        return self._examples

    async def rollout(self, example: Example, policy: Policy) -> Outcome:
        self._on_rollout(example)
        messages = list(example.messages)
        for turn in range(self._num_turns):
            answer = await policy.complete(messages)
            self.answers.append(answer)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"more {turn}"}]
        return Outcome(0.5, {"turns": float(self._num_turns)})


async def sample(client: InferenceClient, model: Any, *, max_tokens: int = 8, seed: int = 3) -> list[int]:
    (completion,) = await client.complete(CompletionRequest(str(model), [5, 6], SamplingConfig(), max_tokens, seed))
    return completion.token_ids


async def answers(server: ServerClient) -> None:
    """To equip a server that needs nothing but the base model."""
    await server.list_models()


def make_client(urls: str | Sequence[str], output_dir: Path, **over: Any) -> InferenceClient:
    """A client of one server or several, which does not wait long before it looks again."""
    endpoints = [Endpoint(output_dir, url) for url in ([urls] if isinstance(urls, str) else urls)]
    return InferenceClient(endpoints, **{"equip": answers, "backoff_start_s": 0.01, **over})


def make_policy(client: InferenceClient, run: RunDir, model: Path) -> PolicyVersions:
    """The versions of a run that trains an adapter, on servers that stay; else see `connected`."""
    return PolicyVersions(AdapterPublication(run), client, str(model))


def connected(
    urls: str | Sequence[str], run: RunDir, model: Path, *, whole: bool = False, **over: Any
) -> tuple[InferenceClient, PolicyVersions]:
    """A client and the versions of a run that trains an adapter or the `whole` model, which servers get back."""
    publication: Publication = WholeWeights(run) if whole else AdapterPublication(run)
    client = make_client(urls, run.path.parent, equip=publication.equip, **over)
    return client, PolicyVersions(publication, client, str(model))


def make_worker(
    client: InferenceClient, policy: PolicyVersions, model: Path, envs: Mapping[str, Environment], **over: Any
) -> RolloutWorker:
    settings = {"seq_len": 256, "max_tokens": 8, "rollouts_per_example": 2, "seed": 1, **over}
    sampling = settings.pop("sampling", SamplingConfig(max_tokens=settings.pop("max_tokens")))
    return RolloutWorker(
        TurnSampler(client, policy, sampling, seq_len=settings.pop("seq_len")),
        ChatTokenizer.load(str(model)),
        envs,
        ExampleSampler(envs, settings["seed"]),
        **settings,
    )
