"""The command line of a node: what is allowed, and one line for each thing that is not."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemons.cli import run
from prime_rl.configs.base import ConfigError, FlagError
from prime_rl.configs.multinode import node_parser
from prime_rl.contract.files import wait_for, write_atomic
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.nodes import NodeReader
from prime_rl.contract.status import GroupStatus, NodeStatus
from prime_rl.multinode import node
from prime_rl.multinode.node import NodeFlags, num_ranks, parse_flags
from prime_rl.multinode.records import RlPhase
from prime_rl.utils.process import ProcessId
from prime_rl.utils.runtime import count_gpus, listed_gpus
from tests.patience import PATIENCE_S

GOOD = "--num-nodes 3 --rank-weights 2,1,1"


def parse(tmp_path: Path, words: str, **environment: str) -> NodeFlags:
    return parse_flags([f"--data-path={tmp_path}", f"--log-path={tmp_path}/logs", *words.split()], environment)


def test_the_seeds_commands_are_understood(tmp_path: Path) -> None:
    master = parse(tmp_path, f"--rl-phase both --eval-interval 6 {GOOD} --master")
    worker = parse(tmp_path, f"--rl-phase both --eval-interval 6 {GOOD} --worker 2")
    assert (master.rank, worker.rank, master.weights, master.eval_interval) == (0, 2, (2.0, 1.0, 1.0), 6)
    assert master.max_iterations is None and master.splits == {"train", "eval"}
    assert master.fingerprint("v") == worker.fingerprint("v")
    half = parse(tmp_path, f"--rl-phase rollout --rollout-split train-only {GOOD} --master")
    assert half.rl_phase is RlPhase.ROLLOUT and half.splits == {"train"}
    assert parse(tmp_path, "").rank == 0


@pytest.mark.parametrize(
    ("words", "differing"),
    [
        (GOOD, set()),
        (f"{GOOD} --log.level warning --gpus-per-node 2 --debug-mode", set()),
        ("--num-nodes 3 --rank-weights 2,1,2", {"--rank-weights"}),
        ("--num-nodes 2 --rank-weights 2,1", {"--num-nodes", "--rank-weights"}),
        (f"{GOOD} --elastic", {"--elastic"}),
        (f"{GOOD} --max-iterations 2", {"--max-iterations"}),
        (f"{GOOD} --eval-interval 2", {"--eval-interval"}),
        (f"{GOOD} --rl-phase rollout", {"--rl-phase"}),
        (f"{GOOD} --rl-phase rollout --rollout-split train-only", {"--rl-phase", "--rollout-split"}),
        (f"{GOOD} --seq_len 32 --run.seed 7", {"seq_len", "run.seed"}),
        (f"{GOOD} --log-path=elsewhere", {"--log-path"}),
    ],
)
def test_what_must_be_equal_on_all_nodes_is_in_the_fingerprint_and_nothing_else(
    tmp_path: Path, words: str, differing: set[str]
) -> None:
    ours = parse(tmp_path, f"{GOOD} --master").fingerprint("v")
    theirs = parse(tmp_path, f"{words} --worker 1").fingerprint("v")
    assert {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)} == differing
    newer = parse(tmp_path, f"{GOOD} --worker 1").fingerprint("w")
    assert [name for name in ours if ours[name] != newer[name]] == ["code version"]


@pytest.mark.parametrize("name", ["RANK", "NODE_RANK"])
def test_the_rank_may_come_from_the_environment(tmp_path: Path, name: str) -> None:
    assert parse(tmp_path, GOOD, **{name: "2"}).rank == 2
    assert parse(tmp_path, f"{GOOD} --worker 1", **{name: "2"}).rank == 1


def test_toml_and_overrides_reach_the_config(tmp_path: Path) -> None:
    flags = parse(tmp_path, "--groups_per_iteration 4 --run.seed 7 --heartbeat_s 0.5")
    assert (flags.config.groups_per_iteration, flags.config.run["seed"], flags.config.heartbeat_s) == (4, 7, 0.5)
    (tmp_path / "models" / "base").mkdir(parents=True)
    assert parse(tmp_path, "").config.model.name == str(tmp_path / "models" / "base")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-nodes 3 --master", "--rank-weights is required: 3 numbers, such as 1,1,1"),
        (GOOD, "--master or --worker R is required (or RANK or NODE_RANK in the environment)"),
        (f"{GOOD} --master --worker 1", "--master and --worker exclude each other"),
        (f"{GOOD} --worker 3", "--worker 3: must be from 1 to 2 with --num-nodes 3"),
        (f"{GOOD} --worker 0", "--worker 0: must be from 1 to 2"),
        ("--worker 1", "--worker 1: invalid with --num-nodes 1"),
        (f"{GOOD} --worker one", "argument --worker: invalid int value: 'one'"),
        ("--num-nodes 0", "--num-nodes 0: must be 1 or more"),
        ("--num-nodes 3 --rank-weights 1,1 --master", "--rank-weights 1,1: 2 numbers, expected one per node: 3"),
        ("--num-nodes 2 --rank-weights 1,x --master", "--rank-weights 1,x: must be numbers"),
        ("--num-nodes 2 --rank-weights 1,-1 --master", "--rank-weights 1,-1: must be 0 or more"),
        ("--num-nodes 2 --rank-weights 0,0 --master", "must be 0 or more, and not all 0"),
        ("--num-nodes 2 --rank-weights 1,nan --master", "--rank-weights 1,nan: must be 0 or more"),
        ("--rl-phase all", "--rl-phase all: must be one of both, rollout, update"),
        ("--rollout-split some --rl-phase rollout", "--rollout-split some: must be train-only or eval-only"),
        ("--rollout-split train-only", "--rollout-split requires --rl-phase rollout, found both"),
        ("--rollout-split eval-only --rl-phase rollout", "--rollout-split eval-only requires --eval-interval N"),
        (
            "--rollout-split train-only --rl-phase rollout --eval-interval 6",
            "--rollout-split train-only and --eval-interval exclude each other: remove one of them",
        ),
        ("--eval-interval 0", "--eval-interval 0: must be 1 or more"),
        ("--eval-interval 1 --rl-phase update", "--eval-interval requires --rl-phase both or rollout"),
        ("--max-iterations 0", "--max-iterations 0: must be 1 or more"),
        ("--master-addr 10.0.0.1 --num-nodes 2 --rank-weights 1,1 --worker 1", "--master-addr requires --master"),
        ("--max-iterations", "argument --max-iterations: expected one argument"),
        ("--no-such-flag 1", "unknown flag --no-such-flag: prl multinode start --help lists all flags"),
        ("--resume", "--resume: nothing to resume"),
    ],
)
def test_each_wrong_flag_is_one_line(tmp_path: Path, words: str, said: str) -> None:
    with pytest.raises(FlagError) as error:
        parse(tmp_path, words)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--data-path is required"),
        (["--data-path", "."], "--log-path is required"),
        (["--data-path", "/no/such", "--log-path", "x"], "--data-path /no/such: folder not found"),
    ],
)
def test_the_folders_must_be_named(argv: list[str], said: str, capsys: Any) -> None:
    assert node.main(argv) == 2
    assert capsys.readouterr().err.startswith(f"multinode: {said}")


@pytest.mark.parametrize("words", ["--heartbeat_s 0", "--run.batch_size 3", "@ none.toml", "--groups_per_iteration x"])
def test_a_wrong_config_is_refused(tmp_path: Path, words: str) -> None:
    with pytest.raises(ConfigError):
        parse(tmp_path, words)


@pytest.mark.parametrize("value", ["3", "-1", "x"])
def test_a_rank_of_the_environment_must_fit(tmp_path: Path, value: str) -> None:
    with pytest.raises(FlagError, match=f"RANK={value}: must be from 0 to 2"):
        parse(tmp_path, GOOD, RANK=value)


@pytest.mark.parametrize(("mode", "phases"), [("both", range(14)), ("rollout", range(7)), ("update", range(7, 14))])
def test_a_dry_run_prints_the_phases_and_touches_nothing(tmp_path: Path, mode: str, phases: range, capsys: Any) -> None:
    logs = tmp_path / "logs"
    assert node.main(["--data-path", str(tmp_path), "--log-path", str(logs), "--dry-run", "--rl-phase", mode]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [int(row.split()[0]) for row in rows] == list(phases)
    assert not logs.exists()


def test_the_help_has_every_flag(capsys: Any) -> None:
    assert run(["multinode", "--help"]) == 0
    shown = capsys.readouterr().out
    for action in node_parser()._actions:
        assert action.option_strings[-1] in shown


@pytest.mark.parametrize(
    ("words", "gpus", "ranks"),
    [
        ("", 0, 1),
        ("", 4, 4),
        ("--gpus-per-node 2", 4, 2),
        ("--gpus-per-node 2", 0, 2),
        ("--gpus_per_node 3", 4, 3),
        ("--gpus_per_node 3 --gpus-per-node 4", 4, 4),
        ("--trainer.device cpu", 4, 1),
    ],
)
def test_a_node_has_a_rank_of_the_trainer_for_each_gpu(tmp_path: Path, words: str, gpus: int, ranks: int) -> None:
    flags = parse(tmp_path, words)
    assert num_ranks(flags, lambda: gpus) == ranks
    if "--trainer" not in words:
        assert flags.fingerprint("v") == parse(tmp_path, "").fingerprint("v"), "nodes may differ in it"


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match=r"--gpus-per-node 3: this node has 2, by nvidia-smi"):
        num_ranks(parse(tmp_path, "--gpus-per-node 3"), lambda: 2)
    with pytest.raises(FlagError, match=r"--gpus-per-node 0: must be 1 or more"):
        parse(tmp_path, "--gpus-per-node 0")


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("0,2", 2), ("3", 1), ("", 0), ("-1", 0), ("1,9,2", 1), ("GPU-8f, GPU-1c", 2), ("0,1,-1,2", 2)],
)
def test_the_gpus_are_those_that_cuda_shows(visible: str | None, count: int) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environment, lambda: 4) == count
    assert count_gpus(environment, lambda: 0) == 0, "no driver, no GPU"


@pytest.mark.parametrize(("script", "count"), [("printf 'GPU 0: A\\n  MIG 1g: B\\nGPU 1: A\\n'", 2), ("exit 9", 0)])
def test_the_drivers_tool_lists_the_gpus(tmp_path: Path, monkeypatch: Any, script: str, count: int) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert listed_gpus() == count


def write_node(output: OutputDir, rank: int, **changes: Any) -> None:
    pid = os.getpid()
    status = NodeStatus(
        **{
            **{"rank": rank, "num_nodes": 2, "state": "working", "pid": pid, "host": socket.gethostname()},
            **{"pid_create_time": ProcessId.of(pid).create_time, "heartbeat_s": 0.05, "seq": 1, "epoch": 1},
            **{"iteration": 2, "phase": 1, "phase_name": "rollout", "updated_at": 0.0},
            **changes,
        }
    )
    write_atomic(output.node_status(rank), msgspec.json.encode(status))


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late its second look comes, the command finds no node to have been silent for longer."""
    monkeypatch.setattr("daemons.commands.multinode.NodeReader", lambda path: NodeReader(path, lambda: 0.0))


