"""Trouble of a whole file system: judged, held and told. Faults and the looks at file systems are injected."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_rl.contract import files
from prime_rl.contract.files import NotWritten, disk_trouble, find_trouble, held, held_async, holding
from prime_rl.contract.status import Status, StatusWriter, read_status

FULL = {"f_bfree": 3, "f_bavail": 3}
WELL = {"f_bfree": 10**6, "f_bavail": 10**6}
# In the order of the tuple.
FIELDS = ["f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail"]
FIELDS += ["f_files", "f_ffree", "f_favail", "f_flag", "f_namemax"]
Look = Callable[..., None]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Look:
    """Sets what statvfs reports, of the workspace (`tmp_path`) and of folders below it by name."""

    def set_to(**by_name: dict[str, int]) -> None:
        def statvfs(path: Path | str) -> os.statvfs_result:
            values = {"f_frsize": 4096, "f_blocks": 10**7, "f_files": 1000, "f_favail": 10, "f_flag": 0, **WELL}
            values |= by_name.get("workspace", {}) | by_name.get(Path(path).name, {})
            return os.statvfs_result([values.get(name, 0) for name in FIELDS])

        monkeypatch.setattr(os, "statvfs", statvfs)

    (tmp_path / "run_a" / "broadcast").mkdir(parents=True)
    set_to()
    return set_to


def met(number: int, workspace: Path, path: str = "") -> str | None:
    run = workspace / "run_a"
    return disk_trouble(OSError(number, os.strerror(number), str(run / path) if path else None), workspace, run)


def test_each_trouble_names_the_file_system_and_what_to_do(tmp_path: Path, look: Look) -> None:
    assert find_trouble(tmp_path) is None and find_trouble(tmp_path / "missing") is None
    look(workspace=FULL)
    text = find_trouble(tmp_path) or ""
    assert text.startswith("no space left on ") and ": 12,288 bytes free; free some, training continues by" in text
    assert met(errno.ENOSPC, tmp_path) == text
    assert (met(errno.EDQUOT, tmp_path) or "").startswith("disk quota used up on ")
    look(workspace={"f_favail": 0})
    assert (find_trouble(tmp_path) or "").startswith("no inodes left on ") and met(errno.ENOSPC, tmp_path)
    look(workspace={"f_files": 0, "f_favail": 0})
    assert find_trouble(tmp_path) is None, "a file system that counts no inodes"
    look(workspace={"f_flag": os.ST_RDONLY})
    assert (find_trouble(tmp_path) or "").endswith(
        " is mounted read-only: make it writable, training continues by itself"
    )
    assert met(errno.EROFS, tmp_path) == find_trouble(tmp_path)


def test_what_a_look_does_not_show_is_known_by_the_error(tmp_path: Path, look: Look) -> None:
    """A file that is larger than what is free; a quota of the user."""
    assert find_trouble(tmp_path) is None
    assert (met(errno.ENOSPC, tmp_path) or "").partition(": ")[2].startswith("4,096,000,000 bytes free; free some")
    assert met(errno.EACCES, tmp_path) is None and met(errno.EFBIG, tmp_path) is None
    assert disk_trouble(ValueError("x"), tmp_path, tmp_path / "run_a") is None


@pytest.mark.parametrize("own", [{"f_blocks": 100}, {"f_files": 10}, {"f_flag": os.ST_RDONLY}])
def test_a_limit_that_only_a_runs_folder_has_is_its_own(tmp_path: Path, look: Look, own: dict[str, int]) -> None:
    look(broadcast=own)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        assert met(number, tmp_path, "broadcast/.step_1.x.tmp/adapter") is None
        assert met(number, tmp_path, "metrics/trainer.jsonl") is not None, "which the rest of the run does not have"
    look(run_a=own)
    assert met(errno.ENOSPC, tmp_path) is None


def test_an_io_error_is_of_all_when_the_workspace_takes_no_byte(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert met(errno.EIO, tmp_path) is None, "a bad block of one run"

    def fails(*args: object, **values: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tempfile, "TemporaryFile", fails)
    assert (met(errno.EIO, tmp_path) or "").startswith("input/output error on ")


class Flaky:
    """Fails as often as it is told, then works."""

    def __init__(self, error: Exception, times: int) -> None:
        self._error, self.left, self.seen = error, times, list[str | None]()

    def __call__(self) -> str:
        if self.left:
            self.left -= 1
            raise self._error
        return "written"

    def gives_up(self, wait_s: float) -> bool:
        self.seen.append(holding())
        assert wait_s == files.RETRY_S
        return False


def test_a_write_is_tried_until_it_succeeds_and_said_meanwhile(tmp_path: Path, look: Look) -> None:
    look(workspace=FULL)
    write = Flaky(OSError(errno.ENOSPC, "No space left on device"), times=3)
    assert held(write, tmp_path / "run_a", write.gives_up) == "written"
    assert write.seen == [find_trouble(tmp_path)] * 3 and holding() is None
    with pytest.raises(NotWritten, match=r"no space left on .* bytes free"):
        held(Flaky(OSError(errno.ENOSPC, ""), times=1), tmp_path / "run_a", lambda wait_s: True)
    with pytest.raises(PermissionError):
        held(Flaky(PermissionError(errno.EACCES, "x"), times=1), tmp_path / "run_a", write.gives_up)
    assert holding() is None


async def test_a_held_task_can_be_cancelled(tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RETRY_S", 0.001)
    write = Flaky(OSError(errno.ENOSPC, "No space left on device"), times=3)
    assert await held_async(write, tmp_path / "run_a") == "written"
    task = asyncio.ensure_future(held_async(Flaky(OSError(errno.EROFS, ""), times=1 << 60), tmp_path / "run_a"))
    while not (holding() or "").endswith("training continues by itself"):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert holding() is None


def test_a_status_tells_what_its_process_holds(tmp_path: Path, look: Look) -> None:
    look(workspace=FULL)
    writer = StatusWriter(tmp_path / "status.json", Status(state="training"))
    shown: list[Status | None] = []

    def gives_up(wait_s: float) -> bool:
        writer.update(state="waiting")
        shown.append(read_status(writer.path, Status))
        return False

    held(Flaky(OSError(errno.ENOSPC, ""), times=1), tmp_path / "run_a", gives_up)
    writer.close(state="stopped")
    (status,) = shown
    trouble = find_trouble(tmp_path)
    assert status and (status.disk, status.waiting_on) == (trouble, f"the disk ({trouble})")
    after = read_status(writer.path, Status)
    assert after and (after.disk, after.waiting_on, after.state) == (None, None, "stopped")
