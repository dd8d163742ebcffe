"""Every place in the files of a workspace that takes text, found by walking their schemas; and hostile text for it.

A field that is added to a status, a sample or a run's config is attacked without a change here; a new kind of status
file needs a line in `STATUS_FILES`.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import itertools
import json
import os
import re
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import tomli_w

from prime_rl.configs.base import ConfigError, build
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import OutputDir, stable_marker
from prime_rl.contract.samples import TokenSample
from prime_rl.contract.status import LOST_AFTER_S, Status
from prime_rl.utils.process import ProcessId

MEGABYTE = 1_000_000
# What each does to a terminal; `{}` is a word that identifies the place.
ATTACKS = {
    "esc": "{}\x1bc\x1b7 x",
    "title": "\x1b]2;{}\x07 x",
    "title, other end": "\x1b]0;{}\x1b\\ x",
    "clipboard": "{} \x1b]52;c;" + base64.b64encode(b"rm -rf /").decode() + "\x07 x",
    "csi": "\x1b[2J\x1b[31m{} x",
    "string": "\x1bP+q544e\x1b\\\x1b_apc\x1b\\\x1b^pm\x1b\\{} x",
    "c1 csi": "\x9b31m{} \x9b2J x",
    "c1 osc": "{} \x9d2;owned\x9c x",
    "control": "{}\x00\x07\x08\x0b\r\x7f x",
    "bidi": "\u202e{}\u2066 x",
    "zero width": "{}\u200b\ufeff\u2060\U000e0041 x",
    "markup": "[red]{}[/red] [/] [@click=app.quit]x[/] [link=file:///etc/passwd]",
    "lines": "{}\n\n2026-01-01T00:00:00Z ERROR forged\n",
    "megabyte": "{} \x1b[31m" + "a" * MEGABYTE + "\x1b[2J",
}
# One of each kind.
SOME_ATTACKS = ("csi", "markup", "bidi", "lines")
ALL = " ".join(text for name, text in ATTACKS.items() if name not in ("lines", "megabyte"))

# What must not reach a terminal: said here once more, so that the code that is tested does not judge itself.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e0fff]")
Document = dict[str, Any]
Fill = Callable[[str], str | None]


def string_places(kind: type[msgspec.Struct]) -> list[str]:
    """Dotted names of all strings that a struct holds: fields, items of lists, keys and values of dictionaries."""
    found: list[str] = []
    example(kind, lambda place: found.append(place))
    return found


def example(kind: Any, fill: Fill) -> Any:
    """A value of the struct's form, of built-in types. `fill` gives the text of each place, None for a harmless one."""
    return _example(msgspec.inspect.type_info(kind), "", fill)


def _example(info: Any, place: str, fill: Fill) -> Any:
    match info:
        case msgspec.inspect.StructType():
            return {field.encode_name: _example(field.type, f"{place}.{field.name}", fill) for field in info.fields}
        case msgspec.inspect.UnionType():
            return _example(
                next(each for each in info.types if type(each) is not msgspec.inspect.NoneType), place, fill
            )
        case msgspec.inspect.ListType():
            return [_example(info.item_type, f"{place}[]", fill)]
        case msgspec.inspect.DictType():
            key = _example(info.key_type, f"{place}.key", fill)
            return {key: _example(info.value_type, f"{place}.value", fill)}
        case msgspec.inspect.StrType() | msgspec.inspect.AnyType():
            return fill(place) or "x"
        case msgspec.inspect.LiteralType():
            return fill(place) or info.values[0]
        case msgspec.inspect.BoolType():
            return False
        case msgspec.inspect.IntType():
            return 1
        case msgspec.inspect.FloatType():
            return 0.5
    raise NotImplementedError(f"{place}: say here what an example of {info} is")


def statuses() -> list[type[Status]]:
    """All kinds of status files."""
    found, todo = [], [Status]
    while todo:
        kinds = todo.pop().__subclasses__()
        found += [each for each in kinds if each.__module__.startswith("prime_rl.")]
        todo += kinds
    return found


