"""What `prl eval` asks, from which config, and the figures that it makes of rollouts."""

from __future__ import annotations

import contextlib
import signal
import stat
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from daemons.commands import serving
from daemons.commands.serving import ALL_ROWS, NUM_EXAMPLES, Evaluated, eval_config, evaluate, load_source
from daemons.errors import ActionError
from daemons.start import end_as_interrupted
from prime_rl.configs.base import ConfigError
from prime_rl.contract.files import locked
from prime_rl.contract.layout import OutputDir
from prime_rl.contract.samples import EvalResult
from prime_rl.orchestrator.eval_job import Tally
from tests.unit.test_orchestrator_pure import a_rollout

RUN = """
batch_size = 8
rollouts_per_example = 4
seed = 7
tags = ["x"]
model = { name = "m" }
sampling = { max_tokens = 9, temperature = 0.5 }
optim = { lr = 1.0 }
[[env]]
id = "reverse-text"
[eval]
num_examples = 5
rollouts_per_example = 2
interval = 3
sampling = { temperature = 0.0 }
[[eval.env]]
id = "sort-letters"
"""


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    run = OutputDir(tmp_path).run("run_a")
    run.control.mkdir(parents=True)
    run.orch_toml.write_text(RUN)
    return run.orch_toml


def test_a_run_is_asked_as_its_own_evaluations_are(tmp_path: Path, run_toml: Path) -> None:
    source = load_source(tmp_path, ["base", "run_a@v2", "run_b"], None, None)
    assert source.file == run_toml and load_source(tmp_path, ["base"], "run_a", None) == source
    config = eval_config(source.config, "served", None, None)
    assert config.pop("eval") == {
        **{"num_examples": 5, "rollouts_per_example": 2, "interval": 3},
        "sampling": {"temperature": 0.0},
    }
    assert config == {
        **{"batch_size": 1, "rollouts_per_example": 1, "model": {"name": "served"}, "seed": 7},
        **{"sampling": {"max_tokens": 9, "temperature": 0.5}, "env": [{"id": "sort-letters"}]},
    }
    own = eval_config(source.config, "served", 50, 8)["eval"]
    assert (own["num_examples"], own["rollouts_per_example"]) == (50, 8)


def test_a_file_needs_no_more_than_environments(tmp_path: Path) -> None:
    file = tmp_path / "env.toml"
    file.write_text('[[env]]\nid = "reverse-text"\n')
    source = load_source(tmp_path, ["base"], str(file), None)
    assert eval_config(source.config, "m", None, None)["eval"] == {
        "num_examples": NUM_EXAMPLES,
        "rollouts_per_example": 1,
    }
    with pytest.raises(ConfigError, match="env"):
        eval_config({}, "m", None, None)
    with pytest.raises(ConfigError, match=r"eval\.num_example"):
        eval_config({**source.config, "eval": {"num_example": 1}}, "m", None, None)


def test_rows_are_asked_as_the_run_is(tmp_path: Path, run_toml: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    asked: dict[str, Any] = {
        "id": "jsonl",
        "args": {"path": str(rows), "num_eval_examples": ALL_ROWS, "scorer": "number"},
    }
    found = load_source(tmp_path, ["run_a"], None, rows, "number").config
    assert found["env"] == [asked] and not found["eval"]["env"] and found["sampling"]["max_tokens"] == 9
    alone = load_source(tmp_path, ["base"], None, rows)
    assert alone.config["env"][0]["args"] == {"path": str(rows), "num_eval_examples": ALL_ROWS}


def test_the_adapter_that_a_killed_evaluation_copied_is_removed_by_the_next(tmp_path: Path, run_toml: Path) -> None:
    folders = [OutputDir(tmp_path).evaluations / name for name in ("killed", "at_work")]
    for folder in folders:
        (folder / "0").mkdir(parents=True)
        (folder / "samples.jsonl").touch()
    source = load_source(tmp_path, ["run_a"], None, None)
    with locked(folders[1]), pytest.raises(ActionError, match="run_none"):
        evaluate(tmp_path, ["run_none"], source, changes={"client": {"base_url": "http://127.0.0.1:9/v1"}})
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders] == [
        ["samples.jsonl"],
        ["0", "samples.jsonl"],
    ]


