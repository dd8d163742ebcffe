"""Look at the disk: which runs are there, which may have a slot, and why the others may not.

`Discovery.scan` finds the runs that must leave, `Discovery.judge` those that may come; between the two the manager
drops those that leave. When the new runs have their slots, `Discovery.report` reports invalid configs. Nothing is
decided about slots: the manager does that. `find_leave` is the one rule of why a run may not hold a slot, for those in
slots and those that wait.

A run that is dear to look at (a large config, a hundred thousand versions, a change each millisecond) is left alone for
as long as keeps its share of the trainer's time small (`Allowance`).

A config is read once for every content, when it has stopped changing (`ConfigFile`). An editor may empty a file and
write it again, write it twice, or touch it. So a file that was written in place is left alone for a moment after each
change, and an invalid one is a problem only when it stays unchanged for `settle_s`. A file that was renamed into place
is whole at once. Written are `config_validation_error.txt`, which goes when the config is valid again, and
`evicted.txt`, and `added.txt` of a run that was not added by a command, so that its place in the queue stays.

What was found of a run stands until something of it changes, or it leaves its slot. With hints only the runs that they
name are looked at. Without any, the prints of each run (inodes and times of a few paths) are compared, which takes a
tenth of what judging it would. What changed within the clock of a file system may leave the same times behind, so young
prints are not trusted, nor old ones forever.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from prime_rl.configs.admitted import config_in_effect
from prime_rl.configs.base import MAX_TOML_BYTES, ConfigError
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import PARSE_ERROR_PREFIX, explain
from prime_rl.contract.files import FileRefused, read_file, read_text, remove_file, write_atomic
from prime_rl.contract.layout import (
    RUN_FOLDERS,
    RUN_PREFIX,
    LayoutError,
    OutputDir,
    RunDir,
    TooManySteps,
    check_run_id,
    list_steps,
    refusal,
)
from prime_rl.contract.notes import audit_run, note_added, pending_request, read_added_ns
from prime_rl.contract.status import DaemonStatus, RunStatus, read_mark, read_status
from prime_rl.utils.text import error_text, printable

logger = logging.getLogger(__name__)

MAX_ERROR_CHARS = 20_000
# A reason may quote what a run wrote; people read one line.
MAX_REASON_CHARS = 2_000
# The beginning of a file can be a valid config with other defaults. Between two writes of one save less time passes.
QUIET_S = 0.05
# So much of the trainer's time a run may take at once, and this share of it for long, however often it changes.
DEAR_S, DEAR_SHARE = 0.1, 0.02
# Whatever one look took, the owner of the run gets another one within about a minute.
MAX_REST_S = 60.0

# Null when the config is good, else what is wrong with it.
Validate = Callable[[OrchestratorConfig], str | None]
# Some file systems count whole seconds.
YOUNG_NS = 2 * 10**9
# Of this many looks at everything, one takes a closer look at a run whose prints are the same.
CLOSE_LOOKS = 12
# So long, or so many of them, may reports hold up the other work of one look.
REPORT_S, MIN_REPORTS = 0.1, 16
# Verdict on a run in a slot that keeps it. All others are names of fields of `Findings`.
_STAYS = "stays"


class Print(NamedTuple):
    """Of one path; another one after every write, rename and chmod."""

    inode: int
    mtime_ns: int
    ctime_ns: int
    size: int


def print_of(path: str | Path) -> Print | None:
    """The print of a path; a link is not followed. None when it cannot be looked at."""
    try:
        stat = os.lstat(path)
    except OSError:
        return None
    return Print(stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)


class Allowance:
    """The part of one core that the looks at one run may take: `DEAR_S` seconds at once, `DEAR_SHARE` for long."""

    def __init__(self) -> None:
        self._paid_at = 0.0

    def charge(self, took_s: float, now: float) -> None:
        """`took_s` seconds of a core were spent until `now` (monotonic seconds); a rest costs nothing."""
        if now >= self.rests_until:
            self._paid_at = min(max(self._paid_at, now) + took_s / DEAR_SHARE, now + MAX_REST_S)

    @property
    def rests_until(self) -> float:
        """When the run may be looked at again (monotonic seconds)."""
        return self._paid_at - DEAR_S / DEAR_SHARE


class ConfigFile:
    """The config of a run, by its `orch.toml` and what was admitted. After a `read`, `config` or `problem` is set.

    Attributes:
        print: the file at the last look.
        is_reported: whether `report` wrote down the problem that the last `read` found.
        was_finished: whether it was taken unchecked, as that of a run that has all its versions.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.config: OrchestratorConfig | None = None
        self.problem: str | None = None
        self.print: Print | None = None
        self.is_reported = self.was_finished = False
        self._since = 0.0
        self._is_judged = False
        self._digest: bytes | None = None
        # Those of what was applied and admitted.
        self._others: tuple[Print | None, Print | None] = (None, None)

    def read(self, validate: Validate, settle_s: float, now: float, *, at_once: bool = False) -> float | None:
        """Look at it: null, or when to look again because it may still change. OSError when it cannot be read.

        Args:
            settle_s: how long a bad file must stay as it is; 0 judges every file at once.
            now: monotonic seconds.
            at_once: its text matters little, so one that was just written is read too.
        """
        path = self.run.orch_toml
        found = print_of(path)
        if found is None:  # deleted meanwhile
            return now
        if (others := (print_of(self.run.applied), print_of(self.run.admitted))) != self._others:
            self._others = others
            self.forget_verdict()
        if found != self.print:
            self.print, self._since, self._is_judged = found, now, False
        if not self._is_judged:
            was_renamed, quiet_until = found.ctime_ns > found.mtime_ns, self._since + min(QUIET_S, settle_s)
            if not was_renamed and not at_once and now < quiet_until:
                return quiet_until
            self._take_in(path)
            if self.config is None and self.problem is None:
                self.config, self.problem, self.was_finished = _parse(self.run, validate)
            self._is_judged = True
        if self.problem is not None and now < self._since + settle_s:
            return self._since + settle_s
        self.is_reported = False
        if self.problem is None:
            remove_file(self.run.config_error)
        return None

    def has_changed(self) -> bool:
        """True when the content is another one than at the last look; for a run that is not to be judged."""
        with contextlib.suppress(OSError):
            path = self.run.orch_toml
            found = print_of(path)
            if found is not None and found != self.print:
                has_changed, self._is_judged = self._take_in(path), False
                self.print = None if has_changed else found  # of a change `read` sees when it began
                return has_changed
        return False

    def forget_verdict(self) -> None:
        """It is validated again, whatever its content."""
        self.config, self.problem, self._is_judged = None, None, False

    def report(self) -> None:
        """Write the problem down where people look for it, not through a link that the run has become meanwhile."""
        try:
            known = read_text(self.run.config_error)
        except FileRefused:
            known = None
        if refusal(self.run.path.parent, self.run.path) is None and known != f"{self.problem}\n":
            logger.warning("%s: %s", self.run.run_id, self.problem)
            write_atomic(self.run.config_error, f"{self.problem}\n")
        self.is_reported = True

    def _take_in(self, path: Path) -> bool:
        """True when the content is another one than before; then what was found of that one is forgotten."""
        try:
            digest = hashlib.blake2b(read_file(path, limit=MAX_TOML_BYTES), digest_size=16).digest()
        except (PermissionError, FileRefused):
            digest = b""  # the error is reported when it is read as a config
        is_new, self._digest = digest != self._digest, digest
        if is_new:
            self.forget_verdict()
        return is_new


