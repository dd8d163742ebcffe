"""A talk with one version of a run through the running inference: `prl chat`, and the same in the TUI.

The version is loaded under a name of its own (`chat/run_a@v3`), into the one adapter slot that is kept for chats: the
run may unload its own at any time, and loses no room. The newest chat has the slot; an older one takes it back with its
next question. What a killed chat left there is unloaded by the next. In a workspace without adapters only the weights
that inference serves at the moment can be talked to.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from daemons.details import find_version, parse_version
from daemons.errors import ActionError, WrongUseError, one_line_errors, record_act
from daemons.specs import inference_variable
from daemons.trash import existing_run
from daemons.workspace import NO_SAMPLING, is_needless
from prime_rl.contract.files import UNDECODABLE
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.served import BASE_WEIGHTS, adapter_name, chat_name, is_chat, parse_weights_name, refusal
from prime_rl.contract.status import DaemonStatus, InferenceStatus, is_alive, read_status
from prime_rl.utils.secrets import SecretError, read_secret
from prime_rl.utils.text import CleanText, clean_text, one_line

BASE = "base"
DEFAULT_MAX_TOKENS = 1024
CONNECT_TIMEOUT_S = 10.0
# A server that is busy with rollouts sends a token within seconds; new whole weights may hold it up for a minute.
READ_TIMEOUT_S = 120.0
MAX_ANSWER_BYTES = 1 << 20
_END = b"data: [DONE]"


@dataclass(frozen=True)
class ChatSettings:
    """The sampling of answers; null leaves it to the server. Raises WrongUseError for what no server takes."""

    system: str = ""
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float | None = None

    def __post_init__(self) -> None:
        if refused := refusal(vars(self)):
            raise WrongUseError(f"invalid {refused[1]}")


class Refused(ActionError):
    """An answer of inference other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"inference refuses this: {message}")
        self.status = status


class Chat:
    """One conversation. Open it, ask, close it; `stop` alone may be called from another thread.

    Args:
        target: a run (its newest version), `run_a@v3`, or "base".

    Attributes:
        label: what answers, such as `run_a@v3`; known when it is open.
        messages: the conversation, as it is sent.
    """

    def __init__(self, output_dir: Path, target: str, settings: ChatSettings | None = None) -> None:
        self._output = OutputDir(Path(output_dir))
        self._target = target
        self._settings = settings or ChatSettings()
        self._folder: Path | None = None  # of the adapter; None while whole weights answer
        self._whole: tuple[str | None, int | None] | None = None  # the run (None: the base model) and version of those
        self._model = ""
        self._server = Server("", None)
        self.label = one_line(target)
        self.messages: list[dict[str, str]] = []
        self.reset()

    @property
    def served(self) -> tuple[str, str]:
        """The address of inference, with `/v1`, and the name of the version there; known when it is open."""
        return f"{self._server.url}/v1", self._model

    def __enter__(self) -> Chat:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> None:
        """Find inference, and have the version served. Raises ActionError."""
        try:
            with one_line_errors(f"opening a chat with {self._target}"):
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        status = living_inference(self._output)[0]
        self._server, self._model = connect(self._output, status), status.model
        if self._target == BASE:
            self.label = one_line(BASE)
            self._answer_whole(None, None)
            return
        parsed = parse_version(self._target)
        if parsed is None:
            raise WrongUseError(f"invalid version {self._target!r}: expected a run, RUN@vN, or {BASE}")
        run = existing_run(self._output, parsed[0])
        if parsed[1] == 0 and not os.path.lexists(run.broadcast_dir(0)):  # the untouched adapter
            self.label = one_line(adapter_name(run.run_id, 0))
            self._answer_whole(None, None)
            return
        version = find_version(run, parsed[1])
        self.label = one_line(version.name)
        if version.adapter is None:
            self._answer_whole(run.run_id, parsed[1])
            return
        self._folder, self._model = version.adapter, chat_name(run.run_id, version.step)
        self._load()
        record_act(self._output, "chat", run.run_id, detail=f"version {version.step}")

    def answer(self, text: str) -> Generator[CleanText, None, None]:
        """Ask, and yield the answer as it comes, clean. Raises ActionError.

        Where whole weights answer they are those of now: `label` names them, and what has gone is refused.
        After `stop` it ends. What came until then is part of the conversation; a question without any answer is not.
        """
        if self._whole is not None:
            self._check_weights(*self._whole)
        self.messages.append({"role": "user", "content": text})
        parts: list[str] = []
        try:
            for part in self._parts():
                parts.append(part)
                yield clean_text(part)
        finally:
            if parts:
                self.messages.append({"role": "assistant", "content": "".join(parts)})
            else:
                self.messages.pop()

    def stop(self) -> None:
        """End the answer that is under way. From any thread."""
        self._server.stop()

    def reset(self) -> None:
        """Forget the conversation."""
        system = self._settings.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def close(self) -> None:
        """End the answer, and unload the version. Does nothing the second time; raises nothing."""
        self.stop()
        folder, self._folder = self._folder, None
        if folder is not None:
            with contextlib.suppress(ActionError):
                self._server.post("/v1/unload_lora_adapter", {"lora_name": self._model})

    def _answer_whole(self, run_id: str | None, wanted: int | None) -> None:
        self._whole = run_id, wanted
        self._check_weights(run_id, wanted)

    def _check_weights(self, run_id: str | None, wanted: int | None) -> None:
        """In a workspace without adapters: the weights in force must be those that are asked for."""
        weights = str(self._server.get("/health").get("weights", BASE_WEIGHTS))
        if run_id is None:
            if weights != BASE_WEIGHTS:
                raise ActionError(f"inference serves {one_line(weights)} now, not the base model: chat with that run")
            return
        version = parse_weights_name(run_id, weights)
        if version is None or wanted not in (None, version):
            raise ActionError(
                f"inference serves {one_line(weights)} now, not {self._target}: a workspace that trains whole models "
                "has one version at a time; prl runs export takes any version home"
            )
        self.label = one_line(adapter_name(run_id, version))

    def _load(self) -> None:
        """Have the adapter served, in the place of any chat's: a name may stand for other weights since a rollback."""
        assert self._folder is not None
        for name in [str(model.get("id")) for model in self._server.get("/v1/models").get("data", [])]:
            if is_chat(name):
                with contextlib.suppress(Refused):  # it was unloaded meanwhile
                    self._server.post("/v1/unload_lora_adapter", {"lora_name": name})
        path = str(self._folder.resolve())
        self._server.post("/v1/load_lora_adapter", {"lora_name": self._model, "lora_path": path})

    def _parts(self) -> Iterator[str]:
        """The text of an answer; what another chat has unloaded meanwhile is loaded again, once."""
        body = {
            "model": self._model,
            "messages": self.messages,
            "stream": True,
            "max_tokens": self._settings.max_tokens,
        }
        if self._settings.temperature is not None:
            body["temperature"] = self._settings.temperature
        try:
            yield from self._server.stream("/v1/chat/completions", body)
        except Refused as error:
            if error.status != http.HTTPStatus.NOT_FOUND or self._folder is None:
                raise
            self._load()
            yield from self._server.stream("/v1/chat/completions", body)


