"""The screens that stand side by side: each has a number, a name for the command line, and a class, imported late.

A new screen is one line in `PLACES`. `make_screen` builds it for a person who may act or only look; what acts is
imported only for the first.
"""

from __future__ import annotations

import importlib

from tui.screens.base import Place, Setting, WorkspaceScreen

HOME = "runs"


PLACES = (
    Place(HOME, "1", "Runs", "tui.screens.runs", "RunsScreen"),
    Place("system", "3", "System", "tui.screens.system", "SystemScreen"),
    Place("nodes", "4", "Nodes", "tui.screens.nodes", "NodesScreen"),
    Place("problems", "5", "Problems", "tui.screens.problems", "ProblemsScreen"),
)


def make_screen(name: str, setting: Setting) -> WorkspaceScreen:
    """The screen of that name. Raises KeyError for an unknown name."""
    place = {each.name: each for each in PLACES}[name]
    screen: type[WorkspaceScreen] = getattr(importlib.import_module(place.module), place.class_name)
    if not setting.read_only:
        from tui.acting import acting

        screen = acting(screen)
    return screen(setting)