RUN = "run_attacked"
# Where each is in a workspace, and what it has to say for its other texts to be looked at.
STATUS_FILES: Mapping[str, tuple[Callable[[OutputDir], Path], Document]] = {
    "RunStatus": (lambda output: output.run(RUN).status, {"run_id": RUN, "state": "running", "max_steps": 9}),
    "TrainerStatus": (
        lambda output: output.trainer_status,
        {"state": "waiting", "max_runs": 2, "runs": {RUN: {"run_idx": 0}}, "disk": None},
    ),
    "InferenceStatus": (lambda output: output.inference_status, {"state": "serving"}),
    "DaemonStatus": (lambda output: output.daemon_status(RUN), {"name": RUN, "state": "running", "child_pid": None}),
    "NodeStatus": (lambda output: output.node_status(1), {"rank": 1, "state": "waiting", "rl_phase": "both"}),
    "GatewayStatus": (lambda output: output.gateway_status, {"state": "running"}),
    "GroupStatus": (lambda output: output.group_status, {"state": "running"}),
}


def write_attacked(output: OutputDir, kind: type[Status], fill: Fill) -> None:
    """The status file of that kind with `fill`'s texts; all others are as of a daemon that lives."""
    where, words = STATUS_FILES[kind.__name__]
    me, touched = ProcessId.of(os.getpid()), set[str]()
    soon = time.time() + 0.9 * LOST_AFTER_S  # fresh for as long as a file can be

    def fill_and_note(place: str) -> str | None:
        text = fill(place)
        if text is not None:
            touched.add(place.split(".")[1].removesuffix("[]"))
        return text

    document = example(kind, fill_and_note)
    living = {"pid": me.pid, "pid_create_time": me.create_time, "pid_start": me.start, "updated_at": soon}
    document |= {key: value for key, value in {**living, **words}.items() if key not in touched}
    path = where(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(document))


@dataclasses.dataclass(frozen=True)
class ConfigPlace:
    """A key of a run's config, whatever its type: `path` in the nested tables, after `before` was set. `is_key`: the
    text becomes a separate key in the table at `path`."""

    path: tuple[str | int, ...]
    before: tuple[tuple[tuple[str | int, ...], str], ...] = ()
    is_key: bool = False

    def put(self, config: Document, text: str) -> Document:
        """A copy of `config` with `text` in this place."""
        config = copy.deepcopy(config)
        for path, value in self.before:
            _set(config, path, value)
        _set(config, (*self.path, text) if self.is_key else self.path, text)
        return config


def _set(config: Any, path: tuple[str | int, ...], value: object) -> None:
    for step, then in itertools.pairwise(path):
        empty: Any = [] if isinstance(then, int) else {}
        if isinstance(step, int):
            config.extend([] if len(config) > step else [empty])
        elif not isinstance(config.get(step), type(empty)):
            config[step] = empty
        config = config[step]
    if isinstance(config, list):
        config[:] = [value]
    else:
        config[path[-1]] = value


def config_places(
    model: type[pydantic.BaseModel] = OrchestratorConfig, path: tuple[str | int, ...] = ()
) -> Iterator[ConfigPlace]:
    """Every key of every table that a run's config may have, and a key of each table that it may not have."""
    yield ConfigPlace(path, is_key=True)
    for name, field in model.model_fields.items():
        yield ConfigPlace((*path, name))
        inner, is_list, is_dict = _models(field.annotation)
        place = (*path, name, 0) if is_list else (*path, name)
        if is_list:
            yield ConfigPlace(place)
        if is_dict:
            yield ConfigPlace(place, is_key=True)
        for each in inner:
            kind = each.model_fields.get("type")
            before = (((*place, "type"), typing.get_args(kind.annotation)[0]),) if kind and len(inner) > 1 else ()
            for deeper in config_places(each, place):
                yield dataclasses.replace(deeper, before=(*before, *deeper.before))


