"""The commands of `:` and ctrl+p: parses and completes a line. Pure; `screens.base` makes them from the keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


class CommandError(ValueError):
    """An invalid command line. The message is one line."""


@dataclass(frozen=True)
class Command:
    """What a key does, by name; some commands also take words.

    Attributes:
        title: its name in the list of ctrl+p; default: the name.
        alone: what it does without words; None where that is nothing now.
        take: takes what stands after the name, which `argument` describes; None where nothing may stand there.
        words: some of what can stand there, each with a note.
        is_listed: ctrl+p has it with each of its words.
        repeats: it takes several of its words, with blanks between.
    """

    name: str
    help: str
    alone: Callable[[], object] | None = None
    title: str = ""
    key: str = ""
    take: Callable[[str], None] | None = None
    argument: str = ""
    words: Callable[[], Mapping[str, str]] = dict
    is_listed: bool = False
    repeats: bool = False

    @property
    def usage(self) -> str:
        """The name with its argument, as a person types it: `weight [NUMBER]`."""
        return f"{self.name} {self.argument}".rstrip()

    def run(self, words: str) -> None:
        """Raises CommandError."""
        if words and self.take:
            self.take(words)
        elif self.alone:
            self.alone()
        else:
            raise CommandError(f"missing words: {self.usage}" if self.take else f"{self.name} has no effect here")


def parse(line: str, commands: Mapping[str, Command]) -> tuple[Command, str]:
    """The command and its argument. An unambiguous prefix of a name is enough. Raises CommandError."""
    name, _, rest = line.strip().partition(" ")
    fits = [name] if name in commands else [each for each in commands if name and each.startswith(name)]
    if len(fits) != 1:
        among = ", ".join(fits or commands)
        raise CommandError(
            f"{name!r} is ambiguous: {among}" if fits else f"unknown command {name!r}; commands: {among}"
        )
    command = commands[fits[0]]
    if rest.strip() and not command.take:
        raise CommandError(f"{fits[0]} takes no arguments")
    return command, rest.strip()


def complete(line: str, commands: Mapping[str, Command]) -> str | None:
    """`line` with its last word completed by the first that fits, or None."""
    name, blank, rest = line.partition(" ")
    if not blank:
        fits = (each for each in commands if name and each.startswith(name) and each != name)
        return next(fits, None)
    if name not in commands or not rest or rest != rest.lstrip():
        return None
    before, gap, last = rest.rpartition(" ") if commands[name].repeats else ("", "", rest)
    found = next((word for word in commands[name].words() if last and word.startswith(last) and word != last), None)
    return f"{name} {before}{gap}{found}" if found else None