@pytest.mark.usefixtures("still")
def test_the_status_names_the_dead_and_the_awaited(tmp_path: Path, capsys: Any) -> None:
    output = OutputDir(tmp_path)
    output.group_status.parent.mkdir(parents=True)
    write_node(output, 0, state="waiting", arrived=True, waiting_on="node 1")
    write_node(output, 1, pid_create_time=1.0)
    output.group_status.write_bytes(msgspec.json.encode(GroupStatus(state="running", incarnation="a", updated_at=0.0)))
    assert run(["multinode", "status", "--log-path", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 1 and found["waited_for"] == [1] and found["group"]["state"] == "running"
    assert [(each["rank"], each["health"]) for each in found["nodes"]] == [(0, "unproven"), (1, "dead")]
    assert run(["multinode", "status", "--output-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["NODE", "HOST", "HEALTH"] and "1 rollout (awaited)" in lines[2]
    assert run(["multinode", "status", "--log-path", str(tmp_path / "none")]) == 2
    assert "no workspace at" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert run(["multinode", "status", "--log-path", str(tmp_path / "none")]) == 0
    assert "no node has started" in capsys.readouterr().out


@pytest.mark.usefixtures("still")
def test_the_status_tells_what_stands_still_and_for_how_long(tmp_path: Path, capsys: Any) -> None:
    """Node 1 is alive and its loop is not; node 0 waits for it."""
    output = OutputDir(tmp_path)
    output.group_status.parent.mkdir(parents=True)
    ended = threading.Event()

    def beat() -> None:
        for seq in itertools.count():
            write_node(output, 0, state="waiting", arrived=True, waiting_on="node 1", seq=seq, heartbeat_s=PATIENCE_S)
            write_node(
                output, 1, seq=seq, heartbeat_s=PATIENCE_S, loop=7, loop_limit_s=30.0, loop_still_s=41.0 + seq / 1e6
            )
            if ended.wait(0.02):
                return

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        wait_for(output.node_status(1).exists, "node 1", timeout_s=PATIENCE_S)
        assert run(["multinode", "status", "--log-path", str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["nodes"]
        assert [(each["health"], each["stalled_s"] and int(each["stalled_s"])) for each in found] == [
            ("alive", None),
            ("stalled", 41),
        ]
        assert run(["multinode", "status", "--log-path", str(tmp_path)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "stalled" in shown and "is alive, but its loop has stood still for 41" in shown
    finally:
        ended.set()
        beating.join()
