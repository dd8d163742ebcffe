"""The command line: parses and completes a line. Pure; each screen defines its commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


class CommandError(ValueError):
    """An invalid command line. The message is one line."""


def _no_words() -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Command:
    """`run` takes what stands after the name; `words` are what can stand there."""

    usage: str
    help: str
    run: Callable[[str], None]
    words: Callable[[], Sequence[str]] = _no_words

    @property
    def takes_words(self) -> bool:
        return " " in self.usage


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
    if rest.strip() and not command.takes_words:
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
    found = next((word for word in commands[name].words() if word.startswith(rest) and word != rest), None)
    return f"{name} {found}" if found else None
