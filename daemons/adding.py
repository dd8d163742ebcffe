"""Add runs: check a run's TOML file with the trainer's own rules, fill a folder beside the runs, rename it into place.

A folder appears complete, so the trainer never sees half a run; what a killed `prl` left is removed by a later one.
Used through `actions`, and by forks and sweeps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from daemons import audit
from daemons.errors import ActionError, in_one_line, one_line_errors
from daemons.init_adapter import Start, check_start, copy_start, find_start
from prime_rl.configs.base import (
    MAX_TOML_BYTES,
    ConfigError,
    ConfigProblem,
    build,
    load_config,
    load_toml,
    merge,
    parse_toml,
)
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits, find_problems
from prime_rl.contract.files import read_file, read_text, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import TrainerStatus, is_alive, read_status
from prime_rl.utils.extras import missing

_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME_CHARS = 58  # of the 64 that an id allows; the rest is for "-2", "-3", ...
_PUBLIC_MODE = 0o644
_STAGED = ".adding."
# Filling a folder takes seconds, with a large adapter minutes; what is older was left by a killed process.
_LEFTOVER_S = 3600.0
# A config that was renamed after it was written is whole, and waits for nothing. File systems count in ticks of up to
# 10 ms: so that both are not in one tick, it counts as written this much earlier.
_TICKS_NS = 20_000_000


@dataclass(frozen=True)
class NewRun:
    """A checked run that is to be added. `start`: what its `[init]` names."""

    text: str
    config: OrchestratorConfig
    mode: int = _PUBLIC_MODE
    start: Start | None = None


def trainer_limits(output_dir: Path) -> TrainerLimits | None:
    """The limits that a run must meet: of the living trainer, else of its last config, else None."""
    output = OutputDir(output_dir)
    status = read_status(output.trainer_status, TrainerStatus)
    if status is not None and status.model and is_alive(status, time.time()):
        return TrainerLimits(status.model, status.max_seq_len, status.max_rank, max_async_level=status.max_async_level)
    try:
        return TrainerLimits.of(load_config(TrainerConfig, output.component_config("trainer")))
    except ConfigError:
        return None


def check_file(
    output_dir: Path, source: Path | str, *, overrides: Mapping[str, Any] | None = None
) -> list[ConfigProblem]:
    """All problems of a run's TOML file, as the trainer reports them; [] when it would be admitted.

    Whether an adapter of `[init]` on the hub fits is found when the run is added.
    """
    output = OutputDir(Path(output_dir))
    try:
        data = merge(load_toml(Path(source)), overrides or {})
    except ConfigError as error:
        return error.problems
    limits = trainer_limits(output.path)
    problems = _problems(data, str(source), limits)
    if not problems:
        try:
            start_of(output, build(OrchestratorConfig, data, str(source)), download=False)
        except ActionError as error:
            problems.append(ConfigProblem("init.from", str(error).removeprefix("init.from: ")))
    return problems


def validate_file(
    output_dir: Path, source: Path | str, *, overrides: Mapping[str, Any] | None = None
) -> OrchestratorConfig:
    """Check a run's TOML file as the trainer would. Raises ActionError with every problem."""
    try:
        return checked(Path(output_dir), load_toml(Path(source)), str(source), overrides)
    except ConfigError as error:
        raise ActionError(in_one_line(str(error))) from error


def checked(
    output_dir: Path, data: Mapping[str, Any], source: str, overrides: Mapping[str, Any] | None
) -> OrchestratorConfig:
    """The config of a run. Raises ConfigError with every problem."""
    data = merge(data, overrides or {})
    if problems := _problems(data, source, trainer_limits(output_dir)):
        raise ConfigError(source, problems)
    return build(OrchestratorConfig, data, source)


def _problems(data: Mapping[str, Any], source: str, limits: TrainerLimits | None) -> list[ConfigProblem]:
    """The trainer's own, then those of the chat template with each `[[env]]`, if its model is on this machine."""
    problems = find_problems(data, source, limits)
    if problems or missing("cpu", "jinja2", "huggingface_hub"):
        return problems
    from prime_rl.utils.chat_template import ChatTemplate, TokenizerError, model_file  # jinja2

    config, key = build(OrchestratorConfig, data, source), "model.name"
    try:
        if model_file(config.model.name, "tokenizer.json", local_only=True):
            template = ChatTemplate.load(config.model.name, config.sampling.chat_template_kwargs, local_only=True)
            for number, env in enumerate(config.env):
                key = f"env.{number}.prompt"
                template.render(env.prompt.shown([{"role": "user", "content": "question"}]))
    except TokenizerError as error:
        words = str(error).removeprefix("sampling.chat_template_kwargs: ")
        problems.append(ConfigProblem(key if words == str(error) else "sampling.chat_template_kwargs", words))
    return problems


