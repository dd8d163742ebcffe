"""Sweeps: the grid and its names, all or nothing, twice is once, and what a kill in the middle leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from daemons import adding, sweeps
from daemons.actions import ActionError, WrongUseError
from daemons.cli import app
from daemons.sweeps import grid, parse_axis, sweep_runs
from daemons.workspace_reader import read_workspace
from prime_rl.configs.validate import load_run_config
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.notes import list_sweeps, read_plan
from tests.daemons_support import ROOT, RUN_TOML

AXES = ["optim.lr=1e-4,3e-4", "seed=1,2,3"]
IDS = [f"run_s-lr{lr}-seed{seed}" for lr in ("1e-4", "3e-4") for seed in (1, 2, 3)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "s.toml"
    path.write_text('tags = ["mine"]\n' + RUN_TOML.format(max_steps=3, model="m"))
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "out"


def runs(home: Path) -> list[str]:
    return sorted(run.run_id for run in read_workspace(home).runs)


@pytest.mark.parametrize(
    ("item", "values"),
    [
        ("seed=1,2", (1, 2)), ("optim.lr=1e-4, 3e-4", (1e-4, 3e-4)), ("optim.type=sgd,adamw", ("sgd", "adamw")),
        ('tags=["a","b"],["c"]', (["a", "b"], ["c"])), ("x={a=1,b=2},{a=3}", ({"a": 1, "b": 2}, {"a": 3})),
        ("name='a,b',c", ("a,b", "c")), ("flag=true", (True,)),
    ],
)  # fmt: skip
def test_values_are_split_at_outer_commas(item: str, values: tuple[Any, ...]) -> None:
    assert parse_axis(item).values == values


@pytest.mark.parametrize("item", ["seed", "seed=", "=1,2", "seed=1,,2", "seed=1,1", "optim.lr=1e-4,0.0001"])
def test_what_is_not_a_list_of_values_is_wrong_use(item: str) -> None:
    with pytest.raises(WrongUseError, match="invalid --set"):
        parse_axis(item)


@pytest.mark.parametrize(
    ("items", "ids"),
    [
        (AXES, IDS),
        (["optim.lr=1e-3", "seed=1,2"], ["run_s-seed1", "run_s-seed2"]),
        (["optim.type=a,b", "loss.type=a,b"], [f"run_s-optim.type{o}-loss.type{loss}" for o in "ab" for loss in "ab"]),
        (["seed=7"], ["run_s"]),
    ],
)
def test_runs_are_named_by_what_differs(items: list[str], ids: list[str]) -> None:
    assert list(grid([parse_axis(item) for item in items], "s")) == ids


def test_ids_stay_short_and_different() -> None:
    long = grid([parse_axis(f"env={'x' * 90}a,{'x' * 90}b"), parse_axis("seed=1,2")], "s" * 40)
    odd = grid([parse_axis("name='a b','a-b'")], "s")
    assert len(long) == 4 and len(odd) == 2
    for run_id in (*long, *odd):
        assert OutputDir(Path("/x")).run(run_id).run_id == run_id
    assert list(grid([parse_axis("name='a b','a-b'")], "s")) == list(odd), "the same each time"


@pytest.mark.parametrize(
    "items", [[], ["seed=1,2", "seed=3"], [f"{key}={','.join(map(str, range(40)))}" for key in ("seed", "max_steps")]]
)
def test_grids_that_are_no_grids_are_wrong_use(items: list[str]) -> None:
    with pytest.raises(WrongUseError):
        grid([parse_axis(item) for item in items], "s")


def test_a_sweep_adds_all_its_runs_and_then_its_plan(home: Path, source: Path) -> None:
    made = sweep_runs(home, source, AXES, halving=3, metric="eval/pass@1")
    assert made.added == IDS and runs(home) == sorted(IDS)
    config = load_run_config(OutputDir(home).run(IDS[4]).orch_toml)
    assert (config.optim.lr, config.seed, config.tags) == (3e-4, 2, ["mine", "s"])
    plan = read_plan(OutputDir(home), "s")
    assert plan == made.plan and plan is not None and list_sweeps(OutputDir(home)) == ["s"]
    written = json.loads(OutputDir(home).sweep("s").read_text())
    assert written["version"] == 1 and written["halving"] == 3 and written["metric"] == "eval/pass@1"
    assert written["runs"][4] == {"run_id": IDS[4], "set": {"optim.lr": 3e-4, "seed": 2}}
    lines = [json.loads(line) for line in OutputDir(home).audit.read_text().splitlines()]
    assert [line["action"] for line in lines] == ["add"] * 6 + ["sweep"]


def test_what_is_rarely_meant_is_told_once(home: Path, source: Path) -> None:
    made = sweep_runs(home, source, ["optim.lr=1e15,1e-4", "seed=1,2"])
    [doubt] = made.doubts
    assert doubt.key == "optim.lr" and len(made.added) == 4
    assert sweep_runs(home, source, ["optim.lr=1e15,1e-4", "seed=1,2"]).doubts == []


def test_twice_is_once_and_another_grid_needs_another_name(home: Path, source: Path) -> None:
    sweep_runs(home, source, AXES)
    before = OutputDir(home).audit.read_text()
    assert sweep_runs(home, source, AXES).added == []
    with pytest.raises(ActionError, match="sweep 's' exists with another grid or file"):
        sweep_runs(home, source, ["seed=1,2"])
    source.write_text(source.read_text(encoding="utf-8").replace("max_steps = 3", "max_steps = 4"), encoding="utf-8")
    with pytest.raises(ActionError, match="sweep 's' exists with another grid or file"):
        sweep_runs(home, source, AXES)
    assert OutputDir(home).audit.read_text() == before and runs(home) == sorted(IDS)
    assert len(sweep_runs(home, source, AXES, name="t").added) == 6


def test_one_bad_point_adds_nothing(home: Path, source: Path) -> None:
    with pytest.raises(ActionError, match=r"nothing was added: with optim\.lr=-1: .*optim\.lr"):
        sweep_runs(home, source, ["optim.lr=1e-4,-1"])
    assert not home.exists()


def test_a_name_that_is_taken_adds_nothing(home: Path, source: Path) -> None:
    other = OutputDir(home).run(IDS[3])
    other.control.mkdir(parents=True)
    with pytest.raises(ActionError, match=f"nothing was added: run '{IDS[3]}' exists"):
        sweep_runs(home, source, AXES)
    assert [path.name for path in home.iterdir()] == [IDS[3]] and list_sweeps(OutputDir(home)) == []


def test_an_error_on_the_way_takes_back_what_was_added(
    home: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, done = adding.put, list[str]()

    def full(output: OutputDir, folder: Path, names: list[str]) -> Any:
        if len(done) == 4:
            raise OSError(28, "No space left on device")
        done.extend(names)
        return put(output, folder, names)

    monkeypatch.setattr(sweeps, "put", full)
    with pytest.raises(ActionError, match="No space left on device"):
        sweep_runs(home, source, AXES)
    assert len(done) == 4 and list(home.iterdir()) == []


KILLED = """
import os, signal, sys
from daemons import sweeps
from daemons.cli import run
put, done = sweeps.put, []
def killed(*args):
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(put(*args))
    return done[-1]