def living_inference(output: OutputDir) -> list[InferenceStatus]:
    """The servers of a workspace that serve, at least one. Raises ActionError."""
    found = [read_status(path, InferenceStatus) for path in output.inference_statuses().values()]
    living = [status for status in found if status is not None and is_alive(status, time.time())]
    if not living and is_needless(read_status(output.daemon_status("inference"), DaemonStatus)):
        raise ActionError(f"{NO_SAMPLING}: prl serve ID keeps a version of a run served, and starts it")
    if not living:
        raise ActionError(f"inference of {output.path} is not running: start the workspace with prl up")
    serving = [status for status in living if status.state == "serving"]
    if not serving:
        raise ActionError(f"inference is not ready: it waits for {one_line(living[0].waiting_on or living[0].state)}")
    return serving


def connect(output: OutputDir, status: InferenceStatus) -> Server:
    """A server of the workspace, with the key that it asks for. Raises ActionError."""
    variable = inference_variable(output)
    try:
        key = read_secret(variable, os.environ)
    except SecretError as error:
        raise ActionError(str(error)) from error
    return Server(status.base_url.removesuffix("/v1"), key, variable)


class Server:
    """One inference server, one request at a time.

    Args:
        url: without `/v1`.
        variable: of the key, for a message.
    """

    def __init__(self, url: str, key: str | None, variable: str = "") -> None:
        self.url = url
        self._url = urlsplit(url)
        self._key, self._variable = key, variable
        self._socket: socket.socket | None = None  # of the answer that is streamed
        self._is_stopped = False

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises ActionError."""
        with self._request("GET", path, None) as response:
            return _decoded(response.read(MAX_ANSWER_BYTES))

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """Send `body`. Raises Refused for an answer other than 200, ActionError without one."""
        with self._request("POST", path, body) as response:
            response.read(MAX_ANSWER_BYTES)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        """The text of server-sent events in OpenAI's format. After `stop` it ends."""
        self._is_stopped = False
        try:
            with self._request("POST", path, body) as response:
                while not self._is_stopped and not (line := response.readline(MAX_ANSWER_BYTES)).startswith(_END):
                    if not line:
                        raise ActionError("inference broke off the answer: see prl logs inference")
                    if line.startswith(b"data: {") and (text := _delta(_decoded(line.removeprefix(b"data: ")))):
                        yield text
        except ActionError:
            if not self._is_stopped:
                raise

    def stop(self) -> None:
        """End the answer that is streamed. From any thread."""
        self._is_stopped = True
        if (open_socket := self._socket) is not None:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        """The answer, when it is 200. Raises ActionError, also for what fails while it is read."""
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=CONNECT_TIMEOUT_S)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.connect()
            self._socket = connection.sock
            connection.sock.settimeout(READ_TIMEOUT_S)
            payload = None if body is None else msgspec.json.encode(body)
            connection.request(method, self._url.path + path, payload, headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise self._refused(response.status, response.read(MAX_ANSWER_BYTES))
            yield response
        except (OSError, http.client.HTTPException) as error:
            reason = one_line(str(error) or type(error).__name__)
            raise ActionError(f"inference at {self._url.netloc} does not answer: {reason}; see prl status") from error
        finally:
            self._socket = None
            connection.close()

    def _refused(self, status: int, data: bytes) -> ActionError:
        if status == http.HTTPStatus.UNAUTHORIZED:
            return ActionError(f"inference asks for its API key: set {self._variable} or {self._variable}_FILE")
        message = _decoded(data).get("error", {})
        text = message.get("message") if isinstance(message, dict) else None
        return Refused(status, one_line(str(text or f"status {status}"), 500))


def _decoded(data: bytes) -> dict[str, Any]:
    """A JSON object; {} for anything else."""
    try:
        value = msgspec.json.decode(data)
    except UNDECODABLE:
        return {}
    return value if isinstance(value, dict) else {}


def _delta(event: Mapping[str, Any]) -> str:
    """The text of one event. Raises ActionError for one that tells of a failure."""
    if isinstance(error := event.get("error"), dict):
        raise ActionError(f"inference stopped answering: {one_line(str(error.get('message')), 500)}")
    try:
        text = event["choices"][0]["delta"].get("content")
    except (KeyError, IndexError, TypeError, AttributeError):
        return ""
    return text if isinstance(text, str) else ""
