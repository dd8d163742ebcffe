"""Which nodes and GPUs daemons get, and what `prl up --dry-run` tells of it."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemons.cli import run
from daemons.launchers.base import (
    ORCHESTRATORS_PER_NODE,
    LaunchError,
    Place,
    choose,
    compact,
    find_place,
    nodes_needed,
    place_all,
)
from daemons.specs import TRAINER, DaemonSpec, service_specs
from daemons.submit import plan_of
from prime_rl.configs.system import SystemConfig
from prime_rl.contract.layout import OutputDir
from tests.daemons_support import ROOT

GPUS = 8
SLURM_VARIABLES = ("SLURM_JOB_ID",)


@pytest.fixture(autouse=True)
def outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SLURM_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def system(trainer: dict[str, Any], inference: dict[str, Any], **deployment: Any) -> SystemConfig:
    table = {"engine": "slurm", "trainer": trainer, "inference": inference, **deployment}
    return SystemConfig.model_validate({"deployment": table, "model": {"name": "m"}})


def specs(trainer: dict[str, Any], inference: dict[str, Any]) -> list[DaemonSpec]:
    return service_specs(OutputDir(Path("w")), system(trainer, inference))


def names(number: int) -> list[str]:
    return [f"n{each}" for each in range(number)]


@pytest.mark.parametrize(
    ("trainer", "inference", "num_nodes", "places"),
    [
        # A node of its own for the trainer; the servers share another.
        (
            (1, 8),
            (2, 4),
            2,
            {"trainer": ("n0", range(8)), "inference": ("n1", range(4)), "inference-1": ("n1", "4567")},
        ),
        # They fit beside the trainer, spread over its nodes.
        (
            (2, 4),
            (2, 4),
            2,
            {"trainer": ("n0 n1", range(4)), "inference": ("n0", "4567"), "inference-1": ("n1", "4567")},
        ),
        ((1, 4), (1, 4), 1, {"trainer": ("n0", range(4)), "inference": ("n0", "4567")}),
        # Nodes with more free GPUs come first.
        ((1, 6), (2, 2), 1, None),
        ((4, 8), (5, 2), 6, None),
        ((128, 8), (32, 8), 160, None),
    ],
)
def test_the_trainer_has_its_gpus_and_servers_fill_up_what_is_left(
    trainer: tuple[int, int], inference: tuple[int, int], num_nodes: int, places: dict[str, Any] | None
) -> None:
    found = specs(
        {"nodes": trainer[0], "gpus_per_node": trainer[1]}, {"replicas": inference[0], "gpus_per_replica": inference[1]}
    )
    if places is None and num_nodes == 1:
        with pytest.raises(LaunchError, match="free GPUs"):
            place_all(found, names(1), GPUS)
        return
    assert nodes_needed(found, GPUS) == num_nodes
    placed = place_all(found, names(num_nodes), GPUS)
    assert len(placed) == 1 + inference[0]
    for name, (nodes, devices) in (places or {}).items():
        assert placed[name] == Place(tuple(nodes.split()), tuple(map(int, devices))), name


@given(
    trainer=st.tuples(st.integers(1, 5), st.integers(0, 8)),
    inference=st.tuples(st.integers(1, 9), st.integers(0, 8)),
)
def test_no_gpu_is_given_twice_and_none_that_is_not_there(trainer: tuple[int, int], inference: tuple[int, int]) -> None:
    found = specs(
        {"nodes": trainer[0], "gpus_per_node": trainer[1]}, {"replicas": inference[0], "gpus_per_replica": inference[1]}
    )
    placed = place_all(found, names(nodes_needed(found, GPUS)), GPUS)
    given_out = [(node, device) for place in placed.values() for node in place.nodes for device in place.devices]
    assert len(given_out) == len(set(given_out)) and all(device < GPUS for _, device in given_out)
    assert [len(placed[spec.name].devices) for spec in found] == [spec.gpus for spec in found]


def test_a_trainer_goes_on_with_the_nodes_that_are_left_if_they_suffice() -> None:
    (inference, trainer) = specs({"nodes": 4, "min_nodes": 3, "gpus_per_node": 8}, {"gpus_per_replica": 2})
    up = ["n0", "n2", "n3"]
    taken = {inference.name: Place(("n4",), (0, 1))}
    assert find_place(trainer, up, taken, trainer, GPUS).nodes == ("n0", "n2", "n3")
    with pytest.raises(LaunchError, match="expected at least 3 nodes that are up with 8 free GPUs, found 2 of 2"):
        find_place(trainer, up[:2], taken, trainer, GPUS)
    with pytest.raises(LaunchError, match="found 0 of 0: none"):
        choose(inference, [], [], GPUS)


def test_without_gpus_servers_are_spread_and_a_trainer_is_on_the_first_node() -> None:
    *servers, trainer = specs({}, {"replicas": 4})
    placed = place_all([*servers, trainer], names(3))
    assert [placed[spec.name].nodes for spec in servers] == [("n0",), ("n1",), ("n2",), ("n0",)]
    assert placed[TRAINER] == Place(("n0",))


def test_orchestrators_fill_one_node_after_another() -> None:
    each = ORCHESTRATORS_PER_NODE
    found = [DaemonSpec(f"run_{number}", (), Path("log"), f"run_{number}") for number in range(2 * each + 2)]
    (trainer,) = (spec for spec in specs({}, {}) if spec.name == TRAINER)
    placed: dict[str, Place] = {}
    for spec in found:
        placed[spec.name] = find_place(spec, names(2), placed, trainer)
    nodes = [placed[spec.name].nodes[0] for spec in found]
    assert nodes == ["n0"] * each + ["n1"] * each + ["n0"] * 2
    assert find_place(found[0], names(2)[1:], placed, trainer).nodes == ("n1",)
    with pytest.raises(LaunchError, match="found 0 of 0"):
        find_place(found[0], [], placed, trainer)


def test_what_no_node_can_hold_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"a daemon needs 8 GPUs of one node, which has 4"):
        nodes_needed(specs({"gpus_per_node": 8}, {}), 4)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n9", "n10", "n12"], "n[9-10],n12"),
        (["n01", "n02", "x1", "x2"], "n01,n02,x[1-2]"),
        (["0", "1", "3"], "[0-1],3"),
    ],
)
def test_names_are_shortened(nodes: list[str], text: str) -> None:
    assert compact(nodes) == text


@pytest.mark.parametrize("num_nodes", [1, 4, 128])
def test_a_dry_run_tells_what_goes_where_and_touches_nothing(tmp_path: Path, num_nodes: int) -> None:
    output = OutputDir(tmp_path / "none")
    table = {"slurm": {"partition": "gpu", "gpus_per_node": 8, "extra_args": ["--qos=low"]}}
    asked = system({"nodes": num_nodes, "gpus_per_node": 8}, {"replicas": 4, "gpus_per_replica": 2}, **table)
    plan = plan_of(asked, output)
    assert plan.nodes[-1] == f"node{num_nodes + 1}" and not output.path.exists()
    assert {f"--nodes={num_nodes + 1}", "--gpus-per-node=8", "--partition=gpu", "--qos=low"} <= set(plan.submit)
    assert plan.submit[-1].endswith("job.sh") and "daemons.cli up --foreground --output-dir" in plan.script
    daemons = {each.name: each for each in plan.daemons}
    assert list(daemons) == ["inference", "inference-1", "inference-2", "inference-3", "trainer", "run_ID"]
    trainer = daemons["trainer"]
    assert (trainer.num_nodes, trainer.ranks, trainer.gpus) == (num_nodes, 8 * num_nodes, tuple(range(8)))
    assert [daemons[name].gpus for name in ("inference", "inference-3")] == [(0, 1), (6, 7)]
    assert {each.command[0] for each in plan.daemons} == {"srun"}
    text = "\n".join(plan.lines())
    where = f"node[1-{num_nodes}]" if num_nodes > 1 else "node1"
    assert f"trainer      {where} " in text and shlex.join(trainer.command) in text
    assert (f"--nnodes {num_nodes} " in text) is (num_nodes > 1)


def test_the_table_of_the_document_is_what_a_dry_run_prints(tmp_path: Path) -> None:
    chapter = (ROOT / "docs" / "deploy.md").read_text().partition("## Slurm\n")[2].partition("\n## ")[0]
    section = chapter.partition("### A system file\n")[2]
    blocks = re.findall(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    asked = SystemConfig.model_validate({**tomllib.loads(blocks[0]), "model": {"name": "m"}})
    (table,) = (block for block in blocks if block.startswith("daemon "))
    assert f"\n{table}\n" in "\n".join(plan_of(asked, OutputDir(tmp_path / "none")).lines())


def test_a_dry_run_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRL_OUTPUT_DIR", str(tmp_path / "w"))
    words = ["up", "--dry-run", "--model.name", "m", "--deployment.trainer.gpus", "[0, 1]"]
    assert run([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["version"], told["engine"], told["submit"]) == (1, "local", [])
    assert [(each["name"], each["gpus"], each["ranks"]) for each in told["daemons"]] == [
        ("inference", [], 1),
        ("trainer", [0, 1], 2),
        ("run_ID", [], 1),
    ]
    assert "CUDA_VISIBLE_DEVICES=0,1" in told["daemons"][1]["command"]
    assert run(words) == 0
    assert "daemon     nodes" in capsys.readouterr().out
    assert run([*words, "--deployment.engine=ray", "--deployment.trainer.gpus=[]", "--deployment.trainer.nodes=4"]) == 0
    printed = capsys.readouterr().out
    assert "trainer    any 4  -" in printed and "--nnodes 4 --rdzv-backend static --rdzv-endpoint NODE:PORT" in printed
    assert run(["up", "--json"]) == 2 and "--dry-run" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert run([*words, "--json", "--output-dir", "w"]) == 0
    assert json.loads(capsys.readouterr().out) == told, "a start names files by their whole paths"
    assert not (tmp_path / "w").exists()


def test_a_server_that_starts_again_has_all_that_the_trainer_in_its_place_leaves() -> None:
    trainer = DaemonSpec(TRAINER, ("t",), Path("t.log"), gpus=1)
    server = DaemonSpec("inference", ("i",), Path("i.log"), gpus=1, replica=0)
    taken = {TRAINER: Place(("n0",), (0,))}
    assert find_place(server, ["n0"], taken, trainer, capacity=2) == Place(("n0",), (1,))
    assert find_place(server, ["n0"], {}, trainer, capacity=2) == Place(("n0",), (1,)), "and before it has a place"
