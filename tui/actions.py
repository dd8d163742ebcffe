"""The jobs of the console: what `prl` does, as work for a thread with the shell command that does the same. No screens.

A job on runs pauses, continues, sets, forks, exports or sweeps them, as `prl runs` does; a job on the workspace starts
and stops its daemons, and acknowledges and mutes alerts, as `prl up`, `down`, `restart` and `alerts` do. The `check_`
functions are the dry runs: what would be done, in words, or a `FieldError` at what is wrong. A draft is checked by
`daemons.actions.validate_file` on a copy of its text, so that dialog, command line and trainer never disagree.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from daemons import actions, quiet, up_and_down
from daemons.actions import PAUSE, ActionError, parse_changes, set_run_keys
from daemons.adding import fork_run
from daemons.errors import expand_home, in_one_line
from daemons.exports import export_run
from daemons.sweeps import Sweep, parse_axis, sweep_runs
from daemons.workspace import Workspace
from prime_rl.configs import EXAMPLES
from prime_rl.configs.admitted import read_effect
from prime_rl.configs.base import ConfigError, ConfigProblem, build, load_toml, parse_set, without_nulls
from prime_rl.configs.explain import key_lines, line_of
from prime_rl.configs.orchestrator import RunLifetime
from prime_rl.contract.files import open_file, read_text
from prime_rl.contract.layout import LayoutError, OutputDir
from prime_rl.contract.notes import check_sweep_name
from prime_rl.contract.usage import used_in_life
from prime_rl.utils.runtime import parse_duration_s
from prime_rl.utils.text import CleanText, clean_text, one_line, size_text
from tui import fmt
from tui.messages import ActionChanged, ActionEntry, ActionState

Progress = Callable[[str], None]
Work = Callable[[Progress], str]
# Deletions wait for the trainer; done side by side they wait together.
NUM_AT_ONCE = 8
MAX_NAMED = 3
# Of a sweep that is not added yet: more does not help to see whether the grid is the one that was meant.
MAX_POINTS = 200


@dataclass(frozen=True)
class Job:
    """`work(progress)` runs in a thread and returns a message of what it did; `command` does the same in a shell."""

    command: CleanText
    work: Work


Perform = Callable[[Job], int]
# One of several jobs, by its label.
Choice = tuple[CleanText, Callable[[], Job]]


def prl_command(output_dir: Path, *words: str) -> CleanText:
    """The shell command of an action; it names the workspace unless `prl` would find it by itself."""
    default = os.environ.get("PRL_OUTPUT_DIR") or "outputs"
    # Without a look at the disk: this is for the thread that draws.
    is_default = os.path.abspath(output_dir) == os.path.abspath(default)
    where = [] if is_default else ["--output-dir", str(output_dir)]
    return one_line(shlex.join(("prl", *words, *where)), 4000)


def name_runs(run_ids: Sequence[str]) -> str:
    """`run_a`, or `7 runs`."""
    return run_ids[0] if len(run_ids) == 1 else f"{len(run_ids)} runs"


def each(run_ids: Sequence[str], done: str, act: Callable[[str, Progress], str], *, at_once: int = NUM_AT_ONCE) -> Work:
    """Apply `act` to every run, also after one failed; raises ActionError that names the failed ones.

    A single run returns its own message; several are counted: "3 runs `done`".
    """

    def work(progress: Progress) -> str:
        if len(run_ids) == 1:
            return act(run_ids[0], progress)
        failed: list[str] = []

        def one(run_id: str) -> None:
            try:
                act(run_id, lambda words: progress(words))
            except (RuntimeError, OSError) as error:  # an ActionError is a RuntimeError
                failed.append(f"{run_id}: {error}")

        with ThreadPoolExecutor(at_once) as pool:
            for number, _ in enumerate(pool.map(one, run_ids), start=1):
                progress(f"{number} of {len(run_ids)}")
        if failed:
            more = f"; and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
            raise ActionError(f"{len(failed)} of {len(run_ids)} failed: {'; '.join(failed[:MAX_NAMED])}{more}")
        return f"{len(run_ids)} runs {done}"

    return work


def runs_job(
    output_dir: Path, verb: str, run_ids: Sequence[str], done: str, act: Callable[[Path, str], str], *words: str
) -> Job:
    """`prl runs VERB IDS WORDS`, by `act` of the folder and each run; of several is said that they are `done`."""
    work = each(run_ids, done, lambda run_id, progress: act(output_dir, run_id))
    return Job(prl_command(output_dir, "runs", verb, *run_ids, *words), work)


MAX_DETAIL_CHARS = 8_000


def carry_out(serial: int, job: Job, post: Callable[[ActionChanged], object], clock: Callable[[], float]) -> None:
    """Do the job, in a thread, and post its progress; an error that actions raise is posted as "failed"."""

    def say(state: ActionState, text: str) -> None:
        detail = clean_text(text.strip(), MAX_DETAIL_CHARS)
        first = one_line(detail.partition("\n")[0], 400)
        post(ActionChanged(ActionEntry(serial, job.command, state, first, detail, clock())))

    say("running", "...")
    try:
        text = job.work(lambda progress: say("running", progress))
    # What actions raise: ActionError, LaunchError, ConfigError, and OSError.
    except (RuntimeError, OSError, ValueError) as error:
        say("failed", str(error))
    else:
        say("done", text)


class FieldError(ActionError):
    """An invalid form: which field, and why."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(in_one_line(why))
        self.field = field


