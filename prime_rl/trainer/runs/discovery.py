"""Look at the disk: which runs are there, which may have a slot, and why the others may not.

`Discovery.scan` finds the runs that must leave, `Discovery.judge` those that may come; between the two the manager
drops those that leave. When the new runs have their slots, `Discovery.report` reports invalid configs. A verdict stands
until something of the run changes (`presence`); configs are read by `config_file`. A run that was in a slot is judged
again before it gets another one. Nothing is decided about slots: the manager does that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.contract.layout import RUN_FOLDERS, OutputDir, RunDir, list_steps
from prime_rl.contract.resume import pending_request
from prime_rl.contract.status import DaemonStatus, RunStatus, read_status
from prime_rl.trainer.runs.config_file import ConfigFiles, Validate
from prime_rl.trainer.runs.presence import Entry, Presence

logger = logging.getLogger(__name__)


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
        newcomers: runs without a slot: to be judged.
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
    newcomers: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class _Verdict:
    """Into which of the lists of `Findings` a run goes, and what belongs to it there."""

    outcome: str
    candidate: Candidate | None = None
    refusal: str = ""
    due: float | None = None


class Discovery:
    """Looks at one output directory, and remembers what it found.

    Args:
        settle_s: how long a bad config must stay as it is before that is reported.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        output_dir: Path,
        validate: Validate,
        settle_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output_dir = output_dir
        self._presence = Presence(output_dir)
        self._configs = ConfigFiles(validate, settle_s, clock)
        self._clock = clock
        self._verdicts: dict[str, _Verdict] = {}
        # Active runs that had a look since something of theirs changed.
        self._checked: set[str] = set()

    def scan(self, active: Mapping[str, int], changed: Collection[Path] | None = None) -> Findings:
        """Find the runs, and those that must leave.

        `active` maps the id of each run in a slot to the inode its folder had when it was admitted. `changed` are the
        watched folders with a hint; None looks at everything.
        """
        for run_id in self._presence.look(changed):
            self.suspect(run_id)
        found = Findings(folders=[self._output_dir])
        for run_id, entry in self._presence.entries.items():
            if entry.refusal is not None:
                found.refused[run_id] = entry.refusal
                continue
            found.folders.append(entry.folder)
            if run_id not in active:
                found.newcomers.append(entry)
            elif not self._stays(entry, active[run_id], found):
                self.suspect(run_id)
                found.newcomers.append(entry)
        for run_id in active.keys() - self._presence.entries.keys() | active.keys() & found.refused.keys():
            found.gone.setdefault(run_id, found.refused.get(run_id, "its folder is gone"))
        self._forget_except(self._presence.entries.keys())
        return found

    def judge(self, found: Findings) -> None:
        """Say of each newcomer whether it may have a slot, or why not."""
        for entry in found.newcomers:
            run_id = entry.run.run_id
            self._checked.discard(run_id)
            verdict = self._verdicts.get(run_id)
            if verdict is None or verdict.outcome == "settling":
                with _skip_on_os_error(entry.run):
                    verdict = self._verdicts[run_id] = self._judge(entry)
            if verdict is not None:
                _tell(verdict, run_id, found)
        found.candidates.sort(key=lambda candidate: (candidate.landed_ns, candidate.run.run_id))

    def report(self, found: Findings) -> None:
        """Report some invalid configs to their owners; the others at the next look, which is due at once."""
        for run_id in self._configs.report():
            self.suspect(run_id)
        if self._configs.has_unreported:
            found.due = self._clock()

    def suspect(self, run_id: str) -> None:
        """What was found about a run may be outdated."""
        self._verdicts.pop(run_id, None)
        self._checked.discard(run_id)

    def forget_verdicts(self) -> None:
        self._configs.forget_all()
        self._verdicts.clear()

    def _stays(self, entry: Entry, inode: int, found: Findings) -> bool:
        run_id = entry.run.run_id
        self._verdicts.pop(run_id, None)
        if run_id in self._checked and inode == entry.inode:
            return True
        if inode != entry.inode:
            found.gone[run_id] = "its folder was replaced by another"
        elif os.path.lexists(entry.run.evicted):
            found.gone[run_id] = "it was evicted"
        elif reason := given_up(entry.run):
            found.gone[run_id] = reason
        else:
            self._checked.add(run_id)
            if self._configs.has_changed(entry.run):
                logger.info(
                    "%s: orch.toml has changed; the run keeps its admitted config while it is in its slot", run_id
                )
        return run_id not in found.gone

    def _judge(self, entry: Entry) -> _Verdict:
        run = entry.run
        if os.path.lexists(run.evicted):
            self._configs.forget(run.run_id)
            return _Verdict("evicted")
        if given_up(run):
            self._configs.forget(run.run_id)
            return _Verdict("failed")
        if link := _linked_folder(run):
            return _Verdict("refused", refusal=f"{link} is a symbolic link: the folders of a run must be real ones")
        if not os.path.lexists(run.orch_toml):
            return _Verdict("unconfigured")
        reading = self._configs.read(run)
        if reading.due is not None:
            return _Verdict("settling", due=reading.due)
        if reading.config is None:
            return _Verdict("invalid")
        if is_finished(run, reading.config):
            return _Verdict("finished")
        return _Verdict("candidates", Candidate(run, reading.config, reading.landed_ns, entry.inode))

    def _forget_except(self, run_ids: Collection[str]) -> None:
        for run_id in self._verdicts.keys() - run_ids:
            del self._verdicts[run_id]
        self._checked.intersection_update(run_ids)
        self._configs.forget_except(run_ids)


def _tell(verdict: _Verdict, run_id: str, found: Findings) -> None:
    if verdict.candidate is not None:
        found.candidates.append(verdict.candidate)
    elif verdict.outcome == "refused":
        found.refused[run_id] = verdict.refusal
    else:
        getattr(found, verdict.outcome).append(run_id)
    if verdict.due is not None:
        found.due = min(verdict.due, found.due or verdict.due)


@contextlib.contextmanager
def _skip_on_os_error(run: RunDir) -> Iterator[None]:
    """A folder that was deleted meanwhile, or cannot be read, is looked at again next time."""
    try:
        yield
    except OSError as error:
        logger.debug("scanning %s failed: %s", run.run_id, error)


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
