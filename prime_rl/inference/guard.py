"""The guard before both engines: who may ask, bodies of requests and answers, folders from below `output_dir` only.

A body is JSON in, decoded once and checked by its type, and JSON out. `/inference/v1/generate` takes and gives token
ids and logprobs, as the training clients of others ask: a translation to and from `/v1/completions`, so that both
engines answer alike whatever their own version of it is. What is too long for the model whatever its tokenizer makes of
it is refused before anything is computed from it, and so are whole weights that do not fit the model.

A client sees an error in OpenAI's shape: one clear line, never a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prime_rl.configs.inference import InferenceConfig
from prime_rl.contract.files import UNDECODABLE
from prime_rl.contract.layout import stable_marker
from prime_rl.contract.served import refusal
from prime_rl.lora.adapter_state import Shapes, mismatch, read_shapes, shapes_of
from prime_rl.utils.http_server import BodyRefused, read_body
from prime_rl.utils.runtime import http_refusal, is_out_of_memory
from prime_rl.utils.text import one_line, printable

MAX_MESSAGE_CHARS = 1000
# What a client reads of an adapter whose numbers overflow.
NOT_FINITE = "logits are not finite: its weights are too large, lower optim.lr"
# A full queue moves on within a second or so.
RETRY_AFTER_S = 1
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "InvalidAdapterError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A request that is refused.

    `status` is the HTTP status, `param` the field that is wrong, where there is one; `retry_after_s` is when the same
    request may be taken.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        # Both may have what the client sent in them.
        self.message = one_line(message, MAX_MESSAGE_CHARS)
        self.param = param and one_line(param)
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's JSON for this error."""
        kind = _TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def adapter_refused(name: str, error: Exception) -> ApiError:
    """The error for an adapter that is not loaded: 422 for what is in its files, 429 while memory lacks, else 400."""
    if is_out_of_memory(error):
        message = f"adapter {name!r} is not loaded: inference is out of memory, try again in {RETRY_AFTER_S} s"
        return ApiError(429, message, retry_after_s=RETRY_AFTER_S)
    status = 422 if isinstance(error, ValueError) else 400
    return ApiError(status, f"adapter {name!r} is refused: {error}", param="lora_path")


# Of the prompts of one request: they are put together in memory, some hundred bytes each.
MAX_PROMPT_LOGPROBS = 2_000_000


def check_ranges(body: Mapping[str, Any]) -> None:
    """Raises ApiError (400) for a sampling parameter of a request that is outside of its range, in both engines."""
    if refused := refusal(body):
        name, problem = refused
        raise ApiError(400, problem, param=name)
    num_top, n = body.get("prompt_logprobs"), body.get("n")
    if not isinstance(num_top, int | float):  # else the engine refuses it
        return
    # A token has a byte at least.
    num_tokens = sum(len(each.encode() if isinstance(each, str) else each) for each in prompts_of(body))
    num = num_tokens * int(1 + num_top) * int(n if isinstance(n, int | float) else 1)
    if "messages" in body or body.get("stream"):
        message = "prompt_logprobs: must be asked of /v1/completions, without stream"
    elif num > MAX_PROMPT_LOGPROBS:
        message = f"prompt_logprobs: found {num} in all: must be at most {MAX_PROMPT_LOGPROBS}"
    else:
        return
    raise ApiError(400, message, param="prompt_logprobs")


def prompts_of(body: Mapping[str, Any]) -> list[str | list[Any]]:
    """The prompts of a request for completions, one or several, each a text or token ids."""
    prompt: Any = body.get("prompt")
    is_one = not isinstance(prompt, list) or all(isinstance(each, int) for each in prompt)
    return [each for each in ([prompt] if is_one else prompt) if isinstance(each, str | list)]


# A thousand prompts of 2,000 tokens, as text.
MAX_BODY_BYTES = 16 * 2**20
# To decode a body holds up the event loop, in a thread too; lists and objects most. After a large one others go on.
MAX_BRACKETS, LARGE_BODY_BYTES, LARGE_BYTES_PER_S, LARGE_WAIT_S = 2**20, 2**20, 16 * 2**20, 5
# A client that sends so slowly would hold its connection, and what it has sent, for ever.
BODY_TIMEOUT_S = 60.0
# Beyond this the connection is closed in the middle of the body.
MAX_DISCARDED_BYTES = 16 * MAX_BODY_BYTES
# The supervisor must be able to see whether the server runs, without the key.
OPEN_ROUTES = frozenset({"/health"})
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


