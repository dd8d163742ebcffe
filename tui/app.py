"""`prl-tui [OUTPUT_DIR] [--read-only]`: see all runs of a workspace, and act on them.

Rooms, in the order in which data flows: `readers` (files) -> `model` -> `watcher` (threads) -> `messages` -> this app
-> `screens` -> `widgets`. The app only hands on: a new look at the workspace goes to every screen, an action's outcome
too. What acts is in `actions`, `dialogs` and the `acting*` screens, which are not imported when read-only. Closing it
stops nothing: the daemons keep running.

Over a slow line several keys come at once. Left alone, all of them go to the widget that has the focus when they come:
of `/step` the letters would be keys of the table, and of `:open` they would be lost. So each key is handled after the
one before it, where that one led.

Colours that a terminal does not have are rounded to others by the toolkit, and what differs by a shade becomes the
same or garish. So the themes for terminals of 256 and of 16 colours use only colours that such terminals have: the grey
ramp and the cube, or the sixteen. They are chosen by themselves; what is remembered is the theme that a person chose
(`base_name`).
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.style import Style
from rich.theme import Theme as RichTheme
from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.dom import DOMNode
from textual.filter import LineFilter
from textual.screen import Screen
from textual.theme import Theme
from textual.timer import Timer

from prime_rl.utils.process import EXIT_INTERRUPTED, EXIT_TERMINATED
from prime_rl.utils.text import one_line
from tui.memory import Memory
from tui.messages import ActionChanged, ActionEntry, ReadFailed, WorkspaceChanged
from tui.screens.base import (
    HOME,
    PLACES,
    Examine,
    ProbeMaker,
    Setting,
    ShowsAction,
    WorkspaceScreen,
)
from tui.watcher import ReadDisk, WorkspaceWatcher


def make_theme(name: str, colours: str, variables: Mapping[str, str]) -> Theme:
    """`colours` in the order of their names below; corners and the space behind bars are background."""
    primary, secondary, accent, foreground, background, surface, panel, success, warning, error = colours.split()
    behind = ("background", "background-hover", "background-active", "corner-color")
    return Theme(
        name=name,
        primary=primary,
        secondary=secondary,
        accent=accent,
        foreground=foreground,
        background=background,
        surface=surface,
        panel=panel,
        success=success,
        warning=warning,
        error=error,
        dark=Color.parse(background).brightness < 0.5,
        variables={
            "footer-background": background,
            "footer-key-foreground": accent,
            **{f"scrollbar-{part}": background for part in behind},
            **variables,
        },
    )


DARK = make_theme(
    "prl-dark",
    "#7aa2f7 #7dcfff #ff9e64 #c8d3f5 #16161e #1a1b26 #24283b #9ece6a #e0af68 #f7768e",
    {
        "footer-description-foreground": "#8089b3",
        "block-cursor-foreground": "#16161e",
        "block-cursor-background": "#7aa2f7",
        "border": "#3b4261",
        "border-blurred": "#2a2e45",
        "scrollbar": "#2f344d",
        "scrollbar-hover": "#3b4261",
        "scrollbar-active": "#7aa2f7",
        "input-selection-background": "#7aa2f7 35%",
    },
)
LIGHT = make_theme(
    "prl-light",
    "#2e5aac #00708a #b15c00 #2b3048 #f4f4f7 #fbfbfd #e6e7ee #3d7a1f #8a5a00 #c0264b",
    {
        "footer-description-foreground": "#5b6180",
        "border": "#b4b9cf",
        "border-blurred": "#d3d6e3",
        "scrollbar": "#c9cddd",
    },
)


_NAMED = ("accent", "primary", "secondary", "success", "warning", "error")


def text_styles(variables: Mapping[str, str]) -> RichTheme:
    """Names for the colours of a theme (`App.theme_variables`), for text that is built by hand: "muted", "bold accent".

    "text" is the foreground; "muted" and "faint" lie between it and the background.
    """
    text, background = Color.parse(variables["foreground"]), Color.parse(variables["background"])
    colours = {name: Color.parse(variables[name]) for name in _NAMED}
    colours |= {"text": text, "muted": text.blend(background, 0.36), "faint": text.blend(background, 0.72)}
    styles: dict[str, Style] = {}
    for name, colour in colours.items():
        plain = Style(color=colour.hex6)
        bold = plain + Style(bold=True)
        styles |= {name: plain, f"bold {name}": bold, f"bold {name} reverse": bold + Style(reverse=True)}
    return RichTheme(styles)


# Backgrounds of rows: how much of a colour is mixed into the background unless a theme sets it.
ROWS = {"row-cursor": ("primary", 0.28), "row-blurred": ("primary", 0.18), "row-hover": ("primary", 0.08)}
ROWS["row-marked"] = ("accent", 0.16)


def _plain(panel: str, cursor: str, marked: str, hover: str, line: str, muted: str) -> dict[str, str]:
    """Theme variables without a shade that is not named."""
    return {
        "row-cursor": cursor,
        "row-blurred": cursor,
        "row-marked": marked,
        "row-hover": hover,
        "border": line,
        "border-blurred": line,
        "scrollbar": line,
        "block-cursor-background": cursor,
        "input-selection-background": cursor,
        "block-hover-background": panel,
        "footer-description-foreground": muted,
    }


DARK_256 = make_theme(
    "prl-dark-256",
    "#87afff #87d7ff #ffaf5f #d0d0d0 #121212 #1c1c1c #303030 #87d75f #d7af5f #ff5f87",
    _plain("#303030", "#4e4e4e", "#303030", "#262626", "#585858", "#8a8a8a"),
)
DARK_16 = make_theme(
    "prl-dark-16",
    "#55ffff #55ffff #ffff55 #ffffff #000000 #000000 #000000 #55ff55 #ffff55 #ff5555",
    _plain("#000000", "#0000aa", "#000000", "#000000", "#aaaaaa", "#aaaaaa") | {"block-cursor-foreground": "#ffffff"},
)
LIGHT_16 = make_theme(
    "prl-light-16",
    "#0000aa #0000aa #aa00aa #000000 #ffffff #ffffff #ffffff #00aa00 #aa5500 #aa0000",
    _plain("#ffffff", "#aaaaaa", "#ffffff", "#ffffff", "#555555", "#555555") | {"block-cursor-foreground": "#000000"},
)
THEMES = (DARK, LIGHT, DARK_256, DARK_16, LIGHT_16)
# (theme that was chosen, colours of the terminal as Rich names them) -> the theme that is shown.
_SHOWN = {
    (DARK.name, "256"): DARK_256.name,
    (DARK.name, "standard"): DARK_16.name,
    (LIGHT.name, "standard"): LIGHT_16.name,
}


def shown_name(chosen: str, color_system: str | None) -> str:
    """The theme to show where `chosen` was chosen, in a terminal of these colours."""
    return _SHOWN.get((chosen, color_system or ""), chosen)


def base_name(shown: str) -> str:
    """The theme that a person chose, from the one that is shown."""
    return next((chosen for (chosen, _), name in _SHOWN.items() if name == shown), shown)


def add_row_colours(variables: dict[str, str]) -> None:
    """Fill in the backgrounds of rows that the theme does not name."""
    background = Color.parse(variables["background"])
    for name, (colour, share) in ROWS.items():
        variables.setdefault(name, background.blend(Color.parse(variables[colour]), share).hex6)


MAX_ENTRIES = 500
# When the widget that was to handle a key was removed, nothing reports the key as handled.
GIVE_UP_S = 0.5
# Never held up by other keys.
AT_ONCE = ("ctrl+c", "ctrl+q")


class KeysInOrder(App[None]):
    """An app that passes on a key when the one before it was handled, with all that it did to the focus."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._keys: deque[events.Key] = deque()
        self._num_handled = 0
        self._giving_up: Timer | None = None

    async def on_event(self, event: events.Event) -> None:
        """Hold back a key until those before it are handled; other events and the keys of AT_ONCE pass at once."""
        if not isinstance(event, events.Key) or event.is_forwarded or event.key in AT_ONCE:
            await super().on_event(event)
            return
        self._keys.append(event)
        if len(self._keys) == 1:
            await self._pass_on(event)

    async def _pass_on(self, event: events.Key) -> None:
        number, target = self._num_handled, self.focused or self.screen
        await super().on_event(event)

        def handled() -> None:
            # After what the key asked for: a line that is shown from the next refresh on, and then gets the focus.
            if self.screen_stack:  # else the app ends
                self.screen.call_after_refresh(self.call_later, self._next, number)

        def follow(path: Sequence[DOMNode]) -> None:
            for place, node in enumerate(path, start=1):
                if node.call_later(follow, path[place:]):  # else it is gone
                    return
            handled()

        # The way of the key itself, from the widget up to the app, which looks at the bindings; and of the message that
        # a binding may send the same way.
        follow([*target.ancestors_with_self, *target.ancestors_with_self])
        self._giving_up = self.set_timer(GIVE_UP_S, handled)

    async def _next(self, number: int) -> None:
        if number != self._num_handled:
            return
        if self._giving_up is not None:
            self._giving_up.stop()
        self._num_handled += 1
        self._keys.popleft()
        if self._keys and self.screen_stack:
            await self._pass_on(self._keys[0])


