"""The watcher: hints for every kind of change, in both ways of watching, and what it does at the limits of a system."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_rl.contract.files import wait_for, write_atomic
from prime_rl.utils import watch
from prime_rl.utils.watch import Backend, NativeEvents, ObserverKind, OnChange, Watcher
from tests.patience import PATIENCE_S

# Far above any delay of the system: a test that needs it fails, it does not pass slowly.
POLL_S = 0.02
KINDS: list[ObserverKind] = ["native", "polling"]


def watcher_of(*folders: Path, kind: ObserverKind = "native", **arguments: object) -> Watcher:
    return Watcher(folders, **{"rescan_s": PATIENCE_S, "kind": kind, "poll_s": POLL_S} | arguments)  # type: ignore[arg-type]


def quiet(watcher: Watcher) -> None:
    """Take in all hints that are under way: one write is several events."""
    while watcher.wait(4 * POLL_S):
        pass
    watcher.take_changed()


def hinted(watcher: Watcher, folder: Path) -> bool:
    """Whether a hint about `folder` comes."""
    seen: set[Path] = set()

    def look() -> bool:
        seen.update(watcher.take_changed() or ())
        return folder in seen

    wait_for(look, f"a hint about {folder}", timeout_s=PATIENCE_S)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_folder_is_looked_at_and_every_change_in_it_is_reported(tmp_path: Path, kind: ObserverKind) -> None:
    file = tmp_path / "orch.toml"
    changes: list[Callable[[], object]] = [
        lambda: write_atomic(file, "x"),
        lambda: file.write_text("in place"),
        lambda: file.rename(tmp_path / "other"),
        lambda: (tmp_path / "other").unlink(),
        lambda: (tmp_path / "folder").mkdir(),
        lambda: (tmp_path / "folder").rmdir(),
    ]
    with watcher_of(tmp_path, kind=kind) as watcher:
        assert watcher.wait() and watcher.take_changed() == {tmp_path}, "what landed before is found by a look"
        for change in changes:
            quiet(watcher)
            change()
            assert watcher.wait() and hinted(watcher, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_or_hidden_or_below_is_no_change(tmp_path: Path, kind: ObserverKind) -> None:
    write_atomic(tmp_path / "f", "x")
    (tmp_path / "below").mkdir()
    with watcher_of(tmp_path, kind=kind) as watcher:
        quiet(watcher)
        (tmp_path / "f").read_text()
        (tmp_path / ".f.tmp").write_text("x")
        (tmp_path / "below" / "g").write_text("x")
        assert not watcher.wait(4 * POLL_S) and watcher.take_changed() == frozenset()


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_that_changed_is_named(tmp_path: Path, kind: ObserverKind) -> None:
    folders = [tmp_path / str(number) for number in range(20)]
    for folder in folders:
        folder.mkdir()
    with watcher_of(*folders, kind=kind) as watcher:
        quiet(watcher)
        write_atomic(folders[7] / "x", "1")
        assert watcher.wait() and hinted(watcher, folders[7])
        assert not (watcher.take_changed() or frozenset()) - {folders[7]}


def test_the_rescan_comes_without_events(tmp_path: Path) -> None:
    with watcher_of(tmp_path, rescan_s=0.05) as watcher:
        quiet(watcher)
        assert not watcher.wait()


def test_a_storm_of_events_takes_no_time_for_long_and_what_it_hides_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes in one folder as fast as it goes would have the thread of all folders busy with it."""
    monkeypatch.setattr(watch, "MAX_EVENTS", 50)
    monkeypatch.setattr(watch, "STORM_S", 0.2)
    noisy, other = tmp_path / "noisy", tmp_path / "other"
    noisy.mkdir(), other.mkdir()
    with watcher_of(noisy, other) as watcher:
        quiet(watcher)
        (noisy / "a").touch()

        def has_stopped() -> bool:
            for _ in range(100):
                (noisy / "a").rename(noisy / "b"), (noisy / "b").rename(noisy / "a")
            return watcher.folders == {other}

        wait_for(has_stopped, "the folder to be left alone", timeout_s=PATIENCE_S)
        quiet(watcher)
        write_atomic(other / "x", "1")
        assert watcher.wait() and watcher.take_changed() == {other}, "that of the others is told"
        write_atomic(noisy / "x", "1")
        assert watcher.wait() and watcher.take_changed() == {noisy}, "what was written meanwhile"
        watcher.watch([noisy, other])
        assert watcher.folders == {noisy, other}


