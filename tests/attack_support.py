"""What the owner of a run may put in the place of its files, and how one sees that nothing was harmed.

The files are not listed here: they are those that the layout names and those that a whole run has on disk.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from prime_rl.contract.layout import RUN_FOLDERS, RunDir, stable_marker

# Far more than any look takes on a machine with ten times more to do than it can.
PATIENCE_S = 240.0
SPARSE_BYTES = 2 << 30
_NOBODY = 65534
T = TypeVar("T")
STEP = 1  # of the files of a run that have a step in their path

_IN_ACCESS, _IN_MODIFY, _IN_OPEN, _IN_CREATE, _IN_DELETE = 0x1, 0x2, 0x20, 0x100, 0x200
_EVENT = struct.Struct("iIII")


class Outside:
    """A folder outside the workspace that must never be opened. `touched` names what was opened or changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0, "inotify is not there"
        self._names: dict[int, str] = {}

    def copy(self, name: str, original: Path | None) -> Path:
        """Something to lead to: what `original` is, else some text."""
        path = self.folder / name
        if original is not None and original.is_dir():
            shutil.copytree(original, path)
        elif original is not None:
            shutil.copyfile(original, path)
        else:
            path.write_text("precious")
        return path

    def guard(self) -> None:
        """From now on it is noticed when anything in it is opened."""
        for place, _, names in os.walk(self.folder):
            for each in (place, *(os.path.join(place, name) for name in names)):
                mask = _IN_ACCESS | _IN_MODIFY | _IN_OPEN | _IN_CREATE | _IN_DELETE
                number = self._libc.inotify_add_watch(self._fd, each.encode(), mask)
                assert number >= 0, f"{each} cannot be watched: {os.strerror(ctypes.get_errno())}"
                self._names[number] = each
        self.touched()  # os.walk has just opened it

    def touched(self) -> list[str]:
        found = set()
        with suppress(BlockingIOError):
            while data := os.read(self._fd, 1 << 16):
                while data:
                    number, _, _, size = _EVENT.unpack_from(data)
                    data = data[_EVENT.size + size :]
                    found.add(self._names.get(number, "?"))
        return sorted(found)

    def close(self) -> None:
        os.close(self._fd)


Attack = Callable[[Path, Path], None]  # (what is attacked and is not there any more, something outside)


def _unreadable(path: Path, outside: Path) -> None:
    if outside.is_dir():
        shutil.copytree(outside, path)
    else:
        shutil.copyfile(outside, path)
    path.chmod(0)


def _sparse(path: Path, outside: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE_BYTES)


ATTACKS: dict[str, Attack] = {
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": lambda path, outside: os.mknod(path, 0o666 | stat.S_IFSOCK),
    "folder": lambda path, outside: path.mkdir(),
    "dangling link": lambda path, outside: path.symlink_to(outside.with_name("nowhere")),
    "link outside": lambda path, outside: path.symlink_to(outside),
    "link to itself": lambda path, outside: path.symlink_to(path),
    "sparse file": _sparse,
    "unreadable": _unreadable,
}


def run_paths(run: RunDir) -> list[Path]:
    """All that a run may hold, relative to it, files and folders: what the layout names, and what this one has."""
    found = {run.path / name for name in RUN_FOLDERS}
    for name, member in vars(RunDir).items():
        if isinstance(member, property):
            value = getattr(run, name)
        elif callable(member) and not name.startswith("_"):
            value = member(run, "reward.py" if name == "data_file" else STEP)
        else:
            continue
        if isinstance(value, Path):
            found |= {value, *([stable_marker(value)] if name.endswith("_dir") else [])}
    found |= {path for path in run.path.rglob("*") if not path.name.startswith(".")}
    return sorted(path.relative_to(run.path) for path in found if path != run.path)


def attack(run: RunDir, target: Path, kind: str, outside: Outside) -> None:
    """Put something else at `target` (relative to the run)."""
    path = run.path / target
    decoy = outside.copy(f"{run.run_id}-{'-'.join(target.parts)}", path if path.exists() else None)
    take_away(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    ATTACKS[kind](path, decoy)


def take_away(path: Path) -> None:
    with suppress(OSError):
        path.chmod(0o700)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def finishes(what: str, call: Callable[[], T], unblock: Path | None = None) -> T:
    """What `call` returns or raises, unless it hangs: then the test fails by name.

    `unblock` is the pipe that it may wait at: the other end is opened, so that the thread can end.
    """
    result: list[T] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if thread.is_alive():
        if unblock is not None and unblock.is_fifo():
            os.close(os.open(unblock, os.O_RDWR | os.O_NONBLOCK))
        raise AssertionError(f"{what} hangs")
    if error:
        raise error[0]
    return result[0]


@contextmanager
def as_ordinary_user(folder: Path) -> Iterator[None]:
    """Meanwhile this process owns `folder` and may do no more than another user: root may read whatever it finds."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def being_replaced(path: Path, outside: Path) -> Iterator[None]:
    """Meanwhile `path` is in turn a file, a pipe, a link outside, a socket: as quickly as this machine can."""
    stop = threading.Event()
    content = path.read_bytes() if path.is_file() else b"{}"
    spare = path.with_name(f".{path.name}.spare")

    def swap() -> None:
        while not stop.is_set():
            for kind in ("file", "pipe", "link outside", "file", "socket"):
                with suppress(OSError):  # its folder may be removed meanwhile
                    if kind == "file":
                        spare.write_bytes(content)
                    else:
                        ATTACKS[kind](spare, outside)
                    os.rename(spare, path)

    thread = threading.Thread(target=swap, name=f"replaces {path.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
