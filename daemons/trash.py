"""Deleting runs: move them into `.trash/`, restore them, remove them for good. Used through `actions`.

A deleted run is renamed, so deleting costs nothing and can be undone. Links are never followed: folders are opened
once, without following, and everything below is named relative to what was opened, so nothing that is swapped in
between can lead outside. It waits for the processes that use a run and ends none of them: trainer and orchestrator
leave by themselves when their run is evicted.
"""

from __future__ import annotations

import calendar
import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from daemons.errors import ActionError, one_line_errors, record_act
from prime_rl.contract.files import WaitTimeout, is_folder_at, read_text, remove, remove_at, wait_for, write_atomic
from prime_rl.contract.layout import LayoutError, OutputDir, RunDir, check_run_id, refusal
from prime_rl.contract.status import DaemonStatus, RunStatus, TrainerStatus, is_elsewhere, is_there, read_status

Progress = Callable[[str], None]

# The note in `evicted.txt` of a deleted run; undelete takes away this one and leaves any other.
DELETED_NOTE = "deleted with prl; prl runs undelete brings it back"
# Begins the stamp of a deleted run: UTC.
_STAMP_FORMAT = "%Y%m%dT%H%M%SZ"
_STAMP = re.compile(r"(\d{8}T\d{6}Z)(-\d+)?")


def users_of_run(output_dir: Path, run_id: str) -> list[str]:
    """The users of a run now, such as "the trainer (slot 1)"; while there are any, deleting it needs `force`."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"looking at {run_id}"):
        return users(output, output.run(run_id))


def users(output: OutputDir, run: RunDir, *, claimed: bool = True) -> list[str]:
    """The users that must release a run before its folder may move; without `claimed`, only what others report.

    The owner of a run may write anything into its status file, so what it claims must not keep the run for ever.
    """
    found = []
    trainer = read_status(output.trainer_status, TrainerStatus)
    if trainer is not None and is_there(trainer):
        if run.run_id in trainer.runs:
            found.append(f"the trainer (slot {trainer.runs[run.run_id].run_idx})")
        elif run.run_id in trainer.waiting and os.path.lexists(run.evicted):
            found.append("the trainer (its queue)")
    status = read_status(run.status, RunStatus) if claimed else None
    daemon = read_status(output.daemon_status(run.run_id), DaemonStatus)
    if status is not None and is_elsewhere(status) and is_there(status):
        return [*found, f"its orchestrator (pid {status.pid} on {status.host})"]
    for process in (status.writer if status else None, daemon.child if daemon else None):
        if process is not None and process.is_running():
            found.append(f"its orchestrator (pid {process.pid})")
            break
    return found


def wait_until_released(
    output: OutputDir, run: RunDir, not_done: str, wait_s: float, on_progress: Progress, *, claimed: bool = True
) -> None:
    """Wait until an evicted run is released. Raises ActionError; `not_done` is its text, such as "was not deleted".

    `claimed`: as in `users`.
    """
    said: list[str] = []

    def free() -> bool:
        said[:] = users(output, run, claimed=claimed)
        if said:
            on_progress(f"waiting for {' and '.join(said)} to release {run.run_id}")
        return not said

    try:
        wait_for(free, f"{run.run_id} to be released", timeout_s=wait_s, poll_s=0.2)
    except WaitTimeout as error:
        raise ActionError(
            f"{run.run_id} {not_done}: {' and '.join(said)} did not release it within {wait_s:g} s; "
            "it stays evicted: try again"
        ) from error


def delete_run(
    output_dir: Path,
    run_id: str,
    *,
    force: bool = False,
    wait_s: float = 60.0,
    on_progress: Progress = lambda message: None,
    reason: str = "",
    claimed: bool = True,
) -> Path:
    """Move a run to the trash and return its path there; `undelete_run` restores it.

    A run that trains, or whose orchestrator lives, is refused unless `force`: then it is evicted, and the move waits up
    to `wait_s` seconds until trainer and orchestrator have released it. Without `claimed` that only the run's own
    status file names an orchestrator counts for nothing. Raises ActionError.
    """
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"deleting {run_id}"):
        if not output.run(run_id).path.exists() and (lies := _in_trash(output, run_id)):
            return lies
        run = existing_run(output, run_id)
        in_use_by = users(output, run, claimed=claimed)
        if in_use_by and not force:
            raise ActionError(
                f"{run_id} is in use by {' and '.join(in_use_by)}: evict it first (prl runs evict {run_id} "
                "--reason ...), or add --yes to evict and delete it"
            )
        with contextlib.suppress(FileExistsError):
            output.trash.mkdir()
        with _workspace_and_trash(output):  # refused here, the run is not evicted for nothing
            pass
        if not os.path.lexists(run.evicted) and os.path.exists(run.control):
            write_atomic(run.evicted, DELETED_NOTE)
        try:
            wait_until_released(output, run, "was not deleted", wait_s, on_progress, claimed=claimed)
        except ActionError as error:
            if users(output, run, claimed=False):
                raise
            raise ActionError(f"{error}, or, as only its own status file names that, add --force") from error
        lies = _move_to_trash(output, run)
        output.start_request(run_id).unlink(missing_ok=True)
        record_act(output, "delete", run_id, reason=reason, detail=f"to {lies.name}")
        return lies


def undelete_run(output_dir: Path, run_id: str) -> bool:
    """Restore the newest deleted run of this id; false when the run exists and none was deleted."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"undeleting {run_id}"):
        run = output.run(run_id)
        lies = _in_trash(output, run_id)
        if run.path.exists():
            if lies is None:
                return False
            raise ActionError(f"{run_id} exists in {output.path}: delete or move it before restoring an older one")
        if lies is None:
            raise ActionError(f"{run_id} not found in the trash ({output.trash}): nothing to restore")
        with _workspace_and_trash(output) as (workspace, trash):
            if refused := refusal(output.trash, lies):
                raise LayoutError(refused)
            if read_text(RunDir(lies).evicted) == DELETED_NOTE:
                remove(RunDir(lies).evicted)
            os.rename(lies.name, run_id, src_dir_fd=trash, dst_dir_fd=workspace)
        record_act(output, "undelete", run_id, detail=f"from {lies.name}")
        return True


