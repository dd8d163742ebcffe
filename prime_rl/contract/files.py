"""How the project writes and reads files that another process reads.

A file is written under a temporary name in its own folder, synced, and renamed, so a reader sees the old content or the
new one and never a part. Append-only metrics have one writer and whole lines. Nothing here knows what a file means.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prime_rl.contract.layout import stable_marker

# Below any person's notice and above the cost of one look at a file system (microseconds).
DEFAULT_POLL_S = 0.05


class WaitTimeout(TimeoutError):
    """A wait that reached its deadline; the message names what was waited for."""


class WaitStopped(RuntimeError):
    """A wait that was told to stop; the message names what was waited for."""


def write_atomic(
    path: Path, data: bytes | str, *, mode: int = 0o644, durable: bool = True, exclusive: bool = False
) -> None:
    """Write `data` to `path` so that no reader ever sees a part of it.

    `durable` waits until the disk has it; without that a power cut may leave an empty file. `exclusive` raises
    FileExistsError when `path` is there already: of several writers, also on several machines, one succeeds.

    Makes the parent folder but not its parents, so a run folder that was deleted meanwhile is not made again.
    Raises OSError (disk full, no permission, folder gone); the old content is then still in place and no temporary
    file is left.
    """
    path.parent.mkdir(exist_ok=True)
    payload = data.encode() if isinstance(data, str) else data
    fd, tmp = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(payload)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(tmp, mode)
        if exclusive:
            os.link(tmp, path)  # a rename replaces what is there
            os.unlink(tmp)
        else:
            os.rename(tmp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp)
        raise


def read_text(path: Path, *, limit: int = 1_000_000) -> str | None:
    """Text of `path`, at most `limit` bytes of it, or None when it is not there. Bad UTF-8 is replaced, not raised."""
    try:
        with path.open("rb") as file:
            return file.read(limit).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def append_line(path: Path, line: str) -> None:
    """Append one line in a single write. The file must have one writer. Makes the parent folder, not its parents.

    A part of a line that a killed writer left is ended first, so it never spoils the next. Raises OSError.
    """
    path.parent.mkdir(exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        is_torn = file.seek(0, os.SEEK_END) > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
        data = b"\n" * is_torn + line.encode() + b"\n"
        # A disk that gets full takes a part and says so only the next time.
        while data:
            data = data[file.write(data) :]


@contextlib.contextmanager
def staged_dir(final: Path) -> Iterator[Path]:
    """Fill a temporary folder beside `final`, then rename it into place; `final` must not be complete yet.

    The parent must exist: a run folder that was deleted meanwhile is not made again (FileNotFoundError).
    A leftover of an earlier, incomplete attempt at `final` is removed.
    """
    tmp = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
    tmp.chmod(0o755)
    try:
        yield tmp
        for folder, _, names in os.walk(tmp):
            for path in (Path(folder, name) for name in names):
                if path.stat().st_size:  # an empty file is nothing but its name, which the folder holds
                    _sync(path)
        _sync(tmp)
        if final.exists():
            shutil.rmtree(final)
        os.rename(tmp, final)
        _sync(final.parent)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def mark_stable(step_dir: Path, *, sync: bool = True) -> None:
    """Write the `STABLE` marker: the folder is complete from now on. `staged_dir` syncs it by itself."""
    marker = stable_marker(step_dir)
    marker.touch()
    if sync:
        _sync(step_dir)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def wait_for(
    condition: Callable[[], bool],
    what: str,
    *,
    timeout_s: float | None = None,
    stop: Callable[[], bool] = lambda: False,
    poll_s: float = DEFAULT_POLL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Block until `condition()` holds.

    `what` is the sentence that names what is waited for, e.g. "run_a to be released by the trainer".
    Raises WaitTimeout at the deadline and WaitStopped when `stop()` becomes true, both naming `what`.
    """
    deadline = None if timeout_s is None else clock() + timeout_s
    while not condition():
        if stop():
            raise WaitStopped(f"stopped while waiting for {what}")
        if deadline is not None and clock() >= deadline:
            raise WaitTimeout(f"waited {timeout_s:g} s in vain for {what}")
        sleep(poll_s)
