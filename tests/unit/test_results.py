"""What a run has reached, and what differs between two."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from daemons.cli import run as prl
from daemons.commands.results import _shown
from daemons.details import RunResult, config_differences, read_result
from daemons.errors import ActionError
from daemons.exports import CardFacts, model_card, sparkline
from prime_rl.configs.base import ConfigError
from prime_rl.contract.layout import RunDir
from prime_rl.contract.samples import BatchRewards, Sample, SampleFile
from prime_rl.results import Workspace, frame

CONFIG = {
    "batch_size": 8,
    "rollouts_per_example": 4,
    "model": {"name": "m"},
    "env": [{"id": "reverse-text"}],
}


def make_run(folder: Path, lines: list[dict[str, Any]], trained: list[dict[str, Any]]) -> RunDir:
    run = RunDir(folder)
    run.metrics.mkdir(parents=True)
    for path, written in ((run.orchestrator_metrics, lines), (run.trainer_metrics, trained)):
        path.write_text("".join(json.dumps(line) + "\n" for line in written))
    return run


def test_steps_that_were_gone_back_from_do_not_count(tmp_path: Path) -> None:
    rewards = [(1, 0.1), (2, 0.2), (3, 0.9), (4, 0.9), (2, 0.3)]
    run = make_run(
        tmp_path / "run_a",
        [{"step": s, "time": 3600.0 * s, "reward/mean": r} for s, r in rewards]
        + [{"step": s, "eval/x/pass@1": s / 10, "eval/x/pass@1_se": 0.1} for s in (1, 4, 2)],
        [{"step": s, "tokens": 100} for s in (1, 2, 3, 4, 2)],
    )
    found = read_result(run)
    assert found == RunResult({1: 0.1, 2: 0.3}, {1: {"eval/x/pass@1": 0.1}, 2: {"eval/x/pass@1": 0.2}}, 2, 200, 1.0)
    assert found.reward == pytest.approx(0.2) and found.updates == 2
    assert read_result(run, until=1) == RunResult({1: 0.1}, {1: {"eval/x/pass@1": 0.1}}, 1, 100, 0.0)
    assert read_result(RunDir(tmp_path / "run_none")) == RunResult({}, {}, 0, 0, 0.0)


def test_a_batch_that_waits_for_the_trainer_is_no_update(tmp_path: Path) -> None:
    lines = [{"step": step, "time": float(step), "reward/mean": 0.5} for step in (1, 2, 3)]
    assert read_result(make_run(tmp_path / "run_a", lines, [{"step": 1, "tokens": 7}])).updates == 1


def test_a_step_without_a_time_is_no_part_of_the_hours(tmp_path: Path) -> None:
    lines = [{"step": 1, "reward/mean": 0.1}, *({"step": s, "time": 7200.0 * s, "reward/mean": 0.1} for s in (2, 3))]
    assert read_result(make_run(tmp_path / "run_a", lines, [])).hours == 2.0


def test_a_default_equals_the_same_value_in_the_file() -> None:
    one, other = {**CONFIG, "max_async_level": 2}, {**CONFIG, "optim": {"lr": 0.5}, "client": {"api_key_var": "X"}}
    found = {row.name: row.values for row in config_differences({**CONFIG, "seed": 7}, {**CONFIG, "seed": 8})}
    assert found == {"seed": (7, 8)}
    found = {row.name: row.values for row in config_differences(one, other)}
    assert set(found) == {"optim.lr", "client.api_key_var"} and found["optim.lr"][1] == 0.5
    # A config that is not valid is compared by its own keys; text is clean, and keys are hidden.
    invalid = {"a": "\x1b[31mred", "api_key": "secret", "env": [{"id": "x"}]}
    found = {row.name: row.values for row in config_differences(invalid, {"env": [{"id": "y"}]})}
    assert found == {"a": ("red", None), "api_key": ("(hidden)", None), "env.0.id": ("x", "y")}


def test_runs_diff_shows_both_and_is_stable_json(tmp_path: Path, capsys: Any) -> None:
    for run_id, lr, reward in (("run_a", 0.001, 0.5), ("run_b", 0.002, 0.75)):
        run = make_run(tmp_path / run_id, [{"step": 1, "time": 1.0, "reward/mean": reward}], [{"step": 1, "tokens": 7}])
        run.control.mkdir()
        run.orch_toml.write_text(
            f'batch_size = 8\nrollouts_per_example = 4\noptim = {{ lr = {lr} }}\nmodel = {{ name = "m" }}\n'
            'env = [{ id = "reverse-text" }]\n'
        )
    place = ["--output-dir", str(tmp_path)]
    assert prl(["runs", "diff", "run_a", "run_b", *place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "version": 1,
        "runs": ["run_a", "run_b"],
        "config": [{"name": "optim.lr", "values": [0.001, 0.002]}],
        "result": [
            {"name": "step", "values": [1.0, 1.0]},
            {"name": "reward", "values": [0.5, 0.75]},
            {"name": "tokens", "values": [7.0, 7.0]},
            {"name": "hours", "values": [0.0, 0.0]},
        ],
    }
    assert prl(["runs", "diff", "run_a", "run_b", *place]) == 0
    shown = capsys.readouterr().out
    assert "optim.lr" in shown and "0.75" in shown
    assert prl(["runs", "diff", "run_a", "run_c", *place]) == 1
    assert "run 'run_c' not found" in capsys.readouterr().err


def test_rewards_of_two_files_of_one_name_are_two_environments(tmp_path: Path, capsys: Any) -> None:
    """To change the file and to add the run again is what people do."""
    for run_id, code, reward in (("run_a", "0", 0.0), ("run_b", "1", 1.0), ("run_c", "0", 0.5)):
        run = make_run(tmp_path / run_id, [{"step": 1, "reward/mean": reward}], [{"step": 1, "tokens": 7}])
        run.control.mkdir()
        config = {**CONFIG, "env": [{"id": "jsonl", "args": {"path": "a.jsonl", "reward": "../r.py:score"}}]}
        run.orch_toml.write_text(tomli_w.dumps(config))
        run.data.mkdir()
        run.data_file("../r.py").write_text(f"def score(answer, row): return {code}")
    place = ["--output-dir", str(tmp_path)]
    assert prl(["runs", "diff", "run_a", "run_b", *place, "--json"]) == 0
    (changed,) = json.loads(capsys.readouterr().out)["config"]
    assert changed["name"] == "env.0.args.reward (code)" and len(set(changed["values"])) == 2
    assert prl(["runs", "diff", "run_a", "run_c", *place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == []
    assert prl(["runs", "best", *place, "--json"]) == 0
    standings = json.loads(capsys.readouterr().out)["standings"]
    assert {each["name"]: each["place"] for each in standings} == {"run_a": 2, "run_b": 1, "run_c": 1}
    assert {each["environment"].rpartition("@")[2] for each in standings} == set(changed["values"])


def test_a_card_is_short_and_takes_no_markup_from_a_run() -> None:
    names = "eval/a|b`<x>/pass@1"
    result = RunResult({step: step / 100 for step in range(1, 501)}, {500: {names: 0.5}}, 500, 10_000, 1.0)
    text = model_card(CardFacts("run_a", 500, "Qwen/Qwen3-0.6B", False, {"x": None, "y": "`````"}, result))
    assert "\nbase_model: Qwen/Qwen3-0.6B\n" in text and "library_name: transformers" in text and "lora" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == 3]
    assert len(rows) <= 25 and "| 1 | 0.01 |" in rows and "| 500 | 5 |" in rows
    assert names not in text and "``````toml" in text and "x =" not in text


def test_a_sparkline_has_the_shape_of_the_curve() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█" and sparkline([3, 3]) == "▁▁"
    assert sparkline([float(n) for n in range(600)])[::59] == "▁█" and len(sparkline(list(range(600)))) == 60


TOML = """
batch_size = 8
rollouts_per_example = 4
tags = ["lr=0.001"]
[model]
name = "m"
[optim]
lr = 0.001
[[env]]
id = "plugin:mine"
args = { note = "\\u001b[31mred", api_key = "secret" }
"""


def make_workspace(folder: Path) -> Path:
    """Two runs. The first was rolled back, is being written, and has text that a terminal would obey."""
    for run_id, scale in (("run_a", 1.0), ("run_b", 2.0)):
        run = make_run(
            folder / run_id,
            [
                {"step": 0, "eval/sums/pass@1": 0.125},
                {"step": 1, "time": 10.0, "reward/mean": 0.25 * scale},
                {"step": 2, "time": 20.0, "reward/mean": 0.9, "env/\x1b[31mred": 1.0},
                {"step": 3, "time": 30.0, "reward/mean": 0.9},
                {"step": 3, "eval/sums/pass@1": 0.9},
                {"step": 2, "time": 40.0, "reward/mean": 0.375 * scale, "=now()": 1.0},
                {"step": 2, "eval/sums/pass@1": 0.5, "env/\x1b[31mred": 2.0},
            ],
            [{"step": step, "tokens": 100.0, "loss": loss} for step, loss in ((1, 1.0), (2, 9.0), (3, 9.0), (2, 0.5))],
        )
        with run.orchestrator_metrics.open("a") as file:
            file.write('{"step": 3, "time": 50.0, "reward/me')
        run.control.mkdir()
        run.orch_toml.write_text(TOML)
        sample = Sample(2, "e", "x\ny", "say \x1b[2Jit", "it", 0.5, 0.1, [1], 4, 2)
        SampleFile(run.samples, keep=100).append([BatchRewards(step=2, rewards=[0.5]), sample])
    return folder


def test_results_are_plain_and_clean_and_of_whole_lines(tmp_path: Path) -> None:
    workspace = Workspace(make_workspace(tmp_path))
    run, other = workspace.runs()
    assert (run.run_id, run.step, run.view.tags) == ("run_a", 0, ("lr=0.001",)) and isinstance(run.state, str)
    assert run.config["optim"] == {"lr": 0.001} and run.config["env"][0]["args"] == {
        "note": "red",
        "api_key": "(hidden)",
    }
    rows = run.metrics()
    assert rows == [
        {"step": 0, "eval/sums/pass@1": 0.125},
        {"step": 1, "tokens": 100.0, "loss": 1.0, "time": 10.0, "reward/mean": 0.25},
        {
            **{"step": 2, "tokens": 100.0, "loss": 0.5, "time": 40.0, "reward/mean": 0.375},
            **{"=now()": 1.0, "eval/sums/pass@1": 0.5, "env/red": 2.0},
        },
    ]
    (sample,) = run.samples()
    assert (sample.prompt, sample.example_id, sample.reward) == ("say it", "x y", 0.5) and run.samples(0) == []
    assert workspace.metrics("run_b") == [{"run_id": "run_b", **row} for row in other.metrics()]
    # The rewards of `prl runs diff` and of model cards are the same.
    found = read_result(run.paths)
    assert found.rewards == {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row}
    with pytest.raises(ActionError, match="run 'run_c' not found"):
        workspace.run("run_c")
    run.paths.orch_toml.write_text("not toml")
    with pytest.raises(ConfigError):
        print(run.config)
    assert Workspace(tmp_path / "none").runs() == [] and Workspace(tmp_path).runs()[0].state == "invalid"


FAKE = """
class DataFrame:
    def __init__(self, columns): self.columns = columns