@contextlib.contextmanager
def at_field(field: str, others: Mapping[str, str] = {}) -> Iterator[None]:
    """Errors belong to `field`, or to the first of `others` (field by a word) whose word is in the message."""
    try:
        yield
    except FieldError:
        raise
    except (ActionError, ConfigError, OSError, ValueError) as error:
        why = str(error)
        raise FieldError(next((other for word, other in others.items() if word in why), field), why) from error


def pause_job(output_dir: Path, run_ids: Sequence[str], reason: str = "") -> Job:
    """Pause runs; `reason` is kept in `paused.txt`."""
    words = ["--reason", reason] if reason else []
    return runs_job(output_dir, "pause", run_ids, "paused", functools.partial(PAUSE, reason=reason), *words)


def settings_of(text: str) -> list[str]:
    """The KEY=VALUE of a line, each up to the next space that stands in no text, list (of lists) or table."""
    return re.findall(r"""(?:"[^"]*"|'[^']*'|\[(?:[^][]|\[[^]]*\])*\]|\{[^}]*\}|\S)+""", text)


def set_job(output_dir: Path, run_ids: Sequence[str], items: Sequence[str]) -> Job:
    """Set keys of several runs. Raises ActionError for an item that is not KEY=VALUE."""
    changes = parse_changes(items)

    def act(run_id: str, progress: Progress) -> str:
        done = set_run_keys(output_dir, run_id, changes)
        return f"{run_id}: {'set ' + ' '.join(items) if done else 'has these values already'}"

    commands = [prl_command(output_dir, "runs", "set", run_id, *items) for run_id in run_ids]
    return Job(one_line("; ".join(commands), 4000), each(run_ids, f"set {' '.join(items)}", act))


def check_live(items: Sequence[str], field: str) -> None:
    """Check values of keys that are read while a run trains. Raises FieldError."""
    with at_field(field):
        try:
            build(RunLifetime, without_nulls(parse_changes(items)), "")
        except ConfigError as error:
            raise FieldError(field, error.problems[0].message) from error


