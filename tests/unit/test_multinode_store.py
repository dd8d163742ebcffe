"""The records of a group on the shared folder: what one node writes is what the others read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from prime_rl.contract.layout import OutputDir
from prime_rl.contract.status import NodeStatus, PhaseTime, read_status
from prime_rl.multinode.records import (
    DiskStore,
    GroupRecord,
    GroupSetting,
    GroupState,
    NodeRecord,
    NodeState,
    Phase,
    PhaseLog,
    Position,
    RlPhase,
)

SETTING = GroupSetting(2, 3, RlPhase.BOTH, {}, heartbeat_s=2.0, loop_timeout_s=120.0)
NODE = NodeRecord(
    2,
    "9f2c",
    7,
    state=NodeState.RUNNING,
    fingerprint={"--num-nodes": "3"},
    epoch="3-aa",
    position=Position(4, Phase.TRAIN, 1),
    arrived=True,
    progress=55,
    reason="a reason",
    host="host2",
    address="10.0.0.2",
    port=4711,
    pid=os.getpid(),
    unreached=2,
    looks=99,
    still_s=1.5,
)
GROUP = GroupRecord(
    3,
    "aa",
    8,
    state=GroupState.RUNNING,
    members={0: "aa", 2: "9f2c"},
    position=Position(4, Phase.TRAIN, 1),
    awaited=("node 2",),
    exit_code=75,
    reason="node 1 was lost",
)


@pytest.fixture
def output(tmp_path: Path) -> OutputDir:
    return OutputDir(tmp_path / "logs")


def store_of(output: OutputDir, *ranks: int) -> DiskStore:
    return DiskStore(output, SETTING, weight=2.0, ranks=frozenset(ranks) if ranks else None)


def test_what_one_node_writes_is_what_another_reads(output: OutputDir) -> None:
    ours, theirs = store_of(output), store_of(output, 0, 2)
    assert theirs.read_nodes() == {} and theirs.read_group() is None
    for node, group in (
        (NODE, GROUP),
        (replace(NODE, seq=8, position=None, arrived=False, reason=None), replace(GROUP, seq=9, position=None)),
        *((replace(NODE, seq=9, state=state), replace(GROUP, seq=10, state=GroupState.ENDING)) for state in NodeState),
    ):
        ours.write_node(node)
        ours.write_group(group)
        assert theirs.read_nodes() == {2: node} and theirs.read_group() == group


def test_only_records_of_the_ranks_that_are_asked_for_count_and_only_under_their_own_name(output: OutputDir) -> None:
    store = store_of(output)
    for rank in (0, 1, 2):
        store.write_node(replace(NODE, rank=rank))
    assert store_of(output, 0, 2).read_nodes().keys() == {0, 2}
    output.node_status(1).write_bytes(output.node_status(2).read_bytes())
    assert store_of(output).read_nodes().keys() == {0, 2}


def test_a_record_that_cannot_be_read_counts_as_what_it_was(output: OutputDir) -> None:
    ours, theirs = store_of(output), store_of(output)
    ours.write_node(NODE)
    ours.write_group(GROUP)
    assert theirs.read_nodes() == {2: NODE}
    whole = output.node_status(2).read_bytes()
    output.node_status(2).write_bytes(whole[: len(whole) // 2])
    assert theirs.read_nodes() == {2: NODE} and store_of(output).read_nodes() == {}
    output.node_status(2).unlink()
    assert theirs.read_group() == GROUP
    output.group_status.unlink()
    assert theirs.read_group() == GROUP
    ours.write_node(replace(NODE, seq=8))
    assert theirs.read_nodes() == {2: replace(NODE, seq=8)}


def test_a_record_of_an_unknown_state_is_one_that_has_ended(output: OutputDir) -> None:
    store = store_of(output)
    store.write_node(NODE)
    store.write_group(GROUP)
    for path, known in ((output.node_status(2), b'"word":"running"'), (output.group_status, b'"state":"running"')):
        assert known in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(b'running"', b'dreaming"'))
    (node,), group = store_of(output).read_nodes().values(), store_of(output).read_group()
    assert node.state is NodeState.ENDED and group is not None and group.state is GroupState.ENDING


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"state": NodeState.JOINING}, "starting"),
        ({"arrived": False}, "working"),
        ({"arrived": True}, "waiting"),
        ({"state": NodeState.ENDED, "exit_code": 0}, "done"),
        ({"state": NodeState.ENDED, "exit_code": 75}, "stopped"),
        ({"state": NodeState.LEFT}, "stopped"),
        ({"state": NodeState.FAILED}, "failed"),
    ],
)
def test_people_see_how_a_node_is(output: OutputDir, changes: dict[str, object], state: str) -> None:
    store = store_of(output)
    store.waiting_on = lambda: "node 1"
    store.write_node(replace(NODE, **changes))
    status = read_status(output.node_status(2), NodeStatus)
    assert status is not None
    assert (status.state, status.waiting_on, status.phase_name) == (state, "node 1", Phase.TRAIN.label)
    assert (status.num_nodes, status.weight, status.loop_limit_s) == (3, 2.0, 30.0)


def test_the_time_in_a_phase_is_work_until_the_node_arrives_and_then_waiting() -> None:
    now = [100.0]
    log = PhaseLog(lambda: now[0])
    first, second = Position(1, Phase.TRAIN), Position(1, Phase.FINAL)
    for at, position, arrived in (
        (100.0, None, False),
        (101.0, first, False),
        (104.0, first, True),
        (106.0, first, True),
    ):
        now[0] = at
        log.note(position, arrived)
    assert (log.phase_s, log.waited_s) == (5.0, 2.0)
    now[0] = 110.0
    log.note(second, False)
    assert list(log.history) == [PhaseTime(iteration=1, phase=Phase.TRAIN, work_s=3.0, wait_s=6.0)]
    now[0] = 111.0
    assert (log.phase_s, log.waited_s) == (1.0, 0.0)
    log.note(second._replace(round=1), False)
    assert log.history[-1] == PhaseTime(iteration=1, phase=Phase.FINAL, work_s=1.0, wait_s=0.0)