sweeps.put = killed
run(sys.argv[1:])
"""


def test_a_killed_sweep_is_completed_by_the_same_command(home: Path, source: Path) -> None:
    args = ["runs", "sweep", str(source), *(f"--set={axis}" for axis in AXES), "--output-dir", str(home)]
    assert subprocess.run([sys.executable, "-c", KILLED, *args], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert runs(home) == sorted(IDS[:3]) and list_sweeps(OutputDir(home)) == []
    done = CliRunner().invoke(app, [*args, "--json"])
    answer = json.loads(done.stdout)
    assert answer["added"] == IDS[3:] and runs(home) == sorted(IDS)
    plan = read_plan(OutputDir(home), "s")
    assert plan is not None and answer["plan"] == msgspec.to_builtins(plan)


def test_a_dry_run_names_the_runs_and_adds_none(home: Path, source: Path) -> None:
    args = ["runs", "sweep", str(source), *(f"--set={axis}" for axis in AXES), "--output-dir", str(home), "--dry-run"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0 and done.stdout.splitlines()[0] == f"would add {IDS[0]} (optim.lr=0.0001, seed=1)"
    assert len(done.stdout.splitlines()) == 6 and not home.exists()


def test_a_sweep_may_start_from_an_adapter(home: Path, source: Path, tmp_path: Path) -> None:
    from tests.unit.test_daemons_forks import put_adapter

    folder = put_adapter(tmp_path / "peft")
    source.write_text(source.read_text(encoding="utf-8") + f'[init]\nfrom = "{folder}"\n', encoding="utf-8")
    for run_id in sweep_runs(home, source, ["seed=1,2"]).added:
        assert (OutputDir(home).run(run_id).init / "adapter_model.safetensors").exists()


TEXTS = 'kind = "sft"\nbatch_size = 2\nmax_steps = 20\n[model]\nname = "m"\n[[data]]\npath = "notes.jsonl"\n'


def put_texts(folder: Path, more: str = "") -> Path:
    (folder / "notes.jsonl").write_text('{"prompt": "q", "completion": "a"}\n' * 8)
    (folder / "t.toml").write_text(TEXTS + more)
    return folder / "t.toml"


def test_a_sweep_over_texts_is_decided_by_what_is_held_out(home: Path, tmp_path: Path) -> None:
    interval = "[sft]\nheld_out_interval = 2\n"
    plan = sweep_runs(home, put_texts(tmp_path, interval), ["seed=1,2,3"], halving=3).plan
    assert (plan.metric, plan.mode) == ("held_out/loss", "min")
    assert [OutputDir(home).run(each.run_id).data_file("notes.jsonl").exists() for each in plan.runs] == [True] * 3
    assert sweep_runs(home, tmp_path / "t.toml", ["seed=1,2,3"], halving=3).added == []
    put_texts(tmp_path, "num_held_out = 0\n")
    plan = sweep_runs(home, tmp_path / "t.toml", ["seed=1,2"], name="u", halving=2).plan
    assert (plan.metric, plan.mode) == ("supervised/loss", "min"), "nothing is held out"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["seed=1,2,3"], "the first rung is step 7, held_out/loss is measured at steps 1, 11, .*below 7$"),
        (["seed=1,2", "sft.held_out_interval=2,7"], r"the first rung is step 3, .* steps 1, 8, .* below 3$"),
        (["seed=1,2,3", "max_steps=2"], "the first rung is step 1, .*: raise max_steps$"),
    ],
)
def test_a_rung_before_anything_is_measured_is_refused(
    home: Path, tmp_path: Path, axes: list[str], message: str
) -> None:
    with pytest.raises(WrongUseError, match=f"--halving 3: {message}"):
        sweep_runs(home, put_texts(tmp_path), axes, halving=3)
    assert not home.exists()
    at_the_rung = ["seed=1,2,3", "sft.held_out_interval=6"]
    assert len(sweep_runs(home, put_texts(tmp_path), at_the_rung, halving=3).added) == 3
    assert sweep_runs(home, put_texts(tmp_path), ["seed=4,5"], name="v", halving=2, metric="supervised/loss").added