T = TypeVar("T")


async def decoded(request: Request, kind: type[T]) -> T:
    """The body as `kind`. Raises ApiError (400)."""
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except UNDECODABLE as error:
        raise refused(error) from error


def refused(error: Exception) -> ApiError:
    """The error that a client sees for one of msgspec's, with the field that is wrong."""
    problem, _, place = str(error).partition(" - at `$")
    field = place.strip(".`")
    return ApiError(400, f"{field}: {problem}" if field else f"The body is refused: {problem}", param=field or None)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer with `body` as JSON."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """The answer for a refused request, with the headers that belong to its status."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status in (408, 413):  # the rest of the body is not read
        headers["connection"] = "close"
    return json_response(error.body(), error.status, headers)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives `body` whole first, then what comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def run_of(request: Request) -> str:
    """The run that a request which generates is for, as the gateway has found it; "" for none."""
    run_id: str = request.scope.get("state", {}).get("run_id", "")
    return run_id


class Guard:
    """Middleware that refuses what `runtime.http_refusal` does and what has no key, and reads bodies before `app` does.

    Args:
        api_key: what `Authorization: Bearer` must carry; None: no key is required.
        hosts: names of the server beside those of the loopback. With a key any will do: no page of a browser has it.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._api_key = api_key
        self._hosts = hosts if api_key is None else None
        self._large_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused, and pass any other to `app`."""
        if scope["type"] == "http":
            headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
            try:
                if refused := http_refusal(scope["method"], headers, self._hosts):
                    raise ApiError(*refused)
                if scope["path"] not in OPEN_ROUTES and not self._has_key(scope):
                    raise ApiError(401, "A valid API key is required: Authorization: Bearer KEY.")
                body = await read_body(receive, MAX_BODY_BYTES, MAX_DISCARDED_BYTES, timeout_s=BODY_TIMEOUT_S)
                await self._hold_large(body)
                receive = replay(body, receive)
            except BodyRefused as error:
                await error_response(ApiError(error.status, error.message))(scope, receive, send)
                return
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _hold_large(self, body: bytes) -> None:
        """Wait until a large body may be decoded. Raises ApiError: 429 behind many, 400 for one of too many objects."""
        if len(body) > LARGE_BODY_BYTES:
            if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
                raise ApiError(400, f"The body has more than {MAX_BRACKETS} brackets: ask for less at a time.")
            begins = max(now := asyncio.get_running_loop().time(), self._large_at)
            if begins - now > LARGE_WAIT_S:
                raise ApiError(429, "Too many large requests at once.", retry_after_s=LARGE_WAIT_S)
            self._large_at = begins + len(body) / LARGE_BYTES_PER_S
            await asyncio.sleep(begins - now)

    def _has_key(self, scope: Scope) -> bool:
        if self._api_key is None:
            return True
        kind, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key.encode())


def confined_adapter(output_dir: Path, given: str) -> Path:
    """The adapter folder `given` with all links resolved. A relative path is taken from the working directory.

    Raises ApiError: 403 when the folder or one of its two files is outside of `output_dir`, 400 for other problems.
    """
    folder = _confined(output_dir, given, ADAPTER_FILES, "lora_path")
    if not all(os.path.isfile(folder / name) for name in ADAPTER_FILES):
        needed = " and ".join(ADAPTER_FILES)
        raise ApiError(400, f"lora_path {given[:200]!r} is not an adapter: it needs {needed}.", param="lora_path")
    return folder


def confined_weights(output_dir: Path, given: str) -> Path:
    """The same for a folder of whole weights, which must have its STABLE marker."""
    folder = _confined(output_dir, given, (WEIGHTS_FILE,), "weight_dir")
    if not os.path.isdir(folder):
        raise ApiError(400, f"weight_dir {given[:200]!r} is not a folder.", param="weight_dir")
    if not os.path.isfile(stable_marker(folder)):
        raise ApiError(400, f"weight_dir {given[:200]!r} is not complete: it has no STABLE.", param="weight_dir")
    return folder


