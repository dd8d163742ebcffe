"""Runs ranked at equal steps, by group and by environment: what counts, what is told, and what `prl` prints of it."""

from __future__ import annotations

import csv
import io
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemons.cli import run as prl
from daemons.commands.runs import SortBy, sorted_runs
from daemons.ranking import (
    NO_TAG,
    TAG,
    RunValues,
    environment_of,
    notes,
    rank,
    read_contestants,
    standard_error,
    winners,
)
from daemons.workspace_reader import read_workspace
from prime_rl.contract.files import mark_stable
from prime_rl.contract.layout import OutputDir
from tests.runs_support import add
from tests.unit.test_daemons_forks import put_version
from tui.readers.compare import CompareReader, CompareRequest

REWARD = "reward/mean"


def values(run_id: str, found: list[float], *, tags: tuple[str, ...] = (), **config: str) -> RunValues:
    keys = {key.replace("__", "."): value for key, value in config.items()}
    return RunValues(run_id, tags, keys, tuple(map(float, range(1, len(found) + 1))), tuple(found))


def test_a_run_that_has_failed_holds_no_other_back() -> None:
    bad = replace(values("run_bad", [0.9, 0.9]), has_failed=True)
    good, other = values("run_good", [0.1] * 20), values("run_other", [0.2] * 30)
    found = rank([bad, good, other], REWARD)
    assert [(each.name, each.place, each.step) for each in found] == [
        *(("run_other", 1, 20), ("run_good", 2, 20), ("run_bad", None, 20))
    ]
    assert "not ranked: run_bad" in notes(found, REWARD)[-1]
    assert rank([bad], REWARD)[0].place == 1, "there is no other"


def test_a_run_that_is_further_has_no_advantage() -> None:
    """Both have the same curve, and one of them has had more time."""
    curve = [step / 100 for step in range(1, 101)]
    long, short = values("run_long", curve), values("run_short", curve[:30])
    found = rank([long, short], REWARD)
    assert [each.value for each in found] == [pytest.approx(0.255)] * 2 and {each.step for each in found} == {30}
    [note] = notes(found, REWARD)
    assert "compared at step 30, the newest of run_short" in note and "--step 100 ranks" in note
    assert ":step 100 ranks" in notes(found, REWARD, ":step")[0]


def test_at_a_given_step_runs_that_are_not_there_are_named_and_not_ranked() -> None:
    runs = [values("run_a", [0.1] * 30), values("run_b", [0.9] * 10), values("run_c", [])]
    found = rank(runs, REWARD, step=30)
    assert [(each.name, each.place, each.value) for each in found] == [
        ("run_a", 1, pytest.approx(0.1)),
        ("run_b", None, None),
        ("run_c", None, None),
    ]
    assert notes(found, REWARD) == ("not ranked: run_b, run_c, no reward/mean at step 30 yet",)
    assert notes(rank(runs[:1], REWARD), REWARD) == ()


def test_seeds_are_one_group_with_mean_standard_error_and_number() -> None:
    rewards = {"1": [0.2, 0.4, 0.6], "2": [0.5, 0.5, 0.8]}
    runs = [
        values(f"run_{lr}_{seed}", [reward] * 20, optim__lr=lr)
        for lr, found in rewards.items()
        for seed, reward in enumerate(found)
    ]
    best, other = rank([*runs, values("run_new", [], optim__lr="1")], REWARD, by="optim.lr")
    assert (best.name, best.place, best.num) == ("2", 1, 3) and best.value == pytest.approx(0.6)
    assert best.se == pytest.approx(statistics.stdev(rewards["2"]) / 3**0.5)
    assert [run.run_id for run in best.runs] == ["run_2_2", "run_2_0", "run_2_1"]
    assert (other.name, other.place, other.num) == ("1", 2, 3)
    assert other.results[-1] is None and other.runs[-1].run_id == "run_new"


def test_runs_of_different_environments_are_never_in_one_ranking() -> None:
    runs = [
        values("run_easy", [0.9], tags=("x",), env__0__id='"sort"', env__0__args__max_len="3"),
        values("run_hard", [0.2], tags=("x",), env__0__id='"sort"', env__0__args__max_len="9"),
        values("run_none", [0.5]),
    ]
    found = rank(runs, REWARD, by=TAG)
    assert [(each.environment, each.name, each.place) for each in found] == [
        ("sort max_len=3", "x", 1),
        ("sort max_len=9", "x", 1),
        ("unknown environment", NO_TAG, 1),
    ]
    assert len(winners(found)) == 3
    assert notes(found, REWARD)[0].startswith("3 environments, each ranked by itself")


