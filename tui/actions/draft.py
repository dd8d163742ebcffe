"""The draft of a run: its templates, its check, and how to add it. No user interface here.

The check is `daemons.actions.validate_file` on a copy of the text in a temporary folder, so that dialog, command line
and trainer never disagree.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemons import actions
from prime_rl.configs import EXAMPLES
from prime_rl.configs.values import key_lines, line_of
from prime_rl.contract.files import open_file
from prime_rl.contract.layout import LayoutError, OutputDir
from prime_rl.utils.text import CleanText, clean_text, one_line
from tui.actions.jobs import prl_command

MAX_TEMPLATES = 200
# Of the 68 of an id; the rest is for the number.
MAX_STEM_CHARS = 60
MAX_DRAFT_BYTES = 256 * 1024


@dataclass(frozen=True)
class Template:
    """A file that a draft may begin with; `label` is its name in the list."""

    label: CleanText
    path: Path


@dataclass(frozen=True)
class DraftProblem:
    """One problem: a sentence, and its line in the text (from 1), if any."""

    text: CleanText
    line: int | None = None

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text


@dataclass(frozen=True)
class Check:
    """The result of checking a draft; `command` adds it in a shell."""

    problems: tuple[DraftProblem, ...]
    summary: CleanText
    command: CleanText

    @property
    def ok(self) -> bool:
        """Whether the draft has no problems, so that it can be added."""
        return not self.problems


def configs_folder() -> Path:
    """`configs` where the console was started, else the examples that come with this program."""
    here = Path("configs")
    return here if here.is_dir() else EXAMPLES


def find_templates(output_dir: Path, run_ids: Sequence[str], configs: Path = Path("configs")) -> list[Template]:
    """Run configs below `configs`, then the configs of existing runs."""
    # A name with an escape in it would be shown where it can be edited, so it is not offered.
    found = [
        Template(one_line(str(path.relative_to(configs)), 80), path)
        for path in sorted(configs.rglob("*.toml"))[: 10 * MAX_TEMPLATES]
        if clean_text(str(path)) == str(path) and looks_like_run(path)
    ]
    output = OutputDir(output_dir)
    for run_id in run_ids:
        with contextlib.suppress(LayoutError):
            found.append(Template(one_line(run_id), output.run(run_id).orch_toml))
    return found[:MAX_TEMPLATES]


def looks_like_run(path: Path) -> bool:
    """Whether a TOML file is a run's: only those have environments."""
    try:
        with os.fdopen(open_file(path, follow_links=True), "rb") as file:
            return b"[[env]]" in file.read(MAX_DRAFT_BYTES)
    except OSError:
        return False


def read_draft(path: Path) -> CleanText:
    """The text of a template. Raises ActionError when it cannot be read or is too large."""
    try:
        with os.fdopen(open_file(path, follow_links=True), "rb") as file:
            data = file.read(MAX_DRAFT_BYTES + 1)
    except FileNotFoundError as error:
        raise actions.ActionError(f"not found: {path}") from error
    except OSError as error:
        raise actions.ActionError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_DRAFT_BYTES:
        raise actions.ActionError(f"{path} is larger than {MAX_DRAFT_BYTES // 1024} KiB: not a run config")
    return clean_text(data.decode(errors="replace"))


@contextlib.contextmanager
def draft_file(text: str, stem: str) -> Iterator[Path]:
    """`text` as a file of that name in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="prl-draft-") as folder:
        path = Path(folder) / f"{stem}.toml"
        path.write_text(text)
        yield path


def check_draft(output_dir: Path, text: str, run_id: str, source: Path | None = None) -> Check:
    """All problems of the text and the id; without problems, a summary of what would be trained."""
    problems = []
    if run_id:
        try:
            if OutputDir(output_dir).run(run_id).orch_toml.exists():
                problems.append(DraftProblem(one_line(f"{run_id} already exists: choose another id")))
        except LayoutError as error:
            problems.append(DraftProblem(one_line(str(error), 300)))
    summary = ""
    with draft_file(text, "draft") as path:
        found = actions.check_file(output_dir, path)
        if not found:
            config = actions.validate_file(output_dir, path)
            envs = ", ".join(env.name or env.id for env in config.env)
            summary = f"{envs} · {config.max_steps} steps of {config.batch_size} samples · lr {config.optim.lr:g}"
    lines = key_lines(text.splitlines())
    problems += [
        DraftProblem(
            one_line(f"{each.key}: {each.message}" if each.key else each.message, 300),
            each.line or line_of(each.key, lines),
        )
        for each in found
    ]
    return Check(tuple(problems), one_line(summary, 300), add_command(output_dir, text, run_id, source))


def free_id(run_id: str, taken: Collection[str]) -> str:
    """`run_a-2` for a copy of `run_a`, or the next number that is free."""
    stem = re.sub(r"-\d+$", "", run_id)[:MAX_STEM_CHARS]
    return next(name for number in itertools.count(2) if (name := f"{stem}-{number}") not in taken)


def add_draft(output_dir: Path, text: str, run_id: str, source: Path | None) -> str:
    """Add the run and return its id. An unchanged template is added as the file that it is."""
    wanted = run_id or None
    if source is not None and _is_unchanged(source, text):
        return actions.add_run(output_dir, source, run_id=wanted)
    with draft_file(text, source.stem if source and source.name != "orch.toml" else "run") as path:
        return actions.add_run(output_dir, path, run_id=wanted)


def add_command(output_dir: Path, text: str, run_id: str, source: Path | None) -> CleanText:
    """The shell command. If the text was edited here, the command shows that it is not in a file yet."""
    unchanged = source is not None and _is_unchanged(source, text)
    name = str(source) if unchanged else "EDITED.toml"
    return prl_command(output_dir, "runs", "add", name, *(["--id", run_id] if run_id else []))


def _is_unchanged(source: Path, text: str) -> bool:
    try:
        return read_draft(source) == text
    except actions.ActionError:
        return False
