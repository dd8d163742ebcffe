"""Add runs, and fork them: check a run's config with the trainer's own rules, fill a folder, rename it into place.

A folder appears complete, so the trainer never sees half a run; what a killed `prl` left is removed by a later one.
The adapter that a run starts from (`[init] from`: a version of a run, a folder in PEFT format, or the name of one on
the Hugging Face hub) is copied into it, so it no longer needs its source. Names, shapes and numbers of the adapter are
checked by the trainer, which has the model.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from daemons.data_files import copy_data, data_problems, has_data, plugin_problems, program_problems
from daemons.details import Version, find_version, parse_version
from daemons.errors import ActionError, WrongUseError, expand_home, need, one_line_errors, record_act
from daemons.specs import find_model, saved_folder
from daemons.trash import acting_on, existing_run
from prime_rl.configs.admitted import flatten, read_effect
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
from prime_rl.configs.distill import TeacherConfig
from prime_rl.configs.explain import check_kind
from prime_rl.configs.jsonl import Place, place_of
from prime_rl.configs.orchestrator import KINDS, OrchestratorConfig, of_kind
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.validate import TrainerLimits, doubts, find_problems, load_run_config
from prime_rl.contract.files import open_file, read_file, read_text, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, stable_marker
from prime_rl.contract.notes import note_added
from prime_rl.contract.peft import (
    ADAPTER_FILE,
    CONFIG_FILE,
    AdapterConfig,
    check_adapter_file,
    has_adapter,
    read_adapter_config,
    untrained_modules,
)
from prime_rl.contract.served import MAX_TEACHER_ADAPTERS
from prime_rl.contract.status import TrainerStatus, is_alive, read_status
from prime_rl.utils.runtime import missing

# Beside the adapter in a checkpoint: the moments of the optimizer, and what refers to them.
_OPTIMIZER_FILES = ("progress.json", "state.safetensors")
_COPY_BYTES = 1 << 20
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")

INIT_FROM = "init.from: "
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME_CHARS = 58  # of the 64 that an id allows; the rest is for "-2", "-3", ...
_PUBLIC_MODE = 0o644
_STAGED = ".adding."
# Filling a folder takes seconds, with a large adapter minutes; what is older was left by a killed process.
_LEFTOVER_S = 3600.0
# A config that was renamed after it was written is whole, and waits for nothing. File systems count in ticks of up to
# 10 ms: so that both are not in one tick, it counts as written this much earlier.
_TICKS_NS = 20_000_000
# Of a run's id, with room for "-fork".
_MAX_FORKED_CHARS = 57


@dataclass(frozen=True)
class Start:
    """An adapter to start from.

    Attributes:
        name: the version, such as "run_a@v20", the folder, or the name on the hub.
        version: None for what is not a version of a run of this workspace.
        files: what is copied; with moments of the optimizer, from a checkpoint.
    """

    name: str
    folder: Path
    config: AdapterConfig
    version: Version | None = None
    files: Sequence[str] = (CONFIG_FILE, ADAPTER_FILE)


def find_start(output: OutputDir, source: str, *, download: bool = True) -> Start | None:
    """Find what `[init] from` names. None: on the hub, and not to be downloaded.

    Raises ActionError when it is missing or not an adapter, or OSError.
    """
    named = parse_version(source)
    if named is not None:
        return start_from(find_version(existing_run(output, named[0]), named[1]))
    folder = expand_home(Path(source))
    if folder.is_dir():
        return Start(source, folder, _config(folder))
    if not _HUB_NAME.fullmatch(source):
        raise WrongUseError(
            f"{source!r} not found: must be a run such as run_a@v20, a folder in PEFT format, "
            "or ORG/NAME on the Hugging Face hub"
        )
    if not download:
        return None
    folder = _download(source)
    return Start(source, folder, _config(folder))


def start_from(version: Version, *, with_optimizer: bool = False) -> Start:
    """A version to start from; `with_optimizer` needs its checkpoint. Raises ActionError."""
    folder = version.checkpoint if with_optimizer else version.adapter
    if folder is None or version.adapter is None:
        raise ActionError(f"{version.name} is a version of a whole model: a run can start from an adapter only")
    files = (CONFIG_FILE, ADAPTER_FILE, *(_OPTIMIZER_FILES if with_optimizer else ()))
    return Start(version.name, folder, _config(folder), version, files)


def check_start(output: OutputDir, start: Start, config: OrchestratorConfig, limits: TrainerLimits | None) -> None:
    """Raises ActionError when a run with `config` cannot start from it."""
    rank = config.model.lora.rank or (limits.max_rank if limits else None)
    if rank is not None and start.config.rank > rank:
        raise WrongUseError(
            f"{start.name} has rank {start.config.rank}, the run has model.lora.rank = {rank}: "
            "must be at most that; raise the run's rank, or choose another adapter"
        )
    _check_modules(output, start)


def _check_modules(output: OutputDir, start: Start) -> None:
    takes = _target_modules(output)
    if takes is not None and (odd := untrained_modules(start.config.target_modules, takes)):
        raise WrongUseError(
            f"{start.name} adapts {', '.join(odd)[:200]}, this workspace's trainer only "
            f"{', '.join(takes)}: choose another adapter, or change lora.target_modules in the system file"
        )


def copy_start(start: Start, folder: Path) -> None:
    """Copy the adapter into `folder`, which must be new. Raises ActionError or OSError."""
    folder.mkdir()
    try:
        for name in start.files:
            _copy(start.folder / name, folder / name)
        check_adapter_file(folder / ADAPTER_FILE)
    except FileNotFoundError as error:
        raise ActionError(f"{start.name}: {error.filename} not found: it may have been removed meanwhile") from error
    except ValueError as error:
        raise ActionError(str(error)) from error
    # A version is removed marker first: what was copied while the marker stood is whole.
    if start.version is not None:
        # A checkpoint has its marker one folder higher.
        step_dir = start.folder if start.folder == start.version.published else start.folder.parent
        if not stable_marker(step_dir).exists():
            raise ActionError(f"{start.name} was removed while it was copied: choose a newer version")


def _config(folder: Path) -> AdapterConfig:
    try:
        return read_adapter_config(folder, follow_links=True)
    except FileNotFoundError as error:
        raise ActionError(f"{folder} has no {CONFIG_FILE}: a run starts from a folder in PEFT format") from error
    except ValueError as error:
        raise ActionError(str(error)) from error


def _download(name: str) -> Path:
    """The folder with the adapter `name` of the hub, from its cache if it is there."""
    need("cpu", "huggingface_hub")
    from huggingface_hub import snapshot_download  # a slow import, and most adapters are in a folder

    try:
        folder = Path(snapshot_download(name, allow_patterns=[CONFIG_FILE, ADAPTER_FILE]))
    except (OSError, ValueError) as error:
        raise ActionError(f"{name!r} is not a folder, and the hub does not give it: {str(error)[:300]}") from error
    if not has_adapter(folder):
        raise ActionError(f"{name!r} on the hub has no {CONFIG_FILE} and {ADAPTER_FILE}")
    return folder


def _target_modules(output: OutputDir) -> tuple[str, ...] | None:
    """The modules that the workspace's trainer adapts; None when it never ran."""
    try:
        lora = load_config(TrainerConfig, output.component_config("trainer")).model.lora
    except ConfigError:
        return None
    return lora.target_modules if lora else None


