"""All keys by the place where they work, read from the bindings themselves: for the help screen and for docs/tui.md.

    python -m tui.keys          the tables of docs/tui.md

What a key does is in its binding: `tooltip`, else `description`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from textual.binding import Binding

if TYPE_CHECKING:
    from textual.dom import DOMNode

# Of classes by "module:name": they are imported when a person asks for help, and what acts only where it may act.
_PLACES = {
    "Everywhere": ("screens.base:WorkspaceScreen", "screens.base:PlaceScreen", "app:PrlApp"),
    "Runs": ("screens.runs:RunsScreen", "widgets.runs_table:RunsTable", "widgets.filter_bar:FilterInput"),
    "One run": ("screens.run:RunScreen",),
    "Charts": ("widgets.charts:ChartsView",),
    "Rollouts": ("widgets.rollouts_view:RolloutsView", "widgets.rollouts_view:Page"),
    "Config": ("widgets.config_view:ConfigView",),
    "Logs": ("widgets.log_view:LogView",),
    "Events": ("widgets.events_view:EventsView",),
    "Compare": ("screens.compare:CompareScreen",),
    "Checkpoints, system, nodes, problems": (
        "screens.system:SystemScreen",
        "screens.nodes:NodesScreen",
        "screens.problems:ProblemsScreen",
        "widgets.line_list:LineList",
    ),
    "Act": (
        "screens.steering:SteersRuns",
        "screens.acting:ActsOnRuns",
        "screens.acting:ActsOnWorkspace",
        "screens.acting_run:ActingRunScreen",
        "screens.acting_places:ActingProblemsScreen",
    ),
    "Chat": ("widgets.chat_view:ChatView",),
    "Dialogs": (
        "dialogs.job:JobDialog",
        "dialogs.form:FormDialog",
        "dialogs.add:AddDialog",
        "dialogs.steer:DiffDialog",
        "screens.action_log:ActionLogScreen",
    ),
    "Help, command line, choice of runs": (
        "screens.help:HelpScreen",
        "screens.command:CommandScreen",
        "screens.pick_runs:PickRuns",
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


if __name__ == "__main__":
    print(markdown())
