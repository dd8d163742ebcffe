"""A node as its command line asks for it: its record, what its decisions need, what it reads and is woken by."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from prime_rl.contract.layout import OutputDir
from prime_rl.multinode import node
from prime_rl.multinode.node import NodeFlags, parse_flags
from prime_rl.multinode.records import DiskStore, GroupSetting, NodeRecord, RlPhase

THREE = "--num-nodes 3 --rank-weights 2,1,1"


def parse(tmp_path: Path, words: str) -> NodeFlags:
    return parse_flags([f"--data-path={tmp_path}", f"--log-path={tmp_path}/logs", *words.split()], {})


def test_every_limit_of_the_config_reaches_the_decisions(tmp_path: Path) -> None:
    limits = "--heartbeat_s 0.5 --barrier_timeout_s 70 --gather_timeout_s 80 --loop_timeout_s 90"
    flags = parse(tmp_path, f"{THREE} --worker 1 --elastic --max-iterations 4 --rl-phase rollout {limits}")
    assert node.group_setting(flags, {"a": "b"}) == GroupSetting(
        1,
        3,
        RlPhase.ROLLOUT,
        {"a": "b"},
        elastic=True,
        max_iterations=4,
        heartbeat_s=0.5,
        barrier_timeout_s=70,
        gather_timeout_s=80,
        loop_timeout_s=90,
    )


def test_the_master_of_others_answers_at_a_port_and_where_it_was_told_to(tmp_path: Path) -> None:
    master = node.own_record(parse(tmp_path, f"{THREE} --master --master-addr 10.1.2.3"))
    worker = node.own_record(parse(tmp_path, f"{THREE} --worker 2"))
    alone = node.own_record(parse(tmp_path, ""))
    assert (master.rank, master.address, master.port > 0) == (0, "10.1.2.3", True)
    assert (worker.rank, worker.address, worker.port) == (2, alone.address, 0)
    assert alone.port == 0 and alone.pid == os.getpid()
    assert len({each.incarnation for each in (master, worker, alone)}) == 3
    assert master.fingerprint == worker.fingerprint


def test_the_debug_mode_is_a_level_of_the_log(tmp_path: Path) -> None:
    levels = [parse(tmp_path, words).config.log.level for words in ("", "--debug-mode")]
    assert levels == ["info", "debug"]


@pytest.mark.parametrize(("who", "reads", "woken_by"), [("--master", {0, 1, 2}, "."), ("--worker 2", {0, 2}, "group")])
def test_the_master_heeds_all_records_and_a_worker_the_masters_and_its_own(
    tmp_path: Path, who: str, reads: set[int], woken_by: str
) -> None:
    output = OutputDir((tmp_path / "logs").resolve())
    others = DiskStore(output, GroupSetting(0, 3, RlPhase.ROLLOUT, {}), weight=1.0, ranks=None)
    for rank in range(3):
        others.write_node(NodeRecord(rank, f"of {rank}", 1))
    member, watcher = node.build_member(parse(tmp_path, f"{THREE} --rl-phase rollout {who}"), 1)
    with watcher:
        assert member._store.read_nodes().keys() == reads
        assert watcher.folders == {output.multinode / woken_by}


@pytest.mark.parametrize(
    ("words", "probes"),
    [
        (f"{THREE} --master", False),
        (f"{THREE} --worker 1", True),
        (f"{THREE} --worker 1 --rl-phase rollout", False),
        ("", False),
    ],
)
def test_a_worker_probes_its_master_where_the_nodes_need_a_network(tmp_path: Path, words: str, probes: bool) -> None:
    def num_probers() -> int:
        return sum(thread.name == "prober" for thread in threading.enumerate())

    before = num_probers()
    _, watcher = node.build_member(parse(tmp_path, words), 1)
    watcher.close()
    assert num_probers() - before == int(probes)


def test_the_code_has_another_version_after_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "multinode").mkdir(parents=True)
    monkeypatch.setattr(node, "__file__", str(package / "multinode" / "node.py"))
    files = [package / name for name in ("a.py", "multinode/node.py")]
    for path in files:
        path.write_text("pass\n")
    versions = [node.code_version()]
    files[1].write_text("pass  # changed\n")
    versions.append(node.code_version())
    files[0].rename(package / "b.py")
    versions.append(node.code_version())
    (package / "notes.txt").write_text("not code")
    assert len(set(versions)) == 3 and node.code_version() == versions[-1]
