"""The whole system once, as quick as it gets: real daemons, a config that is mended, a run that trains, and the end."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.contract.files import write_atomic
from prime_rl.contract.layout import list_steps
from prime_rl.contract.samples import read_batches
from prime_rl.contract.status import TrainerStatus, read_status
from tests.metrics_support import undocumented
from tests.system_support import Workspace, closed, make_workspace, read_metrics

NUM_STEPS = 2


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, untaught_model: Path) -> Iterator[tuple[Workspace, dict[str, str]]]:
    """A workspace that was up until its run had finished, and what was seen on the way."""
    workspace = make_workspace(tmp_path_factory.mktemp("quick"), untaught_model)
    for _ in closed(workspace):
        workspace.up()
        good = workspace.write_run("a", max_steps=NUM_STEPS).read_text()
        run, seen = workspace.run_dir("run_a"), {}
        run.control.mkdir(parents=True)
        write_atomic(run.orch_toml, good.replace("batch_size = 16", "batch_size = 15"))
        workspace.wait(run.config_error.exists, "the validation error of run_a")
        seen["error"], seen["invalid"] = run.config_error.read_text(), workspace.state("run_a")
        write_atomic(run.orch_toml, good)

        def is_through() -> bool:  # its slot is free a little after its last version is there
            found = workspace.runs()["run_a"]
            return (found["state"], found["run_idx"]) == ("finished", None)

        workspace.wait(is_through, "run_a to be admitted, to finish and to leave its slot")
        idle = read_status(workspace.paths.trainer_status, TrainerStatus)
        assert idle is not None and not idle.runs
        assert (idle.tokens_per_s, idle.time_s) == (0.0, {}), "nobody trains"
        workspace.prl("down")
        yield workspace, seen


def test_a_config_that_is_mended_is_admitted(lived: tuple[Workspace, dict[str, str]]) -> None:
    workspace, seen = lived
    assert "15" in seen["error"] and "multiple" in seen["error"] and seen["invalid"] == "invalid"
    assert not workspace.run_dir("run_a").config_error.exists()


def test_a_run_trains_and_leaves_its_versions_checkpoint_and_figures(lived: tuple[Workspace, dict[str, str]]) -> None:
    run = lived[0].run_dir("run_a")
    assert list_steps(run.broadcast, stable_only=True)[-1] == NUM_STEPS
    assert list_steps(run.checkpoints, stable_only=True)[-1] == NUM_STEPS
    lines = read_metrics(run.trainer_metrics)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert undocumented("trainer", lines) == set()
    assert undocumented("orchestrator", read_metrics(run.orchestrator_metrics)) == set()


def test_the_trainer_has_the_ratios_of_the_rollouts_that_the_run_keeps(lived: tuple[Workspace, dict[str, str]]) -> None:
    run = lived[0].run_dir("run_a")
    batches = read_batches(run.samples, run.ratios, 9)
    assert batches
    for batch in batches:
        assert [sample.place for sample in batch.samples] == sorted(batch.ratios)
        for sample in batch.samples:
            assert sample.tokens is not None
            assert len(batch.ratios[sample.place]) == sum(each is not None for each in sample.tokens.logprobs)


def test_down_leaves_no_process(lived: tuple[Workspace, dict[str, str]]) -> None:
    workspace, _ = lived
    assert workspace.processes() == []
    status = read_status(workspace.paths.trainer_status, TrainerStatus)
    assert status is not None and (status.state, status.runs) == ("stopped", {})
    assert (status.tokens_per_s, status.time_s) == (0.0, {})


def test_every_number_of_a_run_is_that_of_its_files(lived: tuple[Workspace, dict[str, str]]) -> None:
    workspace, _ = lived
    run, shown = workspace.run_dir("run_a"), workspace.runs()["run_a"]
    trained, sampled = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (run.trainer_metrics, run.orchestrator_metrics)
    )
    config = tomllib.loads(run.orch_toml.read_text())
    # Who reads them did not write them: names of folders, lines of JSON and TOML alone.
    newest = max(int(path.name.removeprefix("step_")) for path in run.broadcast.iterdir())
    last = [line for line in sampled if line["step"] == NUM_STEPS]
    expected = {
        "state": "finished",
        "step": newest,
        "max_steps": config["max_steps"],
        "policy_version": newest,
        "reward": pytest.approx(next(line["reward/mean"] for line in last if "reward/mean" in line)),
        "lr": config["optim"]["lr"],
        "batch_size": config["batch_size"],
        "num_restarts": 0,
        "run_idx": None,
        "queue_position": None,
        "tokens_per_s": None,
        "async_level": None,
    }
    assert {name: shown[name] for name in expected} == expected and trained[-1]["step"] == newest
    whole = workspace.json("runs", "show", "run_a")
    assert whole["run"] | {"log_tail": []} == shown | {"log_tail": []}
    for name, lines in (("trainer", trained), ("orchestrator", last)):
        of_step = {key: value for line in lines if line["step"] == newest for key, value in line.items()}
        assert whole["metrics"][name] == {
            key: pytest.approx(value) for key, value in of_step.items() if is_number(value)
        }
    assert [each["step"] for each in whole["checkpoints"]] == [
        int(path.name.removeprefix("step_")) for path in sorted(run.checkpoints.iterdir())
    ]
    for each in whole["checkpoints"]:
        folder = run.checkpoints / f"step_{each['step']}"
        assert each["num_bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    status = workspace.json("status")
    assert status["runs"] == [shown] and [each["run_id"] for each in status["slots"]] == [None] * len(status["slots"])
    (used,) = workspace.json("usage")["rows"]
    assert used["tokens_trained"] == sum(line["tokens"] for line in trained)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
