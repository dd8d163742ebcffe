"""A version of a run as a folder to take home: `prl runs export`, and the same in the TUI.

An adapter in PEFT format, or a whole model with its tokenizer, each with a model card. It is written beside its place
and renamed when it is complete, so a kill leaves nothing half; what a killed export left there is removed by the next
one. An adapter is merged into the base model by a process of its own (`prime_rl.trainer.merge`), which has torch.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w

from daemons.details import RunResult, Version, change_texts, find_version, read_result, versions_of
from daemons.errors import ActionError, WrongUseError, need, need_cpu, record_act
from daemons.process import python_module, run_child
from daemons.specs import MERGE_MODULE, saved_folder
from daemons.trash import Progress, acting_on
from prime_rl import __version__
from prime_rl.configs.admitted import hide_secrets, read_effect
from prime_rl.configs.base import without_nulls
from prime_rl.contract.files import locked, open_file, sync_path
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.peft import ADAPTER_FILE, CONFIG_FILE, check_weights, read_adapter_config
from prime_rl.contract.samples import spread
from prime_rl.utils.text import CleanText, clean_strings, one_line

ADAPTER, MERGED, MODEL = "adapter", "merged", "model"
CARD_FILE = "README.md"
MODEL_FILES = ("config.json", "model.safetensors")
# A version that is merged is held here, in the folder that is being filled.
HELD = ".adapter"
# A run removes versions as quickly as it makes them; each attempt copies an adapter.
MOST_ATTEMPTS = 10
# What a checkpoint has beside the weights: only the trainer uses it.
_OF_TRAINER = ("state.safetensors", "progress.json")
# A log of the merge is read from its end: transformers may warn at length.
MAX_LOG_BYTES = 64_000
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")

# Rows of a table: what a reader takes in.
MAX_ROWS = 20
SPARKS = "▁▂▃▄▅▆▇█"
MAX_SPARKS = 60
# A base model on the hub; a folder has no link, wherever it is.
_HUB_NAME = re.compile(r"(?!models/|outputs/)[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Export:
    """The files that were written, or would be. `kind`: adapter, merged (into the base model), model (trained whole).

    `url` is where it was pushed to.
    """

    run_id: str
    step: int
    kind: str
    out: Path
    base_model: str
    num_bytes: int = 0
    url: str | None = None


def export_run(
    output_dir: Path,
    run_id: str,
    out: Path,
    *,
    step: int | None = None,
    merge: bool = False,
    push: str | None = None,
    dry_run: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Progress = lambda message: None,
) -> Export:
    """Write version `step` (default: the newest) to the new folder `out`, and push it to the hub as `push`.

    A merge ends early when `stop()` is true. Raises ActionError; then `out` is not there, unless only the push failed.
    """
    out = Path(os.path.abspath(out))
    with acting_on(output_dir, run_id, "exporting") as (output, run):
        _, planned = _plan(run, find_version(run, step), out, merge)
        _check_place(output, out)
        if planned.kind == MERGED:
            need_cpu()
        if push is not None:
            _check_push(push)
        if dry_run:
            return planned
        with _staged(out) as folder:
            source, planned = _take(run, step, merge, out, folder)
            on_progress(f"writing version {planned.step} of {run_id} to {out}")
            if planned.kind == MERGED:
                _merge(output, planned, source, folder, stop)
            (folder / CARD_FILE).write_text(_card(run, planned), encoding="utf-8")
            num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        record_act(output, "export", run_id, detail=f"version {planned.step} ({planned.kind}) to {out}")
    done = replace(planned, num_bytes=num_bytes)
    return done if push is None else replace(done, url=_push(output, done, push, on_progress))


def _take(run: RunDir, step: int | None, merge: bool, out: Path, folder: Path) -> tuple[Path, Export]:
    """Copy a version's weights into `folder`, an adapter to be merged into HELD there; returns where they were.

    A run that trains removes its old versions. One that goes meanwhile is followed by the then newest, or by the
    sentence of `find_version` where a step was asked for.
    """
    for attempts_left in reversed(range(MOST_ATTEMPTS)):
        version = find_version(run, step)
        try:
            source, planned = _plan(run, version, out, merge)
            to = folder / HELD if planned.kind == MERGED else folder
            to.mkdir(exist_ok=True)
            _copy(source, to, ADAPTER if planned.kind == MERGED else planned.kind)
            return source, planned
        except (OSError, ActionError):
            if version in versions_of(run) or not attempts_left:
                raise
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    raise AssertionError("the last attempt raises")


def _plan(run: RunDir, version: Version, out: Path, merge: bool) -> tuple[Path, Export]:
    """The folder with the weights, and what is made of it."""
    if (source := version.adapter) is not None:
        try:
            config = read_adapter_config(source)
        except ValueError as error:
            raise ActionError(str(error)) from error
        return source, Export(run.run_id, version.step, MERGED if merge else ADAPTER, out, config.base_model)
    for folder in (version.published, version.checkpoint):
        if folder is not None and all((folder / name).is_file() for name in MODEL_FILES):
            return folder, Export(run.run_id, version.step, MODEL, out, _base_model(run))
    raise ActionError(
        f"the weights of {version.name} are not on disk, only inference has them: export a step with a checkpoint"
    )


def _base_model(run: RunDir) -> str:
    model = read_effect(run).data.get("model")
    return str(model.get("name", "")) if isinstance(model, dict) else ""


def _check_place(output: OutputDir, out: Path) -> None:
    if os.path.lexists(out):
        raise ActionError(f"{out} already exists: choose a new folder with --out")
    if not out.parent.is_dir():
        raise ActionError(f"{out.parent} not found: make the folder first, or choose another with --out")
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(output.path)):
        raise ActionError(f"{out} is inside the workspace: choose a folder outside of it with --out")


@contextlib.contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A folder to fill beside `out`, which becomes `out` when it is complete.

    Its lock ends with this process, so that a folder which a killed export left is told from one that is being filled.
    """
    for left in out.parent.glob(f".{glob.escape(out.name)}.*.exporting"):
        with contextlib.suppress(OSError), locked(left):
            shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".exporting", dir=out.parent))
    try:
        with locked(folder):
            yield folder
            folder.chmod(0o755)  # not before: whoever may read it may lock it
            for path in folder.iterdir():
                sync_path(path)
            sync_path(folder)
            os.rename(folder, out)  # fails when something has come there meanwhile
            sync_path(out.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy(source: Path, folder: Path, kind: str) -> None:
    """The two files of an adapter, or all of a model but what is the trainer's."""
    names = [ADAPTER_FILE, CONFIG_FILE]
    if kind == MODEL:
        files = [path for path in source.iterdir() if path.is_file() and not path.is_symlink()]
        names = [path.name for path in files if path.stat().st_size and path.name not in _OF_TRAINER]
    for name in names:
        with os.fdopen(open_file(source / name), "rb") as file, (folder / name).open("xb") as copy:
            shutil.copyfileobj(file, copy)
        if name.endswith(".safetensors"):
            try:
                check_weights(folder / name)
            except ValueError as error:
                why = str(error).removeprefix(f"{folder / name}: ")
                raise ActionError(f"nothing was written: {source / name}: {why}; choose an earlier --step") from error


def _merge(output: OutputDir, planned: Export, source: Path, folder: Path, stop: Callable[[], bool]) -> None:
    """Merge the adapter in HELD, which is gone then."""
    held = folder / HELD
    command = python_module(MERGE_MODULE, f"--base={planned.base_model}", f"--adapter={held}", f"--out={folder}")
    with tempfile.TemporaryFile() as log:
        exit_code = run_child(command, stop, stdout=log, stderr=log, cwd=saved_folder(output))
        if exit_code is None:
            raise ActionError(f"the export of {planned.run_id} was stopped; nothing was written")
        if exit_code:
            log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
            last = one_line(next((line for line in reversed(lines) if line.strip()), ""), 1000).removeprefix("merge: ")
            why = last.replace(str(held), str(source)) or f"exit code {exit_code}"
            raise ActionError(f"exporting {planned.run_id} failed: {why}")
    shutil.rmtree(held)


def _card(run: RunDir, planned: Export) -> str:
    config = clean_strings(hide_secrets(read_effect(run).data))
    result = read_result(run, until=planned.step)
    base = one_line(planned.base_model, 1000)
    is_adapter, changes = planned.kind == ADAPTER, change_texts(run)
    return model_card(CardFacts(run.run_id, planned.step, base, is_adapter, config, result, changes))


# The hub


def _check_push(repository: str) -> None:
    if not _REPOSITORY.fullmatch(repository):
        raise WrongUseError(f"invalid --push {repository!r}: expected ORG/NAME")
    need("cpu", "huggingface_hub")
    from huggingface_hub import get_token

    if get_token() is None:
        raise ActionError(f"cannot push to {repository}: no token found; set HF_TOKEN, or run hf auth login")


def _push(output: OutputDir, done: Export, repository: str, on_progress: Progress) -> str:
    """Upload what was written to a repository, which is made, private, when there is none; returns its address."""
    from huggingface_hub import HfApi

    on_progress(f"pushing {done.out} to {repository}")
    hub = HfApi()
    try:
        url = str(hub.create_repo(repository, private=True, exist_ok=True))
        hub.upload_folder(repo_id=repository, folder_path=done.out, commit_message=f"{done.run_id} step {done.step}")
    except Exception as error:  # of a foreign library, and of whatever it uses to reach the hub
        raise ActionError(
            f"{done.out} is complete, but pushing it to {repository} failed: {one_line(str(error), 500)}; "
            f"try again with: hf upload {repository} {done.out}"
        ) from error
    record_act(output, "push", done.run_id, detail=f"version {done.step} ({done.kind}) to {url}")
    return url


@dataclass(frozen=True)
class CardFacts:
    """The facts on a card. `config` is the run's, with its changes, no secrets, and clean; `is_adapter` as written."""

    run_id: str
    step: int
    base_model: str
    is_adapter: bool
    config: Mapping[str, Any]
    result: RunResult
    changes: tuple[CleanText, ...] = ()


def model_card(facts: CardFacts) -> str:
    """A README.md in the form that the Hugging Face hub reads."""
    result, title = facts.result, f"{facts.run_id}, version {facts.step}"
    changed = f"This is the newest. It changed while the run trained; this is the version after step {facts.step}:"
    what = "A LoRA adapter" if facts.is_adapter else "A whole model"
    parts = [
        "\n".join(["---", *_metadata(facts), "---"]),
        f"# {title}",
        f"{what} trained from `{facts.base_model.replace('`', '?')}` with reinforcement learning: {facts.step} "
        f"updates, {result.tokens:,} tokens.",
        "## Use",
        _fenced("python", _usage(facts)),
        "## Reward",
        *_reward(result),
        *(["## Evaluation", *_evaluation(result)] if result.evaluations else []),
        "## Config",
        _fenced("toml", tomli_w.dumps(without_nulls(facts.config))),
        *([changed, _fenced("", "\n".join(facts.changes))] if facts.changes else []),
        "## Made with",
        ", ".join(_versions()) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(facts: CardFacts) -> list[str]:
    """The lines of YAML that the hub reads."""
    on_hub = _HUB_NAME.fullmatch(facts.base_model) and not Path(facts.base_model).exists()
    return [
        *([f"base_model: {facts.base_model}"] if on_hub else []),
        f"library_name: {'peft' if facts.is_adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        f"tags: [reinforcement-learning, prl{', lora' if facts.is_adapter else ''}]",
    ]


def _usage(facts: CardFacts) -> str:
    if not facts.is_adapter:
        return (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_NAME")\n'
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_NAME")\n'
        )
    return (
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f"base = AutoModelForCausalLM.from_pretrained({facts.base_model!r})\n"
        'model = PeftModel.from_pretrained(base, "FOLDER_OR_NAME")\n'
    )


def _reward(result: RunResult) -> list[str]:
    if not result.rewards:
        return ["Not recorded."]
    steps = sorted(result.rewards)
    rows = [[str(steps[at]), f"{result.rewards[steps[at]]:.4g}"] for at in spread(steps, MAX_ROWS)]
    line = _fenced("", sparkline([result.rewards[step] for step in steps]))
    return [
        f"Mean of each batch, from step {steps[0]} to {steps[-1]}{_shown(len(steps))}:",
        line,
        _table(["step", "reward"], rows),
    ]


def _evaluation(result: RunResult) -> list[str]:
    names = sorted({name for figures in result.evaluations.values() for name in figures})
    evaluations = sorted(result.evaluations.items())
    rows = [
        [str(step), *(f"{figures[name]:.4g}" if (name in figures) else "" for name in names)]
        for step, figures in (evaluations[at] for at in spread([step for step, _ in evaluations], MAX_ROWS))
    ]
    told = _shown(len(evaluations))
    return [*([f"Evaluations{told}:"] if told else []), _table(["version", *names], rows)]


def _shown(num: int) -> str:
    """What a table leaves out, in words; "" for one that has all."""
    return f", {MAX_ROWS} of {num} in the table" if num > MAX_ROWS else ""


def sparkline(values: Sequence[float]) -> str:
    """The curve in one line of at most MAX_SPARKS blocks, each the mean of its part."""
    num = min(len(values), MAX_SPARKS)
    parts = [values[len(values) * at // num : len(values) * (at + 1) // num] for at in range(num)]
    means = [sum(part) / len(part) for part in parts]
    low, width = min(means), max(means) - min(means)
    return "".join(SPARKS[round((mean - low) / width * (len(SPARKS) - 1)) if width else 0] for mean in means)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    # A name may come from an environment: without what ends a cell or begins markup.
    lines = [[re.sub(r"[|\\`<>\[\]]", "?", each) for each in head], ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _fenced(language: str, text: str) -> str:
    """In a fence that is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _versions() -> list[str]:
    found = [f"prl {__version__}"]
    for package in ("torch", "transformers"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found