def test_an_environment_is_what_decides_its_rewards_and_hides_keys() -> None:
    config = {
        "env.0.id": "a",
        "env.0.args.api_key": "secret",
        "env.0.prompt.template": "x",
        "env.0.timeout_s": "3",
        "env.0.weight": "1.0",
        "env.0.reward_range": "[0.0, 1.0]",
        "env.1.id": "b",
        "env.1.reward_range": "[-1.0, 1.0]",
    }
    assert environment_of(config) == "a api_key=(hidden) + b reward_range=[-1.0, 1.0]"


def test_a_group_whose_runs_differ_in_more_than_their_seed_is_told() -> None:
    def run(name: str, **config: str) -> RunValues:
        return RunValues(name, ("t",), {"env.0.id": "e", "optim.lr": "1e-3", **config}, (1.0,), (0.5,))

    seeds = [run("run_a", seed="1"), run("run_b", seed="2")]
    assert notes(rank(seeds, REWARD, by="optim.lr"), REWARD) == ()
    other = run("run_c", seed="3", batch_size="64", tags='["x"]')
    for by, name in (("optim.lr", "1e-3"), (TAG, "t")):
        words = f"the runs of '{name}' differ not only in their seed: batch_size"
        assert notes(rank([*seeds, other], REWARD, by=by), REWARD) == (words,)
    assert notes(rank([*seeds, other], REWARD), REWARD) == ()
    untagged = [replace(each, tags=()) for each in (*seeds, other)]
    assert notes(rank(untagged, REWARD, by=TAG), REWARD) == ()
    many = run("run_d", **{f"k{number}": "1" for number in range(9)})
    assert notes(rank([*seeds, many], REWARD, by=TAG), REWARD)[0].endswith("k0, k1, k2, k3, k4 and 4 more")


@pytest.mark.parametrize(("metric", "first"), [("loss", "run_low"), (REWARD, "run_high")])
def test_of_some_metrics_less_is_better(metric: str, first: str) -> None:
    assert rank([values("run_low", [0.1]), values("run_high", [0.9])], metric)[0].name == first


def test_of_an_evaluation_the_newest_value_counts() -> None:
    run = values("run_a", [0.1, 0.5])
    assert rank([run], "eval/pass@1")[0].value == 0.5 and rank([run], REWARD)[0].value == pytest.approx(0.3)
    assert rank([run], REWARD, last=1)[0].value == 0.5


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.lists(NUMBERS, max_size=15), max_size=6), st.none() | st.integers(1, 20))
def test_a_ranking_has_every_run_once_the_best_first_and_never_raises(curves: list[list[float]], step: Any) -> None:
    runs = [values(f"run_{number}", curve) for number, curve in enumerate(curves)]
    found = rank(runs, REWARD, step=step)
    assert {each.name for each in found} == {run.run_id for run in runs} and len(found) == len(runs)
    assert [each.place for each in found if each.place] == list(
        range(1, sum(each.place is not None for each in found) + 1)
    )
    notes(found, REWARD)
    standard_error([value for curve in curves for value in curve])


TOML = 'batch_size = 8\nrollouts_per_example = 4\nseed = {seed}\ntags = ["{tag}"]\nmodel = {{ name = "m" }}\n'


@pytest.fixture
def workspace(tmp_path: Path) -> OutputDir:
    output = OutputDir(tmp_path)
    for run_id, env, rewards in (
        ("run_a", "sort-letters", [0.5, 0.7]),
        ("run_b", "sort-letters", [0.2]),
        ("run_c", "arithmetic", [0.9]),
    ):
        run = output.run(run_id)
        run.control.mkdir(parents=True)
        run.metrics.mkdir()
        text = TOML.format(seed=len(rewards), tag=env) + f'env = [{{ id = "{env}" }}]\n'
        run.orch_toml.write_text(text)
        lines = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, start=1)]
        run.orchestrator_metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        run.trainer_metrics.write_text('{"step": 1, "loss": 0.25}\n')
    return output


def best(workspace: OutputDir, capsys: Any, *words: str) -> tuple[str, str]:
    assert prl(["runs", "best", "--output-dir", str(workspace.path), *words]) == 0
    shown = capsys.readouterr()
    return shown.out, shown.err


def test_best_prints_each_environment_and_what_to_know_of_it(workspace: OutputDir, capsys: Any) -> None:
    out, err = best(workspace, capsys)
    assert "arithmetic, at step 1, mean of the last 10:" in out and out.count("★") == 2
    assert "2 environments" in err and "run_b" in err
    out, err = best(workspace, capsys, "--tag", "sort-letters", "--step", "2")
    assert "★  run_a" in out and "not ranked: run_b" in err and "environments" not in err


