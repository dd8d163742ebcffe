"""The keys, by the place where they work, and the commands of `:` and ctrl+p.

    python -m tui.keys          the tables of docs/tui.md

Keys are read from the bindings themselves, for the help screen and for docs/tui.md: what a key does is in its binding
(`tooltip`, else `description`). `screens.base` makes the commands from the keys; here a line is parsed and completed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.binding import Binding

if TYPE_CHECKING:
    from textual.dom import DOMNode

# Of classes by "module:name": they are imported when a person asks for help, and what acts only where it may act.
_PLACES = {
    "Everywhere": ("screens.base:WorkspaceScreen", "screens.base:PlaceScreen", "app:PrlApp"),
    "Runs": ("screens.runs:RunsScreen", "widgets.runs_table:RunsTable", "widgets.header:FilterInput"),
    "One run": ("screens.run:RunScreen",),
    "Charts": ("widgets.charts:ChartsView",),
    "Rollouts": ("widgets.rollouts_view:RolloutsView", "widgets.rollouts_view:Page"),
    "Config": ("widgets.config_view:ConfigView",),
    "Logs": ("widgets.log_view:LogView",),
    "Events": ("widgets.config_view:EventsView",),
    "Checkpoints, system, nodes, problems": (
        "screens.system:SystemScreen",
        "screens.nodes:NodesScreen",
        "screens.system:ProblemsScreen",
        "widgets.line_list:LineList",
    ),
    "Compare": ("screens.compare:CompareScreen",),
    "Act": (
        "screens.acting:SteersRuns",
        "screens.acting:ActsOnRuns",
        "screens.acting:ActsOnWorkspace",
        "screens.acting_places:ActingRunScreen",
        "screens.acting_places:ActingProblemsScreen",
    ),
    "Chat": ("widgets.chat_view:ChatView",),
    "Dialogs": (
        "dialogs.form:JobDialog",
        "dialogs.form:FormDialog",
        "dialogs.add:AddDialog",
        "screens.acting:ActionLogScreen",
    ),
    "Help, command line, choice of runs": (
        "widgets.line_list:TextScreen",
        "screens.base:CommandScreen",
        "screens.compare:PickRuns",
    ),
}
_ACTING = ("Act", "Chat", "Dialogs")
_NAMES = {
    "down": "↓",
    "up": "↑",
    "left": "←",
    "right": "→",
    "pagedown": "pgdn",
    "pageup": "pgup",
    "escape": "esc",
    "question_mark": "?",
    "slash": "/",
    "colon": ":",
    "asterisk": "*",
    "plus": "+",
    "equals_sign": "=",
    "minus": "-",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "comma": ",",
    "full_stop": ".",
    "percent_sign": "%",
    "right_square_bracket": "]",
    "left_square_bracket": "[",
}


def owners(read_only: bool = False) -> dict[str, list[type[DOMNode]]]:
    """The classes whose bindings are keys, by place."""
    found = {}
    for place, names in _PLACES.items():
        if not (read_only and place in _ACTING):
            pairs = (name.split(":") for name in names)
            found[place] = [getattr(importlib.import_module(f"tui.{module}"), name) for module, name in pairs]
    return found


def place_of(nodes: Sequence[DOMNode], read_only: bool) -> str:
    """The place of `nodes` in the help, the last one that a class of theirs belongs to; that of all without one."""
    places = {place: tuple(classes) for place, classes in owners(read_only).items() if place != "Act"}
    return [place for place, classes in places.items() if any(isinstance(node, classes) for node in nodes)][-1]


def bindings_of(owner: type[DOMNode]) -> Iterator[Binding]:
    """Its own bindings, not those that it inherits."""
    for each in owner.__dict__.get("BINDINGS", ()):
        yield each if isinstance(each, Binding) else Binding(*each)


def key_names(binding: Binding) -> list[str]:
    """As on a keyboard: ["j", "↓"]."""
    names = []
    for key in binding.key.split(","):
        held, plus, last = key.rpartition("+")
        names.append(f"{held}{plus}{_NAMES.get(last, last)}")
    return names


def key_rows(read_only: bool = False) -> dict[str, list[tuple[list[str], str]]]:
    """By place: keys, and what they do. Keys that do the same stand together."""
    places: dict[str, list[tuple[list[str], str]]] = {}
    for place, classes in owners(read_only).items():
        rows: dict[str, list[str]] = {}
        for owner in classes:
            for binding in bindings_of(owner):
                words = binding.tooltip or binding.description
                keys = rows.setdefault(words[:1].lower() + words[1:], [])
                keys += [name for name in key_names(binding) if name not in keys]
        places[place] = [(keys, words) for words, keys in rows.items()]
    return places


def markdown() -> str:
    """The section of docs/tui.md."""
    tables = []
    for place, rows in key_rows().items():
        lines = [f"| `{'` `'.join(keys)}` | {words} |" for keys, words in rows]
        tables.append("\n".join([f"### Keys: {place}", "", "| key | |", "|---|---|", *lines]))
    return "\n\n".join(tables)


class CommandError(ValueError):
    """An invalid command line. The message is one line."""


@dataclass(frozen=True)
class Command:
    """The effect of a key, by name; some commands also take words.

    Attributes:
        title: its name in the list of ctrl+p; default: the name.
        alone: what it does without words; None where that is nothing now.
        take: takes what stands after the name, which `argument` describes; None where nothing may stand there.
        words: some of what can stand there, each with a note.
        is_listed: ctrl+p has it with each of its words.
        on_runs: it takes the ids of runs first, and several of its words, with blanks between.
        why_not: why it does nothing now, where `alone` is None.
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
    on_runs: bool = False
    why_not: str | None = None

    @property
    def usage(self) -> str:
        """The name with its argument, as a person types it: `weight [RUN ...] [NUMBER]`."""
        return f"{self.name} {'[RUN ...] ' * self.on_runs}{self.argument}".rstrip()

    def run(self, words: str) -> None:
        """Raises CommandError."""
        if words and self.take:
            self.take(words)
        elif self.alone:
            self.alone()
        else:
            usage = f"missing words: {self.usage}" if self.argument else f"{self.name} has no effect here"
            raise CommandError(self.why_not or usage)


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
    before, gap, last = rest.rpartition(" ") if commands[name].on_runs else ("", "", rest)
    found = next((word for word in commands[name].words() if last and word.startswith(last) and word != last), None)
    return f"{name} {before}{gap}{found}" if found else None


if __name__ == "__main__":
    print(markdown())
