"""Files that another process reads, or has written; and the trouble of the file system that has them.

A file is written under a temporary name in its own folder, synced, and renamed, so a reader sees the old content or the
new one and never a part. Append-only metrics have one writer and whole lines.

The owner of a run may put anything into its folder. So every file below a workspace is opened by `open_file`: never a
link (below a run, no folder on the way either), never waiting, and only when it is a regular file. What is read has a
limit.

No space, no inodes, no quota, read-only, or an I/O error of the whole file system is no run's fault, so nothing is
evicted and nothing ends for it: what is to be written is held and tried again until the file system takes it (`held`).
An error that only a run's folder has (a disk or a quota of its own) is the run's. Readers see the trouble in the status
files, and where these cannot be written, with `find_trouble`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from prime_rl.contract.layout import RUN_FOLDERS, RUN_PREFIX, stable_marker
from prime_rl.utils.watch import mount_of

# Below any person's notice and above the cost of one look at a file system (microseconds).
DEFAULT_POLL_S = 0.05
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}
# NOFOLLOW: the last component of the path must not be a link. NONBLOCK: opening a pipe without a writer does not wait.
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES = 1 << 20
# Of a folder that is removed: more are a trap, which takes memory and time.
MAX_LEVELS = 50_000
# What a write that failed has left, and how it is removed.
_left: dict[Path, Callable[[Path], None]] = {}
T = TypeVar("T")
# By what others wrote: not of its type, nested without end, or not UTF-8, which msgspec does not make its own error.
UNDECODABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class WaitTimeout(TimeoutError):
    """A wait that reached its deadline; the message names what was waited for."""


class WaitStopped(RuntimeError):
    """A wait that was stopped; the message names what was waited for."""


class FileRefused(OSError):
    """In the place of a file (or of a folder of a run) is something else, or the file is too large.

    `str()` is a sentence: the path, what was found there, what to do. `strerror` is its rest after the path.
    """

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(errno.EINVAL, problem, str(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


# Opening


def open_file(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644, *, follow_links: bool = False) -> int:
    """Descriptor of the regular file at `path`, opened with `flags`; never waits.

    Neither the file nor, below a run, any folder on the way to it may be a link. `follow_links` is for files that a
    person names on a command line, and changes nothing below a run. Raises FileRefused unless it is a regular file,
    else OSError as `os.open` does.
    """
    if follow_links and not is_of_a_run(path):
        return _regular(os.open(path, (flags | _CAREFUL) & ~os.O_NOFOLLOW, mode), path, flags)
    with _placed(path) as (folder, name):
        try:
            fd = os.open(name, flags | _CAREFUL, mode, dir_fd=folder)
        except OSError as error:
            raise _explained(error, path) from None
    return _regular(fd, path, flags)


def open_append(path: Path) -> BinaryIO:
    """The regular file at `path`, made when it is not there, to append to. Raises as `open_file` does."""
    return os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")


def open_lock(path: Path) -> int:
    """Descriptor of the file at `path`, made when it is not there, to lock. Raises as `open_file` does.

    Whoever may read a file may lock it, so this one is for its owner only, also where it was for all.
    """
    fd = open_file(path, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(PermissionError):  # it is another account's, which this one may write
        os.fchmod(fd, 0o600)
    return fd


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor after the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def file_problem(path: Path) -> str | None:
    """Why `path` is refused in the place of a file; None when it is a regular file, or not there."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) else str(_refusal(path, mode, "file"))


def make_folder(path: Path) -> None:
    """Make `path` unless it is there; not its parents, so a run that was deleted is not made again. Raises OSError.

    Below a run it must be a real folder, in real folders: else FileRefused.
    """
    os.close(_open_folder(_way(path), make=True))


def _regular(fd: int, path: Path, flags: int) -> int:
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise _refusal(path, mode, "file")
    if flags & (os.O_WRONLY | os.O_RDWR):
        os.set_blocking(fd, True)  # it may become the output of a child
    return fd


def is_own(fd: int) -> bool:
    """True when an open file belongs to this account, and nobody else may write it: so it may be run."""
    facts = os.fstat(fd)
    return facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & 0o022


def is_of_a_run(path: Path) -> bool:
    """True when `path` is below a folder that a run has."""
    return len(_way(path)) > 1


def _way(path: Path) -> tuple[str, ...]:
    """A run's folder and then each name below it; the whole path of what is not below a folder that a run has."""
    parts = path.parts
    for place in reversed(range(len(parts) - 1)):
        if parts[place + 1] in RUN_FOLDERS and parts[place].startswith(RUN_PREFIX):
            return os.path.join(*parts[: place + 1]), *parts[place + 1 :]
    return (str(path),)


