"""The commands of `:` and ctrl+p: one table, made from keys and from what takes words."""

from __future__ import annotations

import pytest

from tui.keys import Command, CommandError, complete, parse
from tui.screens.base import take_words


def a_table(done: list[str]) -> dict[str, Command]:
    table = {
        name: Command(name, f"{name} it", lambda name=name: done.append(name), name.capitalize())
        for name in ("sort", "undo", "up")
    }
    table["readmit"] = Command("readmit", "readmit runs")  # a key that is greyed out
    take_words(table, "sort", "sort runs", "[COLUMN]", lambda words: done.append(f"sort {words}"), lambda: {"loss": ""})
    take_words(table, "open", "open a run", "RUN", lambda words: done.append(f"open {words}"))
    return table


def test_a_command_does_what_its_key_does_and_some_take_words() -> None:
    done: list[str] = []
    table = a_table(done)
    for line in ("sort", "so loss ", "un", "open run_a", "up"):
        command, words = parse(line, table)
        command.run(words)
    assert done == ["sort", "sort loss", "undo", "open run_a", "up"]
    assert [command.usage for command in table.values()] == ["sort [COLUMN]", "undo", "up", "readmit", "open RUN"]


@pytest.mark.parametrize(
    ("line", "message"),
    [("u", "'u' is ambiguous: undo, up"), ("nix", "unknown command 'nix'"), ("up now", "up takes no arguments"),
     ("readmit", "readmit has no effect here"), ("open", "missing words: open RUN")],
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_a_line(line: str, message: str) -> None:
    done: list[str] = []
    with pytest.raises(CommandError, match=message):  # noqa: PT012 (some fail when read, some when run)
        command, words = parse(line, a_table(done))
        command.run(words)
    assert not done


def test_a_line_is_completed_by_names_and_by_words() -> None:
    table = a_table([])
    assert [complete(line, table) for line in ("so", "sort l", "sort x", "", "open r")] == ["sort", "sort loss"] + [
        None
    ] * 3