def _copy(source: Path, target: Path) -> None:
    with os.fdopen(open_file(source, follow_links=True), "rb") as old, target.open("xb") as new:
        shutil.copyfileobj(old, new, _COPY_BYTES)
        new.flush()
        os.fsync(new.fileno())


@dataclass(frozen=True)
class NewRun:
    """A checked run that is to be added. `place` has the files that its config names, `start` what `[init]` does.

    `teachers`: adapters to copy, each with its number.
    """

    text: str
    config: OrchestratorConfig
    place: Place
    mode: int = _PUBLIC_MODE
    start: Start | None = None
    teachers: Mapping[int, Start] = field(default_factory=dict)


def trainer_limits(output_dir: Path) -> TrainerLimits | None:
    """The limits that a run must meet: of the living trainer, else of its last config, else None."""
    output = OutputDir(output_dir)
    status = read_status(output.trainer_status, TrainerStatus)
    try:
        folder = saved_folder(output) or Path()
        if status is not None and status.model and is_alive(status, time.time()):
            return TrainerLimits(
                *(status.model, status.max_seq_len, status.max_rank),
                max_async_level=status.max_async_level,
                folder=folder,
            )
        return replace(TrainerLimits.of(load_config(TrainerConfig, output.component_config("trainer"))), folder=folder)
    except ConfigError:
        return None


