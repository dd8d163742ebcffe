"""A tiny model, its tokenizer, random adapters, and a real server process for the inference tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import tomli_w
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from prime_rl.contract.files import wait_for
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import InferenceStatus, read_status
from prime_rl.lora.adapter_state import peft_names, save_peft
from tests.numeric import num_terms, rounding
from tests.patience import PATIENCE_S
from tests.warm import Started, warm

EOS, PAD = "<eos>", "<pad>"
LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:!?-_"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}! {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
if TYPE_CHECKING:  # it takes a second, and most tests do without
    from openai import OpenAI

# The server that tests share: its key, the adapters that are loaded, and room for so many runs of two versions each.
KEY = "not-a-secret"
LOADED = ("run_a@v1", "run_b@v1")
NUM_RUNS = 10
# Threads that wait for each other on a shared machine cost more than they give a tiny model.
torch.set_num_threads(1)


def make_model(folder: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2, **config: Any) -> Path:
    """A random Qwen3 with a tokenizer of one token a character."""
    vocab = {token: idx for idx, token in enumerate([PAD, EOS, *LETTERS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token=PAD)
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocab),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            # Large weights make a peaked distribution: greedy choices do not hang on the last digit.
            initializer_range=0.2,
            eos_token_id=vocab[EOS],
            pad_token_id=vocab[PAD],
            **config,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def linear_shapes(model_folder: Path) -> dict[str, tuple[int, int]]:
    """Name to (out, in) of the layers that can have an adapter."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in TARGETS
    }


def adapter_tensors(shapes: Mapping[str, tuple[int, int]], *, seed: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_out, num_in) in shapes.items():
        name_A, name_B = peft_names(name)
        tensors[name_A] = torch.randn(rank, num_in, generator=generator) * 0.1
        tensors[name_B] = torch.randn(num_out, rank, generator=generator) * 0.1
    return tensors


def make_adapter(folder: Path, model_folder: Path, *, seed: int, rank: int = 4) -> Path:
    """A random adapter in PEFT format that changes the model's answers."""
    folder.mkdir(parents=True)
    tensors = adapter_tensors(linear_shapes(model_folder), seed=seed, rank=rank)
    save_peft(folder, tensors, rank=rank, alpha=2 * rank, target_modules=TARGETS, base_model=str(model_folder))
    return folder


