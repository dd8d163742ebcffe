"""`[[env]] id = "jsonl"`: its settings, the files that it names, and the rows of its data.

Rows are read here and not in the environment, so that `prl runs validate` and `prl runs add` report a bad line too.
Parquet files and data sets of the hub are JSON lines before anything else reads them; those of a run are already.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from prime_rl.configs.base import UTF16_MARKS, BaseConfig, ConfigError, ConfigProblem
from prime_rl.contract.files import is_of_a_run, open_file, read_file
from prime_rl.contract.layout import HUB, PARQUET, RunDir
from prime_rl.utils.runtime import missing

JSONL = "jsonl"
MAX_DATA_BYTES = 256 << 20
MAX_CODE_BYTES = 1 << 20
# Without `num_eval_examples`: a tenth of the rows, at most so many.
MAX_EVAL_EXAMPLES = 100
ROLES = ("system", "user", "assistant")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?|-?\.\d+")
# The file that a config names.
Place = Callable[[str], Path]
_MARK = b"\xef\xbb\xbf"


class JsonlArgs(BaseConfig):
    """`[env.args]` of `jsonl`: a file with one JSON object a line, and how answers are scored."""

    path: str = Field(min_length=1)
    """The data: a file of at most 256 MiB in UTF-8, relative to the config file, which `prl runs add` copies into the
    run. A Parquet file, or a data set of the hub, "hub:OWNER/NAME:CONFIG:SPLIT", is copied as JSON lines."""

    prompt: str = "prompt"
    """Key of the question: text, or a list of messages with `role` and `content`."""

    answer: str = "answer"
    """Key of the right answer. With `reward` it may be missing in a row."""

    id: str | None = None
    """Key of the example's id, text or a whole number, different in each row; null takes the number of the line."""

    scorer: Literal["exact", "contains", "regex", "number", "json", "math"] = "exact"
    """How an answer of the policy is compared with the right one, for a reward of 1 or 0 (docs/data.md)."""

    reward: str | None = None
    """A function of your own in place of `scorer`: "file.py:function", relative to the config file. `prl runs add`
    copies the file into the run. It gets the policy's answer (text) and the row (a dict), and returns the reward."""

    num_examples: int | None = Field(None, ge=1)
    """Rows to train on, at most; null takes all after those of the evaluation."""

    num_eval_examples: int | None = Field(None, ge=0)
    """Rows to evaluate on, the first of the file; null takes a tenth of them, at most 100."""

    @field_validator("reward")
    @classmethod
    def _names_a_function(cls, reward: str | None) -> str | None:
        if reward is not None and not re.fullmatch(r".+\.py:[A-Za-z_]\w*", reward):
            raise ValueError(f"found {reward!r}: must be a file and a function in it, such as reward.py:score")
        return reward

    @property
    def code(self) -> str | None:
        """The file of `reward`."""
        return self.reward and self.reward.rpartition(":")[0]

    @property
    def function(self) -> str:
        """The name of the function of `reward`; "" without one."""
        return (self.reward or "").rpartition(":")[2]

    def placed(self, place: Place) -> dict[str, Any]:
        """These arguments, with files at `place` of what the config names."""
        files = {"path": str(place(self.path))}
        if self.code:
            files["reward"] = f"{place(self.code)}:{self.function}"
        return {**self.model_dump(exclude_unset=True), **files}


@dataclass(frozen=True)
class Row:
    """One example. `target` is the right answer as the scorer takes it, `fields` the object of the line."""

    id: str
    messages: list[dict[str, str]]
    answer: str
    target: Any
    fields: dict[str, Any]


def read_rows(path: Path, args: JsonlArgs) -> list[Row]:
    """The rows of a file; lines of blanks count for nothing. A byte order mark of UTF-8 is left out.

    Raises ValueError that names the file, the line and what is wrong there; FileRefused or another OSError.
    """
    data = read_file(path, limit=MAX_DATA_BYTES)
    if data.startswith(UTF16_MARKS):
        raise ValueError(f"{path} begins with a byte order mark of UTF-16: save it as UTF-8")
    rows: list[Row] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(data.removeprefix(_MARK).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = _row(number, _parsed(line), args)
            if row.id in lines:
                raise ValueError(f"the id {row.id!r} is that of line {lines[row.id]} too: each row needs its own")
        except (ValueError, RecursionError) as error:
            reason = "not valid JSON: nested too deeply" if isinstance(error, RecursionError) else error
            raise ValueError(f"{path} line {number}: {reason}") from None
        lines[row.id] = number
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows: write one JSON object a line")
    return rows


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start}): save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"found {type(fields).__name__}: must be a JSON object, such as {{...}}")
    return fields


