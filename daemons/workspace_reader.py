"""The state of a workspace: one snapshot, read from disk only.

`WorkspaceReader.read()` returns a `Workspace` of frozen views, for `prl`, the TUI and the supervisor. It only reads, so
it also works with the daemons down and on a copied output directory. A file that is missing, half written, damaged or
huge costs its own facts and nothing else. A run's state comes from `contract.status.run_state`. It changes nothing
(`actions` does). All text in a snapshot is clean.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from daemons.pidfile import read_info
from daemons.workspace import (
    SUPERVISOR,
    DaemonView,
    RefusedView,
    RunView,
    Workspace,
    by_importance,
    daemon_view,
    failure,
    find_bottleneck,
    shown,
    together,
    waits_for,
    waits_for_trainer,
)
from prime_rl.contract.files import FileRefused, file_problem, find_trouble, read_text
from prime_rl.contract.layout import OutputDir, RefusedRun, RunDir, list_steps, scan_runs, stable_marker
from prime_rl.contract.metrics import RULES
from prime_rl.contract.notes import pending_request, read_added_ns
from prime_rl.contract.status import (
    LOST_AFTER_S,
    STALLED,
    DaemonStatus,
    InferenceStatus,
    RunFacts,
    RunState,
    RunStatus,
    Status,
    TrainerRunStatus,
    TrainerStatus,
    clock_ahead_s,
    is_alive,
    is_there,
    read_status,
    run_state,
    stall_text,
    stalled_since,
)
from prime_rl.contract.types import Kind
from prime_rl.utils.text import CleanText, clean_strings, error_text, one_line

if TYPE_CHECKING:
    from prime_rl.configs.admitted import Edit

logger = logging.getLogger(__name__)

# Ten times the largest that a daemon writes with 1,024 runs; what is larger was not written by a daemon.
MAX_FILE_BYTES = 4_000_000
MAX_REASON_BYTES = 10_000
MAX_SENTENCE_CHARS = 2_000
# A folder that changed later than this may change again without another time on it.
SETTLED_NS = 2 * 10**9
# Looked at below the folder of a run, by text: joining paths would cost more than the system calls.
_TOMLS = ("/control/orch.toml", "/configs/orch.toml")
_NOTES = ("/control/status.json", "/control/evicted.txt", "/control/config_validation_error.txt")
_MARKS = ("/control/paused.txt", "/control/finished.txt", "/control/preempted.txt")
_ADMITTED = ("/control/admitted.toml", "/control/apply.toml", "/control/added.txt")
_NAMES = (*_TOMLS, *_NOTES, "/broadcast", *_MARKS, *_ADMITTED)

_sentence = functools.partial(one_line, limit=MAX_SENTENCE_CHARS)

StatusT = TypeVar("StatusT", bound=Status)


class Stamp(NamedTuple):
    """A value that differs when a file has changed; all zero when it does not exist."""

    mtime_ns: int = 0
    size: int = 0
    inode: int = 0
    is_file: bool = False

    @property
    def readable(self) -> bool:
        """True when the file is a regular one of at most MAX_FILE_BYTES."""
        return self.is_file and self.size <= MAX_FILE_BYTES


NO_FILE = Stamp()


def stamp_of(path: Path | str) -> Stamp:
    """The stamp of a file; a link is not followed. NO_FILE when it does not exist or cannot be looked at."""
    try:
        info = os.lstat(path)
    except (OSError, ValueError):
        return NO_FILE
    return Stamp(info.st_mtime_ns, info.st_size, info.st_ino, stat.S_ISREG(info.st_mode))


class StatusFiles:
    """Status files by path, each parsed again only when its stamp has changed. Their texts are clean, on one line."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Stamp, Status | None]] = {}

    def read(self, path: Path, kind: type[StatusT]) -> StatusT | None:
        """The status in a file; None when it is missing, damaged, too large or of another kind."""
        stamp = stamp_of(path)
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            known = self._known[path] = (stamp, clean_strings(read_status(path, kind), _sentence))
        return known[1] if isinstance(known[1], kind) else None

    def clocks(self, now: float) -> tuple[CleanText, ...]:
        """In words which machines that have just written one of them have another time than the file system."""
        ahead_s: dict[str, float] = {}
        for stamp, status in self._known.values():
            found = clock_ahead_s(status, stamp.mtime_ns / 1e9, now) if status is not None else None
            if status is not None and found is not None:
                ahead_s[status.host] = found
        return tuple(
            one_line(
                f"the clock of {host} is {abs(by_s):.0f} s {'ahead of' if by_s > 0 else 'behind'} that of the files: "
                f"beyond {LOST_AFTER_S:.0f} s its daemons look lost; set all clocks by NTP (chronyc tracking)"
            )
            for host, by_s in sorted(ahead_s.items())
        )

    def tidy(self) -> None:
        """Drop what is kept of files that were gone, or could not be read, at their last look."""
        self._known = {path: value for path, value in self._known.items() if value[0].readable}

    def forget(self, path: Path) -> None:
        """Drop what is kept of one file."""
        self._known.pop(path, None)