def _models(annotation: Any) -> tuple[list[type[pydantic.BaseModel]], bool, bool]:
    """(tables that a field may hold, whether it is a list, whether it is a dictionary)."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation], False, False
    origin = typing.get_origin(annotation)
    looks = [_models(each) for each in typing.get_args(annotation)]
    models = [model for found, _, _ in looks for model in found]
    is_list = origin is list or any(each for _, each, _ in looks)
    return models, is_list, origin is dict or any(each for _, _, each in looks)


LONG_CHARS = 10_000
BASE_CONFIG: Document = {
    "batch_size": 8,
    "rollouts_per_example": 4,
    "model": {"name": "models/base"},
    "env": [{"id": "reverse-text"}],
}


def write_config(output: OutputDir, run_id: str, config: Document) -> None:
    toml = output.run(run_id).orch_toml
    toml.parent.mkdir(parents=True, exist_ok=True)
    long: dict[str, str] = {}
    text = tomli_w.dumps(_with_marks(config, long))
    for mark, value in long.items():
        text = text.replace(f'"{mark}"', _quoted(value))
    toml.write_text(text)


def _with_marks(found: Any, long: dict[str, str]) -> Any:
    """`found` with marks for long texts, which are in `long` then: tomli_w is slow with them."""
    if isinstance(found, Mapping):
        return {_with_marks(key, long): _with_marks(value, long) for key, value in found.items()}
    if isinstance(found, list):
        return [_with_marks(each, long) for each in found]
    if not isinstance(found, str) or len(found) < LONG_CHARS:
        return found
    mark = f"long text {len(long)}"
    long[mark] = found
    return mark


def _quoted(text: str) -> str:
    """A string of TOML."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def sample_line(fill: Fill) -> bytes:
    return msgspec.json.encode(example(TokenSample, fill)) + b"\n"