def check_budget(output_dir: Path, run_ids: Sequence[str], tokens: str, hours: str) -> str:
    """The usage so far, and the runs that would end at once. Raises FieldError."""
    check_live([f"budget.max_tokens={tokens or 'null'}"], "tokens")
    check_live([f"budget.max_hours={hours or 'null'}"], "hours")
    max_tokens, max_hours = (float(tokens) if tokens else None), (float(hours) if hours else None)
    total_tokens, total_hours, ended = 0, 0.0, []
    for run_id in run_ids:
        run = OutputDir(output_dir).run(run_id)
        used = used_in_life(OutputDir(output_dir).run_usage(run_id), read_text(run.life) or "")
        total_tokens, total_hours = total_tokens + used[0], total_hours + used[1]
        if (max_tokens and used[0] >= max_tokens) or (max_hours and used[1] >= max_hours):
            ended.append(run_id)
    words = f"used so far: {fmt.count(total_tokens)} tokens, {total_hours:.2f} hours"
    return f"{words}\n▲ used up already, so it would end at once: {', '.join(ended)}" if ended else words


@dataclass(frozen=True)
class ForkForm:
    """The form to fork each of `run_ids`; "" is the default of each. A `new_id` is for one run alone."""

    run_ids: tuple[str, ...]
    version: str = ""
    new_id: str = ""
    settings: str = ""
    with_optimizer: bool = False
    kind: str = ""
    config: str = ""

    def words(self, run_id: str) -> list[str]:
        """For `prl runs fork`."""
        found = [run_id, *_option("--step", self.version), *_option("--id", self.new_id)]
        found += [*_option("--kind", self.kind), *_option("--config", self.config)]
        for item in settings_of(self.settings):
            found += ["--set", item]
        return [*found, "--with-optimizer"] if self.with_optimizer else found

    def check(self, output_dir: Path) -> str:
        """The forks that would be made, one a line. Raises FieldError."""
        return "\n".join(_fork(output_dir, self, run_id, dry_run=True) for run_id in self.run_ids)

    def job(self, output_dir: Path) -> Job:
        """Fork each run."""
        work = each(self.run_ids, "forked", lambda run_id, progress: _fork(output_dir, self, run_id))
        return _job(output_dir, "fork", self, work)


# A word of a refusal -> the field that it is about.
_FORK_FIELDS = {
    "with-optimizer": "optimizer",
    "invalid kind": "kind",
    "run id": "new-id",
    "already exists": "new-id",
    "of step": "version",
}


def _fork(output_dir: Path, form: ForkForm, run_id: str, *, dry_run: bool = False) -> str:
    step = _number(form.version, "version")
    over = expand_home(Path(form.config)) if form.config else None
    with at_field("settings"):
        overrides = parse_set(settings_of(form.settings))
    with at_field("config"):
        if over:
            load_toml(over)
    with at_field("settings", _FORK_FIELDS):
        made = fork_run(
            output_dir,
            run_id,
            step=step,
            new_id=form.new_id or None,
            kind=form.kind or None,
            over=over,
            overrides=overrides,
            with_optimizer=form.with_optimizer,
            dry_run=dry_run,
        )
    optimizer = " with its optimizer" if made.with_optimizer else ""
    if dry_run:
        left_out = f", without {', '.join(made.left_out)}" if made.left_out else ""
        return f"{made.run_id} would start from {made.source}{optimizer}{left_out}"
    done = "starts" if made.added else "is there already, starts"
    return f"{made.run_id} {done} from {made.source}{optimizer}"


@dataclass(frozen=True)
class ExportForm:
    """The form to export each of `run_ids`; the newest version without a `version`.

    `out` is the new folder of one run; of several, the folder with a new one for each.
    """

    run_ids: tuple[str, ...]
    out: str
    version: str = ""
    merge: bool = False

    def folder(self, run_id: str) -> str:
        """The new folder of one run: `out` itself for a single run, else a folder in it; a `~` is not expanded."""
        return self.out if len(self.run_ids) == 1 else str(Path(self.out, export_name(run_id)))

    def words(self, run_id: str) -> list[str]:
        """For `prl runs export`."""
        found = [run_id, *_option("--step", self.version), *(["--merge"] if self.merge else [])]
        return [*found, "--out", self.folder(run_id)]

    def check(self, output_dir: Path) -> str:
        """The folders that would be written, one a line. Raises FieldError."""
        return "\n".join(_export(output_dir, self, run_id, dry_run=True) for run_id in self.run_ids)

    def job(self, output_dir: Path) -> Job:
        """Export each run."""
        act = functools.partial(_export, output_dir, self)
        at_once = 1 if self.merge else NUM_AT_ONCE  # a merge holds the whole base model
        return _job(output_dir, "export", self, each(self.run_ids, "exported", act, at_once=at_once))


