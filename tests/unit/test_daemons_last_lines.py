"""The last lines of logs, and where a follower continues."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.main import get_command

from daemons.cli import app, run
from daemons.commands import complete
from daemons.logs import end_of_lines, last_lines, rotate
from prime_rl.contract.layout import OutputDir
from prime_rl.utils.tail import FileTail


def write(path: Path, first: int, last: int) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"line {number}\n" for number in range(first, last))


def lines(first: int, last: int) -> list[str]:
    return [f"line {number}" for number in range(first, last)]


def test_the_last_lines_come_from_older_files_too(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert last_lines(log, 5) == []
    write(tmp_path / "a.log.2", 0, 20_000)
    write(tmp_path / "a.log.1", 20_000, 40_000)
    write(log, 40_000, 40_003)
    assert last_lines(log, 2) == lines(40_001, 40_003)
    assert last_lines(log, 25_000) == lines(15_003, 40_003)
    assert last_lines(log, 10**6) == lines(0, 40_003)
    assert last_lines(log, 3, lambda line: line.endswith("999")) == ["line 37999", "line 38999", "line 39999"]
    assert last_lines(log, 0) == []


@pytest.mark.parametrize(
    "text",
    ["", "\n", "a", "a\n", "a\nb", "\n\na\n\nb\n", "x" * 200_000 + "\ny\n", "é" * 70_000],
    ids=lambda text: f"{text[:8]!r} {len(text)}",
)
def test_any_text_gives_its_lines(tmp_path: Path, text: str) -> None:
    log = tmp_path / "a.log"
    log.write_text(text)
    assert last_lines(log, 100) == text.splitlines()


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 3_000_000 + b"\nend\n")
    long, end = last_lines(log, 5)
    assert (end, 0 < len(long) <= 1 << 18) == ("end", True)


def test_going_on_where_the_last_lines_ended(tmp_path: Path) -> None:
    """A line in two pieces, and a log that is put aside before anything new was read of it."""
    log = tmp_path / "a.log"
    assert end_of_lines(log) == 0
    write(log, 0, 3)
    with log.open("a") as file:
        file.write("line ")
    end = end_of_lines(log)
    assert last_lines(log, 9, end=end) == lines(0, 3)
    tail = FileTail(log, position=end)
    assert tail.read().lines == []
    with log.open("a") as file:
        file.write("3\n")
    write(log, 4, 6)
    assert rotate(log, 10, 2)
    write(log, 6, 8)
    seen = []
    while more := tail.read().lines:
        seen += [line.decode() for line in more]
    assert seen == lines(3, 8)


@pytest.mark.parametrize("position", [0, 14])
def test_a_log_that_is_cut_and_grows_past_the_place_is_noticed(tmp_path: Path, position: int) -> None:
    log = tmp_path / "a.log"
    write(log, 0, 2)
    tail = FileTail(log, position=position)
    tail.read()
    log.write_text("")
    write(log, 100, 200)
    found = tail.read()
    assert (found.reset, [line.decode() for line in found.lines]) == (True, lines(100, 200))


def test_the_logs_of_other_nodes_and_of_slurm_have_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = OutputDir(tmp_path)
    output.logs.mkdir()
    names = ("trainer-node1", "trainer-node12", "job", "srun")
    for name in names:
        output.log(name).write_text(f"of {name}\n")
        assert run(["logs", name, "--output-dir", str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"of {name}\n"
    context = typer.Context(get_command(app))
    context.params = {"output_dir": tmp_path}
    assert complete.log_names(context, "trainer-") == ["trainer-node1", "trainer-node12"]
    assert complete.log_names(context, "") == ["supervisor", "trainer", "inference", "job", "srun", *names[:2]]
    for name in ("trainer-node0", "trainer-nodes", "sacct"):
        assert run(["logs", name, "--output-dir", str(tmp_path)]) == 2
    assert run(["logs", "trainer-node2", "--output-dir", str(tmp_path)]) == 1
    assert "has not been started yet" in capsys.readouterr().err