"""


def test_a_frame_is_of_the_library_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Workspace(make_workspace(tmp_path / "outputs")).run("run_a")
    monkeypatch.setattr("prime_rl.results.FRAMES", ("first_library", "second_library"))
    with pytest.raises(ImportError, match="pip install pandas"):
        frame(run.metrics())
    (tmp_path / "second_library.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    columns = frame(run.metrics()).columns
    assert list(columns)[:2] == ["step", "time"] and columns["step"] == [0, 1, 2]
    assert columns["loss"] == [None, 1.0, 0.5]
    assert frame(run.samples()).columns["reward"] == [0.5]


def test_a_frame_of_pandas_has_a_row_a_step(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    table = frame(Workspace(make_workspace(tmp_path)).metrics())
    curves = table.pivot(index="step", columns="run_id", values="reward/mean").dropna()
    assert (table.shape[0], list(curves.index)) == (6, [1, 2])
    assert curves["run_b"].tolist() == [0.5, 0.75] and frame([]).shape == (0, 0)


def test_metrics_are_exported_as_csv(tmp_path: Path, capsys: Any) -> None:
    place = ["--output-dir", str(make_workspace(tmp_path / "outputs"))]
    assert prl(["runs", "export-metrics", "run_a", *place]) == 0
    text = capsys.readouterr().out
    header, *rows = list(csv.reader(text.splitlines()))
    assert header[:3] == ["run_id", "step", "time"] and "'=now()" in header and "env/red" in header
    assert [row[:3] for row in rows] == [["run_a", "0", ""], ["run_a", "1", "10.0"], ["run_a", "2", "40.0"]]
    assert rows[1][header.index("reward/mean")] == "0.25"
    assert prl(["runs", "export-metrics", *place, "--csv", str(tmp_path / "all.csv")]) == 0
    assert "6 rows of 2 runs" in capsys.readouterr().out
    assert (tmp_path / "all.csv").read_text().splitlines()[1:4] == text.splitlines()[1:]
    assert prl(["runs", "export-metrics", "run_c", *place]) == 1
    assert "run 'run_c' not found" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert prl(["runs", "export-metrics", "--output-dir", str(tmp_path / "none")]) == 1
    assert "no metrics of any run yet" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["results.md", "results.ipynb"])
def test_page_and_notebook_about_results_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    make_workspace(tmp_path / "outputs")
    (tmp_path / "third_library.py").write_text(FAKE)
    monkeypatch.setattr("prime_rl.results.FRAMES", ("third_library",))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    if page.endswith(".ipynb"):
        blocks = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    else:
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert len(blocks) >= 3 and names["best"].run_id == "run_b"


def test_figures_of_a_difference_are_as_long_as_people_read_them() -> None:
    assert [_shown(value, 3) for value in (0.00937205, 1234567.0, 0.8125, None, "x")] == [
        *("0.00937", "1234567", "0.812", "-", "x")
    ]
    assert _shown(0.00012345, 6) == "0.00012345", "of a config every digit counts"