def test_only_updates_that_are_done_count(workspace: OutputDir, capsys: Any) -> None:
    for run_id in ("run_a", "run_b"):  # the second batch of run_a is made, and not yet trained on
        folder = workspace.run(run_id).broadcast_dir(1)
        folder.mkdir(parents=True)
        mark_stable(folder)
    found = json.loads(best(workspace, capsys, "--json", "--tag", "sort-letters")[0])["standings"]
    assert [(each["step"], each["runs"][0]["step"], each["value"]) for each in found] == [(1, 1, 0.5), (1, 1, 0.2)]


def test_best_is_stable_json_and_csv(workspace: OutputDir, capsys: Any) -> None:
    words = ["--tag", "sort-letters", "--by", "seed"]
    found = json.loads(best(workspace, capsys, *words, "--json")[0])
    assert found["standings"][0] == {
        "environment": "sort-letters",
        "step": 1,
        "place": 1,
        "name": "2",
        "value": 0.5,
        "standard_error": None,
        "num_runs": 1,
        "runs": [{"run_id": "run_a", "step": 2, "value": 0.5}],
        "metric": "reward/mean",
    }
    rows = list(csv.DictReader(io.StringIO(best(workspace, capsys, *words, "--csv")[0])))
    assert [(row["place"], row["seed"], row["reward/mean"], row["runs"]) for row in rows] == [
        ("1", "2", "0.5", "run_a"),
        ("2", "1", "0.2", "run_b"),
    ]
    for last, value in (("1", 0.7), ("2", pytest.approx(0.6))):
        found = json.loads(best(workspace, capsys, *words, "--step", "2", "--last", last, "--json")[0])["standings"]
        assert found[0]["value"] == value, f"the mean of the last {last}"
    loss = json.loads(best(workspace, capsys, "--metric", "loss", "--json")[0])
    assert {each["value"] for each in loss["standings"]} == {0.25}, "a metric of the trainer"


def test_runs_that_learn_texts_are_ranked_by_loss_and_never_with_rewards(workspace: OutputDir, capsys: Any) -> None:
    for run_id, losses in (("run_t", [3.0, 2.0]), ("run_u", [3.0, 1.0])):
        run = workspace.run(run_id)
        run.control.mkdir(parents=True)
        run.metrics.mkdir()
        text = 'kind = "sft"\nbatch_size = 8\nmodel = { name = "m" }\ndata = [{ path = "words.jsonl" }]\n'
        run.orch_toml.write_text(text)
        lines = [{"step": step, "supervised/loss": loss} for step, loss in enumerate(losses, start=1)]
        run.trainer_metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def places() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for each in json.loads(best(workspace, capsys, "--json")[0])["standings"]:
            found.setdefault(f"{each['metric']} {each['environment']}", []).append(each["name"])
        return found

    assert places()["supervised/loss texts words.jsonl"] == ["run_u", "run_t"]
    for run_id, loss in (("run_t", 0.5), ("run_u", 0.7)):
        with workspace.run(run_id).trainer_metrics.open("a") as file:
            file.write(json.dumps({"step": 3, "supervised/loss": 1.0, "held_out/loss": loss}) + "\n")
    assert places()["held_out/loss texts words.jsonl"] == ["run_t", "run_u"]
    (control := workspace.run("run_new").control).mkdir(parents=True)
    (control / "orch.toml").write_text(text)
    assert places()["held_out/loss texts words.jsonl"][:2] == ["run_t", "run_u"], (
        "one that has not begun changes nothing"
    )
    assert "by their loss" in best(workspace, capsys)[1]
    assert prl(["runs", "best", "--output-dir", str(workspace.path), "--csv"]) == 2
    assert "runs of two kinds" in capsys.readouterr().err


def test_best_refuses_a_key_that_no_run_has(workspace: OutputDir, capsys: Any) -> None:
    assert prl(["runs", "best", "--output-dir", str(workspace.path), "--by", "optim.lx"]) == 2
    assert "--by optim.lx" in capsys.readouterr().err