class ConfigFacts(NamedTuple):
    """The shown facts of a run's config: a config itself takes kilobytes, and a workspace may have thousands."""

    max_steps: int
    resume_step: int
    lr: float
    model: CleanText
    batch_size: int
    tags: tuple[CleanText, ...]
    weight: float
    priority: int
    max_tokens: int | None
    max_hours: float | None
    kind: Kind


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """A run's config in effect, or why it is invalid; both None while it has not been read.

    `edited`: how its `orch.toml` differs from what is in effect, and what to do.
    """

    config: ConfigFacts | None = None
    error: str | None = None
    edited: str | None = None


NOT_PARSED = ParsedConfig()


@dataclass(frozen=True, eq=False, slots=True)
class RunRecord:
    """All facts from a run's own files. `published` is its newest STABLE broadcast, 0 without one.

    `added_at` is when it was added (Unix seconds), None when it has no config; `added_ns` what `added.txt` has of that.
    `paused`, `ended` and `preempted` are the texts of `paused.txt`, `finished.txt` and `preempted.txt`.
    """

    run: RunDir
    added_at: float | None
    added_ns: int | None
    parsed: ParsedConfig
    status: RunStatus | None
    evicted: str | None
    config_error: str | None
    published: int
    paused: str | None = None
    ended: str | None = None
    preempted: str | None = None