def _parse(run: RunDir, validate: Validate) -> tuple[OrchestratorConfig | None, str | None, bool]:
    """The config, or what is wrong with it; and whether it was not validated, as the run is finished."""
    path, is_done = run.orch_toml, False
    try:
        config = config_in_effect(run)
        # What a finished run trained with was admitted, by a workspace that may have had other limits.
        is_done = os.path.lexists(run.admitted) and is_finished(run, config)
        problem = None if is_done else validate(config)
        text = f"{PARSE_ERROR_PREFIX}: {path}: {problem}" if problem else None
    except ConfigError as error:
        text = explain(error)
    except Exception as error:  # what a hostile file makes a parser do (nesting without end) is its own fault
        text = f"{PARSE_ERROR_PREFIX}: {path}: {error_text(error)}"
    return (config, None, is_done) if text is None else (None, printable(text)[:MAX_ERROR_CHARS], False)


def is_finished(run: RunDir, config: OrchestratorConfig) -> bool:
    """True when the newest published version is the last one that the run asked for, and it does not ask to go back."""
    published = list_steps(run.broadcast, stable_only=True)
    return (
        bool(published) and published[-1] >= config.max_steps and pending_request(run, config.ckpt.resume_step) is None
    )


class Evictions:
    """Reasons of evictions that are not on disk yet, by run.

    One that cannot be written (the disk is full) still counts, and is written again at every look. A run whose folder
    was deleted meanwhile is not made again.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self.unwritten: dict[str, str] = {}

    def add(self, run_id: str, reason: str) -> None:
        """Evict the run for `reason`, which becomes one line of at most MAX_REASON_CHARS, and try to write it."""
        self.unwritten[run_id] = printable(" ".join(reason.split()))[:MAX_REASON_CHARS]
        logger.warning("evicting %s: %s", run_id, self.unwritten[run_id])
        self.write()

    def write(self) -> None:
        """Try to write each reason that is not on disk; what fails is logged and stays for the next call."""
        for run_id, reason in list(self.unwritten.items()):
            run = RunDir(self._output_dir / run_id)
            try:
                if run.path.is_dir():
                    write_atomic(run.evicted, reason)
                    audit_run(run, "trainer", "evict", reason)
                del self.unwritten[run_id]
            except OSError as error:
                logger.error("%s: cannot write the reason of its eviction: %s", run_id, error)


@dataclass(frozen=True)
class Candidate:
    """A run that may have a slot. `landed_ns` is when it was added, `inode` that of its folder."""

    run: RunDir
    config: OrchestratorConfig
    landed_ns: int
    inode: int

    @property
    def claim(self) -> Claim:
        """The facts on which its place in the order of admission depends."""
        return Claim(self.run.run_id, self.config.priority, self.landed_ns, self.config.preempt)


@dataclass
class Findings:
    """The results of one look.

    Attributes:
        gone: active runs that must leave their slot.
        candidates: runs that may have a slot, in admission order; active ones are not among them.
        refused: `run_*` entries that may not be used, with the reason.
        changed: the configs of active runs that changed, by run id.
        invalid, evicted, paused, failed, finished, unconfigured, settling: run ids that have no slot for that reason;
            the last are those whose config has not come to rest.
        due: when to look again at those that settle (seconds of the clock).
        folders: what to watch.
    """

    gone: dict[str, Leave] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    invalid: list[str] = field(default_factory=list)
    changed: dict[str, OrchestratorConfig] = field(default_factory=dict)
    evicted: list[str] = field(default_factory=list)
    paused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    unconfigured: list[str] = field(default_factory=list)
    settling: list[str] = field(default_factory=list)
    due: float = math.inf
    folders: list[Path] = field(default_factory=list)


class _Entry:
    """One `run_*` entry: what was found of it, and how that is found.

    Attributes:
        listed: the folder's number in the list of all; another one means another run.
        inode: that of the folder itself; on some file systems, and where something is mounted, it differs.
        deciding: paths that decide about it; `prints` are those of the last look at everything.
        folder: what to watch, where the next change is expected; null when the entry is refused as a run.
        refusal: why it may not be used.
        landed_ns: when it was added, once that was looked up.
        verdict: see `_STAYS`; null while it must be judged.
        due: when to judge a config again that may still change.
        allowance: what the looks at it may take.
    """

    def __init__(self, output: OutputDir, run_id: str, listed: int) -> None:
        self.run = RunDir(output.path / run_id)
        self.listed = self.inode = listed
        with contextlib.suppress(OSError):
            self.inode = self.run.path.lstat().st_ino
        self.config = ConfigFile(self.run)
        inside = ("", "/control", "/control/orch.toml", "/configs/orch.toml", "/broadcast")
        self.deciding = [*(f"{self.run.path}{path}" for path in inside), str(output.daemon_status(run_id))]
        self.prints: list[Print | None] = []
        self.folder: Path | None = None
        self.refusal: str | None = None
        self.landed_ns: int | None = None
        self.verdict: str | None = None
        self.due = math.inf
        self.allowance = Allowance()

    def look(self) -> None:
        """Find out anew whether it can be a run, and what to watch: what was found may be outdated."""
        run, self.verdict, self.folder = self.run, None, None
        try:
            check_run_id(run.run_id)
            self.refusal = refusal(run.path.parent, run.path)
        except LayoutError as error:
            self.refusal = str(error)
        except OSError as error:
            self.refusal = f"{run.path} cannot be looked at: {error.strerror}"
        if self.refusal is None:
            # `control/`, or the folder in which it will be made; the older place of configs is one such folder.
            places = (run.control, run.orch_toml.parent)
            self.folder = next((folder for folder in places if os.path.isdir(folder)), run.path)

    def must_leave(self, inode: int) -> Leave | None:
        """The reason why the run that was admitted from the folder `inode` must leave its slot, or None."""
        if self.folder is None:
            return Leave(self.refusal or "", "refused")
        if inode != self.inode:
            return Leave("its folder was replaced by another", "refused")
        if leave := find_leave(self.run):
            return leave
        if self.config.has_changed():
            self.due = -math.inf
        return None

    def read_again(self, validate: Validate, settle_s: float, now: float) -> OrchestratorConfig | None:
        """The changed config of a run that keeps its slot, when it rests and is valid. OSError as in `judge`."""
        if now < (rests_until := self.allowance.rests_until):
            self.due = rests_until
            return None
        is_there = os.path.lexists(self.run.orch_toml)
        due = self.config.read(validate, settle_s, now) if is_there else None
        self.due = math.inf if due is None else due
        if is_there and due is None and self.config.config is None:
            text = "%s: its changed orch.toml is invalid, it keeps its admitted config: %s"
            logger.warning(text, self.run.run_id, self.config.problem)
        return self.config.config if is_there and due is None else None

    def judge(self, validate: Validate, settle_s: float, now: float) -> str:
        """The verdict on a run without a slot. OSError when it was deleted meanwhile or cannot be read."""
        run, config, self.due = self.run, self.config, math.inf
        if self.folder is None:
            return "refused"
        if leave := find_leave(run):
            config.forget_verdict()  # it is read again when the run comes back
            return leave.outcome
        # Pruning and publishing would write outside the run.
        links = (folder for name in RUN_FOLDERS if os.path.islink(folder := run.path / name))
        if (link := next(links, None)) is not None:
            self.refusal = f"{link} is a symbolic link: the folders of a run must be real ones"
            return "refused"
        if not os.path.lexists(run.orch_toml):
            return "unconfigured"
        if now < (rests_until := self.allowance.rests_until):
            self.due = rests_until
            return "settling"
        is_known = os.path.lexists(run.admitted)  # its place in the queue must not depend on an edit
        if (due := config.read(validate, settle_s, now, at_once=is_known)) is not None:
            self.due = due
            return "settling"
        if config.config is None:
            return "invalid"
        if is_finished(run, config.config):
            return "finished"
        if config.was_finished:  # it lost versions since
            config.forget_verdict()
            self.due = now
            return "settling"
        if self.landed_ns is None:
            self.landed_ns = read_added_ns(run)
        if self.landed_ns is None:  # the time of its config file is written down as that
            assert config.print is not None
            self.landed_ns = config.print.mtime_ns
            with contextlib.suppress(OSError):  # then this trainer knows it
                note_added(run, run.run_id, self.landed_ns)
        return "candidates"

    def tell(self, found: Findings, run_id: str) -> None:
        """Enter the verdict: of a thousand runs at each look, so it asks the disk for nothing, and raises nothing."""
        config = self.config
        if self.verdict == "candidates":
            assert config.config is not None and self.landed_ns is not None
            found.candidates.append(Candidate(self.run, config.config, self.landed_ns, self.inode))
        elif self.verdict == "refused":
            found.refused[run_id] = self.refusal or ""
        elif self.verdict and self.verdict != _STAYS:
            getattr(found, self.verdict).append(run_id)
        found.due = min(found.due, self.due)


class Discovery:
    """Looks at one output directory, and remembers what it found.

    Args:
        settle_s: how long a bad config must stay as it is before that is reported.
        clock: monotonic seconds.
        wall_ns: the time of the file system.
        spent: seconds of a core that the looks have taken.
    """

    def __init__(
        self,
        output_dir: Path,
        validate: Validate,
        settle_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._output = OutputDir(output_dir)
        self._validate = validate
        self._settle_s = settle_s
        self._clock = clock
        self._wall_ns = wall_ns
        self.spent = spent
        self._num_looks = 0
        self._entries: dict[str, _Entry] = {}

    def scan(self, active: Mapping[str, int], changed: Collection[Path] | None = None) -> Findings:
        """Find the runs, and those that must leave.

        `active` maps the id of each run in a slot to the inode its folder had when it was admitted. `changed` are the
        watched folders with a hint; None looks at everything.
        """
        for run_id in self.suspects(changed):
            with self._boundary(run_id):
                self._entries[run_id].look()
        found = Findings(folders=[self._output.path])
        for run_id, entry in self._entries.items():
            if entry.folder is not None:
                found.folders.append(entry.folder)
            if run_id in active and entry.verdict != _STAYS:
                leave = None
                with self._boundary(run_id):
                    leave = entry.must_leave(active[run_id])
                if leave:
                    found.gone[run_id] = leave
                entry.verdict = None if leave else _STAYS
        found.gone |= dict.fromkeys(active.keys() - self._entries.keys(), Leave("its folder is gone", "refused"))
        return found

    def judge(self, found: Findings) -> None:
        """Find for each run without a slot whether it may have one, or why not."""
        for run_id, entry in self._entries.items():
            now = self._clock()
            if entry.verdict is None or entry.due <= now:
                began_s = self.spent()  # a call of the system: not for each of a thousand that have nothing new
                with self._boundary(run_id):
                    if entry.verdict != _STAYS:
                        entry.verdict = entry.judge(self._validate, self._settle_s, now)
                    elif (config := entry.read_again(self._validate, self._settle_s, now)) is not None:
                        found.changed[run_id] = config
                entry.allowance.charge(self.spent() - began_s, now)
            entry.tell(found, run_id)
        found.candidates.sort(key=lambda candidate: candidate.claim.order)

    @contextlib.contextmanager
    def _boundary(self, run_id: str) -> Iterator[None]:
        """A look at one run. Whatever the run brings about in it, the others do not meet it; in its slot it stays."""
        entry = self._entries[run_id]
        try:
            yield
        except OSError as error:  # deleted meanwhile, or it cannot be read: looked at again next time
            logger.debug("looking at %s failed: %s", run_id, error)
            entry.refusal = str(error) if (stays := isinstance(error, TooManySteps)) else entry.refusal
            entry.verdict = entry.verdict if entry.verdict == _STAYS else "refused" if stays else None
        except Exception as error:
            logger.exception("looking at %s failed", run_id)
            entry.refusal = f"{entry.run.path} cannot be looked at: {error_text(error)}"
            entry.verdict = entry.verdict if entry.verdict == _STAYS else "refused"

    def report(self, found: Findings) -> None:
        """Report some invalid configs to their owners; the others at the next look, which is due at once.

        Each is a file that the disk must take: thousands must keep neither the next run waiting nor those that train.
        """
        end_s = self._clock() + REPORT_S
        unreported = [run_id for run_id in found.invalid if not self._entries[run_id].config.is_reported]
        for number, run_id in enumerate(unreported):
            if number >= MIN_REPORTS and self._clock() >= end_s:
                found.due = self._clock()
                break
            try:
                self._entries[run_id].config.report()
            except OSError as error:
                logger.debug("cannot write the config error of %s: %s", run_id, error)
                self.suspect(run_id)

    def charge(self, run_id: str, began_s: float) -> None:
        """A run was not admitted, or not started: what that has taken since `began_s` (`spent`) is its own to pay."""
        if (entry := self._entries.get(run_id)) is not None:
            entry.allowance.charge(self.spent() - began_s, self._clock())

    def suspect(self, run_id: str, *, with_config: bool = False) -> None:
        """Look at the run again, `with_config` at its config too: what was found about it may be outdated."""
        if (entry := self._entries.get(run_id)) is not None:
            entry.verdict = None
            if with_config:
                entry.config.forget_verdict()

    def forget_verdicts(self) -> None:
        """All configs are to be validated again."""
        for entry in self._entries.values():
            entry.config.forget_verdict()
            entry.verdict = None

    def suspects(self, changed: Collection[Path] | None = None) -> set[str]:
        """Bring the entries up to date; the ids of those that may be other than before."""
        came = self._list() if changed is None or self._output.path in changed else set()
        if changed is None:
            return came | self._compare()
        named = {(folder if folder.parent == self._output.path else folder.parent).name for folder in changed}
        return came | named & self._entries.keys()

    def _list(self) -> set[str]:
        """The ids of entries that came, or are others now. Those that went are forgotten."""
        listed: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._output.path) as entries:
            listed = {entry.name: entry.inode() for entry in entries if entry.name.startswith(RUN_PREFIX)}
        known = {run_id: entry for run_id, entry in self._entries.items() if entry.listed == listed.get(run_id)}
        came = listed.keys() - known.keys()
        self._entries = known | {run_id: _Entry(self._output, run_id, listed[run_id]) for run_id in sorted(came)}
        return came

    def _compare(self) -> set[str]:
        """Entries whose prints changed, are too young to be trusted, or have their turn."""
        self._num_looks += 1
        old_ns = self._wall_ns() - YOUNG_NS
        suspects = set()
        for index, (run_id, entry) in enumerate(self._entries.items()):
            prints = [print_of(path) for path in entry.deciding]
            is_young = any(each is not None and max(each.mtime_ns, each.ctime_ns) > old_ns for each in prints)
            if is_young or prints != entry.prints or (index + self._num_looks) % CLOSE_LOOKS == 0:
                suspects.add(run_id)
            entry.prints = prints
        return suspects


@dataclass(frozen=True)
class Claim:
    """A run that has a slot or may have one. `landed_ns` is when it was added (Unix nanoseconds)."""

    run_id: str
    priority: int
    landed_ns: int
    preempts: bool = False

    @property
    def order(self) -> tuple[int, int, str]:
        """Runs are admitted from the smallest."""
        return -self.priority, self.landed_ns, self.run_id


def preempted(waiting: Sequence[Claim], held: Sequence[Claim], num_free: int) -> dict[str, str]:
    """The ids of the runs that give up their slots, each with that of the run that takes it.

    Args:
        waiting: in the order of admission.
        held: the runs that would keep their slots.
        num_free: slots that are free, or will be; the first of `waiting` get these.
    """
    found: dict[str, str] = {}
    keep = sorted(held, key=lambda claim: claim.order)
    for claim in waiting[num_free:]:
        if claim.preempts and keep and keep[-1].priority < claim.priority:
            found[keep.pop().run_id] = claim.run_id
    return found


@dataclass(frozen=True)
class Leave:
    """The reason why a run leaves its slot, or gets none.

    Attributes:
        outcome: the list of `Findings` that has the run while it has no slot for this reason.
        saves: the run leaves after a checkpoint of its last update.
    """

    reason: str
    outcome: str
    saves: bool = False


def leave_reason(*, evicted: bool, ended: str | None, paused: str | None, given_up: str | None) -> Leave | None:
    """The meaning of the marks in a run's folder; None: it may have a slot. What a person did comes first.

    Args:
        ended, paused: the texts of `finished.txt` and `paused.txt`.
        given_up: why the run gets no more batches.
    """
    if evicted:
        return Leave("it was evicted", "evicted")
    if ended is not None:
        return Leave(f"it is finished: {ended}", "finished", saves=True)
    if paused is not None:
        return Leave(f"it is paused: {paused}", "paused", saves=True)
    if given_up is not None:
        return Leave(given_up, "failed")
    return None


def find_leave(run: RunDir) -> Leave | None:
    """`leave_reason` of what is on disk."""
    return leave_reason(
        evicted=read_mark(run.evicted) is not None,
        ended=read_mark(run.finished),
        paused=read_mark(run.paused),
        given_up=given_up(run),
    )


def given_up(run: RunDir) -> str | None:
    """The reason why the run gets no more batches: the final state of its orchestrator or daemon; else None.

    A run without batches would hold its slot forever while others wait.
    """
    status = read_status(run.status, RunStatus)
    if status is not None and status.state == "failed":
        return f"its orchestrator failed: {status.reason}"
    daemon = read_status(OutputDir(run.path.parent).daemon_status(run.run_id), DaemonStatus)
    if daemon is not None and daemon.state == "failed":
        return f"its orchestrator is not started again: {daemon.reason}"
    return None
