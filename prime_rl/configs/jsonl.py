"""`[[env]] id = "jsonl"`: its settings, the files that it names, and the rows of its data; folders as one file.

Rows are read here and not in the environment, so that `prl runs validate` and `prl runs add` report a bad line too.
Parquet files and data sets of the hub are JSON lines before anything else reads them; those of a run are already.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import io
import json
import math
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator

from prime_rl.configs.base import UTF16_MARKS, BaseConfig, ConfigError, ConfigProblem
from prime_rl.contract.files import is_of_a_run, open_file, read_file
from prime_rl.contract.layout import HUB, PARQUET, RunDir
from prime_rl.utils.runtime import missing

JSONL = "jsonl"
MAX_DATA_BYTES = 256 << 20
MAX_CODE_BYTES = 1 << 20
MAX_FOLDER_BYTES = 64 << 20
MAX_FOLDER_FILES = 20_000
# Without `num_eval_examples`: a tenth of the rows, at most so many.
MAX_EVAL_EXAMPLES = 100
ROLES = ("system", "user", "assistant")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?|-?\.\d+")
FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
# The file that a config names.
Place = Callable[[str], Path]
_MARK = b"\xef\xbb\xbf"
Scorer = Literal["exact", "contains", "regex", "number", "json", "math"]
_T = TypeVar("_T")


class RowsArgs(BaseConfig):
    """Where examples come from: a file with one JSON object a line, and the keys in it."""

    path: str = Field(min_length=1)
    """The data: a file of at most 256 MiB in UTF-8, relative to the config file, which `prl runs add` copies into the
    run. A Parquet file, or a data set of the hub, "hub:OWNER/NAME:CONFIG:SPLIT", is copied as JSON lines."""

    prompt: str = "prompt"
    """Key of the question: text, or a list of messages with `role` and `content`."""

    answer: str = "answer"
    """Key of the right answer. With `reward` it may be missing in a row."""

    id: str | None = None
    """Key of the example's id, text or a whole number, different in each row; null takes the number of the line."""

    num_examples: int | None = Field(None, ge=1)
    """Rows to train on, at most; null takes all after those of the evaluation."""

    num_eval_examples: int | None = Field(None, ge=0)
    """Rows to evaluate on, the first of the file; null takes a tenth of them, at most 100."""

    @property
    def scoring(self) -> Scorer | None:
        """The scorer, which needs the right answer in each row; None without one."""
        return None

    @property
    def function_name(self) -> str | None:
        """The function that gives the reward, "file.py:function"; None without one."""
        return None

    @property
    def code(self) -> str | None:
        """The file of the function that gives the reward."""
        return self.function_name and self.function_name.rpartition(":")[0]

    @property
    def function(self) -> str:
        """The name of the function that gives the reward; "" without one."""
        return (self.function_name or "").rpartition(":")[2]

    @property
    def files(self) -> dict[str, int]:
        """The files that these arguments name, with the most bytes of each."""
        return ({self.path: MAX_DATA_BYTES} if self.path else {}) | ({self.code: MAX_CODE_BYTES} if self.code else {})

    def placed(self, place: Place) -> dict[str, Any]:
        """These arguments, with files at `place` of what the config names."""
        files = {"path": str(place(self.path))} if self.path else {}
        if self.code:
            files["reward"] = f"{place(self.code)}:{self.function}"
        return {**self.model_dump(exclude_unset=True), **files}

    def split(self, examples: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T]]:
        """(to train on, to evaluate on)."""
        return held_out_first(examples, self.num_examples, self.num_eval_examples)


class JsonlArgs(RowsArgs):
    """`[env.args]` of `jsonl`: a file with one JSON object a line, and how answers are scored."""

    scorer: Scorer = "exact"
    """Comparison of an answer of the policy with the right one, for a reward of 1 or 0 (docs/data.md)."""

    reward: str | None = None
    """A function of your own in place of `scorer`: "file.py:function", relative to the config file. `prl runs add`
    copies the file into the run. It gets the policy's answer (text) and the row (a dict), and returns the reward."""

    @field_validator("reward")
    @classmethod
    def _names_a_function(cls, reward: str | None) -> str | None:
        if reward is not None and not FUNCTION.fullmatch(reward):
            raise ValueError(f"found {reward!r}: must be a file and a function in it, such as reward.py:score")
        return reward

    @property
    def scoring(self) -> Scorer | None:
        """`scorer`, unless a function stands in its place."""
        return None if self.reward else self.scorer

    @property
    def function_name(self) -> str | None:
        """`reward`."""
        return self.reward


@dataclass(frozen=True)
class Row:
    """One example. `target` is the right answer as the scorer takes it, `fields` the object of the line."""

    id: str
    messages: list[dict[str, str]]
    answer: str
    target: Any
    fields: dict[str, Any]


