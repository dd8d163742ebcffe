"""Look at the disk: which runs are there, which may have a slot, and why the others may not.

`Discovery.scan` finds the runs that must leave, `Discovery.judge` those that may come; between the two the manager
drops those that leave. When the new runs have their slots, `Discovery.report` reports invalid configs. Nothing is
decided about slots: the manager does that.

What was found of a run stands until something of it changes, or it leaves its slot. With hints only the runs that they
name are looked at. Without any, the prints of each run (inodes and times of a few paths) are compared, which takes a
tenth of what judging it would. What changed within the clock of a file system may leave the same times behind, so young
prints are not trusted, nor old ones forever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import (
    RUN_FOLDERS,
    RUN_PREFIX,
    LayoutError,
    OutputDir,
    RunDir,
    check_run_id,
    list_steps,
    refusal,
)
from prime_rl.contract.resume import pending_request
from prime_rl.contract.status import DaemonStatus, RunStatus, read_status
from prime_rl.trainer.runs.config_file import ConfigFile, Print, Validate, print_of

logger = logging.getLogger(__name__)

# Some file systems count whole seconds.
YOUNG_NS = 2 * 10**9
# Of this many looks at everything, one takes a closer look at a run whose prints are the same.
CLOSE_LOOKS = 12
# So long, or so many of them, may reports hold up the other work of one look.
REPORT_S, MIN_REPORTS = 0.1, 16
# In the folder of a run: what decides about it.
_DECIDING = ("", "/control", "/control/orch.toml", "/configs/orch.toml", "/broadcast")
# What was found of a run in a slot that keeps it. Everything else is the name of a list of `Findings`.
_STAYS = "stays"


@dataclass(frozen=True)
class Candidate:
    """A run that may have a slot. `landed_ns` is the time of its config file, `inode` that of its folder."""

    run: RunDir
    config: OrchestratorConfig
    landed_ns: int
    inode: int


@dataclass
class Findings:
    """What one look found.

    Attributes:
        gone: active runs that must leave their slot, with the reason.
        candidates: runs that may have a slot, in admission order; active ones are not among them.
        refused: `run_*` entries that may not be used, with the reason.
        invalid, evicted, failed, finished, unconfigured, settling: run ids that have no slot for that reason; the last
            are those whose config has not come to rest.
        due: when to look again at those that settle (seconds of the clock), else None.
        folders: what to watch.
    """

    gone: dict[str, str] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    invalid: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    unconfigured: list[str] = field(default_factory=list)
    settling: list[str] = field(default_factory=list)
    due: float | None = None
    folders: list[Path] = field(default_factory=list)


@dataclass
class _Entry:
    """What is known of one `run_*` entry.

    Attributes:
        inode: of the folder; another one means another run.
        config: what was read of its config.
        folder: what to watch: the folder in which the next change is expected.
        refusal: why it may not be used, else None.
        link: a folder of it that is a link, if that is why it has no slot.
        outcome: what was found, None as long as it must be judged.
        due: when to judge a config again that may still change.
    """

    run: RunDir
    inode: int
    config: ConfigFile
    folder: Path = field(default_factory=Path)
    prints: tuple[Print | None, ...] = ()
    refusal: str | None = None
    link: Path | None = None
    outcome: str | None = None
    due: float | None = None


class Discovery:
    """Looks at one output directory, and remembers what it found.

    Args:
        settle_s: how long a bad config must stay as it is before that is reported.
        clock: monotonic seconds.
        wall_ns: the time of the file system.
    """

    def __init__(
        self,
        output_dir: Path,
        validate: Validate,
        settle_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._output = OutputDir(output_dir)
        self._validate = validate
        self._settle_s = settle_s
        self._clock = clock
        self._wall_ns = wall_ns
        self._num_looks = 0
        self._entries: dict[str, _Entry] = {}

    def scan(self, active: Mapping[str, int], changed: Collection[Path] | None = None) -> Findings:
        """Find the runs, and those that must leave.

        `active` maps the id of each run in a slot to the inode its folder had when it was admitted. `changed` are the
        watched folders with a hint; None looks at everything.
        """
        for run_id in self.suspects(changed):
            self._look_at(self._entries[run_id])
        found = Findings(folders=[self._output.path])
        for run_id, entry in self._entries.items():
            if entry.refusal is not None:
                found.refused[run_id] = entry.refusal
                continue
            found.folders.append(entry.folder)
            if run_id not in active:
                entry.outcome = None if entry.outcome == _STAYS else entry.outcome
            elif entry.outcome != _STAYS or entry.inode != active[run_id]:
                if reason := _must_leave(entry, active[run_id]):
                    found.gone[run_id] = reason
                entry.outcome = None if reason else _STAYS
        for run_id in active.keys() - self._entries.keys() | active.keys() & found.refused.keys():
            found.gone[run_id] = found.refused.get(run_id, "its folder is gone")
        return found

    def judge(self, found: Findings) -> None:
        """Say of each run without a slot whether it may have one, or why not."""
        for run_id, entry in self._entries.items():
            if entry.refusal is not None or entry.outcome == _STAYS:
                continue
            if entry.outcome is None or entry.due is not None:
                try:
                    entry.outcome = self._judge(entry)
                except OSError as error:  # deleted meanwhile, or it cannot be read: looked at again next time
                    logger.debug("looking at %s failed: %s", run_id, error)
                    continue
            _tell(entry, entry.outcome, found)
        found.candidates.sort(key=lambda candidate: (candidate.landed_ns, candidate.run.run_id))

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

    def suspect(self, run_id: str) -> None:
        """What was found about a run may be outdated."""
        if run_id in self._entries:
            self._entries[run_id].outcome = None

    def forget_verdicts(self) -> None:
        """All configs are to be validated again."""
        for entry in self._entries.values():
            entry.config, entry.outcome = ConfigFile(entry.run), None

    def suspects(self, changed: Collection[Path] | None = None) -> set[str]:
        """Bring the entries up to date; the ids of those that may be other than before."""
        came = self._list() if changed is None or self._output.path in changed else set()
        if changed is None:
            return came | self._compare()
        named = {(folder if folder.parent == self._output.path else folder.parent).name for folder in changed}
        return came | named & self._entries.keys()

    def _list(self) -> set[str]:
        """The ids of entries that came, or are others now. Those that went are forgotten."""
        inodes: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._output.path) as entries:
            inodes = {entry.name: entry.inode() for entry in entries if entry.name.startswith(RUN_PREFIX)}
        known = {run_id: entry for run_id, entry in self._entries.items() if entry.inode == inodes.get(run_id)}
        came = inodes.keys() - known.keys()
        for run_id in sorted(came):
            run = RunDir(self._output.path / run_id)
            known[run_id] = _Entry(run, inodes[run_id], ConfigFile(run))
        self._entries = known
        return came

    def _compare(self) -> set[str]:
        """Entries whose prints changed, are too young to be trusted, or have their turn."""
        self._num_looks += 1
        old_ns = self._wall_ns() - YOUNG_NS
        suspects = set()
        for index, (run_id, entry) in enumerate(self._entries.items()):
            prints = _prints(entry.run, self._output.daemon_status(run_id))
            is_young = any(each is not None and max(each[1], each[2]) > old_ns for each in prints)
            if is_young or prints != entry.prints or (index + self._num_looks) % CLOSE_LOOKS == 0:
                suspects.add(run_id)
            entry.prints = prints
        return suspects

    def _look_at(self, entry: _Entry) -> None:
        entry.outcome, run = None, entry.run
        try:
            check_run_id(run.run_id)
            entry.refusal = refusal(self._output.path, run.path)
        except LayoutError as error:
            entry.refusal = str(error)
        except OSError as error:
            entry.refusal = f"{run.path} cannot be looked at: {error.strerror}"
        # `control/`, or the folder in which it will be made; the older place of configs is one such folder.
        places = (run.control, run.orch_toml.parent)
        entry.folder = next((folder for folder in places if os.path.isdir(folder)), run.path)

    def _judge(self, entry: _Entry) -> str:
        run, config, entry.due = entry.run, entry.config, None
        if os.path.lexists(run.evicted):
            entry.config = ConfigFile(run)  # it is read again when the run comes back
            return "evicted"
        if given_up(run):
            entry.config = ConfigFile(run)
            return "failed"
        entry.link = _linked_folder(run)
        if entry.link is not None:
            return "refused"
        if not os.path.lexists(run.orch_toml):
            return "unconfigured"
        entry.due = config.read(self._validate, self._settle_s, self._clock())
        if entry.due is not None:
            return "settling"
        if config.config is None:
            return "invalid"
        return "finished" if is_finished(run, config.config) else "candidates"


def _tell(entry: _Entry, outcome: str, found: Findings) -> None:
    run, config = entry.run, entry.config.config
    if outcome == "candidates":
        assert config is not None
        found.candidates.append(Candidate(run, config, entry.config.landed_ns, entry.inode))
    elif outcome == "refused":
        found.refused[run.run_id] = f"{entry.link} is a symbolic link: the folders of a run must be real ones"
    else:
        getattr(found, outcome).append(run.run_id)
    if entry.due is not None:
        found.due = min(entry.due, found.due or entry.due)


def _must_leave(entry: _Entry, inode: int) -> str | None:
    """Why a run that was admitted from the folder `inode` must leave its slot, or None."""
    if inode != entry.inode:
        return "its folder was replaced by another"
    if os.path.lexists(entry.run.evicted):
        return "it was evicted"
    if reason := given_up(entry.run):
        return reason
    if entry.config.has_changed():
        logger.info(
            "%s: orch.toml has changed; the run keeps its admitted config while it is in its slot", entry.run.run_id
        )
    return None


def is_finished(run: RunDir, config: OrchestratorConfig) -> bool:
    """Whether the newest published version is the last one that the run asked for, and it does not ask to go back."""
    published = list_steps(run.broadcast, stable_only=True)
    return (
        bool(published) and published[-1] >= config.max_steps and pending_request(run, config.ckpt.resume_step) is None
    )


def given_up(run: RunDir) -> str | None:
    """Why the run gets no more batches: the final state of its orchestrator or daemon; else None.

    A run without batches would hold its slot forever while others wait.
    """
    status = read_status(run.status, RunStatus)
    if status is not None and status.state == "failed":
        return f"its orchestrator failed: {status.reason}"
    daemon = read_status(OutputDir(run.path.parent).daemon_status(run.run_id), DaemonStatus)
    if daemon is not None and daemon.state == "failed":
        return f"its orchestrator is not started again: {daemon.reason}"
    return None


def _linked_folder(run: RunDir) -> Path | None:
    """A folder of the run that is a link: pruning and publishing would write outside the run."""
    return next((folder for name in RUN_FOLDERS if os.path.islink(folder := run.path / name)), None)


def _prints(run: RunDir, daemon_status: Path) -> tuple[Print | None, ...]:
    """Of what decides about a run."""
    return (*(_print_of(f"{run.path}{name}") for name in _DECIDING), _print_of(daemon_status))


def _print_of(path: str | Path) -> Print | None:
    try:
        return print_of(os.lstat(path))
    except OSError:
        return None
