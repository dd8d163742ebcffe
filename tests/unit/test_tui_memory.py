"""What the TUI remembers, and what it must not touch."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from prime_rl.contract.files import write_atomic
from tests.patience import PATIENCE_S
from tui.memory import MAX_WORKSPACES, Memory, WorkspaceMemory, default_path


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


def test_what_is_saved_is_there_the_next_time_for_this_workspace_only(tmp_path: Path, workspace: Path) -> None:
    path = tmp_path / "state" / "deep" / "state.json"
    memory = Memory(workspace, path)
    memory.theme, memory.workspace = (
        "nord",
        WorkspaceMemory(sort="reward", descending=True, filter="lag>1", pins=["run_a"]),
    )
    memory.save()
    again = Memory(workspace, path)
    assert (again.theme, again.workspace) == (memory.theme, memory.workspace)
    other = Memory(tmp_path / "other", path)
    assert (other.theme, other.workspace) == ("nord", WorkspaceMemory())
    other.save()
    assert Memory(workspace, path).workspace.pins == ["run_a"], "two writers keep each other's"


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"version": 99}', b'{"workspaces": 5}', b"\xff\xfe", b"[" * 100_000]
)
def test_a_damaged_file_is_no_memory_and_no_error(tmp_path: Path, workspace: Path, damage: bytes) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(damage)
    memory = Memory(workspace, path)
    assert memory.workspace == WorkspaceMemory()
    memory.workspace.sort = "lag"
    memory.save()
    assert Memory(workspace, path).workspace.sort == "lag"


def test_a_workspace_is_never_written_and_a_bad_place_is_no_error(tmp_path: Path, workspace: Path) -> None:
    Memory(workspace, workspace / "state.json").save()
    assert list(workspace.iterdir()) == []
    (tmp_path / "file").write_text("")
    Memory(workspace, tmp_path / "file" / "state.json").save()
    Memory(workspace).save()


def test_it_does_not_grow_without_end(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for number in range(MAX_WORKSPACES + 5):
        Memory(tmp_path / str(number), path).save()
    assert path.read_text().count('"' + str(tmp_path)) == MAX_WORKSPACES


def test_a_slow_save_does_not_bring_back_what_was_before(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(workspace, tmp_path / "state.json")
    is_writing, may_write = threading.Event(), threading.Event()

    def write(path: Path, data: bytes) -> None:
        if not is_writing.is_set():
            is_writing.set()
            may_write.wait(PATIENCE_S)
        write_atomic(path, data)

    monkeypatch.setattr("tui.memory.write_atomic", write)
    slow, quick = threading.Thread(target=memory.save), threading.Thread(target=memory.save)
    slow.start()
    assert is_writing.wait(PATIENCE_S)
    memory.workspace = WorkspaceMemory(sort="lag")
    quick.start()
    quick.join(0.2)  # it waits for the slow one: without that it has written by now
    may_write.set()
    slow.join(PATIENCE_S)
    quick.join(PATIENCE_S)
    assert Memory(workspace, tmp_path / "state.json").workspace.sort == "lag"


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "prl-tui" / "state.json"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert default_path() == Path(os.path.expanduser("~/.local/state/prl-tui/state.json"))