_EXPORT_FIELDS = {"of step": "version", "does not have": "version", "not on disk": "version"}


def export_name(run_id: str) -> str:
    """The usual name of the folder."""
    return run_id.removeprefix("run_")


def _export(
    output_dir: Path, form: ExportForm, run_id: str, progress: Progress = lambda words: None, dry_run: bool = False
) -> str:
    step = _number(form.version, "version")
    if not form.out:
        raise FieldError("out", "folder missing: type the path of a new one")
    with at_field("out", _EXPORT_FIELDS):
        done = export_run(
            output_dir,
            run_id,
            expand_home(Path(form.folder(run_id))),
            step=step,
            merge=form.merge,
            dry_run=dry_run,
            on_progress=progress,
        )
    what = f"version {done.step} of {done.run_id} ({done.kind})"
    return f"{what} would be written to {done.out}" if dry_run else f"{what}: {size_text(done.num_bytes)} in {done.out}"


def _job(output_dir: Path, verb: str, form: ForkForm | ExportForm, work: Work) -> Job:
    """`prl runs VERB` for each run of `form`."""
    commands = [prl_command(output_dir, "runs", verb, *form.words(run_id)) for run_id in form.run_ids]
    return Job(one_line("; ".join(commands), 4000), work)


@dataclass(frozen=True)
class SweepForm:
    """The form to sweep over a config file; `axes` has one `key=v1,v2` a line."""

    file: str
    axes: str
    name: str = ""
    halving: str = ""

    @property
    def items(self) -> list[str]:
        """The lines of `axes` that are not empty, without blanks around them."""
        return [line.strip() for line in self.axes.splitlines() if line.strip()]

    def words(self) -> list[str]:
        """For `prl runs sweep`."""
        found = [self.file]
        for item in self.items:
            found += ["--set", item]
        return [*found, *_option("--name", self.name), *_option("--halving", self.halving)]

    def check(self, output_dir: Path) -> str:
        """The grid as it would be added, of which at most MAX_POINTS runs are listed. Raises FieldError."""
        made = _sweep(output_dir, self, dry_run=True)
        plan = made.plan
        head = fmt.counted(len(plan.runs), "run")
        if plan.halving:
            head += f", of {plan.halving} one goes on at each rung, by {plan.metric} ({plan.mode})"
        if len(made.added) < len(plan.runs):
            head += f"; {len(plan.runs) - len(made.added)} there already"
        lines = [
            f"· {run.run_id}  {'  '.join(f'{key}={value}' for key, value in run.set.items())}"
            for run in plan.runs[:MAX_POINTS]
        ]
        return "\n".join([head, *lines])

    def job(self, output_dir: Path) -> Job:
        """Add the runs of the sweep."""

        def work(progress: Progress) -> str:
            made = _sweep(output_dir, self)
            return f"sweep {made.plan.name}: {fmt.counted(len(made.added), 'run')} added"

        return Job(prl_command(output_dir, "runs", "sweep", *self.words()), work)


_SWEEP_FIELDS = {"--name": "name", "sweep name": "name"}