def texts(value: object) -> Iterator[str]:
    """Every string in what is handed to widgets: rows, structs, tuples, keys and values of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, msgspec.Struct):
        yield from texts(msgspec.structs.asdict(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from texts(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from texts(key)
            yield from texts(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from texts(each)


def check_clean(place: str, found: Iterator[str]) -> str:
    """All of it together. Fails naming the place when there is anything that a terminal obeys, or that hides."""
    together = "\n".join(found)
    foreign = OBEYED.search(together)
    assert foreign is None, f"{place} reaches the screen as it is: {together[max(foreign.start() - 80, 0) :][:300]!r}"
    return together


@dataclasses.dataclass
class Attacked:
    """A workspace in which every text at once is `attack`, each with its own word (`places`: word -> place).

    Runs: RUN trains; run_evicted, run_noted and run_failed have their reasons; run_c000 ... have a key each of their
    config attacked.
    """

    output: OutputDir
    attack: str
    places: dict[str, str] = dataclasses.field(default_factory=dict)
    num_configs: int = 0

    def text(self, place: str) -> str:
        word = f"w{len(self.places):03d}"
        self.places[word] = place
        return self.attack.replace("{}", word)

    def name(self, place: str) -> str:
        """As a file's name."""
        return self.text(place).replace("/", "").replace("\x00", "").replace("\n", "")[:48]

    def build(self) -> Attacked:
        output = self.output
        output.logs.mkdir(parents=True, exist_ok=True)
        write_config(output, RUN, self._valid_config())
        for kind in statuses():
            words = {"." + name for name in (*STATUS_FILES[kind.__name__][1], "pid_start", "child_start")}
            write_attacked(
                output,
                kind,
                lambda place, kind=kind, words=words: (  # type: ignore[misc]
                    None if any(place.startswith(word) for word in words) else self.text(f"{kind.__name__}{place}")
                ),
            )
        self._fill_run()
        self._add_ended()
        for number, place in enumerate(self._config_places()):
            write_config(output, f"run_c{number:03d}", place.put(BASE_CONFIG, self.text(f"orch.toml {place.path}")))
            self.num_configs = number + 1
        (output.path / f"run_{self.name('folder')}").mkdir()
        return self

    def _config_places(self) -> list[ConfigPlace]:
        """All; of an attack of a megabyte the model's name and some others, for a file may be of a few megabytes."""
        places = list(config_places())
        return places if len(self.attack) < MEGABYTE else [ConfigPlace(("model", "name")), *places[::16]]

    def _valid_config(self) -> Document:
        """As much of it attacked as the rules allow."""
        config = BASE_CONFIG
        for place in self._config_places():
            attacked = place.put(config, self.text(f"orch.toml {place.path}"))
            try:
                build(OrchestratorConfig, attacked, "orch.toml")
            except ConfigError:
                continue
            config = attacked
        return config

    def _fill_run(self) -> None:
        output, run = self.output, self.output.run(RUN)
        for folder in (run.metrics, run.log.parent, run.orchestrator_checkpoint(1), run.broadcast_dir(1)):
            folder.mkdir(parents=True)
        (run.checkpoint_dir(1) / self.name("checkpoint folder")).mkdir()
        (run.path / self.name("folder of a run")).mkdir()
        stable_marker(run.checkpoint_dir(1)).touch()
        (run.broadcast_dir(1) / "adapter_config.json").write_text(json.dumps({"peft_type": self.text("adapter")}))
        run.samples.write_bytes(sample_line(lambda place: self.text(f"samples.jsonl{place}")))
        figures = {f"eval/{self.text('metrics')}/reward": 0.5, self.text("metrics"): 1.0, "reward/mean": 0.25}
        for path in (run.orchestrator_metrics, run.trainer_metrics):
            path.write_text("".join(json.dumps({"step": step, "time": 1.0, **figures}) + "\n" for step in (1, 2)))
        stamp = "2026-09-21T14:00:01Z ERROR"
        run.log.write_text(f"{stamp}   orchestrator: {self.text('log')}\n{self.text('log')}\nafter the last\n")
        for name in ("trainer", "supervisor"):
            output.log(name).write_text(f"{stamp}   {name}: {RUN} {self.text('log of ' + name)}\n")
        audit = {key: self.text(f"audit.jsonl {key}") for key in ("who", "action", "reason", "detail")}
        output.audit.write_text(json.dumps({"time": 1.0, "run_id": RUN, **audit}) + "\n")
        self._add_alerts()

    def _add_alerts(self) -> None:
        output = self.output
        output.component_config("alerts").parent.mkdir(parents=True, exist_ok=True)
        output.component_config("alerts").touch()
        incident = {key: self.text(f"open.json {key}") for key in ("kind", "subject", "text")}
        said = {key: self.text(f"said {key}") for key in ("who", "reason")}
        output.alerts_said.mkdir(parents=True)
        output.alerts_open.write_text(json.dumps({"version": 1, "open": [{**incident, "since": 1.0}]}))
        output.alert_said("all").write_text(json.dumps({"action": "muted", "at": 1.0, **said}))

    def _add_ended(self) -> None:
        output = self.output
        for run_id in ("run_evicted", "run_noted", "run_failed"):
            write_config(output, run_id, BASE_CONFIG)
        output.run("run_evicted").evicted.write_text(self.text("evicted.txt"))
        output.run("run_noted").config_error.write_text(self.text("config_validation_error.txt"))
        failed = {"run_id": "run_failed", "state": "failed", "reason": self.text("RunStatus.reason")}
        output.run("run_failed").status.write_text(json.dumps(failed))
        words = {"state": "failed", "reason": self.text("DaemonStatus.reason"), "updated_at": time.time()}
        tail = [self.text("DaemonStatus.log_tail")]
        output.daemon_status("run_noted").write_text(json.dumps({"name": "run_noted", **words, "log_tail": tail}))