class RunFiles:
    """The files of one run. Raises OSError for a broadcast folder that cannot be listed."""

    __slots__ = ("_folder", "_record", "_stamps", "_whole", "run")

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._folder = str(run.path)
        self._stamps: tuple[Stamp, ...] = ()
        self._record: RunRecord | None = None
        self._whole: tuple[Stamp, int] = (NO_FILE, 0)

    def read(self, *, is_busy: bool, with_config: bool = True) -> RunRecord:
        """The record; the same object as long as nothing changed.

        Args:
            is_busy: it publishes, so look for what was completed inside its folders too.
            with_config: false leaves a config unread that was not read before.
        """
        stamps = tuple([stamp_of(self._folder + name) for name in _NAMES])
        known = self._record
        # Its config may be there and not read yet.
        is_unread = known is not None and known.added_at is not None and known.parsed is NOT_PARSED
        if known is not None and stamps == self._stamps and not (with_config and is_unread):
            published = self._published(stamps[5]) if is_busy else known.published
            if self._rolled_back(known.parsed, published) == known.published:
                return known
        self._record, self._stamps = self._read(stamps, with_config), stamps
        return self._record

    def _read(self, stamps: tuple[Stamp, ...], with_config: bool) -> RunRecord:
        known, old, folder = self._record, self._stamps, self._folder
        index = next((i for i in (0, 1) if stamps[i] is not NO_FILE), 0)
        toml = stamps[index]
        same_config = old[: index + 1] == stamps[: index + 1] and old[9:11] == stamps[9:11]
        parsed = known.parsed if known and same_config else NOT_PARSED
        if toml.is_file and with_config and parsed is NOT_PARSED:
            parsed = _parse(self.run)
        added_ns = known.added_ns if known and old[11:] == stamps[11:] else read_added_ns(self.run)
        same_status = known is not None and old[2] == stamps[2]
        return RunRecord(
            run=self.run,
            added_at=(added_ns or toml.mtime_ns) / 1e9 if toml.is_file else None,
            added_ns=added_ns,
            parsed=parsed,
            status=known.status
            if known and same_status
            else clean_strings(read_status(self.run.status, RunStatus), _sentence),
            evicted=_note(folder + _NOTES[1], stamps[3], empty="no reason was given"),
            config_error=_note(folder + _NOTES[2], stamps[4]),
            published=self._rolled_back(parsed, self._published(stamps[5]) if stamps[5] is not NO_FILE else 0),
            paused=_note(folder + _MARKS[0], stamps[6], empty="paused"),
            ended=_note(folder + _MARKS[1], stamps[7], empty="ended before max_steps"),
            preempted=_note(folder + _MARKS[2], stamps[8], empty="preempted by a more urgent run"),
        )

    def _rolled_back(self, parsed: ParsedConfig, published: int) -> int:
        """The version that the run goes on from: while a rollback is not carried out, not the newest on disk."""
        step = parsed.config.resume_step if parsed.config else -1
        with contextlib.suppress(OSError):
            if 0 <= step < published and pending_request(self.run, step):
                return step
        return published

    def _published(self, stamp: Stamp) -> int:
        """The newest complete version. Not looked for where the folder is as it was and its newest was complete."""
        if stamp == self._whole[0]:
            return self._whole[1]
        began_ns = time.time_ns()
        steps = list_steps(self.run.broadcast)
        complete = (step for step in reversed(steps) if os.path.exists(stable_marker(self.run.broadcast_dir(step))))
        published = next(complete, 0)
        if steps and published == steps[-1] and began_ns - stamp.mtime_ns > SETTLED_NS:
            self._whole = (stamp, published)
        return published


def _parse(run: RunDir) -> ParsedConfig:
    # Imported late: the rules of configs take longer to import than a look at a workspace takes.
    from prime_rl.configs.admitted import read_effect
    from prime_rl.configs.base import ConfigError
    from prime_rl.configs.validate import explain

    try:
        effect = read_effect(run)
        config = effect.build(run)
        facts = ConfigFacts(
            max_steps=config.max_steps,
            resume_step=config.ckpt.resume_step,
            lr=config.optim.lr,
            model=one_line(config.model.name),
            batch_size=config.batch_size,
            tags=tuple(one_line(tag) for tag in config.tags),
            weight=config.weight,
            priority=config.priority,
            max_tokens=config.budget.max_tokens,
            max_hours=config.budget.max_hours,
            kind=config.kind,
        )
        return ParsedConfig(facts, edited=edit_text(run, effect.edit))
    except ConfigError as error:
        return ParsedConfig(error=explain(error))


def edit_text(run: RunDir, edit: Edit | None) -> str | None:
    """How a run's `orch.toml` differs from what is in effect, and what to do; None when it does not."""
    if edit is None:
        return None
    apply, restore = f"prl runs apply {run.run_id} (pause it first)", f"prl runs restore {run.run_id}"
    if edit.problem is not None:
        return f"edited, not in effect: orch.toml is invalid ({edit.problem}): correct it, or {restore}"
    from prime_rl.configs.admitted import hidden, in_words

    return f"edited, not in effect: {in_words(hidden(edit.keys))}: {apply}, or {restore}"


def _note(path: str, stamp: Stamp, empty: str | None = None) -> str | None:
    """Text of a note file (`evicted.txt`); `empty` when it is empty or not a regular file."""
    if stamp is NO_FILE or (empty is None and not stamp.is_file):
        return None
    try:
        return (read_text(Path(path), limit=MAX_REASON_BYTES) or "").strip() or empty
    except OSError as error:
        return str(error) if isinstance(error, FileRefused) else f"cannot read {path}: {error.strerror}"