def _row(number: int, fields: Mapping[str, Any], args: JsonlArgs) -> Row:
    needs = {"prompt": args.prompt, "id": args.id, "answer": None if args.reward else args.answer}
    for setting, key in needs.items():
        if key is not None and fields.get(key) is None:
            found = ", ".join(map(str, fields)) or "none"
            raise ValueError(f"no value for {key!r} (args.{setting}); its keys: {found[:200]}")
    row_id = number if args.id is None else fields[args.id]
    if not isinstance(row_id, str | int) or isinstance(row_id, bool):
        raise ValueError(f"{args.id!r} is {type(row_id).__name__}: must be text or a whole number")
    answer = fields.get(args.answer)
    text = answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer, ensure_ascii=False)
    target = None if args.reward else _target(args.scorer, answer, text)
    return Row(str(row_id), _messages(args.prompt, fields[args.prompt]), text, target, dict(fields))


def _messages(key: str, prompt: Any) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{key!r} is {type(prompt).__name__}: must be text, or a list of messages")
    for at, message in enumerate(prompt):
        given = message if isinstance(message, dict) else {}
        if given.get("role") not in ROLES or not isinstance(given.get("content"), str):
            raise ValueError(f"message {at} of {key!r}: must have a role ({', '.join(ROLES)}) and a text as content")
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{key!r} ends with a message of the assistant: it must end with what is asked")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _target(scorer: str, answer: Any, text: str) -> Any:
    """The right answer as the scorer takes it. Raises ValueError for one that it cannot take."""
    try:
        if scorer == "regex":
            return re.compile(text)
        if scorer == "json":
            return json.loads(text) if isinstance(answer, str) else answer
    except (re.error, ValueError) as error:
        raise ValueError(f"the answer is not valid for scorer = {scorer!r}: {error}") from None
    if scorer == "number":
        number = last_number(text)
        if number is None:
            raise ValueError("the answer has no number in it, for scorer = 'number'")
        return number
    return text.strip()


def last_number(text: str) -> float | None:
    """The last number in a text; commas between its digits count for nothing."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def place_of(source: Path) -> Place:
    """Beside the config file `source`; for the config of a run, the run's own copies."""
    run = RunDir(source.absolute().parent.parent)
    if source.absolute() == run.orch_toml and is_of_a_run(run.orch_toml):
        return run.data_file

    def beside(named: str) -> Path:
        path = source.parent / Path(named).expanduser()
        if named.startswith(HUB):
            return json_lines(named)
        return json_lines(str(path), path.stat().st_mtime_ns) if path.suffix == PARQUET and path.is_file() else path

    return beside


@functools.cache
def json_lines(named: str, _modified_ns: int = 0) -> Path:
    """A file with the rows of a Parquet file or a data set as JSON lines; both live as long as this process.

    What JSON does not have, such as a date, becomes text. Raises ConfigError.
    """
    try:
        if sentence := missing("data", "datasets", "pyarrow"):
            raise ValueError(sentence)
        folder = Path(tempfile.mkdtemp(prefix="prl-data-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        left, found = MAX_DATA_BYTES, folder / f"{Path(named).name}.jsonl"
        with found.open("w", encoding="utf-8") as file:
            for row in _rows_of(named):
                left -= file.write(json.dumps(row, default=str) + "\n")
                if left < 0:
                    raise ValueError(f"has more than {MAX_DATA_BYTES} bytes as JSON lines")
        return found
    except Exception as error:  # the library's own errors have no common class
        words = " ".join(str(error).split())[:300]
        raise ConfigError(named, [ConfigProblem("", f"cannot be read: {words}")]) from error


def _rows_of(named: str) -> Iterator[dict[str, Any]]:
    if named.startswith(HUB):
        import datasets  # an extra, which takes seconds

        where, *more = named.removeprefix(HUB).split(":")
        if len(more) not in (0, 2):
            raise ValueError(f"must be {HUB}OWNER/NAME, or {HUB}OWNER/NAME:CONFIG:SPLIT")
        config, split = more or ("", "train")
        datasets.disable_progress_bars()
        yield from datasets.load_dataset(where, config or None, split=split)
    else:
        from pyarrow.parquet import ParquetFile

        with os.fdopen(open_file(Path(named)), "rb") as file:
            for batch in ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
