"""Small files that one process leaves for another: work, resume requests, plans of sweeps, the audit log.

`work.json`: what a daemon works on, noted before it begins, so that what ended it has a name. One file a daemon, one
writer, rewritten only when the set changes; a process that ends by itself, or is killed, leaves it behind. The next
process begins with the runs that it names as suspects and works for each of them apart, until that run has proven
harmless. So a note with a suspect in it names the one run that was in work at the end.

`control/resumed.json`: an explicit `ckpt.resume_step` is asked for in `orch.toml`, carried out once by the trainer, and
remembered here. The orchestrator waits for that: what is on disk until then is void.

`control/admitted.toml`: the config that a run trains with, written by the trainer. `orch.toml` is a request: a change
of it is in effect when it was applied (`configs.admitted`). `control/added.txt`: when the run was added.

`sweeps/<name>.json`: the plan of a sweep, written once, when all of its runs are there. Never changed afterwards.

`logs/audit.jsonl`: what was done to which run, by a person or by a daemon, when and why. One line per action.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tomli

from prime_rl.contract.files import UNDECODABLE, FileRefused, append_line, read_file, read_json, read_text, write_atomic
from prime_rl.contract.layout import LayoutError, OutputDir, RunDir
from prime_rl.utils.process import ProcessId

MAX_NOTE_BYTES = 1_000_000


class Item(msgspec.Struct, frozen=True, order=True):
    """One thing in work, such as `served run_a@v3`. `run_id` is "" where it belongs to no run that is known."""

    run_id: str
    what: str


class Work(msgspec.Struct, kw_only=True):
    """The content of a note.

    `suspects`: at how many deaths in a row each was in work, without a proof since; `cleared`: the same of those that
    have proven harmless, for what ends a process later than its proof.
    """

    version: int = 1
    writer: ProcessId = ProcessId(0)
    items: list[Item] = []
    suspects: dict[str, int] = {}
    cleared: dict[str, int] = {}

    @property
    def suspected(self) -> list[Item]:
        """The work of suspects: of one run at most."""
        return [item for item in self.items if item.run_id in self.suspects]


def read_work(path: Path) -> Work | None:
    """The note in `path`; None when it is missing or damaged."""
    return read_json(path, Work, limit=MAX_NOTE_BYTES)


class WorkNote:
    """The one writer of one note, for one thread; it begins with what the process before left there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = ProcessId.of(os.getpid())
        left = read_work(path) or Work()
        in_work = left.suspected or left.items
        deaths = left.cleared | left.suspects
        self.suspects = {item.run_id: deaths.get(item.run_id, 0) + 1 for item in in_work}
        self.cleared: dict[str, int] = {}

    def write(self, items: Iterable[Item]) -> None:
        """Replace the note. Work goes on when that fails, without a note: an older one would name the wrong run."""
        work = Work(writer=self._writer, items=sorted(items), suspects=self.suspects, cleared=self.cleared)
        try:
            write_atomic(self._path, msgspec.json.encode(work), durable=False)
        except OSError:
            with contextlib.suppress(OSError):
                self._path.unlink()

    @contextlib.contextmanager
    def alone(self, item: Item) -> Iterator[None]:
        """Work on one item, and on nothing else: a process that gets through it has proven its run harmless."""
        self.write([item])
        try:
            yield
        finally:
            self.suspects.pop(item.run_id, None)
            self.write(())


RESUMED_VERSION = 1
# No config is larger (`prime_rl.configs.base`).
MAX_FILE_BYTES = 1_000_000


class ResumeRequest(msgspec.Struct, frozen=True):
    """The requested step and the text that asked for it: the same text is never carried out twice, a changed one is."""

    resume_step: int
    config_sha256: str
    version: int = RESUMED_VERSION


def pending_request(run: RunDir, resume_step: int) -> ResumeRequest | None:
    """The explicit request of the config, or None without one (-1) or when it was already carried out."""
    if resume_step < 0:
        return None
    request = ResumeRequest(resume_step, request_digest(run))
    return None if done_request(run) == request else request


def request_digest(run: RunDir) -> str:
    """The SHA-256 of the text that asked for the config in effect: applied, else admitted, else `orch.toml`'s."""
    if (admitted := read_admitted(run)) is None:
        return digest_of(read_file(run.orch_toml, limit=MAX_FILE_BYTES))
    try:
        return digest_of(read_file(run.applied, limit=MAX_FILE_BYTES))
    except (FileNotFoundError, FileRefused):
        return admitted.sha256


