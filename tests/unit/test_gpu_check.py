"""The pure parts of `make gpu-check`: what is asked, the verdicts, the table and the plot."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.report import ASKED, Asked, plot, table, verdicts

RIGHT = {asked: asked.high if asked.low < 0 else asked.low for asked in ASKED}


def stages(values: dict[Asked, float]) -> dict[str, Any]:
    found: dict[str, Any] = {asked.stage: {"entries": {}} for asked in ASKED}
    for asked, value in values.items():
        found[asked.stage]["entries"].setdefault(asked.entry, {})[asked.figure] = value
    return found


def test_the_ends_of_a_range_are_met_and_what_is_beyond_is_not() -> None:
    assert [verdict.met for verdict in verdicts(stages(RIGHT), tiny=False)] == [True] * len(ASKED)
    wrong = {asked: value + (0.1 if asked.low < 0 else -0.1) for asked, value in RIGHT.items()}
    assert [verdict.word for verdict in verdicts(stages(wrong), tiny=False)] == ["NO"] * len(ASKED)
    assert not verdicts(stages(dict.fromkeys(ASKED, float("nan"))), tiny=False)[0].met


def test_what_is_missing_is_told_and_what_is_tiny_is_not_judged() -> None:
    assert {verdict.word for verdict in verdicts(stages({}), tiny=False)} == {"missing"}
    tiny = verdicts(stages({asked: 1.0 for asked in ASKED if not asked.needs_gpu}), tiny=True)
    assert {(verdict.met, verdict.word) for verdict in tiny} == {(None, "not judged"), (None, "needs a GPU")}
    assert verdicts({"env": {"entries": {}}}, tiny=False) == []


def test_the_table_has_a_line_for_each_figure() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table(verdicts(stages(RIGHT), tiny=False)))
    lines = captured.get().splitlines()
    assert lines[0].split() == ["figure", "measured", "asked", "met"]
    assert [line.rstrip().endswith("yes") for line in lines[1:]] == [True] * len(ASKED)
    assert [word in captured.get() for word in ("0.95 to 1.05", "at least 20,000", "0.0001", "at most 0 ")] == [
        True
    ] * 4


def test_the_plot_is_on_one_scale() -> None:
    entries = {"runs_1": {"tokens_per_s": 50_000.0}, "runs_64": {"tokens_per_s": 1.0}}
    found = {"pass06": {"entries": entries}, "pass4": {"entries": {"runs_8": {"tokens_per_s": 100_000.0}}}}
    lines = plot(found)
    assert [line.count("█") for line in lines] == [0, 25, 1, 0, 50]
    assert lines[0] == "Qwen3-0.6B: tokens/s by runs" and lines[-1].endswith("100,000")
    assert plot({"pass4": {"entries": {}}}) == []


def test_without_a_gpu_there_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and "no GPU can be used" in told.err