def test_runs_are_listed_by_a_column(workspace: OutputDir, capsys: Any) -> None:
    runs = [
        replace(run, reward=reward)
        for run, reward in zip(read_workspace(workspace.path).runs, (0.1, None, 0.7), strict=True)
    ]
    assert [run.reward for run in sorted_runs(runs, SortBy.REWARD)] == [0.7, 0.1, None]
    assert sorted_runs(runs, SortBy.SLOT) == runs
    assert prl(["runs", "list", "--output-dir", str(workspace.path), "--sort", "step", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 3


def test_compare_ranks_what_best_ranks(tmp_path: Path) -> None:
    """A batch that no update was made of yet counts for neither: the last of run_b would make it the best."""
    for run_id, rewards in (("run_a", [0.5, 0.6, 0.7]), ("run_b", [0.1, 0.2, 0.3, 9.0])):
        run = add(tmp_path, run_id)
        lines = [json.dumps({"step": step, REWARD: reward}) for step, reward in enumerate(rewards, start=1)]
        run.orchestrator_metrics.parent.mkdir(parents=True)
        run.orchestrator_metrics.write_text("".join(f"{line}\n" for line in lines))
        put_version(run, 3)
    for step in (None, 4):
        views = read_workspace(tmp_path).runs
        best = rank(read_contestants(tmp_path, views, REWARD), REWARD, step=step)
        request = CompareRequest(tuple((view.run_id, view.tags, view.step) for view in views), step=step)
        data, _ = CompareReader(tmp_path).read(request)
        assert data is not None and data.notes == notes(best, REWARD)
        assert [(each.name, each.step, each.result) for each in data.groups] == [
            (each.name, each.step, pytest.approx(each.value) if each.value else None) for each in best
        ]
        assert [run.run_id for run, _ in data.best] == [each.name for each in winners(best)] == ["run_a"][: not step]


def add_texts(folder: Path, run_id: str, *lines: dict[str, float]) -> None:
    run = OutputDir(folder).run(run_id)
    run.control.mkdir(parents=True)
    run.metrics.mkdir()
    text = 'kind = "sft"\nbatch_size = 8\nmodel = { name = "m" }\ndata = [{ path = "words.jsonl" }]\n'
    run.orch_toml.write_text(text)
    run.trainer_metrics.write_text("".join(json.dumps({"step": at, **line}) + "\n" for at, line in enumerate(lines, 1)))


def compared(folder: Path, *run_ids: str) -> tuple[str, tuple[str, ...]]:
    """The metric that Compare takes of itself, and its notes."""
    data, _ = CompareReader(folder).read(CompareRequest(tuple((run_id, (), 9) for run_id in run_ids)))
    assert data is not None
    return data.request.metric, data.notes


def test_compare_begins_with_what_tells_most_of_the_kinds_of_its_runs(tmp_path: Path) -> None:
    held = {"supervised/loss": 1.0, "held_out/loss": 0.5, "loss": 1.0}
    add_texts(tmp_path, "run_held", held)
    add_texts(tmp_path, "run_plain", {"supervised/loss": 2.0, "loss": 2.0})
    for run_id, losses in (("run_a", {"loss": 0.1}), ("run_both", {"loss": 0.1, "supervised/loss": 3.0})):
        run = add(tmp_path, run_id)
        run.metrics.mkdir()
        run.orchestrator_metrics.write_text(json.dumps({"step": 1, REWARD: 0.5}) + "\n")
        run.trainer_metrics.write_text(json.dumps({"step": 1, **losses}) + "\n")
    assert compared(tmp_path, "run_a", "run_both") == (REWARD, ())
    assert compared(tmp_path, "run_held")[0] == "held_out/loss"
    assert compared(tmp_path, "run_held", "run_plain")[0] == "supervised/loss", "only one of them holds texts out"
    metric, told = compared(tmp_path, "run_held", "run_plain", "run_both")
    assert metric == "supervised/loss"
    assert (
        told[0] == "run_held, run_plain: learn texts, the others from rollouts: supervised/loss does not compare them"
    )
    assert compared(tmp_path, "run_a", "run_held")[0] == "loss"
    request = CompareRequest((("run_a", (), 9), ("run_held", (), 9)), metric="held_out/loss")
    data, _ = CompareReader(tmp_path).read(request)
    assert data is not None and data.request.metric == "held_out/loss", "what a person has chosen stays"


def test_what_two_kinds_of_runs_do_not_share_is_told_by_name() -> None:
    texts, other = values("run_t", [], kind="sft"), values("run_a", [0.1, 0.2], kind="rl")
    assert notes(rank([texts, other], REWARD), REWARD)[0] == "run_t: learn texts, so without reward/mean"
    assert not any("not ranked" in note for note in notes(rank([texts, other], REWARD), REWARD))
    held = "held_out/loss"
    told = notes(rank([values("run_t", [1.0], kind="sft"), values("run_a", [], kind="rl")], held), held)
    assert told[0] == "run_a: learn from rollouts, so without held_out/loss"
    assert notes(rank([other], REWARD), REWARD) == ()