@contextlib.contextmanager
def _placed(path: Path) -> Iterator[tuple[int | None, str]]:
    """The open folder that has `path`, and its name there; None and the whole path for what is not of a run."""
    *folders, name = _way(path)
    # The folder of any other file was made by the owner of the workspace.
    folder = _open_folder(tuple(folders)) if folders else None
    try:
        yield folder, name
    finally:
        if folder is not None:
            os.close(folder)


def _open_folder(way: tuple[str, ...], *, make: bool = False, mode: int = 0o777) -> int:
    """Descriptor of a folder, to open files in; `make` makes the last part, with `mode`."""
    folder: int | None = None
    flags = _FOLDER | os.O_NOFOLLOW if len(way) > 1 else _FOLDER
    for number, name in enumerate(way, start=1):
        try:
            if make and number == len(way):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, mode, dir_fd=folder)
            inner = os.open(name, flags, dir_fd=folder)
        except OSError as error:
            raise _explained(error, Path(*way[:number]), "folder") from None
        finally:
            if folder is not None:
                os.close(folder)
        folder = inner
    assert folder is not None
    return folder


def _explained(error: OSError, path: Path, wanted: str = "file") -> OSError:
    """`error` with the whole path, or FileRefused for what is found instead of a file or folder.

    Raise it `from None`: an error that is its own cause keeps all frames below it, and what they have read, in memory.
    """
    error.filename = str(path)
    with contextlib.suppress(OSError):
        mode = os.lstat(path).st_mode
        unfit = not stat.S_ISREG(mode) if wanted == "file" else stat.S_ISLNK(mode)
        if unfit and error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR, errno.ENODEV):
            return _refusal(path, mode, wanted)
    return error


def _refusal(path: Path, mode: int, wanted: str) -> FileRefused:
    found = _KINDS.get(stat.S_IFMT(mode), "something unknown")
    remedy = "; remove it" if is_of_a_run(path) else ""
    return FileRefused(path, f"is {found}: must be a regular {wanted}{remedy}")


# Reading


def read_file(path: Path, *, limit: int, follow_links: bool = False) -> bytes:
    """The content of a regular file of at most `limit` bytes; never reads more.

    The file is opened once and judged as it was opened, so replacing it meanwhile changes nothing. Raises
    FileNotFoundError, FileRefused (no regular file, or too large) or another OSError. `follow_links`: see `open_file`.
    """
    with closing(open_file(path, follow_links=follow_links)) as fd:
        size = os.fstat(fd).st_size
        # One byte more than allowed, so a file that grows meanwhile is refused.
        data = _read(fd, limit + 1) if size <= limit else b""
    if max(size, len(data)) > limit:
        raise FileRefused(path, f"has {max(size, len(data))} bytes, expected at most {limit}")
    return data


def read_json(path: Path, kind: type[T], *, limit: int) -> T | None:
    """The value of `kind` in a file of at most `limit` bytes; None when it is missing, damaged or cannot be read."""
    try:
        return msgspec.json.decode(read_file(path, limit=limit), type=kind)
    except (OSError, *UNDECODABLE):
        return None


def read_text(path: Path, *, limit: int = 1_000_000) -> str | None:
    """Text of `path`, at most `limit` bytes of it, or None when it is not there. Bad UTF-8 is replaced, not raised.

    Raises FileRefused unless it is a regular file, or another OSError.
    """
    try:
        with closing(open_file(path)) as fd:
            return _read(fd, limit).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_end(path: Path, limit: int) -> bytes:
    """The last bytes of a growing file, at most `limit`; b"" when it is not there. Raises FileRefused or OSError."""
    try:
        with closing(open_file(path)) as fd:
            os.lseek(fd, max(0, os.fstat(fd).st_size - limit), os.SEEK_SET)
            return _read(fd, limit)
    except (FileNotFoundError, NotADirectoryError):
        return b""


def _read(fd: int, limit: int) -> bytes:
    """From where `fd` stands to its end, at most `limit` bytes; in memory once, unless the file grows meanwhile."""
    chunks: list[bytes] = []
    size = max(0, os.fstat(fd).st_size - os.lseek(fd, 0, os.SEEK_CUR)) + 1
    while limit and (chunk := os.read(fd, min(limit, size))):
        chunks.append(chunk)
        limit -= len(chunk)
        size = _CHUNK_BYTES
    return b"".join(chunks)