@dataclass
class RunningServer:
    """A server process that serves, and how to reach it."""

    process: subprocess.Popen[bytes] | Started
    output_dir: Path
    base_url: str
    model: str
    log: Path
    api_key: str | None = None

    @property
    def root_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    def openai(self, **kwargs: Any) -> OpenAI:
        from openai import OpenAI

        key = self.api_key or "none"
        return OpenAI(**{"base_url": self.base_url, "api_key": key, "max_retries": 0, "timeout": PATIENCE_S} | kwargs)

    def http(self, **kwargs: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(**{"base_url": self.root_url, "timeout": PATIENCE_S, "headers": headers} | kwargs)

    def post(self, route: str, **body: Any) -> httpx.Response:
        with self.http() as client:
            return client.post(route, json=body)

    def get(self, route: str) -> httpx.Response:
        with self.http() as client:
            return client.get(route)

    def load(self, name: str, path: Path) -> None:
        response = self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path))
        assert response.status_code == 200, response.text

    def unload(self, name: str) -> None:
        response = self.post("/v1/unload_lora_adapter", lora_name=name)
        assert response.status_code == 200, response.text

    def complete(self, prompt: Sequence[int] | str, **fields: Any) -> dict[str, Any]:
        """One /v1/completions request; returns the body."""
        body = {"model": self.model, "prompt": prompt, "logprobs": 1, "return_token_ids": True, **fields}
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def stop_and_leave_nothing(self) -> None:
        """SIGTERM ends it with 0, leaves no process and no socket, and its status says that it stopped."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        sockets = [path for each in family for path in sockets_of(each.pid)]
        assert self.stop() == 0, self.log.read_text()[-3000:]
        assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
        assert not any(path.exists() or (path.parent != Path("/tmp") and path.parent.exists()) for path in sockets)
        status = read_status(OutputDir(self.output_dir).inference_status, InferenceStatus)
        assert status is not None and status.state == "stopped" and status.adapters == []


@contextlib.contextmanager
def unread_request(server: RunningServer, **fields: Any) -> Iterator[None]:
    """A client that asks, reads nothing, and goes away at the end of the block."""
    body = json.dumps(fields).encode()
    url = httpx.URL(server.root_url)
    key = f"authorization: Bearer {server.api_key}\r\n" if server.api_key else ""
    with socket.create_connection((url.host, url.port or 0)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            + f"{key}content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        yield


def status_of(server: RunningServer) -> InferenceStatus:
    status = read_status(OutputDir(server.output_dir).inference_status, InferenceStatus)
    assert status is not None
    return status


def sockets_of(pid: int) -> list[Path]:
    """The files of the unix sockets that a process has open."""
    connections = psutil.Process(pid).net_connections(kind="unix")
    return [Path(each.laddr) for each in connections if each.laddr and str(each.laddr).startswith("/")]


def adapter_dir(server: RunningServer, name: str) -> Path:
    """The folder in which a trainer would publish the adapter."""
    run_id, _, version = name.partition("@v")
    return server.output_dir / run_id / "broadcast" / f"step_{version}"


def write_config(path: Path, **config: Any) -> Path:
    path.write_text(tomli_w.dumps(config), encoding="utf-8")
    return path


def spawn(
    config: Path, log: Path, env: Mapping[str, str] | None = None, *, is_warm: bool = False
) -> subprocess.Popen[bytes] | Started:
    """Start the server's own command, as the supervisor does: own session, output to a file.

    `is_warm`: in a fork of a process that has loaded torch.
    """
    if is_warm and (parent := warm("prime_rl.inference.server")).suits(environment := {**os.environ, **(env or {})}):
        return parent.start(["@", str(config)], env=environment, cwd=Path.cwd(), log=log)
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "prime_rl.inference.server", "@", str(config)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )


def start(
    engine: str, model: Path, output_dir: Path, env: Mapping[str, str] | None = None, **config: Any
) -> RunningServer:
    """Start a server on a free port and wait until it serves."""
    output_dir.mkdir(parents=True, exist_ok=True)
    model_table = {"name": str(model), "dtype": "float32", "max_model_len": 256, "lora": {"rank": 8}}
    defaults = {
        "output_dir": str(output_dir),
        "engine": engine,
        "port": 0,
        "max_concurrent_runs": 2,
        "max_versions_per_run": 2,
        "num_threads": 1,
        "model": model_table,
    }
    log = output_dir / "server.log"
    path = write_config(output_dir / "inference.toml", **{**defaults, **config})
    process = spawn(path, log, env, is_warm=engine == "embedded")
    status_file = OutputDir(output_dir).inference_status

    def serving() -> bool:
        status = read_status(status_file, InferenceStatus)
        return process.poll() is not None or (status is not None and status.state == "serving")

    try:
        wait_for(serving, f"the {engine} server to serve", timeout_s=PATIENCE_S)
        assert process.poll() is None, log.read_text()[-3000:]
    except BaseException:
        process.kill()
        raise
    status = read_status(status_file, InferenceStatus)
    assert status is not None
    return RunningServer(process, output_dir, status.base_url, str(model), log, (env or {}).get("PRL_API_KEY"))


@contextlib.contextmanager
def filled_slots(server: RunningServer, folder: Path) -> Iterator[list[str]]:
    """The adapter in `folder` under names of other runs until no slot is free; at the end only LOADED are left."""
    names = [f"run_fill{number}@v{version}" for number in range(NUM_RUNS) for version in (1, 2)][: -len(LOADED)]
    try:
        for name in names:
            server.load(name, shutil.copytree(folder, adapter_dir(server, name), dirs_exist_ok=True))
        yield names
    finally:
        for model in server.get("/v1/models").json()["data"]:
            if model["id"] not in {server.model, *LOADED}:
                server.unload(model["id"])


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], generated: list[int], temperature: float
) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(generated)[:, None])[:, 0].tolist()


def logprob_tolerance(model: PreTrainedModel, prompt: list[int]) -> float:
    """Between two engines of one float type: the rounding of the logit that was sampled, and of the sum of all."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits
    return 2 * rounding(num_terms(model)) * float(logits.abs().max())


def token_ids(body: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in body["choices"]]


def error_of(response: Any) -> str:
    """The message of an error in OpenAI's shape."""
    error = response.json()["error"]
    assert error["code"] == response.status_code
    assert "Traceback" not in error["message"]
    return str(error["message"])
