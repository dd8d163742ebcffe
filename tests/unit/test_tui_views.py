"""What the views of a run write when there is little to show, or more than they show."""

from __future__ import annotations

from pathlib import Path

from prime_rl.contract.layout import OutputDir, RunDir
from tests.tui_support import NOW, add_run
from tui import fmt
from tui.readers.run_config import ConfigData, ConfigReader, ConfigRequest, Event
from tui.widgets.config_view import MAX_LINES, MAX_LINES_EACH, describe, describe_file
from tui.widgets.header import RunHeader


def read_config(workspace: Path, text: str | None, error: str = "") -> ConfigData:
    run = RunDir(workspace / "run_a") if (workspace / "run_a").exists() else add_run(OutputDir(workspace), "run_a")
    run.orch_toml.unlink(missing_ok=True)
    if text is not None:
        run.orch_toml.write_text(text)
    run.config_error.write_text(error)
    data, more = ConfigReader(workspace, "run_a").read(ConfigRequest())
    assert data is not None and not more
    return data


def test_a_config_that_is_missing_or_empty_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = RunDir(tmp_path / "run_a").orch_toml
    missing = describe_file(read_config(tmp_path, None)).plain
    assert missing == f"no readable file {path}: a run needs it; copy one from another run or from configs/"
    for text in ("", " \n\n"):
        empty = describe_file(read_config(tmp_path, text)).plain
        assert empty == f"{path} is empty: write the run's config into it; configs/ has examples"


def test_a_long_config_says_how_many_lines_are_left_out_and_that_some_have_errors(tmp_path: Path) -> None:
    lines = [f"a{number} = 1" for number in range(1, MAX_LINES + 1)]
    path = RunDir(tmp_path / "run_a").orch_toml
    whole = describe_file(read_config(tmp_path, "\n".join(lines))).plain.splitlines()
    assert len(whole) == MAX_LINES and whole[-1].endswith(lines[-1])
    more = "\n".join([*lines, "b = 1", "c = 1"])
    *shown, last = describe_file(read_config(tmp_path, more)).plain.splitlines()
    assert shown == whole and last == f"  … 2 more lines: {path}"
    found = describe_file(read_config(tmp_path, more, "orch.toml: line 2002: wrong")).plain.splitlines()
    assert found == [*whole, f"▶ … 2 more lines: {path}"]


def test_a_long_event_says_how_many_lines_are_left_out() -> None:
    lines = [f"line {number}" for number in range(1, MAX_LINES_EACH + 1)]

    def shown(*more: str) -> list[str]:
        event = Event.of(NOW, "evicted", "\n".join([*lines, *more]), "mia@gpu1")
        return [line.strip() for line in describe([event], 100).plain.splitlines()]

    assert shown()[1:] == [*lines[1:-1], f"{lines[-1]}  by mia@gpu1"]
    assert shown("x" * 60, "y" * 60)[1:] == [*lines[1:], "… 2 more lines  by mia@gpu1"]


def test_the_header_of_a_run_tells_of_its_removal_only_when_the_run_was_looked_for() -> None:
    header = RunHeader()
    assert str(header.render()) == ""
    header.now = NOW
    assert str(header.render()) == "this run was removed"


def test_a_heartbeat_in_a_sentence() -> None:
    assert [fmt.seen_ago(age_s) for age_s in (0.0, fmt.FRESH_S - 1, 61.0)] == ["now", "now", "1m ago"]