def digest_of(text: bytes) -> str:
    """The SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text).hexdigest()


def done_request(run: RunDir) -> ResumeRequest | None:
    """The last request that was carried out, or None. Raises OSError."""
    try:
        return msgspec.json.decode(read_file(run.resumed, limit=MAX_FILE_BYTES), type=ResumeRequest)
    except (FileNotFoundError, FileRefused, *UNDECODABLE):
        return None


# A config (256 KiB), twice as long with everything in it escaped, and 50 changes of 2,000 characters of six bytes each.
MAX_ADMITTED_BYTES = 1200 << 10


Step = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Change(msgspec.Struct, frozen=True):
    """A change of the admitted config: when (Unix seconds), after which step, and (key, value before, value after)."""

    at: float
    step: Step
    keys: list[tuple[str, str, str]] = []  # as short texts without secrets


class Admission(msgspec.Struct, frozen=True):
    """The content of `admitted.toml`.

    Attributes:
        run_id: the run that was admitted: a copy of the folder under another name is another run.
        at, step: when this config was admitted (Unix seconds), and from which step it is trained with.
        text: the config, in TOML.
        sha256: of the text that asked for it.
        history: earlier changes and the newest, oldest first.
    """

    run_id: str
    at: float
    step: Step
    sha256: str
    text: str
    history: list[Change] = []
    version: int = 1


def read_admitted(run: RunDir) -> Admission | None:
    """The config that the trainer admitted; None when it never did, or when the file is damaged."""
    try:
        text = read_file(run.admitted, limit=MAX_ADMITTED_BYTES).decode()
        return msgspec.convert(tomli.loads(text), Admission)  # of the library it takes half the time of Python's own
    except (OSError, ValueError, *UNDECODABLE):
        return None


def read_added_ns(run: RunDir) -> int | None:
    """When the run was added (Unix nanoseconds); None when that was not written, or for a run of another id."""
    with contextlib.suppress(OSError, ValueError):
        run_id, added_ns = (read_text(run.added, limit=200) or "").split()
        return int(added_ns) if run_id == run.run_id else None
    return None


def note_added(folder: RunDir, run_id: str, added_ns: int) -> None:
    """Write when the run was added (Unix nanoseconds); `folder` may still have another name. Raises OSError."""
    write_atomic(folder.added, f"{run_id} {added_ns}\n", durable=False)


SWEEP_VERSION = 1
MAX_PLAN_BYTES = 4 << 20
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,47}")


class SweepRun(msgspec.Struct, frozen=True):
    """One run of a sweep. `set`: its values of the swept keys, by dotted key."""

    run_id: str
    set: dict[str, Any] = {}


class SweepPlan(msgspec.Struct, frozen=True):
    """The definition of a sweep.

    Attributes:
        base: the file that the runs were made from.
        seed: breaks ties, so that the same numbers give the same winners.
        halving: of how many runs one goes on at each rung; None: all runs go on to their end.
        metric, mode: what is compared, and whether "max" or "min" of it is best.
        min_steps: no run is ended before this step.
    """

    name: str
    base: str
    runs: list[SweepRun]
    seed: int = 0
    halving: int | None = None
    metric: str = "reward/mean"
    mode: Literal["max", "min"] = "max"
    min_steps: int = 0
    version: int = SWEEP_VERSION


def check_sweep_name(name: str) -> str:
    """Return `name` when it can name a sweep, its file, its tag and its runs; else raise LayoutError."""
    if not _NAME.fullmatch(name):
        raise LayoutError(
            f"invalid sweep name {name!r}: must be 1 to 48 letters, digits, '.', '_' or '-', and not begin with '.'"
        )
    return name


def read_plan(output: OutputDir, name: str) -> SweepPlan | None:
    """The plan of a sweep; None when it is missing or damaged, or of another version."""
    try:
        data = read_file(output.sweep(check_sweep_name(name)), limit=MAX_PLAN_BYTES)
        plan = msgspec.json.decode(data, type=SweepPlan)
    except (FileNotFoundError, NotADirectoryError, FileRefused, LayoutError, *UNDECODABLE):
        return None
    return plan if plan.version == SWEEP_VERSION else None


def list_sweeps(output: OutputDir) -> list[str]:
    """The names of all sweeps that have a plan."""
    folder = output.sweep("x").parent
    names = [path.stem for path in folder.glob("*.json")] if folder.is_dir() else []
    return sorted(name for name in names if _NAME.fullmatch(name))


logger = logging.getLogger(__name__)


def audit(output: OutputDir, who: str, action: str, run_id: str | None, *, reason: str = "", detail: str = "") -> None:
    """Append one line after the action was done: `reason` is why, `detail` what exactly was done. Raises OSError."""
    line = {"time": time.time(), "who": who, "action": action, "run_id": run_id, "reason": reason, "detail": detail}
    append_line(output.audit, json.dumps(line))


def audit_run(run: RunDir, who: str, action: str, reason: str) -> None:
    """`audit` for a daemon, which goes on when the line cannot be written."""
    try:
        audit(OutputDir(run.path.parent), who, action, run.run_id, reason=reason)
    except OSError as error:
        logger.warning("%s: %s was done, but is not in the audit log: %s", run.run_id, action, error)
