"""The config that a run trains with, as opposed to what its `control/orch.toml` asks for now.

The trainer writes what it admits to `control/admitted.toml`, once it has a slot for the run, and every reader of a
run's config reads it here. Of a changed `orch.toml` only `LIVE_KEYS` count by themselves. All else is an edit that is
not in effect until it is applied: `apply` leaves the text in `control/apply.toml`, which the trainer admits with the
run's next slot. A run that was never admitted is what its `orch.toml` says.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import tomli_w

from prime_rl.configs.agents import check_owner
from prime_rl.configs.base import ConfigError, ConfigProblem, build, dump_toml, parse_toml, read_text
from prime_rl.configs.jsonl import MAX_DATA_BYTES
from prime_rl.configs.orchestrator import LIVE_KEYS, OrchestratorConfig
from prime_rl.contract.files import read_file, read_json, remove_file, write_atomic
from prime_rl.contract.layout import RunDir
from prime_rl.contract.notes import MAX_FILE_BYTES, Admission, Change, digest_of, read_admitted
from prime_rl.utils.text import CleanText, one_line

MAX_CHANGES = 50
# A changed key costs FORM_CHARS besides its own.
MAX_CHANGE_CHARS, MAX_VALUE_CHARS, FORM_CHARS = 2_000, 300, 50
# Names of secret values; `api_key_var` is a name and `max_tokens` a number.
_SECRET = re.compile(r"(^|_)(api_?key|access_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
HIDDEN = "(hidden)"
# Of a run that names more data files only the first are looked at again.
MAX_FILES = 32

Differences = list[tuple[str, Any, Any]]


@dataclass(frozen=True)
class Edit:
    """An `orch.toml` not in effect: the values that differ, as (key, in effect, edited); or why it is invalid."""

    keys: Differences
    problem: str | None = None


@dataclass(frozen=True)
class Effect:
    """The config in effect: its `text` (TOML), its values, and the SHA-256 of what asked for it.

    `run_id` is the run that was admitted with it. `edit`: the difference of `orch.toml` to it; None without one.
    `admitted` is what `admitted.toml` had at the same look.
    """

    run_id: str
    text: str
    data: dict[str, Any]
    sha256: str
    edit: Edit | None = None
    admitted: Admission | None = None

    def build(self, run: RunDir) -> OrchestratorConfig:
        """The config. Raises ConfigError when it is invalid, or when `run` is a renamed or copied folder."""
        if self.run_id != run.run_id:
            words = f"its folder is that of {self.run_id}, renamed or copied: use prl runs fork, or put the name back"
            raise ConfigError(str(run.path), [ConfigProblem("", words)])
        config = build(OrchestratorConfig, self.data, str(run.orch_toml))
        if any(env.agent for env in config.env):
            check_owner(run.orch_toml)  # else what another account asks for would be admitted, in a file of our own
        return config


def read_effect(run: RunDir) -> Effect:
    """The config in effect. Raises ConfigError when it is missing or no TOML."""
    if (admitted := read_admitted(run)) is None:
        text = read_text(run.orch_toml)
        dump_toml(data := parse_toml(text, str(run.orch_toml)), str(run.orch_toml))
        return Effect(run.run_id, text, data, digest_of(text.encode()))
    run_id, base, sha256 = admitted.run_id, admitted.text, admitted.sha256
    with contextlib.suppress(ConfigError):
        base = read_text(run.applied)
        sha256 = digest_of(base.encode())
    data = parse_toml(base, str(run.admitted))
    try:
        if (text := read_text(run.orch_toml)) == base:
            return Effect(run_id, base, data, sha256, None, admitted)
        asked = parse_toml(text, str(run.orch_toml))
        dump_toml(asked, str(run.orch_toml))
        build(OrchestratorConfig, asked, str(run.orch_toml))
        found = differing(data, asked)
        edited = [each for each in found if each[0].partition(".")[0] not in LIVE_KEYS]
        if not edited:
            return Effect(run_id, text, asked, sha256, None, admitted)
        if len(edited) < len(found):
            both = {key: value for key, value in data.items() if key not in LIVE_KEYS}
            both |= {key: value for key, value in asked.items() if key in LIVE_KEYS}
            base, data = dump_toml(both, str(run.orch_toml)), both
    except ConfigError as error:
        edit = Edit([], "; ".join(str(problem) for problem in error.problems))
        return Effect(run_id, base, data, sha256, edit, admitted)
    return Effect(run_id, base, data, sha256, Edit(edited), admitted)


def config_in_effect(run: RunDir) -> OrchestratorConfig:
    """The config in effect. Raises ConfigError as `read_effect` and `Effect.build`."""
    return read_effect(run).build(run)


def request(run: RunDir, text: str) -> None:
    """Write `text` as the run's `orch.toml`, which keeps its mode, and have it admitted. Raises OSError."""
    write_atomic(run.orch_toml, text, mode=_mode(run))
    apply(run, text)


def restore(run: RunDir) -> None:
    """Write the config in effect back into `orch.toml`. Raises ConfigError, OSError as `read_effect`."""
    write_atomic(run.orch_toml, read_effect(run).text, mode=_mode(run))


def apply(run: RunDir, text: str) -> None:
    """Have `text` admitted with the run's next slot; nothing for a run that was never admitted. Raises OSError."""
    if os.path.lexists(run.admitted):
        write_atomic(run.applied, text, mode=_mode(run))


