from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
from watchdog.observers.inotify import InotifyObserver
from watchdog.observers.polling import PollingObserver

from prime_rl.contract.files import write_atomic
from prime_rl.utils.watch import Watcher, events_come, file_system_type

# Far above any delay of the system: a test that needs it fails, it does not pass slowly.
LONG_S = 60.0
MOUNTS = """\
22 1 254:0 / / rw - ext4 /dev/root rw
40 22 0:35 / /data rw,relatime shared:1 - nfs4 server:/x rw
41 40 0:36 / /data/fast\\040disk rw - xfs /dev/sdb rw
42 22 0:37 / /blob rw - fuse.blobfuse2 blob rw
"""


@pytest.mark.parametrize("kind", ["native", "polling"])
def test_a_change_wakes_the_waiter(tmp_path: Path, kind: str) -> None:
    with Watcher([tmp_path], rescan_s=LONG_S, kind=kind) as watcher:  # type: ignore[arg-type]
        assert watcher.wait(), "a folder that is new to the watcher is looked at once"
        write_atomic(tmp_path / "orch.toml", "x")
        assert watcher.wait()


def test_reading_a_file_is_no_change(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", "x")
    with Watcher([tmp_path], rescan_s=0.3, kind="native") as watcher:
        watcher.wait()
        (tmp_path / "f").read_text()
        assert not watcher.wait()


def test_the_rescan_comes_without_events(tmp_path: Path) -> None:
    with Watcher([tmp_path], rescan_s=0.05) as watcher:
        watcher.wait()
        assert not watcher.wait()


def test_folders_come_and_go(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    with Watcher([first, second], rescan_s=LONG_S, kind="native") as watcher:
        watcher.wait()
        second.mkdir()
        watcher.watch([second])
        assert watcher.wait()
        write_atomic(second / "x", "1")
        assert watcher.wait()
        watcher.watch([second])
        while watcher.wait(0.2):  # one write is several events
            pass
        write_atomic(first / "x", "1")
        assert not watcher.wait(0.2)


def test_out_of_watches_falls_back_to_polling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "inotify watch limit reached")

    monkeypatch.setattr(InotifyObserver, "schedule", full)
    with caplog.at_level(logging.WARNING), Watcher([tmp_path], rescan_s=LONG_S, kind="native") as watcher:
        watcher.wait()
        assert isinstance(watcher._observer, PollingObserver)
        write_atomic(tmp_path / "x", "1")
        assert watcher.wait()
    assert len([r for r in caplog.records if "polling" in r.message]) == 1


def test_wake_ends_a_wait(tmp_path: Path) -> None:
    with Watcher([], rescan_s=LONG_S) as watcher:
        watcher.wake()
        assert watcher.wait()


@pytest.mark.parametrize(
    ("folder", "kind", "events"),
    [
        ("/home", "ext4", True),
        ("/data/x", "nfs4", False),
        ("/data/fast disk/x", "xfs", True),
        ("/blob/x", "fuse.blobfuse2", False),
        ("/database", "ext4", True),
    ],
)
def test_the_mount_table_decides(tmp_path: Path, folder: str, kind: str, events: bool) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    assert file_system_type(Path(folder), table) == kind
    assert events_come(Path(folder), table) is events
