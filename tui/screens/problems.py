"""Everything that needs a person, newest first. Enter opens the run, the daemon or the node that has the problem."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from tui import fmt
from tui.model.levels import LEVEL_SYMBOLS, Problem
from tui.model.snapshot import RunRow, Snapshot
from tui.screens.base import PlaceScreen, Setting
from tui.widgets.line_list import LineList

_PLACES = {"daemon": "system", "workspace": "system", "node": "nodes"}


def key_of(problem: Problem) -> str:
    """The key of a problem's line, the same at each look."""
    return f"{problem.target} {problem.name}"


def problem_line(problem: Problem, now: float, width: int) -> Text:
    """Age, level, name and text of a problem. `now` in Unix seconds, `width` in cells."""
    age = fmt.age(now - problem.since) if problem.since is not None else fmt.DASH
    name_width = 22 if width < 110 else 40
    colour = problem.level.style
    return Text.assemble(
        f"  {age:>4} ",
        (f"{LEVEL_SYMBOLS[problem.level]} ", colour),
        (f"{fmt.shorten_middle(problem.name, name_width):<{name_width}} ", "bold"),
        (f"{problem.note.partition(' ')[0]} " if problem.note else "", "muted"),
        (problem.text, "text"),
    )


class ProblemsScreen(PlaceScreen):
    """Reads only; what acts on runs acts on the run of the selected problem."""

    DEFAULT_CSS = """
    ProblemsScreen {
        & > #problems { height: 1fr; }
        & > #none { height: 1fr; width: 1fr; content-align: center middle; color: $text-success; display: none; }
        &.-none > #none { display: block; }
        &.-none > #problems { display: none; }
        & > #detail { height: auto; max-height: 35%; padding: 0 1; background: $panel; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "Back", key_display="esc"),
    ]
    AUTO_FOCUS = "#problems"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.problems = LineList[str](id="problems", opens=True)
        self.nothing = Static("✔ no problems in this workspace", id="none", markup=False)
        self.detail = Static(id="detail", markup=False)

    def compose_body(self) -> ComposeResult:
        """Yield the list, what stands there without problems, and all about the selected one."""
        yield self.problems
        yield self.nothing
        yield self.detail

    def refill(self, snapshot: Snapshot) -> None:
        """Draw all; the cursor stays on its problem."""
        now = self.setting.clock()
        keys = [key_of(problem) for problem in snapshot.problems]
        lines = [problem_line(problem, now, self.size.width) for problem in snapshot.problems]
        self.set_class(not lines, "-none")
        self.problems.show(keys, lines.__getitem__, [Text("   AGE   WHAT")])
        if lines and self.focused is None:
            self.problems.focus()
        self._show_detail()

    def target_row(self) -> RunRow | None:
        """The run that has the selected problem; None for other problems."""
        problem = self.selected_problem()
        return self.snapshot.row(problem.name) if problem and self.snapshot and problem.target == "run" else None

    def target_daemon(self) -> str | None:
        """The daemon that has the selected problem, or the orchestrator of the run that has it; else None."""
        problem = self.selected_problem()
        return problem.name if problem and problem.target in ("daemon", "run") else None

    @on(LineList.Opened)
    def _opened(self) -> None:
        problem = self.selected_problem()
        if problem is None:
            return
        if self.target_row() is not None:
            self.guide.open_run(problem.name)
        elif problem.target in _PLACES:
            self.guide.go(_PLACES[problem.target])
        else:
            self.notify(problem.text, title=problem.name, markup=False)

    @on(LineList.Moved)
    def _show_detail(self) -> None:
        problem = self.selected_problem()
        self.detail.display = problem is not None
        if problem is not None:
            row = self.target_row()
            whole = row.reason if row and row.reason else problem.text
            note = f"\n{problem.note}" if problem.note else ""
            name = (f"{problem.name}\n", f"bold {problem.level.style}")
            self.detail.update(Text.assemble(name, whole, (note, "muted")))
        self.show_keys()

    def selected_problem(self) -> Problem | None:
        """The problem under the cursor; None when there are no problems."""
        problems = self.snapshot.problems if self.snapshot else ()
        return next((problem for problem in problems if key_of(problem) == self.problems.selected), None)