def check_file(
    output_dir: Path, source: Path | str, *, overrides: Mapping[str, Any] | None = None, beside: Path | None = None
) -> list[ConfigProblem]:
    """All problems of a run's TOML file, as the trainer reports them; [] when it would be admitted.

    The files that it names, beside `source` or another config `beside`, are checked too, and that the packages of its
    environments are installed here. Whether an adapter of `[init]` on the hub fits is found when the run is added.
    """
    output = OutputDir(Path(output_dir))
    try:
        data = merge(load_toml(Path(source)), overrides or {})
        problems = _problems(data, str(source), trainer_limits(output.path), place_of(beside or Path(source)))
    except ConfigError as error:
        return error.problems
    if not problems:
        config = build(OrchestratorConfig, data, str(source))
        problems = plugin_problems(config)
        try:
            start_of(output, config, download=False)
            teachers_of(output, config, download=False)
        except ActionError as error:
            key, _, words = str(error).partition(": ")
            problems.append(ConfigProblem(key, words))
    return problems


def check_doubts(
    output_dir: Path, source: Path | str, *, overrides: Mapping[str, Any] | None = None
) -> list[ConfigProblem]:
    """What is valid in a run's TOML file and rarely meant, or is not on this machine; [] also for an invalid one."""
    try:
        config = load_run_config(Path(source), overrides)
        missing_here = program_problems(config, place_of(Path(source)))
    except (ConfigError, OSError):
        return []
    return doubts(config, trainer_limits(Path(output_dir))) + missing_here


def validate_file(
    output_dir: Path, source: Path | str, *, overrides: Mapping[str, Any] | None = None, beside: Path | None = None
) -> OrchestratorConfig:
    """Check a run's TOML file as the trainer would. Raises ActionError with every problem."""
    with one_line_errors(f"checking {source}"):
        place = place_of(beside or Path(source))
        return checked(Path(output_dir), load_toml(Path(source)), str(source), overrides, place)


def checked(
    output_dir: Path, data: Mapping[str, Any], source: str, overrides: Mapping[str, Any] | None, place: Place
) -> OrchestratorConfig:
    """The config of a run, whose files are at `place`. Raises ConfigError with every problem."""
    data = merge(data, overrides or {})
    if problems := _problems(data, source, trainer_limits(output_dir), place):
        raise ConfigError(source, problems)
    return build(OrchestratorConfig, data, source)