def _confined(output_dir: Path, given: str, files: Sequence[str], param: str) -> Path:
    # These functions of `os.path` take every path without a NUL: one that is too long or a loop is not a file.
    if "\0" in given or not given:
        raise ApiError(400, f"{param} is empty or contains a NUL.", param=param)
    root, folder = os.path.realpath(output_dir), Path(os.path.realpath(given))
    if not all(Path(os.path.realpath(path)).is_relative_to(root) for path in (folder, *(folder / f for f in files))):
        absolute = "" if os.path.isabs(given) else " Give an absolute path."
        raise ApiError(403, f"{param} {given[:200]!r} is outside of {output_dir}.{absolute}", param=param)
    if printable(str(folder)) != str(folder):  # no answer that names it could be encoded
        raise ApiError(400, f"{param} {given[:200]!r} leads to a name that is not UTF-8.", param=param)
    return folder


# What completions do not have: bookkeeping of one engine's own tools.
NOT_PASSED_ON = frozenset({"routed_experts_prompt_start"})


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /inference/v1/generate; `stream` must be false."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    stream: bool = False

    def completion(self) -> dict[str, Any]:
        """Body of /v1/completions. Raises ApiError (400)."""
        if self.stream:
            raise ApiError(400, "stream: this route answers at once only.", param="stream")
        # The gateway has read these where they belong: here they would ask for something else than it has noted.
        if own := sorted(self.sampling_params.keys() & {*self.__struct_fields__, *Wanted.__struct_fields__}):
            message = f"sampling_params: found {own[0]!r}, which is no sampling parameter: move it out or remove it"
            raise ApiError(400, message, param=f"sampling_params.{own[0]}")
        beside = {"model": self.model, "cache_salt": self.cache_salt, "priority": self.priority}
        params = {name: value for name, value in self.sampling_params.items() if name not in NOT_PASSED_ON}
        given = {name: value for name, value in beside.items() if value is not None}
        return {**params, **given, "prompt": self.token_ids, "return_token_ids": True}

    def answer(self, completed: dict[str, Any]) -> dict[str, Any]:
        """From the answer of /v1/completions. Tokens have their ids, as `token_id:7`, where a text is expected."""
        choices = [
            {
                "index": choice["index"],
                "token_ids": choice["token_ids"],
                "logprobs": choice.get("logprobs") and {"content": _by_id(choice)},
                "finish_reason": choice["finish_reason"],
                "stop_reason": choice.get("stop_reason"),
            }
            for choice in completed["choices"]
        ]
        known = {name: completed.get(name) for name in ("model", "created", "usage")}
        of_prompt = {"prompt_logprobs": completed["choices"][0].get("prompt_logprobs"), "kv_transfer_params": None}
        return {"request_id": self.request_id or completed["id"], "choices": choices, **known, **of_prompt}


