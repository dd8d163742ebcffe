"""Add a run: choose a TOML file, type its path or clone a run; edit the text, name it, start it.

Problems of the text are shown at their lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.strip import Strip
from textual.widgets import Button, Input, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from daemons.actions import ActionError
from daemons.errors import expand_home
from prime_rl.utils.text import CleanText, one_line
from tui.actions import (
    Check,
    Job,
    Perform,
    Template,
    add_draft,
    check_draft,
    find_templates,
    read_draft,
)
from tui.dialogs.form import JobDialog
from tui.widgets.line_list import Clipped, titled

MAX_SHOWN_PROBLEMS = 3


class AddDialog(JobDialog):
    """ctrl+s starts the run when its config is valid."""

    DEFAULT_CSS = """
    AddDialog {
        & .box { width: 110; height: 94%; max-height: 44; padding: 0 1; }
        & .body { height: 1fr; }
        & OptionList { width: 26; height: 1fr; background: $surface; margin-right: 1; }
        & .right { width: 1fr; height: 1fr; }
        & .field { height: 1; }
        & .field Static { width: 6; color: $foreground 60%; }
        & .field Input { width: 1fr; }
        & TextArea { height: 1fr; background: $background; margin: 1 0; scrollbar-size-vertical: 1; }
        & #check { height: auto; max-height: 10; color: $foreground 60%; }
        & #check.-ok { color: $text-success; }
        & #check.-bad { color: $text-error; }
        & #outcome { margin-top: 0; }
        & .buttons { margin-top: 0; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "start", "Start", priority=True, tooltip="start the run that is added")
    ]

    def __init__(
        self,
        output_dir: Path,
        run_ids: Sequence[str],
        perform: Perform,
        *,
        source: Path | None = None,
        run_id: str = "",
    ) -> None:
        """`source` and `run_id` are what to begin with."""
        super().__init__(perform)
        self._first = (source, run_id)
        self._output_dir = output_dir
        self._run_ids = run_ids
        self._templates: list[Template] = []
        self._asked: Path | None = None
        self._source: Path | None = None
        self._serial_of_draft = 0
        self._check: Check | None = None

    def compose(self) -> ComposeResult:
        """Yield the list of templates, beside it path, id and text; below them the check and the buttons."""
        with titled(Vertical(classes="box"), "add a run", "ctrl+s starts · tab moves · esc cancels"):
            with Horizontal(classes="body"):
                yield OptionList(id="templates", markup=False, compact=True)
                with Vertical(classes="right"):
                    with Horizontal(classes="field"):
                        yield Static("file", markup=False)
                        yield Input(id="path", placeholder="path of a TOML file; enter reads it", compact=True)
                    with Horizontal(classes="field"):
                        yield Static("id", markup=False)
                        yield Input(
                            id="run-id",
                            placeholder="run_...  (empty: from the file's name)",
                            max_length=68,
                            compact=True,
                        )
                    yield TomlArea(
                        id="text", show_line_numbers=True, soft_wrap=False, tab_behavior="focus", compact=True
                    )
            yield Clipped("choose a file on the left, or type a path", id="check", markup=False)
            yield Clipped(id="outcome", markup=False)
            yield from self.buttons("Start", "start", "success")

    def on_mount(self) -> None:
        """Fill in what to begin with and find templates in a thread; Start is disabled until the draft is valid."""
        self.query_one("#start", Button).disabled = True
        source, run_id = self._first
        self.query_one("#run-id", Input).value = run_id
        if source is not None:
            self.query_one("#path", Input).value = str(source)
            self._load(source)
        self.query_one("#templates").focus()
        self.run_worker(self._find, thread=True, name="find templates")

    def _find(self) -> None:
        self.call_later(self._list, find_templates(self._output_dir, self._run_ids))

    def _list(self, templates: list[Template]) -> None:
        """Templates to choose from; without any the path gets the focus, unless a file was loaded already."""
        self._templates = templates
        options = self.query_one("#templates", OptionList)
        options.add_options([Option(Content(template.label)) for template in self._templates])
        if self._templates:
            options.highlighted = 0
        elif self._source is None:
            self.query_one("#path").focus()

    @on(OptionList.OptionSelected, "#templates")
    def _template_chosen(self, event: OptionList.OptionSelected) -> None:
        path = self._templates[event.option_index].path
        self.query_one("#path", Input).value = str(path)
        self._load(path)

    @on(Input.Submitted, "#path")
    def _path_typed(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self._load(Path(event.value.strip()))

    def _load(self, path: Path) -> None:
        self._asked = None
        try:
            self._asked = path = expand_home(path)
        except ActionError as error:
            self.say(one_line(str(error), 400), failed=True)
            return

        def work() -> None:
            try:
                self.call_later(self._loaded, path, read_draft(path), "")
            except ActionError as error:
                self.call_later(self._loaded, path, None, one_line(str(error), 400))

        self.run_worker(work, thread=True, group="load", name=f"read {path}")

    def _loaded(self, path: Path, text: CleanText | None, error: str) -> None:
        """Only the file that was asked for last counts, however long the others take."""
        if path != self._asked:
            return
        if text is None:
            self.say(error, failed=True)
            return
        self.say("")
        self._source = path
        area = self.query_one("#text", TomlArea)
        area.load_text(text)
        area.focus()
        self._check_soon()

    @on(TextArea.Changed)
    @on(Input.Changed, "#run-id")
    def _check_soon(self) -> None:
        """Any change invalidates the last check; the next one runs after a pause in typing."""
        self._serial_of_draft += 1
        self._check = None
        self.query_one("#start", Button).disabled = True
        self.after_pause(self._check_now)

    def _check_now(self) -> None:
        serial, source, (text, run_id) = self._serial_of_draft, self._source, self._draft()
        if not text.strip():
            return

        def work() -> None:
            self.call_later(self._checked, serial, check_draft(self._output_dir, text, run_id, source))

        self.run_worker(work, thread=True, group="check", name="check the draft")

    def _checked(self, serial: int, check: Check) -> None:
        """Show the problems at their lines, or summary and warnings and enable Start; of an older draft nothing."""
        if serial != self._serial_of_draft:
            return
        self._check = check
        self.query_one("#text", TomlArea).show_problems({p.line: p.text for p in check.problems if p.line})
        line = self.query_one("#check", Static)
        line.set_class(check.ok, "-ok")
        line.set_class(not check.ok, "-bad")
        shown = [f"✔ valid: {check.summary}", *(f"▲ {doubt}" for doubt in check.doubts)]
        if check.problems:
            shown = [f"✖ {problem}" for problem in check.problems[:MAX_SHOWN_PROBLEMS]]
            if (num_more := len(check.problems) - MAX_SHOWN_PROBLEMS) > 0:
                shown.append(f"  and {num_more} more")
        line.update(Content("\n".join(shown)))
        self.query_one("#start", Button).disabled = not check.ok

    @on(Button.Pressed, "#start")
    def action_start(self) -> None:
        """Add the run as a job; refused unless the newest check of the draft found no problem."""
        output_dir, source, (text, run_id) = self._output_dir, self._source, self._draft()
        if not text.strip():
            self.say("not started: no config yet; choose a file on the left, or type a path", failed=True)
            return
        if self._check is None:
            self.say("not started: the config is still being checked; try again in a moment", failed=True)
            return
        if not self._check.ok:
            self.say("not started: fix the problems first", failed=True)
            return

        def work(progress: Callable[[str], None]) -> str:
            return f"{add_draft(output_dir, text, run_id, source)}: added"

        self.start(Job(self._check.command, work))

    def _draft(self) -> tuple[str, str]:
        return self.query_one("#text", TomlArea).text, self.query_one("#run-id", Input).value.strip()


_TOKEN = re.compile(
    r"""
      (?P<comment>\#.*)
    | (?P<string>"(?:\\.|[^"\\])*"?|'[^']*'?)
    | (?P<table>^\s*\[\[?[^\]]*\]?\]?)
    | (?P<key>^\s*[\w.-]+(?=\s*=))
    | (?P<number>(?<![\w.])[+-]?\d[\d_.eE+-]*(?!\w))
    | (?P<bool>\b(?:true|false)\b)
    """,
    re.VERBOSE,
)


def paint(line: Text) -> Text:
    """Colour one line in place. Strings over several lines are left plain."""
    colours = {
        "comment": "muted",
        "string": "success",
        "table": "bold accent",
        "key": "primary",
        "number": "warning",
        "bool": "secondary",
    }
    for token in _TOKEN.finditer(line.plain):
        line.stylize(colours[token.lastgroup or "comment"], token.start(), token.end())
    return line


MIN_MESSAGE = 16  # cells that a message needs to be worth reading; on a longer line it covers the line's end


class TomlArea(TextArea):
    """`TextArea` that paints each line as it is drawn. Made with `soft_wrap=False`: a line is a line of the screen."""

    _problems: Mapping[int, str] = {}

    def show_problems(self, problems: Mapping[int, str]) -> None:
        """`problems` by line, from 1."""
        if problems != self._problems:
            self._problems = dict(problems)
            self.refresh()

    def get_line(self, line_index: int) -> Text:
        """Return the line painted as TOML; Textual calls it for each line that it draws."""
        return paint(super().get_line(line_index))

    def render_line(self, y: int) -> Strip:
        """Return row `y`; where its line has a problem, with a mark at the left and the message at its end."""
        strip = super().render_line(y)
        number = self.scroll_offset.y + y + 1
        message = self._problems.get(number)
        if message is None or number > self.document.line_count:
            return strip
        width = self.size.width
        text = self.document.get_line(number - 1).expandtabs(self.indent_width)
        end = self.gutter_width + cell_len(text) - self.scroll_offset.x + 2
        place = max(min(end, width - MIN_MESSAGE), 0)
        error = self.app.console.get_style("error") + Style(bgcolor=self.rich_style.bgcolor)
        style, mark = error + Style(italic=True), Segment("✖", error + Style(bold=True))
        said = Strip([Segment(f"◀ {message}", style)]).adjust_cell_length(width - place, style)
        return Strip.join([Strip([mark]), strip.crop(1, place), said])