def held_out_first(
    examples: Sequence[_T], num_examples: int | None, num_held_out: int | None
) -> tuple[Sequence[_T], Sequence[_T]]:
    """(those to train on, at most `num_examples`; the first `num_held_out`, by default a tenth of them)."""
    tenth = min(MAX_EVAL_EXAMPLES, math.ceil(len(examples) / 10)) if len(examples) > 1 else 0
    num_held_out = tenth if num_held_out is None else num_held_out
    last = None if num_examples is None else num_held_out + num_examples
    return examples[num_held_out:last], examples[:num_held_out]


def read_rows(path: Path, args: RowsArgs) -> list[Row]:
    """The rows of a file. Raises ValueError that names the file, the line and what is wrong there; OSError."""
    lines: dict[str, int] = {}

    def row_of(number: int, fields: Mapping[str, Any]) -> Row:
        row = _row(number, fields, args)
        if row.id in lines:
            raise ValueError(f"the id {row.id!r} is that of line {lines[row.id]} too: each row needs its own")
        lines[row.id] = number
        return row

    return of_lines(path, row_of)


def of_lines(
    path: Path, make: Callable[[int, Mapping[str, Any]], _T], max_line_bytes: int = MAX_DATA_BYTES
) -> list[_T]:
    """What `make` makes of each line's number and object; lines of blanks count for nothing, nor does UTF-8's mark.

    Raises ValueError that names the file, the line and what is wrong there, FileRefused or another OSError.
    """
    data = read_file(path, limit=MAX_DATA_BYTES)
    if data.startswith(UTF16_MARKS):
        raise ValueError(f"{path} begins with a byte order mark of UTF-16: save it as UTF-8")
    made: list[_T] = []
    for number, line in enumerate(data.removeprefix(_MARK).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            made.append(make(number, _parsed(line, max_line_bytes)))
        except (ValueError, RecursionError) as error:
            reason = "not valid JSON: nested too deeply" if isinstance(error, RecursionError) else error
            raise ValueError(f"{path} line {number}: {reason}") from None
    if not made:
        raise ValueError(f"{path} has no rows: write one JSON object a line")
    return made


def _parsed(line: bytes, max_bytes: int) -> Mapping[str, Any]:
    if len(line) > max_bytes:
        raise ValueError(f"has {len(line):,} bytes: at most {max_bytes:,} are read")
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start}): save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"found {type(fields).__name__}: must be a JSON object, such as {{...}}")
    return fields


def _row(number: int, fields: Mapping[str, Any], args: RowsArgs) -> Row:
    needs = {"prompt": args.prompt, "id": args.id, "answer": args.answer if args.scoring else None}
    for setting, key in needs.items():
        if key is not None and fields.get(key) is None:
            found = ", ".join(map(str, fields)) or "none"
            raise ValueError(f"no value for {key!r} (args.{setting}); its keys: {found[:200]}")
    row_id = number if args.id is None else fields[args.id]
    if not isinstance(row_id, str | int) or isinstance(row_id, bool):
        raise ValueError(f"{args.id!r} is {type(row_id).__name__}: must be text or a whole number")
    answer = fields.get(args.answer)
    text = answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer, ensure_ascii=False)
    target = _target(args.scoring, answer, text) if args.scoring else None
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
    """Beside the config file `source`; for the config of a run, the run's own copies. A folder is `packed`."""
    run = RunDir(source.absolute().parent.parent)
    if source.absolute() == run.orch_toml and is_of_a_run(run.orch_toml):
        return run.data_file

    def beside(named: str) -> Path:
        path = source.parent / Path(named).expanduser()
        if named.startswith(HUB):
            return json_lines(named)
        if path.is_dir():
            return packed(path)
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


def packed(folder: Path) -> Path:
    """A file with all that is in a folder, the same for the same content; it lives as long as this process.

    Caches of Python are left out. Raises ConfigError for what is too large, no plain file, or a link that leads out.
    """
    written, left = io.BytesIO(), MAX_FOLDER_BYTES
    try:
        paths = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]
        if len(paths) > MAX_FOLDER_FILES:
            raise ValueError(f"has {len(paths)} files: at most {MAX_FOLDER_FILES}")
        with tarfile.open(fileobj=written, mode="w") as tar:
            for path in paths:
                info, data = tarfile.TarInfo(str(path.relative_to(folder))), b""
                if path.is_symlink():
                    info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
                    is_inside = (path.parent / info.linkname).resolve().is_relative_to(folder.resolve())
                    if os.path.isabs(info.linkname) or not is_inside:
                        raise ValueError(f"{info.name} is a link to {info.linkname}, out of the folder: copy the file")
                elif path.is_dir():
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                else:
                    if (left := left - path.stat().st_size) < 0:
                        raise ValueError(f"has more than {MAX_FOLDER_BYTES} bytes: at most that many are copied")
                    data = read_file(path, limit=MAX_FOLDER_BYTES)
                    info.size, info.mode = len(data), path.stat().st_mode & 0o777
                tar.addfile(info, io.BytesIO(data))
    except (ValueError, OSError) as error:
        raise ConfigError(str(folder), [ConfigProblem("", str(error))]) from error
    found = _scratch() / hashlib.sha256(written.getvalue()).hexdigest()
    found.write_bytes(written.getvalue())
    return found


@functools.cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="prl-data-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