def _problems(data: Mapping[str, Any], source: str, limits: TrainerLimits | None, place: Place) -> list[ConfigProblem]:
    """The trainer's own; those of its files; those of the chat template with each `[[env]]`, if the model is here.

    Raises ConfigError for a file of another kind.
    """
    check_kind("orch", data, source)
    if problems := find_problems(data, source, limits):
        return problems
    config, key = build(OrchestratorConfig, data, source), "model.name"
    problems = data_problems(config, place)
    if problems or missing("cpu", "jinja2", "huggingface_hub"):
        return problems
    from prime_rl.utils.chat_template import ChatTemplate, TokenizerError, model_file  # jinja2

    try:
        model = find_model(config.model.name, limits.folder if limits else None)
        if model_file(model, "tokenizer.json", local_only=True):
            template = ChatTemplate.load(model, config.sampling.chat_template_kwargs, local_only=True)
            for number, env in enumerate(config.env):
                key = f"env.{number}.prompt"
                template.render(env.prompt.shown([{"role": "user", "content": "question"}]))
    except TokenizerError as error:
        words = str(error).removeprefix("sampling.chat_template_kwargs: ")
        problems.append(ConfigProblem(key if words == str(error) else "sampling.chat_template_kwargs", words))
    return problems


def start_of(output: OutputDir, config: OrchestratorConfig, *, download: bool = True) -> Start | None:
    """Return the adapter that the run's `[init]` names, checked against the run; or None. Raises ActionError."""
    if config.init.from_ is None:
        return None
    try:
        with one_line_errors(f"reading {config.init.from_}"):
            start = find_start(output, config.init.from_, download=download)
        if start is not None:
            check_start(output, start, config, trainer_limits(output.path))
    except ActionError as error:
        raise type(error)(f"{INIT_FROM}{error}") from error
    return start


def teachers_of(
    output: OutputDir, config: OrchestratorConfig, *, before: RunDir | None = None, download: bool = True
) -> dict[int, Start]:
    """The adapters that teach the run, each with its number; those of runs that still train are not copied.

    `before`: a run whose copies are taken where they are of the same adapters. Raises ActionError.
    """
    found, kept, limits = dict[int, Start](), dict[str | None, Path](), trainer_limits(output.path)
    if before:
        kept = {read_text(before.teacher_source(at)): before.teacher_dir(at) for at in range(MAX_TEACHER_ADAPTERS)}
    for number, name in enumerate(config.teacher_adapters):
        try:
            if followed := TeacherConfig(model=name).follows:
                existing_run(output, followed)
                continue
            with one_line_errors(f"reading {name}"):
                copied = kept.get(name)
                start = Start(name, copied, _config(copied)) if copied else find_start(output, name, download=download)
            if start is not None:
                _check_teacher(output, start, limits)
                found[number] = start
        except ActionError as error:
            raise type(error)(f"teacher: {error}") from error
    return found


def _check_teacher(output: OutputDir, start: Start, limits: TrainerLimits | None) -> None:
    """Raises ActionError when inference cannot serve it."""
    most = limits.max_rank if limits else None
    if most is not None and start.config.rank > most:
        rule = f"must be at most this workspace's {most}; choose another, or raise lora.rank in the system file"
        raise WrongUseError(f"{start.name} has rank {start.config.rank}: {rule}")
    _check_modules(output, start)


def add_run(
    output_dir: Path,
    source: Path | str,
    *,
    run_id: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    beside: Path | None = None,
) -> str:
    """Add a run from a TOML file and return its id; the default id comes from the file's name.

    The file's text is kept as it is, unless there are `overrides`; a file that only its owner may read stays so. The
    adapter that `[init]` names is copied into the run, and so are the files that its environments name, beside `source`
    or another config `beside`. The folder appears complete, so the trainer never sees half a run. If `run_id` is given
    and that run has the same text and files already, nothing changes. Raises ActionError.
    """
    output, source = OutputDir(Path(output_dir)), Path(source)
    with one_line_errors(f"adding {source}"):
        if run_id is not None:
            output.run(run_id)
        where = place_of(beside or source)
        text, mode, config = _read_checked(output.path, source, overrides, where)
        if run_id is not None and is_same(output.run(run_id), NewRun(text, config, where)):
            return run_id
        start, teachers = start_of(output, config), teachers_of(output, config)
        names = candidates(run_id, source.stem)
        if dry_run:
            return free_id(output, names)
        run = place(output, names, NewRun(text, config, where, mode, start, teachers))
        detail = f"from {source}" + (f", starts from {start.name}" if start else "")
        record_act(output, "add", run.run_id, detail=detail)
        return run.run_id


