"""The bases of the dialogs that act: they start a job and stay until it is done or failed.

`ConfirmDialog` is for an action on many runs or on the whole workspace, `ChooseDialog` for one item of a list,
`FormDialog` for one with fields: each change is checked after a pause in typing, a refusal stands at its field. A
subclass of that gives the fields (`compose_fields`), the check, which runs in a thread, and the job. The job refuses
what the check refuses, so that enter need not wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import Button, Checkbox, Input, OptionList, Static, TextArea
from textual.widgets.button import ButtonVariant
from textual.widgets.option_list import Option

from daemons.actions import ActionError
from prime_rl.configs.base import ConfigError
from prime_rl.utils.text import CleanText, clean_text, one_line
from tui.actions import Choice, Job, Perform
from tui.messages import ActionEntry
from tui.widgets.line_list import Clipped, titled

DEBOUNCE_S = 0.25


class JobDialog(ModalScreen[None]):
    """A dialog with a `#outcome` line. Escape closes it at any time; a running job continues."""

    DEFAULT_CSS = """
    JobDialog {
        align: center middle;
        & .box {
            width: 76; max-width: 98%; height: auto; max-height: 98%;
            border: round $primary; border-title-color: $primary; border-subtitle-color: $foreground 50%;
            background: $surface; padding: 1 2;
        }
        & #outcome { height: auto; max-height: 4; margin-top: 1; color: $foreground 70%; display: none; }
        & #outcome.-shown { display: block; }
        & #outcome.-failed { color: $text-error; }
        & .buttons { height: auto; margin-top: 1; align-horizontal: right; }
        & .buttons Button { margin-left: 2; min-width: 12; }
        & Input { padding: 0 1; background: $panel; }
        & Input:focus { background: $primary 25%; background-tint: transparent 0%; }
        & .label { color: $foreground 60%; height: 1; margin-top: 1; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Close")]

    def __init__(self, perform: Perform) -> None:
        super().__init__()
        self._perform = perform
        self._serial: int | None = None
        self._timer: Timer | None = None

    @property
    def is_busy(self) -> bool:
        """True when the job was started and has not failed."""
        return self._serial is not None

    def buttons(self, verb: str, id: str, variant: ButtonVariant) -> ComposeResult:
        """Yield a row of two buttons: Cancel, and `verb` with the id `id`."""
        with Horizontal(classes="buttons"):
            yield Button("Cancel", id="cancel", compact=True)
            yield Button(verb, id=id, variant=variant, compact=True)

    @on(Button.Pressed, "#cancel")
    def _cancel(self) -> None:
        self.dismiss()

    def start(self, job: Job) -> None:
        """Start the job unless one is running; its progress comes through `show_action`."""
        if not self.is_busy:
            self.say("...")
            self._serial = self._perform(job)

    def after_pause(self, act: Callable[[], None]) -> None:
        """`act` DEBOUNCE_S after the newest call."""
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(DEBOUNCE_S, act)

    def say(self, text: str, *, failed: bool = False) -> None:
        """Show a text in the `#outcome` line, as an error where it `failed`; "" hides the line."""
        for outcome in self.query("#outcome").results(Static):  # none while the app ends
            outcome.update(Content(text))
            outcome.set_class(bool(text), "-shown")
            outcome.set_class(failed, "-failed")

    def show_action(self, entry: ActionEntry) -> None:
        """Close when the dialog's own job is done, else show its progress; after an error it may start again."""
        if self._serial is None or entry.serial != self._serial:
            return
        if entry.state == "done":
            self.dismiss()
        elif entry.state == "failed":
            self._serial = None
            self.say(entry.text, failed=True)
        else:
            self.say(entry.text)


class Listing(VerticalScroll):
    """Lines of text, at most nine at a time; more of them scroll."""

    DEFAULT_CSS = """
    Listing {
        height: auto; max-height: 9; margin-bottom: 1; scrollbar-size-vertical: 1;
        & > Static { height: auto; color: $foreground 80%; }
    }
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(can_focus=len(lines) > 9)
        self._text = Static(Content("\n".join(lines)), markup=False)

    def compose(self) -> ComposeResult:
        """Yield the lines as one text."""
        yield self._text

    def show(self, lines: Sequence[str]) -> None:
        """Replace the lines."""
        self._text.update(Content("\n".join(lines)))


class ConfirmDialog(JobDialog):
    """Enter confirms, esc cancels."""

    def __init__(self, title: str, lines: Sequence[str], words: str, verb: str, job: Job, perform: Perform) -> None:
        super().__init__(perform)
        self._title, self._lines, self._words, self._verb, self._job = title, lines, words, verb, job

    def compose(self) -> ComposeResult:
        """Yield the lines, the words, the shell command and the buttons."""
        with titled(Vertical(classes="box"), self._title, "esc cancels"):
            yield Listing(self._lines)
            yield Static(Content(self._words), markup=False)
            yield Clipped(Content(f"$ {self._job.command}"), classes="command", markup=False)
            yield Clipped(id="outcome", markup=False)
            yield from self.buttons(self._verb, "do", "warning")

    def on_mount(self) -> None:
        """Give the focus to the button, so that enter confirms."""
        self.query_one("#do").focus()

    @on(Button.Pressed, "#do")
    def _do(self) -> None:
        self.start(self._job)


class ChooseDialog(JobDialog):
    """Enter on a line does its job; `first` is the line that is selected at first."""

    DEFAULT_CSS = """
    ChooseDialog {
        & OptionList { height: auto; max-height: 14; background: $surface; margin-top: 1; }
    }
    """

    def __init__(self, title: str, words: str, choices: Sequence[Choice], perform: Perform, *, first: int = 0) -> None:
        super().__init__(perform)
        self._title, self._words, self._choices, self._first = title, words, choices, first

    def compose(self) -> ComposeResult:
        """Yield the words and the list of choices."""
        with titled(Vertical(classes="box"), self._title, "enter confirms · esc cancels"):
            yield Static(Content(self._words), markup=False)
            yield OptionList(*(Option(Content(label)) for label, _ in self._choices), markup=False, compact=True)
            yield Clipped(id="outcome", markup=False)

    def on_mount(self) -> None:
        """Give the focus to the list, with the line `first` selected."""
        options = self.query_one(OptionList)
        options.focus()
        options.highlighted = self._first

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.start(self._choices[event.option_index][1]())


MAX_CHECK_CHARS = 8_000


class Tick(Checkbox):
    """A checkbox whose box is empty while it is off: without colours a faint mark would look like one that is set."""

    @property
    def BUTTON_INNER(self) -> str:  # type: ignore[override]
        """The mark in the box."""
        return "X" if self.value else " "


class FormDialog(JobDialog):
    """Enter in a field and ctrl+s do it, when the fields are valid."""

    DEFAULT_CSS = """
    FormDialog {
        & .box { padding: 0 2; }
        & .field { height: 1; }
        & .field Static { width: 13; color: $foreground 60%; }
        & .field Input { width: 1fr; }
        & TextArea { height: 5; padding: 0; background: $panel; border: none; scrollbar-size-vertical: 1; }
        & Checkbox { margin-left: 13; background: $surface; }
        & Checkbox > .toggle--button { color: $panel; }
        & Checkbox.-on > .toggle--button { color: $text-success; }
        & .problem { display: none; height: auto; max-height: 3; margin-left: 13; color: $text-error; }
        & .problem.-shown { display: block; }
        & .problem.-wanted { color: $foreground 60%; }
        & #check-box { height: auto; max-height: 8; margin-top: 1; scrollbar-size-vertical: 1; }
        & #check { height: auto; color: $foreground 80%; }
        & #check.-bad { color: $text-error; }
        & .command { height: auto; max-height: 3; margin-top: 1; color: $foreground 60%; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "submit", "Do it", priority=True, tooltip="in a form: do it")
    ]
    head: ClassVar[str] = ""
    verb: ClassVar[str] = ""
    variant: ClassVar[ButtonVariant] = "success"

    def __init__(self, subject: str, perform: Perform) -> None:
        super().__init__(perform)
        self._subject = subject
        self.texts: dict[str, str] = {}
        """By the name of a field: its text, of an input without blanks around it."""
        self.ticks: dict[str, bool] = {}
        self._serial_of_form = 0
        self._serial_of_check = 0

    @property
    def is_checked(self) -> bool:
        """True when what is shown is the check of the newest text."""
        return self._serial_of_check == self._serial_of_form

    def compose(self) -> ComposeResult:
        """Yield the fields of the subclass, then room for the check, the shell command and the buttons."""
        title = f"{self.head or self.verb.lower()} {self._subject}"
        with titled(Vertical(classes="box"), title, "ctrl+s confirms · esc cancels"):
            yield from self.compose_fields()
            with VerticalScroll(id="check-box", can_focus=False):
                yield Static("...", id="check", markup=False)
            yield Clipped(id="command", classes="command", markup=False)
            yield Clipped(id="outcome", markup=False)
            yield from self.buttons(self.verb, "do", self.variant)

    def compose_fields(self) -> ComposeResult:
        """A subclass yields its fields: with `field`, or a widget and a `problem` of the same name."""
        raise NotImplementedError

    def check(self) -> str:
        """Returns what the form would do now, in words, by `texts` and `ticks`. In a thread; raises FieldError."""
        raise NotImplementedError

    def job(self) -> Job:
        """Raises ActionError where the form makes none."""
        raise NotImplementedError

    def field(self, name: str, label: str, value: str = "", placeholder: str = "") -> ComposeResult:
        """A line with a label and an input, and room for what is wrong with it."""
        with Horizontal(classes="field"):
            yield Static(label, markup=False)
            yield Input(value, id=name, placeholder=placeholder, compact=True)
        yield self.problem(name)

    def problem(self, name: str) -> Static:
        """The line for what is wrong with the field `name`, hidden until a check finds something."""
        return Clipped(id=f"problem-{name}", classes="problem", markup=False)

    def _take(self) -> None:
        """Read the fields, before `check` and `job`."""
        areas = {str(each.id): each.text for each in self.query(TextArea)}
        # All at once: a check may be under way in its thread.
        self.texts = {str(each.id): each.value.strip() for each in self.query(Input)} | areas
        self.ticks = {str(each.id): each.value for each in self.query(Checkbox)}

    def _is_filled(self, name: str | None) -> bool:
        """An empty field is not wrong yet: what is missing is shown without alarm."""
        fields = self.query(f"#{name}")
        return all(each.value for each in fields.results(Input)) and all(each.text for each in fields.results(TextArea))

    def on_mount(self) -> None:
        """Check what the form begins with, after the same pause as after a change."""
        self._changed()

    @on(Input.Changed)
    @on(TextArea.Changed)
    @on(Checkbox.Changed)
    def _changed(self) -> None:
        self._serial_of_form += 1
        self.after_pause(self._check_now)

    def _check_now(self) -> None:
        self._take()
        serial = self._serial_of_form

        def work() -> None:
            try:
                words, field = self.check(), None
            except (ActionError, ConfigError, OSError, ValueError) as error:
                words, field = str(error), getattr(error, "field", "")
            self.call_later(self._checked, serial, clean_text(words, MAX_CHECK_CHARS), field)

        self.run_worker(work, thread=True, group="check", name="check the form")

    def _checked(self, serial: int, words: CleanText, field: str | None) -> None:
        """Show what the form would do with its command, or a problem at its `field` ("": at none); of an older nothing.

        The button is disabled while there is a problem.
        """
        if serial != self._serial_of_form:
            return
        for problem in self.query(".problem").results(Static):
            is_here = problem.id == f"problem-{field}"
            is_wanted = is_here and not self._is_filled(field)
            problem.set_class(is_here, "-shown").set_class(is_wanted, "-wanted")
            problem.update(Content(f"{'' if is_wanted else '✖ '}{words}" if is_here else ""))
        self._serial_of_check = serial
        bad = field is not None
        check = self.query_one("#check", Static)
        check.update(Content("" if field else words))
        check.set_class(bad, "-bad")
        self.query_one("#do", Button).disabled = bad
        command = ""
        if not bad:
            with contextlib.suppress(ActionError):  # a form that is as before may make no job
                command = f"$ {self.job().command}"
        self.query_one("#command", Static).update(Content(command))

    @on(Button.Pressed, "#do")
    @on(Input.Submitted)
    def action_submit(self) -> None:
        """Start the job unless one is running; why the form makes none is shown."""
        if self.is_busy:
            return
        self._take()
        try:
            self.start(self.job())
        except ActionError as error:
            self.say(one_line(str(error), 400), failed=True)