def list_trash(output_dir: Path, *, older_than_s: float = 0.0, now: float | None = None) -> list[tuple[str, str]]:
    """(run id, time of deletion) of the runs in the trash that were deleted at least that long ago, oldest first."""
    trash = OutputDir(Path(output_dir)).trash
    now = time.time() if now is None else now
    names = [entry.name for entry in trash.iterdir()] if trash.is_dir() else []
    return sorted(
        (parsed for name in names if (parsed := parse_trashed(name)) and _is_due(name, older_than_s, now)),
        key=lambda each: each[1],
    )


def deleted_at(stamp: str) -> float | None:
    """Unix seconds of a time of deletion from `list_trash`; None for one that `prl` did not write."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        return None
    with contextlib.suppress(ValueError):
        return float(calendar.timegm(time.strptime(match[1], _STAMP_FORMAT)))
    return None


def purge_trash(output_dir: Path, *, older_than_s: float = 0.0, now: float | None = None, reason: str = "") -> int:
    """Remove the runs that were deleted at least `older_than_s` ago, for good; returns how many.

    Other entries of the trash are removed only with everything (`older_than_s` = 0). Raises ActionError for those that
    cannot be removed, when all others are.
    """
    output = OutputDir(Path(output_dir))
    now = time.time() if now is None else now
    with one_line_errors(f"purging {output.trash}"):
        if not output.trash.is_symlink() and not output.trash.exists():
            return 0
        removed, failed = [], []
        with _opened(output.trash, follow=False) as trash:
            for name in sorted(os.listdir(trash)):
                if _is_due(name, older_than_s, now):
                    try:
                        remove_at(name, trash)
                        removed.append(name)
                    except OSError as error:
                        failed.append(f"{name} ({error.strerror})")
        if removed:
            record_act(output, "purge", None, reason=reason, detail=", ".join(removed))
        if failed:
            raise ActionError(f"cannot remove {', '.join(failed)} from {output.trash}; removed: {len(removed)}")
        return len(removed)


@contextlib.contextmanager
def acting_on(output_dir: Path, run_id: str, doing: str) -> Iterator[tuple[OutputDir, RunDir]]:
    """The workspace, and a run that exists in it. Failures in the block are ActionErrors: `doing` the run failed."""
    output = OutputDir(Path(output_dir))
    with one_line_errors(f"{doing} {run_id}"):
        yield output, existing_run(output, run_id)


def existing_run(output: OutputDir, run_id: str) -> RunDir:
    """The run's folder. Raises ActionError when it is missing and LayoutError for an invalid id."""
    run = output.run(run_id)
    if not run.path.is_dir():
        raise ActionError(f"run {run_id!r} not found in {output.path}: prl runs list shows all runs")
    return run


def _is_due(name: str, older_than_s: float, now: float) -> bool:
    """True when an entry of the trash is old enough. The age of anything but a deleted run is unknown."""
    if older_than_s <= 0:
        return True
    parsed = parse_trashed(name)
    at = deleted_at(parsed[1]) if parsed else None
    return at is not None and now - at >= older_than_s


@contextlib.contextmanager
def _opened(path: Path, *, follow: bool) -> Iterator[int]:
    """An open folder, by its descriptor; without `follow` a link in its place is refused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise ActionError(f"{path} is a symbolic link; nothing was changed: remove the link") from error
        raise
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _workspace_and_trash(output: OutputDir) -> Iterator[tuple[int, int]]:
    """Both folders, open; they are on one file system, so a rename between them moves no data."""
    with _opened(output.path, follow=True) as workspace, _opened(output.trash, follow=False) as trash:
        if os.fstat(workspace).st_dev != os.fstat(trash).st_dev:
            raise ActionError(
                f"{output.trash} and {output.path} are on different file systems; nothing was changed: move the trash "
                "away or unmount it"
            )
        yield workspace, trash


def _move_to_trash(output: OutputDir, run: RunDir) -> Path:
    stamp = time.strftime(_STAMP_FORMAT, time.gmtime())
    lies, number = output.trashed(run.run_id, stamp), 1
    with _workspace_and_trash(output) as (workspace, trash):
        if reason := refusal(output.path, run.path):
            raise LayoutError(reason)  # it changed while its users released it
        while os.path.lexists(lies):
            number += 1
            lies = output.trashed(run.run_id, f"{stamp}-{number:03}")
        os.rename(run.run_id, lies.name, src_dir_fd=workspace, dst_dir_fd=trash)
        if not is_folder_at(lies.name, trash):
            os.rename(lies.name, run.run_id, src_dir_fd=trash, dst_dir_fd=workspace)
            raise ActionError(f"{run.path} is no longer a folder; nothing was deleted")
    return lies


def _in_trash(output: OutputDir, run_id: str) -> Path | None:
    stamps = [stamp for name, stamp in list_trash(output.path) if name == run_id]
    return output.trashed(run_id, stamps[-1]) if stamps else None


def parse_trashed(name: str) -> tuple[str, str] | None:
    """`run_a.20260102T030405Z` -> ("run_a", "20260102T030405Z"); anything else -> None."""
    run_id, _, stamp = name.rpartition(".")
    try:
        return (check_run_id(run_id), stamp) if stamp else None
    except LayoutError:
        return None