def read_workspace(output_dir: Path, *, now: float | None = None) -> Workspace:
    """One look at `output_dir` (`now` in Unix seconds). To look again and again keep a `WorkspaceReader`."""
    return WorkspaceReader(output_dir).read(now=now)


class WorkspaceReader:
    """Reads one workspace again and again; files that did not change are not parsed again."""

    def __init__(self, output_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.output = OutputDir(Path(output_dir))
        self._clock = clock
        self._files: dict[str, RunFiles] = {}
        self._views: dict[str, tuple[_Facts, RunView]] = {}
        self._statuses = StatusFiles()
        self._scanned: tuple[Stamp, list[RefusedRun]] = (NO_FILE, [])
        self._runs: tuple[list[RunView], tuple[RunView, ...]] = ([], ())
        self._is_home = False

    def read(
        self,
        *,
        now: float | None = None,
        with_configs: bool = True,
        at_rest: bool = True,
        working: Set[str] | None = None,
        most: int | None = None,
    ) -> Workspace:
        """A new snapshot. Never raises for what is in the folder; an unreadable folder is an empty workspace.

        Args:
            with_configs: false leaves out what only configs contain, for a quick first look.
            at_rest: false leaves idle runs as they were if trainer and supervisor report nothing new about them: most
                of a large workspace.
            working: of the runs in slots read these; the others are left as they were in the same way. None: all.
            most: while there are runs in slots, read at most so many of them and no others.
        """
        now = self._clock() if now is None else now
        info = read_info(self.output)
        self._is_home = info is not None and info.lives_here() and info.output_dir == str(self.output.path.resolve())
        trainer = self._living(self.output.trainer_status, TrainerStatus, now)
        replicas = self._replicas(now)
        inference = together([status for _, status in replicas])
        # Where no supervisor runs nothing is held: it may be a disk that is read-only on purpose.
        disk = (find_trouble(self.output.path) if self._is_home else None) or (trainer.disk if trainer else None)
        daemons = self._daemons(now, disk)
        found, refused = self._scan(at_rest), self._scanned[1]
        reasons = {each.name: each.reason for each in refused} | (trainer.refused if trainer else {})
        places = {run_id: place for place, run_id in enumerate(trainer.waiting if trainer else [], start=1)}
        first = list(trainer.runs)[:most] if trainer and most is not None else []
        wanted = {run_id: found[run_id] for run_id in first if run_id in found} or found
        broken = failure(daemons.get("inference")) if trainer and not inference else None
        broken = broken if trainer else waits_for_trainer(daemons.get("trainer"))
        runs = []
        for run_id, files in wanted.items():
            if run_id in reasons:
                continue
            slot = trainer.runs.get(run_id) if trainer else None
            others = (slot, places.get(run_id), daemons.get(run_id), trainer is not None, broken, disk)
            known = self._views.get(run_id)
            if known and known[0][1:-1] == others and _may_stay(known[0], run_id, at_rest, working):
                runs.append(known[1])
                continue
            try:
                record = _read_files(files, is_busy=slot is not None, with_config=with_configs)
                runs.append(self._view(run_id, _Facts(record, *others, is_alive(record.status, now))))
            except OSError as error:
                reasons[run_id] = str(error)
            except Exception as error:  # whatever a run brought about here, the others must not meet it
                logger.debug("reading %s failed", run_id, exc_info=True)
                reasons[run_id] = f"cannot read it: {error_text(error)}"
        if runs != self._runs[0]:
            self._runs = runs, tuple(sorted(runs, key=by_importance))
        return Workspace(
            output_dir=self.output.path,
            runs=self._runs[1],
            refused=tuple(RefusedView(one_line(name), one_line(reason)) for name, reason in sorted(reasons.items())),
            daemons=tuple(daemons.values()),
            max_runs=trainer.max_runs if trainer else 0,
            num_used=len(trainer.runs) if trainer else 0,
            trainer=trainer,
            inference=inference,
            replicas=replicas,
            supervisor_alive=self._living(self.output.daemon_status(SUPERVISOR), DaemonStatus, now) is not None,
            bottleneck=shown(disk or find_bottleneck(runs, trainer, inference, daemons.get("inference"))),
            read_at=now,
            num_unread=len(found) - len(wanted),
            disk=shown(disk),
            clocks=self._statuses.clocks(now),
        )

    def _scan(self, again: bool) -> dict[str, RunFiles]:
        """The files of all runs, by name. What is kept of runs that are gone is dropped."""
        stamp = stamp_of(self.output.path)
        if again or stamp != self._scanned[0]:
            try:
                runs, refused = scan_runs(self.output.path)
            except OSError:
                runs, refused = [], []
            self._scanned = (stamp, refused)
            self._files = {run.run_id: self._files.get(run.run_id) or RunFiles(run) for run in runs}
            self._views = {run_id: view for run_id, view in self._views.items() if run_id in self._files}
            self._statuses.tidy()
        return self._files

    def _view(self, run_id: str, facts: _Facts) -> RunView:
        """The view that follows from `facts`; the same object as long as it is equal."""
        known = self._views.get(run_id)
        if known is not None and known[0] == facts:
            return known[1]
        view = _make_view(facts)
        if known is not None and known[1] == view:
            view = known[1]
        self._views[run_id] = (facts, view)
        return view

    def _daemons(self, now: float, disk: str | None) -> dict[str, DaemonView]:
        """Views by name: supervisor, trainer, inference, then the orchestrators."""
        try:
            paths = list(self.output.daemons.glob("*.json"))
        except OSError:
            paths = []
        order = {SUPERVISOR: 0, "trainer": 1, "inference": 2}
        views = {}
        for path in sorted(paths, key=lambda path: (order.get(path.stem, 3), path.name)):
            status = self._statuses.read(path, DaemonStatus)
            if status is not None and path.name == f"{status.name}.json":
                views[status.name] = daemon_view(status, now, is_home=self._is_home, disk=disk)
        return views

    def _replicas(self, now: float) -> tuple[tuple[int, InferenceStatus], ...]:
        try:
            paths = self.output.inference_statuses()
        except OSError:
            paths = {}
        found = [(number, self._living(path, InferenceStatus, now)) for number, path in paths.items()]
        return tuple((number, status) for number, status in found if status is not None)

    def _living(self, path: Path, kind: type[StatusT], now: float) -> StatusT | None:
        """The status whose writer runs; also one that does not respond, if it is this workspace's and not of a copy."""
        status = self._statuses.read(path, kind)
        is_silent = self._is_home and status is not None and is_there(status)
        return status if is_alive(status, now) or is_silent else None


class _Facts(NamedTuple):
    """All that a run's view is made of. `place` is its place in the trainer's queue, `lives` its orchestrator's.

    `broken` is what a person has to start again, or a trainer that is about to start; `disk` holds up all that work.
    """

    record: RunRecord
    slot: TrainerRunStatus | None
    place: int | None
    daemon: DaemonView | None
    trainer_lives: bool
    broken: str | None
    disk: str | None
    lives: bool


def _read_files(files: RunFiles, *, is_busy: bool, with_config: bool) -> RunRecord:
    """The content of the files of a run. Raises OSError with why it is refused."""
    try:
        record = files.read(is_busy=is_busy, with_config=with_config)
    except OSError as error:
        raise OSError(f"cannot read it: {error}") from error
    if record.added_at is None:
        missing = f"{files.run.control / 'orch.toml'} not found: a run needs this file"
        raise OSError(file_problem(files.run.orch_toml) or missing)
    return record


def _may_stay(facts: _Facts, run_id: str, at_rest: bool, working: Set[str] | None) -> bool:
    """True when a run is left as it was. One without a slot whose orchestrator lives is read at every look."""
    if facts.slot is None:
        return not (at_rest or facts.lives)
    return working is not None and run_id not in working


def _make_view(facts: _Facts) -> RunView:
    record, slot, daemon, status = facts.record, facts.slot, facts.daemon, facts.record.status
    config, max_steps = record.parsed.config, _max_steps(record)
    state, reason = run_state(
        RunFacts(
            evicted=record.evicted,
            config_error=record.config_error or (None if slot else record.parsed.error),
            max_steps=max_steps,
            published_step=record.published,
            orchestrator=status,
            trainer_alive=facts.trainer_lives,
            in_slot=slot is not None,
            supervisor_gave_up=daemon.reason or "its orchestrator failed"
            if daemon and daemon.state == "failed"
            else None,
            paused=record.paused,
            ended=record.ended,
        )
    )
    position = facts.place if state is RunState.WAITING else None
    if state is RunState.WAITING:
        reason = record.preempted
    is_held = state is RunState.ACTIVE and facts.disk is not None
    since, why = _stall(facts) if state is RunState.ACTIVE and not is_held else (None, None)
    living = status if facts.lives else None
    # Of one that starts the file is still that of the process before it.
    starts = daemon if daemon is not None and daemon.state == "starting" and living is None else None
    return RunView(
        run_id=record.run.run_id,
        state=state,
        step=max(slot.step if slot else 0, record.published),
        max_steps=max_steps,
        reward=status.reward if status else None,
        reason=shown(f"its orchestrator is stalled: {why}" if why else reason),
        waiting_on=shown(
            f"the disk ({facts.disk})" if is_held else waits_for(state, living, slot, position, daemon, facts.broken)
        ),
        updated_at=starts.updated_at if starts else status.updated_at if status else None,
        run_idx=slot.run_idx if slot else None,
        queue_position=position,
        tokens_per_s=living.tokens_per_s if living else None,
        async_level=living.async_level if living else None,
        policy_version=living.policy_version if living else record.published if status else None,
        lr=slot.lr if slot else (config.lr if config else None),
        bottleneck=shown(living.bottleneck) if living else None,
        model=config.model if config else None,
        batch_size=config.batch_size if config else None,
        num_restarts=daemon.num_restarts if daemon else 0,
        added_at=record.added_at,
        stalled_since=since,
        tags=config.tags if config else (),
        weight=config.weight if config else None,
        priority=config.priority if config else None,
        max_tokens=config.max_tokens if config else None,
        max_hours=config.max_hours if config else None,
        kind=config.kind if config else None,
        problem=shown(living.problem) if living and state is RunState.ACTIVE else None,
        examples_unusable=status.examples_unusable if status else 0,
        signs=tuple(sign for sign in status.signs if sign.name in RULES)[: len(RULES)] if status else (),
        crash_loop=daemon.crash_loop if daemon else None,
        edited=shown(record.parsed.edited),
        sound_step=_sound_step(record.run, status) if status and status.signs else None,
        started_at=living.pid_create_time or None if living else starts.pid_create_time if starts else None,
    )


def _sound_step(run: RunDir, status: RunStatus) -> int | None:
    """The newest version on disk from before the signs that a run does not learn."""
    last = status.step - max(sign.num for sign in status.signs)
    try:
        steps = [*list_steps(run.broadcast, stable_only=True), *list_steps(run.checkpoints, stable_only=True)]
    except OSError:
        return None
    return max((step for step in steps if step <= last), default=None)


def _stall(facts: _Facts) -> tuple[float | None, str | None]:
    """Since when the run's orchestrator is stalled, and why: by its own status, or the supervisor's."""
    status, daemon = facts.record.status, facts.daemon
    if status is not None and facts.lives and (since := stalled_since(status)) is not None:
        return since, stall_text(since)
    return (daemon.stalled_since, daemon.reason) if daemon is not None and daemon.state == STALLED else (None, None)


def _max_steps(record: RunRecord) -> int | None:
    """From the config; while that is unread, from the run's own orchestrator."""
    if record.parsed.config is not None:
        return record.parsed.config.max_steps
    return record.status.max_steps or None if record.parsed is NOT_PARSED and record.status else None
