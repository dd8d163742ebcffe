"""Requests to the inference server, drawn from the types of its requests and bent: a strategy of hypothesis."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import inspect

from prime_rl.inference import gateway
from prime_rl.inference.embedded import server as api
from prime_rl.inference.embedded.server import ChatRequest, CompletionRequest
from prime_rl.inference.guard import GenerateRequest

# Each POST route and the type of its body; no field stands in the body of the last.
TYPES: dict[str, type[msgspec.Struct] | None] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/inference/v1/generate": GenerateRequest,
    "/v1/load_lora_adapter": gateway._LoadRequest,
    "/v1/unload_lora_adapter": api._UnloadRequest,
    "/update_weights": gateway._UpdateRequest,
    "/reload_weights": None,
}
GETS = ("/health", "/metrics", "/v1/models")
# What other engines know, templates take, and nobody knows.
OTHER_FIELDS = ("echo", "best_of", "logit_bias", "tools", "response_format", "user", "stream_options", "messages", "x")
# Text that means something to a template, a tokenizer, a log or a path.
WORDS = (
    *("hello", "", " ", "a" * 300, "\0", "\n\r\t", "é" * 40, "\U0001f600", "\N{RIGHT-TO-LEFT OVERRIDE}", "e\u0301"),
    *("<eos>", "<|im_start|>system", "{{ 7 * 7 }}", "{% raw %}", "{{ messages.__class__.__mro__ }}", "%s%n", "${x}"),
    *("../../etc/passwd", "/dev/zero", "run_a@v1", "chat/x", "\x1b]2;x\x07", "x" * 5000),
)
NUMBERS = (0, 1, -1, 2**31, 2**63, -(2**63) - 1, 2**200, 1e308, 1e-320, -0.0, 0.5, 1.5)
# What is not JSON in the place of a value, and what is but should not be.
LITERALS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-",
    "01",
    '"\\ud800"',
    '"\\udfff\\ud800"',
    "nul",
    "[" * 3000,
    "{",
    "",
)


@dataclass(frozen=True)
class Asked:
    """One request; `body` is sent as it is."""

    method: str
    path: str
    body: bytes
    kind: str = "application/json"


def requests() -> SearchStrategy[Asked]:
    """Requests of which some are right, some nearly, and some not at all."""
    posts = [_posts(path, kind) for path, kind in TYPES.items()]
    return _mostly(st.one_of(posts[:3]), st.one_of(*posts[3:], _elsewhere()), 3)


def _mostly(usual: SearchStrategy[Any], rare: SearchStrategy[Any], one_in: int) -> SearchStrategy[Any]:
    return st.integers(1, one_in).flatmap(lambda number: rare if number == one_in else usual)


def _posts(path: str, kind: type[msgspec.Struct] | None) -> SearchStrategy[Asked]:
    bodies = _fields(kind).flatmap(_written) if kind else st.sampled_from([b"", b"{}", b"[1]", b"\xff", b"{"])
    return bodies.map(lambda body: Asked("POST", path, body))


def _elsewhere() -> SearchStrategy[Asked]:
    """Wrong paths, methods and kinds of bodies."""
    paths = st.one_of(
        st.sampled_from([*TYPES, *GETS, "/", "/v1/", "/v1/../metrics", "//health", "/health?x=%ff", "/%00", "/%ff%fe"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40).map(lambda text: f"/{text}"),
    )
    methods = st.sampled_from(["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "POST", "BREW"])
    kinds = st.sampled_from(["application/json", "text/plain", "application/json; charset=\xff", ""])
    return st.builds(Asked, methods, paths, st.binary(max_size=20), kinds)


def _fields(kind: type[msgspec.Struct]) -> SearchStrategy[dict[str, Any]]:
    """Values by field: most in their range, a few beside it or of another type, and fields that are not there."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    own = {each.encode_name: _mostly(_of(each.type), _anything(), 12) for each in info.fields}
    required = {name: own.pop(name) for name in [each.encode_name for each in info.fields if each.required]}
    few = st.lists(st.sampled_from(sorted(own)), max_size=4, unique=True) if own else st.just([])
    optional = few.flatmap(lambda names: st.fixed_dictionaries({name: own[name] for name in names}))
    other = _mostly(st.just({}), st.dictionaries(st.sampled_from(OTHER_FIELDS), _anything(), max_size=1), 5)
    whole = st.fixed_dictionaries(required)
    if "max_tokens" in own:  # without it a request takes all the room of the model, and a server the time for that
        whole = st.builds(dict.__or__, whole, _mostly(_few_tokens(own["max_tokens"]), st.just({}), 8))
    return st.builds(lambda *parts: {k: v for part in parts for k, v in part.items()}, whole, optional, other)


def _few_tokens(drawn: SearchStrategy[Any]) -> SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"max_tokens": _mostly(st.integers(1, 8), drawn, 8)})


def _of(kind: inspect.Type) -> SearchStrategy[Any]:
    """Values of a type of msgspec, small enough that a tiny model is done with them soon."""
    match kind:
        case inspect.IntType():
            low, high = kind.ge if kind.ge is not None else -3, kind.le if kind.le is not None else 60
            return st.one_of(st.integers(low, min(high, low + 4)), st.just(high))
        case inspect.FloatType():
            return st.floats(kind.ge or 0.0, kind.le or 2.0, exclude_min=kind.gt is not None, width=32)
        case inspect.StrType():
            low, high = kind.min_length or 0, kind.max_length or 10**6
            words = [word for word in WORDS if low <= len(word) <= high]
            return st.one_of(st.sampled_from(words), st.text(min_size=low, max_size=20))
        case inspect.BoolType():
            return st.booleans()
        case inspect.ListType():
            return st.lists(_of(kind.item_type), min_size=kind.min_length or 0, max_size=4)
        case inspect.UnionType():
            return st.one_of(*map(_of, kind.types))
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.StructType():
            return st.fixed_dictionaries({each.encode_name: _of(each.type) for each in kind.fields})
        case inspect.NoneType():
            return st.none()
        case inspect.DictType() | inspect.AnyType():
            return _anything()
        case _:
            raise NotImplementedError(kind)


def _anything() -> SearchStrategy[Any]:
    leaves = st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(WORDS))
    names = st.sampled_from([*OTHER_FIELDS, "type", "max_tokens", "conversation", "self", "chat_template", "é"])
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))


def _written(fields: dict[str, Any]) -> SearchStrategy[bytes]:
    """The body as JSON, most as it should be."""
    # A request that fills all rows would make the others wait, which is no fault of the server.
    fields = {name: min(value, 4) if name == "n" and type(value) is int else value for name, value in fields.items()}
    whole = json.dumps(fields).encode()
    name = next(iter(fields), "x")
    bent = st.one_of(
        st.sampled_from(LITERALS).map(lambda literal: whole[:-1] + f', "{name}": {literal}}}'.encode()),
        st.integers(0, len(whole)).map(lambda end: whole[:end]),
        st.integers(0, len(whole)).map(lambda at: whole[:at] + b"\xff\xfe" + whole[at:]),
        st.sampled_from([whole[:-1] + b"," + whole[1:], b"\xef\xbb\xbf" + whole, whole + whole, b"[" + whole + b"]"]),
        st.sampled_from([whole.decode().encode("utf-16"), b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000]),
    )
    return _mostly(st.just(whole), bent, 5)
