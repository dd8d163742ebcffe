"""Look at the disk: which runs are there, which may have a slot, and why the others may not.

`Discovery.scan` says who must leave, `Discovery.judge` who may come; between the two the manager forgets who leaves.
Both read, and write nothing but `config_validation_error.txt`: written when a config is bad, removed when it is mended.
An unchanged file is parsed once, not at every look; one that was in a slot is judged anew when it wants one again.
Nothing is decided about slots: the manager does that.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.configs.base import ConfigError, ConfigProblem
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import PARSE_ERROR_PREFIX, explain, load_run_config
from prime_rl.contract.files import read_text, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir, list_steps, scan_runs
from prime_rl.contract.resume import pending_request
from prime_rl.contract.status import DaemonStatus, RunStatus, read_status
from prime_rl.trainer.runs.hooks import in_words, printable

logger = logging.getLogger(__name__)

# Thousands of times what a config needs; a larger file is no config, and parsing it would hold up everybody.
MAX_CONFIG_BYTES = 1 << 20
MAX_ERROR_CHARS = 20_000

# Null when the config is good, else what is wrong with it.
Validate = Callable[[OrchestratorConfig], str | None]
# Changes with every write, rename and change of permissions.
Signature = tuple[str, int, int, int, int]


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
        invalid, evicted, failed, finished, unconfigured: run ids that have no slot for that reason.
        folders: what to watch.
        newcomers: runs without a slot, with the inode of their folder: to be judged.
    """

    gone: dict[str, str] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    invalid: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    unconfigured: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    newcomers: list[tuple[RunDir, int]] = field(default_factory=list)


class Discovery:
    """Looks at one output directory, and remembers what it parsed."""

    def __init__(self, output_dir: Path, validate: Validate) -> None:
        self._output_dir = output_dir
        self._validate = validate
        self._parsed: dict[str, tuple[Signature, OrchestratorConfig | None]] = {}

    def scan(self, active: Mapping[str, int]) -> Findings:
        """Look who is there, and who must leave.

        `active` maps the id of each run in a slot to the inode its folder had when it was admitted.
        """
        found = Findings(folders=[self._output_dir])
        runs, refused = scan_runs(self._output_dir)
        found.refused = {entry.name: entry.reason for entry in refused}
        seen = set()
        for run in runs:
            found.folders.append(run.control)
            with _lost_under_our_eyes(run):
                inode = run.path.stat().st_ino
                if self._stays(run, inode, active, found):
                    seen.add(run.run_id)
                else:
                    found.newcomers.append((run, inode))
        for run_id in active.keys() - seen:
            found.gone.setdefault(run_id, found.refused.get(run_id, "its folder is gone"))
        self._forget_except({run.run_id for run in runs})
        return found

    def judge(self, found: Findings) -> None:
        """Say of each newcomer whether it may have a slot, or why not."""
        for run, inode in found.newcomers:
            with _lost_under_our_eyes(run):
                self._judge(run, inode, found)
        found.candidates.sort(key=lambda candidate: (candidate.landed_ns, candidate.run.run_id))

    def forget_verdicts(self) -> None:
        """Judge every config anew."""
        self._parsed.clear()

    def _stays(self, run: RunDir, inode: int, active: Mapping[str, int], found: Findings) -> bool:
        if run.run_id not in active:
            return False
        if active[run.run_id] != inode:
            found.gone[run.run_id] = "its folder was replaced by another"
        elif run.evicted.exists():
            found.gone[run.run_id] = "it was evicted"
        elif reason := given_up(run):
            found.gone[run.run_id] = reason
        return run.run_id not in found.gone

    def _judge(self, run: RunDir, inode: int, found: Findings) -> None:
        if run.evicted.exists():
            found.evicted.append(run.run_id)
            self._parsed.pop(run.run_id, None)
        elif given_up(run):
            found.failed.append(run.run_id)
            self._parsed.pop(run.run_id, None)
        elif link := _linked_part(run):
            found.refused[run.run_id] = f"{link} is a symbolic link: the folders of a run must be real ones"
        elif not run.orch_toml.is_file():
            found.unconfigured.append(run.run_id)
        else:
            config, landed_ns = self._read(run)
            if config is None:
                found.invalid.append(run.run_id)
            elif is_finished(run, config):
                found.finished.append(run.run_id)
            else:
                found.candidates.append(Candidate(run, config, landed_ns, inode))

    def _read(self, run: RunDir) -> tuple[OrchestratorConfig | None, int]:
        path = run.orch_toml
        stat = path.stat()
        signature = (str(path), stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
        known = self._parsed.get(run.run_id)
        if known and known[0] == signature and (known[1] is not None or run.config_error.exists()):
            config = known[1]
        else:
            config = self._parse(run, path)
            self._parsed[run.run_id] = (signature, config)
        if config is not None:
            run.config_error.unlink(missing_ok=True)
        return config, stat.st_mtime_ns

    def _parse(self, run: RunDir, path: Path) -> OrchestratorConfig | None:
        try:
            if path.stat().st_size > MAX_CONFIG_BYTES:
                raise ConfigError(str(path), [ConfigProblem("", f"has more than {MAX_CONFIG_BYTES} bytes")])
            config = load_run_config(path)
            problem = self._validate(config)
            text = f"{PARSE_ERROR_PREFIX}: {path}: {problem}" if problem else None
        except ConfigError as error:
            text = explain(error)
        except Exception as error:  # what a hostile file makes a parser do (nesting without end) is its own fault
            text = f"{PARSE_ERROR_PREFIX}: {path}: {in_words(error)}"
        if text is None:
            return config
        text = printable(text)[:MAX_ERROR_CHARS]
        logger.warning("%s: %s", run.run_id, text)
        if read_text(run.config_error) != text + "\n":
            write_atomic(run.config_error, text + "\n")
        return None

    def _forget_except(self, run_ids: set[str]) -> None:
        for run_id in self._parsed.keys() - run_ids:
            del self._parsed[run_id]


@contextlib.contextmanager
def _lost_under_our_eyes(run: RunDir) -> Iterator[None]:
    """A folder that was deleted meanwhile, or cannot be read, is looked at again next time."""
    try:
        yield
    except OSError as error:
        logger.debug("looking at %s failed: %s", run.run_id, error)


def is_finished(run: RunDir, config: OrchestratorConfig) -> bool:
    """Whether the newest published version is the last one that the run asked for, and it does not ask to go back."""
    published = list_steps(run.broadcast, stable_only=True)
    return (
        bool(published) and published[-1] >= config.max_steps and pending_request(run, config.ckpt.resume_step) is None
    )


def given_up(run: RunDir) -> str | None:
    """Why nobody makes batches for the run any more: its orchestrator's last word, or the supervisor's; else None.

    A run without batches would hold its slot for ever while others wait.
    """
    word = read_status(run.status, RunStatus)
    if word is not None and word.state == "failed":
        return f"its orchestrator failed: {word.reason}"
    daemon = read_status(OutputDir(run.path.parent).daemon_status(run.run_id), DaemonStatus)
    if daemon is not None and daemon.state == "failed":
        return f"its orchestrator is not started again: {daemon.reason}"
    return None


def _linked_part(run: RunDir) -> Path | None:
    """A folder of the run that is a link: pruning and publishing would write outside the run."""
    parts = (run.checkpoints, run.rollouts, run.broadcast, run.metrics)
    return next((part for part in parts if part.is_symlink()), None)
