"""What the TUI remembers, and what it must not touch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tui.memory import MAX_HOUSES, HouseMemory, Memory, default_path


@pytest.fixture
def house(tmp_path: Path) -> Path:
    (tmp_path / "house").mkdir()
    return tmp_path / "house"


def test_what_is_saved_is_there_the_next_time_for_this_house_only(tmp_path: Path, house: Path) -> None:
    path = tmp_path / "state" / "deep" / "state.json"
    memory = Memory(house, path)
    memory.theme, memory.house = "nord", HouseMemory(sort="reward", descending=True, filter="lag>1", pins=["run_a"])
    memory.save()
    again = Memory(house, path)
    assert (again.theme, again.house) == (memory.theme, memory.house)
    other = Memory(tmp_path / "other", path)
    assert (other.theme, other.house) == ("nord", HouseMemory())
    other.save()
    assert Memory(house, path).house.pins == ["run_a"], "two who write keep each other's"


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"version": 99}', b'{"houses": 5}', b"\xff\xfe", b"[" * 100_000]
)
def test_a_damaged_file_is_no_memory_and_no_error(tmp_path: Path, house: Path, damage: bytes) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(damage)
    memory = Memory(house, path)
    assert memory.house == HouseMemory()
    memory.house.sort = "lag"
    memory.save()
    assert Memory(house, path).house.sort == "lag"


def test_a_house_is_never_written_and_a_bad_place_is_no_error(tmp_path: Path, house: Path) -> None:
    Memory(house, house / "state.json").save()
    assert list(house.iterdir()) == []
    (tmp_path / "file").write_text("")
    Memory(house, tmp_path / "file" / "state.json").save()
    Memory(house).save()


def test_it_does_not_grow_without_end(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for number in range(MAX_HOUSES + 5):
        Memory(tmp_path / str(number), path).save()
    assert path.read_text().count('"' + str(tmp_path)) == MAX_HOUSES


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "prl-tui" / "state.json"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert default_path() == Path(os.path.expanduser("~/.local/state/prl-tui/state.json"))
