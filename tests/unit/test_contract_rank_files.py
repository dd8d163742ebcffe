"""Rank files: what was acknowledged is there, whatever came after."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prime_rl.contract.types import RankEntry, RankFileWriter, read_rank_file
from tests.budgets import examples

ENTRIES = [RankEntry(f"{number}", bytes([number]) * number * 50) for number in range(5)]


def write(path: Path, entries: list[RankEntry]) -> None:
    writer = RankFileWriter(path)
    for entry in entries:
        writer.append(entry)
    writer.close()


def test_entries_come_back_in_order_also_after_the_writer_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "rank"
    assert list(read_rank_file(path)) == []
    write(path, ENTRIES[:3])
    write(path, ENTRIES[3:])
    assert list(read_rank_file(path)) == ENTRIES


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60))
def test_a_torn_end_costs_its_own_entry_only_and_the_next_writer_cuts_it_off(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "rank"
    path.unlink(missing_ok=True)
    write(path, ENTRIES)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    left = list(read_rank_file(path))
    assert left == ENTRIES[: len(left)]
    write(path, [RankEntry("new", b"x")])
    assert list(read_rank_file(path)) == [*left, RankEntry("new", b"x")]


@pytest.mark.parametrize("damage", [b"\xff" * 8, b"\x00\x00\x00\x05\x00\x00\x00\x00hello"])
def test_garbage_ends_the_file(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "rank"
    write(path, ENTRIES[:2])
    with path.open("ab") as file:
        file.write(damage)
    assert list(read_rank_file(path)) == ENTRIES[:2]
