"""The reading of a config: TOML file, then `--a.b value` overrides, then one strict model. Errors name the place.

    python -m prime_rl.trainer.train @ trainer.toml --model.name models/base

An error names the file, the key, the value found and the values allowed, of an unknown key the nearest.
The tables that more than one process reads are here too, and the sampling of completions: what vLLM takes, under its
names.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar, get_args
from urllib.parse import urlsplit

import tomli
import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from prime_rl.contract.files import FileRefused, read_file
from prime_rl.contract.served import MAX_STOP_CHARS, MAX_STOPS, RANGES, TEMPERATURE


class BaseConfig(BaseModel):
    """Base of all configs: unknown keys are errors, values are frozen, field docstrings are help texts (`docs`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def replace(self, **changes: Any) -> Self:
        """A validated copy with `changes`."""
        return type(self).model_validate({**self.model_dump(exclude_unset=True), **changes})

    @classmethod
    def docs(cls) -> dict[str, str]:
        """Field to its docstring, in one line. Read from the sources when asked: that is too dear for every start."""
        bases = reversed([base for base in cls.__mro__ if issubclass(base, BaseConfig)])
        return {name: text for base in bases for name, text in _docs(base.__module__).get(base.__name__, {}).items()}


@cache
def _docs(module: str) -> dict[str, dict[str, str]]:
    """Class of a module to its `docs`, without those of its bases."""
    found: dict[str, dict[str, str]] = {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for each in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, text in pairwise(each.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                value = text.value if isinstance(text, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    # A TOML key that is a word of Python has a field with an underscore behind it.
                    found.setdefault(each.name, {})[field.target.id.rstrip("_")] = " ".join(value.value.split())
    return found


ConfigT = TypeVar("ConfigT", bound=BaseConfig)
# No config of ours has a twentieth of it. What is larger (a device, a log) is never read to its end. The trainer reads
# configs between two updates: at both of these limits one takes it a third of a second.
MAX_TOML_BYTES = 256 << 10
# How a file in UTF-16 begins.
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# Of all tables and lists: a mistake in each is an error object, and tens of thousands of them take seconds.
MAX_TOML_VALUES = 10_000
# What is nested deeper, or is a larger number, cannot be passed on as JSON.
MAX_TOML_LEVELS = 64
# All of a file with as many mistakes as lines would take hours to tell.
MAX_PROBLEMS = 50


@dataclass(frozen=True)
class ConfigProblem:
    """One problem of a config. `key` is dotted ("model.lora.rank", "env.0.id"), or "" for the whole file."""

    key: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.key}: {self.message}" if self.key else f"{where}{self.message}"


NOT_FOUND = ConfigProblem("", "not found")


class ConfigError(ValueError):
    """An invalid config: all its problems, each with its place."""

    def __init__(self, source: str, problems: Sequence[ConfigProblem]) -> None:
        self.source = source
        self.problems = list(problems)
        text = "; ".join(map(str, self.problems))
        super().__init__(f"not found: {source}" if self.problems == [NOT_FOUND] else f"{source}: {text}")


class ConfigParseError(ConfigError):
    """The text is not valid TOML (perhaps half written)."""


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML; a byte order mark is left out.

    Raises ConfigParseError with the line, whatever the text is, and ConfigError for what is too large.
    """
    if (size := len(text.encode(errors="replace"))) > MAX_TOML_BYTES:
        raise ConfigError(source, [ConfigProblem("", f"has {size} bytes, expected at most {MAX_TOML_BYTES}")])
    try:
        data = tomli.loads(text.removeprefix("\ufeff"))
        num_values = _num_values(data, MAX_TOML_LEVELS)
    except tomli.TOMLDecodeError as error:
        problem = ConfigProblem("", f"not valid TOML: {error.msg} (column {error.colno})", error.lineno)
        raise ConfigParseError(source, [problem]) from error
    except (RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a whole number has over 64 bits"
        raise ConfigParseError(source, [ConfigProblem("", f"not valid TOML: {reason}")]) from error
    if num_values > MAX_TOML_VALUES:
        words = f"has {num_values} values, expected at most {MAX_TOML_VALUES}: keep data in a file of its own"
        raise ConfigError(source, [ConfigProblem("", words)])
    return data


class _Limited(io.BytesIO):
    """What is written to it. Raises OverflowError beyond what a reader of TOML takes, before that is in memory."""

    def write(self, part: Any, /) -> int:
        if self.tell() + len(part) > MAX_TOML_BYTES:
            raise OverflowError
        return super().write(part)


def dump_toml(data: Mapping[str, Any], source: str) -> str:
    """`data` as TOML that `parse_toml` takes. Raises ConfigError where that would be too large."""
    written = _Limited()
    try:
        tomli_w.dump(data, written)
    except OverflowError:
        words = f"would have over {MAX_TOML_BYTES} bytes when it is written back, with its escapes: shorten its texts"
        raise ConfigError(source, [ConfigProblem("", f"{words}, or keep data in a file of its own")]) from None
    return written.getvalue().decode()


def _num_values(value: Any, levels: int) -> int:
    """Raises RecursionError for what is nested deeper than `levels`, ValueError for a number that is too large."""
    if isinstance(value, dict | list):
        if not levels:
            raise RecursionError
        return 1 + sum(_num_values(each, levels - 1) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError
    return 1


def load_toml(path: Path) -> dict[str, Any]:
    """Read and parse a TOML file; raises ConfigError when it is missing, unreadable, not a file, too large or not TOML.

    A file of a run must not be a link; any other may.
    """
    return parse_toml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a TOML file; raises ConfigError as `load_toml`."""
    try:
        return read_file(path, limit=MAX_TOML_BYTES, follow_links=True).decode()
    except UnicodeDecodeError as error:
        is_utf16 = error.object.startswith(UTF16_MARKS)
        what = "begins with a byte order mark of UTF-16" if is_utf16 else f"not UTF-8 text (byte {error.start})"
        raise ConfigParseError(str(path), [ConfigProblem("", f"{what}: save it as UTF-8")]) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(str(path), [NOT_FOUND]) from error
    except OSError as error:
        reason = str(error.strerror) if isinstance(error, FileRefused) else f"cannot be read: {error.strerror}"
        raise ConfigError(str(path), [ConfigProblem("", reason)]) from error


def build(cls: type[ConfigT], data: Mapping[str, Any], source: str) -> ConfigT:
    """Validate `data` as `cls`; raises ConfigError with every problem, or the first of very many."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        found = list(islice(_problems(cls, error), MAX_PROBLEMS))
        # A table that is copied into others is reported once: `lora.rnk`, not also `trainer.model.lora.rnk`.
        own = [p for p in found if not any(p.key.endswith(f".{q.key}") and p.message == q.message for q in found)]
        raise ConfigError(source, own) from error


def load_config(cls: type[ConfigT], path: Path) -> ConfigT:
    """Load `cls` from a TOML file."""
    return build(cls, load_toml(path), str(path))


def parse_argv(cls: type[ConfigT], argv: Sequence[str]) -> ConfigT:
    """Load `cls` from `[@ FILE.toml] [--a.b value | --a.b=value]...`; a later item wins over an earlier one."""
    return build(cls, *read_argv(argv))


def read_argv(argv: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return what `parse_argv` builds from: the merged values, and the name of their source."""
    data: dict[str, Any] = {}
    source, given = "command line", False
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "@" or (token.startswith("@") and len(token) > 1):
            name = token[1:] or (rest.pop(0) if rest else "")
            if not name:
                raise ConfigError(source, [ConfigProblem("", "expected a TOML file after '@'")])
            data, source = merge(data, load_toml(Path(name))), name
        elif token.startswith("--") and len(token) > 2:
            key, has_value, value = token[2:].partition("=")
            if not has_value:
                if not rest:
                    raise ConfigError(source, [ConfigProblem(key, "missing value: expected --a.b VALUE")])
                value = rest.pop(0)
            data = merge(data, parse_override(key, value))
            given = True
        else:
            raise ConfigError(
                source, [ConfigProblem("", f"unexpected argument {token!r}: expected @ FILE.toml or --a.b VALUE")]
            )
    return data, f"{source} and the command line" if given and source != "command line" else source


def parse_override(key: str, value: str) -> dict[str, Any]:
    """("model.lora.rank", "8") -> {"model": {"lora": {"rank": 8}}}. The value is TOML; what is not TOML is a string."""
    try:
        parsed: Any = tomli.loads(f"v = {value}")["v"]
    except ValueError:
        parsed = value
    return nested(key, parsed)


def nested(key: str, value: Any) -> dict[str, Any]:
    """`value` in tables by its dotted key."""
    first, dot, rest = key.replace("-", "_").partition(".")
    return {first: nested(rest, value) if dot else value}


def parse_set(items: Sequence[str]) -> dict[str, Any]:
    """["a.b=1", "c=x"] (what `--set` takes) -> one nested mapping; raises ConfigError for an item without '='."""
    data: dict[str, Any] = {}
    for item in items:
        key, has_value, value = item.partition("=")
        if not has_value or not key:
            raise ConfigError(
                "--set", [ConfigProblem("", f"invalid {item!r}: expected KEY=VALUE, such as optim.lr=1e-3")]
            )
        data = merge(data, parse_override(key, value))
    return data


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge of tables; `over` wins. A list is replaced, or its entries are changed by number, as in env.0.id.

    Raises ConfigError for a number that the list does not have.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, list) and isinstance(value, Mapping):
            entries = {str(number): each for number, each in enumerate(old)}
            if odd := value.keys() - entries.keys():
                found = f"{min(odd)!r} is not an entry: expected the number of one, such as {key}.0"
                raise ConfigError("the change", [ConfigProblem(key, found)])
            merged[key] = list(merge(entries, value).values())
            continue
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def without_nulls(value: Any) -> Any:
    """TOML has no null; every field that may be null is null by default, so leaving it out is the same."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


class FlagError(ValueError):
    """Wrong usage: the flag and its allowed values. Exit code 2."""


class FlagParser(argparse.ArgumentParser):
    """Raises FlagError where argparse would end the process."""

    def __init__(self, prog: str, example: str, ending: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {example}",
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=22, width=110),
            epilog=ending,
        )

    def error(self, message: str) -> NoReturn:
        """Raise FlagError; argparse calls it for wrong usage."""
        raise FlagError(message)


def _problems(cls: type[BaseModel], error: ValidationError) -> Iterator[ConfigProblem]:
    for item in error.errors(include_url=False):
        place = _place(cls, item["loc"])
        key = place.key
        if item["type"] == "extra_forbidden":
            yield ConfigProblem(key, _unknown_key(place))
        elif item["type"] == "missing":
            yield ConfigProblem(key, "required, but missing")
        elif item["type"] == "value_error":
            yield ConfigProblem(key, str(item["ctx"]["error"]))
        elif item["type"] == "union_tag_invalid":
            tag = item["ctx"]["discriminator"].strip("'")
            found = _shown(item["input"].get(tag))
            yield ConfigProblem(f"{key}.{tag}", f"found {found}: expected one of {item['ctx']['expected_tags']}")
        else:
            # pydantic's "Input should be greater than 0" -> "must be greater than 0".
            rule = re.sub(r"^(?:input|value) should ", "must ", f"{item['msg'][0].lower()}{item['msg'][1:]}")
            yield ConfigProblem(key, f"found {_shown(item.get('input'))}: {rule}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class _Place:
    """Where a problem is: the dotted key, the models that could stand around it, and the tag that chose among them."""

    key: str
    models: Sequence[type[BaseModel]]
    tag: str | None


def _place(cls: type[BaseModel], loc: Sequence[int | str]) -> _Place:
    """Follow pydantic's path. It has names of union members too, which are not keys of the file."""
    keys: list[str] = []
    models: Sequence[type[BaseModel]] = [cls]
    tag = None
    for part in loc:
        tagged = [m for m in models if len(models) > 1 and tag_of(m) == part]
        if tagged:
            models, tag = tagged, str(part)
        elif isinstance(part, int) or not (part.startswith("function-") or "[" in part or part.endswith("Config")):
            keys.append(str(part))
            fields = [field for model in models if (field := model.model_fields.get(str(part)))]
            inner = [model for field in fields for model in models_in(field.annotation)]
            if inner:
                models, tag = inner, None
    return _Place(".".join(keys), models, tag)


def _unknown_key(place: _Place) -> str:
    valid = sorted({name for model in place.models for name in model.model_fields})
    near = difflib.get_close_matches(place.key.rpartition(".")[2], valid, n=1, cutoff=0.5)
    what = f"unknown key for type = {place.tag!r}" if place.tag else "unknown key"
    return f"{what}; " + (f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}")


def tag_of(model: type[BaseModel]) -> str | None:
    """The value of the model's `type`, if it is a member of a union that `type` discriminates."""
    values = get_args(model.model_fields["type"].annotation) if "type" in model.model_fields else ()
    return values[0] if len(values) == 1 else None


def models_in(annotation: Any) -> list[type[BaseConfig]]:
    """The config classes in a type: one for a table, several for a choice by `type`."""
    if parts := get_args(annotation):
        return [model for part in parts for model in models_in(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseConfig) else []


DEFAULT_TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRAConfig(BaseConfig):
    """The adapters that the trainer can hold: their largest rank, and which linear layers have one."""

    rank: int = Field(16, ge=1, le=512)
    """Largest rank of a run, and the default rank."""

    alpha: float = Field(32.0, gt=0)
    """Default LoRA alpha of a run; the scale of an adapter is alpha / rank."""

    target_modules: tuple[str, ...] = DEFAULT_TARGET_MODULES
    """Names of the linear layers (last part of the module path) that get an adapter."""


class ModelConfig(BaseConfig):
    """The base model, shared by trainer and inference."""

    name: str = "models/base"
    """Path of a Hugging Face model folder, or a model id on the Hugging Face Hub."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights in memory; auto: bfloat16 on a GPU, float32 on a CPU. The same in trainer and inference,
    so that their logprobs agree."""

    def dtype_on(self, device_type: str) -> str:
        """The name of the data type on a device of type "cuda" or "cpu"."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if device_type == "cuda" else "float32"


class WatchConfig(BaseConfig):
    """The detection of changes on disk."""

    kind: Literal["auto", "native", "polling"] = "auto"
    """File events of the operating system, polling, or a choice by file system."""

    rescan_s: float = Field(5.0, gt=0)
    """Longest time between two scans of the disk without an event, in seconds."""


class BroadcastConfig(BaseConfig):
    """The way of the whole model's new weights from trainer to inference. Adapters always go through the disk."""

    type: Literal["filesystem", "nccl"] = "filesystem"
    """`filesystem`: a model folder. `nccl`: from memory to memory, over gloo between CPUs. The same on both sides."""

    host: str = "127.0.0.1"
    """`nccl`: address on which the trainer listens. Anyone who reaches it can read the weights."""

    port: int = Field(29650, ge=1, le=65535)
    """`nccl`: port that the trainer listens on."""

    timeout_s: float = Field(60.0, gt=0)
    """`nccl`: how long one side waits for the other, in seconds."""


class LogConfig(BaseConfig):
    """Logging of one process."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""


MIN_TOP_P, MIN_REPETITION_PENALTY = RANGES["top_p"].lowest, RANGES["repetition_penalty"].lowest
Penalty = Annotated[float, Field(ge=-2, le=2)]


def check_address(url: str) -> None:
    """Raise ValueError, without what may be a password, for a URL with a user in it or with a port that is none."""
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ValueError("must not contain a user or password, since URLs are shown in logs: set api_key_var for a key")
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ValueError(f"found {url!r}: must be an address such as 'http://127.0.0.1:8000/v1': {error}") from None


def _api_url(url: str) -> str:
    check_address(url)
    if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", url):
        raise ValueError(f"found {url!r}: must be an http address of an OpenAI-compatible API")
    return url


# Of a server with an OpenAI-compatible API, such as "http://gpu7:8000/v1".
ApiUrl = Annotated[str, AfterValidator(_api_url)]


class _Ranged(BaseConfig):
    @field_validator("*")
    @classmethod
    def _is_in_range(cls, value: Any, info: ValidationInfo) -> Any:
        limits = RANGES.get(info.field_name or "")
        return value if limits is None or value is None else limits.check(value)


# Settings of sampling that leave out tokens, or make some likelier than the policy does.
NARROWING = ("min_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class SamplingConfig(_Ranged):
    """The sampling of completions."""

    temperature: float = Field(1.0, ge=TEMPERATURE.lowest, le=2)
    """Logits are divided by this. It cannot be zero: greedy rollouts carry no gradient."""

    max_tokens: int = Field(64, ge=1)
    """Longest completion of one turn, in tokens."""

    min_tokens: int = Field(0, ge=0)
    """Shortest completion of one turn, in tokens: nothing ends it before."""

    top_p: float = Field(1.0, ge=MIN_TOP_P, le=1)
    """Only the smallest set of tokens with at least this probability is sampled from; 1: off."""

    top_k: int = Field(0, ge=0, lt=2**31)
    """Only this many of the most likely tokens are sampled from; 0: off."""

    min_p: float = Field(0.0, ge=0, le=1)
    """Only tokens with at least this part of the probability of the most likely one are sampled from; 0: off, else
    at least 1e-6."""

    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=2)
    """Logits of tokens of the prompt or the completion so far are divided by this if positive, else multiplied; 1:
    off."""

    presence_penalty: Penalty = 0.0
    """Taken off the logits of tokens that the completion has so far; 0: off."""

    frequency_penalty: Penalty = 0.0
    """Taken off the logit of a token for each time that the completion has it so far; 0: off."""

    stop: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field([], max_length=MAX_STOPS)
    """Texts that end a completion. The environment does not see them; the policy is trained on them."""

    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=64)
    """Tokens that end a completion, beside the model's own end of sequence."""

    seed: int | None = Field(None, ge=0)
    """Seed of the sampling; each turn has its own, derived from it. null: that of the run."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model's chat template, such as `enable_thinking = false`."""

    @property
    def request_fields(self) -> dict[str, Any]:
        """The fields of every request, under vLLM's names: the temperature, and all that is not off."""
        own = {"max_tokens", "min_tokens", "seed", "chat_template_kwargs"}
        return {"temperature": self.temperature, **self.model_dump(exclude=own, exclude_defaults=True)}

    @property
    def narrows(self) -> list[str]:
        """The settings because of which the sampled distribution is not the policy's own at this temperature."""
        return [name for name in NARROWING if getattr(self, name) != type(self).model_fields[name].default]

    @model_validator(mode="after")
    def _shortest_below_longest(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: found {self.min_tokens}: must be at most max_tokens = {self.max_tokens}")
        return self


class EvalSamplingConfig(_Ranged):
    """The sampling of completions in evaluations; everything else is that of `[sampling]`."""

    temperature: float | None = Field(None, ge=0, le=2)
    """Logits are divided by this, at least 0.01; 0 always takes the most likely token; null: that of `[sampling]`."""

    max_tokens: int | None = Field(None, ge=1)
    """Longest completion of one turn, in tokens; null: that of `[sampling]`."""

    top_p: float | None = Field(None, ge=MIN_TOP_P, le=1)
    """As in `[sampling]`; null: its value."""

    top_k: int | None = Field(None, ge=0, lt=2**31)
    """As in `[sampling]`; null: its value."""

    min_p: float | None = Field(None, ge=0, le=1)
    """As in `[sampling]`; null: its value."""