def test_no_other_account_can_lock_the_folder_of_an_evaluation_before_it_does(
    tmp_path: Path, run_toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it for more accounts afterwards than the folder that it is in."""
    place, modes = OutputDir(tmp_path).evaluations, list[int]()
    place.mkdir(0o750)

    @contextlib.contextmanager
    def locks(folder: Path) -> Iterator[None]:
        with locked(folder):
            modes.append(stat.S_IMODE(folder.stat().st_mode))
            yield
            modes.append(stat.S_IMODE(folder.stat().st_mode))

    monkeypatch.setattr(serving, "locked", locks)
    monkeypatch.setattr(serving, "_target", lambda output, text, folder: (text, None))
    monkeypatch.setattr(serving, "_run", lambda folder, cwd, on_progress: ([], False))
    source = load_source(tmp_path, ["run_a"], None, None)
    evaluate(tmp_path, ["base"], source, changes={"client": {"base_url": "http://127.0.0.1:9/v1"}})
    assert modes == [0o700, 0o750]


def test_below_nohup_a_closed_terminal_ends_no_command() -> None:
    before = {name: signal.getsignal(name) for name in (signal.SIGHUP, signal.SIGTERM)}
    try:
        for handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, handler)
            end_as_interrupted()
            assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) is (handler is signal.SIG_IGN)
        for num_raised in (1, 0):
            with pytest.raises(KeyboardInterrupt) if num_raised else contextlib.nullcontext():
                signal.raise_signal(signal.SIGHUP)
    finally:
        for name, old in before.items():
            signal.signal(name, old)


def test_what_failed_or_was_not_done_counts_for_no_figure() -> None:
    examples = [[a_rollout(1.0), a_rollout(0.0), a_rollout(0.0)], [a_rollout(1.0)], [], [a_rollout(0.0)] * 3]
    found = Tally(examples, num_failed=2, problem="boom").result("base", "talk", 3, 1.0)
    assert (found.num_examples, found.num_rollouts, found.num_failed, found.problem) == (3, 7, 2, "boom")
    assert found.figures["reward"] == pytest.approx(2 / 7) and found.figures["pass@1"] == pytest.approx((1 / 3 + 1) / 3)
    # Of the two examples that have three rollouts.
    assert found.figures["pass@3"] == pytest.approx(0.5)
    assert found.figures["pass@3_se"] == pytest.approx(statistics.stdev([1.0, 0.0]) / 2**0.5)
    assert Tally([[], []]).result("base", "talk", 3, 1.0).figures == {}


@pytest.mark.parametrize(("width", "num_lines"), [(80, 1 + 2 * 7 + 1), (200, 1 + 2 + 1)])
def test_no_figure_of_an_evaluation_is_cut_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, num_lines: int
) -> None:
    figures = {"reward": 0.5, "reward_se": 0.125, "pass@1": 0.25, "pass@2": 0.375, "pass@4": 0.625}
    results = tuple(EvalResult(target, "jsonl", 4, 16, 0, figures) for target in ("base", "run_letters-2@v12"))
    monkeypatch.setattr(serving, "console", lambda: Console(width=width, highlight=False, markup=False))
    serving._print(Evaluated(results, Path("samples.jsonl"), False), as_json=False)
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == num_lines and "…" not in shown and "run_letters-2@v12" in shown
    assert all(shown.count(value) == 2 for value in ("0.500 ± 0.125", "0.250 ± 0.000", "0.625 ± 0.000"))
    one = EvalResult("base", "jsonl", 1, 1, 0, {"reward": 0.057, "reward_se": 0.0})
    serving._print(Evaluated((one,), Path("samples.jsonl"), False), as_json=False)
    assert "0.057 \n" in f"{capsys.readouterr().out.splitlines()[1].strip()} \n", "one example has no standard error"
