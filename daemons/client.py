"""What a house looks like now: one snapshot, read from disk and from nowhere else.

`HouseReader.read()` returns a `House` of frozen views, for `prl`, the TUI and the supervisor. It only reads, so it also
works with the daemons down and on a copied output directory. A file that is missing, half written, damaged or huge
costs its own facts and nothing else. A run's state comes from `contract.status.run_state`. It changes nothing
(`actions` does) and cleans no text: who shows it does that (`utils.text.clean_text`).
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from daemons.house import (
    SUPERVISOR,
    DaemonView,
    House,
    RefusedView,
    RunView,
    by_importance,
    daemon_view,
    find_bottleneck,
    waits_for,
)
from prime_rl.configs.base import ConfigError
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.validate import explain, load_run_config
from prime_rl.contract.files import read_text
from prime_rl.contract.layout import OutputDir, RunDir, list_steps, scan_runs
from prime_rl.contract.status import (
    DaemonStatus,
    InferenceStatus,
    RunFacts,
    RunState,
    RunStatus,
    Status,
    TrainerStatus,
    is_alive,
    read_status,
    run_state,
)

__all__ = ["SUPERVISOR", "DaemonView", "House", "HouseReader", "RefusedView", "RunView", "read_house"]

# Ten times the largest that a part writes with 1,024 runs; what is larger was not written by a part.
MAX_FILE_BYTES = 4_000_000
MAX_REASON_BYTES = 10_000

StatusT = TypeVar("StatusT", bound=Status)


def read_house(output_dir: Path, *, now: float | None = None) -> House:
    """One look at `output_dir` (`now` in Unix seconds). To look again and again keep a `HouseReader`."""
    return HouseReader(output_dir).read(now=now)


@dataclass(frozen=True)
class _Config:
    config: OrchestratorConfig | None
    error: str | None


class HouseReader:
    """Reads one house again and again; files that did not change are not parsed again."""

    def __init__(self, output_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.output = OutputDir(Path(output_dir))
        self._clock = clock
        self._configs: dict[Path, tuple[_Stamp, _Config]] = {}
        self._statuses: dict[Path, tuple[_Stamp, Status | None]] = {}

    def read(self, *, now: float | None = None) -> House:
        """A new snapshot. Never raises for what is in the folder; an unreadable folder is an empty house."""
        now = self._clock() if now is None else now
        trainer = self._living(self.output.trainer_status, TrainerStatus, now)
        inference = self._living(self.output.inference_status, InferenceStatus, now)
        supervisor = self._living(self.output.daemon_status(SUPERVISOR), DaemonStatus, now)
        daemons = self._daemons(now)
        try:
            found, refused = scan_runs(self.output.path)
        except OSError:
            found, refused = [], []
        reasons = {each.name: each.reason for each in refused} | (trainer.refused if trainer else {})
        runs = []
        for run in found:
            if run.run_id in reasons:
                continue
            try:
                if _exists(run.orch_toml):
                    runs.append(self._run(run, trainer, daemons.get(run.run_id), now))
                else:
                    reasons[run.run_id] = f"{run.control / 'orch.toml'} is not there: without it this is not a run"
            except OSError as error:
                reasons[run.run_id] = f"cannot be read: {error}"
        self._forget({run.path for run in found})
        return House(
            output_dir=self.output.path,
            runs=tuple(sorted(runs, key=by_importance)),
            refused=tuple(RefusedView(name, reason) for name, reason in sorted(reasons.items())),
            daemons=tuple(daemons.values()),
            max_runs=trainer.max_runs if trainer else 0,
            num_used=len(trainer.runs) if trainer else 0,
            trainer=trainer,
            inference=inference,
            supervisor_alive=supervisor is not None,
            bottleneck=find_bottleneck(runs, trainer, inference),
            read_at=now,
        )

    def _run(self, run: RunDir, trainer: TrainerStatus | None, daemon: DaemonView | None, now: float) -> RunView:
        parsed = self._config(run.orch_toml)
        config = parsed.config
        word = self._status(run.status, RunStatus)
        slot = trainer.runs.get(run.run_id) if trainer else None
        published = max(list_steps(run.broadcast, stable_only=True), default=0)
        error = _note(run.config_error) or (None if slot else parsed.error)
        gave_up = daemon.reason or "its orchestrator failed" if daemon and daemon.state == "failed" else None
        facts = RunFacts(
            evicted=_note(run.evicted, empty="no reason was given"),
            config_error=error,
            max_steps=config.max_steps if config else None,
            published_step=published,
            orchestrator=word,
            trainer_alive=trainer is not None,
            in_slot=slot is not None,
            supervisor_gave_up=gave_up,
        )
        state, reason = run_state(facts)
        lives = is_alive(word, now)
        queue = trainer.waiting if trainer and state is RunState.WAITING else []
        position = queue.index(run.run_id) + 1 if run.run_id in queue else None
        return RunView(
            run_id=run.run_id,
            state=state,
            step=max(slot.step if slot else 0, published),
            max_steps=facts.max_steps,
            reward=word.reward if word else None,
            reason=reason,
            waiting_on=waits_for(state, word if lives else None, slot, position, daemon),
            updated_at=word.updated_at if word else None,
            run_idx=slot.run_idx if slot else None,
            queue_position=position,
            tokens_per_s=word.tokens_per_s if word and lives else None,
            async_level=word.async_level if word else None,
            policy_version=word.policy_version if word else None,
            lr=slot.lr if slot else (config.optim.lr if config else None),
            bottleneck=word.bottleneck if word and lives else None,
            model=config.model.name if config else None,
            batch_size=config.batch_size if config else None,
            num_restarts=daemon.num_restarts if daemon else 0,
            added_at=_stamp(run.orch_toml).mtime_ns / 1e9 or None,
        )

    def _daemons(self, now: float) -> dict[str, DaemonView]:
        """Views by name: supervisor, trainer, inference, then the orchestrators."""
        try:
            paths = list(self.output.daemons.glob("*.json"))
        except OSError:
            paths = []
        order = {SUPERVISOR: 0, "trainer": 1, "inference": 2}
        views = {}
        for path in sorted(paths, key=lambda path: (order.get(path.stem, 3), path.name)):
            status = self._status(path, DaemonStatus)
            if status is not None and path.name == f"{status.name}.json":
                views[status.name] = daemon_view(status, now)
        return views

    def _config(self, path: Path) -> _Config:
        stamp = _stamp(path)
        known = self._configs.get(path)
        if known and known[0] == stamp:
            return known[1]
        parsed = _parse(path, stamp)
        self._configs[path] = (stamp, parsed)
        return parsed

    def _status(self, path: Path, kind: type[StatusT]) -> StatusT | None:
        stamp = _stamp(path)
        known = self._statuses.get(path)
        if known and known[0] == stamp:
            return known[1] if isinstance(known[1], kind) else None
        try:
            status = read_status(path, kind) if stamp.readable else None
        except RecursionError:
            status = None
        self._statuses[path] = (stamp, status)
        return status

    def _living(self, path: Path, kind: type[StatusT], now: float) -> StatusT | None:
        status = self._status(path, kind)
        return status if is_alive(status, now) else None

    def _forget(self, run_paths: set[Path]) -> None:
        """Drop what is kept about runs that are gone, so that a reader of months does not grow."""
        self._configs = {p: v for p, v in self._configs.items() if p.parent.parent in run_paths}
        own = (self.output.daemons, self.output.trainer_status.parent, self.output.inference_status.parent)
        self._statuses = {
            path: value
            for path, value in self._statuses.items()
            if path.parent.parent in run_paths or (path.parent in own and value[0].readable)
        }


@dataclass(frozen=True)
class _Stamp:
    """What tells whether a file changed; all zero when it is not there."""

    mtime_ns: int = 0
    size: int = 0
    inode: int = 0
    readable: bool = False


def _stamp(path: Path) -> _Stamp:
    try:
        info = path.stat()
    except OSError:
        return _Stamp()
    readable = stat.S_ISREG(info.st_mode) and info.st_size <= MAX_FILE_BYTES
    return _Stamp(info.st_mtime_ns, info.st_size, info.st_ino, readable)


def _parse(path: Path, stamp: _Stamp) -> _Config:
    if not stamp.readable:
        return _Config(None, f"{path}: not a file of at most {MAX_FILE_BYTES // 1_000_000} MB")
    try:
        return _Config(load_run_config(path), None)
    except ConfigError as error:
        return _Config(None, explain(error))
    except RecursionError:
        return _Config(None, f"{path}: nested too deeply")


def _note(path: Path, empty: str | None = None) -> str | None:
    """Text of a note file (`evicted.txt`); `empty` when it is there without words."""
    if not _exists(path):
        return None
    try:
        return (read_text(path, limit=MAX_REASON_BYTES) or "").strip() or empty
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def _exists(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False
