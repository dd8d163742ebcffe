from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.nodes import (
    DEAD_GRACE_S,
    NUM_PHASES,
    RL_PHASES,
    STALLED_AFTER_S,
    SUSPECT_AFTER_BEATS,
    BeatWatch,
    NodeHealth,
    SeenNode,
    Stall,
    is_at_work,
    node_health,
    stall,
    waited_for,
)
from prime_rl.contract.status import NodeStatus, PhaseTime, read_status

BEAT_S = 1.0
SUSPECT_S = SUSPECT_AFTER_BEATS * BEAT_S
DEAD_S = SUSPECT_S + DEAD_GRACE_S
STALLED_LOOP_S = 15.0


def node(rank: int = 0, **fields: object) -> NodeStatus:
    base = {
        "num_nodes": 3,
        "heartbeat_s": BEAT_S,
        "loop": 7,
        "loop_limit_s": STALLED_LOOP_S,
        "state": "working",
        "progress": 0,
    }
    return NodeStatus(rank=rank, **(base | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "silent_s", "still_s", "moved", "gone", "expected"),
    [
        ({}, 0.0, 0.0, False, False, NodeHealth.UNPROVEN),
        ({}, 0.5, 0.5, True, False, NodeHealth.ALIVE),
        ({}, SUSPECT_S, 0.0, True, False, NodeHealth.ALIVE),
        ({}, SUSPECT_S + 0.1, 0.0, True, False, NodeHealth.SUSPECT),
        ({}, SUSPECT_S + 0.1, 0.0, False, False, NodeHealth.SUSPECT),
        ({}, DEAD_S + 0.1, 0.0, True, False, NodeHealth.DEAD),
        ({}, 0.1, 0.0, True, True, NodeHealth.DEAD),
        ({}, 0.5, STALLED_AFTER_S + 1, True, False, NodeHealth.STALLED),
        ({"arrived": True, "state": "waiting"}, 0.5, STALLED_AFTER_S + 1, True, False, NodeHealth.ALIVE),
        ({"progress": None}, 0.5, STALLED_AFTER_S + 1, True, False, NodeHealth.ALIVE),
        ({"loop_still_s": STALLED_LOOP_S - 1}, 0.5, 0.5, True, False, NodeHealth.ALIVE),
        ({"loop_still_s": STALLED_LOOP_S + 1}, 0.5, 0.5, True, False, NodeHealth.STALLED),
        ({"loop_still_s": STALLED_LOOP_S + 1, "arrived": True}, 0.5, 0.5, True, False, NodeHealth.STALLED),
        ({"loop_still_s": STALLED_LOOP_S + 1}, 0.5, 0.5, False, False, NodeHealth.UNPROVEN),
        ({"loop_still_s": STALLED_LOOP_S + 1}, DEAD_S + 0.1, 0.5, True, False, NodeHealth.DEAD),
        ({"state": "stopped"}, 1e6, 1e6, True, True, NodeHealth.LEFT),
        ({"state": "failed"}, 1e6, 1e6, True, True, NodeHealth.LEFT),
        ({"state": "done"}, 1e6, 1e6, True, True, NodeHealth.DONE),
    ],
)
def test_health(
    fields: dict[str, object], silent_s: float, still_s: float, moved: bool, gone: bool, expected: NodeHealth
) -> None:
    assert node_health(SeenNode(node(**fields), silent_s, still_s, moved, gone)) is expected


def test_what_stands_still_and_for_how_long() -> None:
    """The loop by the node's own clock and the silence since; the work by the reader's."""
    assert stall(SeenNode(node(loop_still_s=41.0), 0.5, 900.0, True)) == Stall("its loop", 41.5)
    assert stall(SeenNode(node(), 0.5, 900.0, True)) == Stall("its work", 900.0)
    assert stall(SeenNode(node(), 0.5, 0.5, True)) is None
    assert stall(SeenNode(node(loop_still_s=41.0), DEAD_S + 1, 900.0, True)) is None, "it is dead"