def _read_checked(
    output_dir: Path, source: Path, overrides: Mapping[str, Any] | None, place: Place
) -> tuple[str, int, OrchestratorConfig]:
    """The checked text, which is the text that is placed, the mode of its file, and what it says."""
    data = load_toml(source)
    text = read_file(source, limit=MAX_TOML_BYTES, follow_links=True).decode()
    if parse_toml(text, str(source)) != data:
        raise ActionError(f"{source} changed while it was read: try again")
    config = checked(output_dir, data, str(source), overrides, place)
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
        copy_data(new.config, new.place, RunDir(folder), new.mode)
        if new.start is not None:
            copy_start(new.start, RunDir(folder).init)
        for number, teacher in new.teachers.items():
            RunDir(folder).teachers.mkdir(exist_ok=True)
            copy_start(teacher, RunDir(folder).teacher_dir(number))
            write_atomic(RunDir(folder).teacher_source(number), new.config.teacher_adapters[number])
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put(output: OutputDir, folder: Path, names: Iterable[str]) -> RunDir:
    """Rename a complete folder to the first of `names` that is free. Raises ActionError."""
    name, added_ns = "", RunDir(folder).orch_toml.stat().st_mtime_ns
    for name in names:
        run = output.run(name)
        note_added(RunDir(folder), name, added_ns)
        try:
            os.rename(folder, run.path)
            return run
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
    raise _already_exists(output, name)


def _already_exists(output: OutputDir, run_id: str) -> ActionError:
    return ActionError(f"run {run_id!r} already exists in {output.path}: choose another id with --id")


def is_same(run: RunDir, new: NewRun) -> bool:
    """True when the run exists and was made with this very text, and these files."""
    same_text = read_text(run.orch_toml, limit=MAX_TOML_BYTES) == new.text
    return same_text and has_data(new.config, new.place, run)


def _remove_leftovers(output: OutputDir) -> None:
    """Remove what a killed process was about to add."""
    for folder in output.path.glob(f"{_STAGED}*"):
        with contextlib.suppress(OSError):
            if not folder.is_symlink() and time.time() - folder.stat().st_mtime > _LEFTOVER_S:
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Fork:
    """`source` is the version that it starts from, such as "run_a@v20"; `added` is false when it was there already.

    `left_out`: keys of the old config that a run of its `kind` does not have.
    """

    run_id: str
    source: str
    with_optimizer: bool
    added: bool
    kind: str = "rl"
    left_out: Sequence[str] = ()


