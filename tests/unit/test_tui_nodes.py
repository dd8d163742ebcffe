"""From the nodes' files to the screen: which nodes are waited for, slow or dead, what is a problem."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.nodes import NUM_PHASES, NodeHealth, NodeReader
from prime_rl.utils.text import clean_text
from tests.budgets import examples
from tests.tui_places_support import put_group, put_node
from tests.tui_support import HOSTILE, NOW
from tui.model.levels import Level
from tui.model.nodes import MISSING, SLOW, Cell, Group, describe, make_group, node_problems
from tui.screens.nodes import grid_heading, group_line, node_detail, node_line, phase_lines


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def words(group: Group | None) -> dict[int, str]:
    assert group is not None
    return {row.rank: row.health for row in group.rows}


def test_the_dead_the_slow_the_missing_and_whom_all_wait_for(tmp_path: Path) -> None:
    output, clock = OutputDir(tmp_path), Clock()
    reader = NodeReader(tmp_path, clock)
    assert make_group(reader.read()) is None
    put_group(output, seq=100)
    first = make_group(reader.read())
    assert set(words(first).values()) == {NodeHealth.UNPROVEN, MISSING}, "no node has been seen to move"
    clock.now_s += 2
    put_group(output, seq=101)
    assert words(make_group(reader.read()))[3] == NodeHealth.UNPROVEN
    clock.now_s += 5.5
    put_group(output, seq=102)
    group = make_group(reader.read())
    assert group is not None
    assert words(group) == {
        0: NodeHealth.ALIVE,
        1: NodeHealth.ALIVE,
        2: SLOW,  # 44 s in a phase that usually takes about one
        3: NodeHealth.SUSPECT,
        4: MISSING,
    }
    assert (group.waited_for, group.phase, group.iteration, group.num_nodes) == ((2, 3, 4), 3, 12, 5)
    clock.now_s += 4
    put_group(output, seq=103)
    group = make_group(reader.read())
    assert group is not None and words(group)[3] == NodeHealth.DEAD
    assert group.row(3) and "dead: no heartbeat for 11s, in phase 3 (files ready) of iteration 12" in describe(
        group.rows[3]
    )
    assert group.waited_s == 41.0
    problems = {problem.name: problem for problem in node_problems(group, NOW)}
    assert problems.keys() == {"node 2", "node 3"}
    assert problems["node 3"].level is Level.BAD and problems["node 3"].since == NOW - 11.5
    assert problems["node 2"].level is Level.WARN


def test_a_process_that_is_gone_from_this_machine_is_dead_at_once(tmp_path: Path) -> None:
    import socket

    put_node(OutputDir(tmp_path), 0, num_nodes=1, host=socket.gethostname(), pid=2**22 + 1)
    group = make_group(NodeReader(tmp_path).read())
    assert words(group) == {0: NodeHealth.DEAD}
    assert group is not None and "its process is gone" in describe(group.rows[0])
    (problem,) = node_problems(group, NOW)
    assert "the whole group is gone" in problem.text


def test_a_node_whose_loop_stands_still_is_stalled_and_never_alive(tmp_path: Path) -> None:
    output, clock = OutputDir(tmp_path), Clock()
    reader = NodeReader(tmp_path, clock)
    put_node(output, 0, num_nodes=1, seq=1)
    reader.read()
    clock.now_s += 2
    put_node(output, 0, num_nodes=1, seq=2, loop=7, loop_limit_s=30.0, loop_still_s=41.0)
    group = make_group(reader.read())
    assert words(group) == {0: NodeHealth.STALLED} and group is not None
    (row,) = group.rows
    assert row.note == "its loop has stood still for 41s" and row.note in node_line(row, 160).plain
    (problem,) = node_problems(group, NOW)
    assert problem.level is Level.BAD and problem.since == NOW - 41.0
    assert problem.text == "stalled in phase 4 (aggregate) of iteration 12; its loop has stood still for 41s"


def test_a_group_that_ended_in_order_is_no_problem(tmp_path: Path) -> None:
    for rank in range(2):
        put_node(OutputDir(tmp_path), rank, num_nodes=2, state="done" if rank else "stopped", reason="Ctrl-C")
    group = make_group(NodeReader(tmp_path).read())
    assert words(group) == {0: NodeHealth.LEFT, 1: NodeHealth.DONE}
    assert node_problems(group, NOW) == [] and node_problems(None, NOW) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 200_000, b'{"rank": 7}', b"\xff\xfe"])
def test_a_file_that_cannot_be_read_for_a_moment_counts_as_it_was(tmp_path: Path, content: bytes) -> None:
    reader = NodeReader(tmp_path, Clock())
    put_node(OutputDir(tmp_path), 0, num_nodes=1)
    assert words(make_group(reader.read())) == {0: NodeHealth.UNPROVEN}
    OutputDir(tmp_path).node_status(0).write_bytes(content)
    assert words(make_group(reader.read())) == {0: NodeHealth.UNPROVEN}
    OutputDir(tmp_path).node_status(0).unlink()
    assert make_group(reader.read()) is None


def test_the_cells_of_each_kind_of_group(tmp_path: Path) -> None:
    put_node(OutputDir(tmp_path), 0, num_nodes=1, rl_phase="update", phase=9, arrived=True)
    group = make_group(NodeReader(tmp_path).read())
    assert group is not None
    assert group.rows[0].cells == (Cell.OFF,) * 7 + (Cell.PAST,) * 2 + (Cell.ARRIVED,) + (Cell.AHEAD,) * 4


@settings(max_examples=examples(40))
@given(
    fields=st.fixed_dictionaries(
        {
            "phase": st.integers(-5, 99),
            "iteration": st.integers(-1, 10**12),
            "num_nodes": st.integers(-3, 5000),
            "rl_phase": st.sampled_from(["both", "rollout", "update", "nonsense"]),
            "state": st.sampled_from(["starting", "working", "waiting", "stopped", "done", "failed", "?"]),
            "arrived": st.booleans(),
            "phase_s": st.floats(-1e9, 1e12),
            "heartbeat_s": st.floats(0, 1e6),
            "reason": st.sampled_from([None, HOSTILE, "x" * 100_000]),
            "host": st.sampled_from([HOSTILE, ""]),
        }
    ),
    width=st.integers(20, 240),
)
def test_nothing_that_a_file_says_breaks_a_line(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object], width: int
) -> None:
    folder = tmp_path_factory.mktemp("workspace")
    put_node(OutputDir(folder), 0, **fields)
    group = make_group(NodeReader(folder).read())
    assert group is not None
    row = group.rows[0]
    lines = [
        group_line(group),
        *grid_heading(width),
        node_line(row, width),
        *phase_lines(group, width, 14),
        *node_detail(row, width),
    ]
    for line in lines:
        assert clean_text(line.plain) == line.plain
    assert len(row.cells) == NUM_PHASES
