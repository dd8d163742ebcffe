"""What adding, readmitting and deleting leave and take, where something else happens to the folder meanwhile."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from daemons import actions, adding, trash
from daemons.actions import ActionError
from prime_rl.contract.files import read_file, write_atomic
from prime_rl.contract.layout import OutputDir, RunDir
from prime_rl.contract.status import DaemonStatus, RunStatus
from tests.daemons_support import RUN_TOML


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "reverse.toml"
    path.write_text(RUN_TOML.format(max_steps=3, model="m"))
    return path


@pytest.fixture
def output(tmp_path: Path) -> OutputDir:
    return OutputDir(tmp_path / "workspace")


@pytest.fixture
def run(output: OutputDir, source: Path) -> RunDir:
    return output.run(actions.add_run(output.path, source))


def test_a_folder_that_is_being_filled_stays_and_one_that_was_left_goes(output: OutputDir, source: Path) -> None:
    output.path.mkdir()
    young, old = output.path / ".adding.young", output.path / ".adding.old"
    for folder in (young, old):
        folder.mkdir()
    os.utime(old, (1.0, 1.0))
    actions.add_run(output.path, source)
    assert sorted(each.name for each in output.path.glob(".adding*")) == [".adding.young"]


def test_a_config_that_changes_while_it_is_read_is_not_added(
    output: OutputDir, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(path: Path, **options: Any) -> bytes:
        source.write_text(RUN_TOML.format(max_steps=4, model="m"), encoding="utf-8")
        return read_file(path, **options)

    monkeypatch.setattr(adding, "read_file", late)
    with pytest.raises(ActionError, match="changed while it was read: try again"):
        actions.add_run(output.path, source)
    assert list(output.path.glob("*")) == []


def test_readmit_takes_away_that_the_supervisor_has_given_up(output: OutputDir, run: RunDir) -> None:
    output.daemons.mkdir()
    given_up = DaemonStatus(name=run.run_id, state="failed", reason="3 crashes")
    write_atomic(output.daemon_status(run.run_id), msgspec.json.encode(given_up))
    assert actions.view_of_run(output, run.run_id).state == "failed"
    assert actions.readmit_run(output.path, run.run_id)
    assert not output.daemon_status(run.run_id).exists() and output.start_request(run.run_id).exists()
    assert actions.view_of_run(output, run.run_id).state != "failed"


def test_readmit_leaves_the_status_of_what_has_not_failed(output: OutputDir, run: RunDir) -> None:
    output.daemons.mkdir()
    write_atomic(output.daemon_status(run.run_id), msgspec.json.encode(DaemonStatus(name=run.run_id, state="stopped")))
    write_atomic(run.status, msgspec.json.encode(RunStatus(run_id=run.run_id, state="stopped", step=2)))
    actions.evict_run(output.path, run.run_id, "too slow")
    assert actions.readmit_run(output.path, run.run_id)
    assert output.daemon_status(run.run_id).exists() and run.status.exists() and not run.evicted.exists()


def test_a_deleted_run_is_not_started_by_what_was_asked_for_before(output: OutputDir, run: RunDir) -> None:
    output.daemons.mkdir()
    actions.evict_run(output.path, run.run_id, "too slow")
    actions.readmit_run(output.path, run.run_id)
    assert output.start_request(run.run_id).exists()
    actions.delete_run(output.path, run.run_id)
    assert not output.start_request(run.run_id).exists()


def test_a_mark_that_is_a_link_to_no_name_keeps_no_run_from_being_evicted_or_deleted(
    output: OutputDir, run: RunDir
) -> None:
    run.evicted.symlink_to("a" * 300)  # no file system has such a name
    actions.evict_run(output.path, run.run_id, "too slow")
    actions.delete_run(output.path, run.run_id)
    assert not run.path.exists()


def test_a_run_that_becomes_a_file_while_it_is_deleted_is_put_back(
    output: OutputDir, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(parent: Path, path: Path) -> None:
        path.rename(parent / "elsewhere")
        path.write_text("another's", encoding="utf-8")

    monkeypatch.setattr(trash, "refusal", swapped)
    with pytest.raises(ActionError, match="run_reverse is no longer a folder; nothing was deleted"):
        actions.delete_run(output.path, run.run_id)
    assert run.path.read_text() == "another's" and list(output.trash.iterdir()) == []


def test_a_trash_on_another_file_system_is_refused_before_the_run_is_evicted(
    output: OutputDir, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.fstat

    def mounted(fd: int) -> Any:
        """Each folder that is open is on a device of its own."""
        info = found(fd)
        return SimpleNamespace(st_mode=info.st_mode, st_dev=fd) if stat.S_ISDIR(info.st_mode) else info

    monkeypatch.setattr(os, "fstat", mounted)
    with pytest.raises(ActionError, match="are on different file systems; nothing was changed"):
        actions.delete_run(output.path, run.run_id)
    assert run.path.is_dir() and not run.evicted.exists()