@pytest.mark.parametrize("kind", KINDS)
def test_folders_come_and_go(tmp_path: Path, kind: ObserverKind) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    with watcher_of(first, second, kind=kind) as watcher:
        quiet(watcher)
        assert watcher.folders == {first}
        second.mkdir()
        watcher.watch([second])
        assert watcher.wait() and watcher.take_changed() == {second} and watcher.folders == {second}
        write_atomic(second / "x", "1")
        assert watcher.wait()
        quiet(watcher)
        write_atomic(first / "x", "1")
        assert not watcher.wait(4 * POLL_S)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["deleted", "moved", "parent_moved"])
def test_a_folder_that_was_replaced_is_watched_again(tmp_path: Path, kind: ObserverKind, how: str) -> None:
    control = tmp_path / "run_a" / "control"
    control.mkdir(parents=True)
    with watcher_of(tmp_path, control, kind=kind) as watcher:
        quiet(watcher)
        if how == "deleted":
            shutil.rmtree(control)
        elif how == "moved":
            control.rename(tmp_path / "run_a" / "old")
        else:
            control.parent.rename(tmp_path / ".old")
        control.mkdir(parents=True)
        if kind == "native":  # polling looks at the path, whatever is there
            assert hinted(watcher, tmp_path if how == "parent_moved" else control)
        quiet(watcher)
        watcher.watch([tmp_path, control])
        quiet(watcher)
        write_atomic(control / "orch.toml", "x")
        assert watcher.wait() and hinted(watcher, control)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("old", "new"), [("a", "b"), ("b", "a")])
def test_a_folder_that_moved_is_watched_where_it_is(tmp_path: Path, kind: ObserverKind, old: str, new: str) -> None:
    """Its watch moves with it, and must not end with that of the former place."""
    (tmp_path / old).mkdir()
    with watcher_of(tmp_path / old, kind=kind) as watcher:
        quiet(watcher)
        (tmp_path / old).rename(tmp_path / new)
        watcher.watch([tmp_path / old, tmp_path / new])
        quiet(watcher)
        write_atomic(tmp_path / new / "x", "1")
        assert watcher.wait() and hinted(watcher, tmp_path / new)
        watcher.watch([tmp_path / new])
        assert watcher.folders == {tmp_path / new}


def test_a_replacement_that_no_event_tells_is_found_at_the_rescan(tmp_path: Path) -> None:
    control = tmp_path / "run_a" / "control"
    control.mkdir(parents=True)
    with watcher_of(control, rescan_s=0.05) as watcher:
        control.parent.rename(tmp_path / "old")
        control.mkdir(parents=True)

        def found() -> bool:
            watcher.watch([control])
            return control in (watcher.take_changed() or ())

        watcher.take_changed()
        wait_for(found, "the folder to be watched again", timeout_s=PATIENCE_S)


def test_a_folder_that_cannot_be_watched_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    folder, loop = tmp_path / "a", tmp_path / "b"
    folder.mkdir(), loop.mkdir()
    with watcher_of(folder, loop) as watcher:
        loop.rmdir()
        loop.symlink_to(loop.name)
        quiet(watcher)

        def is_left_out() -> bool:
            watcher.watch([folder, loop])
            return watcher.folders == {folder}

        wait_for(is_left_out, "the loop to be left out", timeout_s=PATIENCE_S)
        assert not watcher.is_polling
        loop.unlink(), loop.mkdir()
        watcher.watch([folder, loop])
        assert hinted(watcher, loop)


def test_a_link_in_a_run_takes_no_events_from_the_folder_of_another(tmp_path: Path) -> None:
    control, link = tmp_path / "run_a" / "control", tmp_path / "run_b" / "control"
    control.mkdir(parents=True), link.parent.mkdir()
    link.symlink_to(control)
    (tmp_path / "workspace").symlink_to(tmp_path)  # whose owner may put it anywhere
    with watcher_of(control, link, tmp_path / "workspace") as watcher:
        quiet(watcher)
        assert watcher.folders == {control, tmp_path / "workspace"}
        write_atomic(control / "x", "1")
        assert watcher.wait() and hinted(watcher, control)