@given(skew_s=st.floats(-1e9, 1e9), beats=st.lists(st.floats(0.1, 2.9), min_size=2, max_size=20))
def test_the_clock_of_the_node_means_nothing(skew_s: float, beats: list[float]) -> None:
    """A node that beats in time lives, and one that has stopped is dead, whatever its clock shows."""
    watch, now_s = BeatWatch(), 500.0
    for seq, gap_s in enumerate(beats):
        now_s += gap_s
        seen = watch.see(node(seq=seq, updated_at=1e9 + now_s + skew_s), now_s)
        assert seen.silent_s == 0
        assert node_health(seen) is (NodeHealth.ALIVE if seq else NodeHealth.UNPROVEN)
    last = node(seq=len(beats) - 1, updated_at=1e9 + now_s + skew_s)
    assert node_health(watch.see(last, now_s + SUSPECT_S + 0.5)) is NodeHealth.SUSPECT
    assert node_health(watch.see(last, now_s + DEAD_S + 0.5)) is NodeHealth.DEAD


def test_an_old_copy_of_the_file_is_no_sign_of_life_and_a_new_process_is() -> None:
    watch = BeatWatch()
    watch.see(node(seq=7), 0.0)
    watch.see(node(seq=8), 1.0)
    assert watch.see(node(seq=7), 2.0).silent_s == 1.0
    stale = watch.see(node(seq=7, progress=9), 2.5)
    assert stale.still_s == 2.5 and not stale.has_worked, "what an old copy shows of the work is old too"
    new = watch.see(node(seq=0, pid=5), 3.0)
    assert new.silent_s == new.still_s == 0.0 and new.has_worked, "a process that starts makes progress"
    watch.see(node(seq=1, epoch=2, pid=5), 3.5)
    assert watch.see(node(seq=9, epoch=1, pid=5), 4.5).silent_s == 1.0


def test_progress_and_phase_are_both_work() -> None:
    watch = BeatWatch()
    watch.see(node(seq=1, progress=3), 0.0)
    still = watch.see(node(seq=2, progress=3), 9.0)
    assert still.still_s == 9.0 and not is_at_work(still), "its work may have stood still for long"
    assert is_at_work(BeatWatch().see(waiting(0), 0.0)) and is_at_work(BeatWatch().see(node(progress=None), 0.0))
    moved = watch.see(node(seq=3, progress=4), 10.0)
    assert moved.still_s == 0.0 and is_at_work(moved)
    assert watch.see(node(seq=4, progress=4, phase=1), 11.0).still_s == 0.0


def waiting(rank: int, **fields: object) -> NodeStatus:
    return node(rank, arrived=True, state="waiting", **fields)


def test_who_is_waited_for() -> None:
    assert waited_for([node(0), node(1), node(2)]) == []
    assert waited_for([waiting(0, phase=4), node(1, phase=4), node(2, phase=4)]) == [1, 2]
    assert waited_for([waiting(0, phase=4), waiting(1, phase=4), node(2, phase=3)]) == [2]
    assert waited_for([waiting(0, phase=4), waiting(1, phase=3), node(2, phase=5)]) == [1]
    assert waited_for([waiting(0, phase=0), node(1, epoch=0, phase=9)]) == [2]
    assert waited_for([waiting(0, epoch=1), waiting(1, epoch=1), waiting(2, epoch=0, phase=9)]) == [2]
    assert waited_for([waiting(0), waiting(1), waiting(2)]) == []


def test_the_phases_of_each_kind() -> None:
    assert NUM_PHASES == 14
    assert [*RL_PHASES["rollout"], *RL_PHASES["update"]] == [*RL_PHASES["both"]]


def test_it_comes_back_from_the_disk_and_junk_does_not(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    assert output.list_nodes() == []
    status = node(2, history=[PhaseTime(iteration=1, phase=1, work_s=3.5, wait_s=0.5)])
    write_atomic(output.node_status(2), msgspec.json.encode(status))
    write_atomic(output.node_status(11), b"{")
    for name in ("node_x.json", "node_01.json", "node_3.json.tmp"):
        (output.multinode / name).write_text("{}")
    assert output.list_nodes() == [2, 11]
    assert read_status(output.node_status(2), NodeStatus) == status
    assert read_status(output.node_status(11), NodeStatus) is None