def _sweep(output_dir: Path, form: SweepForm, *, dry_run: bool = False) -> Sweep:
    eta = _number(form.halving, "halving", at_least=2)
    if not form.file:
        raise FieldError("file", "config missing: type the path of a run's config")
    with at_field("file"):
        source = expand_home(Path(form.file))
    if not source.is_file():
        raise FieldError("file", f"{source} not found: type the path of a run's config")
    with at_field("name"):
        name = check_sweep_name(form.name) if form.name else None
    if not form.items:
        raise FieldError("axes", "values missing: type a key and its values, such as seed=1,2,3, one key a line")
    with at_field("axes"):
        for item in form.items:
            parse_axis(item)
    with at_field("axes", {str(source): "file"} | _SWEEP_FIELDS):
        return sweep_runs(output_dir, source, form.items, name=name, halving=eta, dry_run=dry_run)


def _number(text: str, field: str, at_least: int = 0) -> int | None:
    """A whole number, None for "". Raises FieldError."""
    if not text:
        return None
    if not text.isdecimal() or int(text) < at_least:
        raise FieldError(field, f"invalid {field} {text!r}: must be a whole number of at least {at_least}")
    return int(text)


def _option(name: str, value: str) -> list[str]:
    return [name, value] if value else []


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
    """The result of checking a draft; `command` adds it in a shell. `doubts`: what is valid and rarely meant."""

    problems: tuple[DraftProblem, ...]
    summary: CleanText
    command: CleanText
    doubts: tuple[DraftProblem, ...] = ()

    @property
    def ok(self) -> bool:
        """True when the draft has no problems, so that it can be added."""
        return not self.problems


def configs_folder() -> Path:
    """`configs` where the console was started, else the examples that come with this program."""
    here = Path("configs")
    return here if here.is_dir() else EXAMPLES


def find_templates(output_dir: Path, run_ids: Sequence[str]) -> list[Template]:
    """Run configs below `configs_folder()`, then those of existing runs whose `orch.toml` is in effect."""
    configs = configs_folder()
    # A name with an escape in it would be shown where it can be edited, so it is not offered.
    found = [
        Template(one_line(str(path.relative_to(configs)), 80), path)
        for path in sorted(configs.rglob("*.toml"))[: 10 * MAX_TEMPLATES]
        if clean_text(str(path)) == str(path) and looks_like_run(path)
    ]
    output = OutputDir(output_dir)
    for run_id in run_ids[:MAX_TEMPLATES]:
        with contextlib.suppress(LayoutError, ConfigError):
            if read_effect(run := output.run(run_id)).edit is None:
                found.append(Template(one_line(run_id), run.orch_toml))
    return found[:MAX_TEMPLATES]


def looks_like_run(path: Path) -> bool:
    """True when a TOML file is a run's: only those have environments."""
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
        path.write_text(text, encoding="utf-8")
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
    summary, lines = "", key_lines(text.splitlines())

    def at_lines(found: Sequence[ConfigProblem]) -> list[DraftProblem]:
        texts = (f"{each.key}: {each.message}" if each.key else each.message for each in found)
        places = (each.line or line_of(each.key, lines) for each in found)
        return list(map(DraftProblem, (one_line(text, 300) for text in texts), places))

    with draft_file(text, "draft") as path:
        problems += at_lines(actions.check_file(output_dir, path, beside=source))
        doubts = at_lines(actions.check_doubts(output_dir, path))
        if not problems:
            config = actions.validate_file(output_dir, path, beside=source)
            envs = ", ".join(env.name or env.id for env in config.env)
            summary = f"{envs} · {config.max_steps} steps of {config.batch_size} rollouts · lr {config.optim.lr:g}"
    command = add_command(output_dir, text, run_id, source)
    return Check(tuple(problems), one_line(summary, 300), command, tuple(doubts))


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
        return actions.add_run(output_dir, path, run_id=wanted, beside=source)


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


DURATIONS = ("1h", "8h", None)
MAX_SYSTEMS = 20


def restart_job(output_dir: Path, name: str) -> Job:
    """Restart one daemon."""

    def work(progress: Progress) -> str:
        up_and_down.restart_daemon(output_dir, name, say=progress)
        return f"{name}: restarted"

    return Job(prl_command(output_dir, "restart", name), work)