# Writing


def write_atomic(
    path: Path,
    data: bytes | str,
    *,
    mode: int = 0o644,
    durable: bool = True,
    exclusive: bool = False,
    modified_ns: int | None = None,
) -> None:
    """Write `data` to `path` so that no reader ever sees a part of it. What stood there (a link, a pipe) is replaced.

    `durable` waits until the disk has it; without that a power cut may leave an empty file. `exclusive` raises
    FileExistsError when `path` is there already: of several writers, also on several machines, one succeeds.
    `modified_ns` is the time that the file gets, default now.

    Makes the parent folder but not its parents, so a run folder that was deleted meanwhile is not made again.
    Raises OSError (disk full, no permission, folder gone, FileRefused for a folder that is a link); the old content is
    then still in place and no temporary file is left, or only until the next write there (a read-only disk).
    """
    payload = data.encode() if isinstance(data, str) else data
    folder = _open_folder(_way(path.parent), make=True)
    tmp = f".{path.name}.{os.urandom(6).hex()}.tmp"
    try:
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(payload)
                os.fchmod(fd, mode)
                file.flush()
                if modified_ns is not None:
                    os.utime(fd, ns=(modified_ns, modified_ns))
                if durable:
                    os.fsync(fd)
            if exclusive:
                os.link(tmp, path.name, src_dir_fd=folder, dst_dir_fd=folder)  # a rename replaces what is there
                os.unlink(tmp, dir_fd=folder)
            else:
                os.rename(tmp, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            _discard(path.with_name(tmp), remove_file)
            raise
    except OSError as error:
        raise _explained(error, path) from None
    finally:
        os.close(folder)
    _discard_left(path)


def append_line(path: Path, line: str) -> None:
    """Append one line in a single write. The file must have one writer. Makes the parent folder, not its parents.

    A part of a line that a killed writer left is ended first, so it never spoils the next. Raises OSError, and leaves
    no part of the line then.
    """
    make_folder(path.parent)
    with os.fdopen(open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering=0) as file:
        is_torn = file.seek(0, os.SEEK_END) > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
        data, size, num_taken = b"\n" * is_torn + line.encode() + b"\n", file.seek(0, os.SEEK_END), 0
        try:
            while num_taken < len(data):  # a disk that gets full writes a part and fails only at the next write
                num_taken += file.write(data[num_taken:])
        except OSError:
            if file.seek(0, os.SEEK_END) == size + num_taken:
                file.truncate(size)
            raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which ends with this process. Raises BlockingIOError when another process has it."""
    with closing(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def staged_dir(final: Path) -> Iterator[Path]:
    """Fill a temporary folder beside `final`, then rename it into place; `final` must not be complete yet.

    The parent must exist: a run folder that was deleted meanwhile is not made again (FileNotFoundError). Below a run it
    must be a real folder (FileRefused). A leftover of an earlier, incomplete attempt at `final` is removed.
    """
    tmp = final.with_name(f".{final.name}.{os.urandom(6).hex()}.tmp")
    fd = _open_folder(_way(tmp), make=True, mode=0o700)
    # By its descriptor: the owner of a run may move it, and leave a link to others' files in its place.
    by_fd = Path(f"/proc/{os.getpid()}/fd/{fd}")
    try:
        staged = by_fd if is_of_a_run(final) and os.path.isdir(by_fd) else tmp
        staged.chmod(0o700)
        _check_own(fd, tmp, staged)
        staged.chmod(0o755)
        yield staged
        for folder, _, names in os.walk(staged):
            for path in (Path(folder, name) for name in names):
                if path.stat().st_size:  # an empty file is nothing but its name, which the folder holds
                    sync_path(path)
        sync_path(staged)
        remove(final)
        with _placed(final) as (parent, name):
            os.rename(tmp.name if parent is not None else tmp, name, src_dir_fd=parent, dst_dir_fd=parent)
        sync_path(final.parent)
    except BaseException:
        _discard(tmp, remove)
        raise
    finally:
        os.close(fd)
    _discard_left(final)


def mark_stable(step_dir: Path, *, sync: bool = True) -> None:
    """Write the `STABLE` marker: the folder is complete from now on. `staged_dir` syncs it by itself."""
    os.close(open_file(stable_marker(step_dir), os.O_WRONLY | os.O_CREAT))
    if sync:
        sync_path(step_dir)


def remove(path: Path) -> None:
    """Remove a folder with all in it, or whatever else is at `path`; a link itself, not what it leads to.

    Below a run no folder on the way may be a link, nor become one meanwhile. Raises FileRefused for that, else OSError.
    """
    with contextlib.suppress(FileNotFoundError), _placed(path) as (folder, name):
        try:
            remove_at(name, folder)
        except OSError as error:
            raise _explained(error, path) from None


def put_away(path: Path) -> None:
    """Give a folder a hidden name beside it, which ends in ".old": at once, however much there is to remove later.

    Raises as `remove`.
    """
    with contextlib.suppress(FileNotFoundError), _placed(path) as (folder, name):
        hidden = os.path.join(os.path.dirname(name), f".{path.name}.{os.urandom(6).hex()}.old")
        os.rename(name, hidden, src_dir_fd=folder, dst_dir_fd=folder)


def remove_file(path: Path) -> None:
    """Remove what is at `path`, unless it is a folder: that is not ours, and may hold any number of files.

    Raises as `remove`.
    """
    with contextlib.suppress(FileNotFoundError, IsADirectoryError), _placed(path) as (folder, name):
        os.unlink(name, dir_fd=folder)


def remove_at(name: str, folder: int | None) -> None:
    """Remove what an open folder has under `name`, as `remove`; also what is swapped for a link meanwhile."""
    if is_folder_at(name, folder):
        _remove_tree(name, folder)
    else:
        os.unlink(name, dir_fd=folder)


def _remove_tree(name: str, folder: int | None) -> None:
    """Remove a folder of any depth with two descriptors; `shutil.rmtree` takes one, and a call, for each level."""
    here = os.open(name, _LISTED, dir_fd=folder)
    # Of the folders on the way to `here`: the name of each in the one above it, which is this one.
    above: list[tuple[str, tuple[int, int]]] = []
    try:
        left = [_listed(here)]
        while left[-1] or above:
            if not left[-1]:
                done, outer = above.pop()
                here = _exchanged(here, "..")
                if _identity(here) != outer:
                    raise OSError(errno.ESTALE, "was moved while it was removed", done)
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(done, dir_fd=here)
                left.pop()
                continue
            each, is_folder = left[-1].pop()
            if is_folder:
                with contextlib.suppress(OSError):  # an empty one needs not be entered, nor may it let us
                    os.rmdir(each, dir_fd=here)
                    continue
                if len(above) >= MAX_LEVELS:
                    raise OSError(errno.ENAMETOOLONG, f"is more than {MAX_LEVELS:,} folders deep", each)
                try:
                    outer, here = _identity(here), _exchanged(here, each)
                except FileNotFoundError:  # others may remove it too
                    continue
                above.append((each, outer))
                left.append(_listed(here))
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(each, dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=folder)


def _listed(folder: int) -> list[tuple[str, bool]]:
    """Each name in an open folder, and whether it is a folder's."""
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino


def _exchanged(folder: int, name: str) -> int:
    """Descriptor of the folder `name` of an open one, which is closed; when it fails that one stays open."""
    inner = os.open(name, _LISTED, dir_fd=folder)
    os.close(folder)
    return inner


def is_folder_at(name: str, folder: int | None) -> bool:
    """True when an open folder has a real folder under `name`. Raises FileNotFoundError."""
    return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _discard(temporary: Path, removal: Callable[[Path], None]) -> None:
    """Remove what a write that failed has made; where the disk became read-only, after the next of its folder."""
    try:
        removal(temporary)
        _left.pop(temporary, None)
    except OSError:
        _left[temporary] = removal


def _discard_left(written: Path) -> None:
    """Only in the folder of `written`: what another run, or another thread, has left may be dear to remove."""
    for temporary, removal in list(_left.items()):
        if temporary.parent == written.parent:
            _discard(temporary, removal)


def _check_own(folder: int, path: Path, staged: Path) -> None:
    """Refuse a staging folder that is not the one just made: others could put links there, and have us follow them.

    Its owner is compared with that of a new file in it, as a server of files may give this process another name.
    """
    with closing(os.open(".probe", os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFUL, 0o600, dir_fd=folder)) as probe:
        os.unlink(".probe", dir_fd=folder)
        owners = os.fstat(folder).st_uid, os.fstat(probe).st_uid
    if len(set(owners)) > 1 or os.listdir(staged):
        raise FileRefused(path, "was replaced while it was made")


def sync_path(path: Path) -> None:
    """Bring a file or a folder to the disk. Raises OSError."""
    with closing(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as fd:
        os.fsync(fd)


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
            raise WaitTimeout(f"timed out after {timeout_s:g} s waiting for {what}")
        sleep(poll_s)


logger = logging.getLogger(__name__)

RETRY_S = 1.0
# Less takes no status file.
FULL_BYTES = 64 << 10
# A quota of a folder's own shows as a file system that is smaller than the workspace's.
_SAME_SHARE = 0.9
_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
_holding: dict[object, str] = {}


class NotWritten(RuntimeError):
    """A write that was held until the process was to end; the message has the trouble."""


def find_trouble(workspace: Path) -> str | None:
    """Why nothing can be written to the file system of `workspace`, as far as a look shows it; None: it can be."""
    try:
        room = os.statvfs(workspace)
    except OSError:
        return None
    is_full = _free_bytes(room) < FULL_BYTES or (room.f_files > 0 and room.f_favail == 0)
    number = errno.EROFS if room.f_flag & os.ST_RDONLY else errno.ENOSPC if is_full else None
    return _text(number, workspace, room) if number else None


def disk_trouble(error: Exception, workspace: Path, folder: Path) -> str | None:
    """The trouble of the workspace's file system that caused `error`, met in `folder` below it; None: another cause."""
    if not isinstance(error, OSError) or error.errno not in _ERRORS:
        return None
    path = Path(error.filename) if isinstance(error.filename, str) else folder
    place = next((each for each in (path, *path.parents) if folder in each.parents and each.exists()), folder)
    try:
        is_own = not _is_shared(workspace, place) or (error.errno == errno.EIO and _takes_bytes(workspace))
        return None if is_own else _text(error.errno, workspace, os.statvfs(workspace))
    except OSError:
        return None  # the workspace or the run is gone


def holding() -> str | None:
    """The trouble for which this process holds something that is to be written; None: it holds nothing."""
    return next(iter(list(_holding.values())), None)


def held(write: Callable[[], T], run: Path, gives_up: Callable[[float], bool]) -> T:
    """The result of `write`, called again while the file system of the workspace that `run` is in has trouble.

    `gives_up` sleeps for so many seconds; when it returns true, NotWritten is raised.
    """
    while True:
        try:
            return write()
        except Exception as error:
            trouble = disk_trouble(error, run.parent, run)
            if trouble is None:
                raise
        with _noted(trouble):
            if gives_up(RETRY_S):
                raise NotWritten(trouble)


async def held_async(write: Callable[[], T], run: Path) -> T:
    """As `held`; the wait ends when the task is cancelled."""
    import asyncio  # most processes that import this module need none

    while True:
        try:
            return held(write, run, lambda wait_s: True)
        except NotWritten as error:
            with _noted(str(error)):
                await asyncio.sleep(RETRY_S)


@contextlib.contextmanager
def _noted(trouble: str) -> Iterator[None]:
    key = object()
    _holding[key] = trouble
    logger.warning("holding what is to be written: %s", trouble.partition(":")[0])
    try:
        yield
    finally:
        del _holding[key]


def _is_shared(workspace: Path, place: Path) -> bool:
    """True when both are on one file system, mounted alike and with the same limits."""
    ours, its = os.statvfs(workspace), os.statvfs(place)
    is_limited = its.f_blocks < _SAME_SHARE * ours.f_blocks or its.f_files < _SAME_SHARE * ours.f_files
    is_mounted_alike = not (its.f_flag ^ ours.f_flag) & os.ST_RDONLY
    return os.stat(workspace).st_dev == os.stat(place).st_dev and is_mounted_alike and not is_limited


def _takes_bytes(workspace: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=workspace, buffering=0) as file:
            file.write(b"x")
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def _free_bytes(room: os.statvfs_result) -> int:
    return room.f_frsize * (room.f_bavail if os.geteuid() else room.f_bfree)


def _text(number: int, workspace: Path, room: os.statvfs_result) -> str:
    mount = mount_of(workspace)
    where = f"{mount.source} ({mount.point})" if mount else str(workspace)
    has_inodes = room.f_favail > 0 or room.f_files == 0
    problem = {
        errno.EROFS: f"{where} is mounted read-only: make it writable",
        errno.EIO: f"input/output error on {where}: check the disk",
        errno.EDQUOT: f"disk quota used up on {where}: free some",
        errno.ENOSPC: f"no space left on {where}: {_free_bytes(room):,} bytes free; free some"
        if has_inodes
        else f"no inodes left on {where}: remove some files",
    }[number]
    return f"{problem}, training continues by itself"
