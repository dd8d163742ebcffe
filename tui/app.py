"""`prl-tui [OUTPUT_DIR] [--read-only]`: see all runs of a workspace, and act on them.

Reading order: `watcher` (threads) -> `messages` -> this app -> `screens` -> `widgets`. The app only hands on:
a new look at the workspace goes to every screen, an action's outcome too. Actions are in `acting` and `dialogs`, which
are not imported when read-only. Closing it stops nothing: the daemons keep running.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.filter import LineFilter
from textual.screen import Screen
from textual.theme import Theme

from prime_rl.utils.signals import EXIT_INTERRUPTED, EXIT_TERMINATED
from tui.memory import Memory
from tui.messages import ActionChanged, ActionEntry, WorkspaceChanged
from tui.palette import DARK
from tui.screens.base import MOVES, Place, ProbeMaker, Setting, ShowsAction, ShowsWorkspace, WorkspaceScreen
from tui.screens.places import HOME, PLACES, make_screen
from tui.themes import THEMES, add_row_colours, base_name, shown_name
from tui.type_ahead import KeysInOrder
from tui.watcher import ReadDisk, WorkspaceWatcher

MAX_ENTRIES = 500


class PrlApp(KeysInOrder):
    """The terminal view of one workspace."""

    TITLE = "prl"
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
    ) -> None:
        super().__init__()
        self._glyphs = glyphs
        self.setting = Setting(output_dir, clock, read_only, Memory(output_dir, memory_path), make_probe=make_probe)
        self._entries: dict[int, ActionEntry] = {}
        self.watcher = WorkspaceWatcher(output_dir, self.post_message, clock, read_disk, monotonic)

    def on_mount(self) -> None:
        if not self.is_headless:  # SIGTERM must restore the terminal too
            ended = partial(self.exit, return_code=EXIT_TERMINATED)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended)
        for theme in THEMES:
            self.register_theme(theme)
        known = self.setting.memory.theme
        chosen = known if known in self.available_themes else DARK.name
        self.theme = self.shown_theme(chosen)
        self.theme_changed_signal.subscribe(self, self._remember_theme)
        self.push_screen(make_screen(HOME, self.setting))
        self.run_worker(self.watcher.run, thread=True, name="watch the workspace")

    def shown_theme(self, chosen: str) -> str:
        """The variant of a theme for this terminal; without a terminal, the theme itself."""
        return chosen if self.is_headless else shown_name(chosen, self.console.color_system)

    def get_line_filters(self) -> Sequence[LineFilter]:
        filters = super().get_line_filters()
        return [*filters, self._glyphs] if self._glyphs is not None else filters

    def get_css_variables(self) -> dict[str, str]:
        variables = super().get_css_variables()
        add_row_colours(variables)
        return variables

    def on_unmount(self) -> None:
        self.watcher.stop()

    def action_interrupt(self) -> None:
        """Quit with the exit code of Ctrl-C."""
        self.exit(return_code=EXIT_INTERRUPTED)

    def on_workspace_changed(self, message: WorkspaceChanged) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, ShowsWorkspace):
                screen.show_workspace(message.snapshot)
        if not gc.isenabled():
            self.call_after_refresh(_collect_garbage)

    def entries(self) -> Sequence[ActionEntry]:
        return list(self._entries.values())

    def on_action_changed(self, message: ActionChanged) -> None:
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

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every key's action by name, then a jump to each run."""
        for active in screen.active_bindings.values():
            binding = active.binding
            name = binding.action.rpartition(".")[2].partition("(")[0]
            is_command = binding.description and active.enabled and not binding.system
            if is_command and name not in (*MOVES, "command_palette"):
                key = self.get_key_display(binding)
                yield SystemCommand(binding.description, f"key {key}", self._runner(active.node, binding.action))
        for place in PLACES:
            yield SystemCommand(place.title, f"key {place.key}", lambda name=place.name: self.go(name))
        if isinstance(screen, WorkspaceScreen) and screen.snapshot:
            for row in screen.snapshot.rows:
                yield SystemCommand(f"Open {row.run_id}", row.state, lambda run_id=row.run_id: self.open_run(run_id))
        yield SystemCommand("Theme", "dark, light and many others", self.action_change_theme)

    def _runner(self, owner: DOMNode, action: str) -> Callable[[], None]:
        async def run() -> None:
            await self.run_action(action, default_namespace=owner)

        return lambda: self.call_next(run)

    @property
    def places(self) -> Sequence[Place]:
        return PLACES

    def look_closely(self, closely: bool) -> None:
        self.watcher.is_watched_closely = closely
        self.watcher.wake()

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
            self._push(make_screen(name, self.setting))

    def go_number(self, number: int) -> None:
        for place in PLACES:
            if place.key == str(number):
                self.go(place.name)

    def open_run(self, run_id: str, compare: tuple[str, ...] = ()) -> None:
        from tui.screens.run import RunScreen

        kind = RunScreen
        if not self.setting.read_only:
            from tui.acting import acting

            kind = acting(RunScreen)
        self._push(kind(self.setting, run_id, compare))

    def _push(self, screen: WorkspaceScreen) -> None:
        home = self.screen_stack[1]
        if isinstance(home, WorkspaceScreen):
            screen.snapshot, screen.entry = home.snapshot, home.entry
        self.push_screen(screen)


def _collect_garbage() -> None:
    """From the first picture on, without the objects of the start: `cli` has switched it off."""
    gc.freeze()
    gc.enable()


def main(argv: Sequence[str] | None = None) -> int:
    """`prl-tui`, when this module is already imported."""
    from tui.cli import main

    return main(argv)


if __name__ == "__main__":
    sys.exit(main())