def down_job(output_dir: Path) -> Job:
    """Stop the workspace."""

    def work(progress: Progress) -> str:
        was_running = up_and_down.stop_workspace(output_dir, say=progress)
        return "stopped, no process is left" if was_running else "nothing was running"

    return Job(prl_command(output_dir, "down"), work)


def up_job(output_dir: Path, system: Path | None) -> Job:
    """Start the workspace with its last settings, or with those of the file."""
    words = ["@", str(system)] if system else []

    def work(progress: Progress) -> str:
        wanted = up_and_down.choose_system(words, output_dir, say=progress)
        said: list[str] = []

        def look(workspace: Workspace) -> None:
            line = " · ".join(up_and_down.waits(workspace))
            if [line] != said:
                said[:] = [line]
                progress(line)

        workspace = up_and_down.start_workspace(wanted, stop=lambda: False, say=progress, on_look=look, is_quiet=True)
        return f"up: {workspace.max_runs} slots, {workspace.address}" if workspace else "not up"

    return Job(prl_command(output_dir, "up", *words), work)


def up_choices(output_dir: Path) -> list[Choice]:
    """Each way to start the workspace, the most likely first."""
    last = up_and_down.last_start(output_dir)
    first = "with its last settings" if last else "a small workspace for this machine's CPU"
    configs = configs_folder()
    files = [path for path in sorted(configs.glob("*/system.toml"))[:MAX_SYSTEMS] if clean_text(str(path)) == str(path)]
    return [
        (one_line(first), functools.partial(up_job, output_dir, None)),
        *(
            (one_line(f"as in {path.relative_to(configs.parent)}", 100), functools.partial(up_job, output_dir, path))
            for path in files
        ),
    ]


def ack_job(output_dir: Path, names: Sequence[str]) -> Job:
    """Acknowledge incidents; each name is KIND:SUBJECT, or a subject for all of its open ones."""

    def act(name: str, progress: Progress) -> str:
        new = quiet.acknowledge(output_dir, name)
        return f"{name}: acknowledged" if new else f"{name}: already acknowledged"

    return Job(prl_command(output_dir, "alerts", "ack", *names), each(names, "acknowledged", act))


def mute_job(output_dir: Path, what: str, duration: str | None = None) -> Job:
    """`duration` as people write it; None: until it is unmuted."""
    words = ["--for", duration] if duration else []

    def work(progress: Progress) -> str:
        quiet.mute(output_dir, what, for_s=parse_duration_s(duration) if duration else None)
        return f"{what}: muted {f'for {duration}' if duration else 'until it is unmuted'}"

    return Job(prl_command(output_dir, "alerts", "mute", what, *words), work)


def unmute_job(output_dir: Path, what: str) -> Job:
    """End the mute of a kind, a subject or KIND:SUBJECT."""

    def work(progress: Progress) -> str:
        return f"{what}: {'unmuted' if quiet.unmute(output_dir, what) else 'not muted'}"

    return Job(prl_command(output_dir, "alerts", "unmute", what), work)


def mute_choices(output_dir: Path, subject: str, names: Sequence[str]) -> list[Choice]:
    """Each way to mute a subject and the kinds of its incidents `names`; first, to end such mutes."""
    kinds = dict.fromkeys(name.partition(":")[0] for name in names)
    silences = quiet.read_silences(OutputDir(output_dir), time.time())
    muted = [each.name for each in silences if each.action == "muted" and each.name in (subject, *kinds, *names)]
    found: list[Choice] = [
        (one_line(f"end the mute of {what}"), functools.partial(unmute_job, output_dir, what)) for what in muted
    ]
    for what in (subject, *kinds):
        for duration in DURATIONS:
            how_long = f"for {duration}" if duration else "until it is unmuted"
            label = one_line(f"{what}{' of all runs and daemons' if what in kinds else ''} {how_long}")
            found.append((label, functools.partial(mute_job, output_dir, what, duration)))
    return found