class PrlApp(KeysInOrder):
    """The terminal view of one workspace."""

    TITLE = "prl"
    _has_styles = False
    _is_starting = False
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True),
        Binding("ctrl+c", "interrupt", "Quit", show=False, priority=True),
    ]

    def __init__(
        self,
        output_dir: Path,
        *,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
        read_disk: ReadDisk | None = None,
        memory_path: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        make_probe: ProbeMaker | None = None,
        glyphs: LineFilter | None = None,
        is_demo: bool = False,
        examine: Examine | None = None,
    ) -> None:
        super().__init__()
        self._glyphs = glyphs
        self.setting = Setting(
            output_dir,
            clock,
            read_only,
            Memory(output_dir, memory_path),
            make_probe=make_probe,
            is_demo=is_demo,
            examine=examine,
        )
        self._entries: dict[int, ActionEntry] = {}
        self.watcher = WorkspaceWatcher(output_dir, self.post_message, clock, read_disk, monotonic)

    def on_mount(self) -> None:
        """Set the theme that was chosen last, open home and start the thread that watches the workspace.

        SIGTERM then ends the app with EXIT_TERMINATED, unless it runs without a terminal.
        """
        if not self.is_headless:  # SIGTERM must restore the terminal too
            ended = partial(self.exit, return_code=EXIT_TERMINATED)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended)
        for theme in THEMES:
            self.register_theme(theme)
        known = self.setting.memory.theme
        chosen = known if known in self.available_themes else DARK.name
        self.theme = self.shown_theme(chosen)
        self.theme_changed_signal.subscribe(self, self._remember_theme)
        self.push_screen(self._place(HOME))
        self.run_worker(self.watcher.run, thread=True, name="watch the workspace")

    def shown_theme(self, chosen: str) -> str:
        """The variant of a theme for this terminal; without a terminal, the theme itself."""
        return chosen if self.is_headless else shown_name(chosen, self.console.color_system)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's filters, then the one for plainer characters where this terminal needs it."""
        filters = super().get_line_filters()
        return [*filters, self._glyphs] if self._glyphs is not None else filters

    def get_css_variables(self) -> dict[str, str]:
        """The variables of the theme, with its backgrounds of rows; the console gets the text styles of the same theme.

        Textual calls it at the start and whenever the theme changes.
        """
        variables = super().get_css_variables()
        add_row_colours(variables)
        # The names that text is styled with are those of this theme too.
        if self._has_styles:
            self.console.pop_theme()
        self.console.push_theme(text_styles(variables))
        self._has_styles = True
        return variables

    def on_unmount(self) -> None:
        """Stop the thread that watches the workspace."""
        self.watcher.stop()

    def action_interrupt(self) -> None:
        """Quit with the exit code of Ctrl-C."""
        self.exit(return_code=EXIT_INTERRUPTED)

    def on_workspace_changed(self, message: WorkspaceChanged) -> None:
        """Hand the snapshot to every screen of the stack that shows the workspace, covered ones too."""
        for screen in self.screen_stack:
            if isinstance(screen, WorkspaceScreen):
                screen.show_workspace(message.snapshot)
        self.call_after_refresh(self._drawn_once)

    def _drawn_once(self) -> None:
        """From the first picture on garbage is collected: `cli` has switched it off.

        What the start made is left out, and then what the first whole look has read: it stays, and keys would wait
        while a thousand runs are looked through.
        """
        self.watcher.drawn()
        if not gc.isenabled():
            self._is_starting = True
            gc.freeze()
            gc.enable()
        elif self._is_starting and self.watcher.is_caught_up:
            self._is_starting = False
            gc.freeze()

    def entries(self) -> Sequence[ActionEntry]:
        """The newest MAX_ENTRIES actions of this session, oldest first."""
        return list(self._entries.values())

    def on_read_failed(self, message: ReadFailed) -> None:
        """Say why the open tab stays as it is."""
        self.notify(f"This view cannot be read: {one_line(message.why)}", severity="error", markup=False)

    def on_action_changed(self, message: ActionChanged) -> None:
        """Keep the action and hand it to the screens; a failure is notified, and at its end the watcher looks again."""
        entry = message.entry
        self._entries[entry.serial] = entry
        for serial in list(self._entries)[:-MAX_ENTRIES]:
            del self._entries[serial]
        for screen in self.screen_stack:
            if isinstance(screen, ShowsAction):
                screen.show_action(entry)
        if entry.state == "failed":
            self.notify(entry.text, title=f"$ {entry.command}", severity="error", timeout=10, markup=False)
        if entry.state != "running":
            self.watcher.wake()

    async def run_action(
        self, action: Any, default_namespace: DOMNode | None = None, *args: Any, **kwargs: Any
    ) -> bool:
        """Do what a key asks for; where it has no effect on a screen, tell why."""
        if isinstance(default_namespace, WorkspaceScreen) and (why := default_namespace.why_not(action)):
            self.notify(why, severity="warning", markup=False)
        return await super().run_action(action, default_namespace, *args, **kwargs)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Of ctrl+p: the commands of the screen."""
        for command in screen.commands().values() if isinstance(screen, WorkspaceScreen) else ():
            if command.alone:
                yield SystemCommand(command.title, f"key {command.key}" if command.key else command.help, command.alone)
            for word, note in command.words().items() if command.is_listed else ():
                yield SystemCommand(f"{command.title} {word}", note, partial(command.run, word))

    def look_closely(self, closely: bool) -> None:
        """Let the watcher look at the workspace more often, or as often as usual."""
        self.watcher.look_closely(closely)

    def save_memory(self) -> None:
        """In a thread: a home on a slow disk must not block the keys."""
        self.run_worker(self.setting.memory.save, thread=True, group="memory", name="remember")

    def _remember_theme(self, theme: Theme) -> None:
        chosen = base_name(theme.name)
        if chosen != (self.setting.memory.theme or DARK.name):
            self.setting.memory.theme = chosen
            self.save_memory()

    def go(self, name: str) -> None:
        """Show the place of that name. Home stays below all others, so that esc leads back to it."""
        while len(self.screen_stack) > 2:
            self.pop_screen()
        if name != HOME:
            self._push(self._place(name))

    def _place(self, name: str) -> WorkspaceScreen:
        return next(place for place in PLACES if place.name == name).make(self.setting)

    def go_number(self, number: int) -> None:
        """Show the place with that number key; a number without a place has no effect."""
        for place in PLACES:
            if place.key == str(number):
                self.go(place.name)

    def open_run(self, run_id: str, compare: tuple[str, ...] = ()) -> None:
        """Imported here: the app starts faster without it."""
        if self.setting.read_only:
            from tui.screens.run import RunScreen

            self._push(RunScreen(self.setting, run_id, compare))
        else:
            from tui.screens.acting_places import ActingRunScreen

            self._push(ActingRunScreen(self.setting, run_id, compare))

    def _push(self, screen: WorkspaceScreen) -> None:
        home = self.screen_stack[1]
        if isinstance(home, WorkspaceScreen):
            screen.snapshot = home.snapshot
            running = home.entry is not None and home.entry.state == "running"
            screen.entry = home.entry if running else None  # what has ended is not told on the next screen
        self.push_screen(screen)