def fork_run(
    output_dir: Path,
    run_id: str,
    *,
    step: int | None = None,
    new_id: str | None = None,
    kind: str | None = None,
    over: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    with_optimizer: bool = False,
    dry_run: bool = False,
    reason: str = "",
) -> Fork:
    """Add a run that starts from version `step` of `run_id`, by default its newest.

    Its config is that of the run, of another `kind` without what only the old kind has, under the tables of the file
    `over`, under `overrides`. Files that `over` names are beside it, those of `overrides` in the working directory.
    `with_optimizer` takes the moments of the optimizer too, which only checkpoints have; the learning rate's schedule
    starts over. `new_id` defaults to the run's own id with "-fork". If the run `new_id` is this fork already, nothing
    changes. Raises ActionError.
    """
    with acting_on(output_dir, run_id, "forking") as (output, run):
        version = find_version(run, step, saved=with_optimizer)
        start = start_from(version, with_optimizer=with_optimizer)
        in_file, by_hand = load_toml(over) if over else {}, overrides or {}
        given = merge(in_file, by_hand) | ({"kind": kind} if kind else {})
        sources = [(Path("fork.toml"), by_hand), *([(over, in_file)] if over else [])]
        named = [(place_of(source), {str(value) for _, value in flatten(table)}) for source, table in sources]

        def place_in(name: str) -> Path:
            for beside, values in named:
                if any(each == name or each.startswith(f"{name}:") for each in values):
                    return beside(name)
            return run.data_file(name)

        data, config, left_out = _fork_config(output, run, version.name, given, place_in)
        check_start(output, start, config, trainer_limits(output.path))
        if with_optimizer:
            _check_moments(output, run, config, start.config.rank, start.config.alpha)
        same = output.run(new_id) if new_id is not None else None
        teachers = teachers_of(output, config, before=run)
        new = NewRun(tomli_w.dumps(data), config, place_in, mode_like(run.orch_toml), start, teachers)
        made = Fork("", version.name, with_optimizer, False, config.kind, left_out)
        if same is not None and is_same(same, new):
            has_optimizer = all((same.init / name).exists() for name in _OPTIMIZER_FILES)
            if has_optimizer == with_optimizer:
                return replace(made, run_id=same.run_id)
        names = candidates(new_id, f"{run_id[:_MAX_FORKED_CHARS]}-fork")
        if dry_run:
            return replace(made, run_id=free_id(output, names))
        fork = place(output, names, new)
        detail = f"from {version.name}" + (" with its optimizer" if with_optimizer else "")
        record_act(output, "fork", fork.run_id, reason=reason, detail=detail)
        return replace(made, run_id=fork.run_id, added=True)


def _fork_config(
    output: OutputDir, run: RunDir, source: str, given: Mapping[str, Any], place: Place
) -> tuple[dict[str, Any], OrchestratorConfig, tuple[str, ...]]:
    """The new run's config, also checked, and the keys that are left out. Raises ActionError for an invalid one."""
    if "init" in given:
        raise ActionError("init.from of a fork is the version that it starts from: choose it with --step")
    kind = given.get("kind")
    if kind is not None and kind not in KINDS:
        raise WrongUseError(f"invalid kind {kind!r}: expected one of {', '.join(KINDS)}")
    try:
        before = read_effect(run).data
        if isinstance(ckpt := before.get("ckpt"), dict):
            ckpt.pop("resume_step", None)
        kept = of_kind(before, kind) if kind else before
        data = {**merge(kept, given), "init": {"from": source}}
        gone = (key for key, _ in flatten(before) if key not in dict(flatten(kept)))
        left_out = tuple(dict.fromkeys(key if (top := key.partition(".")[0]) in kept else top for key in gone))
        return data, checked(output.path, data, run.orch_toml.name, None, place), left_out
    except ConfigError as error:
        hint = f"; what {kind!r} needs is given by --set KEY=VALUE or --config FILE" if kind else ""
        raise WrongUseError(f"the fork of {run.run_id} would be invalid: {error}{hint}") from error


def _check_moments(output: OutputDir, run: RunDir, config: OrchestratorConfig, rank: int, alpha: float) -> None:
    """Raises ActionError when moments of the run's optimizer mean nothing to the fork."""
    limits, lora = trainer_limits(output.path), config.model.lora
    own = (lora.rank or (limits and limits.max_rank) or rank, lora.alpha or (limits and limits.alpha) or alpha)
    try:
        old = build(OrchestratorConfig, read_effect(run).data, run.orch_toml.name)
    except ConfigError as error:
        raise ActionError(f"--with-optimizer: {error}") from error
    if own != (rank, alpha):
        found, wanted = f"rank {rank} and alpha {alpha:g}", f"rank {own[0]} and alpha {own[1]:g}"
    elif config.kind != old.kind:
        found, wanted = f"kind = {old.kind!r}", f"kind = {config.kind!r}"
    elif config.optim.type != old.optim.type:
        found, wanted = f"optim.type = {old.optim.type!r}", f"optim.type = {config.optim.type!r}"
    else:
        return
    raise ActionError(
        f"--with-optimizer: {run.run_id} was trained with {found}, the fork has {wanted}: leave the option out, "
        "or keep these"
    )