class Limited(NativeEvents):
    """Real events, until the system's limit is reached."""

    num_watches = 0

    def __init__(self, on_change: OnChange) -> None:
        if self.num_watches < 0:
            raise OSError(errno.EMFILE, "inotify instance limit reached")
        super().__init__(on_change)

    def add(self, folder: Path) -> bool:
        if len(self._watches) >= self.num_watches:
            raise OSError(errno.ENOSPC, "inotify watch limit reached")
        return super().add(folder)


@pytest.mark.parametrize(("limit", "cure"), [(-1, "max_user_instances"), (0, "max_user_watches")])
def test_no_events_from_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int, cure: str) -> None:
    assert_polls_with_one_warning(tmp_path, caplog, limit, cure)


def test_out_of_watches_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_polls_with_one_warning(tmp_path, caplog, 2, "max_user_watches")


def assert_polls_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int, cure: str) -> None:
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        folder.mkdir()

    class Full(Limited):
        num_watches = limit

    with caplog.at_level(logging.WARNING), watcher_of(folders[0], make_native=Full) as watcher:
        for upto in range(2, 5):
            watcher.watch(folders[:upto])
        assert watcher.is_polling and watcher.folders == set(folders)
        assert watcher.take_changed() is None, "what was lost meanwhile is found by a look at everything"
        quiet(watcher)
        for folder in folders:
            write_atomic(folder / "x", "1")
            assert watcher.wait() and hinted(watcher, folder)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and cure in messages[0] and "sysctl" in messages[0]


def native_by_hand() -> tuple[Callable[[], NativeEvents], Callable[[OnChange], Backend]]:
    """The backend that a watcher was given, and what gives it one."""
    made: list[NativeEvents] = []

    def make(on_change: OnChange) -> Backend:
        made.append(NativeEvents(on_change))
        return made[0]

    return lambda: made[0], make


def test_a_dead_reader_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend, make = native_by_hand()
    with watcher_of(tmp_path, make_native=make) as watcher:
        quiet(watcher)
        backend().close()
        watcher.watch([tmp_path])
        quiet(watcher)
        write_atomic(tmp_path / "x", "1")
        assert watcher.wait() and hinted(watcher, tmp_path)


def test_lost_events_count_as_a_change_of_everything(tmp_path: Path) -> None:
    backend, make = native_by_hand()
    with watcher_of(tmp_path, make_native=make) as watcher:
        quiet(watcher)
        backend().on_queue_overflow()
        assert watcher.wait() and watcher.take_changed() is None and watcher.take_changed() == frozenset()


@pytest.mark.parametrize(("type_", "polls"), [("ext4", False), ("nfs4", True), ("fuse.sshfs", True)])
def test_the_mount_table_decides(tmp_path: Path, type_: str, polls: bool) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 8:1 / / rw - {type_} /dev/a rw\n")
    with watcher_of(tmp_path, kind="auto", mount_table=table) as watcher:
        assert watcher.is_polling is polls


@pytest.mark.parametrize("kind", KINDS)
def test_folders_that_are_watched_already_give_no_hint(tmp_path: Path, kind: ObserverKind) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    with watcher_of(*folders, kind=kind, rescan_s=0.01) as watcher:
        quiet(watcher)
        for _ in range(3):
            watcher.watch(folders)
            watcher.watch(reversed(folders))
        assert watcher.take_changed() == frozenset()


def test_wake_ends_a_wait() -> None:
    with watcher_of() as watcher:
        watcher.wake()
        assert watcher.wait()


def test_one_thread_and_no_warning_for_a_thousand_folders(tmp_path: Path) -> None:
    folders = [tmp_path / f"{number}" for number in range(1000)]
    for folder in folders:
        folder.mkdir()
    before = {*threading.enumerate()}
    with warnings.catch_warnings(), watcher_of(*folders) as watcher:
        warnings.simplefilter("error")
        assert len({*threading.enumerate()} - before) == 1  # others may end meanwhile
        quiet(watcher)
        for folder in folders:
            (folder / "x").write_text("1")
        seen: set[Path] = set()

        def all_told() -> bool:
            seen.update(watcher.take_changed() or ())
            return seen == set(folders)

        wait_for(all_told, "a hint about every folder", timeout_s=PATIENCE_S)
        for folder in folders:
            shutil.rmtree(folder)
        watcher.watch([])
        assert not watcher.folders