def write_admitted(run: RunDir, effect: Effect, step: int) -> None:
    """Note that the run trains with `effect` from `step`. Nothing is written when it did so already. Raises OSError."""
    before, now = read_admitted(run), time.time()
    changes = []
    if before is not None:
        try:
            changes = differing(parse_toml(before.text, "admitted.toml"), effect.data)
        except ConfigError:
            changes = [("the whole config", None, None)]
    if before is None or changes or before.sha256 != effect.sha256:
        history = list(before.history) if before else []
        if changes:
            history.append(Change(now, step, short(changes)))
        admission = Admission(run.run_id, now, step, effect.sha256, effect.text, history[-MAX_CHANGES:])
        text = tomli_w.dumps(msgspec.to_builtins(admission), multiline_strings=True)
        write_atomic(run.admitted, text, mode=_mode(run))
    remove_file(run.applied)


def hide_secrets(value: Any) -> Any:
    """A copy of a config's values in which those with the name of a key are hidden."""
    if isinstance(value, Mapping):
        return {k: HIDDEN if _SECRET.search(str(k)) and v else hide_secrets(v) for k, v in value.items()}
    return [hide_secrets(item) for item in value] if isinstance(value, list) else value


def hide_secret(key: str, value: Any) -> Any:
    """The value of a dotted key, hidden when a part of the key is the name of one."""
    return HIDDEN if value and any(map(_SECRET.search, key.split("."))) else hide_secrets(value)


def hidden(keys: Differences) -> Differences:
    """Differences of two configs, (key, value, other value), with their secrets hidden."""
    return [(key, hide_secret(key, one), hide_secret(key, other)) for key, one, other in keys]


def short(keys: Differences) -> list[tuple[str, str, str]]:
    """Differences as texts without secrets: the first of MAX_CHANGE_CHARS together, long values cut."""
    texts, room = list[tuple[str, str, str]](), MAX_CHANGE_CHARS
    for key, one, other in hidden(keys):
        texts.append((key, one_line(_value(one), MAX_VALUE_CHARS), one_line(_value(other), MAX_VALUE_CHARS)))
        room -= FORM_CHARS + sum(map(len, texts[-1]))
        if room < 0:
            return texts[:-1]
    return texts


def in_words(keys: Iterable[tuple[str, Any, Any]]) -> str:
    """Such as "optim.lr 0.0015 -> 0.01, seed 1 -> 2"."""
    return ", ".join(f"{key} {_value(before)} -> {_value(after)}" for key, before, after in keys)


def _value(value: Any) -> str:
    return "unset" if value is None else plain_text(value)


def plain_text(value: Any) -> str:
    """A value of a config; a float of many digits that has a short form as that: `1e+15`, `1e-05`."""
    short = f"{value:g}" if isinstance(value, float) else ""
    return short if "e" in short and float(short) == value else str(value)


def _mode(run: RunDir) -> int:
    for path in (run.orch_toml, run.admitted):
        with contextlib.suppress(OSError):
            return stat.S_IMODE(os.lstat(path).st_mode) & 0o777
    return 0o600


def added_data(run: RunDir) -> dict[str, str]:
    """The SHA-256 of each data and reward file when the run was added, by its name in `data/`; {} where unknown."""
    added = read_json(run.data_digests, dict[str, str], limit=MAX_FILE_BYTES) or {}
    # By path: the names are the run's own.
    return dict(islice({run.data_file(named).name: digest for named, digest in added.items()}.items(), MAX_FILES))


def changed_data(run: RunDir) -> dict[CleanText, CleanText]:
    """The files of `data/` that are not what they were when the run was added: {"reward.py": "3f2a91c0->77ab0e12"}.

    The values are the beginnings of their SHA-256, then and now.
    """
    found = {}
    for name, digest in added_data(run).items():
        now = "gone"
        with contextlib.suppress(OSError):
            now = digest_of(read_file(run.data_file(name), limit=MAX_DATA_BYTES))
        if now != digest:
            found[one_line(name)] = one_line(f"{digest[:8]}->{now[:8]}")
    return found


def changed_data_text(run: RunDir) -> list[CleanText]:
    """A sentence for each of `changed_data`, with what to do."""
    cure = f"put the first back, then prl runs pause and resume {run.run_id}; or add a new run"
    return [
        one_line(f"data/{name} is not the file that it was when the run was added ({which}): {cure}", 500)
        for name, which in changed_data(run).items()
    ]


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as ("model.lora.rank", 8); tables in a list get their number: ("env.0.id", ...)."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            for number, each in enumerate(value):
                yield from flatten(each, f"{key}.{number}.")
        else:
            yield key, value


def resolved(data: Mapping[str, Any]) -> dict[str, Any]:
    """A run's config with its defaults. Raises ConfigError when it is not valid."""
    return build(OrchestratorConfig, data, "orch.toml").model_dump(mode="json")


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value in one, value in other) for all keys of two configs that differ; null where a key is missing.

    A default equals the same value in the file, unless one of the two is not valid.
    """
    with contextlib.suppress(ConfigError):
        one, other = resolved(one), resolved(other)
    sides = dict(flatten(one)), dict(flatten(other))
    keys = dict.fromkeys([*sides[0], *sides[1]])
    pairs = ((key, sides[0].get(key), sides[1].get(key)) for key in keys)
    return [pair for pair in pairs if pair[1] != pair[2]]