def start_of(output: OutputDir, config: OrchestratorConfig, *, download: bool = True) -> Start | None:
    """What the run's `[init]` names, checked against the run; None without one. Raises ActionError."""
    if config.init.from_ is None:
        return None
    with one_line_errors(f"reading {config.init.from_}"):
        start = find_start(output, config.init.from_, download=download)
    if start is not None:
        check_start(output, start, config, trainer_limits(output.path))
    return start


def add_run(
    output_dir: Path,
    source: Path | str,
    *,
    run_id: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> str:
    """Add a run from a TOML file and return its id; the default id comes from the file's name.

    The file's text is kept as it is, unless there are `overrides`; a file that only its owner may read stays so. The
    adapter that `[init]` names is copied into the run. The folder appears complete, so the trainer never sees half a
    run. If `run_id` is given and that run has the same text already, nothing changes. Raises ActionError.
    """
    output, source = OutputDir(Path(output_dir)), Path(source)
    with one_line_errors(f"adding {source}"):
        if run_id is not None:
            output.run(run_id)
        text, mode, config = _read_checked(output.path, source, overrides)
        if run_id is not None and has_text(output.run(run_id), text):
            return run_id
        start = start_of(output, config)
        names = candidates(run_id, source.stem)
        if dry_run:
            return free_id(output, names)
        run = place(output, names, NewRun(text, config, mode, start))
        detail = f"from {source}" + (f", starts from {start.name}" if start else "")
        audit.record(output, "add", run.run_id, detail=detail)
        return run.run_id


def _read_checked(
    output_dir: Path, source: Path, overrides: Mapping[str, Any] | None
) -> tuple[str, int, OrchestratorConfig]:
    """The checked text, which is the text that is placed, the mode of its file, and what it says."""
    try:
        data = load_toml(source)
        text = read_file(source, limit=MAX_TOML_BYTES, follow_links=True).decode()
        if parse_toml(text, str(source)) != data:
            raise ActionError(f"{source} changed while it was read: try again")
        config = checked(output_dir, data, str(source), overrides)
    except ConfigError as error:
        raise ActionError(in_one_line(str(error))) from error
    return tomli_w.dumps(merge(data, overrides)) if overrides else text, mode_like(source), config


def mode_like(source: Path) -> int:
    """The mode of a config that is made from `source`: its owner's alone if that is."""
    return _PUBLIC_MODE if stat.S_IMODE(source.stat().st_mode) & 0o077 else 0o600


def candidates(run_id: str | None, name: str) -> Iterator[str]:
    """Ids to try in turn: `run_id` alone, or those that are made from `name`."""
    if run_id is not None:
        yield run_id
        return
    stem = in_id(name)[:_MAX_NAME_CHARS] or "run"
    yield f"run_{stem}"
    for number in range(2, 10_000):
        yield f"run_{stem}-{number}"


def in_id(text: str) -> str:
    """`text` with what an id cannot have replaced."""
    return _NOT_IN_ID.sub("-", text.removeprefix("run_"))


def free_id(output: OutputDir, names: Iterable[str]) -> str:
    """The first of `names` that no run has. Raises ActionError."""
    name = ""
    for name in names:
        if not output.run(name).path.exists():
            return name
    raise _already_exists(output, name)


def place(output: OutputDir, names: Iterable[str], new: NewRun) -> RunDir:
    """Add a run under the first of `names` that is free, so that two adds at once get two ids."""
    output.path.mkdir(parents=True, exist_ok=True)
    with staged(output, new) as folder:
        return put(output, folder, names)


@contextlib.contextmanager
def staged(output: OutputDir, new: NewRun) -> Iterator[Path]:
    """The run's folder, complete, beside the runs; what is still there at the end is removed."""
    _remove_leftovers(output)
    folder = Path(tempfile.mkdtemp(prefix=_STAGED, dir=output.path))
    try:
        folder.chmod(0o755)
        written_ns = time.time_ns() - _TICKS_NS
        write_atomic(RunDir(folder).orch_toml, new.text, mode=new.mode, modified_ns=written_ns)
        if new.start is not None:
            copy_start(new.start, RunDir(folder).init)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put(output: OutputDir, folder: Path, names: Iterable[str]) -> RunDir:
    """Rename a complete folder to the first of `names` that is free. Raises ActionError."""
    name = ""
    for name in names:
        run = output.run(name)
        try:
            os.rename(folder, run.path)
            return run
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
    raise _already_exists(output, name)


def _already_exists(output: OutputDir, run_id: str) -> ActionError:
    return ActionError(f"run {run_id!r} already exists in {output.path}: choose another id with --id")


def has_text(run: RunDir, text: str) -> bool:
    """Whether the run exists and was made with this very text."""
    return read_text(run.orch_toml, limit=MAX_TOML_BYTES) == text


def _remove_leftovers(output: OutputDir) -> None:
    """Remove what a killed process was about to add."""
    for folder in output.path.glob(f"{_STAGED}*"):
        with contextlib.suppress(OSError):
            if not folder.is_symlink() and time.time() - folder.stat().st_mtime > _LEFTOVER_S:
                shutil.rmtree(folder, ignore_errors=True)