def _by_id(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice["logprobs"]["token_logprobs"]
    return [
        {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token_id, logprob in zip(choice["token_ids"], logprobs, strict=True)
    ]


MAX_MESSAGES = MAX_PROMPTS = 1024
# Of the values in messages, tools and what else a template takes.
MAX_PARTS = 65_536
# Parts of a message that are not text.
_MEDIA = frozenset({"image_url", "input_audio", "audio_url", "video_url", "file"})


class Wanted(msgspec.Struct):
    """The model and the prompt of a request that generates; other fields are the engine's to check."""

    model: Any = None
    prompt: Any = None
    messages: Any = None
    tools: Any = None
    documents: Any = None
    chat_template_kwargs: Any = None


class Room(NamedTuple):
    """The room of the model: `max_model_len` tokens, in `max_chars` characters at most."""

    max_model_len: int
    max_chars: int

    @classmethod
    def of(cls, max_model_len: int, vocabulary: Collection[str]) -> Room:
        """Return the room of a model with the tokens `vocabulary`: no text has more characters than so many longest."""
        return cls(max_model_len, max_model_len * max(map(len, vocabulary)))

    def check(self, asked: Wanted) -> None:
        """Raise ApiError (400) when a text of the request cannot fit."""
        prompts = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
        if len(prompts) > (most := max(self.max_model_len, MAX_PROMPTS)):  # ids or whole prompts
            raise ApiError(400, f"prompt: found {len(prompts)} items: must be at most {most}", param="prompt")
        for prompt in prompts:
            self._check("prompt", len(prompt) if isinstance(prompt, str) else 0)
        if isinstance(asked.messages, list) and len(asked.messages) > MAX_MESSAGES:
            message = f"messages: found {len(asked.messages)}: must be at most {MAX_MESSAGES}"
            raise ApiError(400, message, param="messages")
        beside = num_chars([asked.tools, asked.documents, asked.chat_template_kwargs])
        self._check("messages", num_chars(asked.messages, _MEDIA) + beside)

    def _check(self, what: str, num_chars: int) -> None:
        if num_chars > self.max_chars:
            message = (
                f"{what}: found {num_chars} characters: must be at most {self.max_chars} to fit into the "
                f"{self.max_model_len} tokens of max_model_len"
            )
            raise ApiError(400, message, param=what)


def num_chars(value: Any, without: Collection[str] = ()) -> int:
    """Return the characters of all texts in decoded JSON, those of the fields `without` apart.

    Raises ApiError (400) for more than MAX_PARTS values: to look at the millions that a body may hold takes too long.
    """
    total, num_parts, rest = 0, 0, [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, list):
            rest += each
        elif isinstance(each, dict):
            rest += [inner for name, inner in each.items() if name not in without]
        num_parts += 1
        if num_parts + len(rest) > MAX_PARTS:
            raise ApiError(400, f"messages: found more than {MAX_PARTS} values in one another", param="messages")
    return total


logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"


def meta_model(name: str) -> PreTrainedModel:
    """A model without weights, only for the names and shapes of its layers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name, trust_remote_code=False))


def model_shapes(name: str) -> Shapes:
    """Names and shapes of a model's weights as a model folder has them; a tied weight is there once."""
    return shapes_of(dict(meta_model(name).named_parameters()))


def weights_label(output_dir: Path, folder: Path) -> str:
    """The name of the weights in `folder` for trainer, servers and orchestrators; both without links."""
    return folder.relative_to(output_dir).as_posix()


def check_weight_file(folder: Path, shapes: Shapes) -> None:
    """Raises ApiError (400) unless the weight file of `folder` holds exactly these names and shapes. Reads its head."""
    path = folder / WEIGHTS_FILE
    with readable(path):
        found = read_shapes(path, len(shapes))
    check_fit(str(path), found, shapes)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong inside as `path` is read into an ApiError (400)."""
    try:
        yield
    except FileNotFoundError as error:
        raise ApiError(400, f"{path} is missing.", param="weight_dir") from error
    except (ValueError, OSError) as error:
        raise ApiError(400, f"{path} cannot be read: {error}", param="weight_dir") from error


def check_fit(name: str, found: Shapes, shapes: Shapes) -> None:
    """Raises ApiError (400) unless the names and shapes of the weights that are called `name` are these."""
    if problem := mismatch(found, shapes):
        raise ApiError(400, f"{name} does not fit the model: {problem}.", param="weight_dir")


def max_model_len(config: InferenceConfig) -> int:
    """`model.max_model_len`, or the positions that the model has when those are fewer (vLLM would not start then)."""
    wanted = config.model.max_model_len
    model = AutoConfig.from_pretrained(config.model.name, trust_remote_code=False).get_text_config()
    positions = getattr(model, "max_position_embeddings", None)
    rope = getattr(model, "rope_parameters", None) or {}
    # Models with stretched positions (YaRN and similar) accept more than `max_position_embeddings`.
    stretched = isinstance(rope, dict) and rope.get("rope_type", "default") != "default"
    if positions is None or stretched or wanted <= positions:
        return wanted
    logger.warning("model.max_model_len: %d reduced to the %d positions of the model", wanted, positions)
    return int(positions)
